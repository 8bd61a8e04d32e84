"""Buffers as values and what a step carries: as in the module's own training, in any composition."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, hazards, run_ranks, strategies

D, STEPS = 6, 3


class Counter(nn.Module):
    """Counts its calls, by a write in place, and averages what it sees, by another buffer in the place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(D), persistent=False)
        self.calls: torch.Tensor
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x + self.mean * 0.1 * self.calls


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.counter = nn.Linear(D, D), nn.BatchNorm1d(D), Counter()
        self.bounded = nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.counter(torch.tanh(self.norm(self.bounded(self.linear(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm, self.out = nn.BatchNorm1d(D, momentum=None), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))  # type: ignore[no-any-return]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Conv2d(1, 1, 3, padding=1), nn.BatchNorm2d(1), nn.ReLU()) for _ in range(2)]
        self.blocks, self.out = nn.ModuleList(parts), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, None, :, None].expand(-1, 1, -1, 3)
        for block in self.blocks:
            x = x + block(x)
        return self.out(x.mean(-1)[:, 0])  # type: ignore[no-any-return]


NETS: dict[str, Any] = {"net": Net, "convolutions": Convolutions}


def _first(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETS[kind]().double()  # type: ignore[no-any-return]


FIRST = {kind: _first(kind) for kind in NETS}


def made(kind: str) -> nn.Module:
    return copy.deepcopy(FIRST[kind])


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 8, D, generator=generator, dtype=torch.float64)
    return x, torch.randn(STEPS, 8, 1, generator=generator, dtype=torch.float64)


def by_torch(kind: str, parts: int = 1, ranks: int = 1) -> Any:
    """Losses, params, and the buffers of each rank, whose gradients are averaged."""
    modules = [made(kind) for _ in range(ranks)]
    params = list(zip(*[module.parameters() for module in modules], strict=True))
    losses, (xs, ys) = list[float](), data()
    for x, y in zip(xs, ys, strict=True):
        total = 0.0
        for module, own, target in zip(modules, x.chunk(ranks), y.chunk(ranks), strict=True):
            module.zero_grad()
            for a, b in zip(own.chunk(parts), target.chunk(parts), strict=True):
                loss = ((module(a) - b) ** 2).mean() / parts
                loss.backward()
                total += loss.item() / ranks
        with torch.no_grad():
            for same in params:
                grad = torch.stack([p.grad for p in same if p.grad is not None]).mean(0)
                for p in same:
                    p -= 0.1 * grad
        losses.append(total)
    named = {name: p.detach() for name, p in modules[0].named_parameters()}
    return torch.tensor(losses, dtype=torch.float64), named, [dict(module.named_buffers()) for module in modules]


def by_steps(kind: str, wrap: Any, parts: int, aux: bool, rank: int) -> Any:
    ranks = torch.distributed.get_world_size()
    apply, params, buffers = fz.functional(made(kind), buffers=True)

    def fn(p: Any, carry: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, carry = apply(p, carry, x)
        loss = ((out - y) ** 2).mean()
        return ((loss, out) if aux else loss), carry

    step = fz.accumulate(wrap(fz.carry(fz.train_step(fn, fz.sgd(0.1), has_aux=aux), buffers)), parts)
    state, losses = step.init(params), []
    for x, y in zip(*data(), strict=True):
        state, metrics = step(state, x.chunk(ranks)[rank], y.chunk(ranks)[rank])
        losses.append(metrics["loss"])
        assert not aux or metrics["aux"].shape == (len(x) // ranks, 1)
    assert all(torch.equal(x, y) for x, y in zip(buffers.values(), apply_fresh(kind).values(), strict=True))
    return torch.stack(losses), dict(fz.gather(state.params)), state.extra["carry"]


def apply_fresh(kind: str) -> Any:
    return dict(made(kind).named_buffers())


@by_day(14)
@given(
    kind=st.sampled_from(sorted(NETS)),
    chosen=strategies.transforms(),
    twice=st.booleans(),
    ranks=st.integers(1, 2),
    parts=st.sampled_from([1, 2, 4]),
    aux=st.booleans(),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_as_the_module_trains_on_each_rank(
    kind: str, chosen: Any, twice: bool, ranks: int, parts: int, aux: bool, seed: int
) -> None:
    chosen = [(said, each) for said, each in chosen if not said.startswith(("accumulate", "loss_scale", "autocast"))]
    if twice:
        again = functools.partial(fz.fuse_update, norm="twice")
        chosen = [(said, again if said == "fuse_update" else each) for said, each in chosen]
    ranks = ranks if any("shard" in said for said, _ in chosen) else 1
    parts = min(parts, 4 // ranks)  # a batch norm wants two rows
    losses, params, buffers = by_torch(kind, parts, ranks)
    wrap = functools.partial(strategies.apply, chosen=chosen)
    with hazards(seed):
        found = run_ranks(functools.partial(by_steps, kind, wrap, parts, aux), ranks)
    for got, own in zip(found, buffers, strict=True):
        assert_trees_close(got, (losses, params, own), rtol=1e-10, atol=1e-12)


def remat_of_zero3(step: fz.Step) -> fz.Step:
    return fz.remat(fz.shard_zero3(step))


def test_on_real_processes() -> None:
    losses, params, buffers = by_torch("net", 2, 2)
    found = run_ranks(functools.partial(by_steps, "net", fz.shard_zero3, 2, True), 2, backend="processes")
    for got, own in zip(found, buffers, strict=True):
        assert_trees_close(got, (losses, params, own), rtol=1e-10, atol=1e-12)


def step_of(kind: str = "net", wrap: Any = lambda step: step) -> Any:
    apply, params, buffers = fz.functional(made(kind), buffers=True)
    return wrap(fz.carry(fz.train_step(apply, fz.sgd(0.1)), buffers)), params, buffers


@pytest.mark.parametrize("wrap", [lambda step: step, fz.shard_zero3, fz.remat])
def test_vjp_hands_the_new_one_out_and_forward_leaves_it(wrap: Any) -> None:
    def on(rank: int) -> None:
        step, params, buffers = step_of(wrap=wrap)
        state, module, x = step.init(params), made("net"), data()[0][0]
        own = x.clone().requires_grad_()
        want = module(own)
        want.backward(torch.ones_like(want))
        out, pullback, new = step.vjp(state, x)
        grads, (ct,) = pullback(torch.ones_like(out))
        assert_trees_close(out, want.detach(), rtol=1e-12)
        assert_trees_close(ct, own.grad, rtol=1e-12)
        assert_trees_close(
            dict(fz.gather(grads)), {n: p.grad for n, p in module.named_parameters()}, rtol=1e-11, atol=1e-14
        )
        assert_trees_equal(new, dict(module.named_buffers()))
        assert_trees_equal(state.extra["carry"], buffers)
        assert_trees_close(step.forward(state, x), want.detach(), rtol=1e-12)
        again, second, _ = step.vjp(state, x, argnums=0)
        assert_trees_close(second.inputs(torch.ones_like(again)), (own.grad,), rtol=1e-12)
        on_with = state.replace(extra={**state.extra, "carry": new})
        assert_trees_close(step.forward(on_with, x), module(x).detach(), rtol=1e-12)

    run_ranks(on, 1)


@pytest.mark.filterwarnings("ignore:fz.save. the ranks' carries")
def test_saved_loaded_converted_scanned_and_mapped(tmp_path: Any) -> None:
    def on(rank: int) -> Any:
        apply, params, buffers = fz.functional(made("net"), buffers=True)

        def fn(p: Any, carry: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
            out, carry = apply(p, carry, x)
            return ((out - y) ** 2).mean(), carry

        step = fz.shard_zero3(fz.carry(fz.train_step(fn, fz.sgd(0.1)), buffers))
        xs, ys = data()
        xs = xs + rank  # so that the ranks' buffers differ
        state, _ = step(step.init(params), xs[0], ys[0])
        fz.save(tmp_path / "state", state)
        other = fz.shard_zero1(fz.carry(fz.train_step(fn, fz.sgd(0.1)), buffers))
        converted = fz.convert(state, other)
        loaded = fz.load(tmp_path / "state", step)
        scanned, _ = fz.scan(step, step.init(params), (xs, ys))
        for x, y in zip(xs[1:], ys[1:], strict=True):
            state, _ = step(state, x, y)
        assert_trees_close(scanned.extra["carry"], state.extra["carry"], rtol=1e-12)
        return converted.extra["carry"], loaded.extra["carry"]

    (converted, loaded), (also, too) = run_ranks(on, 2)
    assert_trees_equal(converted, loaded, also, too)  # rank 0's


def test_members_of_an_ensemble_have_their_own() -> None:
    step, params, _ = step_of("convolutions")
    objective = fz.with_fn(step, lambda p, carry, x: _squared(step.fn, p, carry, x))
    states, x = [objective.init({n: p * s for n, p in params.items()}) for s in (1.0, 0.5)], data()[0][0]
    mapped, _ = torch.vmap(objective, in_dims=(0, None))(fz.stack(states), x)
    for state, member in zip(states, fz.unstack(mapped), strict=True):
        assert_trees_close(member.extra["carry"], objective(state, x)[0].extra["carry"], rtol=1e-12)


def _squared(fn: Any, p: Any, carry: Any, x: torch.Tensor) -> Any:
    out, carry = fn(p, carry, x)
    return out.square().mean(), carry


def test_a_derivative_of_a_run() -> None:
    def plain(rate: torch.Tensor) -> torch.Tensor:
        w, mean = torch.tensor([1.0, 2.0]), torch.zeros(2)
        for _ in range(2):
            fn = lambda w, mean=mean: ((w - mean) ** 2).sum()
            w, mean = w - rate * torch.func.grad(fn)(w), 0.5 * mean + 0.5 * w
        return ((w - mean) ** 2).sum()

    def run(rate: torch.Tensor) -> Any:
        fn = lambda p, mean: (((p["w"] - mean) ** 2).sum(), 0.5 * mean + 0.5 * p["w"])
        step = fz.carry(fz.train_step(fn, fz.sgd(rate)), torch.zeros(2))
        state = step.init({"w": torch.tensor([1.0, 2.0])})
        for _ in range(2):
            state, _ = step(state)
        return step.forward(state)

    def begun(mean: torch.Tensor) -> Any:
        fn = lambda p, mean, x: (((p["w"] - mean) ** 2 * x).sum(), 0.5 * mean * x + 0.5 * p["w"])
        step = fz.shard_zero3(fz.carry(fz.train_step(fn, fz.sgd(0.1)), mean))
        state = step.init({"w": torch.tensor([1.0, 2.0])})
        for _ in range(2):
            state, metrics = step(state, torch.ones(2) + torch.distributed.get_rank())
        return metrics["loss"]

    def plainly(mean: torch.Tensor) -> torch.Tensor:
        w, means, xs = torch.tensor([1.0, 2.0]), [mean, mean], [torch.ones(2), 2 * torch.ones(2)]
        for _ in range(2):
            fn = lambda w, means=tuple(means): sum(((w - m) ** 2 * x).sum() / 2 for m, x in zip(means, xs, strict=True))
            g, value = torch.func.grad_and_value(fn)(w)
            w, means = w - 0.1 * g, [0.5 * m * x + 0.5 * w for m, x in zip(means, xs, strict=True)]
        return value

    at = torch.tensor(0.1)
    for got in run_ranks(lambda rank: torch.func.grad(begun)(torch.tensor([0.3, 0.4])), 2):
        assert_trees_close(got, torch.func.grad(plainly)(torch.tensor([0.3, 0.4])), rtol=1e-5)
    assert_trees_close(torch.func.grad(run)(at), torch.func.grad(plain)(at), rtol=1e-5)
    assert_trees_close(torch.func.jvp(run, (at,), (at,)), torch.func.jvp(plain, (at,), (at,)), rtol=1e-5)


def test_the_old_one_stays_where_an_update_is_skipped() -> None:
    step = fz.carry(fz.train_step(lambda p, n, x: ((p["w"] * x).sum(), n + x.sum()), fz.sgd(0.1)), torch.zeros(()))
    state, metrics = step(step.init({"w": torch.ones(2)}), torch.tensor([float("inf"), 1.0]))
    assert metrics["skipped"] and state.extra["carry"] == 0


def test_hessian_vector_products_take_it_for_a_constant() -> None:
    step = fz.carry(fz.train_step(lambda p, n, x: ((p["w"] ** 3 * x).sum() * n, n + 1), fz.sgd(0.1)), torch.ones(()))
    state, x = step.init({"w": torch.ones(2)}), torch.ones(2)
    v = step.vjp(state, x)[1](torch.ones(()))[0]
    assert_trees_close(fz.gather(fz.hvp(step, state, v, x))["w"], torch.full((2,), 18.0))


@pytest.mark.parametrize("wrap", [lambda step: step, fz.shard_zero3, lambda step: fz.accumulate(step, 2)])
def test_a_function_that_writes_to_its_carry(wrap: Any) -> None:
    def fn(p: Any, carry: Any, x: torch.Tensor) -> Any:
        carry["n"].add_(1.0)
        carry["last"] = x[-1]
        return (p["w"] * carry["n"] * x).sum(), carry

    def on(rank: int) -> None:
        step = wrap(fz.carry(fz.train_step(fn, fz.sgd(0.1)), {"n": torch.zeros(()), "last": torch.zeros(2)}))
        begun, x = step.init({"w": torch.ones(2)}), torch.ones(2, 2)
        calls, (state, _) = step.microbatches.count, step(begun, x)
        x.zero_()  # which is the caller's
        assert (state.extra["carry"]["n"], begun.extra["carry"]["n"]) == (calls, 0)
        assert_trees_equal(state.extra["carry"]["last"], torch.ones(2))
        assert step(state, x)[0].extra["carry"]["n"] == 2 * calls and state.extra["carry"]["n"] == calls
        *_, new = step.vjp(state, x)
        assert new["n"] == 2 * calls and step.init({"w": torch.ones(2)}).extra["carry"]["n"] == 0

    run_ranks(on, 1)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        return x + torch.utils.checkpoint.checkpoint(self.linear, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_unit_that_begins_again_counts_once() -> None:
    class Nets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Checkpointed() for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    module = Nets().double()
    x = data()[0][0]
    want = copy.deepcopy(module)
    want(x)

    def on(rank: int) -> Any:
        apply, params, buffers = fz.functional(module, buffers=True)
        step = fz.carry(fz.train_step(lambda p, b, x: _squared(apply, p, b, x), fz.sgd(0.1)), buffers)
        step = fz.shard_zero1(step)
        return step(step.init(params), x)[0].extra["carry"]

    for got in run_ranks(on, 2):
        assert_trees_close(got, dict(want.named_buffers()), rtol=1e-12)


class Shares(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(2, 2) if how != "a param" else self.linear.weight.data)
        self.seen: torch.Tensor
        if how == "a buffer":
            self.register_buffer("first", self.seen[0])
        if how == "a view":
            self.flat = self.seen.view(-1)


@pytest.mark.parametrize(
    ("how", "what"), [("a buffer", "buffer 'first'"), ("a view", "flat"), ("a param", "param 'linear")]
)
def test_buffers_that_share_memory_are_refused(how: str, what: str) -> None:
    with pytest.raises(ValueError, match=rf"buffer 'seen' and .*{what}.* share memory"):
        fz.functional(Shares(how), buffers=True)
    fz.functional(Shares(how))


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        raise FloatingPointError("none of this")


class Catches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.out = nn.ModuleList([Raises()]), nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            try:
                x = block(x)
            except FloatingPointError:
                x = 2 * x
        return self.out(x)  # type: ignore[no-any-return]


def test_an_error_of_a_unit_that_has_written_to_buffers_is_not_lost() -> None:
    apply, params, buffers = fz.functional(Catches(), buffers=True)
    step = fz.carry(fz.train_step(lambda p, b, x: _squared(apply, p, b, x), fz.sgd(0.1)), buffers)
    state, x = step.init(params), torch.randn(4, D, generator=torch.Generator().manual_seed(0))
    assert step(state, x)[0].extra["carry"]["blocks.0.norm.num_batches_tracked"] == 1
    with pytest.raises(FloatingPointError, match="none of this") as info:
        fz.remat(step)(state, x)
    assert "what it had written to them is lost" in info.value.__notes__[0]


def test_what_is_wrong_is_said() -> None:
    apply, params, buffers = fz.functional(nn.BatchNorm1d(2), buffers=True)
    x = torch.ones(3, 2)
    for wrong in (None, {}, {**buffers, "more": x}, x):
        with pytest.raises(ValueError, match=r"apply: got buffers=.*expected a dict of tensors by the names"):
            apply(params, wrong, x)

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = torch.cat([self.seen, x[:1, 0]])
            return x

    grows, _, own = fz.functional(Grows(), buffers=True)
    with pytest.raises(ValueError, match=r"left a tensor of shape \(2,\).*in the place of its buffer 'seen'"):
        grows({}, own, x)
    cases: dict[str, Any] = {
        r"expected \(outputs, new carry\), as the step was made by fz.carry": lambda p, c: p["w"].sum(),
        "new carry is .* of structure": lambda p, c: (p["w"].sum(), (c, c)),
        r"new carry is a tensor of shape \(2,\)": lambda p, c: (p["w"].sum(), torch.zeros(2)),
    }
    for words, fn in cases.items():
        step = fz.carry(fz.train_step(fn, fz.sgd(0.1)), torch.zeros(()))
        state = step.init({"w": torch.ones(2)})
        for call in (step, step.forward, step.vjp):
            with pytest.raises((TypeError, ValueError), match=words):
                call(state)
    step = fz.carry(fz.train_step(lambda p, c: (p["w"].sum(), c), fz.sgd(0.1)), torch.zeros(()))
    with pytest.raises(ValueError, match="already has a carry"):
        fz.carry(step, torch.zeros(()))
    with pytest.raises(TypeError, match="carry: got value a="):
        fz.carry(fz.train_step(lambda p, c: (p["w"].sum(), c), fz.sgd(0.1)), {"a": "text"})
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="per_example_grads: got a step that carries something"):
        fz.per_example_grads(step, state)
    with pytest.raises(TypeError, match="tape: got a step that carries something"), fz.tape(step, state):
        pass
    with pytest.raises(TypeError, match=r"pipeline: steps\[0\]: got a step that carries something"):
        fz.pipeline([step], fz.schedules.gpipe(stages=1, microbatches=1))


def twice_by_itself(module: nn.Module, x: torch.Tensor) -> nn.Module:
    """A copy of the module after two updates of its own."""
    trained = copy.deepcopy(module)
    for _ in range(2):
        trained.zero_grad()
        trained(x).square().mean().backward()
        with torch.no_grad():
            for p in trained.parameters():
                p -= 0.1 * p.grad  # type: ignore[operator]
    return trained


def twice(module: nn.Module, wrap: Any, x: torch.Tensor, rank: int) -> Any:
    """Params and buffers after two updates of a step."""
    apply, params, buffers = fz.functional(module, buffers=True)
    step = wrap(fz.carry(fz.train_step(lambda p, b, x: _squared(apply, p, b, x), fz.sgd(0.1)), buffers))
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, x)
    return dict(fz.gather(state.params)), state.extra["carry"]


@pytest.mark.parametrize("make", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("wrap", [lambda step: step, remat_of_zero3])
def test_spectral_norms_under_autocast(make: Any, wrap: Any) -> None:
    """What a weight is computed of keeps its dtype, as in torch.autocast."""
    module, x = nn.Sequential(*[make(nn.Linear(D, D)) for _ in range(2)]), data()[0][0].float()
    own = copy.deepcopy(module)
    with torch.autocast("cpu", torch.bfloat16):
        want = own(x)

    def on(rank: int) -> Any:
        apply, params, buffers = fz.functional(module, buffers=True)
        step = wrap(fz.autocast(fz.carry(fz.train_step(apply, fz.sgd(0.1)), buffers)))
        out, pullback, new = step.vjp(step.init(params), x)
        grads = fz.gather(pullback(torch.ones_like(out))[0])
        return out, new, {name: g.dtype for name, g in grads.items()}

    ((out, new, dtypes),) = run_ranks(on, 1)
    assert {*dtypes.values()} == {torch.float32}
    assert_trees_close(out, want.detach(), rtol=1e-2, atol=1e-2)
    assert_trees_close(new, dict(own.named_buffers()), rtol=1e-5, atol=1e-6)


class Graph(nn.Module):
    """Layers over a graph's matrix, in some form."""

    def __init__(self, form: str) -> None:
        super().__init__()
        own = torch.eye(8, dtype=torch.float64) + torch.ones(8, 8, dtype=torch.float64).triu(5)
        self.blocks = nn.ModuleList([nn.Linear(D, D) for _ in range(2)])
        for block in self.blocks:
            block.register_buffer("matrix", own.to_sparse() if form == "coo" else own.to_sparse_csr())
            block.register_buffer("calls", torch.zeros(()))
            block.forward = functools.partial(self.layer, block)  # type: ignore[method-assign, assignment]

    @staticmethod
    def layer(block: Any, x: torch.Tensor) -> torch.Tensor:
        block.calls += 1
        return torch.sparse.mm(block.matrix, nn.functional.linear(x, block.weight, block.bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("form", ["coo", "csr"])
@pytest.mark.parametrize("wrap", [fz.shard_zero1, remat_of_zero3])
def test_sparse_buffers(form: str, wrap: Any) -> None:
    module, x = Graph(form).double(), data()[0][0]
    apply, params, buffers = fz.functional(module, buffers=True)
    assert ("blocks.0.matrix" in buffers) == (form == "coo")  # compressed ones are constants

    def on(rank: int) -> Any:
        step = wrap(fz.carry(fz.train_step(apply, fz.sgd(0.1)), buffers))
        out, pullback, new = step.vjp(step.init(params), x)
        return out, dict(fz.gather(pullback(torch.ones_like(out))[0])), new["blocks.1.calls"]

    found = run_ranks(on, 2)
    out = module(x)
    out.sum().backward()
    for got in found:
        want = {name: p.grad for name, p in module.named_parameters()}
        assert_trees_close(got[:2], (out.detach(), want), rtol=1e-11)
        assert got[2] == 1


@pytest.mark.parametrize("wrap", [lambda step: step, fz.shard_zero3, fz.remat])
def test_buffers_by_hand(wrap: Any) -> None:
    apply, params, buffers = fz.functional(made("net"), buffers=True)

    def on(rank: int) -> None:
        step = wrap(fz.train_step(apply, fz.sgd(0.1), has_aux=True))
        state, x = step.init(params), data()[0][0]
        with pytest.raises(ValueError, match=r"its buffers are differentiated.*step\.vjp\(.*argnums=\(1,\)\)"):
            step.vjp(state, buffers, x)
        out, _, new = step.vjp(state, buffers, x, argnums=(1,))
        module = made("net")
        assert_trees_close((out, new), (module(x).detach(), dict(module.named_buffers())), rtol=1e-12)

    run_ranks(on, 1)


class Linked(nn.Module):
    """A block that reads a table, counts what others count, and calls its neighbour's norm, in ways by name."""

    tau: torch.Tensor

    def __init__(self, how: str, tau: torch.Tensor) -> None:
        super().__init__()
        self.how, self.linear, self.norm = how, nn.Linear(D, D), nn.BatchNorm1d(D)
        self.others: list[Any] = []
        if how in ("table", "written"):
            self.register_buffer("tau", tau)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.linear(x))
        if self.how == "neighbour":
            return torch.tanh(self.others[1].norm(x))
        holder = self if self.how in ("table", "written") else self.others[0]
        if self.how == "written":
            holder.tau.mul_(0.9)
        if self.how == "assigned":
            holder.tau = 0.9 * holder.tau + 0.1 * x.detach().mean(0)
        return torch.tanh(x + holder.tau)


class Linking(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.register_buffer("tau", torch.linspace(0.5, 1, D))
        self.tau: torch.Tensor
        self.blocks = nn.ModuleList([Linked(how, self.tau) for _ in range(3)])
        for i in range(3):
            self.blocks[i].others = [self, self.blocks[i - 1]]  # type: ignore[assignment]
        self.out = nn.Linear(D, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x + self.tau)  # type: ignore[no-any-return]


SHARING = [(how, wrap) for how in ("table", "written") for wrap in (fz.shard_zero1, remat_of_zero3)]


@in_turns(4)
@pytest.mark.parametrize(("how", "wrap"), [*SHARING, ("read", fz.shard_zero1), ("read", fz.shard_zero3)])
def test_units_that_share_buffers(how: str, wrap: Any) -> None:
    module, x = Linking(how).double(), data()[0][0]
    tau = module.tau
    for block in module.blocks if how in ("table", "written") else ():
        block.tau = tau  # which a conversion takes apart
    trained = twice_by_itself(module, x)
    want = dict(trained.named_parameters()), dict(trained.named_buffers())
    for got in run_ranks(functools.partial(twice, module, wrap, x), 2):
        assert_trees_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("how", "what"), [("neighbour", "writes to a tensor .* that it closes over,"), ("assigned", "keeps a tensor")]
)
def test_units_that_write_to_buffers_of_other_modules_are_refused(how: str, what: str) -> None:
    module, x = Linking(how).double(), data()[0][0]
    before = copy.deepcopy(module.state_dict())
    with pytest.raises(ValueError, match=rf"Unit 'blocks\.0' {what} .*test_carry.py:\d+"):
        twice(module, fz.remat, x, 0)
    assert_trees_equal(dict(module.state_dict()), dict(before))


class Registers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.register_buffer("mask", torch.ones(2))
        return x


def test_a_buffer_that_a_forward_registers_is_refused_in_words_that_fit() -> None:
    apply, params, buffers = fz.functional(Registers(), buffers=True)
    with pytest.raises(ValueError, match=r"made its buffer 'mask' in its forward.* Make it in __init__"):
        apply(params, buffers, torch.ones(2))


def test_a_unit_that_runs_again_and_reads_a_buffer_of_another_module_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Leaf 'tau' of a module is read.* give it to the unit as an argument"):
        twice(Linking("read").double(), fz.remat, data()[0][0], 0)


def test_a_save_warns_where_it_keeps_one_of_several_carries(tmp_path: Any) -> None:
    def on(rank: int, own: bool) -> None:
        step = fz.carry(fz.train_step(lambda p, c, x: ((p["w"] * x).sum(), c + x), fz.sgd(0.1)), torch.zeros(2))
        step = fz.shard_zero3(step)
        state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2) * (rank if own else 1))
        fz.save(tmp_path, state)

    run_ranks(functools.partial(on, own=False), 2)
    with pytest.warns(UserWarning, match=r"carries \(fz.carry\) differ, and a checkpoint keeps rank 0's"):
        run_ranks(functools.partial(on, own=True), 2)


def test_the_module_in_evaluation_beside_itself_over_microbatches() -> None:
    """Each microbatch gets the buffers of the one before, in both modes."""
    apply, params, buffers = fz.functional(
        nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), nn.Linear(D, 1)).double(), buffers=True
    )

    def fn(p: Any, b: Any, x: torch.Tensor) -> Any:
        out, new = apply(p, b, x)
        return (out - apply.eval(p, b, x).detach()).square().mean(), new

    step = fz.accumulate(fz.carry(fz.train_step(fn, fz.sgd(0.1)), buffers), 2)
    x = data()[0][0]
    state, metrics = step(step.init(params), x)
    own, carry = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}, buffers
    total = torch.zeros(())
    for part in x.tensor_split(2):
        loss, carry = fn(own, carry, part)
        total = total + loss * len(part) / len(x)
    total.backward()
    assert_trees_close(metrics["loss"], total.detach(), rtol=1e-12)
    want = {name: leaf.detach() if leaf.grad is None else leaf.detach() - 0.1 * leaf.grad for name, leaf in own.items()}
    assert_trees_close(dict(fz.gather(state.params)), want, rtol=1e-12)
    assert_trees_close(state.extra["carry"], carry, rtol=1e-12)
