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

from fzero.base import pytree
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
    """What one rank has computed.

    Attributes:
        outputs, grads: by path; those of outputs that are differentiated.
        eps: of the coarsest dtype that it has gone to from float64.
    """

    outputs: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]
    eps: float


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
    """The axes that are played, and their sizes: those of which whole inputs are known, or can be made up.

    Args:
        met: the axes that maps go over.
    """
    over = inputs.planned.over if inputs.planned is not None else None
    axes = {**met, over.name: over.size} if over is not None and over.name not in ignored else met
    unknown = {
        axis
        for each in inputs.leaves
        for axis, dim in each.dims.items()
        if dim is None or (each.given is not None and axis != (over and over.name))
    }
    out = {axis: size for axis, size in axes.items() if axis not in unknown and size > 1}
    on_cpu = all(each.leaf.device.type == "cpu" for each in inputs.leaves if isinstance(each.leaf, torch.Tensor))
    return out if on_cpu and math.prod(out.values()) <= MOST else {}


def need_one_process(
    fn: Callable[..., object], inputs: Inputs, outputs: Mapping[str, Dims], sizes: Mapping[str, int], draws: bool
) -> None:
    """Plays a function on all ranks of axes.

    Args:
        draws: it takes random numbers.

    Raises:
        AxisTypeError: outputs, or the gradients of inputs, are not those of one process.
    """
    wholes = [_whole(inputs, each, sizes) for each in inputs.leaves]
    try:
        _compare(fn, inputs, [_widened(x) for x in wholes], outputs, sizes, draws, wide=True)
    except (AxisTypeError, NotFinite):
        raise
    except Exception:  # it takes no float64, as where it multiplies by a table in float32
        _compare(fn, inputs, wholes, outputs, sizes, draws, wide=False)


def _compare(
    fn: Callable[..., object],
    inputs: Inputs,
    wholes: Sequence[object],
    outputs: Mapping[str, Dims],
    sizes: Mapping[str, int],
    draws: bool,
    wide: bool,
) -> None:
    """See `need_one_process`.

    Args:
        wide: in float64, also where the function goes to fewer bits: a small term is far away then, too.
    """
    try:
        (expected,) = play({}, functools.partial(_run, fn, inputs, wholes, outputs, {}, None, wide))
    except Exception as error:
        error.add_note(
            f"fz.{WHO}(values=True) runs the function on axes of one rank, too, where it is given whole inputs: let it "
            "read ax.size and ax.rank itself, inside; or leave values out."
        )
        raise
    found = [*expected.grads.values(), *[x for x in expected.outputs.values() if x.isnan().any()]]
    if not all([bool(x.isfinite().all()) for x in found]):
        raise NotFinite(f"{WHO}: on one process the function gives NaN, or gradients that are not finite")
    shapes = {path: x.shape for path, x in expected.outputs.items()}
    try:
        runs = play(sizes, functools.partial(_run, fn, inputs, wholes, outputs, sizes, shapes, wide))
    except Parted as error:
        axes = ", ".join(f"axis {axis!r} ({size} of them)" for axis, size in sizes.items())
        raise AxisTypeError(f"{WHO}: played on ranks of {axes}, {error}. {_ADVICE}") from None
    hint, by_path = _DRAWS if draws else "", {each.path: each for each in inputs.leaves}
    dtypes = [x.dtype for x in (*expected.outputs.values(), *expected.grads.values())]
    dtypes += [] if wide else [torch.float32, *inputs.dtypes]  # some models compute parts of themselves in float32
    eps = max([torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point], default=0.0)
    eps = max(eps, *[run.eps for run in (expected, *runs)])
    largest = max([_most(x) for x in expected.grads.values()], default=0.0)
    places = [dict(zip(sizes, place, strict=True)) for place in itertools.product(*map(range, sizes.values()))]
    for place, run in zip(places, runs, strict=True):
        for path, want in expected.outputs.items():
            said = dims_of(path, want.ndim, outputs, "outputs")
            if not any(dim is None for axis, dim in said.items() if axis in sizes):
                own, name = _piece(want, said, place, sizes), f"output {path!r}" if path else "the output"
                _need_same(name, run.outputs.get(path), own, _bound(eps, want), place, hint)
    for place, run in zip(places, runs, strict=True):
        for path, want in expected.grads.items():
            own, name = _cut(inputs, by_path[path], place, sizes, want), f"the cotangent of {path!r}"
            _need_same(name, run.grads.get(path), own, _bound(eps, want, largest), place, hint)


_ADVICE = (
    "A conversion is missing, too much or another one than should be there (fz.parallel.all_to_all, reduce_scatter and "
    "ring_shift take and give values of one type, so that types say nothing of them), or something that is no tensor, "
    "such as ax.rank, changes what ranks compute."
)
_DRAWS = " The function also draws random numbers, which are others for a piece than for the whole: take dropout out."


# ---- inputs: whole ones, and each rank's pieces


def _whole(inputs: Inputs, each: Input, sizes: Mapping[str, int]) -> object:
    """The whole of an input; what other ranks have of it is made up of this rank's piece, unless it is a leaf."""
    if each.given is not None:
        assert inputs.planned is not None
        return inputs.planned.whole(each.index)
    if not isinstance(each.leaf, torch.Tensor):
        return each.leaf
    out = each.leaf.detach()
    for axis, dim in each.dims.items():
        if axis in sizes and dim is not None:
            out = torch.cat([_other(out, number) for number in range(sizes[axis])], dim)
    return out


def _other(x: torch.Tensor, number: int) -> torch.Tensor:
    """Values like those of a tensor, in another order."""
    moved = x.roll(number)
    return moved * (1 + number / 8) if x.is_floating_point() else moved


def _cut(inputs: Inputs, each: Input, place: Place, sizes: Mapping[str, int], x: torch.Tensor) -> torch.Tensor:
    """A rank's piece of an input, or of its gradient."""
    over = inputs.planned.over if inputs.planned is not None else None
    if each.given is None or each.given.slices is None:
        return _piece(x, each.dims, place, sizes)
    if over is None or over.name not in sizes:
        return x
    return sliced.cut(each.given.slices, place[over.name], sizes[over.name], x)


def _piece(x: torch.Tensor, dims: Dims, place: Place, sizes: Mapping[str, int]) -> torch.Tensor:
    for axis, dim in dims.items():
        if axis in sizes and dim is not None:
            x = x.tensor_split(sizes[axis], dim)[place[axis]]
    return x


# ---- one rank


def _run(
    fn: Callable[..., object],
    inputs: Inputs,
    wholes: Sequence[object],
    outputs: Mapping[str, Dims],
    sizes: Mapping[str, int],
    shapes: Mapping[str, torch.Size] | None,
    wide: bool,
    place: Place,
) -> Run:
    """The outputs and gradients of one rank.

    Args:
        shapes: of the whole outputs; None where this is the one rank that has them.
    """
    tracked, width = dict[str, torch.Tensor](), Wide()
    with during(own_copies, {}), torch.enable_grad(), seeded(0), width if wide else contextlib.nullcontext():
        given: list[Any] = []
        for each, x in zip(inputs.leaves, wholes, strict=True):
            if isinstance(x, torch.Tensor):
                x = _cut(inputs, each, place, sizes, x).clone()
                if each.path in inputs.tracked:
                    x = tracked[each.path] = x.requires_grad_()
                    x = x.clone()  # which may be written to
            given.append(x)
        args, planned = inputs.arguments(given), inputs.planned
        if planned is not None and planned.over is not None:
            name = planned.over.name
            planned = planned.on(place.get(name, 0), sizes.get(name, 1))
        with planned.running(args[0]) if planned is not None else contextlib.nullcontext():
            out = fn(*args)
        paths, leaves, _ = pytree.named_leaves(out)
        found = {path: x for path, x in zip(paths, leaves, strict=True) if isinstance(x, torch.Tensor)}
        pulled = {id(x) for x in tensors_in(planned.outputs(out) if planned is not None else out)}
        pairs = []
        for path, x in found.items():
            if id(x) in pulled and x.requires_grad:
                said = dims_of(path, x.ndim, outputs, "outputs")
                own = x.shape if shapes is None else shapes.get(path, x.shape)
                cotangent = _piece(_numbers(own, x), said, place, sizes)
                unknown = any(dim is None for dim in said.values()) or cotangent.shape != x.shape
                pairs.append((x, torch.zeros_like(x) if unknown else cotangent))
        return Run({path: x.detach() for path, x in found.items()}, _grads(pairs, tracked), width.eps)


def _widened(x: object) -> object:
    return x.to(wide_dtype(x.dtype)) if isinstance(x, torch.Tensor) else x


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
