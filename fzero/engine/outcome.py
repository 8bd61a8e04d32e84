"""What one run of the step's function returned, which cotangents it takes, and where those of its inputs belong."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import NoneType
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.context import in_differentiated
from fzero.base.ragged import places_in
from fzero.base.rebound import tensors_inside
from fzero.engine.masking import is_given, kept
from fzero.engine.pullback import used_up
from fzero.state.train_state import TrainState
from fzero.stores.away import Buffer
from fzero.table.counting import Mask
from fzero.table.layout import Key
from fzero.table.spec import Spec


class Outcome:
    """What a run returned: `outputs`, `aux`, until somebody takes them.

    Args:
        argnums: the inputs to differentiate, which must float; of those in a set, what floats.
        scale: what cotangents are multiplied by.
        mask: whether it adds anything to gradients.

    Attributes:
        count: the number of the flat inputs.
        wanted: the places of those that are differentiated.
    """

    outputs: Any
    aux: object
    collected: dict[str, list[torch.Tensor]]  # by fz.collect, detached
    _pull: Callable[..., Any] | None  # by its graph

    def __init__(
        self, state: TrainState, inputs: Sequence[object], argnums: Collection[int] | None, scale: float, mask: Mask
    ) -> None:
        self.mask = mask
        self.state: TrainState | None = state
        self.scale = scale
        self.count = len(pytree.flatten(tuple(inputs))[0])
        self.wanted = wanted_of(inputs, argnums)

    def _note(
        self,
        returned: tuple[pytree.Split, pytree.Split],
        real: Sequence[torch.Tensor],
        others: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    ) -> None:
        """Notes what came back: the differentiable outputs, the other tensors among the outputs, and those of aux."""
        self.returned = returned[0]
        self.outputs, self.aux = returned[0].join(real, others[0]), returned[1].join(others[1])
        self.meta = [(tuple(o.shape), o.dtype, o.device) for o in real]

    def _note_collected(self, collected: dict[str, list[torch.Tensor]]) -> None:
        """Notes what the function has collected, while its level of torch.func is there."""
        level = private.level()
        self.collected = {
            name: [private.inner(x) if level and private.level_of(x) == level else x.detach() for x in own]
            for name, own in collected.items()
        }
        collected.clear()

    def is_used_up(self) -> bool:
        return self._pull is None

    def need_graph(self) -> None:
        """Refuses a forward that was pulled back already, or whose state is gone."""
        if self.is_used_up() or self.state is None:
            raise RuntimeError(used_up("this forward"))
        self.state.params  # noqa: B018 - a donated state says so

    def scaled(self, cotangent: object) -> list[torch.Tensor]:
        """The scaled cotangents of the real outputs."""
        cotangents = self.check(cotangent)
        if self.mask.partial:
            self.mask.given = is_given(cotangents)
        return [c * self.scale for c in cotangents] if self.scale != 1.0 else cotangents

    def _placed(self, wanted: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Cotangents of the flat inputs, None where there is none."""
        out: list[torch.Tensor | None] = [None] * self.count
        for place, value in zip(self.wanted, wanted, strict=True):
            own = kept(self.mask, value)
            out[place] = own / self.scale if self.scale != 1.0 else own
        return out

    def check_structure(self, cotangent: object) -> None:
        need_structure(cotangent, self.returned.spec)

    def check(self, cotangent: object) -> list[torch.Tensor]:
        """The cotangents of the real outputs, zeros for `None`; anything else that does not fit is refused."""
        leaves = need_structure(cotangent, self.returned.spec)
        out = list[torch.Tensor]()
        for place, (shape, dtype, device) in zip(self.returned.places[0], self.meta, strict=True):
            leaf = leaves[place]
            if leaf is None:
                leaf = torch.zeros(shape, dtype=dtype, device=device)
            of = (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else None
            if not isinstance(leaf, torch.Tensor) or of != (shape, dtype, device):
                name = pytree.named_leaves(cotangent)[0][place] or "the output"
                raise ValueError(
                    f"cotangent of {name}: got {of or type(leaf).__name__}, expected {(shape, dtype, device)}, the "
                    "shape, dtype and device of the output. Convert it with .to(...), or pass the cotangent of this "
                    "forward's own output."
                )
            out.append(leaf)
        return out


def split_both(step: Spec, result: object) -> tuple[pytree.Split, pytree.Split]:
    """What a function returned, split: outputs that have cotangents from others, tensors of aux from others."""
    out, aux = split_result(step, result)
    outputs, others = pytree.Split(out, is_differentiable, pytree.is_tensor), pytree.Split(aux, pytree.is_tensor)
    for leaf in (*outputs.others, *others.others):
        refuse_hidden(leaf)
    if not outputs.leaves[0]:
        raise nothing_to_pull(out)
    return outputs, others


def tensors_of(sums: Mapping[Key, Buffer] | None) -> dict[Key, torch.Tensor]:
    """Those of some sums that lie on the device."""
    return {key: x for key, x in (sums or {}).items() if isinstance(x, torch.Tensor)}


def is_transformed(cotangent: object) -> bool:
    """Tells whether somebody differentiates, or maps, what a cotangent is pulled back to."""
    if private.transforms() or not in_differentiated():
        return private.transforms()
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.leaves(cotangent))


def need_structure(cotangent: object, expected: pytree.Spec | None) -> list[object]:
    """The leaves of a cotangent; one of another structure than the outputs' is refused."""
    leaves, spec = pytree.flatten(cotangent)
    if spec != expected:
        raise ValueError(
            f"cotangent: got the structure {spec}, expected that of the outputs, {expected}. "
            "Give one cotangent per output, in the same containers; None counts as zero."
        )
    return leaves


NO_FIRST_HALF = (
    "The pullback of this forward has no cotangent to pull back to its params: params() comes once after each "
    "inputs(cotangent). Call inputs(cotangent) first, with retain_graph=True to call both again later."
)


def is_differentiable(value: object) -> bool:
    """Tells whether a value is a tensor of real or complex numbers."""
    return isinstance(value, torch.Tensor) and pytree.is_real(value)


def refuse_hidden(value: object) -> None:
    """Refuses an output that hides tensors, whose derivative nobody could ask for."""
    if not isinstance(value, (torch.Tensor, NoneType)) and tensors_inside(value):
        raise TypeError(
            f"step: the function returned a {type(value).__name__} that holds tensors and is no pytree; expected "
            "tensors in dicts, lists, tuples and NamedTuples. Return its fields, or register the class with "
            "optree.register_pytree_node."
        )


def wanted_of(inputs: Sequence[object], argnums: Collection[int] | None) -> list[int]:
    """Flat positions of the input tensors to differentiate."""
    if argnums == ():
        return []
    out, place, lengths = [], 0, {*places_in(tuple(inputs)).values()}
    for number, tree in enumerate(inputs):
        for leaf in pytree.flatten(tree)[0]:
            chosen = argnums is None or number in argnums
            if chosen and is_differentiable(leaf):
                out.append(place)
            elif (
                chosen
                and isinstance(leaf, torch.Tensor)
                and place not in lengths
                and not isinstance(argnums, (frozenset, NoneType))
            ):
                raise TypeError(
                    f"argnums: input {number} has a tensor of dtype {leaf.dtype}, which has no gradient; "
                    "expected floating tensors. Leave it out of argnums."
                )
            place += 1
    return out


def nothing_to_pull(outputs: object) -> ValueError:
    """The error for a function that returned nothing that has a cotangent."""
    return ValueError(
        f"step: the function returned {_returned(outputs)}, expected a floating tensor to pull back from: a scalar "
        "loss (0-d), or outputs with a cotangent of their own. Leave .item() and float(...) out of the function."
    )


def split_result(step: Spec, result: object) -> tuple[object, object]:
    """(outputs, aux) of what the function returned; aux is None where the step has none.

    Of a step that carries something it is (aux, new carry).
    """
    if step.carries:
        expected = "((outputs, aux), new carry)" if step.has_aux else "(outputs, new carry)"
        result, carry = _pair(result, expected, "as the step was made by fz.carry")
    outputs, aux = _pair(result, "(outputs, aux)", "as the step has has_aux=True") if step.has_aux else (result, None)
    return outputs, (aux, carry) if step.carries else aux


def _pair(result: object, expected: str, why: str) -> tuple[object, object]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else named(result)
        raise TypeError(
            f"step: the function returned {got}: got no pair, expected {expected}, {why}. Return both, or leave that "
            "out."
        )
    return result[0], result[1]


def scalar_loss(outputs: object, who: str = "step(state, *inputs)") -> torch.Tensor:
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point():
        return outputs
    raise ValueError(
        f"{who}: the function returned {_returned(outputs)}, expected a scalar loss (a 0-d floating tensor). "
        "Reduce it (.mean()) and leave .item() out, or pass cotangent= for outputs that are not a scalar; has_aux=True "
        "for (loss, aux)."
    )


def _returned(outputs: object) -> str:
    tensors = [leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return named(outputs) + (f" with {named(tensors[0])}" if tensors and tensors[0] is not outputs else "")
