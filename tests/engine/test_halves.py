"""A pullback in two halves against the same pullback as a whole: the same bits, and no product twice or too early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import programs
import pytest
import scenarios
import torch
import torch.nn.functional as F
from backwards import with_backward
from halved import F64, FUNCTIONS, SHARDS, Layers, checkpointed, compare, cotangents_of, normed, over_blocks, params_of
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_turns, in_turns
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

CHOSEN = strategies.transforms(patterns=scenarios.BLOCKS)
SHARDED = strategies.transforms(stages=(1, 2, 3), patterns=scenarios.BLOCKS[:1])


EACH = [*[(shard, F64) for shard in SHARDS], *[(shard, torch.float32) for shard in ("remat", "ZeRO-3")]]


@in_turns(5)
@pytest.mark.parametrize(("own", "name"), by_turns(EACH, FUNCTIONS, of=4))
def test_both_halves_are_the_whole(own: tuple[str, torch.dtype], name: str) -> None:
    shard, dtype = own
    x, world = torch.randn(2, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(1)).to(dtype), 2

    def rank_main(rank: int) -> None:
        compare(SHARDS[shard](fz.train_step(FUNCTIONS[name], fz.sgd(0.1))), params_of(dtype), [x[rank]])

    run_ranks(rank_main, 1 if "ZeRO" not in shard else world)


@given(
    name=st.sampled_from([name for name in FUNCTIONS if name not in ("adapted", "not_used")]),
    chosen=CHOSEN,
    frozen=st.sampled_from(["", "blocks.1.*", "*.w", "w|s"]),
    world=st.integers(1, 3),
)
def test_drawn_transforms(name: str, chosen: Any, frozen: str, world: int) -> None:
    x = torch.randn(world, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(FUNCTIONS[name], fz.sgd(0.1)), chosen)
        compare(fz.freeze(step, frozen) if frozen else step, params_of(), [x[rank]])

    run_ranks(rank_main, world if any("zero" in name for name, _ in chosen) else 1)


@given(chosen=SHARDED, seed=st.integers(0, 99), world=st.integers(1, 3), kind=st.sampled_from(["pure", "module"]))
def test_drawn_models(chosen: Any, seed: int, world: int, kind: str) -> None:
    fn, params = programs.model(kind, seed)

    def rank_main(rank: int) -> None:
        step = strategies.apply(fz.train_step(fn, fz.sgd(0.1)), chosen)
        compare(step, params, [scenarios.vector_batches(world)[rank][0]])

    run_ranks(rank_main, world)


@in_turns(7)
@pytest.mark.parametrize("shard", SHARDS)
def test_without_input_cotangents(shard: str) -> None:
    """Tokens; or inputs that are not asked for."""
    loss, params = scenarios.tiny_lm()
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))

    def rank_main(rank: int) -> None:
        compare(SHARDS[shard](fz.train_step(loss, fz.sgd(0.1))), params, scenarios.token_batches(2)[rank])
        step = SHARDS[shard](fz.train_step(normed, fz.sgd(0.1)))
        compare(step, params_of(), [x], argnums=())

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


def test_dtypes_of_storage_and_of_sums() -> None:
    policy = fz.Policy(param=torch.bfloat16, compute=torch.float32, reduce=F64, grad=torch.float32)
    x = torch.randn(2, 4, 5, dtype=torch.float32, generator=torch.Generator().manual_seed(1))

    def rank_main(rank: int) -> None:
        for name in ("recurrent", "normed", "head_tied"):
            step = fz.train_step(FUNCTIONS[name], fz.sgd(0.1), policy)
            for shard in (fz.shard_zero1, fz.shard_zero3):
                compare(fz.autocast(shard(step), torch.bfloat16), params_of(torch.float32), [x[rank]])

    run_ranks(rank_main, 2)


# ---- what is computed when


class Operators(TorchDispatchMode):
    """Counts FLOPs as torch.utils.flop_counter does, which itself sets hooks on modules."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops(run: Callable[[], object]) -> int:
    with Operators() as counter:
        run()
    return counter.total


BLOCKS, HEAD = 2 * 64 * 2 * (16 * 32 + 32 * 16), 2 * 64 * 16 * 8  # FLOPs of the weights' gradients, of 64 rows
WAITS = {"unsharded": BLOCKS + HEAD}


@in_turns(3)
@pytest.mark.parametrize("shard", SHARDS)
def test_no_product_is_computed_twice_or_too_early(shard: str) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

    fn, params = fz.functional(Layers())

    def rank_main(_: int) -> None:
        step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
        for each in (step, fz.accumulate(step, 2)):
            out, pullback = each.vjp(each.init(params), x)
            whole = flops(lambda: pullback(out, retain_graph=True))
            first = flops(lambda: pullback.inputs(out))
            second = flops(pullback.params)
            assert (first + second, second) == (whole, WAITS.get(shard, 0)), (whole, first)

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


def test_what_is_checkpointed_runs_again_once() -> None:
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))
    for shard in (fz.remat, fz.shard_zero3):

        def rank_main(_: int, shard: Any = shard) -> None:
            step = shard(fz.train_step(checkpointed, fz.sgd(0.1)))
            out, pullback = step.vjp(step.init(params_of()), x)
            whole = flops(lambda: pullback(out, retain_graph=True))
            assert flops(lambda: pullback.inputs(out)) + flops(pullback.params) == whole

        run_ranks(rank_main, 1 if shard is fz.remat else 2)


class Reads(nn.Module):
    """What belongs to a unit is used outside of it too, by an operation that computes all cotangents together."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Inner()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        block: Any = self.blocks[0]
        return F.prelu(block(x).float(), block.slope).double() @ block.w


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.eye(5, dtype=F64) + 0.1), nn.Parameter(torch.ones(5, 5, dtype=F64))
        self.slope = nn.Parameter(torch.full((5,), 0.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.w @ self.v).float() * self.slope).double()


@pytest.mark.parametrize("shard", SHARDS)
def test_leaves_of_a_unit_that_are_read_outside(shard: str) -> None:
    fn, params = fz.functional(Reads())
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(0))

    def rank_main(_: int) -> None:
        compare(SHARDS[shard](fz.train_step(fn, fz.sgd(0.1))), params, [x])

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


class OnSome(torch.autograd.Function):
    """Has no cotangents on one rank."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, rank: int) -> torch.Tensor:  # type: ignore[override]
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.rank = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        (w,) = ctx.saved_tensors
        return (None, None, None) if ctx.rank else (grad @ w.T, grad.sum() * w, None)


@pytest.mark.parametrize("shard", ["ZeRO-1", "ZeRO-3"])
def test_a_cotangent_that_is_not_there_on_one_rank(shard: str) -> None:
    def rank_main(rank: int) -> None:
        fn = over_blocks(lambda q, x: torch.tanh(OnSome.apply(x @ q["w"], q["v"], rank)))
        step = SHARDS[shard](fz.train_step(lambda p, x: OnSome.apply(fn(p, x) @ p["w"], p["k"], rank), fz.sgd(0.1)))
        compare(step, {**params_of(), "k": params_of()["w"]}, [torch.ones(4, 5, dtype=F64)])

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("shard", ["unsharded", "remat", "ZeRO-3"])
def test_several_pullbacks_take_turns(shard: str) -> None:
    """First halves before second ones, these in any order; the pullbacks of several components between them."""

    def rank_main(rank: int) -> None:
        fn, params = programs.model("module", 1)
        step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
        other = fz.shard_zero3(fz.train_step(normed, fz.sgd(0.1)))
        steps = [(step, step.init(params)), (other, other.init(params_of())), (step, step.init(params))]
        runs, wanted = [], []
        for number, (each, state) in enumerate(steps):
            x = scenarios.vector_batches(2, seed=number)[rank][0]
            out, pullback = each.vjp(state, x)
            grads, cotangents = pullback(cotangents_of(out))
            wanted.append((fz.gather(grads), cotangents))
            runs.append((each.vjp(state, x)[1], cotangents_of(out)))
        found = [pullback.inputs(cotangent) for pullback, cotangent in runs]
        for i in (1, 0, 2):
            assert_trees_equal((fz.gather(runs[i][0].params()), found[i]), wanted[i])

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


def on_processes(rank: int) -> None:
    for name in ("head_tied", "recurrent", "normed"):
        for shard in (fz.shard_zero1, fz.shard_zero3, SHARDS["ZeRO-3, remat"]):
            x = torch.randn(2, 4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))[rank]
            compare(fz.accumulate(shard(fz.train_step(FUNCTIONS[name], fz.sgd(0.1))), 2), params_of(), [x])


@in_turns(8, "on processes, as on threads")
def test_on_gloo_processes() -> None:
    run_ranks(on_processes, 2, backend="processes")


def hooked(q: Any, x: torch.Tensor) -> torch.Tensor:
    w = q["w"].t()
    w.register_hook(lambda grad: 2 * grad)
    return torch.tanh(x @ w)


def of_params(q: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x * (q["w"] @ q["g"][:, None]).t())


@pytest.mark.parametrize("body", [hooked, of_params])
@pytest.mark.parametrize("shard", ["unsharded", "remat", "ZeRO-3"])
def test_weights_that_must_not_wait(shard: str, body: Any) -> None:
    """What has a hook, and what is multiplied with a param that is not there any more."""

    def rank_main(_: int) -> None:
        x = torch.ones(4, 5, dtype=F64)
        compare(SHARDS[shard](fz.train_step(over_blocks(body), fz.sgd(0.1))), params_of(), [x])

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


# ---- what others write to


@pytest.mark.parametrize("shard", ["unsharded", "remat", "ZeRO-3"])
def test_cotangents_may_be_written_to_between_the_halves(shard: str) -> None:
    def rank_main(_: int) -> None:
        step = SHARDS[shard](fz.train_step(lambda p, x: x + F.linear(x, p["w"], p["s"]), fz.sgd(0.1)))
        state, x = step.init(params_of()), torch.ones(4, 5, dtype=F64)
        for expanded in (False, True):
            out, pullback = step.vjp(state, x)
            cotangent = torch.ones((), dtype=F64).expand(4, 5) if expanded else torch.cos(out)
            want = fz.gather(step.vjp(state, x)[1](cotangent)[0])
            (found,) = pullback.inputs(cotangent)
            if not expanded:
                cotangent.zero_()
            found.zero_()
            assert_trees_equal(fz.gather(pullback.params()), want)

    run_ranks(rank_main, 1)


def test_inputs_may_not() -> None:
    step = fz.train_step(over_blocks(lambda q, x: x @ q["w"]), fz.sgd(0.1))
    x = torch.ones(4, 5, dtype=F64)
    state = step.init(params_of())
    for _ in range(2):  # the first run of a unit has a copy
        out, pullback = step.vjp(state, x)
    pullback.inputs(out)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback.params()


# ---- errors


@pytest.mark.parametrize("shard", ["unsharded", "remat", "ZeRO-3"])
def test_halves_out_of_turn(shard: str) -> None:
    def rank_main(_: int) -> None:
        step = SHARDS[shard](fz.train_step(normed, fz.sgd(0.1)))
        state, x = step.init(params_of()), torch.ones(4, 5, dtype=F64)
        out, pullback = step.vjp(state, x)
        with pytest.raises(RuntimeError, match=r"Call inputs\(cotangent\) first"):
            pullback.params()
        with pytest.raises(ValueError, match="cotangent of the output: got"):
            pullback.inputs(out[:2])
        pullback.inputs(out, retain_graph=True)
        pullback(out, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"Call inputs\(cotangent\) first"):
            pullback.params()
        pullback.inputs(out)
        for used in (pullback, pullback.inputs):
            with pytest.raises(RuntimeError, match="used up by an earlier call"):
                used(out)
        pullback.params()
        for used in (pullback, pullback.inputs):
            with pytest.raises(RuntimeError, match="used up by an earlier call"):
                used(out)
        with pytest.raises(RuntimeError, match=r"Call inputs\(cotangent\) first"):
            pullback.params()
        _, pullback = step.vjp(state, x)
        pullback(out)
        with pytest.raises(RuntimeError, match="used up by an earlier call"):
            pullback.inputs(out)

    run_ranks(rank_main, 1)


def test_a_donated_state_says_so_in_either_half() -> None:
    step = fz.donate(fz.train_step(lambda p, x: normed(p, x).sum(), fz.sgd(0.1)))
    for between in (False, True):
        state, x = step.init(params_of()), torch.ones(4, 5, dtype=F64)
        out, pullback = step.vjp(state, x)
        if between:
            pullback.inputs(torch.ones_like(out))
        grads, _ = step.vjp(state, x)[1](torch.ones_like(out))
        with pytest.warns(UserWarning, match="still held elsewhere"):
            step.update(state, grads)
        with pytest.raises(RuntimeError, match="donated"):
            pullback.params() if between else pullback.inputs(out)


# ---- what is not split


def test_compiled_autograd_is_not_asked() -> None:
    """It would trace both halves; torch.func's own pullbacks leave it out too."""

    def never(_: object) -> Any:
        raise AssertionError("compiled")

    def rank_main(_: int) -> None:
        with torch._dynamo.compiled_autograd._enable(never):  # type: ignore[attr-defined]
            compare(fz.train_step(normed, fz.sgd(0.1)), params_of(), [torch.ones(4, 5, dtype=F64)])

    run_ranks(rank_main, 1)


@in_turns(12, "compiled by torch")
def test_compiled_units() -> None:
    def rank_main(rank: int) -> None:
        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            return fz.unit(lambda q, x: torch.tanh(x @ q["w"]))(p["blocks"][0], x) @ p["w"]

        params = {"blocks": [{"w": params_of()["w"]}], "w": params_of()["w"]}
        step = fz.compile(fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1))))
        compare(step, params, [scenarios.vector_batches(2)[rank][0]])

    run_ranks(rank_main, 1)


def test_under_plain_autograd_and_torch_func_the_grads_lead_on() -> None:
    step = fz.shard_zero3(fz.train_step(normed, fz.sgd(0.1)))
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))

    def second(state: Any, x: torch.Tensor, halves: bool) -> torch.Tensor:
        out, pullback = step.vjp(state, x)
        if halves:
            (found,) = pullback.inputs(out)
            grads = pullback.params()
        else:
            grads, (found,) = pullback(out)
        return found.square().sum() + sum(x.square().sum() for x in grads.locals().values())

    def rank_main(_: int) -> None:
        state = step.init(params_of())
        got, want = (torch.func.grad(lambda x, h=h: second(state, x, h))(x) for h in (True, False))
        assert_trees_equal(got, want)
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        got, want = (torch.autograd.grad(second(state, y, h), y)[0] for y, h in zip(leaves, (True, False), strict=True))
        assert_trees_equal(got, want)

    run_ranks(rank_main, 1)


# twice its input; the backward writes to its cotangent, as torch says it must not
_doubles = with_backward(lambda x: x * 2, lambda cotangent: cotangent.mul_(2))


def _before(p: Any, x: torch.Tensor) -> torch.Tensor:
    doubled = _doubles(x)
    return (x @ p["w"] + doubled).cos()  # the product is pulled back first


def _beside(p: Any, x: torch.Tensor) -> Any:
    doubled = _doubles(x)
    return doubled, x @ p["w"]


@pytest.mark.parametrize("fn", [_before, _beside])
@pytest.mark.parametrize("stage", [0, 3])
def test_a_cotangent_that_is_written_to_between_the_halves(fn: Any, stage: int) -> None:
    """It is what a whole pullback brings."""

    def main(rank: int) -> None:
        step = fz.train_step(fn, fz.sgd(0.1))
        step = fz.shard_zero3(step) if stage else step
        state = step.init({"w": torch.eye(3, dtype=F64) / 2})
        x = torch.arange(6.0, dtype=F64).view(2, 3)
        out, pullback = step.vjp(state, x)
        given = lambda: [torch.ones(2, 3, dtype=F64)] * 2  # one tensor for both outputs
        same = lambda: tuple(given()) if isinstance(out, tuple) else given()[0]
        wanted = pullback(same(), retain_graph=True)[0]
        pullback.inputs(same(), retain_graph=True)
        assert_trees_equal(fz.gather(pullback.params()), fz.gather(wanted))

    run_ranks(main, 1)
