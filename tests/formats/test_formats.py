"""Low-precision schemes: formats, stochastic rounding, and training in every scheme on every sharding."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import optree
import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_turns, in_turns, todays
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero as fz
from fzero.formats.formats import Companded, Corrected, Exact, Plain, Stored, decode, encode, nbytes, zeros
from fzero.kernels import build, onepass
from fzero.optim._adam import _decoupled
from fzero.state.sharded import Draw
from fzero.table.layout import Key
from fzero.testing import assert_trees_close, assert_trees_equal, recorded_collectives, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")  # races show

BF16, F32 = torch.bfloat16, torch.float32
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
SCHEMES = {
    "exact": fz.Policy.exact(),
    "exact, fp32 moments": fz.Policy.exact(F32),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "compact16, 4-bit": fz.Policy.compact16("4-bit"),
    "compact16, bf16 moments": fz.Policy.compact16(BF16),
    "bf16": fz.Policy.bf16_states(),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: fz.adamw(1e-2, weight_decay=0.1),
    "adam": lambda: fz.adam(1e-2, weight_decay=0.1),
    "lion": lambda: fz.lion(1e-3, weight_decay=0.1),
    "sgd": lambda: fz.sgd(1e-2, momentum=0.9),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def any_bits(numel: int, seed: int = 0) -> torch.Tensor:
    """float32 of random bit patterns: of all magnitudes, infinities and NaN among them."""
    bits = torch.randint(-(2**31), 2**31 - 1, (numel,), generator=generator(seed), dtype=torch.int32)
    bits[:8] = torch.tensor([0, -(2**31), 0x7F800000, -0x800000, 0x7F7FFFFF, 0x7FC00001, 1, 0x3F808000])
    return bits.view(F32)


# ---- formats


def test_the_exact_split_is_float32_bit_for_bit() -> None:
    x = any_bits(1 << 20)
    high, low = encode(Exact(), x)
    assert (high.dtype, low.dtype) == (BF16, torch.int16)
    back = decode(Exact(), (high, low), F32)
    number = ~x.isnan()
    assert torch.equal(back[number].view(torch.int32), x[number].view(torch.int32)) and back[~number].isnan().all()
    ties = (x.view(torch.int32) & 0xFFFF) == 0x8000
    finite = x.abs() < 3.3e38
    assert torch.equal(high[finite & ~ties], x.to(BF16)[finite & ~ties]), "the first half is the bfloat16 weight"


def test_exact_params_are_cast_as_their_float32_values_are() -> None:
    bits = any_bits(1 << 20).view(torch.int32)
    bits[8::5] = (bits[8::5] & -65536) | 0x8000  # ties
    x = torch.where(bits.view(F32).isnan(), 1.0, bits.view(F32))
    got = decode(Exact(), encode(Exact(), x), BF16)
    assert torch.equal(got.view(torch.int16), x.to(BF16).view(torch.int16))


def test_a_corrected_bfloat16_has_24_bits() -> None:
    x = any_bits(1 << 20)
    back = decode(Corrected(), encode(Corrected(), x), F32)
    usual = (x.abs() > 1e-30) & (x.abs() < 3e38)
    gap = ((back - x).abs() / x.abs())[usual]
    assert gap.max() <= 1.6e-5, gap.max()
    assert torch.equal(back[x.isinf()], x[x.isinf()]) and back[x.isnan()].isnan().all()
    assert back[x.isfinite()].isfinite().all()


@given(seed=st.integers(0, 100), exponent=st.integers(-30, 8))
def test_companded_moments_are_near(seed: int, exponent: int) -> None:
    """Within half a code, at every magnitude that gradients have: a 64th of the value and of what is added to it."""
    x = torch.randn(32 * 16, generator=generator(seed)) * 10.0**exponent
    signed = decode(Companded(True), encode(Companded(True), x), F32)
    largest = x.view(-1, 32).abs().amax(1, keepdim=True).expand(-1, 32).reshape(-1)
    assert ((signed - x).abs() <= (x.abs() + 0.136 * largest) / 64).all()
    if exponent < -15:
        return  # squares of less are nothing in float32
    v = x.square()
    back = decode(Companded(False), encode(Companded(False), v), F32)
    least = largest.square() / 2**12
    assert ((back - v).abs()[v > least] <= ((v + 0.008 * largest.square()) / 64)[v > least]).all()
    assert (back > 0).all() and (back[v <= least] <= 2 * least[v <= least]).all()


def test_stochastic_rounding_has_no_bias_and_the_right_variance() -> None:
    count = 1 << 20
    x = torch.full((count,), 1.0 + 2.0**-10)  # an eighth of the way from 1 to the next bfloat16
    stored = Stored(Plain(BF16, True), (torch.empty(count, dtype=BF16),))
    onepass.write(stored, x, Draw(0, 0).counters(one_leaf(count), Key("", 0), 0).keys("cpu"))
    up = (stored.parts[0].float() - 1.0) * 2**7
    assert set(up.unique().tolist()) == {0.0, 1.0}
    assert abs(up.mean().item() - 0.125) < 5 * (0.125 * 0.875 / count) ** 0.5
    lanes = up.view(-1, 64).mean(0)
    assert (lanes - 0.125).abs().max() < 6 * (0.125 * 0.875 / (count / 64)) ** 0.5, "every lane alike"


def test_stochastic_rounding_at_the_edges() -> None:
    x = any_bits(1 << 16)
    out = torch.empty(1 << 16, dtype=BF16)
    onepass.write(Stored(Plain(BF16, True), (out,)), x, torch.arange(1 << 10, dtype=torch.int32))
    assert torch.equal(out[x.isinf()].float(), x[x.isinf()]) and out[x.isnan()].isnan().all()
    assert out[x.isfinite()].isfinite().all(), "what is finite stays so"
    normal = x.isfinite() & (x.abs() > 1e-37)
    assert ((out.float() - x).abs()[normal] <= x.abs()[normal] * 2.0**-7).all()


def one_leaf(numel: int) -> Any:
    return fz.plan(fz.train_step(lambda p: p, fz.sgd(0.1)), {"w": torch.empty(numel, device="meta")}).layout


# ---- kernels


@in_turns(4)  # every optimizer's each day in tests/kernels/test_build.py
@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("optimizer", ["adamw", "adam", "lion", "sgd"])
def test_kernels_have_the_bits_of_the_eager_path(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several threads have uneven parts, of several leaves."""
    monkeypatch.setattr(build, "_split", lambda numel, threads: [(0, 64 * 11), (64 * 11, numel)])
    numel = 64 * 37
    x = torch.randn(numel, generator=generator()) * 10.0 ** torch.randn(numel, generator=generator(1))
    x[:2] = torch.tensor([3.3e38, 0.0])
    forms = [
        *itertools.product(
            [Plain(F32), Plain(BF16), Plain(BF16, True), Exact()],
            [Plain(F32), Plain(BF16), Plain(BF16, True), Companded(True), Companded(True, 4)],
        ),
        (Corrected(), Companded(True)),
    ]
    for param, moment in todays(forms, of=3, name=lambda form: f"{form[0]}, {form[1]}"):
        policy = fz.Policy(
            param=param.parts[0].dtype,
            moment=str(moment) if isinstance(moment, Companded) else moment.dtype,
            rounding="compensated" if len(param.parts) > 1 else "stochastic" if str(param)[-1] == "c" else "nearest",
            remainder=torch.int8 if isinstance(param, Corrected) else torch.int16,
        )
        results = []
        for compiles in (False, True):
            step = fz.train_step(lambda p: p, OPTIMIZERS[optimizer](), policy)
            step = fz.compile(step) if compiles else step
            state = step.init(dict(zip("abc", x[:2304].split([70, 1274, 960]), strict=True)))
            for count in range(3):
                g = torch.randn(numel, generator=generator(9 + count)) * 1e-2
                grads = state.params.with_buffers({key: g for key in state.params.groups})
                state, _ = step.update(state, grads)
            results.append((state.params.buffers, [t.buffers for t in trees_of(state.moments)]))
        assert_trees_equal(*results)


@pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")
def test_what_is_counted_of_an_update_is_what_a_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On fake tensors: nothing, not the temporaries of a chunk."""
    monkeypatch.setattr(onepass, "_block", lambda *_: pytest.fail("a chunk ran"))
    with FakeTensorMode():
        step = fz.train_step(lambda p: p, fz.adamw(1e-3), fz.Policy.compact16("4-bit"))
        state = step.init({"w": torch.zeros(onepass.LARGE)})
        grads = state.params.with_buffers({key: torch.zeros(onepass.LARGE) for key in state.params.groups})
        step.update(state, grads)


@in_turns(12, "compiled by torch")
def test_the_pass_that_is_compiled_for_a_gpu_computes_the_same() -> None:
    """torch.compile of the eager chunk, here on CPU: the codes may differ where a last bit does."""
    numel = 64 * 8
    forms = [Plain(BF16, True), Companded(True), Companded(False)]
    x, g = (torch.randn(numel, generator=generator(i)) for i in range(2))
    hyper = torch.tensor([1.0, 0.9, 0.1, 0.999, 0.001, 0.99, 1e-2, 1.0, 1e-8])
    keys = torch.arange(numel // 64, dtype=torch.int32)
    results = []
    for block in (onepass._block, onepass._compiled()):
        parts = [encode(forms[0], x), *[zeros(form, numel, "cpu") for form in forms[1:]]]
        for _ in range(3):
            block(_decoupled, forms, parts, g.to(BF16), keys, hyper)
        results.append([decode(form, own, F32) for form, own in zip(forms, parts, strict=True)])
    assert_trees_close(*results, rtol=2e-2, atol=1e-3)


def trees_of(moments: Any) -> list[fz.Sharded]:
    found = [getattr(moments, name, None) for name in ("mu", "nu", "momentum")]
    return [tree for tree in found if tree is not None]


# ---- training


def problem() -> tuple[Any, Any, Any]:
    loss, params = scenarios.tiny_lm(dtype=F32, width=9)
    return loss, params, scenarios.token_batches(1)[0]


def same_on_all_ranks(policy: fz.Policy, stage: int, optimizer: str, world: int, updates: int = 3) -> Any:
    """Gathered params and moments; every rank has the same batch, so that a mean over ranks changes no bit."""
    loss, params, batch = problem()

    def rank_main(rank: int) -> Any:
        step = SHARDS[stage](fz.train_step(loss, OPTIMIZERS[optimizer](), policy))
        state = step.init(params, seed=7)
        for _ in range(updates):
            state, _ = step(state, *batch)
        moments = state.moments[-1] if isinstance(state.moments[0], tuple) else state.moments
        return fz.gather(state.params), [fz.gather(tree) for tree in trees_of(moments)]

    results = run_ranks(rank_main, world)
    for other in results[1:]:
        assert_trees_equal(other, results[0])
    return results[0]


@in_turns(5)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_same_bits_for_every_sharding(scheme: str) -> None:
    want = same_on_all_ranks(SCHEMES[scheme], 0, "clipped", 1)
    others = [(3, 1), (1, 2), (2, 2), (3, 2)]
    for stage, world in (*(others if NIGHTLY else others[len(scheme) % 2 :: 2]), (3, 4)):
        assert_trees_equal(same_on_all_ranks(SCHEMES[scheme], stage, "clipped", world), want)


@in_turns(8)
@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [(name, stage) for name in OPTIMIZERS for stage in range(4) if NIGHTLY or name == "clipped" or stage in (0, 3)],
)
def test_exact_params_are_float32_masters_bit_for_bit(optimizer: str, stage: int) -> None:
    for compute in (BF16, F32) if NIGHTLY else ((BF16, F32)[(len(optimizer) + stage) % 2],):
        exact = dataclasses.replace(fz.Policy.exact(F32), compute=compute)
        masters = fz.Policy(param=F32, grad=BF16, moment=F32, compute=compute)
        world = 2 if stage else 1
        ours = same_on_all_ranks(exact, stage, optimizer, world, updates=4)
        assert_trees_equal(ours, same_on_all_ranks(masters, stage, optimizer, world, updates=4))


@in_turns(11)
@pytest.mark.parametrize(("optimizer", "scheme"), by_turns(["adamw", "lion", "sgd"], SCHEMES))
def test_every_scheme_trains(optimizer: str, scheme: str) -> None:
    """The loss falls as it does in float32, donated and not, with the same bits."""
    ours, plain = trained(scheme, optimizer), trained("masters", optimizer)
    assert abs(ours - plain) < 0.15 * plain


@functools.cache
def trained(scheme: str, optimizer: str) -> float:
    """The last loss; donated and not with the same bits."""
    loss, params, batch = problem()
    finals = []
    for donated in (False, True):
        step = fz.train_step(loss, OPTIMIZERS[optimizer](), SCHEMES.get(scheme, fz.Policy(compute=BF16)))
        step = fz.donate(step) if donated else step
        state = step.init(params)
        for _ in range(25):
            state, metrics = step(state, *batch)
        finals.append((metrics["loss"], fz.gather(state.params)))
    assert_trees_equal(*finals)
    return finals[0][0].item()


@in_turns(5)
@pytest.mark.parametrize("scheme", [scheme for scheme in [*SCHEMES, "fp32"] if scheme not in ("exact", "compact24")])
def test_second_moments_decay(scheme: str) -> None:
    """300 updates with zero gradients at b2 = 0.999, nightly 1,000, against that; bfloat16 to nearest never moves.

    The two left out keep moments as compact16 does.
    """
    policy = SCHEMES.get(scheme, fz.Policy())
    step = fz.donate(fz.train_step(lambda p: p, fz.adamw(0.0, b2=0.999), policy))
    numel = 64 * 64
    state = step.init({"w": torch.ones(numel)})
    g = torch.randn(numel, generator=generator()).abs() + 0.1

    def grads(value: torch.Tensor) -> Any:
        return state.params.with_buffers({key: value for key in state.params.groups})

    state, _ = step.update(state, grads(g))
    before = fz.gather(state.moments.nu)["w"].float()
    zero = torch.zeros(numel)
    count = 1000 if NIGHTLY else 300
    for _ in range(count):
        state, _ = step.update(state, grads(zero))
    ratio = (fz.gather(state.moments.nu)["w"].double() / before.double()).mean().item()
    if scheme == "bf16":
        assert ratio == 1.0
    else:
        near = 1e-3 if scheme in ("fp32", "exact, fp32 moments") else 1e-4 * count
        assert ratio == pytest.approx(0.999**count, rel=near)


@in_turns(4)
@pytest.mark.parametrize(("scheme", "stage"), by_turns(SCHEMES, [0, 1, 3]))
def test_plan_counts_what_is_stored(scheme: str, stage: int) -> None:
    loss, params, _ = problem()

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2), SCHEMES[scheme]))
        state = step.init(params)
        plan = fz.plan(step, params, world_size=2 if stage else 1)
        leaves = torch.utils._pytree.tree_leaves((state.params, state.moments))  # type: ignore[attr-defined]
        storages = {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in leaves}
        assert sum(storages.values()) == plan.params + plan.moments, str(plan)

    run_ranks(rank_main, 2 if stage else 1)


def test_bytes_per_parameter() -> None:
    params = {"w": torch.empty(1 << 20, device="meta")}
    want = {
        "exact": 6.0625,
        "exact, fp32 moments": 12,
        "compact24": 5.0625,
        "compact16": 4.0625,
        "compact16, 4-bit": 3.5625,
        "compact16, bf16 moments": 6,
        "bf16": 6,
    }
    for scheme, size in want.items():
        plan = fz.plan(fz.train_step(lambda p: p, fz.adamw(1e-3), SCHEMES[scheme]), params)
        assert (plan.params + plan.moments) / (1 << 20) == size


# ---- trees of codes


def test_codes_are_not_computed_with_as_if_they_were_values() -> None:
    step = fz.train_step(lambda p: p, fz.adamw(1e-2), fz.Policy.exact())
    state = step.init({"w": torch.ones(100)})
    copied: Any = optree.tree_map(torch.clone, state)  # type: ignore[arg-type]
    assert_trees_equal(fz.gather(copied.params), fz.gather(state.params))
    with pytest.raises(
        TypeError, match=r"leaf 'w' .* bf16 \+ int16: got a buffer of torch.float32, expected torch.int16"
    ):
        torch.utils._pytree.tree_map(lambda x: x * 0.5, state)  # type: ignore[attr-defined]
    halved = state.params.map(lambda x: x * 0.5)
    assert_trees_equal(fz.gather(halved), {"w": torch.full((100,), 0.5)})
    assert state.params["w"].dtype == F32


# ---- bad input


def test_a_policy_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"param=torch.float16, rounding='stochastic'.*say param=torch.bfloat16|Say param"
    ):
        fz.Policy(param=torch.float16, rounding="stochastic")
    with pytest.raises(ValueError, match=r"expected torch\.int16"):
        fz.Policy(param=BF16, rounding="compensated", remainder=F32)
    with pytest.raises(ValueError, match=r"8-bit, 4-bit"):
        fz.Policy(moment="3-bit")
    step = fz.train_step(lambda p: p, fz.adamw(1e-2), fz.Policy(rounding="stochastic"))
    with pytest.raises(ValueError, match=r"params\['w'\]: .*torch.float32.*param=torch.bfloat16"):
        step.init({"w": torch.ones(3)})


def test_an_optimizer_that_cannot_carry_8_bit_moments_is_named() -> None:
    def init(params: Any) -> Any:
        return torch.utils._pytree.tree_map(torch.zeros_like, params)  # type: ignore[attr-defined]

    same = lambda updates, state, params=None: (updates, state)
    mine = fz.GradientTransformation(init, same, label=lambda _: "mine", elementwise=True)
    step = fz.train_step(lambda p: p, mine, fz.Policy.compact16())
    with pytest.raises(ValueError, match=r"params\['w'\]: .*'8-bit'.*\(mine\) cannot carry.*fz.adamw"):
        step.init({"w": torch.ones(3)})
    kept = fz.train_step(lambda p: p, mine, fz.Policy.compact16(BF16)).init({"w": torch.ones(3)})
    assert kept.moments.slices[0].local(Key("", 0)).dtype == BF16


# ---- gathers in 8 bits


def test_params_that_travel_in_8_bits() -> None:
    """Half the bytes of bfloat16; every sharding computes with the same rounded values, near the others."""
    loss, params, batch = problem()
    policies = {name: fz.Policy(compute=BF16, grad=BF16, gather=name) for name in (None, "8-bit")}
    plain = same_on_all_ranks(policies[None], 0, "adamw", 1)[0]
    want = same_on_all_ranks(policies["8-bit"], 0, "adamw", 1)
    for stage, world in ((3, 1), (1, 2), (2, 2), (3, 2), (3, 4)):
        assert_trees_equal(same_on_all_ranks(policies["8-bit"], stage, "adamw", world), want)
    for path, leaf in want[0].items():
        assert (leaf - plain[path]).abs().max() < 0.07

    def rank_main(rank: int) -> dict[str | None, int]:
        sent = {}
        for name, policy in policies.items():
            step = fz.shard_zero3(fz.train_step(loss, fz.adamw(1e-2), policy))
            state = step.init(params)
            with recorded_collectives() as record:
                step.forward(state, *batch)
            sent[name] = sum(size for operation, _, size in record if operation == "all_gather")
        return sent

    sent = run_ranks(rank_main, 2)[0]
    assert sent["8-bit"] == sent[None] * (1 + 1 / 16) / 2


# ---- conversion


@in_turns(5)
@pytest.mark.parametrize(
    ("scheme", "stage"), by_turns(["exact", "exact, fp32 moments", "compact24", "compact16", "bf16"], [0, 1, 3])
)
def test_conversion_where_nothing_is_lost(scheme: str, stage: int) -> None:
    """To another sharding and other units, and to float32: the same values, and the first also trains on alike."""
    loss, params, batch = problem()
    world = 2 if stage else 1

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(loss, fz.adamw(1e-2), SCHEMES[scheme]))
        state, _ = step(step.init(params, seed=5), *batch)
        others = [
            (SHARDS[{0: 0, 1: 3, 3: 1}[stage]], SCHEMES[scheme], None),
            (SHARDS[stage], SCHEMES[scheme], ["blocks.0", "blocks.*.up", "embed"]),
            (SHARDS[stage], dataclasses.replace(fz.Policy(), compute=BF16, grad=BF16), None),
        ]
        for shard, policy, units in others:
            other = shard(fz.train_step(loss, fz.adamw(1e-2), policy, units=units))
            converted = fz.convert(state, other)
            assert_trees_equal(
                upcast((fz.gather(converted.params), *[fz.gather(tree) for tree in trees_of(converted.moments)])),
                upcast((fz.gather(state.params), *[fz.gather(tree) for tree in trees_of(state.moments)])),
            )
            after = [fz.gather(s(t, *batch)[0].params) for s, t in ((other, converted), (step, state))]
            if policy == SCHEMES[scheme]:
                assert_trees_equal(*after)

    run_ranks(rank_main, world)


def upcast(tree: Any) -> Any:
    return optree.tree_map(lambda x: x.float(), tree)


def test_conversion_that_would_lose_something_says_what() -> None:
    loss, params, batch = problem()
    plain = fz.train_step(loss, fz.adamw(1e-2))
    state, _ = plain(plain.init(params), *batch)
    small = fz.train_step(loss, fz.adamw(1e-2), fz.Policy.compact16())
    with pytest.raises(ValueError, match=r"params of leaf 'blocks.0.down.bias' are stored as fp32, .* rounded to bf16"):
        fz.convert(state, small)
    half = fz.train_step(loss, fz.adamw(1e-2), fz.Policy.exact(BF16))
    with pytest.raises(ValueError, match=r"moments of leaf .* are stored as fp32, .* bf16 stochastic.*lossy=True"):
        fz.convert(state, half)
    converted = fz.convert(state, small, lossy=True)
    rounded = optree.tree_map(lambda leaf: leaf.to(BF16), fz.gather(state.params))
    assert_trees_equal(fz.gather(converted.params), rounded)
    with pytest.raises(ValueError, match=r"fz\.convert\(state, step\)"):
        small(state, *batch)
    with pytest.raises(ValueError, match="moments of another optimizer"):
        fz.convert(state, fz.train_step(loss, fz.lion(1e-2)))
    with pytest.raises(ValueError, match="keeps grads"):
        grads, _ = plain.vjp(state, *batch)[1](torch.ones(()))
        fz.convert(plain.add_grads(state, grads), small)


@pytest.mark.parametrize("form", [Exact(), Corrected(), Plain(BF16, True)])
def test_decoding_and_encoding_changes_nothing(form: Any) -> None:
    """So a state that is stored, loaded, converted or left alone stays; also where rounding is stochastic."""
    x = torch.randn(1 << 16, generator=generator()) * 10.0 ** torch.randn(1 << 16, generator=generator(1))
    values = decode(form, encode(form, x), F32)
    assert_trees_equal(decode(form, encode(form, values), F32), values)
    again = Stored(form, tuple(part.clone() for part in encode(form, x)))
    onepass.write(again, values, torch.arange(1 << 10, dtype=torch.int32))
    assert_trees_equal(again.to(F32), values)


@pytest.mark.parametrize("form", [Plain(F32), Exact(), Corrected(), Companded(True), Companded(True, 4)])
def test_zeros_are_zero_and_take_the_bytes_that_are_counted(form: Any) -> None:
    parts = zeros(form, 128, "cpu")
    assert sum(part.nbytes for part in parts) == nbytes(form, 128)
    assert not decode(form, parts, F32).any()


def test_a_cut_is_a_view_of_the_same_values() -> None:
    x = torch.randn(128, generator=generator())
    stored = Stored(Exact(), encode(Exact(), x))
    part = stored.cut(64, 128)
    assert torch.equal(part.to(F32), x[64:]) and part.numel() == 64
    part.parts[0].zero_()
    assert torch.equal(stored.to(F32)[:64], x[:64]) and not torch.equal(stored.to(F32)[64:], x[64:])
