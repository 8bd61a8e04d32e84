"""`weighted_mean` where a step takes means of it: exact with weights, refused without; ranks that exchange values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY, in_turns
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
PARAMS = {"w": torch.randn(3, 1, generator=torch.Generator().manual_seed(0), dtype=F64)}


def batches_of(sizes: list[int], seed: int, left_out: float = 0.5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(n, 3, generator=generator, dtype=F64), (torch.rand(n, generator=generator) > left_out).to(F64))
        for n in sizes
    ]


def values(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])[:, 0].square()


def in_one_process(batches: Any) -> tuple[torch.Tensor, Any]:
    x, kept = map(torch.cat, zip(*batches, strict=True))
    grads, loss = torch.func.grad_and_value(lambda p: (values(p, x) * kept).sum() / kept.sum())(PARAMS)
    return loss, grads


def counted(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return kept.sum()


@settings(max_examples=60 if NIGHTLY else 4)
@given(st.lists(st.integers(2, 6), min_size=4, max_size=4), st.integers(1, 3), st.integers(0, 9), st.booleans())
def test_with_the_same_weights_it_is_exact_over_any_axis(sizes: Any, count: int, seed: int, replicated: bool) -> None:
    batches = batches_of(sizes, seed)
    batches[0][1][0] = 1.0
    want, grads = in_one_process(batches)

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        for name in (None, "sp", ("dp", "sp")):
            ax = None if name is None else fz.parallel.axis(mesh, name)
            fn = lambda p, x, kept, ax=ax: fz.parallel.weighted_mean(values(p, x), kept, ax)
            step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), count, weights=counted)
            more: dict[str, Any] = {"axis": "sp", "replicate": "dp"} if replicated else {"axis": ("dp", "sp")}
            step = fz.shard_zero2(step, mesh=mesh, **more)
            new, metrics = step(step.init(PARAMS), *batches[rank])
            assert_trees_close(metrics["loss"], want, **CLOSE)
            assert_trees_close(fz.gather(new.params)["w"], PARAMS["w"] - grads["w"], **CLOSE)

    run_ranks(rank_main, 4)


def test_without_weights_microbatches_are_refused_whatever_they_count() -> None:
    batches = batches_of([4, 4], 0, left_out=0.0)

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "dp")
        fn = lambda p, x, kept: fz.parallel.weighted_mean(values(p, x), kept, ax)
        for shard in (fz.shard_zero1, fz.shard_zero3):
            step = fz.accumulate(shard(fz.train_step(fn, fz.sgd(1.0))), 2)
            state = step.init(PARAMS)
            for call in (step, step.vjp, step.forward, fz.fuse_update(step)):
                with pytest.raises(
                    ValueError, match=r"weighted_mean: got a call in a step of 2 microbatches.*weights="
                ):
                    call(state, *batches[rank])
            one = fz.accumulate(shard(fz.train_step(fn, fz.sgd(1.0))), 1)
            loss = one(one.init(PARAMS), *batches[rank])[1]["loss"]
            assert_trees_close(loss, in_one_process(batches)[0], **CLOSE)

    run_ranks(rank_main, 2)
    last = lambda p, h, kept: fz.parallel.weighted_mean(h[:, 0].square(), kept, None)
    steps = [fz.train_step(fn, fz.sgd(1.0)) for fn in (lambda p, x: torch.tanh(x @ p["w"]), last)]
    x, kept = batches[0]
    for weights in (None, counted):
        pipe = fz.pipeline(steps, fz.schedules.one_f_one_b(2, 2), weights=weights)
        state = pipe.init([PARAMS, {"v": torch.ones(1, dtype=F64)}])
        if weights is not None:
            assert_trees_close(pipe.forward(state, x, kept), in_one_process(batches[:1])[0], **CLOSE)
            continue
        for call in (pipe, pipe.vjp, pipe.forward):
            with pytest.raises(ValueError, match=r"weighted_mean: got a call in a step of 2 microbatches"):
                call(state, x, kept)


@pytest.mark.parametrize("name", [None, "sp", "dp"])
@pytest.mark.parametrize("replicated", [False, True])
def test_one_over_some_of_the_ranks_alone_is_refused(name: str | None, replicated: bool) -> None:
    batches = batches_of([2, 3, 2, 4], 0)

    def rank_main(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "sp"))
        ax = None if name is None else fz.parallel.axis(mesh, name)
        fn = lambda p, x, kept: fz.parallel.weighted_mean(values(p, x), kept, ax)
        more: dict[str, Any] = {"axis": "sp", "replicate": "dp"} if replicated else {"axis": ("dp", "sp")}
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(1.0)), mesh=mesh, **more)
        state = step.init(PARAMS)
        match = r"weighted_mean: got a call over .* in a step that takes means over ranks \[.*fz.parallel.axis\(mesh"
        for call in (step, step.vjp):
            with pytest.raises(ValueError, match=match):
                call(state, *batches[rank])
        if name is None:  # of no mean over ranks it is no part
            x, kept = batches[rank]
            own = (values(PARAMS, x) * kept).sum() / kept.sum()
            assert_trees_close(step.forward(state, x, kept).nan_to_num(), own.nan_to_num(), **CLOSE)

    run_ranks(rank_main, 4)


def _attended(x: torch.Tensor, attention: Any) -> torch.Tensor:
    return attention(*[x.expand(-1, 2)[None, None]] * 3)[0, 0, :, :1]


MIXED: dict[str, Any] = {
    "sum": fz.parallel.sum,
    "gather": lambda x, ax: sum(fz.parallel.gather(x, ax, 0).chunk(2)),
    "reduce_scatter": lambda x, ax: fz.parallel.reduce_scatter(x.repeat(2, 1), ax, 0),
    "ring_shift": fz.parallel.ring_shift,
    "all_to_all": lambda x, ax: sum(fz.parallel.all_to_all(x.expand(-1, 2), ax, 1, 0).chunk(2)),
    "ring": lambda x, ax: _attended(x, fz.parallel.ring(ax)),
    "ulysses": lambda x, ax: _attended(x, fz.parallel.ulysses(None, ax)),
}


@in_turns(2)
@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("staged", [False, True])
def test_whatever_ranks_exchange_counts_where_their_own_loss_does_not(mixed: str, staged: bool) -> None:
    """In a function, and in a stage behind others: as in a step without weights whose losses are weighted already."""
    batches = batches_of([4, 4], 0, left_out=0.0)
    batches[1][1][:] = 0.0
    last = {"w": torch.ones(1, 1, dtype=F64)}
    first = lambda p, x: torch.tanh(x @ p["w"])

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "dp")

        def second(p: Any, own: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            return (((own * MIXED[mixed](own, ax)) @ p["w"])[:, 0].square() * kept).sum() / kept.sum().clamp(min=1)

        both = lambda p, x, kept: second(p["last"], first(p["first"], x), kept)
        plain = fz.shard_zero3(fz.train_step(lambda *args: 2 * both(*args), fz.sgd(1.0)))
        state, metrics = plain(plain.init({"first": PARAMS, "last": last}), *batches[rank])
        want = metrics["loss"], *fz.gather(state.params).values()
        if staged:
            steps = [fz.shard_zero3(fz.train_step(fn, fz.sgd(1.0))) for fn in (first, second)]
            pipe = fz.pipeline(steps, fz.schedules.gpipe(stages=2, microbatches=1), weights=counted)
            states, metrics = pipe(pipe.init([PARAMS, last]), *batches[rank])
            assert_trees_close((metrics["loss"], *[fz.gather(own.params) for own in states]), want, **CLOSE)
        else:
            step = fz.accumulate(fz.shard_zero3(fz.train_step(both, fz.sgd(1.0))), 1, weights=counted)
            state, metrics = step(step.init({"first": PARAMS, "last": last}), *batches[rank])
            assert_trees_close((metrics["loss"], *fz.gather(state.params).values()), want, **CLOSE)

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("shard", [fz.shard_zero1, fz.shard_zero3])
def test_what_a_rank_gives_to_others_counts_where_its_own_loss_does_not(shard: Any) -> None:
    """Keys and values of a piece without targets, say: its gradients belong to the losses of other ranks."""
    batches = batches_of([4, 4], 0, left_out=0.0)
    batches[1][1][:] = 0.0

    def loss_of(own: torch.Tensor, everyones: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        return ((own * everyones)[:, 0].square() * kept).sum() / kept.sum().clamp(min=1)

    def whole(p: Any) -> torch.Tensor:
        own = [torch.tanh(x @ p["w"]) for x, _ in batches]
        return loss_of(own[0], own[0] + own[1], batches[0][1])

    grads, want = torch.func.grad_and_value(whole)(PARAMS)

    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "dp")

        def fn(p: Any, x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            own = torch.tanh(x @ p["w"])
            return loss_of(own, fz.parallel.sum(own, ax), kept)

        step = fz.accumulate(shard(fz.train_step(fn, fz.sgd(1.0))), 2, weights=counted)
        new, metrics = step(step.init(PARAMS), *batches[rank])
        assert_trees_close(metrics["loss"], want, **CLOSE)
        assert_trees_close(fz.gather(new.params)["w"], PARAMS["w"] - grads["w"], **CLOSE)

    run_ranks(rank_main, 2)
