"""Straight-through states: values to the bit those of a run in few bits, derivatives those of rounding that counts one.

The plain run in float32 is given the values that each update of the run in few bits has left.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
import torch
import whole_runs
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, by_turns, in_turns
from torch.utils import _pytree as pytree
from whole_runs import mapped

import fzero as fz
from fzero.formats.bits import Counters
from fzero.formats.formats import Companded, Corrected, Exact, Format, Plain, decode
from fzero.kernels.onepass import rounded
from fzero.state.sharded import trees_of
from fzero.state.straight import codes_of
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F32, BF16 = torch.float32, torch.bfloat16
WIDTH, STEPS = 7, 3
STACKED, PARAMS = scenarios.stack(blocks=1, width=WIDTH, dtype=F32)
NUMBERS = tuple(torch.tensor(x) for x in (0.05, 0.1))
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
P = fz.Policy
WIDE = functools.partial(dataclasses.replace, compute=F32, grad=F32, straight_through=True)
POLICIES = {
    "exact": WIDE(P.exact()),
    "exact, float32 moments": WIDE(P.exact(F32)),
    "24 bits": WIDE(P.compact24()),
    "stochastic": WIDE(P.compact16()),
    "4-bit": WIDE(P.compact16("4-bit")),
    "8-bit moments": WIDE(P(moment="8-bit")),
    "gathered in 8 bits": WIDE(P(gather="8-bit")),
    "by path": P.by_path({"*b": P(), "*": WIDE(P.compact16())}),
}
IN_HALVES = {name: dataclasses.replace(make(), straight_through=True) for name, make in
             {"exact": P.exact, "24 bits": P.compact24, "stochastic": P.compact16}.items()}  # fmt: skip
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda lr, decay: fz.sgd(lr, weight_decay=decay),
    "momentum": lambda lr, decay: fz.sgd(lr, momentum=0.8, weight_decay=decay),
    "adamw": lambda lr, decay: fz.adamw(lr, b2=0.99, eps=1e-3, weight_decay=decay),
}


def LOSS(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """In the dtype that params are computed in."""
    dtype = p["head"]["w"].dtype
    return STACKED(p, x.to(dtype), y.to(dtype)).float()


def data(ranks: int) -> list[Any]:
    return scenarios.vector_batches(ranks, width=WIDTH, dtype=F32)


def made(policy: Any, optimizer: str, stage: int, numbers: Any) -> Any:
    return SHARDS[stage](fz.train_step(LOSS, OPTIMIZERS[optimizer](*numbers), policy))


def run(policy: Any, optimizer: str, stage: int, how: str, batch: Any, params: Any, *numbers: Any) -> Any:
    """The losses of some updates and one afterwards."""
    step = made(policy, optimizer, stage, numbers)
    state = step.init(params)
    if how == "scan":
        state, metrics = fz.scan(step, state, [batch] * STEPS, remat_every=2)
        losses = [*metrics["loss"]]
    else:
        losses = []
        for _ in range(STEPS):
            if how == "step":
                state, metrics = step(state, *batch)
                losses.append(metrics["loss"])
            else:
                value, pullback = step.vjp(state, *batch, argnums=())
                state, _ = step.update(state, pullback(torch.ones_like(value))[0])
                losses.append(value)
    return torch.stack([*losses, step.forward(state, *batch)])


def left(policy: Any, optimizer: str, stage: int, batch: Any) -> Any:
    """The losses of such a run that nothing goes on through, and what each of its updates leaves."""
    step = made(policy, optimizer, stage, [x.item() for x in NUMBERS])
    state = step.init(PARAMS)
    losses, found = [], [(fz.gather(state.params), [])]
    for _ in range(STEPS):
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"])
        found.append((fz.gather(state.params), [fz.gather(tree) for tree in trees_of(state.moments)]))
    return torch.stack([*losses, step.forward(state, *batch)]), found


def in_float32(policy: Any, optimizer: str, batches: Any, known: Any) -> Callable[..., torch.Tensor]:
    """The same in plain torch, at the values that are known, with one for the derivative of what leads to them."""

    def at(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return x + (value.to(F32) - x).detach()

    def used(p: Any) -> Any:
        own = policy.of("blocks.0.w")
        return mapped(lambda x: x.to(own.compute or F32).to(F32), p)

    def mean(p: Any) -> torch.Tensor:
        return torch.stack([LOSS(p, *batch) for batch in batches]).mean()

    def objective(p: Any, lr: Any, decay: Any) -> torch.Tensor:
        p = mapped(at, p, known[0][0])
        zeros = mapped(torch.zeros_like, p)
        moments, losses = (zeros, zeros), []
        for count in range(1, STEPS + 1):
            grads, value = torch.func.grad_and_value(mean)(used(p))
            losses.append(value)
            p, moments = whole_runs.OPTIMIZERS[optimizer][0](p, grads, moments, count, lr, decay, None)
            p = mapped(at, p, known[count][0])
            own = [mapped(at, *pair) for pair in zip(moments, known[count][1], strict=False)]
            moments = (*own, *moments[len(own) :])
        return torch.stack([*losses, mean(used(p))])

    return objective


def weighed(fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: (fn(*given) * torch.arange(1.0, STEPS + 2)).sum()


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "grad": lambda fn: torch.func.grad(weighed(fn), argnums=(0, 1, 2))(PARAMS, *NUMBERS),
    "jvp": lambda fn: torch.func.jvp(fn, (PARAMS, *NUMBERS), (PARAMS, *NUMBERS))[1],
    "grad_of_grad": lambda fn: torch.func.grad(
        lambda lr: whole_runs.dot(torch.func.grad(weighed(fn))(PARAMS, lr, NUMBERS[1]), PARAMS)
    )(NUMBERS[0]),
}


@by_day(6)
@given(
    policy=st.sampled_from([name for name in POLICIES if name != "gathered in 8 bits"]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    ranks=st.integers(1, 3),
    stage=st.integers(0, 3),
    how=st.sampled_from(["step", "vjp", "scan"]),
    name=st.sampled_from([*TRANSFORMS]),
)
def test_runs_are_those_in_few_bits_and_their_derivatives_those_of_values(
    policy: str, optimizer: str, ranks: int, stage: int, how: str, name: str
) -> None:
    own, ranks, batches = POLICIES[policy], ranks if stage else 1, data(3)

    def rank_main(rank: int) -> Any:
        losses, known = left(own, optimizer, stage, batches[rank])
        values = run(own, optimizer, stage, how, batches[rank], PARAMS, *NUMBERS)
        fn = functools.partial(run, own, optimizer, stage, how, batches[rank])
        with_values = torch.func.jvp(fn, (PARAMS, *NUMBERS), (PARAMS, *NUMBERS))[0]
        return losses, known, values, with_values, TRANSFORMS[name](fn)

    out = run_ranks(rank_main, ranks)
    want = TRANSFORMS[name](in_float32(own, optimizer, batches[:ranks], out[0][1]))
    size = max(x.abs().max().item() for x in pytree.tree_leaves(want))
    losses, values, with_values = [torch.stack([each[place] for each in out]).mean(0) for place in (0, 2, 3)]
    apart = (with_values - losses).abs().max() > 1e-5 * losses.abs().max()
    if NIGHTLY and apart:  # among thousands of values a last bit has decided how one is rounded
        assert_trees_close(with_values, losses, rtol=2e-2)
        return
    assert_trees_close(values, losses, rtol=1e-5)  # a pullback's loss is each rank's own
    assert_trees_close(with_values, losses, rtol=1e-5)
    found = [each[-1] for each in out]
    if name == "jvp":  # of the losses of each rank
        found = [torch.stack(found).mean(0)]
    for each in found:
        assert_trees_close(each, want, rtol=1e-4, atol=1e-5 * size)


@in_turns(3)
@pytest.mark.parametrize(("policy", "stage"), by_turns([*IN_HALVES, "gathered in 8 bits"], range(4)))
def test_what_is_computed_in_few_bits_is_so_under_a_derivative(policy: str, stage: int) -> None:
    """To the bit: the masters' halves, and the values that travel in 8 bits."""
    own, ranks = IN_HALVES.get(policy) or POLICIES[policy], 2 if stage else 1

    def rank_main(rank: int) -> Any:
        batch = data(ranks)[rank]
        plain = made(own, "momentum", stage, NUMBERS)
        losses = [plain.forward(plain.init(PARAMS), *batch)]

        def first(p: Any) -> torch.Tensor:
            step = made(own, "momentum", stage, NUMBERS)
            return step.forward(step.init(p), *batch)

        losses.append(torch.func.jvp(first, (PARAMS,), (PARAMS,))[0])
        gradient = torch.func.grad(first)(PARAMS)
        return losses, gradient

    for losses, gradient in run_ranks(rank_main, ranks):
        assert_trees_equal(losses[1], losses[0])
        assert all(x.abs().max() > 0 for x in pytree.tree_leaves(gradient))


def grads_by_rate(policy: Any, randomness: str, rates: torch.Tensor) -> torch.Tensor:
    fn = functools.partial(run, policy, "adamw", 0, "step", data(1)[0], PARAMS)
    grad = torch.func.grad(lambda lr: fn(lr, NUMBERS[1]).sum())
    if not randomness:
        return torch.stack([grad(lr) for lr in rates])
    return torch.func.vmap(grad, randomness=randomness)(rates)


def test_members_round_as_the_map_says() -> None:
    rates = torch.tensor([0.05, 0.05, 0.02])
    own = POLICIES["stochastic"]
    alone, same, other = [grads_by_rate(own, randomness, rates) for randomness in ("", "same", "different")]
    assert_trees_close(same, alone, rtol=1e-4)
    assert other[0] != other[1]
    with pytest.raises(RuntimeError, match="randomness='error' of a step that rounds stochastically"):
        grads_by_rate(own, "error", rates)
    exact = POLICIES["exact, float32 moments"]
    assert_trees_close(grads_by_rate(exact, "error", rates), grads_by_rate(exact, "", rates), rtol=1e-4)


@pytest.mark.parametrize("policy", ["exact", "24 bits", "stochastic", "4-bit", "by path"])
def test_a_state_that_leaves_a_transform_goes_on(policy: str, tmp_path: Path) -> None:
    """With values in the place of codes: the same numbers, saved and converted like any."""
    own, batch = POLICIES[policy], data(1)[0]
    step = made(own, "adamw", 0, [x.item() for x in NUMBERS])

    def after(p: Any) -> Any:
        state, metrics = step(step.init(p), *batch)
        return metrics["loss"], state

    _, valued = torch.func.grad(after, has_aux=True)(PARAMS)
    coded, _ = step(step.init(PARAMS), *batch)
    key = valued.params.groups[-1]
    assert valued.params.holds_values(key) and not coded.params.holds_values(key)
    fz.save(tmp_path / "it", valued)
    again = fz.convert(valued, step)
    for other in (again, fz.load(tmp_path / "it", step)):
        assert not any(
            tree.holds_values(key) for tree in trees_of((other.params, other.moments)) for key in tree.groups
        )
        assert_trees_equal(fz.gather(other.params), fz.gather(again.params))
        for one, two in zip(trees_of(other.moments), trees_of(valued.moments), strict=True):
            assert_trees_equal(in_float(fz.gather(one)), in_float(fz.gather(two)))
    for state in (valued, again):
        assert_trees_close(in_float(fz.gather(state.params)), in_float(fz.gather(coded.params)), rtol=1e-5)
        state, metrics = step(state, *batch)
        want, found = step(coded, *batch)
        assert_trees_close(metrics["loss"], found["loss"], rtol=1e-5)
        assert_trees_close(in_float(fz.gather(state.params)), in_float(fz.gather(want.params)), rtol=1e-5, atol=1e-6)


FORMATS = [Companded(True, 8), Companded(False, 8), Companded(True, 4), Corrected(), Exact(), Plain(BF16, True)]


@given(form=st.sampled_from(FORMATS), seed=st.integers(0, 999), spread=st.integers(0, 8), zeros=st.booleans())
def test_decoded_values_have_their_codes_again(form: Format, seed: int, spread: int, zeros: bool) -> None:
    """Also where the largest of 32 was rounded to a value that alone would have another scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(640, generator=generator) * torch.exp(spread * torch.randn(640, generator=generator))
    if zeros:
        x[::3] = 0
    x = x if form != Companded(False, 8) else x.abs()
    (stored,) = rounded([form], [x], Counters(((0, seed, 7),), 10))
    assert torch.equal(decode(form, codes_of(form, stored), F32), stored)


def in_float(tree: Any) -> Any:
    return mapped(torch.Tensor.float, tree)


def test_without_it_such_states_are_refused_by_the_word_that_allows_them() -> None:
    for name in ("exact", "stochastic", "8-bit moments", "gathered in 8 bits"):
        own = dataclasses.replace(POLICIES[name], straight_through=False)
        with pytest.raises(TypeError, match="straight_through=True"):
            torch.func.grad(lambda p, own=own: run(own, "adamw", 0, "step", data(1)[0], p, *NUMBERS).sum())(PARAMS)


@pytest.mark.parametrize("policy", ["exact", "stochastic", "4-bit"])
def test_fused_updates_round_alike(policy: str) -> None:
    """Of a state that a transform has left, and within a scan."""
    own, batch = POLICIES[policy], data(1)[0]
    step = fz.fuse_update(made(own, "adamw", 0, [x.item() for x in NUMBERS]))

    def after(p: Any) -> Any:
        state, metrics = step(step.init(p), *batch)
        return metrics["loss"], state

    _, valued = torch.func.grad(after, has_aux=True)(PARAMS)
    state, _ = step(valued, *batch)
    coded, _ = step(step(step.init(PARAMS), *batch)[0], *batch)
    assert_trees_close(in_float(fz.gather(state.params)), in_float(fz.gather(coded.params)), rtol=1e-5)

    def scanned(p: Any) -> Any:
        state, metrics = fz.scan(step, step.init(p), [batch] * 2)
        return metrics["loss"].sum(), state

    _, state = torch.func.grad(scanned, has_aux=True)(PARAMS)
    assert_trees_close(in_float(fz.gather(state.params)), in_float(fz.gather(coded.params)), rtol=1e-5)


def test_values_that_nothing_goes_on_through_are_computed_with_like_codes() -> None:
    own, batch = IN_HALVES["24 bits"], data(1)[0]
    step = made(own, "sgd", 0, [x.item() for x in NUMBERS])

    def after(p: Any) -> Any:
        state = step.init(p)
        return step.forward(state, *batch), state

    _, valued = torch.func.grad(after, has_aux=True)(PARAMS)
    assert_trees_equal(step.forward(valued, *batch), step.forward(step.init(PARAMS), *batch))


@pytest.mark.parametrize("policy", ["exact", "24 bits", "stochastic", "4-bit"])
def test_ensembles_of_codes(policy: str) -> None:
    own, batch = POLICIES[policy], data(1)[0]
    step = made(own, "adamw", 0, [x.item() for x in NUMBERS])
    states = [step.init(mapped(lambda x, k=k: x * k, PARAMS)) for k in (1.0, 0.5)]
    both, _ = torch.func.vmap(lambda state: step(state, *batch), randomness="same")(fz.stack(states))
    for found, state in zip(fz.unstack(both), states, strict=True):
        want = fz.gather(step(state, *batch)[0].params)
        assert_trees_close(in_float(fz.gather(found.params)), in_float(want), rtol=1e-5)


def test_a_state_with_values_keeps_no_graph_and_what_is_put_there_is_not_rounded_unasked() -> None:
    own, batch = POLICIES["stochastic"], data(1)[0]
    step = made(own, "sgd", 0, [x.item() for x in NUMBERS])
    _, valued = torch.func.grad(lambda p: (step.forward(step.init(p), *batch), step.init(p)), has_aux=True)(PARAMS)
    state, _ = step(valued, batch[0].clone().requires_grad_(), batch[1])
    assert not any(x.requires_grad for x in state.params.buffers.values())
    changed = valued.replace(
        params=valued.params.replaced(buffers={k: x + 1e-5 for k, x in valued.params.entries.items()})
    )
    plain = fz.train_step(LOSS, fz.sgd(0.05))
    assert_trees_close(in_float(fz.gather(fz.convert(changed, plain).params)), in_float(fz.gather(changed.params)))


@pytest.mark.parametrize("scheme", ["exact", "24 bits", "stochastic"])
def test_values_that_travel_in_8_bits_are_rounded_once(scheme: str) -> None:
    own, batch = dataclasses.replace(IN_HALVES[scheme], gather="8-bit"), data(1)[0]
    step = made(own, "sgd", 0, [x.item() for x in NUMBERS])
    _, valued = torch.func.grad(lambda p: (step.forward(step.init(p), *batch), step.init(p)), has_aux=True)(PARAMS)
    assert_trees_equal(step.forward(valued, *batch), step.forward(step.init(PARAMS), *batch))


@pytest.mark.parametrize("gather", [None, "8-bit"])
@pytest.mark.parametrize("scheme", ["exact", "24 bits", "stochastic"])
def test_an_average_in_the_params_place_is_no_code(scheme: str, gather: Any) -> None:
    own, batch = dataclasses.replace(IN_HALVES[scheme], gather=gather), data(1)[0]
    step = fz.ema(made(own, "sgd", 0, [x.item() for x in NUMBERS]), 0.7)
    state, _ = step(step.init(PARAMS), *batch)
    teacher = state.replace(params=state.extra["ema"])
    zero = torch.zeros(())

    def loss(z: torch.Tensor) -> Any:
        moved = teacher.replace(params=teacher.params.map(lambda v: v + z))
        out = step.forward(moved, *batch)
        return out, out.detach()

    _, found = torch.func.grad(loss, has_aux=True)(zero)
    assert_trees_equal(found, step.forward(teacher, *batch))


def test_the_derivative_through_an_average_is_not_rounded() -> None:
    own = WIDE(P.compact16(F32))
    step = fz.ema(fz.train_step(lambda p, x: ((p["a"] - x) ** 2).sum(), fz.sgd(0.1), own), 0.5)
    made_ = torch.Generator().manual_seed(1)
    a, w = torch.randn(2, 40, generator=made_)

    def average(x: torch.Tensor) -> Any:
        state, _ = step(step.init({"a": a}), x)
        return (fz.gather(state.extra["ema"])["a"] * w).sum()

    at, want = torch.tensor(0.3), 0.5 * 0.2 * w.sum()  # half of what the params move, by 0.2 for each
    assert_trees_close(torch.func.grad(average)(at), want, rtol=1e-5)
    assert_trees_close(torch.func.jvp(average, (at,), (torch.ones(()),))[1], want, rtol=1e-5)
