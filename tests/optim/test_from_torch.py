"""Optimizers of torch.optim as transformations: to their bits, alone and on ranks; refused by name where none is."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from nightly import NIGHTLY, at_length, in_turns

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd, fused": (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"betas": (0.8, 0.9)}),
    "nadam": (torch.optim.NAdam, {"momentum_decay": 0.1}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.3}),
    "adagrad, fused": (torch.optim.Adagrad, {"lr_decay": 0.1, "fused": True}),
    "adadelta": (torch.optim.Adadelta, {}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"t0": 1.0}),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.1}),
}
SHAPES: dict[str, tuple[int, ...]] = {"w": (5, 7), "b": (7,), "s": ()}


def params() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made, dtype=torch.float64) for name, shape in SHAPES.items()}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ p["w"] + p["b"]) * p["s"]).square().sum() + (x @ p["w"]).sum()


def data() -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_torch(name: str) -> dict[str, torch.Tensor]:
    kind, options = OPTIMIZERS[name]
    own = {path: p.requires_grad_() for path, p in params().items()}
    optimizer = kind(own.values(), lr=0.01, **options)
    for x in data():
        optimizer.zero_grad()
        loss(own, x).backward()
        optimizer.step()
    return {path: p.detach() for path, p in own.items()}


def on_rank(name: str, wrap: Any, rank: int) -> Any:
    kind, options = OPTIMIZERS[name]
    step = wrap(fz.train_step(loss, fz.from_torch(kind, 0.01, **options)))
    state = step.init(params())
    for x in data():
        state, _ = step(state, x)
    return fz.gather(state.params)


@in_turns(5)
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_as_in_torch(name: str) -> None:
    want = by_torch(name)
    assert_trees_close(on_rank(name, lambda step: step, 0), want, rtol=1e-12, atol=1e-14)
    wraps = fz.shard_zero1, fz.shard_zero3, lambda step: fz.fuse_update(fz.shard_zero3(step))
    for wrap in wraps if NIGHTLY else (wraps[len(name) % 3],):
        for got in run_ranks(functools.partial(on_rank, name, wrap), 3):
            assert_trees_close(got, want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_moments_may_be_narrower_than_what_they_are_of(name: str) -> None:
    kind, options = OPTIMIZERS[name]
    policy = fz.Policy(param=torch.float64, moment=torch.bfloat16)
    step = fz.train_step(loss, fz.from_torch(kind, 0.01, **options), policy=policy)
    state = step.init(params())
    for x in data():
        state, _ = step(state, x)
    assert_trees_close(fz.gather(state.params), by_torch(name), rtol=0.0, atol=0.01)


@pytest.mark.parametrize("leaf, grad", [(torch.float64, torch.float32), (torch.float32, torch.float64)])
def test_grads_may_be_of_another_dtype_than_params(leaf: torch.dtype, grad: torch.dtype) -> None:
    policy = fz.Policy(param=leaf, compute=grad, grad=grad, reduce=grad)
    step = fz.train_step(lambda p: p["w"].square().sum(), fz.from_torch(torch.optim.RMSprop, 0.1), policy)
    w = torch.linspace(1, 2, 5, dtype=leaf)
    state, _ = step(step.init({"w": w}))
    want = w.clone().requires_grad_()
    want.grad = 2 * w
    torch.optim.RMSprop([want], 0.1).step()
    torch.testing.assert_close(fz.gather(state.params)["w"], want.detach(), rtol=1e-6, atol=1e-6)


@at_length
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_on_real_processes(name: str) -> None:
    for got in run_ranks(functools.partial(on_rank, name, fz.shard_zero3), 2, backend="processes"):
        assert_trees_close(got, by_torch(name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["nadam", "adafactor"])
def test_on_plain_trees_saved_and_loaded(name: str, tmp_path: Any) -> None:
    kind, options = OPTIMIZERS[name]
    optimizer, own = fz.from_torch(kind, 0.01, **options), params()
    state = optimizer.init(own)
    for x in data():
        updates, state = optimizer.update(torch.func.grad(loss)(own, x), state, own)
        own = {path: p + updates[path] for path, p in own.items()}
    assert_trees_close(own, by_torch(name), rtol=1e-12, atol=1e-14)

    def on(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(loss, fz.from_torch(kind, 0.01, **options)))
        kept = step.init(params())
        for i, x in enumerate(data()):
            kept, _ = step(kept, x)
            if i == 1:
                fz.save(tmp_path / f"{name}-{torch.distributed.get_world_size()}", kept)
                kept = fz.load(tmp_path / f"{name}-{torch.distributed.get_world_size()}", step)
        return fz.gather(kept.params)

    for got in run_ranks(on, 2):
        assert_trees_close(got, by_torch(name), rtol=1e-10, atol=1e-12)


def test_muon_of_torch_takes_matrices_and_says_so() -> None:
    muon = fz.from_torch(torch.optim.Muon, 0.02)
    step = fz.train_step(loss, fz.partition({"w": muon, "*": fz.sgd(0.01)}))
    state, _ = step(step.init(params()), data()[0])
    mine = fz.train_step(loss, fz.partition({"w": fz.muon(0.02), "*": fz.sgd(0.01)}))
    want, _ = mine(mine.init(params()), data()[0])
    assert_trees_close(fz.gather(state.params), fz.gather(want.params), rtol=0.02)  # which float64 is not in bfloat16
    with pytest.raises(ValueError, match=r"leaf 'b' .*Muon only supports 2D"):
        fz.train_step(loss, muon).init(params())


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_a_param_that_is_not_used(name: str) -> None:
    """Torch skips it, as it does where it is frozen here; otherwise it is updated by zeros."""
    unused = lambda p, x: (torch.tanh(x @ p["w"]) + p["b"]).square().sum()
    kind, options = OPTIMIZERS[name]
    options = {**options, "weight_decay": 0.5}

    def by_hand(zeros: bool) -> dict[str, torch.Tensor]:
        own = {path: p.requires_grad_() for path, p in params().items()}
        optimizer = kind(own.values(), lr=0.01, **options)
        for x in data():
            optimizer.zero_grad()
            unused(own, x).backward()
            own["s"].grad = torch.zeros_like(own["s"]) if zeros else None
            optimizer.step()
        return {path: p.detach() for path, p in own.items()}

    for wrap, zeros in ((lambda step: step, True), (lambda step: fz.freeze(step, "s"), False)):
        step = wrap(fz.train_step(unused, fz.from_torch(kind, 0.01, **options)))
        state = step.init(params())
        for x in data():
            state, _ = step(state, x)
        assert_trees_close(fz.gather(state.params), by_hand(zeros), rtol=1e-12, atol=1e-14)
    assert by_hand(False)["s"] == params()["s"] != by_hand(True)["s"]


def test_a_schedule() -> None:
    step = fz.train_step(loss, fz.from_torch(torch.optim.SGD, lambda count: 0.1 / (count + 1)))
    state, metrics = step(step.init(params()), data()[0])
    assert metrics["lr"].item() == pytest.approx(0.1)
    assert step(state, data()[1])[1]["lr"].item() == pytest.approx(0.05)


def test_refused_by_name() -> None:
    for kind, options, said in (
        (torch.optim.LBFGS, {}, r"LBFGS with {}, which could not update leaf 'a matrix' by step\(\).*no closure"),
        (torch.optim.SparseAdam, {}, "torch.optim.SparseAdam .*could not update"),
        (torch.optim.SGD, {"beta": 1}, "torch.optim.SGD with .* could not update .*unexpected keyword argument 'beta'"),
    ):
        with pytest.raises((TypeError, ValueError), match=said):
            fz.from_torch(kind, 0.1, **options)
    with pytest.raises(TypeError, match="from_torch: got optimizer="):
        fz.from_torch(torch.optim.SGD([torch.ones(1)], 0.1), 0.1)  # type: ignore[arg-type]

    def trained(p: Any, name: str, wrap: Any) -> Any:
        step = wrap(fz.train_step(loss, fz.from_torch(OPTIMIZERS[name][0], 0.01)))
        return step.forward(step(step.init(p), data()[0])[0], data()[0])

    for name in ("adam", "adafactor"):
        with pytest.raises(TypeError, match="writes in place and has no derivative"):
            torch.func.grad(functools.partial(trained, name=name, wrap=lambda step: step))(params())
        with pytest.raises(RankError, match="writes in place and has no derivative"):
            own = functools.partial(trained, name=name, wrap=fz.shard_zero3)
            run_ranks(lambda rank: torch.func.grad(own)(params()), 2)


# ---- optimizers of others


class Own(torch.optim.Optimizer):
    """One in torch's shape, whose update of a leaf is a function of the optimizer, the param, and its state."""

    def __init__(self, params: Any, lr: float = 0.01, k: int = 0) -> None:
        super().__init__(params, {"lr": lr, "k": k})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(group["lr"] * self.direction(group, p, self.state[p]))

    def direction(self, group: Any, p: Any, state: Any) -> Any:
        raise NotImplementedError


class ByRows(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        state["m"] = 0.9 * state.get("m", torch.zeros_like(p)) + p.grad
        return state["m"] / (state["m"].norm(dim=-1, keepdim=True) + 1e-8) if p.ndim else state["m"]


class InBfloat16(Own):
    dtype = torch.bfloat16

    def direction(self, group: Any, p: Any, state: Any) -> Any:
        if not state:
            state["m"], state["k"] = torch.zeros_like(p, dtype=self.dtype), 0
        assert state["m"].dtype == self.dtype
        state["m"].mul_(0.9).add_(p.grad.to(self.dtype))
        state["k"] += 1
        return state["m"].to(p.dtype) / state["k"]


class InFloat32(InBfloat16):
    dtype = torch.float32


class ByDims(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        return p.grad * len(p.shape)


class Clips(torch.optim.Adam):
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            torch.nn.utils.clip_grad_norm_([p], 2.0)
        return super().step(closure)


class Noisy(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        return p.grad * torch.rand_like(p)


class Warms(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        begun, self.begun = getattr(self, "begun", False), True
        return p.grad if begun else p.grad / 10


class Counts(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        group["k"] += 1
        return p.grad / group["k"]


class CountsItself(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        self.seen = getattr(self, "seen", 0) + 1
        return p.grad / self.seen


class KeepsForAll(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        shared: Any = self.state
        shared["all"]["seen"] = shared["all"].get("seen", 0) + 1
        return p.grad


class Late(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        state["k"] = state.get("k", 0) + 1
        if state["k"] == 3:
            state["slow"] = p.clone()
        return p.grad


@in_turns(2)
@pytest.mark.parametrize("kind", [ByRows, ByDims, Clips, InBfloat16, InFloat32], ids=lambda kind: kind.__name__)
def test_those_of_others_have_whole_leaves(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "own", (kind, {}))
    want = by_torch("own")
    assert_trees_close(on_rank("own", lambda step: step, 0), want, rtol=1e-12, atol=1e-14)
    for got in run_ranks(functools.partial(on_rank, "own", fz.shard_zero3), 3):
        assert_trees_close(got, want, rtol=1e-10, atol=1e-12)


def test_those_that_draw_are_the_same_on_any_ranks() -> None:
    step = lambda: fz.train_step(loss, fz.from_torch(Noisy, 0.01))
    run = lambda wrap: fz.gather((own := wrap(step()))(own.init(params()), data()[0])[0].params)
    one, *others = [run_ranks(lambda rank: run(fz.shard_zero3), world)[0] for world in (1, 2, 3)]
    for got in others:
        assert_trees_close(got, one, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Counts, r"changes param_groups\[0\]\['k'\] in a step"),
        (CountsItself, "changes its attribute 'seen' in a step"),
        (Warms, "changes its attribute 'begun' in a step"),
        (KeepsForAll, r"changes optimizer.state\['all'\] in a step"),
        (Late, "has the entries .*'kept.slow'.*, and had"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_is_kept_elsewhere_or_late_is_refused_on_all_ranks(kind: Any, said: str) -> None:
    def on(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, fz.from_torch(kind, 0.01)))
        with pytest.raises((ValueError, RuntimeError), match=said):
            state = step.init(params())
            for _ in range(3):
                state, _ = step(state, data()[0])

    run_ranks(on, 2)


class TakesMatrices(Own):
    def direction(self, group: Any, p: Any, state: Any) -> Any:
        if p.ndim != 2:
            raise ValueError("expected a matrix")
        return p.grad


def test_those_of_others_have_their_own_names_in_what_is_said() -> None:
    own = f"{__name__}.TakesMatrices"
    optimizer = fz.from_torch(TakesMatrices, 0.01)
    with pytest.raises(ValueError, match=rf"got {re.escape(own)} .* leaf 'b' .*expected a matrix"):
        fz.train_step(loss, optimizer).init(params())
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().sum(), optimizer)
    with pytest.raises(TypeError, match=rf"step.update: got {re.escape(own)}, which writes in place"):
        torch.func.grad(lambda w: step(step.init({"w": w}), data()[0])[1]["loss"])(params()["w"])
    with pytest.raises(TypeError, match=r"TakesMatrices.*given by their class: fz.from_torch"):
        fz.train_step(loss, TakesMatrices([torch.ones(1, 1)]))  # type: ignore[arg-type]
