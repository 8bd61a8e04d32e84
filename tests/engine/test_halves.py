"""A pullback in two halves against the same pullback as a whole: the same bits, and no product twice or too early."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import programs
import pytest
import scenarios
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_equal, run_ranks, strategies

pytestmark = pytest.mark.usefixtures("hazards")  # races show

F64 = torch.float64
CHOSEN = strategies.transforms(patterns=scenarios.BLOCKS)
SHARDED = strategies.transforms(stages=(1, 2, 3), patterns=scenarios.BLOCKS[:1])
SHARDS: dict[str, Any] = {
    "unsharded": lambda step: step,
    "remat": fz.remat,
    "ZeRO-1": fz.shard_zero1,
    "ZeRO-2": fz.shard_zero2,
    "ZeRO-3": fz.shard_zero3,
    "ZeRO-3, remat": lambda step: fz.remat(fz.shard_zero3(step)),
    "ZeRO-3, offload": lambda step: fz.offload(fz.shard_zero3(step), params="host", grads="host", activations="host"),
}


# ---- functions of (params, x of [4, 5]): every way in which a param can take part


def params_of(dtype: torch.dtype = F64) -> Any:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return (0.5 * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)

    return {
        "blocks": [{"w": draw(5, 5), "v": draw(5, 5), "b": draw(5), "g": draw(5)} for _ in range(3)],
        "w": draw(5, 5),
        "s": draw(5),
        "a": draw(5, 2),
        "c": draw(2, 5),
        "k": draw(5, 1, 3),
    }


def over_blocks(body: Any) -> Any:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        unit = fz.unit(body)
        for q in p["blocks"]:
            x = unit(q, x)
        return x

    return fn


class Twice(torch.autograd.Function):
    """A product with a weight, of a user's, whose backward computes everything."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * grad @ w.T, 2 * x.T @ grad


def head_tied(p: Any, x: torch.Tensor) -> Any:
    """A param used at both ends, another in every unit."""
    unit = fz.unit(lambda q, x, s: torch.tanh(F.linear(x, q["w"], q["b"])) * s)
    x = x @ p["w"]
    for q in p["blocks"]:
        x = unit(q, x, p["s"])
    return x @ p["w"].T


def recurrent(p: Any, x: torch.Tensor) -> Any:
    """A weight whose gradient is a sum of many products."""
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"] @ q["w"] + x @ q["v"].T @ q["w"].T @ q["w"].T + q["b"] * x))
    for _ in range(2):
        for q in p["blocks"]:
            x = unit(q, x)
        x = F.linear(x, p["w"], p["s"]) * p["s"]
    return x


def unrolled(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(F.linear(x, q["w"], q["b"]) + x @ q["v"])
        return x

    return over_blocks(body)(p, x)


def adapted(p: Any, x: torch.Tensor) -> Any:
    """Weights that are computed from params; outputs that depend on params alone, or on the input alone."""
    unit = fz.unit(lambda q, x: x @ (q["w"] + q["v"] @ q["w"]) + torch.softmax(q["b"], 0))
    for q in p["blocks"]:
        x = unit(q, x)
    return {"y": x @ (p["w"] + p["a"] @ p["c"]), "norm": p["w"].square().sum(), "own": p["s"] * 2, "x": x.sum(0)}


def convolved(p: Any, x: torch.Tensor) -> Any:
    h = F.conv1d(x[:, None].expand(4, 5, 5), p["k"], p["s"], padding=1, groups=5)
    return over_blocks(lambda q, h: h + torch.bmm(h, q["w"].expand(4, 5, 5)) + torch.baddbmm(q["b"], h, h))(p, h)


def normed(p: Any, x: torch.Tensor) -> Any:
    body = over_blocks(lambda q, x: x + F.gelu(F.layer_norm(x, [5], q["g"], q["b"]) @ q["w"]) @ q["v"])
    return F.layer_norm(body(p, x), [5], p["s"], p["s"])


def with_functions(p: Any, x: torch.Tensor) -> Any:
    """Functions of the user's that differentiate themselves, in units and outside."""
    return Twice.apply(over_blocks(lambda q, x: torch.tanh(Twice.apply(x, q["w"]) @ q["v"]))(p, x), p["w"])


def checkpointed(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: torch.sin(torch.tanh(x @ q["w"]) @ q["v"]), x, use_reentrant=False) + q["b"]

    return over_blocks(body)(p, x) @ p["w"]


def inner_derivative(p: Any, x: torch.Tensor) -> Any:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]) @ q["v"])

    def energy(x: torch.Tensor) -> torch.Tensor:
        return unit(p["blocks"][0], x).square().sum() + (x @ p["w"]).sum()

    return unit(p["blocks"][1], torch.func.grad(energy)(x) + x)


def not_used(p: Any, x: torch.Tensor) -> Any:
    """Units without inputs that are differentiated, outputs that nothing uses."""
    unit = fz.unit(lambda q, x: (x @ q["w"], x * q["b"], q["g"] * 2))
    y, _, g = unit(p["blocks"][0], x)
    z, _, _ = unit(p["blocks"][1], torch.ones(4, 5, dtype=x.dtype))
    return y + z @ p["w"] + g, torch.zeros(3, dtype=torch.int64)


def in_place(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ q["w"]
        h += q["b"]
        h[:, 1:3] *= 2
        return h.relu_() @ q["v"]

    return over_blocks(body)(p, x)


def attended(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, torch.cat([q["w"], q["v"], q["w"]]), torch.cat([q["b"], q["g"], q["b"]]))
        a, b, c = (part[None, None] for part in h.chunk(3, -1))
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)[0, 0] + torch.einsum("ij,kj->ik", x, q["v"])

    return over_blocks(body)(p, x)


FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(head_tied, recurrent, unrolled, adapted, convolved, normed, with_functions, checkpointed, inner_derivative),
        *(not_used, in_place, attended),
    )
}


def cotangents_of(outputs: Any) -> Any:
    real = isinstance
    return pytree.tree_map(
        lambda x: torch.cos(3 * x + 1) if real(x, torch.Tensor) and x.is_floating_point() else None, outputs
    )


def compare(step: fz.Step, params: Any, inputs: Sequence[Any], **options: Any) -> None:
    """Both halves, of a forward that was pulled back before and of one that was not, against a whole pullback."""
    state = step.init(params)
    out, pullback = step.vjp(state, *inputs, **options)
    cotangent = cotangents_of(out)
    want = pullback(cotangent, retain_graph=True)
    wanted = fz.gather(want[0]), want[1]
    for again in (True, True, False):
        found = pullback.inputs(cotangent, retain_graph=again)
        grads = pullback.params()
        assert_trees_equal((fz.gather(grads), found), wanted)
        assert {k: x.dtype for k, x in grads.locals().items()} == {k: x.dtype for k, x in want[0].locals().items()}
    _, pullback = step.vjp(state, *inputs, **options)
    found = pullback.inputs(cotangent)
    assert_trees_equal((fz.gather(pullback.params()), found), wanted)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [F64, torch.float32])
@pytest.mark.parametrize("shard", SHARDS)
def test_both_halves_are_the_whole(name: str, dtype: torch.dtype, shard: str) -> None:
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


@pytest.mark.parametrize("shard", SHARDS)
def test_without_input_cotangents_the_second_half_is_the_pullback(shard: str) -> None:
    """Tokens; or inputs that are not asked for."""
    loss, params = scenarios.tiny_lm()
    x = torch.randn(4, 5, dtype=F64, generator=torch.Generator().manual_seed(1))

    def rank_main(rank: int) -> None:
        compare(SHARDS[shard](fz.train_step(loss, fz.sgd(0.1))), params, scenarios.token_batches(2)[rank])
        step = SHARDS[shard](fz.train_step(normed, fz.sgd(0.1)))
        compare(step, params_of(), [x], argnums=())
        out, pullback = step.vjp(step.init(params_of()), x, argnums=())
        counts = [flops(lambda: pullback.inputs(out)), flops(pullback.params)]
        assert counts[0] == 0 < counts[1]

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


class Flops(TorchDispatchMode):
    """Counts as torch.utils.flop_counter does, which itself sets hooks on modules."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def flops(run: Callable[[], object]) -> int:
    with Flops() as counter:
        run()
    return counter.total


class Layers(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), act(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


WEIGHTS = 2 * 64 * (2 * (16 * 32 + 32 * 16) + 16 * 8)  # FLOPs of the products of all weights' gradients, of 64 rows


@pytest.mark.parametrize("shard", SHARDS)
def test_no_product_is_computed_twice_or_too_early(shard: str) -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))

    torch.manual_seed(0)
    fn, params = fz.functional(Layers())

    def rank_main(_: int) -> None:
        step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
        for each in (step, fz.accumulate(step, 2)):
            out, pullback = each.vjp(each.init(params), x)
            whole = flops(lambda: pullback(out, retain_graph=True))
            first = flops(lambda: pullback.inputs(out))
            second = flops(pullback.params)
            offloads = "offload" in shard  # what passes through hooks is not looked at twice, and so does not wait
            assert (first + second, second) == (whole, 2 * 64 * 16 * 8 if offloads else WEIGHTS), (whole, first)

    run_ranks(rank_main, 2 if "ZeRO" in shard else 1)


@pytest.mark.parametrize("name", ["head_tied", "unrolled", "normed", "convolved", "attended"])
def test_weights_that_are_used_many_times_wait_too(name: str) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))

    def rank_main(_: int) -> None:
        for shard in (fz.shard_zero3, lambda step: step):
            step = shard(fz.train_step(FUNCTIONS[name], fz.sgd(0.1)))
            state = step.init(params_of(torch.float32))
            out, pullback = step.vjp(state, x)
            whole = flops(lambda: pullback(out, retain_graph=True))
            first, second = flops(lambda: pullback.inputs(out)), flops(pullback.params)
            frozen = fz.freeze(step, "*")
            _, pullback = frozen.vjp(frozen.init(params_of(torch.float32)), x)
            assert (first + second, first) == (whole, flops(lambda: pullback(out)))

    run_ranks(rank_main, 1)


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


def test_on_gloo_processes() -> None:
    run_ranks(on_processes, 2, backend="processes")


# ---- what is kept


@pytest.mark.parametrize("shard", ["unsharded", "remat", "ZeRO-3"])
def test_between_the_halves_only_what_the_second_needs_is_kept(shard: str) -> None:
    """Of a layer's graph its inputs and cotangents; nothing of what lies between, of the params, and of the state."""

    def rank_main(_: int) -> None:
        fn, params = fz.functional(Layers(act=nn.Mish))
        step = SHARDS[shard](fz.train_step(fn, fz.sgd(0.1)))
        state, x = step.init(params), torch.ones(64, 16)
        size = sum(buffer.nbytes for buffer in state.params.locals().values())
        with LiveBytes() as live:
            out, pullback = step.vjp(state, x)
            cotangent = torch.ones_like(out)
            del out
            gc.collect()
            before = live.now()
            found = pullback.inputs(cotangent)
            gc.collect()
            between = live.now()
            grads = pullback.params()
            gc.collect()
            after = live.now()
        rows = 64 * 4
        kept = rows * 2 * (16 + 32 + 32 + 16) + rows * (16 + 8)  # inputs and cotangents of all layers
        norms = 2 * 2 * 16 * 4
        ends = rows * (8 + 16)  # the cotangent, and the input's
        assert between <= kept + norms + ends + rows * 8 + 512, (before, between, kept)
        assert after <= ends + size + 512, (after, size)
        del found, grads

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("shard", SHARDS)
def test_nothing_is_left_after_both_halves(shard: str) -> None:
    def rank_main(rank: int) -> None:
        step = SHARDS[shard](fz.train_step(normed, fz.sgd(0.1)))
        state = step.init(params_of())
        x = torch.randn(4, 5, dtype=F64)
        for ends in ("params", "inputs", "nothing"):
            seen: list[Any] = []
            traced = fz.with_fn(step, lambda p, x, seen=seen: seen.append(weakref.ref(h := x * 2)) or normed(p, h))
            out, pullback = traced.vjp(state, x)
            own = [weakref.ref(run.traversal) for run in pullback._runs]
            if ends != "nothing":
                pullback.inputs(torch.ones_like(out))
            if ends == "params":
                pullback.params()
                gc.collect()
                assert not any(ref() for ref in (*own, *seen))
            del pullback, out
            gc.collect()
            assert not any(ref() for ref in (*own, *seen)), ends

    run_ranks(rank_main, 1)


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
    for shard in (fz.shard_zero3, lambda step: step):
        step = shard(fz.train_step(over_blocks(lambda q, x: x @ q["w"]), fz.sgd(0.1)))
        x = torch.ones(4, 5, dtype=F64)

        def rank_main(_: int, step: fz.Step = step, x: torch.Tensor = x) -> None:
            state = step.init(params_of())
            for _ in range(2):  # the first run of a unit has a copy
                out, pullback = step.vjp(state, x)
            pullback.inputs(out)
            x.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                pullback.params()

        run_ranks(rank_main, 1)


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


@pytest.mark.parametrize("shard", ["unsharded", "ZeRO-3"])
def test_a_donated_state_says_so_in_either_half(shard: str) -> None:
    def rank_main(_: int) -> None:
        step = fz.donate(SHARDS[shard](fz.train_step(lambda p, x: normed(p, x).sum(), fz.sgd(0.1))))
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

    run_ranks(rank_main, 1)


def test_an_error_in_the_first_half_leaves_no_hooks() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            if failing:
                raise ValueError("on purpose")
            return grad

    step = fz.shard_zero3(fz.train_step(over_blocks(lambda q, x: Fails.apply(x @ q["w"])), fz.sgd(0.1)))

    def rank_main(_: int) -> None:
        state, x = step.init(params_of()), torch.ones(4, 5, dtype=F64)
        out, pullback = step.vjp(state, x)
        failing.append(1)
        with pytest.raises(ValueError, match="on purpose"):
            pullback.inputs(out, retain_graph=True)
        with pytest.raises(RuntimeError, match=r"Call inputs\(cotangent\) first"):
            pullback.params()
        failing.clear()
        want = pullback(out, retain_graph=True)
        found = pullback.inputs(out)
        assert_trees_equal((fz.gather(pullback.params()), found), (fz.gather(want[0]), want[1]))

    failing: list[int] = []
    run_ranks(rank_main, 1)


# ---- what is not split


def test_compiled_units() -> None:
    def rank_main(rank: int) -> None:
        step = fz.compile(fz.shard_zero3(fz.train_step(programs.pure, fz.sgd(0.1))))
        compare(step, scenarios.stack(1, blocks=2)[1], [scenarios.vector_batches(2)[rank][0]])

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
