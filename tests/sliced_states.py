"""States whose leaves are cut over a tensor axis: drawn leaves, cuts, policies, meshes; and the same in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves

import fzero as fz

POLICIES: dict[str, fz.Policy | None] = {
    "float64": None,
    "float32": fz.Policy(param=torch.float32, grad=torch.float32, moment=torch.float32),
    "exact": fz.Policy.exact(torch.float32),
    "compact24": fz.Policy.compact24(torch.bfloat16),
    "compact16": fz.Policy.compact16(torch.bfloat16),
    "bf16": fz.Policy.bf16_states(),
    "8-bit": fz.Policy.exact(),
    "4-bit": fz.Policy.compact16("4-bit"),
}
ELEMENTWISE = tuple(name for name in POLICIES if "bit" not in name)
SHARDS: dict[int, Callable[..., fz.Step]] = {
    **{0: lambda step, mesh: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3},
    4: lambda step, mesh: fz.shard_zero2(step, mesh=mesh, axis="dp", replicate="copies"),
}


class Cut(NamedTuple):
    """A leaf's cut; `dim` None leaves it whole."""

    dim: int | None
    parts: tuple[int, ...] = ()
    multiple: int = 1


class Over(NamedTuple):
    """What a step goes over: its mesh, its ZeRO stage, and how each leaf is cut."""

    data: int
    tensor: int
    stage: int
    cuts: tuple[Cut, ...]

    @property
    def ranks(self) -> int:
        return self.data * self.tensor


Shapes = tuple[tuple[int, ...], ...]


@st.composite
def shapes(draw: st.DrawFn, most: int = 9, blocks: bool = False) -> Shapes:
    """The shapes of one to four leaves; with `blocks` of leaves whose last dim has whole blocks of 64."""
    size = st.sampled_from([1, 2, 3, 5, 8, most])
    return tuple(
        (*draw(st.lists(size, max_size=2)), 64 * draw(st.integers(1, 4)))
        if blocks
        else tuple(draw(st.lists(st.one_of(size, st.integers(1, 70)), min_size=1, max_size=3)))
        for _ in range(draw(st.integers(1, 4)))
    )


@st.composite
def cuts(draw: st.DrawFn, leaves: Shapes, blocks: bool = False) -> tuple[Cut, ...]:
    """A cut for each leaf, at least one of which is cut."""
    out = []
    for shape in leaves:
        dim = draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
        if dim is None:
            out.append(Cut(None))
            continue
        whole = 64 if blocks and dim == len(shape) - 1 else 1
        units = shape[dim] // whole
        multiple = draw(st.sampled_from([own for own in (1, 2, 3) if units % own == 0]))
        count = units // multiple
        first = draw(st.integers(0, count))
        parts = (first, count - first) if 0 < first < count else ()
        own = multiple * whole
        out.append(Cut(dim, tuple(part * own for part in parts), own))
    if all(cut.dim is None for cut in out):
        out[0] = Cut(0, (), 64 if blocks and len(leaves[0]) == 1 else 1)
    return tuple(out)


@st.composite
def overs(draw: st.DrawFn, leaves: Shapes, ranks: int | None = None, blocks: bool = False) -> Over:
    """What a step goes over, of so many ranks where that is said."""
    sizes = [(d, t) for d in (1, 2, 3, 4) for t in (1, 2, 3, 4) if d * t <= 4 and ranks in (None, d * t)]
    data, tensor = draw(st.sampled_from(sizes))
    stage = draw(st.integers(0 if data == 1 else 1, 4))
    return Over(data, tensor, stage, draw(cuts(leaves, blocks)))


def params(leaves: Shapes, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, leaves)))
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return {f"blocks.{number // 2}.w{number}": draw(shape) for number, shape in enumerate(leaves)}


def _begun(tree: Any) -> dict[str, Any]:
    return {"sum": tree, "seen": torch.zeros(2), "count": 0}


def _added(value: dict[str, Any], tree: Any, applied: bool) -> dict[str, Any]:
    return {"sum": value["sum"].map(torch.add, tree), "seen": value["seen"] + 1, "count": value["count"] + 1}


AVERAGE = fz.Extra("average", "average()", _begun, _added)


@fz.unit
def squares(p: Any, factor: int) -> torch.Tensor:
    return torch.stack([(leaf.square() * factor).sum() for leaf in p.values()]).sum()


def step_over(over: Over | None, leaves: Shapes, policy: fz.Policy | None, optimizer: Any = None) -> fz.Step:
    """A step whose gradients are the same at any degree; over one rank alone where nothing is said."""
    tensor, ax = {}, None
    if over is not None:
        copies = 2 if over.stage == 4 and over.data % 2 == 0 else 1
        mesh = torch.distributed.init_device_mesh(
            "cpu", (copies, over.data // copies, over.tensor), mesh_dim_names=("copies", "dp", "tp")
        )
        ax = fz.parallel.axis(mesh, "tp")
        tensor = {
            name: fz.parallel.cut(cut.dim, parts=cut.parts, multiple=cut.multiple)
            for name, cut in zip(params(leaves), over.cuts, strict=True)
            if cut.dim is not None
        }

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        total = x.sum() * 0
        for number, (name, leaf) in enumerate(p.items()):
            own = squares({name: leaf}, number + 1)
            total = total + (fz.parallel.sum(own, ax) if name in tensor and ax is not None else own)
        return total

    step = fz.train_step(loss, optimizer or fz.adamw(1e-2), policy or fz.Policy()).with_state(AVERAGE)
    if over is None:
        return step
    if tensor:
        step = fz.shard_tensor(step, tensor, mesh=mesh)
    if over.stage == 4:
        return SHARDS[4](step, mesh)
    return SHARDS[over.stage](step, mesh=mesh) if over.stage else step


def trained(step: fz.Step, start: Any, steps: int = 2, keeps_grads: bool = False) -> fz.TrainState:
    state = step.init(start)
    for _ in range(steps):
        state, _ = step(state, torch.ones(2))
    if keeps_grads:
        out, pullback = step.vjp(state, torch.ones(2))
        state = step.add_grads(state, pullback(torch.ones_like(out))[0])
    return state


def whole(state: fz.TrainState) -> Any:
    """All that a state keeps, as whole leaves."""
    kept = [] if state.grads is None else [fz.gather(state.grads)]
    return [fz.gather(state.params), fz.gather(state.moments), fz.gather(state.extra["average"]), kept]


def same_bits(got: Any, want: Any) -> None:
    for own, other in zip(tree_leaves(got), tree_leaves(want), strict=True):
        if isinstance(own, torch.Tensor):
            assert own.dtype == other.dtype and torch.equal(own, other)
        else:
            assert own == other
