"""Ulysses against all scores at once in one process: any heads, KV heads, lengths, ranks and chunks; with rings."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from attentions import F64, Case, derivatives, need_equal, plain
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from reference import adamw_steps
from test_ring import options

import fzero as fz
from fzero.comm import pieces
from fzero.parallel import visible
from fzero.testing import LiveBytes, assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.integers(1, 4))
    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=ranks, max_size=ranks).filter(any)))
    kv_heads = draw(st.integers(1, 4))
    heads, d = kv_heads * draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = draw(st.just(d) | st.integers(1, 4))  # torch's kernel wants both alike
    chunks, custom = draw(st.integers(1, 4)), draw(st.booleans())
    return Case(
        lengths,
        heads,
        kv_heads,
        d,
        size,
        chunks,
        "contiguous",
        draw(options(sum(lengths))),
        custom,
        2,
        draw(st.booleans()),
    )


@by_day(6)
@given(case=cases(), shortest=st.sampled_from([1, 32]))
def test_equals_one_process(case: Case, shortest: int) -> None:
    with mock.patch.object(visible, "SHORTEST", shortest):
        need_equal(case)


def on_two_axes(rank: int, order: str, heads: int, kv_heads: int) -> dict[str, float]:
    """A ring over axis 0, whose pieces are cut over axis 1, against one process."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ring", "sp"))
    axes = [fz.parallel.axis(mesh, name) for name in ("ring", "sp")]
    case = Case((5, 4), heads, kv_heads, order=order)
    own = case.places(axes[0].rank)
    places = own.split(pieces.balanced(len(own), 2))[axes[1].rank]
    given: dict[str, Any] = {"is_causal": True, "documents": (0, 3, case.total)}
    attend = fz.parallel.ulysses(fz.parallel.ring(axes[0], order, **given), axes[1], chunks=2)
    tensors, along = case.tensors(0), case.tensors(1)
    cut = [tuple(x[..., places, :] for x in each) for each in (tensors, along)]
    found, expected = derivatives(attend, *cut), derivatives(functools.partial(plain, **given), tensors, along)
    return {name: (found[name] - whole[..., places, :]).abs().max().item() for name, whole in expected.items()}


@in_turns(3)
@pytest.mark.parametrize(("order", "heads", "kv_heads"), [("contiguous", 4, 2), ("zigzag", 3, 1), ("zigzag", 1, 1)])
def test_with_a_ring_on_two_axes(order: str, heads: int, kv_heads: int) -> None:
    for found in run_ranks(functools.partial(on_two_axes, order=order, heads=heads, kv_heads=kv_heads), 4):
        assert all(size < 1e-10 for size in found.values()), found


def test_a_function_of_its_own_that_captures_what_is_differentiated() -> None:
    """A bias that attention adds gets its cotangent: from each rank for the heads that it had."""

    def total(bias: torch.Tensor, x: torch.Tensor, attend: Any = None) -> torch.Tensor:
        def biased(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return (q @ k.mT + bias).softmax(-1) @ v

        return (biased if attend is None else attend(biased))(x, x.sin(), x.cos()).square().sum()

    x, bias = Case((2, 3), 3, 3).tensors(0)[0], torch.linspace(0, 1, 5, dtype=F64)

    def grad(rank: int) -> torch.Tensor:
        ax = fz.parallel.axis(None, "sp")
        own = x.split([2, 3], 2)[rank]
        return torch.func.grad(
            lambda bias: total(fz.parallel.copy(bias, ax), own, lambda each: fz.parallel.ulysses(each, ax))
        )(bias)

    expected = torch.func.grad(total)(bias, x)
    for found in run_ranks(grad, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


# ---- in real steps: one layer of attention, as little as has a loss of tokens


Params = dict[str, torch.Tensor]


def params_of() -> Params:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (7, 6), "q": (6, 6), "kv": (6, 4), "head": (6, 7)}
    return {name: torch.randn(shape, generator=generator, dtype=F64) for name, shape in shapes.items()}


def logits_of(p: Params, tokens: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
    """Three heads of two numbers, of which all share one KV head."""
    x = p["embed"][tokens] + torch.cos(positions)[..., None]
    q = (x @ p["q"]).unflatten(-1, (3, 2)).transpose(1, 2)
    k, v = (x @ p["kv"]).unflatten(-1, (2, 1, 2)).permute(2, 0, 3, 1, 4)
    return attend(q, k, v).transpose(1, 2).flatten(2) @ p["head"]


def batch_of() -> dict[str, Any]:
    ids = torch.randint(7, (2, 9), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "documents": (0, 4, 9)}


def train(rank: int, which: str, shape: tuple[int, int]) -> tuple[Any, list[tuple[float, float]]]:
    mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "sp"))
    dp, sp, both = [fz.parallel.axis(mesh, name) for name in ("dp", "sp", ("dp", "sp"))]
    order = "zigzag" if which == "ring" else "contiguous"
    kind = fz.parallel.ulysses(None, sp, 2) if which == "ulysses" else fz.parallel.ring(sp, order)
    batch = fz.parallel.shard_sequence(batch_of(), sp, order=order)
    documents = batch.pop("documents")
    attend = functools.partial(kind, is_causal=True, documents=documents)

    def loss(p: Params, input_ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits = logits_of(p, input_ids, positions, attend)
        losses = torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")
        return fz.parallel.weighted_mean(losses, labels != -100, both)

    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)))
    step = fz.shard_zero3(step, mesh=mesh, axis=("dp", "sp"))
    state = step.init(params_of())
    own = [batch[name].tensor_split(dp.size)[dp.rank] for name in ("input_ids", "shift_labels", "position_ids")]
    losses = []
    for _ in range(3):
        state, metrics = step(state, *own)
        losses.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    return fz.gather(state.params), losses


@in_turns(2)
@pytest.mark.parametrize("which", ["ulysses", "ring"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 2)])
def test_a_step_on_pieces_is_that_of_whole_sequences(which: str, shape: tuple[int, int]) -> None:
    def plainly(p: Params, ids: torch.Tensor, labels: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        attend = functools.partial(plain, is_causal=True, documents=(0, 4, 9))
        return torch.nn.functional.cross_entropy(logits_of(p, ids, positions, attend).mT, labels)

    ids, positions = batch_of()["input_ids"], torch.tensor([0, 1, 2, 3, 0, 1, 2, 3, 4]).expand(2, -1)
    labels = torch.cat([ids[:, 1:], ids[:, :1]], 1).index_fill(1, torch.tensor([3, 8]), -100)
    params, losses, norms = adamw_steps(plainly, params_of(), [(ids, labels, positions)], 3, max_norm=0.1)
    for got in run_ranks(functools.partial(train, which=which, shape=shape), shape[0] * shape[1]):
        assert_trees_close(got[0], params, rtol=1e-10)
        expected = torch.tensor([*zip(losses, norms, strict=True)])
        torch.testing.assert_close(torch.tensor(got[1]), expected, rtol=1e-10, atol=0)


# ---- what it needs


def peak(rank: int, chunks: int) -> tuple[int, int]:
    """Bytes that attention and its pullback need at most, beside inputs, output and cotangents."""
    generator = torch.Generator().manual_seed(rank)
    q, k, v, cotangent = [torch.randn(1, 16, 256, 64, generator=generator) for _ in range(4)]
    attend = fz.parallel.ulysses(None, fz.parallel.axis(None, "sp"), chunks)
    with LiveBytes() as live:
        out, pull = torch.func.vjp(attend, q, k, v)  # type: ignore[misc]
        forward = live.peak - out.nbytes
        live.reset_peak()
        grads = pull(cotangent)
        backward = live.peak - out.nbytes - sum([x.nbytes for x in grads])
    return forward, backward


def test_chunks_bound_what_is_between() -> None:
    plain, parts = [run_ranks(functools.partial(peak, chunks=chunks), 2)[0] for chunks in (1, 8)]
    assert all(small <= large / 8 for small, large in zip(parts, plain, strict=True)), (plain, parts)


def test_mistakes() -> None:
    def wrong_result(rank: int) -> None:
        x = torch.ones(1, 2, 2, 2)
        fz.parallel.ulysses(lambda q, k, v: q[:, :, :1], fz.parallel.axis(None, "sp"))(x, x, x)

    def heads(rank: int) -> str:
        x = torch.ones(1, 2 + rank, 2, 2)
        with pytest.raises(ValueError, match="rank 1 differs from rank 0") as info:
            fz.parallel.ulysses(None, fz.parallel.axis(None, "sp"))(x, x, x)
        return str(info.value)

    with pytest.raises(fz.testing.RankError, match=r"expected a tensor of shape \(1, 1, 4, 2\)"):
        run_ranks(wrong_result, 2)
    assert len(set(run_ranks(heads, 2))) == 1
    with pytest.raises(fz.testing.RankError, match="chunks=2 with an attention of your own"):
        run_ranks(lambda rank: fz.parallel.ulysses(plain, fz.parallel.axis(None, "sp"), chunks=2), 2)
    with pytest.raises(TypeError, match="got ax=None, expected an axis"):
        fz.parallel.ulysses(None, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("which", ["order", "chunks", "inner"])
def test_functions_that_differ_between_ranks_are_refused_on_all(which: str) -> None:
    def run(rank: int) -> None:
        ax, x = fz.parallel.axis(None, "sp"), torch.ones(1, 2, 4, 2)
        ways = {
            "order": lambda: fz.parallel.ring(ax, "zigzag" if rank else "contiguous"),
            "chunks": lambda: fz.parallel.ulysses(None, ax, 1 + rank),
            "inner": lambda: fz.parallel.ulysses(plain, ax) if rank else fz.parallel.ulysses(None, ax),
        }
        with pytest.raises(ValueError, match="from the ranks of axis 'sp', expected the same"):
            ways[which]()(x, x, x)

    run_ranks(run, 2)


def test_examples_one_by_one_have_no_sequences_over_ranks() -> None:
    def run(rank: int, which: str) -> None:
        ax = fz.parallel.axis(None, "dp")
        attend = fz.parallel.ring(ax)  # made outside, as usual
        maps = {
            "ulysses": lambda x: fz.parallel.ulysses(None, ax)(x, x, x),
            "ring": lambda x: attend(x, x, x),
            "sum": lambda x: fz.parallel.sum(x, ax),
            "weighted_mean": lambda x: fz.parallel.weighted_mean(x, torch.ones_like(x), ax),
        }
        call = maps[which]
        step = fz.shard_zero3(fz.train_step(lambda p, x: call(p["w"] * x).square().mean(), fz.sgd(0.1)))
        with pytest.raises(ValueError, match=r"fz\.per_example_grads takes examples one by one"):
            fz.per_example_grads(step, step.init({"w": torch.ones(2)}), torch.ones(3, 1, 4, 2))

    for which in ("ulysses", "ring", "sum", "weighted_mean"):
        run_ranks(functools.partial(run, which=which), 2)


def test_what_is_wrong_on_one_rank_is_refused_on_all() -> None:
    """Nobody waits for a rank that has raised before it told the others."""

    def run(rank: int, which: str, name: str) -> None:
        ax, x = fz.parallel.axis(None, "sp"), torch.ones(1, 2, 4, 2)
        attention = {
            "ring": fz.parallel.ring(ax),
            "ulysses": fz.parallel.ulysses(None, ax),
            "custom": fz.parallel.ulysses(plain, ax),
        }[name]
        wrong = {"list": [x], "none": None, "integers": x.long(), "dtypes": x.double(), "scale": x}[which]
        options = {"scale": float("nan")} if which == "scale" and rank else {}
        with pytest.raises((TypeError, ValueError)):
            attention(x, wrong if rank else x, x, **options)

    for name in ("ring", "ulysses", "custom"):
        for which in ("list", "none", "integers", "dtypes", "scale"):
            run_ranks(functools.partial(run, which=which, name=name), 2)


def test_ulysses_of_ulysses_is_one_axis() -> None:
    def run(rank: int) -> None:
        ax = fz.parallel.axis(None, "sp")
        for inner in (fz.parallel.ulysses(None, ax), fz.parallel.ulysses(plain, ax)):
            with pytest.raises(ValueError, match="takes two axes as one"):
                fz.parallel.ulysses(inner, ax)

    run_ranks(run, 2)


@pytest.mark.parametrize("options", [{"scale": 0.0}, {"scale": -0.5}, {"window": 2**63 - 1}, {"window": 2**63}])
def test_extreme_options(options: dict[str, Any]) -> None:
    q, k, v, weight = [torch.randn(2, 3, 9, 4, dtype=F64) for _ in range(4)]
    small = {**options, "window": 9} if "window" in options else options
    found, expected = [
        torch.func.vjp(functools.partial(attend, is_causal=True, **own), q, k, v)  # type: ignore[misc]
        for attend, own in ((fz.parallel.attention, options), (plain, small))
    ]
    assert_trees_close((found[0], found[1](weight)), (expected[0], expected[1](weight)), rtol=1e-10, atol=1e-12)


def test_no_examples() -> None:
    x = torch.ones(0, 2, 4, 2, requires_grad=True)
    out = fz.parallel.attention(x, x, x, is_causal=True, window=2)
    assert out.shape == x.shape and torch.autograd.grad(out.sum(), x)[0].shape == x.shape
    with pytest.raises(ValueError, match="at least one feature"):
        y = torch.ones(1, 2, 4, 0)
        fz.parallel.attention(y, y, y)


def drifting(rank: int, ways: str, own_params: bool, shard: bool) -> float:
    mesh = torch.distributed.init_device_mesh("cpu", (1 + shard, 2), mesh_dim_names=("dp", "sp"))
    ax = fz.parallel.axis(mesh, "sp")
    attend = fz.parallel.ring(ax, is_causal=True)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        w = fz.parallel.copy(p["w"], ax) if ways == "copied" else p["w"]
        out = attend(x * w, x, x * w)
        return fz.parallel.sum(out.square().sum(), ax) / 8 if ways != "averaged" else out.square().mean()

    step = fz.train_step(loss, fz.sgd(0.1))
    axis = ("dp", "sp") if ways == "averaged" else "dp"
    step = fz.shard_zero3(step, mesh=mesh, axis=axis) if shard or ways == "averaged" else step
    state = step.init({"w": torch.ones(2, dtype=F64) + own_params * (rank % 2)})
    x = torch.randn(1, 1, 2, 2, dtype=F64, generator=torch.Generator().manual_seed(rank))
    for _ in range(2):
        state, metrics = step(state, x)
    return metrics["loss"].item()


@in_turns(2)
@pytest.mark.parametrize("shard", [False, True])
def test_a_sequence_axis_that_the_step_does_not_name(shard: bool) -> None:
    """Ranks with the same params would drift apart; where each rank has its own, grads are its own."""

    def run(ways: str, own_params: bool = False) -> list[float]:
        return run_ranks(functools.partial(drifting, ways=ways, own_params=own_params, shard=shard), 2 + 2 * shard)

    assert len(set(run("copied"))) == 1
    run("averaged")
    run("forgotten", own_params=True)
    with pytest.raises(fz.testing.RankError, match="grads of leaf 'w' differ between the ranks of axis 'sp'"):
        run("forgotten")
    if shard:  # each of them, whatever lies in its shard

        def refused(rank: int) -> str:
            with pytest.raises(ValueError) as info:
                drifting(rank, "forgotten", False, True)
            return str(info.value)

        assert all("grads of leaf 'w' differ between the ranks of axis 'sp'" in said for said in run_ranks(refused, 4))
