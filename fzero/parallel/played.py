"""A function on all ranks of its axes, which are played with values, against the same function on one rank.

Types say how values of ranks may be related; this says whether they are those of one process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import collecting, pytree
from fzero.base.context import during, own_copies
from fzero.base.operators import Wide, wide_dtype
from fzero.base.places import definition_of, function_of
from fzero.base.random import seeded
from fzero.comm.playing import Parted, play
from fzero.parallel.declared import Dims, Input, Inputs, dims_of
from fzero.parallel.types import WHO, Axes, AxisTypeError, tensors_in
from fzero.state import sliced

MOST = 64  # ranks that are played
_proven = set[tuple[object, ...]]()  # of the steps' functions that were compared
Place = Mapping[str, int]


class NotFinite(ValueError):
    """Values of which a function gives nothing that could be compared."""


class Run(NamedTuple):
    """What one rank has computed."""

    outputs: dict[str, torch.Tensor]  # by path
    grads: dict[str, torch.Tensor]  # by path, of the outputs that are differentiated
    eps: float  # of the coarsest dtype that it has gone to from float64


def is_proven(fn: object, ranks: int) -> bool:
    """Tells whether a step's function was compared on so many ranks, by its definition and the flags it closes over."""
    return _told_by(fn, ranks) in _proven


def note_proven(fn: object, ranks: int) -> None:
    _proven.add(_told_by(fn, ranks))


def _told_by(fn: object, ranks: int) -> tuple[object, ...]:
    own = function_of(fn)
    cells = [cell.cell_contents for cell in getattr(own, "__closure__", None) or () if cell != types.CellType()]
    held = [*cells, *(getattr(own, "__defaults__", None) or ())]
    return definition_of(fn), ranks, *[x for x in held if isinstance(x, (bool, str, types.NoneType))]


def playable(inputs: Inputs, met: Mapping[str, int], ignored: Axes) -> dict[str, int]:
    """The axes that are played, and their sizes: those of which whole inputs are known, or can be made up."""
    over = inputs.planned.over if inputs.planned is not None else None
    axes = {**met, over.name: over.size} if over is not None and over.name not in ignored else met
    unknown = {
        axis
        for each in inputs.leaves
        for axis, dim in each.dims.items()
        if dim is None or (each.row is not None and axis != (over and over.name))
    }
    out = {axis: size for axis, size in axes.items() if axis not in unknown and size > 1}
    on_cpu = all(each.leaf.device.type == "cpu" for each in inputs.leaves if isinstance(each.leaf, torch.Tensor))
    return out if on_cpu and math.prod(out.values()) <= MOST else {}


def need_one_process(
    fn: Callable[..., object], inputs: Inputs, outputs: Mapping[str, Dims], sizes: Mapping[str, int], draws: bool
) -> None:
    """Refuses a function whose outputs or gradients, played on all ranks of axes, are not those of one process."""
    try:
        _Comparison(fn, inputs, outputs, sizes, wide=True).run(draws)
    except (AxisTypeError, NotFinite):
        raise
    except Exception:  # it takes no float64, as where it multiplies by a table in float32
        _Comparison(fn, inputs, outputs, sizes, wide=False).run(draws)


class _Comparison:
    """A function on the ranks of some axes beside itself on one rank.

    Args:
        wide: in float64, also where the function goes to fewer bits: a small term is far away then, too.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        inputs: Inputs,
        outputs: Mapping[str, Dims],
        sizes: Mapping[str, int],
        wide: bool,
    ) -> None:
        self._fn, self._inputs, self._outputs, self._sizes, self._wide = fn, inputs, outputs, sizes, wide
        self._over = inputs.planned.over if inputs.planned is not None else None
        self._wholes = [self._whole(each) for each in inputs.leaves]

    def run(self, draws: bool) -> None:
        """See `need_one_process`."""
        try:
            (expected,) = play({}, functools.partial(self._on_rank, None))
        except Exception as error:
            error.add_note(
                f"fz.{WHO}(values=True) runs the function on axes of one rank, too, where it is given whole inputs: "
                "let it read ax.size and ax.rank itself, inside; or leave values out."
            )
            raise
        found = [*expected.grads.values(), *[x for x in expected.outputs.values() if x.isnan().any()]]
        if not all([bool(x.isfinite().all()) for x in found]):
            raise NotFinite(f"{WHO}: on one process the function gives NaN, or gradients that are not finite")
        shapes = {path: x.shape for path, x in expected.outputs.items()}
        try:
            runs = play(self._sizes, functools.partial(self._on_rank, shapes))
        except Parted as error:
            axes = ", ".join(f"axis {axis!r} ({size} of them)" for axis, size in self._sizes.items())
            raise AxisTypeError(f"{WHO}: played on ranks of {axes}, {error}. {_ADVICE}") from None
        hint, by_path = _DRAWS if draws else "", {each.path: each for each in self._inputs.leaves}
        tensors = (*expected.outputs.values(), *expected.grads.values(), *pytree.tensors_in(*self._wholes))
        dtypes = [x.dtype for x in tensors]
        planned = self._inputs.planned
        # some models compute parts of themselves in float32
        dtypes += [] if self._wide else [torch.float32, (planned and planned.cast) or torch.float32]
        eps = max([torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point], default=0.0)
        eps = max(eps, *[run.eps for run in (expected, *runs)])
        largest = max([_most(x) for x in expected.grads.values()], default=0.0)
        numbers = itertools.product(*map(range, self._sizes.values()))
        pairs = [(dict(zip(self._sizes, number, strict=True)), run) for number, run in zip(numbers, runs, strict=True)]
        for place, run in pairs:
            for path, want in expected.outputs.items():
                said = dims_of(path, want.ndim, self._outputs, "outputs")
                if not any(dim is None for axis, dim in said.items() if axis in self._sizes):
                    own, name = self._piece(want, said, place), f"output {path!r}" if path else "the output"
                    _need_same(name, run.outputs.get(path), own, _bound(eps, want), place, hint)
        for place, run in pairs:
            for path, want in expected.grads.items():
                own, name = self._cut(by_path[path], place, want), f"the cotangent of {path!r}"
                _need_same(name, run.grads.get(path), own, _bound(eps, want, largest), place, hint)

    # ---- inputs: whole ones, and each rank's pieces, where it has a place

    def _whole(self, each: Input) -> object:
        """The whole of an input; what other ranks have of it is made up of this rank's piece, unless it is a leaf."""
        if each.row is not None:
            assert self._inputs.planned is not None
            out = self._inputs.planned.whole(each.index)
        elif not isinstance(each.leaf, torch.Tensor):
            return each.leaf
        else:
            out = each.leaf.detach()
            for axis, dim in each.dims.items():
                if axis in self._sizes and dim is not None:
                    out = torch.cat([_other(out, number) for number in range(self._sizes[axis])], dim)
        return out.to(wide_dtype(out.dtype)) if self._wide else out

    def _cut(self, each: Input, place: Place, x: torch.Tensor) -> torch.Tensor:
        """A rank's piece of an input, or of its gradient."""
        if each.row is None or each.row.slices is None:
            return self._piece(x, each.dims, place)
        if self._over is None or self._over.name not in place:
            return x
        name = self._over.name
        return sliced.cut(each.row.slices, place[name], self._sizes[name], x)

    def _piece(self, x: torch.Tensor, dims: Dims, place: Place) -> torch.Tensor:
        for axis, dim in dims.items():
            if axis in place and dim is not None:
                x = x.tensor_split(self._sizes[axis], dim)[place[axis]]
        return x

    # ---- one rank

    def _on_rank(self, shapes: Mapping[str, torch.Size] | None, place: Place) -> Run:
        """The outputs and gradients of one rank.

        Args:
            shapes: of the whole outputs; None where this is the one rank that has them.
        """
        inputs, tracked, width = self._inputs, dict[str, torch.Tensor](), Wide()
        with during(own_copies, {}), torch.enable_grad(), seeded(0), width if self._wide else contextlib.nullcontext():
            given: list[Any] = []
            for each, x in zip(inputs.leaves, self._wholes, strict=True):
                if isinstance(x, torch.Tensor):
                    x = self._cut(each, place, x).clone()
                    if each.path in inputs.tracked:
                        x = tracked[each.path] = x.requires_grad_()
                        x = x.clone()  # which may be written to
                given.append(x)
            args, planned = inputs.arguments(given), inputs.planned
            if planned is not None and self._over is not None:
                name = self._over.name
                planned = planned.on(place.get(name, 0), self._sizes[name] if name in place else 1)
            known = planned.running(args[0]) if planned is not None else contextlib.nullcontext()
            with known, collecting.run():
                out = self._fn(*args)
            paths, leaves, _ = pytree.named_leaves(out)
            found = {path: x for path, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor)}
            pulled = {id(x) for x in tensors_in(planned.outputs(out) if planned is not None else out)}
            pairs = []
            for path, x in found.items():
                if id(x) in pulled and x.requires_grad:
                    said = dims_of(path, x.ndim, self._outputs, "outputs")
                    own = x.shape if shapes is None else shapes.get(path, x.shape)
                    cotangent = self._piece(_numbers(own, x), said, place)
                    unknown = any(dim is None for dim in said.values()) or cotangent.shape != x.shape
                    pairs.append((x, torch.zeros_like(x) if unknown else cotangent))
            return Run({path: x.detach() for path, x in found.items()}, _grads(pairs, tracked), width.eps)


_ADVICE = (
    "A conversion is missing, too much or another one than should be there (fz.parallel.all_to_all, reduce_scatter and "
    "ring_shift take and give values of one type, so that types say nothing of them), or something that is no tensor, "
    "such as ax.rank, changes what ranks compute."
)
_DRAWS = " The function also draws random numbers, which are others for a piece than for the whole: take dropout out."


def _other(x: torch.Tensor, number: int) -> torch.Tensor:
    """Values like those of a tensor, in another order."""
    moved = x.roll(number)
    return moved * (1 + number / 8) if x.is_floating_point() else moved


def _grads(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], tracked: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The cotangents of inputs, of those of outputs."""
    if not pairs or not tracked:
        return {path: torch.zeros_like(x) for path, x in tracked.items()}
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, [*tracked.values()], cotangents, materialize_grads=True)
    return {path: grad.detach() for path, grad in zip(tracked, found, strict=True)}


def _numbers(shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """Numbers that differ from element to element: one for a single one."""
    count = math.prod(shape)
    return torch.arange(count, device=like.device).cos().to(like.dtype).view(tuple(shape))


# ---- what is compared


def _bound(eps: float, want: torch.Tensor, largest: float = 0.0) -> float:
    """How far apart values may be by rounding, of which a missing conversion is far away.

    Args:
        eps: of the coarsest dtype that is computed with.
        largest: of all values like them: what is zero but for rounding has its.
    """
    return 4 * eps**0.5 * _most(want) + min(max(1000 * eps, 1e-11), 0.05) * largest if pytree.is_real(want) else 0.0


def _most(x: torch.Tensor) -> float:
    return x.abs().nan_to_num(0.0, 0.0, 0.0).max().item() if x.numel() else 0.0


def _need_same(
    what: str, found: torch.Tensor | None, want: torch.Tensor, bound: float, place: Place, hint: str
) -> None:
    """Refuses what differs by more than a bound."""
    on = ", ".join(f"rank {number} of axis {axis!r}" for axis, number in place.items())
    begin = f"{WHO}: {what}, played on {on}, is not that of one process: "
    if found is None or found.shape != want.shape:
        got = "missing" if found is None else f"of shape {tuple(found.shape)}"
        raise AxisTypeError(f"{begin}it is {got}, and was expected to be of shape {tuple(want.shape)}. {_ADVICE}{hint}")
    wide = torch.complex128 if want.is_complex() or found.is_complex() else torch.float64
    a, b = found.to(wide), want.to(wide)
    if not torch.allclose(a, b, rtol=0.0, atol=bound, equal_nan=True):
        raise AxisTypeError(
            f"{begin}they are {_most(a - b):.2g} apart, where the largest value is {_most(b):.2g}. {_ADVICE}{hint}"
        )
