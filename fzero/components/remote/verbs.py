"""What calls do on a rank: a step's verbs over its share, so that all together are those of the whole batch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.checkpoint.load import load
from fzero.checkpoint.save import save
from fzero.components.remote.part import Operands, Part, Pulled
from fzero.components.remote.values import Name, Piece, device_of, whole
from fzero.components.remote.wire import Slot, packed, slots_of
from fzero.engine.passes import Passes
from fzero.state.gather import gather, measured
from fzero.table.microbatch import Microbatches
from fzero.update.update import with_kept


class Results(NamedTuple):
    """What a call makes: values by their place, and the trees that the caller puts handles into."""

    values: dict[int, object]
    trees: object = None


def _is_tensor(node: object) -> bool:
    return isinstance(node, torch.Tensor)


def _returned(
    part: Part, operands: Operands, *trees: object, first: int = 0
) -> tuple[dict[int, object], tuple[Any, ...]]:
    """The pieces of the tensors of some trees, from place 1 on, and the skeletons.

    Args:
        first: the number of the first tree among what the function returned: outputs, then aux.
    """
    values: dict[int, object] = {}
    skeletons = []
    for number, tree in enumerate(trees, first):
        own = packed(tree, _is_tensor, "aux" if number else "outputs")
        values.update(enumerate(part.pieces(number, own, operands), len(values) + 1))
        skeletons.append(own.skeleton)
    return values, tuple(skeletons)


def _vjp(part: Part, operands: Operands) -> Results:
    argnums = operands.options["argnums"]
    part.need_microbatches(operands)
    own = part.step.vjp(operands.objects["state"], *operands.inputs, argnums=argnums, rng=operands.options["rng"])
    outputs, pullback, *aux = own
    values, skeletons = _returned(part, operands, outputs, *aux)
    pulled = _pulled(part, operands, outputs, pullback, values)
    wanted = _differentiated(operands, range(len(operands.inputs)) if argnums is None else argnums)
    alone = isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point()
    return Results({0: pulled, **values}, (skeletons, wanted, alone))


def _differentiated(operands: Operands, chosen: Container[int]) -> tuple[bool, ...]:
    """Which tensors of the inputs have cotangents."""
    wanted: list[bool] = []
    for place, tree in enumerate(operands.inputs):
        wanted += [place in chosen and pytree.is_real(x) for x in packed(tree, _is_tensor, "inputs").leaves]
    return tuple(wanted)


def _pulled(part: Part, operands: Operands, outputs: object, pullback: object, values: dict[int, object]) -> Pulled:
    own = packed(outputs, _is_tensor, "outputs")
    flat, spec = pytree.flatten(slots_of(own.skeleton))
    names: list[Name | None] = [(operands.call, x.number + 1) if isinstance(x, Slot) else None for x in flat]
    pieces = [values[name[1]] if name else None for name in names]
    factors = [part.factor(piece) if isinstance(piece, Piece) else 1.0 for piece in pieces]
    flat_inputs = [pytree.flatten(tree)[0] for tree in slots_of(operands.skeleton)]
    places = [[x.number if isinstance(x, Slot) else None for x in own] for own in flat_inputs]
    return Pulled(pullback, spec, names, factors, places, operands.dims)


def _input_pieces(part: Part, pulled: Pulled, cotangents: Sequence[Any]) -> dict[int, object]:
    values: dict[int, object] = {}
    for tree, places in zip(cotangents, pulled.places, strict=True):
        for place, leaf in zip(places, pytree.flatten(tree)[0] if tree is not None else (), strict=False):
            if place is not None and leaf is not None:
                values[place + 1] = part.input_piece(leaf, pulled.dims[place])
    return values


def _pull(part: Part, operands: Operands) -> Results:
    pulled: Pulled = operands.objects["pullback"]
    halves, retain = operands.options["halves"], operands.options["retain_graph"]
    if halves == "params":
        return Results({0: part.grads(pulled.pullback.params())})
    if halves == "inputs":
        return Results(_input_pieces(part, pulled, pulled.pullback.inputs(operands.cotangent, retain_graph=retain)))
    grads, cotangents = pulled.pullback(operands.cotangent, retain_graph=retain)
    return Results({0: part.grads(grads), **_input_pieces(part, pulled, cotangents)})


def _forward(part: Part, operands: Operands) -> Results:
    part.need_microbatches(operands)
    out = part.step.forward(operands.objects["state"], *operands.inputs, rng=operands.options["rng"])
    return Results(*_returned(part, operands, *(out if part.step.has_aux else (out,))))


def _metrics(metrics: dict[str, Any], part: Part, operands: Operands) -> tuple[dict[int, object], Any]:
    """The values of metrics, which are the same on all ranks but for what the function itself returned as aux."""
    own = {name: value for name, value in metrics.items() if name != "aux"}
    skeleton, leaves = packed(own, _is_tensor, "metrics")
    values: dict[int, object] = {place: whole(x.detach()) for place, x in enumerate(leaves, 1)}
    skeletons: tuple[Any, ...] = (skeleton,)
    if "aux" in metrics:
        more, (aux,) = _returned(part, operands, metrics["aux"], first=1)
        values.update({len(leaves) + place: piece for place, piece in more.items()})
        skeletons = (skeleton, aux)
    return values, skeletons


def _update(part: Part, operands: Operands) -> Results:
    objects = operands.objects
    norm = operands.options["grad_norm"]
    norm = norm.to(device_of(part.params)) if isinstance(norm, torch.Tensor) else norm
    state, metrics = part.step.update(objects["state"], objects["grads"], grad_norm=norm)
    values, skeletons = _metrics(metrics, part, operands)
    return Results({0: state, **values}, skeletons)


@dataclass(frozen=True)
class _Weighted:
    """A function whose loss is taken times a weight, so that the mean over ranks of uneven shares is the batch's."""

    fn: Callable[..., Any]
    weight: float
    has_aux: bool

    def __call__(self, params: Any, *inputs: Any) -> Any:
        out = self.fn(params, *inputs)
        loss, rest = (out[0], tuple(out[1:])) if self.has_aux else (out, ())
        if isinstance(loss, torch.Tensor) and loss.ndim == 0:
            loss = loss * self.weight
        return (loss, *rest) if self.has_aux else loss


def _step(part: Part, operands: Operands) -> Results:
    """A whole step of a loss."""
    step, state, rng = part.step, operands.objects["state"], operands.options["rng"]
    part.need_microbatches(operands)
    weight = part.weight(operands.shares) * part.place.means
    if weight != 1.0:
        step = dataclasses.replace(step, fn=_Weighted(step.fn, weight, step.has_aux))
    state, metrics = step(state, *operands.inputs, rng=rng)
    values, skeletons = _metrics(metrics, part, operands)
    return Results({0: state, **values}, skeletons)


def _passes(part: Part, operands: Operands) -> Results:
    step = dataclasses.replace(part.step, microbatches=Microbatches(operands.options["count"]))
    return Results({0: Passes(step, operands.objects["state"], **operands.options)})


def _pass_forward(part: Part, operands: Operands) -> Results:
    passes, microbatch, chosen = operands.objects["passes"], operands.options["microbatch"], operands.options["wanted"]
    if chosen is None:  # without gradients
        return Results(*_returned(part, operands, *passes.outputs(microbatch, operands.inputs)))
    outputs, aux = passes.forward(microbatch, operands.inputs, chosen)
    values, skeletons = _returned(part, operands, outputs, aux)
    pulled = _pulled(part, operands, outputs, None, values)
    return Results({0: pulled, **values}, (skeletons, _differentiated(operands, chosen), False))


def _pass_pull(part: Part, operands: Operands) -> Results:
    own, passes = operands.options, operands.objects["passes"]
    pull = passes.backward if own["halves"] == "both" else passes.inputs
    cotangents = pull(own["microbatch"], operands.cotangent, own["retain_graph"])
    return Results({0: None, **_input_pieces(part, operands.objects["pullback"], cotangents)})


def _passes_do(name: str) -> Callable[[Part, Operands], Results]:
    """A verb that changes passes, and makes nothing."""

    def run(part: Part, operands: Operands) -> Results:
        getattr(operands.objects["passes"], name)(**operands.options)
        return Results({0: None})

    return run


def _gather(part: Part, operands: Operands) -> Results:
    skeleton, leaves = packed(gather(_tree(operands), operands.options["pattern"]), _is_tensor, "gather")
    pieces = [whole(x) if part.place.means == part.ranks else part.digested(whole(x)) for x in leaves]
    return Results({**dict(enumerate(pieces, 1))}, (skeleton,))


def _tree(operands: Operands) -> Any:
    """A tree of a state, or grads."""
    tree, what = operands.objects["tree"], operands.options["what"]
    return getattr(tree, what) if what else tree


def _squares(part: Part, operands: Operands) -> Results:
    tree = _tree(operands)
    if "state" in operands.objects:
        tree = with_kept(operands.objects["state"], tree)
    (squares,) = measured([tree])
    return Results({1: whole(squares)})


def _save(part: Part, operands: Operands) -> Results:
    save(operands.options["path"], operands.objects["state"], json.loads(operands.options["extra"]))
    return Results({})


def _load(part: Part, operands: Operands) -> Results:
    own = operands.options
    options = {name: own[name] for name in own if name != "path"}
    return Results({0: load(own["path"], part.step, like=part.params, **options)})


RUN: dict[str, Callable[[Part, Operands], Results]] = {
    "init": lambda part, own: Results({0: part.step.init(part.params, **own.options)}),
    "vjp": _vjp,
    "pull": _pull,
    "forward": _forward,
    "update": _update,
    "add_grads": lambda part, own: Results({0: part.step.add_grads(own.objects["state"], own.objects["grads"])}),
    "step": _step,
    "passes": _passes,
    "pass_forward": _pass_forward,
    "pass_pull": _pass_pull,
    "pass_params": _passes_do("params"),
    "pass_reduce": _passes_do("reduce"),
    "pass_begin": _passes_do("begin"),
    "pass_grads": lambda part, own: Results({0: part.grads(own.objects["passes"].grads(**own.options))}),
    "gather": _gather,
    "squares": _squares,
    "look": lambda part, own: Results({}, [(what, getattr(own.objects["state"], what)) for what in ("step", "seed")]),
    "spans": lambda part, own: Results({}, part.spans()),
    "save": _save,
    "load": _load,
}
