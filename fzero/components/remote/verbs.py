"""What calls do on a rank: a step's verbs, over this rank's share, so that all together are those of the whole batch.

A pullback on n data ranks gives the mean of theirs. A cotangent of joined rows is therefore taken times n, one of a
mean times n and the rank's share of the examples, and input cotangents are divided by n.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.checkpoint.load import load
from fzero.checkpoint.save import save
from fzero.components.remote.layout import Layout
from fzero.components.remote.link import Place
from fzero.components.remote.values import Name, Piece
from fzero.components.remote.wire import LEAF, packed, unpacked
from fzero.engine.passes import Passes
from fzero.state.gather import gather, measured
from fzero.update.update import with_kept

HALVES = ("", "both", "inputs", "params")
KEPT = 4096  # calls whose times a rank remembers until somebody asks


@dataclass
class Operands:
    """What a call works on, on one rank.

    Attributes:
        objects: states, grads and pullbacks, by what they are for.
        split: of the tensors of the inputs in order, which are split over data ranks.
        examples, total: this rank's rows of those, and all.
    """

    objects: dict[str, Any]
    options: dict[str, Any]
    inputs: tuple[Any, ...] = ()
    skeleton: Any = LEAF
    split: list[bool] = field(default_factory=list)
    examples: int = 1
    total: int = 0
    cotangent: Any = None


@dataclass
class Part:
    """What `build` gave a rank, and its place in its component."""

    step: Any
    params: object
    place: Place
    _spans: collections.deque[tuple[float, ...]] = field(default_factory=lambda: collections.deque(maxlen=KEPT))

    def ran(self, verb: str, options: Mapping[str, Any], begun: float) -> None:
        """Notes that a call was run, from a time until now."""
        own = NAMES.index(verb), options.get("microbatch", -1), HALVES.index(options.get("halves", ""))
        self._spans.append((*own, begun, time.monotonic()))

    def spans(self) -> torch.Tensor:
        """What was noted since it was last asked for: [calls, verb, microbatch, half, start and end], float64."""
        found = torch.tensor(list(self._spans), dtype=torch.float64, device="cpu").reshape(-1, 5)
        self._spans.clear()
        return found

    @property
    def data_size(self) -> int:
        return self.place.data_size

    @property
    def copies(self) -> int:
        """How many of the ranks that the step takes means over get the same examples."""
        return self.place.means // self.place.data_size

    def share(self, operands: Operands, times: int = 1) -> float:
        """This rank's share of the examples, times a number."""
        examples, total = (operands.examples, operands.total) if operands.total else (1, self.data_size)
        return times * examples / total

    def piece(self, tensor: torch.Tensor, operands: Operands) -> Piece:
        """An output's part."""
        tensor, split = tensor.detach(), any(operands.split)
        if not tensor.ndim and pytree.is_real(tensor):
            return Piece("mean", tensor, self.share(operands) / self.copies)
        return Piece("rows" if tensor.ndim and split else "alike" if split else "same", tensor)

    def factor(self, piece: Piece, operands: Operands) -> float:
        """By what a cotangent of an output is multiplied."""
        by_kind = {"rows": float(self.data_size), "mean": self.share(operands, self.data_size)}
        return by_kind.get(piece.kind, 1.0)


@dataclass
class Pulled:
    """A pullback on one rank, and what cotangents of the whole outputs become for it.

    Attributes:
        spec: of the outputs.
        names, factors: of their leaves, by place; no tensor has no name.
        places: of the flat inputs, the numbers of the tensors among them.
        layouts: of the outputs over all data ranks, as far as they were asked for.
    """

    pullback: Any
    spec: pytree.Spec
    names: list[Name | None]
    factors: list[float]
    places: list[list[int | None]]
    split: list[bool]
    layouts: dict[int, Layout] = field(default_factory=dict)
    grads: Any = None


class Results(NamedTuple):
    """What a call makes: values by their place, and the trees that the caller puts handles into."""

    values: dict[int, object]
    trees: object = None


class _Place(NamedTuple):
    number: int


def _is_tensor(node: object) -> bool:
    return isinstance(node, torch.Tensor)


def _returned(part: Part, operands: Operands, *trees: object) -> tuple[dict[int, object], tuple[Any, ...]]:
    """The pieces of the tensors of some trees, from place 1 on, and the skeletons."""
    values: dict[int, object] = {}
    skeletons = []
    for number, tree in enumerate(trees):
        own = packed(tree, _is_tensor, "aux" if number else "outputs")
        for tensor in own.leaves:
            values[len(values) + 1] = part.piece(tensor, operands)
        skeletons.append(own.skeleton)
    return values, tuple(skeletons)


def _init(part: Part, operands: Operands, number: int) -> Results:
    return Results({0: part.step.init(part.params, **operands.options)})


def _vjp(part: Part, operands: Operands, number: int) -> Results:
    argnums = operands.options["argnums"]
    own = part.step.vjp(operands.objects["state"], *operands.inputs, argnums=argnums, rng=operands.options["rng"])
    outputs, pullback, *aux = own
    values, skeletons = _returned(part, operands, outputs, *aux)
    pulled = _pulled(part, operands, number, outputs, pullback, values)
    wanted = _differentiated(operands, range(len(operands.inputs)) if argnums is None else argnums)
    alone = isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point()
    return Results({0: pulled, **values}, (skeletons, wanted, alone))


def _differentiated(operands: Operands, chosen: Container[int]) -> tuple[bool, ...]:
    """Which tensors of the inputs have cotangents."""
    wanted: list[bool] = []
    for place, tree in enumerate(operands.inputs):
        wanted += [place in chosen and pytree.is_real(x) for x in packed(tree, _is_tensor, "inputs").leaves]
    return tuple(wanted)


def _pulled(
    part: Part, operands: Operands, number: int, outputs: object, pullback: object, values: dict[int, object]
) -> Pulled:
    own = packed(outputs, _is_tensor, "outputs")
    numbered = unpacked(own.skeleton, [_Place(place) for place in range(1, len(own.leaves) + 1)])
    flat, _ = pytree.flatten(numbered, is_leaf=lambda node: isinstance(node, _Place))
    names: list[Name | None] = [(number, x.number) if isinstance(x, _Place) else None for x in flat]
    factors = []
    for name in names:
        piece = values[name[1]] if name else None
        factors.append(part.factor(piece, operands) if isinstance(piece, Piece) else 1.0)
    marked = unpacked(operands.skeleton, [_Place(place) for place in range(len(operands.split))])
    flat_inputs = [pytree.flatten(tree, is_leaf=lambda node: isinstance(node, _Place))[0] for tree in marked]
    places = [[x.number if isinstance(x, _Place) else None for x in own] for own in flat_inputs]
    return Pulled(pullback, pytree.flatten(outputs)[1], names, factors, places, operands.split)


def _input_pieces(part: Part, pulled: Pulled, cotangents: Sequence[Any]) -> dict[int, object]:
    values: dict[int, object] = {}
    for tree, places in zip(cotangents, pulled.places, strict=True):
        for place, leaf in zip(places, pytree.flatten(tree)[0] if tree is not None else (), strict=False):
            if place is None or leaf is None:
                continue
            size, copies = part.data_size, part.copies
            if not pulled.split[place]:
                values[place + 1] = Piece("sum", leaf, 1 / (size * copies))
            elif copies > 1:
                values[place + 1] = Piece("added", leaf, 1 / (size * copies))
            else:
                values[place + 1] = Piece("rows", leaf if size == 1 else leaf / size)
    return values


def _pull(part: Part, operands: Operands, number: int) -> Results:
    pulled: Pulled = operands.objects["pullback"]
    halves, retain = operands.options["halves"], operands.options["retain_graph"]
    if halves == "params":
        return Results({0: pulled.pullback.params()})
    if halves == "inputs":
        return Results(_input_pieces(part, pulled, pulled.pullback.inputs(operands.cotangent, retain_graph=retain)))
    grads, cotangents = pulled.pullback(operands.cotangent, retain_graph=retain)
    return Results({0: grads, **_input_pieces(part, pulled, cotangents)})


def _forward(part: Part, operands: Operands, number: int) -> Results:
    out = part.step.forward(operands.objects["state"], *operands.inputs, rng=operands.options["rng"])
    return Results(*_returned(part, operands, *(out if part.step.has_aux else (out,))))


def _metrics(metrics: dict[str, Any], part: Part, operands: Operands) -> tuple[dict[int, object], Any]:
    """The values of metrics, which are the same on all ranks but for what the function itself returned as aux."""
    own = {name: value for name, value in metrics.items() if name != "aux"}
    skeleton, leaves = packed(own, _is_tensor, "metrics")
    values: dict[int, object] = {place: Piece("same", x.detach()) for place, x in enumerate(leaves, 1)}
    skeletons: tuple[Any, ...] = (skeleton,)
    if "aux" in metrics:
        more, (aux,) = _returned(part, operands, metrics["aux"])
        values.update({len(leaves) + place: piece for place, piece in more.items()})
        skeletons = (skeleton, aux)
    return values, skeletons


def _update(part: Part, operands: Operands, number: int) -> Results:
    objects = operands.objects
    norm = operands.options.get("grad_norm")
    state, metrics = part.step.update(objects["state"], objects["grads"], grad_norm=norm)
    values, skeletons = _metrics(metrics, part, operands)
    return Results({0: state, **values}, skeletons)


def _add_grads(part: Part, operands: Operands, number: int) -> Results:
    return Results({0: part.step.add_grads(operands.objects["state"], operands.objects["grads"])})


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
            loss = loss * self.weight if self.weight else (loss * 0.0).nan_to_num()
        return (loss, *rest) if self.has_aux else loss


def _step(part: Part, operands: Operands, number: int) -> Results:
    """A whole step of a loss."""
    step, state, rng = part.step, operands.objects["state"], operands.options["rng"]
    weight = part.share(operands, part.data_size)
    if weight != 1.0:
        step = dataclasses.replace(step, fn=_Weighted(step.fn, weight, step.has_aux))
    state, metrics = step(state, *operands.inputs, rng=rng)
    values, skeletons = _metrics(metrics, part, operands)
    return Results({0: state, **values}, skeletons)


@dataclass
class _Stage:
    """The passes of one call of a pipeline."""

    passes: Passes


def _passes(part: Part, operands: Operands, number: int) -> Results:
    return Results({0: _Stage(Passes(part.step, operands.objects["state"], **operands.options))})


def _pass_forward(part: Part, operands: Operands, number: int) -> Results:
    own, chosen = operands.options, operands.options["wanted"]
    outputs, aux = operands.objects["passes"].passes.forward(own["microbatch"], operands.inputs, chosen)
    values, skeletons = _returned(part, operands, outputs, aux)
    pulled = _pulled(part, operands, number, outputs, None, values)
    return Results({0: pulled, **values}, (skeletons, _differentiated(operands, chosen), False))


def _pass_outputs(part: Part, operands: Operands, number: int) -> Results:
    made = operands.objects["passes"].passes.outputs(operands.options["microbatch"], operands.inputs)
    return Results(*_returned(part, operands, *made))


def _pass_pull(part: Part, operands: Operands, number: int) -> Results:
    own, passes = operands.options, operands.objects["passes"].passes
    pull = passes.backward if own["halves"] == "both" else passes.inputs
    cotangents = pull(own["microbatch"], operands.cotangent, own["retain_graph"])
    return Results({0: None, **_input_pieces(part, operands.objects["pullback"], cotangents)})


def _pass_params(part: Part, operands: Operands, number: int) -> Results:
    operands.objects["passes"].passes.params(operands.options["microbatch"])
    return Results({0: None})


def _pass_begin(part: Part, operands: Operands, number: int) -> Results:
    operands.objects["passes"].passes.begin()
    return Results({})


def _pass_reduce(part: Part, operands: Operands, number: int) -> Results:
    operands.objects["passes"].passes.reduce()
    return Results({0: None})


def _pass_grads(part: Part, operands: Operands, number: int) -> Results:
    return Results({0: operands.objects["passes"].passes.grads(operands.options["times"])})


def _gather(part: Part, operands: Operands, number: int) -> Results:
    skeleton, leaves = packed(gather(_tree(operands)), _is_tensor, "gather")
    return Results({place: Piece("same", x) for place, x in enumerate(leaves, 1)}, (skeleton,))


def _tree(operands: Operands) -> Any:
    """A tree of a state, or grads."""
    tree, what = operands.objects["tree"], operands.options["what"]
    return getattr(tree, what) if what else tree


def _squares(part: Part, operands: Operands, number: int) -> Results:
    tree = _tree(operands)
    if "state" in operands.objects:
        tree = with_kept(operands.objects["state"], tree)
    (squares,) = measured([tree])
    return Results({1: Piece("same", squares)})


def _spans(part: Part, operands: Operands, number: int) -> Results:
    return Results({1: Piece("same", part.spans())})


def _look(part: Part, operands: Operands, number: int) -> Results:
    state = operands.objects["state"]
    return Results({}, (("step", state.step), ("seed", state.seed)))


def _save(part: Part, operands: Operands, number: int) -> Results:
    save(operands.options["path"], operands.objects["state"], json.loads(operands.options["extra"]))
    return Results({})


def _load(part: Part, operands: Operands, number: int) -> Results:
    own = operands.options
    return Results({0: load(own["path"], part.step, **{name: own[name] for name in own if name != "path"})})


RUN: dict[str, Callable[[Part, Operands, int], Results]] = {
    "init": _init,
    "vjp": _vjp,
    "pull": _pull,
    "forward": _forward,
    "update": _update,
    "add_grads": _add_grads,
    "step": _step,
    "passes": _passes,
    "pass_forward": _pass_forward,
    "pass_outputs": _pass_outputs,
    "pass_pull": _pass_pull,
    "pass_params": _pass_params,
    "pass_reduce": _pass_reduce,
    "pass_begin": _pass_begin,
    "pass_grads": _pass_grads,
    "gather": _gather,
    "squares": _squares,
    "look": _look,
    "spans": _spans,
    "save": _save,
    "load": _load,
}
NAMES = tuple(RUN)
