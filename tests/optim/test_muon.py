"""Muon: to the bits of torch's, under ZeRO from any number of ranks; its derivatives are in tests/whole_runs.py."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_day, in_turns

import fzero as fz
from fzero.optim import _muon
from fzero.optim._muon import orthogonal
from fzero.testing import assert_trees_close, assert_trees_equal, hazards, run_ranks

BLOCKS = 3


def drawn(dtype: torch.dtype, d: int = 24, h: int = 40, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) / 5

    blocks = [{"w": matrix(d, h), "v": matrix(h, d), "b": torch.zeros(d, dtype=dtype)} for _ in range(BLOCKS)]
    return {"blocks": blocks, "experts": matrix(3, 8, d)}


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"]) @ p["v"] + p["b"]


def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for each in p["blocks"]:
        x = block(each, x)
    last = p["experts"].sum(0)
    return ((x @ last.T @ last - y) ** 2).mean()


def data(dtype: torch.dtype, d: int = 24) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    x, y = torch.randn(2, 12, d, generator=generator, dtype=torch.float64).to(dtype)
    return x, y


def optimizer(**options: Any) -> Any:
    return fz.partition({"*.b": fz.sgd(1e-2, momentum=0.9), "*": fz.muon(2e-2, **options)})


SHARDS: dict[str, Any] = {
    "alone": lambda step: step,
    "zero1": fz.shard_zero1,
    "zero2": fz.shard_zero2,
    "zero3": fz.shard_zero3,
    "fused": lambda step: fz.fuse_update(fz.shard_zero3(step)),
    "fused, held": lambda step: fz.fuse_update(fz.shard_zero3(step), norm="held"),
    "fused, donated": lambda step: fz.donate(fz.fuse_update(fz.shard_zero1(step))),
    "fused, away": lambda step: fz.offload(
        fz.donate(fz.fuse_update(fz.shard_zero2(step))), params="host", grads="host", moments="host"
    ),
    "fused, slow": lambda step: fz.lookahead(fz.fuse_update(fz.shard_zero3(step)), every=99),
    "donated": lambda step: fz.donate(fz.shard_zero2(step)),
    "on the host": lambda step: fz.offload(fz.shard_zero3(step), params="host", grads="host", moments="host"),
}


def on_rank(how: str, dtype: torch.dtype, steps: int, policy: Any, same: bool, rank: int) -> Any:
    step = SHARDS[how](fz.train_step(loss, optimizer(), policy))
    state, (x, y) = step.init(drawn(dtype)), data(torch.bfloat16 if policy else dtype)
    if not same:
        ranks = torch.distributed.get_world_size()
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
    for _ in range(steps):
        state, _ = step(state, x, y)
    return fz.gather(state.params), fz.gather(state.moments)


def trained(how: str, dtype: torch.dtype, steps: int = 4, policy: Any = None, same: bool = True) -> Any:
    return functools.partial(on_rank, how, dtype, steps, policy, same)


def test_torchs_own_bits() -> None:
    params, (x, y) = drawn(torch.float32), data(torch.float32)
    matrices = [each[name].requires_grad_() for each in params["blocks"] for name in ("w", "v")]
    others = [params["experts"].requires_grad_(), *[each["b"].requires_grad_() for each in params["blocks"]]]
    muon, buffer = torch.optim.Muon(matrices, 2e-2), torch.zeros_like(params["experts"])
    sgd = torch.optim.SGD(others[1:], 1e-2, momentum=0.9)
    for _ in range(4):
        for each in (*matrices, *others):
            each.grad = None
        loss(params, x, y).backward()
        muon.step()
        sgd.step()
        with torch.no_grad():
            g = others[0].grad
            assert g is not None
            buffer.lerp_(g, 1 - 0.95)
            for own, way in zip(others[0], g.lerp(buffer, 0.95), strict=True):
                own.mul_(1 - 2e-2 * 0.1).add_(orthogonal(way.bfloat16(), 5, 1e-7), alpha=-2e-2)
    got, _ = trained("alone", torch.float32)(0)
    for own, want in zip(got["blocks"], params["blocks"], strict=True):
        assert_trees_equal(own, {name: x.detach() for name, x in want.items()})
    assert_trees_equal(got["experts"], others[0].detach())


@pytest.mark.parametrize("shape", [(8, 3), (3, 8), (5, 5)])
def test_torchs_other_scale(shape: tuple[int, int]) -> None:
    w, g = torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))
    own = torch.nn.Parameter(w.clone())
    own.grad = g.clone()
    torch.optim.Muon([own], 0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3).step()
    muon = fz.muon(0.1, nesterov=False, adjust_lr_fn="match_rms_adamw", ns_steps=3)
    step = fz.train_step(lambda p: (p["w"] * g).sum(), muon)
    state, _ = step(step.init({"w": w}))
    assert_trees_close(fz.gather(state.params)["w"], own.detach(), rtol=0.0, atol=1e-7)


def test_the_older_names_of_what_torch_calls_otherwise() -> None:
    older: Any = fz.muon
    made = older(0.1, steps=3, adjust_lr="match_rms_adamw"), fz.muon(0.1, ns_steps=3, adjust_lr_fn="match_rms_adamw")
    one, other = [each.update.__self__ for each in made]
    assert one == other
    with pytest.raises(TypeError, match="muon: got steps= and ns_steps=, which are one argument; expected ns_steps="):
        older(0.1, steps=3, ns_steps=3)


def test_the_same_bits_without_instructions_for_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 24, generator=torch.Generator().manual_seed(2)).bfloat16()
    want = orthogonal(x, 5, 1e-7)
    monkeypatch.setattr("fzero.optim._muon.slowdown", lambda dtype: 20.0)
    got = orthogonal(x, 5, 1e-7)
    assert got.dtype == torch.bfloat16
    assert_trees_close(got.float(), want.float(), rtol=0.05, atol=0.02)  # whose sums may be in another order


@by_day(6)
@given(how=st.sampled_from(sorted(set(SHARDS) - {"alone"})), ranks=st.integers(1, 4), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_from_any_number_of_ranks(how: str, ranks: int, seed: int) -> None:
    want = trained("alone", torch.float64)(0)
    with hazards(seed):
        found = run_ranks(trained(how, torch.float64, same=False), ranks)
    for got in found:
        assert_trees_close(got, want, rtol=1e-10, atol=1e-12)


@in_turns(2)
@pytest.mark.parametrize("how", ["zero1", "zero3", "fused", "fused, donated"][:: 1 if NIGHTLY else 2])
def test_on_real_processes(how: str) -> None:
    want = trained("alone", torch.float64)(0)
    with hazards(3):
        found = run_ranks(trained(how, torch.float64, same=False), 3, backend="processes")
    for got in found:
        assert_trees_close(got, want, rtol=1e-10, atol=1e-12)


def failing(how: str, at: int, rank: int) -> float:
    """A step in which one rank fails as exchanges are on their way, and then a sum over the ranks."""
    calls, numbers, on_their_way = itertools.count(1), itertools.count(), set[int]()

    def fails(x: torch.Tensor, *rest: Any) -> torch.Tensor:
        if rank == 1 and next(calls) == at:
            raise ArithmeticError("no such matrix")
        return orthogonal(x, *rest)

    def seen(start: Any) -> Any:
        def started(*args: Any) -> Any:
            wait, number = start(*args), next(numbers)
            on_their_way.add(number)

            def waited() -> Any:
                on_their_way.discard(number)
                return wait()

            return waited

        return started

    step, one = SHARDS[how](fz.train_step(loss, optimizer())), torch.ones(1)
    state, inputs = step.init(drawn(torch.float64, 96, 160)), data(torch.float64, 96)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_muon, "orthogonal", fails)
        patch.setattr(_muon, "start_whole", seen(_muon.start_whole))
        patch.setattr(_muon, "start_slices", seen(_muon.start_slices))
        with pytest.raises((ArithmeticError, RuntimeError), match="no such matrix"), fz.testing.checked_collectives():
            step(state, *inputs)
    assert not on_their_way
    torch.distributed.all_reduce(one)
    return one.item()


@in_turns(3)
@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("how", ["zero1", "zero3", "fused", "fused, donated"])
def test_an_error_leaves_no_exchange_on_its_way(how: str, at: int) -> None:
    """Which later messages would meet: the group is as it was before."""
    with hazards(at):
        found = run_ranks(functools.partial(failing, how, at), 2, backend="processes", timeout=10, checked=False)
    assert found == [2, 2]


@in_turns(3)
@pytest.mark.parametrize("policy", [fz.Policy.compact24(), fz.Policy.compact16(), fz.Policy.exact(moment="8-bit")])
def test_in_few_bits_the_same_from_all_ranks(policy: fz.Policy) -> None:
    want, _ = trained("alone", torch.float32, policy=policy)(0)
    for how in ("zero3", "fused", "fused, away"):
        for got, _ in run_ranks(trained(how, torch.float32, policy=policy), 2):
            assert_trees_equal(got, want)


@pytest.mark.parametrize("around", ["", "lookahead", "chain"])
def test_units_are_pulled_back_while_others_wait_for_exchanges(monkeypatch: pytest.MonkeyPatch, around: str) -> None:
    """An exchange that a unit's update has begun is waited for once the next unit's gradient is there."""
    events = dict[int, list[str]]()

    def noting(what: str, start: Any) -> Any:
        def started(tree: Any, key: Any, *given: Any) -> Any:
            own = events.setdefault(tree.axis.rank, [])
            own.append(f"{what}:{key.unit}")
            wait = start(tree, key, *given)

            def waited() -> Any:
                own.append(f"waits, {what}:{key.unit}")
                return wait()

            return waited

        return started

    for what, name in (("in", "start_whole"), ("out", "start_slices")):
        monkeypatch.setattr(f"fzero.optim._muon.{name}", noting(what, getattr(_muon, name)))

    def rank_main(rank: int) -> None:
        own = fz.chain(optimizer(), fz.sgd(-0.5)) if around == "chain" else optimizer()
        step = fz.fuse_update(fz.shard_zero3(fz.train_step(loss, own)))
        step = fz.lookahead(step, every=1) if around == "lookahead" else step
        step(step.init(drawn(torch.float32)), *data(torch.float32))

    run_ranks(rank_main, 2)
    for own in events.values():
        units = list(dict.fromkeys(each.partition(":")[2] for each in own))
        assert len(units) > 2
        for place, unit in enumerate(units):
            for what, following in zip(("in", "out"), units[place + 1 :], strict=False):
                assert own.index(f"in:{following}") < own.index(f"waits, {what}:{unit}")
            assert own.index(f"waits, in:{unit}") < own.index(f"out:{unit}") < own.index(f"waits, out:{unit}")
        assert len(own) == 4 * len(units)


@in_turns(6)
@pytest.mark.parametrize("wrap", [fz.shard_zero3, lambda step, **over: fz.fuse_update(fz.shard_zero3(step, **over))])
@pytest.mark.parametrize(
    "optimizer", [fz.muon(0.1), fz.whole(fz.lamb(0.1)), fz.chain(fz.muon(0.1), fz.whole(fz.lamb(0.1)), fz.adamw(0.1))]
)
def test_over_a_tensor_axis(optimizer: Any, wrap: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        ax = fz.parallel.axis(mesh_of(), "tp") if torch.distributed.is_initialized() else None
        x = x if ax is None else fz.parallel.copy(x, ax)
        out = torch.tanh(x @ p["a"]) @ p["b"]
        return (out if ax is None else fz.parallel.sum(out, ax)).square().mean()

    def mesh_of() -> Any:
        ranks = torch.distributed.get_world_size()
        return init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))

    generator = torch.Generator().manual_seed(3)
    params = {"a": torch.randn(6, 8, generator=generator), "b": torch.randn(8, 6, generator=generator)}
    params = {name: x.double() for name, x in params.items()}
    x = torch.randn(4, 6, generator=generator).double()

    def on(rank: int) -> Any:
        step = fz.train_step(loss, optimizer)
        if rank >= 0:
            mesh = mesh_of()
            step = fz.shard_tensor(step, {"a": 1, "b": 0}, mesh=mesh, axis="tp")
            step = wrap(step, mesh=mesh, axis="dp")
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, x)
        return fz.gather(state.params)

    want = on(-1)
    for got in run_ranks(on, 4):
        assert_trees_close(got, want, rtol=1e-10, atol=1e-12)


def test_refused_by_name() -> None:
    for shape in ((4,), (), (2, 2, 3, 3)):
        with pytest.raises(ValueError, match=r"leaf 'w' has shape .* expected a matrix.*fz.partition"):
            fz.train_step(lambda p: p["w"].sum(), fz.muon(0.1)).init({"w": torch.zeros(shape)})
        with pytest.raises(ValueError, match="leaf 'w' has shape"):
            fz.muon(0.1).init({"w": torch.zeros(shape)})
    with pytest.raises(ValueError, match="adjust_lr_fn='most', expected one of 'original', 'match_rms_adamw'"):
        fz.muon(0.1, adjust_lr_fn="most")
    with pytest.raises(ValueError, match=r"muon\(momentum=...\): got 1.0"):
        fz.muon(0.1, momentum=1.0)
