"""Means over what microbatches have different numbers of, against the mean over everything in one torch process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks, strategies

F64 = torch.float64
CLOSE = {"rtol": 1e-10, "atol": 1e-12}
IGNORED = -100
Batch = tuple[torch.Tensor, torch.Tensor]


def params_of(blocks: int, width: int, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=F64)
    return {
        "blocks": [{"w": draw(width, width), "b": draw(width)} for _ in range(blocks)],
        "head": {"w": draw(width, 1)},
    }


def _block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"] + p["b"])


def errors(p: Any, x: torch.Tensor, y: torch.Tensor, block: Any = fz.unit(_block)) -> torch.Tensor:  # noqa: B008
    for own in p["blocks"]:
        x = block(own, x)
    return (x @ p["head"]["w"])[:, 0] - y.clamp(min=-9).to(F64)


def token_mean(p: Any, x: torch.Tensor, y: torch.Tensor, **own: Any) -> torch.Tensor:
    """The mean over targets that are not ignored; over none it is NaN, and so are all of its derivatives."""
    kept = (y != IGNORED).to(F64)
    return (errors(p, x, y, **own) ** 2 * kept).sum() / kept.sum()


def tokens(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    assert not (torch.is_grad_enabled() or x.requires_grad)
    return (y != IGNORED).sum()


def example_mean(p: Any, x: torch.Tensor, y: torch.Tensor, **own: Any) -> torch.Tensor:
    return (errors(p, x, y, **own) ** 2).sum() / len(x)  # NaN where there are none


def batches_of(sizes: Sequence[int], width: int, ignored: float, seed: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    out = []
    for size in sizes:
        y = torch.randint(-3, 4, (size,), generator=generator)
        y[torch.rand(size, generator=generator) < ignored] = IGNORED
        out.append((torch.randn(size, width, generator=generator, dtype=F64), y))
    return out


def in_one_process(loss: Any, params: Any, batches: Sequence[Batch]) -> tuple[torch.Tensor, Any, list[torch.Tensor]]:
    """(the mean of `loss` over some batches, its gradient, those by the inputs), by plain autograd."""
    leaves, spec = torch_pytree.tree_flatten(params)
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    given = [(x.clone().requires_grad_(), y) for x, y in batches]
    tree = torch_pytree.tree_unflatten(leaves, spec)
    value = torch.stack([loss(tree, *batch, block=_block) for batch in given]).mean()
    found = torch.autograd.grad(value, [*leaves, *[x for x, _ in given]])
    grads = torch_pytree.tree_unflatten(list(found[: len(leaves)]), spec)
    return value.detach(), grads, list(found[len(leaves) :])


SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


@st.composite
def cases(draw: st.DrawFn, least: int) -> Any:
    world, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    width = draw(st.integers(1, 4))
    stages = (1, 2, 3) if world > 1 else (0, 1, 2, 3)
    chosen = [pair for pair in draw(strategies.transforms(stages)) if pair[0] not in ("accumulate", "donate")]
    place = draw(st.integers(0, len(chosen)))
    sizes = draw(st.lists(st.integers(least, 7), min_size=world, max_size=world))
    params = params_of(draw(st.integers(1, 2)), width, draw(st.integers(0, 99)))
    batches = batches_of(sizes, width, draw(st.sampled_from([0.0, 0.4, 0.8])), draw(st.integers(0, 99)))
    return world, count, chosen, place, params, batches


def ranks_of(case: Any, loss: Any, weights: Any) -> list[Any]:
    """What each rank makes of a case: of a call, of a vjp, of a forward."""
    world, count, chosen, place, params, batches = case

    def rank_main(rank: int) -> Any:
        step = fz.train_step(loss, fz.sgd(1.0))
        for i, (_, transform) in enumerate([*chosen, ("", None)]):
            step = fz.accumulate(step, count, weights=weights) if i == place else step
            step = transform(step) if transform is not None else step
        state = step.init(params)
        out, pullback = step.vjp(state, *batches[rank])
        grads, (by_x, _) = pullback(torch.ones_like(out))
        assert_trees_equal(step.forward(state, *batches[rank]), out)
        new, metrics = step(state, *batches[rank])
        return metrics, fz.gather(new.params), out, fz.gather(grads), by_x

    return run_ranks(rank_main, world)


def hold(case: Any, found: list[Any], value: torch.Tensor, grads: Any, by_inputs: Sequence[torch.Tensor]) -> None:
    """Every rank has the numbers of one process."""
    world, params = case[0], case[4]
    after = torch_pytree.tree_map(torch.sub, params, grads)
    for (metrics, new, _, own, by_x), want in zip(found, by_inputs, strict=True):
        assert not metrics["skipped"]
        assert_trees_close(metrics["loss"], value, **CLOSE)
        assert_trees_close(new, after, **CLOSE)
        assert_trees_close(own, grads, **CLOSE)
        assert_trees_close(by_x, world * want, **CLOSE)  # of this rank's own scalar
    assert_trees_close(torch.stack([out for _, _, out, _, _ in found]).mean(), value, **CLOSE)


@given(cases(0))
def test_weights_give_the_mean_over_everything(case: Any) -> None:
    """Of microbatches that have nothing, and whose loss and gradients are NaN, nothing is added."""
    params, batches = case[4:]
    found = ranks_of(case, token_mean, tokens)
    if all(bool((y == IGNORED).all()) for _, y in batches):
        for metrics, new, out, *_ in found:
            assert metrics["skipped"] and metrics["loss"].isnan() and out.isnan()
            assert_trees_equal(new, params)
        return
    x, y = map(torch.cat, zip(*batches, strict=True))
    value, grads, (by_x,) = in_one_process(token_mean, params, [(x, y)])
    hold(case, found, value, grads, by_x.split([len(x) for x, _ in batches]))


@given(cases(1))
def test_a_batch_that_does_not_divide_gives_the_mean_over_its_examples(case: Any) -> None:
    """Also one of fewer examples than microbatches; ranks count the same."""
    found = ranks_of(case, example_mean, None)
    hold(case, found, *in_one_process(example_mean, case[4], case[5]))


def test_parts_that_divide_give_the_same_bits_as_a_plain_mean() -> None:
    params, (batch,) = params_of(2, 3, 0), batches_of([6], 3, 0.0, 0)
    step = fz.accumulate(fz.train_step(example_mean, fz.sgd(1.0)), 3)
    _, metrics = step(step.init(params), *batch)
    losses = [fz.train_step(example_mean, fz.sgd(1.0)).forward(step.init(params), *part) for part in pieces(batch, 3)]
    assert_trees_equal(metrics["loss"], torch.stack(losses).mean())


def pieces(batch: Batch, count: int) -> list[Batch]:
    return list(zip(*[x.tensor_split(count) for x in batch], strict=True))


@pytest.mark.parametrize("weights", [None, lambda x, y: 2.0 * len(x)])
@pytest.mark.parametrize("shard", [0, 3])
def test_outputs_with_dims_are_concatenated_and_their_cotangents_split(shard: int, weights: Any) -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([7], 3, 0.0, 0)

    def fn(p: Any, x: torch.Tensor, y: torch.Tensor, **own: Any) -> Any:
        return {"loss": example_mean(p, x, y, **own), "rows": errors(p, x, y, **own), "n": torch.tensor(len(x))}

    def rank_main(rank: int) -> None:
        step = fz.accumulate(SHARDS[shard](fz.train_step(fn, fz.sgd(1.0))), 3, weights=weights)
        state = step.init(params)
        out, pullback = step.vjp(state, *batch)
        assert out["rows"].shape == (7,) and out["n"].tolist() == [3, 2, 2]
        cotangent = {"loss": torch.tensor(2.0, dtype=F64), "rows": torch.arange(7.0, dtype=F64), "n": None}
        grads, _ = pullback(cotangent)
        whole = lambda p, *own, **more: (
            2 * example_mean(p, *own, **more) + (errors(p, *own, **more) * cotangent["rows"]).sum()
        )
        want = in_one_process(whole, params, [batch])[1]
        assert_trees_close(fz.gather(grads), want, **CLOSE)
        new, _ = step(state, *batch, cotangent=cotangent)
        assert_trees_close(fz.gather(new.params), torch_pytree.tree_map(torch.sub, params, want), **CLOSE)

    run_ranks(rank_main, 1)


def test_aux_is_averaged_over_this_rank() -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([5], 3, 0.0, 0)
    fn = lambda p, x, y: (example_mean(p, x, y), {"y": y.to(F64).mean(), "n": len(x)})
    for weights in (None, lambda x, y: len(x)):
        step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0), has_aux=True), 2, weights=weights)
        aux = step(step.init(params), *batch)[1]["aux"]
        assert_trees_close(aux["y"], batch[1].to(F64).mean(), **CLOSE)
        assert aux["n"].tolist() == [3, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_numbers_are_weighted_and_cotangents_of_outputs_with_dims_are_not(count: int) -> None:
    params, batches = params_of(1, 3, 0), batches_of([4, 4], 3, 0.0, 0)
    batches[1][1][:] = IGNORED  # whose outputs are somebody else's to weigh
    want = [in_one_process(lambda p, x, y, block: errors(p, x, y, block).sum(), params, [own])[1] for own in batches]

    def rank_main(rank: int) -> None:
        fn = lambda p, x, y: {"each": errors(p, x, y), "number": 2.5}
        step = fz.accumulate(fz.shard_zero3(fz.train_step(fn, fz.sgd(1.0))), count, weights=tokens)
        out, pullback = step.vjp(step.init(params), *batches[rank])
        assert out["number"] == (0.0 if rank else 5.0)  # this rank's part
        grads, _ = pullback({"each": torch.ones_like(out["each"]), "number": None})
        mean = torch_pytree.tree_map(lambda a, b: (a + b) / 2, *want)
        assert_trees_close(fz.gather(grads), mean, **CLOSE)

    run_ranks(rank_main, 2)


def test_ragged_examples_that_do_not_divide() -> None:
    """Each microbatch has the rows of its own examples."""
    lengths = torch.tensor([2, 0, 3, 1, 2])
    rows = torch.randn(8, 1, dtype=F64, generator=torch.Generator().manual_seed(0))

    def fn(p: Any, batch: Any) -> torch.Tensor:
        own = torch.stack([part.sum() for part in batch.values.split(batch.lengths.tolist())])
        return (p["w"] * own).sum() / len(own)

    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), 2)
    new, metrics = step(step.init({"w": torch.ones((), dtype=F64)}), fz.Ragged(rows, lengths))
    assert_trees_close(metrics["loss"], rows.sum() / 5, **CLOSE)
    assert_trees_close(fz.gather(new.params)["w"], 1 - rows.sum() / 5, **CLOSE)


# ---- what is refused


@pytest.mark.parametrize(
    ("weights", "error", "match"),
    [
        (lambda x, y: -1.0, ValueError, r"weights: got -1\.0 for microbatch 0, expected a finite number of at least 0"),
        (lambda x, y: float("inf"), ValueError, r"weights: got inf for microbatch 0"),
        (lambda x, y: torch.tensor(float("nan")), ValueError, r"weights: got nan for microbatch 0"),
        (lambda x, y: y, TypeError, r"weights: got a tensor of shape .* for microbatch 0, expected a real number"),
        (lambda x, y: None, TypeError, r"weights: got None for microbatch 0"),
        (lambda x, y: 1e308, ValueError, r"weights: got 1e\+308 for microbatch 0"),  # the sum is infinite
        (lambda x, y: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_a_weight_that_is_none_is_refused_on_every_rank(weights: Any, error: Any, match: str) -> None:
    params, batches = params_of(1, 3, 0), batches_of([2, 2], 3, 0.0, 0)

    def rank_main(rank: int) -> None:
        step = fz.train_step(example_mean, fz.sgd(1.0))
        own = weights if rank else lambda x, y: 1
        step = fz.accumulate(fz.shard_zero3(step), 2, weights=own)
        state = step.init(params)
        kind = error if rank else (TypeError if error is TypeError else ValueError)
        for call in (step, step.vjp, step.forward):
            with pytest.raises(kind, match=match if rank else f"on data rank 1: {error.__name__}: .*{match}"):
                call(state, *batches[rank])

    run_ranks(rank_main, 2)


def test_a_loss_in_16_bits_is_refused_where_microbatches_count_differently() -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([5], 3, 0.0, 0)
    step = fz.accumulate(fz.train_step(lambda p, x, y: example_mean(p, x, y).to(torch.bfloat16), fz.sgd(1.0)), 2)
    state = step.init(params)
    with pytest.raises(ValueError, match=r"scalar of torch.bfloat16.*Return loss.float\(\)"):
        step(state, *batch)
    step(state, *[x[:4] for x in batch])


def test_a_tape_of_weights_is_refused() -> None:
    step = fz.accumulate(fz.train_step(example_mean, fz.sgd(1.0)), 2, weights=tokens)
    with pytest.raises(ValueError, match=r"tape: got a step with fz.accumulate\(..., weights=...\)"):
        with fz.tape(step, step.init(params_of(1, 3, 0))):
            pass
    state = step.init(params_of(1, 3, 0))
    with pytest.raises(ValueError, match=r"hvp: got a step with fz.accumulate\(..., weights=...\)"):
        fz.hvp(step, state, state.params.map(torch.ones_like), *batches_of([4], 3, 0.0, 0)[0])


def test_weights_of_what_a_map_maps_over_are_refused() -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([4], 3, 0.0, 0)
    step = fz.accumulate(fz.train_step(example_mean, fz.sgd(1.0)), 2, weights=tokens)
    state = step.init(params)
    xs = torch.stack([batch[0]] * 2)
    with pytest.raises(TypeError, match=r"weights: got .* that torch.func.vmap maps over"):
        torch.func.vmap(lambda x: step.forward(state, x, batch[1]))(xs)


# ---- other derivatives


@settings(max_examples=60 if NIGHTLY else 5)
@given(st.integers(1, 2), st.integers(1, 4), st.lists(st.integers(0, 4), min_size=2, max_size=2), st.integers(0, 9))
def test_torch_func_goes_through_runs_on_ranks_whose_microbatches_do_not_count(
    world: int, count: int, sizes: list[int], seed: int
) -> None:
    """By params, a rate, inputs and what the function closes over, where the loss of what does not count is NaN."""
    params, batches = params_of(1, 2, seed), batches_of([3, *sizes][:world], 2, 0.6, seed)
    batches[0][1][0] = 1
    more = torch.tensor(1.5, dtype=F64), torch.tensor(0.1, dtype=F64)

    def after(rank: int, params: Any, scale: torch.Tensor, rate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        loss = lambda p, x, y: token_mean(p, x * scale, y)
        step = fz.accumulate(fz.train_step(loss, fz.sgd(rate)), count, weights=lambda x, y: (y != IGNORED).sum())
        step = fz.shard_zero3(step) if world > 1 else step
        state, metrics = step(step.init(params), x, batches[rank][1])
        return metrics["loss"] + step.forward(state, x, batches[rank][1])

    def plain(params: Any, scale: torch.Tensor, rate: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        y = torch.cat([y for _, y in batches])
        loss = lambda p: token_mean(p, torch.cat(inputs) * scale, y, block=_block)
        grads, value = torch.func.grad_and_value(loss)(params)
        return value + loss(torch_pytree.tree_map(lambda p, g: p - rate * g, params, grads))

    want = torch.func.grad(plain, tuple(range(3 + world)))(params, *more, *[x for x, _ in batches])

    def rank_main(rank: int) -> None:
        found = torch.func.grad(functools.partial(after, rank), (0, 1, 2, 3))(params, *more, batches[rank][0])
        assert_trees_close(found[:3], want[:3], **CLOSE)
        assert_trees_close(found[3], world * want[3 + rank], **CLOSE)
        if world == 1:
            forward = torch.func.jacfwd(functools.partial(after, rank), 2)(params, *more, batches[rank][0])
            assert_trees_close(forward, want[2], **CLOSE)

    run_ranks(rank_main, world)


def test_a_weight_that_is_differentiated_is_refused() -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([4], 3, 0.0, 1)
    for weights, refused in ((lambda x, y: x.abs().sum(), True), (lambda x, y: x.abs().sum().detach(), False)):
        step = fz.accumulate(fz.train_step(token_mean, fz.sgd(0.1)), 2, weights=weights)
        state = step.init(params)
        for run in (step.forward, lambda state, *batch, step=step: step(state, *batch)[1]["loss"]):
            match = r"a weight of microbatch 0 that torch.func.grad goes through, expected a constant"
            with pytest.raises(TypeError, match=match) if refused else contextlib.nullcontext():
                torch.func.grad(functools.partial(run, state))(*batch)


def test_explain_says_nothing_of_a_microbatch_that_does_not_count() -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([5], 3, 0.0, 1)
    batch[1][3:] = IGNORED
    step = fz.accumulate(fz.train_step(token_mean, fz.sgd(1.0)), 2, weights=tokens)
    report = fz.explain(step, step.init(params), *batch)
    assert report.fault is None and not report.skipped
    batch[0][4] = torch.inf
    report = fz.explain(fz.accumulate(fz.train_step(example_mean, fz.sgd(1.0)), 2), step.init(params), *batch)
    assert report.fault is not None and report.fault.microbatch == 1 and report.fault.examples == (4,)


@pytest.mark.parametrize("transform", [lambda step: step, fz.fuse_update])
def test_an_update_of_nothing_is_skipped_whatever_its_cotangent(transform: Any) -> None:
    params, (batch,) = params_of(1, 3, 0), batches_of([4], 3, 1.1, 0)
    step = fz.accumulate(transform(fz.train_step(errors, fz.sgd(1.0))), 2, weights=tokens)
    new, metrics = step(step.init(params), *batch, cotangent=torch.ones(4, dtype=F64))
    assert metrics["skipped"] and new.step == 0
    assert_trees_equal(fz.gather(new.params), params)
