"""Writes, hooks and derivatives that would be lost, as they go to a copy or a way that is not seen: refused by name."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from torch import nn
from units import block_of, refused
from written import F64, Block, X, filled

import fzero as fz
from fzero.capture.again import Unread
from fzero.testing import run_ranks

SHARDS = {"ZeRO-0": lambda step: step, "remat": fz.remat, "ZeRO-3": fz.shard_zero3}
nodes = pytest.mark.parametrize("shard", [fz.remat, fz.shard_zero3], ids=["remat", "ZeRO-3"])
every = pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS.keys())


class Parent(nn.Module):
    """A module of blocks, each a unit, that does something to the first one's weight before it calls them."""

    def __init__(self, what: Any = None, block: Any = Block) -> None:
        super().__init__()
        self.blocks: Any = filled(nn.ModuleList(block() for _ in range(2)))
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.what is not None:
            self.what(self.blocks[0].lin.weight)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def refused_module(module: nn.Module, match: str, shard: Any, later: bool = False) -> None:
    """On two ranks: in the first step, or in the third."""

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(module)
        step = shard(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)))
        state = step.init(params)
        before = fz.gather(state.params)
        for _ in range(2 if later else 0):
            step(state, X)
        with pytest.raises((ValueError, TypeError), match=match):
            step(state, X)
        for name, leaf in before.items():
            torch.testing.assert_close(fz.gather(state.params)[name], leaf, rtol=0, atol=0)

    run_ranks(rank_main, 2)


def _no_grad(write: Any) -> Any:
    def run(w: torch.Tensor) -> None:
        with torch.no_grad():
            write(w)

    return run


WRITES = {
    "data": lambda w: w.data.clamp_(-0.01, 0.01),
    "detach": lambda w: w.detach().mul_(0.5),
    "a row": _no_grad(lambda w: w[0].zero_()),
    "a view": _no_grad(lambda w: w.view(-1).__setitem__(0, 1.0)),
    "transposed": lambda w: w.detach().T.mul_(0.5),
    "init": lambda w: nn.init.zeros_(w.detach()[0]),
    "foreach": lambda w: torch._foreach_mul_([w.detach()], 0.5),
}


@nodes
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_the_copy_of_a_units_param(write: Any, shard: Any) -> None:
    refused_module(Parent(write), r"eaf 'blocks.0.lin.weight' .*in place, by", shard)


@every
def test_an_assignment_to_data(shard: Any) -> None:
    module = Parent(lambda w: setattr(w, "data", torch.zeros_like(w)))
    refused_module(module, r"[Ll]eaf 'blocks.0.lin.weight'", shard)


class Casting(Block):
    """Casts its layer as it runs, which assigns to the data of its params, as a router of Switch Transformers does."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.lin = self.lin.to(self.dtype)
        return torch.tanh(self.lin(x.to(self.dtype))).to(x.dtype)


@every
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which module.to reads
def test_an_assignment_of_its_own_data(shard: Any) -> None:
    """A module is cast to the dtype that it has: nothing is written."""
    module = Parent(block=lambda: Casting(F64))
    own = [*module.parameters()]
    want = torch.autograd.grad(module(X), own)

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(module)
        step = shard(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)))
        state = step.init(params)
        for _ in range(3):
            _, pullback = step.vjp(state, X)
            grads = fz.gather(pullback(torch.ones((), dtype=F64))[0])
            torch.testing.assert_close([*grads.values()], [*want], rtol=1e-12, atol=1e-12)
            step(state, X)

    run_ranks(rank_main, 2)


@nodes
def test_a_cast_that_writes_to_a_param_says_where(shard: Any) -> None:
    match = r"'blocks.0.lin.weight' is written to in place, by .*data.*test_watch.py, line \d+.*cast a module"
    refused_module(Parent(block=lambda: Casting(torch.float32)), match, shard)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(5, 4, max_norm=0.1, dtype=F64)
        self.blocks: Any = filled(nn.ModuleList(Block() for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.emb(torch.tensor([0, 1, 4]))
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_an_embedding_that_writes_to_its_weight() -> None:
    refused_module(
        Normed(), r"'emb.weight' is written to in place, by aten::embedding_renorm_.*max_norm", fz.shard_zero3
    )


# ---- by what is asked of the graph


class Attending(Block):
    def forward(self, x: torch.Tensor) -> Any:
        a = torch.tanh(self.lin(x))
        return a * x, a


class Apart(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = torch.tanh(self.lin(x))
        return h * x, h.sin()


class Saliency(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, a = self.blocks[0](x)
        x, _ = self.blocks[1](x)
        assert self.what is not None
        loss = x.square().mean() + 0.1 * a.mean()
        return loss + self.what(loss, a)


ASKS = {
    "grad": lambda loss, a: torch.autograd.grad(loss, a, create_graph=True)[0].sum(),
    "grad of a list": lambda loss, a: torch.autograd.grad(loss, inputs=[a], retain_graph=True)[0].detach().sum(),
    "register_hook": lambda loss, a: a.register_hook(lambda g: g * 2) and 0.0,
    "retain_grad": lambda loss, a: a.retain_grad() or 0.0,
}


@nodes
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS.keys())
def test_a_gradient_by_one_of_several_outputs(ask: Any, shard: Any) -> None:
    refused_module(
        Saliency(ask, Attending), r"by one of 2 tensors that unit 'blocks.0' puts out.*inside the unit", shard
    )


@nodes
@pytest.mark.parametrize("ask", [ASKS["grad of a list"], ASKS["register_hook"]])
def test_a_gradient_by_an_output_that_no_other_depends_on(ask: Any, shard: Any) -> None:
    def rank_main(rank: int) -> None:
        made = Saliency(ask, Apart)
        apply, params = fz.functional(made)
        step = shard(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)))
        state = step.init(params)
        for _ in range(2):
            torch.testing.assert_close(step(state, X)[1]["loss"], made(X).detach())

    run_ranks(rank_main, 1)


@nodes
def test_a_gradient_by_a_units_param(shard: Any) -> None:
    class Adaptive(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x)
            return loss + torch.autograd.grad(loss, self.blocks[1].lin.weight, create_graph=True)[0].norm()

    refused_module(Adaptive(), r"got 'grad'.*leaf 'blocks.1.lin.weight' belongs to unit.*units= in train_step", shard)


@nodes
def test_a_hook_on_a_units_param(shard: Any) -> None:
    refused_module(Parent(lambda w: w.register_hook(lambda g: 0.5 * g)), r"got 'register_hook'.*leaf 'blocks.0", shard)


# ---- what a module's params are besides


def test_params_that_share_memory() -> None:
    module = Parent()
    module.blocks[1].lin.weight.data = module.blocks[0].lin.weight.data
    with pytest.raises(ValueError, match=r"'blocks.0.lin.weight' and 'blocks.1.lin.weight' are two that share memory"):
        fz.functional(module)


def test_a_param_with_a_hook() -> None:
    module = Parent()
    module.blocks[1].lin.weight.register_hook(lambda g: 0.5 * g)
    with pytest.raises(ValueError, match=r"param 'blocks.1.lin.weight' has a hook on its gradient"):
        fz.functional(module)


@every
@pytest.mark.parametrize("as_buffer", [False, True])
def test_a_tensor_that_shares_memory_with_a_param(as_buffer: bool, shard: Any) -> None:
    class Code(Parent):
        code: torch.Tensor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ self.code)

    module = Code()
    weight = module.blocks[0].lin.weight.detach().t()
    if as_buffer:
        module.register_buffer("code", weight)
    else:
        module.code = weight
    refused_module(module, r"'code' shares its memory with param 'blocks.0.lin.weight'", shard)


# ---- inside a unit


@nodes
def test_a_write_to_an_input_that_autograd_does_not_see(shard: Any) -> None:
    data = block_of(lambda q, x: (x.data.mul_(2), x @ q["w"])[1])
    refused(data, ValueError, r"Unit 'blocks.\d' writes to one of its inputs in a way that autograd does not", shard)
    array = block_of(lambda q, x: (x.detach().numpy().__imul__(2), x @ q["w"])[1])
    refused(array, ValueError, r"Unit 'blocks.\d' writes to one of its inputs in a way that autograd does not", shard)


@nodes
def test_a_unit_puts_out_what_would_compute_later(shard: Any) -> None:
    lazy = block_of(lambda q, x: map(lambda y: y @ q["w"], [x]))
    refused(lazy, TypeError, r"Unit 'blocks.0' puts out a map.*Return a list", shard)


@nodes
def test_what_leaves_a_unit_unseen_is_no_argument_of_the_next(shard: Any) -> None:
    unit = fz.unit(lambda q, x: {"h": torch.tanh(x @ q["w"])}.values())

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = next(iter(unit(q, x)))
        return x.square().mean()

    refused(fn, ValueError, r"that unit 'blocks.0' computed is used outside of it", shard)


# ---- what is no mistake


@every
def test_an_input_that_has_a_graph_of_its_own(shard: Any) -> None:
    """The output of an encoder that nobody detached, say: a constant, in the first step as in later ones."""
    encoder = torch.ones(3, 4, dtype=F64, requires_grad=True)
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        return unit(p, x * 2 + encoder * 3).square().mean() + unit(p, x).mean()

    def rank_main(rank: int) -> None:
        step = shard(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init({"w": torch.eye(4, dtype=F64)})
        for _ in range(3):
            state, _ = step(state, encoder * X)

    run_ranks(rank_main, 2)


@nodes
def test_a_unit_that_keeps_its_last_error(shard: Any) -> None:
    """Its frames lead to the unit's call, which knows the one before: not to all of them."""

    class Keeps(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            try:
                raise ValueError(out)
            except ValueError as error:
                self.aux = error
            return out

    def rank_main(rank: int) -> None:
        apply, params = fz.functional(Parent(None, Keeps))
        step = shard(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)))
        state, counts = step.init(params), []
        for _ in range(3):
            for _ in range(3):
                state, _ = step(state, X)
            gc.collect()
            counts.append(sum(type(x) is ValueError for x in gc.get_objects()))
        assert counts[2] <= counts[1], counts

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("shard", SHARDS.values(), ids=SHARDS.keys())
def test_state_that_is_detached_where_it_is_read(shard: Any) -> None:
    """Truncated backpropagation through time: the last step's state is kept with its graph, and read as a constant."""

    class Carried(Parent):
        h: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                last = block.aux
                block.aux = x = block(x if last is None else x + 0.5 * last)
            return x.square().mean()

    class Carries(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            last, x = self.aux, super().forward(x)
            self.aux = x if last is None else x + 0.5 * last.detach()
            return self.aux

    def losses(module: nn.Module, step_of: Any) -> list[float]:
        out = []
        for i in range(3):
            with step_of() as model:
                loss = model(X * (i + 1))
                loss.backward()
                out.append(loss.item())
        return out

    def rank_main(rank: int) -> None:
        module = Parent(None, Carries)
        apply, params = fz.functional(module)
        step = shard(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)))
        state = step.init(params)
        got = losses(module, lambda: fz.tape(step, state))
        want = []
        for i in range(3):
            loss = module(X * (i + 1))
            loss.backward()
            want.append(loss.item())
        torch.testing.assert_close(got, want)

    run_ranks(rank_main, 1)


def test_what_another_thread_has_put_there_for_itself() -> None:
    """Ranks that are threads share global objects."""
    stand_in, errors = Unread(torch.ones(2), 0), []

    def read() -> None:
        try:
            stand_in.exp()
        except ValueError as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    assert "run ranks as processes" in errors[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own, as it traces
def test_what_is_compiled_inside_a_unit_computes_what_it_says_in_the_first_run_too() -> None:
    """Dynamo computes something else under torch function modes as the watch is one."""

    @torch.compile(backend="eager")
    def inner(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * 2).cos() + x.square().mean()

    unit = fz.unit(lambda p, x: inner(x @ p["w"]))
    step = fz.train_step(lambda p, x: unit(p["blocks"][0], x).square().mean(), fz.sgd(0.0))
    w, x = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(0, 1, 12).view(3, 4)
    hidden = x @ w
    wanted = ((hidden.sin() * 2).cos() + hidden.square().mean()).square().mean()
    state = step.init({"blocks": [{"w": w}]})
    for _ in range(2):
        state, metrics = step(state, x)
        torch.testing.assert_close(metrics["loss"], wanted)


class Follows(nn.Module):
    """Moves the params of its second module towards those of its first one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)])
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for own, other in zip(self.blocks[0].parameters(), self.blocks[1].parameters(), strict=True):
                other.mul_(0.9).add_(own, alpha=0.1)
        return (self.blocks[0](x) - self.blocks[1](x)).square().mean()


@pytest.mark.parametrize("transform", [lambda step: step, fz.remat, fz.shard_zero3])
def test_a_write_to_a_param_of_a_unit_elsewhere(transform: Any) -> None:
    apply, params = fz.functional(Follows())
    step = transform(fz.train_step(apply, fz.sgd(0.1)))

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'blocks.1.weight' is written to in place, by mul_ .*momentum encoder"):
            step(step.init(params), torch.ones(3, 4, dtype=torch.float64))

    run_ranks(rank_main, 2 if transform is fz.shard_zero3 else 1)
