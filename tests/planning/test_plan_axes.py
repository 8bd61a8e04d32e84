"""fz.plan by mesh axes: what each rank holds and sends is what ranks hold and send, to the byte."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import exactness
import pytest
import torch
import zoo
from hypothesis import example, given
from hypothesis import strategies as st
from nightly import by_day, example_in_turns

import fzero as fz
from fzero.base import pytree
from fzero.comm import backend, pieces
from fzero.comm.divergence import recorded_collectives
from fzero.engine import alike
from fzero.optim import _leaf_states
from fzero.state import owners
from fzero.state import squares as gathering
from fzero.state.sharded import trees_of
from fzero.testing import run_ranks, strategies

AXES = ("replicas", "dp", "sp", "tp")
# sizes of these axes, those that state is cut over, those that are replicated over
MESHES = (
    ((1, 2, 1, 2), ("dp",), None),
    ((1, 1, 1, 3), ("dp",), None),
    ((1, 1, 1, 4), ("dp",), None),
    ((1, 2, 2, 1), ("dp", "sp"), None),
    ((1, 1, 2, 2), ("dp", "sp"), None),
    ((2, 1, 1, 2), ("dp",), "replicas"),
    ((2, 2, 1, 1), ("dp",), "replicas"),
    ((3, 1, 1, 1), ("dp", "sp"), "replicas"),
    ((1, 1, 1, 1), ("dp",), None),
)
Layers = tuple[tuple[str, int], ...]
Mesh = tuple[tuple[int, ...], tuple[str, ...], str | None]
WIDTH = 6


class Sent:
    """What the ranks send: (rank, the ranks of the group) -> bytes, and collectives."""

    def __init__(self) -> None:
        self.nbytes, self.messages = Counter[tuple[int, tuple[int, ...]]](), Counter[tuple[int, tuple[int, ...]]]()
        self._lock = threading.Lock()

    def add(self, group: Any, nbytes: int) -> None:
        place = backend.global_rank(), backend.members(group)
        with self._lock:
            self.nbytes[place] += nbytes
            self.messages[place] += 1

    def clear(self) -> None:
        self.nbytes.clear()
        self.messages.clear()

    def by_axis(self, rank: int, mesh: Any, over: Sequence[tuple[str, ...]]) -> dict[str, tuple[int, int]]:
        """Axis -> bytes and collectives of a rank; each group that it sends in must be that of an axis."""
        members = {"×".join(axes): backend.members(backend.group_over(mesh, axes)) for axes in over}
        own = {axis: (self.nbytes[rank, ranks], self.messages[rank, ranks]) for axis, ranks in members.items()}
        assert {ranks for other, ranks in self.messages if other == rank} <= set(members.values())
        return {axis: both for axis, both in own.items() if both[1]}


@contextlib.contextmanager
def counted() -> Iterator[Sent]:
    """Counts where tensors are given to torch.distributed; else norms and losses exchange, and maps of functions."""
    out, start_all_gather, start_reduce_scatter, add_up = (
        Sent(),
        backend.start_all_gather,
        backend.start_reduce_scatter,
        backend.all_reduce,
    )

    def all_gather(full: torch.Tensor, shard: torch.Tensor, group: Any, number: int) -> Any:
        out.add(group, shard.nbytes * (group.size() - 1))
        return start_all_gather(full, shard, group, number)

    def reduce_scatter(full: torch.Tensor, own: torch.Tensor, group: Any, number: int, divisor: int) -> Any:
        out.add(group, full.nbytes // group.size() * (group.size() - 1))
        return start_reduce_scatter(full, own, group, number, divisor)

    def all_reduce(tensor: torch.Tensor, group: Any, op: str = "sum") -> None:
        out.add(group, 2 * tensor.nbytes * (group.size() - 1) // group.size())
        add_up(tensor, group, op)

    def norms(axis: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
        out.add(axis.group, x.nbytes * (axis.size - 1))
        return exchanged(axis, x, *more)

    exchanged = pieces.gathered
    changed = {"start_all_gather": all_gather, "start_reduce_scatter": reduce_scatter, "all_reduce": all_reduce}
    with mock.patch.multiple(backend, **changed), mock.patch.object(gathering, "gathered", norms):
        with mock.patch.object(alike, "gathered", norms):
            yield out


@contextlib.contextmanager
def leaves_counted() -> Iterator[Sent]:
    """Counts exchanges of whole leaves, of what is told of them, and gathers of their slices, but for a plan's."""
    out, started, sliced = Sent(), pieces.start_exchange, pieces.gathered

    def exchange(axis: Any, send: Sequence[torch.Tensor], receive: Any, tag: Any) -> Any:
        if not axis.fake:
            out.add(axis.group, sum(x.nbytes for rank, x in enumerate(send) if rank != axis.rank))
        return started(axis, send, receive, tag)

    def gather(axis: Any, x: torch.Tensor, *more: Any) -> torch.Tensor:
        if axis.size > 1 and not axis.fake:
            out.add(axis.group, x.nbytes * (axis.size - 1))
        return sliced(axis, x, *more)

    with mock.patch.object(owners, "start_exchange", exchange), mock.patch.object(pieces, "gathered", gather):
        with mock.patch.object(_leaf_states, "gathered", gather):
            yield out


# ---- a function of slices


def column_row(p: Any, x: torch.Tensor, ax: Any) -> torch.Tensor:
    hidden = torch.tanh(fz.parallel.copy(x, ax) @ p["up"] + p["bias"])
    return x + fz.parallel.sum(hidden @ p["down"], ax) * p["scale"]


def fused(p: Any, x: torch.Tensor, ax: Any) -> torch.Tensor:
    gate, up = (fz.parallel.copy(x, ax) @ p["both"]).chunk(2, -1)
    return x + fz.parallel.sum((torch.sigmoid(gate) * up) @ p["down"], ax)


KINDS = {"column_row": column_row, "fused": fused}


def model(layers: Layers) -> tuple[Any, Any, dict[str, Any]]:
    """(loss(params, x, ax), params, plan)."""
    params: dict[str, Any] = {"head": torch.arange(WIDTH * 3.0).view(WIDTH, 3) / 9}
    plan: dict[str, Any] = {}
    for number, (kind, inner) in enumerate(layers):
        own = {"down": torch.ones(inner, WIDTH) / 8}
        plan[f"blocks.{number}.down"] = 0
        if kind == "fused":
            own["both"] = torch.arange(WIDTH * 2.0 * inner).view(WIDTH, -1) / 99
            plan[f"blocks.{number}.both"] = fz.parallel.cut(1, parts=(inner, inner))
        else:
            own |= {"up": torch.arange(WIDTH * 1.0 * inner).view(WIDTH, inner) / 99, "bias": torch.ones(inner)}
            own["scale"] = torch.ones(WIDTH)
            plan |= {f"blocks.{number}.up": 1, f"blocks.{number}.bias": fz.parallel.cut(0)}
        params.setdefault("blocks", []).append(own)
    units = [fz.unit(KINDS[kind]) for kind, _ in layers]

    def loss(p: Any, x: torch.Tensor, ax: Any) -> torch.Tensor:
        x = x.to(p["head"].dtype)
        for call, own in zip(units, p["blocks"], strict=True):
            x = call(own, x, ax)
        return (x @ p["head"]).square().mean().float()

    return loss, params, plan


WAYS: dict[str, Any] = {
    "remat": fz.remat,
    "donate": fz.donate,
    "fused": fz.fuse_update,
    "frozen": functools.partial(fz.freeze, pattern="blocks.*.down"),
    "some": None,
    "offload": functools.partial(fz.offload, params="host", moments="host"),
}
POLICIES = {
    "plain": fz.Policy(),
    "bf16": fz.Policy.bf16_states(),
    "masters": fz.Policy(param=torch.float32, grad=torch.bfloat16, compute=torch.bfloat16),
    "by 8-bit": fz.Policy(gather="8-bit"),
    "compact": fz.Policy.compact24(),
}


def made(layers: Layers, mesh: Mesh, stage: int, ways: tuple[str, ...], policy: str, real: Any) -> tuple[Any, Any]:
    """The step, over a real mesh or over none, and its params."""
    loss, params, plan = model(layers)
    _, axis, replicate = mesh
    over: dict[str, Any] = {"axis": axis, "replicate": replicate, "mesh": real}
    ax = fz.parallel.axis(real, "tp") if real is not None else None
    optimizer = fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))
    step = fz.train_step(lambda p, x: loss(p, x, ax), optimizer, POLICIES[policy])
    chosen = [WAYS[way] for way in ways if way != "some"]
    if stage:
        shard = functools.partial(exactness.SHARDS[stage], pattern="blocks.*" if "some" in ways else "*")
        chosen.append(functools.partial(shard, **over))
    chosen.append(functools.partial(fz.shard_tensor, plan=plan, mesh=real))
    return strategies.apply(step, [("", each) for each in chosen]), params


def nbytes_of(tree: Any) -> int:
    buffers = [(*own.entries.values(), *own.held_entries.values()) for own in trees_of(tree)]
    return sum(x.nbytes for own in buffers for x in own)


drawn: dict[str, Any] = {
    "layers": st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 9)), min_size=1, max_size=3).map(tuple),
    "mesh": st.sampled_from(MESHES),
    "stage": st.integers(0, 3),
    "ways": st.lists(st.sampled_from(sorted(WAYS)), unique=True, max_size=3).map(tuple),
    "policy": st.sampled_from(sorted(POLICIES)),
}


@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@example(layers=(("column_row", 3),), mesh=MESHES[3], stage=3, ways=(), policy="plain")
@given(**drawn)
def test_what_is_planned_is_what_every_rank_holds_and_sends(
    layers: Layers, mesh: Mesh, stage: int, ways: tuple[str, ...], policy: str
) -> None:
    sizes, axis, replicate = mesh
    x = torch.ones(2, WIDTH)
    together = threading.Barrier(torch.Size(sizes).numel())

    def rank_main(rank: int) -> None:
        real = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        step, params = made(layers, mesh, stage, ways, policy, real)
        plan = fz.plan(step, params, rank=rank)
        assert str(fz.plan(step, params, mesh=dict(zip(AXES, sizes, strict=True)), rank=rank)) == str(plan)
        assert str(fz.plan(step, params, mesh=real, rank=rank)) == str(plan)
        state = step.init(params)
        for last in (False, False, True):  # the first ones know less of what comes next
            together.wait()
            if rank == 0:
                sent.clear()
            together.wait()
            state, _ = step(state, x)
            together.wait()
            assert not last or sent.by_axis(rank, real, (axis, (replicate or "tp",), ("tp",))) == plan.by_axis
        assert plan.params == nbytes_of(state.params) and plan.moments == nbytes_of(state.moments)
        paths, leaves, _ = pytree.named_leaves(fz.gather(state.params))
        for path, leaf in zip(paths, leaves, strict=True):
            held = plan.held(path, rank)
            if held.dim is not None:
                leaf = torch.cat([leaf.narrow(held.dim, *piece) for piece in held.ranges], held.dim)
            assert tuple(leaf.shape) == held.shape
            assert torch.equal(state.params[path], leaf.reshape(-1)[held.start : held.stop])

    with counted() as sent:
        run_ranks(rank_main, together.parties)


WHOLE: dict[str, Any] = {
    "muon": lambda: fz.muon(1e-2),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.5), fz.muon(1e-2)),
    "adafactor": lambda: fz.adafactor(1e-2),
    "whole": lambda: fz.whole(fz.adamw(1e-2)),
    "in front": lambda: fz.chain(fz.whole(fz.adamw(1e-2)), fz.adamw(1e-2)),
}


@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@by_day(2)
@example(layers=(("column_row", 3),), mesh=MESHES[0], stage=3, ways=(), policy="plain", optimizer="muon")
@example_in_turns(4, layers=(("fused", 5),), mesh=MESHES[5], stage=1, ways=("fused",), policy="plain", optimizer="muon")
@example_in_turns(
    4, layers=(("column_row", 5),), mesh=MESHES[3], stage=1, ways=("fused",), policy="plain", optimizer="adafactor"
)
@example_in_turns(
    4, layers=(("column_row", 5),), mesh=MESHES[3], stage=3, ways=("fused",), policy="plain", optimizer="in front"
)
@example_in_turns(
    4, layers=(("column_row", 3),), mesh=MESHES[0], stage=2, ways=(), policy="plain", optimizer="in front"
)
@given(**drawn, optimizer=st.sampled_from(sorted(WHOLE)))
def test_exchanges_of_whole_leaves_are_what_every_rank_sends(
    layers: Layers, mesh: Mesh, stage: int, ways: tuple[str, ...], policy: str, optimizer: str
) -> None:
    sizes, axis, replicate = mesh
    policy = "plain" if policy == "compact" else policy  # of which fz.whole carries no moments
    together = threading.Barrier(torch.Size(sizes).numel())

    def rank_main(rank: int) -> None:
        real = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=AXES)
        step, params = made(layers, mesh, stage, ways, policy, real)
        own = fz.partition({"*.bias|*.scale": fz.chain(fz.adaptive_clip(0.1), fz.sgd(0.1)), "*": WHOLE[optimizer]()})
        own = own if any(kind == "column_row" for kind, _ in layers) else WHOLE[optimizer]()
        step = dataclasses.replace(step, optimizer=own)
        plan, state = fz.plan(step, params, rank=rank), step.init(params)
        together.wait()
        if rank == 0:
            sent.clear()
        together.wait()
        step(state, torch.ones(2, WIDTH))
        together.wait()
        found = sent.by_axis(rank, real, (axis, (replicate or "tp",), ("tp",)))
        assert found == {x.axis: (x.nbytes, x.messages) for x in plan.messages if x.purpose == "leaves"}

    with leaves_counted() as sent:
        run_ranks(rank_main, together.parties)


@given(blocks=zoo.drawn_blocks, tied=st.booleans(), sequence=st.booleans(), ranks=st.integers(1, 4))
def test_what_a_module_sends(blocks: Any, tied: bool, sequence: bool, ranks: int) -> None:
    """The maps of its conversions, in a dry run with a mesh to which nothing is sent and on ranks."""
    model, batch = zoo.made(blocks, tied), zoo.batches(1)[0]
    apply, params = fz.functional(model)
    plan = {**model.plan([True] * len(blocks)), "embedding": "vocabulary"}

    def over(mesh: Any) -> fz.Step:
        step = fz.train_step(zoo.loss_of(apply), fz.sgd(0.1))
        return fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence)

    with fz.testing.fake_mesh({"tp": ranks}) as mesh:
        planned = fz.plan(over(mesh), params, mesh=mesh, inputs=batch)
    own = [(each.messages, each.nbytes) for each in planned.messages if each.purpose == "function"]

    def rank_main(rank: int) -> tuple[int, int]:
        step = over(torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)))
        state = step.init(params)
        step.vjp(state, *batch)  # in which units run twice
        with recorded_collectives() as record:
            out, pullback = step.vjp(state, *batch)
            pullback(torch.ones_like(out))
        of_loss = (1, 8 * (ranks - 1)) if ranks > 1 else (0, 0)  # which is compared
        return len(record) - of_loss[0], sum(size for *_, size in record) - of_loss[1]

    assert (own or [(0, 0)]) == [run_ranks(rank_main, ranks)[0]]


# ---- hundreds of ranks, none of which is there


@st.composite
def large(draw: st.DrawFn) -> tuple[fz.Step, dict[str, torch.Tensor], dict[str, int], int]:
    """A step of cut leaves of any shapes, the leaves, a mesh and a stage."""
    params, plan = dict[str, torch.Tensor](), dict[str, Any]()
    for number in range(draw(st.integers(1, 4))):
        shape, name = draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)), f"layers.{number}.w"
        params[name] = torch.empty(shape, device="meta", dtype=draw(st.sampled_from([torch.float32, torch.float64])))
        dim = draw(st.integers(-len(shape), len(shape) - 1))
        multiple = draw(st.sampled_from([each for each in (1, 2, 4) if shape[dim] % each == 0]))
        cut = draw(st.integers(0, shape[dim] // multiple)) * multiple
        if draw(st.booleans()):
            plan[name] = fz.parallel.cut(dim, (cut, shape[dim] - cut), multiple) if draw(st.booleans()) else dim
    sizes = {axis: draw(st.integers(1, 16)) for axis in draw(st.permutations(("dp", "tp", "sp")))}
    stage, step = draw(st.integers(0, 3)), fz.train_step(lambda p: p, fz.adamw(1e-3))
    step = fz.shard_tensor(step, plan) if plan else step
    return exactness.SHARDS[stage](step), params, sizes, stage


@given(large())
def test_all_ranks_of_a_large_mesh_hold_every_element_of_every_leaf(made: Any) -> None:
    step, params, sizes, stage = made
    plan = fz.plan(step, params, mesh=sizes)
    ranks = range(plan.world_size)
    assert plan.mesh == sizes and plan.world_size == torch.Size(sizes.values()).numel()
    for row in plan.rows:
        elements = torch.arange(row.numel).view(row.shape)
        seen = torch.zeros(row.numel, dtype=torch.int64)
        for rank in ranks:
            held = plan.held(row.path, rank)
            own = elements
            if held.dim is not None:
                own = torch.cat([own.narrow(held.dim, *piece) for piece in held.ranges], held.dim)
            seen[own.reshape(-1)[held.start : held.stop]] += 1
        cut = (sizes["dp"] if stage else 1) * (sizes["tp"] if row.slices is not None else 1)
        assert seen.eq(plan.world_size // cut).all()


@given(large(), st.data())
def test_the_first_rank_has_the_most(made: Any, data: st.DataObject) -> None:
    step, params, sizes, stage = made
    first = fz.plan(step, params, mesh=sizes)
    rank = data.draw(st.integers(0, first.world_size - 1))
    other = fz.plan(step, params, mesh=sizes, rank=rank)
    for kind in ("params", "grads", "moments", "sent", "gathered"):
        assert getattr(other, kind) <= getattr(first, kind)
    shapes = {row.path: first.held(row.path, rank).shape for row in other.rows}
    slices = sum(torch.Size(shapes[row.path]).numel() * row.dtype.itemsize for row in other.rows)
    cut, whole = (sizes["dp"], 1) if stage == 3 else (1, sizes["dp"] if stage else 1)
    assert slices / cut <= other.params <= slices / cut + 2 * 64 * 8 * len(other.rows) * whole  # of alignment


W = {"w": torch.empty(64, 8, device="meta"), "b": torch.empty(8, device="meta")}
STEP = fz.train_step(lambda p, x: x, fz.adamw(1e-3))
BOTH = fz.shard_zero3(fz.shard_tensor(STEP, {"w": 1, "b": 0}))


def test_thousands_of_ranks_take_no_time_and_no_memory() -> None:
    plan = fz.plan(BOTH, {"w": torch.empty(1 << 20, 1 << 14, device="meta"), "b": W["b"]}, mesh={"dp": 1024, "tp": 16})
    assert plan.world_size == 1 << 14 and plan.params == (1 << 34) // (1 << 14) * 4 + 4 * 64


def test_the_text_says_which_axes_cut_which_dims() -> None:
    text = str(fz.plan(BOTH, W, mesh={"dp": 4, "tp": 3}))
    assert "w     64×8   tp: dim 1 (2×3 + 1×2), dp: flat" in text
    assert "12 ranks (dp 4 × tp 3)" in text and "\nrank 0: params" in text
    assert "\nsent per step over tp: norm 32 B in 1 message" in text
    assert "cut" not in str(fz.plan(fz.shard_zero3(STEP), W, world_size=4))


def test_axes_that_are_taken_as_one() -> None:
    with fz.testing.fake_mesh({"replicas": 2, "dp": 64, "sp": 8, "tp": 4}) as mesh:
        step = fz.shard_zero3(fz.shard_tensor(STEP, {"w": 1}, mesh), mesh=mesh, axis=("dp", "sp"), replicate="replicas")
        plan = fz.plan(step, W)
    assert plan.mesh == {"replicas": 2, "dp": 64, "sp": 8, "tp": 4} and set(plan.by_axis) == {"dp×sp", "replicas", "tp"}
    assert "tp: dim 1 (4×2), dp×sp: flat" in str(plan) and "fp32, dp×sp" in str(plan)
    numbers = {axis: plan.ranks.coordinates(rank := 3 + 4 * (5 + 8 * 7))[axis] for axis in plan.mesh}
    assert numbers == {"replicas": 0, "dp": 7, "sp": 5, "tp": 3} and plan.ranks.place(("dp", "sp"), rank) == 8 * 7 + 5
    smaller = fz.plan(step, W, mesh={"replicas": 1, "dp": 2, "sp": 1, "tp": 1})
    assert set(smaller.by_axis) == {"dp×sp"} and smaller.params > plan.params


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"mesh": {"dp": 2}}, r"got mesh=\{'dp': 2\}, which has no axis 'tp', expected"),
        ({"mesh": {"dp": 2, "tp": 2}, "world_size": 4}, "got world_size=4 and a mesh, expected one of the two"),
        ({"mesh": {"dp": 2, "tp": 0}}, r"got mesh\['tp'\]=0, expected at least 1"),
        ({"mesh": {}}, r"got mesh=\{\}, expected a dict of axes"),
        ({"mesh": {"dp": 2, "tp": 2}, "rank": 4}, "got rank=4, expected one from 0 to 3, of the mesh dp 2 × tp 2"),
        ({"world_size": 4}, r"axes 'dp', 'tp' without a mesh that says how many ranks each has.*mesh=\{'dp'"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"plan: .*{said}"):
        fz.plan(BOTH, W, **arguments)


def test_axes_in_another_order_are_refused() -> None:
    with fz.testing.fake_mesh({"dp": 2, "sp": 2}) as mesh:
        step = fz.shard_zero3(STEP, mesh=mesh, axis=("dp", "sp"))
    with pytest.raises(ValueError, match=r"in the order \('dp', 'sp'\): the first is the slowest"):
        fz.plan(step, W, mesh={"sp": 2, "dp": 2})


def test_a_leaf_that_there_is_not() -> None:
    with pytest.raises(KeyError, match="no leaf 'v'; the leaves are b, w"):
        fz.plan(STEP, W).held("v", 0)
    with pytest.raises(ValueError, match=r"Plan.held: got rank=1, expected one from 0 to 0"):
        fz.plan(STEP, W).held("w", 1)
