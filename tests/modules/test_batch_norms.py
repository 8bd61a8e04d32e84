"""Synchronised batch norm: on any ranks, with any batches, what one process does with the whole batch."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from nightly import at_length, by_day, in_turns
from torch import nn
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, hazards, run_ranks, strategies

D, STEPS, F64 = 4, 2, torch.float64


class Activated(nn.BatchNorm1d):
    """With a forward of its own, as timm's have."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        own = (self.running_mean, self.running_var, self.weight, self.bias)
        return torch.tanh(F.batch_norm(x, *own, self.training, 0.2, self.eps))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.act = nn.Linear(D, D), nn.BatchNorm1d(D), Activated(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.act(self.norm(self.linear(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.mean = nn.BatchNorm1d(D, momentum=None, affine=False)
        self.plain, self.fixed = nn.BatchNorm1d(D, track_running_stats=False), nn.BatchNorm1d(D).eval()
        self.out = nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.fixed(self.plain(self.mean(x))))  # type: ignore[no-any-return]


def _first() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net().double()
        for name, p in net.named_parameters():
            if "norm" in name:
                nn.init.normal_(p, 1.0)
        return net


FIRST = _first()
PARAMS = {name: p.detach() for name, p in FIRST.named_parameters()}


def data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = 5 + torch.randn(STEPS, rows, D, generator=generator, dtype=F64)
    return x, torch.randn(STEPS, rows, 1, generator=generator, dtype=F64)


FIVE = data(5)


def squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y) ** 2).sum() / 8  # a rank may have no examples


def shares(x: torch.Tensor, rows: list[int], parts: int) -> list[list[torch.Tensor]]:
    """The microbatches of each rank, which has so many rows in each."""
    return [list(own.chunk(parts)) if parts > 1 else [own] for own in x.split([n * parts for n in rows])]


def in_one(rows: list[int], parts: int = 1) -> Any:
    """Losses, params and buffers of one process that has the microbatches of all ranks."""
    module, losses = copy.deepcopy(FIRST), []
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for x, y in zip(*data(parts * sum(rows)), strict=True):
        optimizer.zero_grad()
        total = torch.zeros((), dtype=F64)
        of_ranks = [shares(each, rows, parts) for each in (x, y)]
        for part in range(parts):
            own, targets = (torch.cat([cut[part] for cut in each]) for each in of_ranks)
            loss = squared(module(own), targets) / len(rows) / parts
            loss.backward()
            total += loss.detach()
        optimizer.step()
        losses.append(total)
    return torch.stack(losses), {n: p.detach() for n, p in module.named_parameters()}, dict(module.named_buffers())


def step_of(module: nn.Module = FIRST, wrap: Any = fz.shard_zero3, rate: Any = 0.1) -> Any:
    apply, params, buffers = fz.functional(module, buffers=True, sync_batch_norm=True)

    def fn(p: Any, b: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, b = apply(p, b, x)
        return squared(out, y), b

    return wrap(fz.carry(fz.train_step(fn, fz.sgd(rate)), buffers)), params


def steps_of(made: tuple[Any, Any], rows: list[int], parts: int, rank: int) -> tuple[torch.Tensor, Any]:
    """Losses and the last state."""
    step, params = fz.accumulate(made[0], parts), made[1]
    state, losses = step.init(params), []
    for x, y in zip(*data(parts * sum(rows)), strict=True):
        own = [torch.cat(shares(each, rows, parts)[rank]) for each in (x, y)]
        state, metrics = step(state, *own)
        losses.append(metrics["loss"])
    return torch.stack(losses), state


def need_one_process(wrap: Any, rows: list[int], parts: int = 1, copies: int = 1) -> None:
    """Each batch on so many ranks."""

    def on(rank: int) -> Any:
        losses, state = steps_of(step_of(wrap=wrap), rows, parts, rank // copies)
        return losses, dict(fz.gather(state.params)), state.extra["carry"]

    want = in_one(rows, parts)
    for got in run_ranks(on, len(rows) * copies, timeout=300):
        assert_trees_close(got, want, rtol=1e-9, atol=1e-12)


@by_day(8)
@given(
    chosen=strategies.transforms(stages=(1, 2, 3)),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(lambda rows: sum(rows) > 1),
    parts=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_one_batch_of_all_ranks(chosen: Any, rows: list[int], parts: int, seed: int) -> None:
    chosen = [(said, each) for said, each in chosen if not said.startswith("accumulate")]
    with hazards(seed):
        need_one_process(functools.partial(strategies.apply, chosen=chosen), rows, parts)


def over(mesh: tuple[int, ...], how: dict[str, Any], step: Any) -> Any:
    own = torch.distributed.init_device_mesh("cpu", mesh, mesh_dim_names=("a", "b"))
    return fz.remat(fz.shard_zero3(step, mesh=own, **how))


@in_turns(3, "batch norms over meshes")
@pytest.mark.parametrize("how", [{"axis": ("a", "b")}, {"axis": "b", "replicate": "a"}])
def test_over_several_axes(how: dict[str, Any]) -> None:
    need_one_process(functools.partial(over, (2, 2), how), [2, 1, 3, 2])


@at_length
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch, at a break
def test_in_compiled_units() -> None:
    need_one_process(lambda step: fz.compile(fz.remat(fz.shard_zero3(step))), [2, 3])


@in_turns(3, "batch norms over meshes")
def test_beside_a_tensor_axis() -> None:
    def wrap(step: Any) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = fz.shard_tensor(step, {"blocks.*.linear.*": "column_gather"}, mesh=mesh, axis="tp")
        return fz.shard_zero3(step, mesh=mesh, axis="dp")

    need_one_process(wrap, [2, 3], copies=2)


def trained(params: Any, rate: torch.Tensor) -> torch.Tensor:
    """The loss after two steps of one process, as a function."""
    module = copy.deepcopy(FIRST)
    buffers = {name: x.clone() for name, x in module.named_buffers()}
    for x, y in zip(*FIVE, strict=True):

        def loss(p: Any, x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            own = {name: b.clone() for name, b in buffers.items()}
            return squared(torch.func.functional_call(module, (p, own), (x,)), y) / 2

        grads, value = torch.func.grad_and_value(loss)(params)
        params = {name: p - rate * grads[name] for name, p in params.items()}
    return value


def trained_on_ranks(params: Any, rate: torch.Tensor) -> torch.Tensor:
    step, _ = step_of(wrap=lambda step: fz.remat(fz.shard_zero3(step)), rate=rate)
    return steps_of((step, params), [2, 3], 1, torch.distributed.get_rank())[0][-1]


DERIVATIVES: dict[str, Any] = {
    "gradient": lambda fn, *at: torch.func.grad(fn, argnums=(0, 1))(*at),
    "tangent": lambda fn, *at: torch.func.jvp(fn, at, _ones(at)),
    "second": lambda fn, *at: torch.func.grad(lambda rate: torch.func.grad(fn, argnums=1)(at[0], rate))(at[1]),
}


def _ones(at: Any) -> Any:
    return {name: torch.ones_like(x) for name, x in at[0].items()}, torch.ones_like(at[1])


@in_turns(3)
@pytest.mark.parametrize("what", DERIVATIVES)
def test_derivatives_of_whole_runs(what: str) -> None:
    at = (PARAMS, torch.tensor(0.1, dtype=F64))
    want = DERIVATIVES[what](trained, *at)
    for got in run_ranks(lambda rank: DERIVATIVES[what](trained_on_ranks, *at), 2):
        assert_trees_close(got, want, rtol=1e-8, atol=1e-11)


def test_hessian_vector_products() -> None:
    x, y = (each[0] for each in FIVE)

    def loss(p: Any) -> torch.Tensor:
        own = {name: b.clone() for name, b in FIRST.named_buffers()}
        return squared(torch.func.functional_call(FIRST, (p, own), (x,)), y) / 2

    grad = torch.func.grad(loss)
    want = torch.func.jvp(grad, (PARAMS,), (grad(PARAMS),))[1]

    def on(rank: int) -> Any:
        step, params = step_of()
        state, own = step.init(params), (x.split([2, 3])[rank], y.split([2, 3])[rank])
        v = step.vjp(state, *own)[1](torch.ones((), dtype=F64))[0]
        return dict(fz.gather(fz.hvp(step, state, v, *own)))

    for got in run_ranks(on, 2):
        assert_trees_close(got, want, rtol=1e-8, atol=1e-11)


KINDS: dict[str, Any] = {
    "1d": (nn.BatchNorm1d, (3,)),
    "2d": (nn.BatchNorm2d, (3, 2)),
    "2d, channels last": (nn.BatchNorm2d, (3, 2)),
    "3d": (nn.BatchNorm3d, (2, 1, 2)),
    "sync": (nn.SyncBatchNorm, (3, 2)),
    "no bias": (functools.partial(nn.BatchNorm2d, bias=False), (3, 2)),
}


@in_turns(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_inputs_of_all_kinds(kind: str, dtype: torch.dtype) -> None:
    make, dims = KINDS[kind]
    try:
        own = make(3)
    except TypeError:
        pytest.skip("This torch has none without a bias.")
    generator = torch.Generator().manual_seed(0)
    norm = nn.Sequential(own, nn.Identity()).to(torch.float64 if dtype == torch.float64 else torch.float32)
    x, ct = (torch.randn(5, 3, *dims, generator=generator, dtype=F64).to(dtype) for _ in range(2))
    x = x.contiguous(memory_format=torch.channels_last) if "last" in kind else x
    plain = nn.Sequential(nn.BatchNorm2d(3), nn.Identity()).float() if kind == "sync" else copy.deepcopy(norm)
    plain = plain.to(next(norm.parameters()).dtype)
    leaf = x.clone().requires_grad_()
    out = plain(leaf)
    out.backward(ct)
    apply, params, buffers = fz.functional(norm, buffers=True, sync_batch_norm=kind != "sync")

    def on(rank: int) -> Any:
        step = fz.shard_zero3(fz.carry(fz.train_step(apply, fz.sgd(0.1)), buffers))
        state, cut = step.init(params), [2, 3]
        mine, pullback, new = step.vjp(state, x.split(cut)[rank])
        grads, (of_x,) = pullback(ct.split(cut)[rank])
        assert mine.dtype == dtype and mine.is_contiguous(memory_format=torch.channels_last) == ("last" in kind)
        return mine, of_x, dict(fz.gather(grads)), new

    found = run_ranks(on, 2)
    close = functools.partial(assert_trees_close, **_tolerances(dtype))
    assert leaf.grad is not None
    for got, want, of_x in zip(found, out.split([2, 3]), leaf.grad.split([2, 3]), strict=True):
        close(got[:2], (want.detach(), of_x))
        assert_trees_close(
            got[2],
            {name: p.grad / 2 for name, p in plain.named_parameters() if p.grad is not None},
            **_tolerances(dtype),
        )
        close(got[3], dict(plain.named_buffers()))


def _tolerances(dtype: torch.dtype) -> dict[str, float]:
    near = {torch.float64: 1e-11, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    return {"rtol": near, "atol": near}


def test_autocast() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 1))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for p in module.parameters():
            nn.init.normal_(p, 0.5)
    x, y = (each[0].float() for each in data(32))

    def on(rank: int) -> Any:
        step, params = step_of(module, lambda step: fz.shard_zero3(fz.autocast(step)))
        state = step.init(params)
        out, pullback, new = step.vjp(state, x.chunk(2)[rank], y.chunk(2)[rank])
        return 2 * out, dict(fz.gather(pullback(torch.ones_like(out))[0])), new

    with torch.autocast("cpu", torch.bfloat16):
        own = copy.deepcopy(module)
        want = squared(own(x), y) / 2
    want.backward()
    (out, grads, new), (other, _, also) = run_ranks(on, 2)
    assert_trees_close((out + other) / 4, want.detach(), rtol=2e-2)
    for name, p in own.named_parameters():
        assert p.grad is not None and (grads[name] - p.grad).norm() < 3e-2 * p.grad.norm() + 1e-2, name
    assert_trees_equal(new, also)
    assert_trees_close(new, dict(own.named_buffers()), rtol=2e-2, atol=1e-2)


def test_members_of_an_ensemble() -> None:
    x, y = (each[0] for each in FIVE)
    params = [{name: p * s for name, p in _block().named_parameters()} for s in (1.0, 0.5)]

    def on(rank: int) -> Any:
        step, _ = step_of(_block())
        states = [step.init({name: p.detach() for name, p in own.items()}) for own in params]
        own = x.split([2, 3])[rank], y.split([2, 3])[rank]
        mapped = fz.unstack(torch.vmap(step, in_dims=(0, None, None))(fz.stack(states), *own)[0])
        for state, member in zip(states, mapped, strict=True):
            alone = step(state, *own)[0]
            assert_trees_close(member.extra["carry"], alone.extra["carry"], rtol=1e-10)
            assert_trees_close(dict(fz.gather(member.params)), dict(fz.gather(alone.params)), rtol=1e-9, atol=1e-12)

    run_ranks(on, 2)


def _block() -> nn.Module:
    return copy.deepcopy(FIRST.get_submodule("blocks.0"))


def test_outside_of_steps_and_in_one_process_it_is_plain() -> None:
    apply, params, buffers = fz.functional(FIRST, buffers=True, sync_batch_norm=True)
    module, x = copy.deepcopy(FIRST), FIVE[0][0]
    out, new = run_ranks(lambda rank: apply(params, buffers, x), 2)[1]
    assert_trees_equal((out.detach(), new), (module(x).detach(), dict(module.named_buffers())))
    again, _ = pickle.loads(pickle.dumps(apply))(params, buffers, x)
    assert_trees_equal(again.detach(), out.detach())


def test_nothing_is_sent_in_eval_mode() -> None:
    apply, params = fz.functional(copy.deepcopy(FIRST).eval(), sync_batch_norm=True)

    def on(rank: int) -> None:
        step = fz.shard_zero1(fz.train_step(apply, fz.sgd(0.1)))
        state = step.init(params)
        if rank == 0:
            assert_trees_close(step.forward(state, FIVE[0][0]), copy.deepcopy(FIRST).eval()(FIVE[0][0]).detach())

    run_ranks(on, 2)


def test_torchs_synchronised_ones_are(tmp_path: Any) -> None:
    """A save loads on other ranks, and has lost nothing."""
    want = in_one([2, 3])

    def on(rank: int) -> Any:
        module = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(FIRST))
        for path in [name for name, _ in module.named_modules() if name.endswith("act")]:
            norm = Activated(D).double()
            norm.load_state_dict(module.get_submodule(path).state_dict())
            module.set_submodule(path, norm)
        losses, state = steps_of(step_of(module), [2, 3], 1, rank)
        fz.save(tmp_path / "state", state)
        return losses, dict(fz.gather(state.params)), state.extra["carry"]

    for got in run_ranks(on, 2):
        assert_trees_close(got, want, rtol=1e-9, atol=1e-12)
    step, _ = step_of(wrap=lambda step: step)
    state = fz.load(tmp_path / "state", step)
    assert_trees_close((dict(fz.gather(state.params)), state.extra["carry"]), want[1:], rtol=1e-9, atol=1e-12)


class Around(nn.SyncBatchNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.relu(super().forward(input))


def test_what_is_wrong_is_said() -> None:
    def on(rank: int) -> None:
        step, params = step_of(nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, 1)).double())
        state, x, y = step.init(params, sync=True), FIVE[0][0], FIVE[1][0]
        with pytest.raises(ValueError, match="sync_batch_norm: got one value for each channel from all ranks"):
            step(state, x[:rank], y[:rank])
        step, params = step_of(nn.Sequential(Around(D), nn.Linear(D, 1)).double())
        with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on"):  # torch says so
            step(step.init(params, sync=True), x, y)
        group = torch.distributed.new_group([rank], use_local_synchronization=True)
        step, params = step_of(nn.Sequential(nn.SyncBatchNorm(D, process_group=group), nn.Linear(D, 1)).double())
        with pytest.raises(ValueError, match=r"norm '0' has a process_group.*Leave process_group out"):
            step(step.init(params, sync=True), x, y)
        plain = nn.Sequential(nn.BatchNorm1d(D, track_running_stats=False), nn.Linear(D, 1)).double()
        apply, params = fz.functional(plain, sync_batch_norm=True)
        step = fz.shard_zero3(fz.train_step(lambda p, x: apply(p, x).mean(), fz.sgd(0.1)))
        with pytest.raises(ValueError, match=r"sync_batch_norm: fz\.per_example_grads takes examples one by one"):
            fz.per_example_grads(step, step.init(params, sync=True), x)

    run_ranks(on, 2)


class Called(nn.Module):
    """A batch norm by an operation that no layer calls, in ways by name."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear, self.norm, self.out = how, nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 1)
        self.hidden = [nn.BatchNorm1d(D, affine=False, track_running_stats=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, norm = self.linear(x), self.norm
        own = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
        ways = {
            "statistics": lambda: F.batch_norm(x, *own, True),
            "torch": lambda: torch.batch_norm(x, *own[2:], *own[:2], True, 0.1, 1e-5, False),
            "unbound": lambda: nn.BatchNorm1d.forward(norm, x),
            "hidden": lambda: self.hidden[0](x),
            "made": lambda: nn.BatchNorm1d(D, affine=False, track_running_stats=False)(x),
            "native": lambda: torch.native_batch_norm(x, *own[2:], *own[:2], True, 0.1, 1e-5)[0],
            "operator": lambda: torch.ops.aten.native_batch_norm.default(x, *own[2:], *own[:2], True, 0.1, 1e-5)[0],
        }
        return self.out(ways[self.how]().tanh())  # type: ignore[no-any-return]


class Twice(nn.Module):
    """Units that recompute."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(D, D), norm(D)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.sum(1, keepdim=True)


class ByTorch(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = (self.weight, self.bias, self.running_mean, self.running_var)
        return torch.batch_norm(x, *own, self.training, 0.1, self.eps, False)


class ByHand(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) * (x.var(0, correction=0) + self.eps).rsqrt()


class Frozen(nn.BatchNorm1d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)


class Again(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.norm, x, use_reentrant=False)  # type: ignore[no-any-return]


class NoLayer(nn.Module):
    mean: torch.Tensor
    var: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, self.mean, self.var, self.scale, training=self.training)


def need_once(module: nn.Module, wrap: Any) -> None:
    """Gradients and buffers of a step's function on two ranks are those of one process with both batches."""
    own, (x, y) = copy.deepcopy(module), (each[0] for each in FIVE)
    loss = squared(own(x), y) / 2
    loss.backward()

    def on(rank: int) -> Any:
        step, params = step_of(module, wrap)
        state = step.init(params, sync=True)
        out, pullback, new = step.vjp(state, x.split([2, 3])[rank], y.split([2, 3])[rank])
        return dict(fz.gather(pullback(torch.ones_like(out))[0])), new

    grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in own.named_parameters()}
    for got in run_ranks(on, 2):
        assert_trees_close(got, (grads, dict(own.named_buffers())), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("how", ["statistics", "torch", "unbound", "hidden", "made"])
@pytest.mark.parametrize("wrap", [fz.shard_zero1, fz.shard_zero3])
def test_those_that_no_layer_calls(how: str, wrap: Any) -> None:
    need_once(Called(how).double(), wrap)


@pytest.mark.parametrize("norm", [ByTorch, NoLayer, Frozen])
def test_those_of_other_kinds_in_units(norm: Any) -> None:
    need_once(Twice(norm).double(), lambda step: fz.remat(fz.shard_zero3(step)))


@at_length
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_unit_with_one_of_no_layer_is_not_compiled() -> None:
    need_once(Twice(NoLayer).double(), lambda step: fz.compile(fz.shard_zero3(step)))


REFUSED = {
    "native": (Called("native"), r"without a layer calls 'native_batch_norm' in training.*line \d+\)"),
    "operator": (Called("operator"), r"without a layer calls 'native_batch_norm.* in training"),
    "by hand": (Twice(ByHand), r"batch norm 'blocks\.0\.1', a ByHand in training, calls neither"),
    "checkpoint": (Twice(Again), r"batch norm 'blocks\.0\.1\.norm', over all ranks, runs inside torch\.utils"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_over_ranks_is_refused(what: str) -> None:
    module, words = REFUSED[what]

    def on(rank: int) -> None:
        step, params = step_of(copy.deepcopy(module).double())
        with pytest.raises(ValueError, match=words):
            step(step.init(params, sync=True), FIVE[0][0], FIVE[1][0])

    run_ranks(on, 2)


class ByRank(nn.Module):
    def __init__(self, *norms: nn.Module) -> None:
        super().__init__()
        self.norms, self.out = nn.ModuleList(norms), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norms[torch.distributed.get_rank()](x))  # type: ignore[no-any-return]


def told(words: str, skips: bool, rank: int) -> None:
    norms = [nn.BatchNorm1d(D, affine=False) for _ in range(2)]
    step, params = step_of(ByRank(norms[0], nn.Identity() if skips else norms[1]).double())
    state = step.init(params, sync=True)
    with pytest.raises(RuntimeError, match=words):
        step(state, FIVE[0][0], FIVE[1][0])


def test_ranks_that_skip_one_or_call_different_ones_are_told() -> None:
    skipped = "have diverged: rank 0: exchange of sync_batch_norm of batch norm"
    run_ranks(functools.partial(told, skipped, True), 2)
    run_ranks(functools.partial(told, r"diverged: rank 0: .*'norms\.0', .*; rank 1: .*'norms\.1'", False), 2)
    unchecked = functools.partial(told, r"sync_batch_norm of batch norm 'norms\.[01]'", False)
    run_ranks(unchecked, 2, backend="processes", checked=False, timeout=3)
