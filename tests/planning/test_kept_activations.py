"""What fz.plan says of activations, held to what a step really keeps and computes again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.base.operators import Flops
from fzero.planning.activations import Choice
from fzero.testing import LiveBytes

WIDTH, TOKENS = 32, (4, 16)


class Block(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = fz.name(self.qkv(self.norm(x)), "qkv").unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = fz.name(x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)), "attended")
        return x + self.down(F.gelu(fz.name(self.up(x), "hidden")))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList([Block(64), Block(64), Block(96)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x


def step_of(names: tuple[str, ...] | None) -> tuple[fz.Step, Any]:
    apply, params = fz.functional(Net())
    step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.adamw(1e-3))
    return (step if names is None else fz.remat(step, save=names)), params


def really(names: tuple[str, ...] | None) -> tuple[int, int]:
    """Bytes that lie between a forward run and its pullback, and the FLOPs of both."""
    step, params = step_of(names)
    state, x = step.init(params), torch.randn(*TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    step.vjp(state, x, argnums=())[1](torch.ones(()))
    gc.collect()
    with LiveBytes() as live, Flops() as flops:
        _, pullback, *_ = step.vjp(state, x, argnums=())
        gc.collect()
        between = live.now()
        pullback(torch.ones(()))
    return between, flops.total


CHOICES = [None, (), ("attended",), ("hidden",), ("qkv",), ("attended", "hidden", "qkv"), ("attended", "hidden")]


@in_turns(7)
@pytest.mark.parametrize("names", CHOICES, ids=str)
def test_what_it_says_is_what_a_step_does(names: tuple[str, ...] | None) -> None:
    step, params = step_of(names)
    plan = fz.plan(fz.shard_zero3(step), params, world_size=4, inputs=(torch.empty(*TOKENS, WIDTH),))
    assert [each.units for each in plan.activations] == [("blocks.0", "blocks.1"), ("blocks.2",)]
    nbytes, flops = really(names)
    chosen = [each.chosen for each in plan.activations for _ in each.units]
    assert plan.flops + sum(each.flops for each in chosen) == flops
    last = 4 * 4 * 16 * WIDTH + 4  # the last block's output, and the loss
    assert sum(each.nbytes for each in chosen) + last == nbytes
    if names != ("attended", "hidden"):
        assert all(each.chosen in each.choices for each in plan.activations)


def test_a_table_for_people() -> None:
    step, params = step_of(("attended", "hidden"))
    text = str(fz.plan(step, params, inputs=(torch.empty(*TOKENS, WIDTH),)))
    lines = [line.split() for line in text.splitlines() if line.startswith(("*", "   blocks"))]
    assert ["blocks.0", "and", "1", "more", "everything"] == lines[0][:5]
    assert ["*", "blocks.2", "attended,", "hidden"] in [line[:4] for line in lines]
    assert "remat, keeps attended hidden" in text


def test_microbatches_and_dtypes_count() -> None:
    step, params = step_of(("qkv",))
    inputs = (torch.empty(*TOKENS, WIDTH),)
    whole, half = fz.plan(step, params, inputs=inputs), fz.plan(fz.accumulate(step, 2), params, inputs=inputs)
    assert half.activations[0].chosen.nbytes * 2 == whole.activations[0].chosen.nbytes
    assert half.flops * 2 == whole.flops
    cast = fz.plan(fz.autocast(step, torch.bfloat16), params, inputs=inputs).activations[0].chosen
    assert isinstance(cast, Choice) and cast.nbytes < whole.activations[0].chosen.nbytes


def test_a_name_that_no_unit_gives_is_refused() -> None:
    step, params = step_of(("attended", "hiden"))
    with pytest.raises(ValueError, match=r"'hiden' to keep, which no unit gives; expected one of 'attended', 'hidden'"):
        fz.plan(step, params, inputs=(torch.empty(*TOKENS, WIDTH),))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    "reads",
    [
        lambda x: x.sum().item(),
        lambda x: 1 if x.isnan().any() else 2,
        lambda x: x.detach().numpy(),
        lambda x: np.asarray(x.detach()).sum(),
        lambda x: x[x > 0],
        lambda x: x.register_hook(lambda cotangent: cotangent * cotangent.sum().item()),
    ],
    ids=["item", "bool", "numpy", "asarray", "mask", "hook"],
)
def test_a_function_that_reads_values_is_refused_in_words_of_plan(reads: Any, device: str, inside: bool) -> None:
    """With `inputs=` a function runs on shapes alone."""

    @fz.unit
    def block(q: Any, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(x @ q["w"])
        reads(out) if inside else None
        return out

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        reads(x) if not inside else None
        return x.mean()

    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
    params = {"blocks": [{"w": torch.eye(3, device=device)}]}
    with pytest.raises(TypeError, match=r"^parallel.check: .*test_kept_activations.py:\d+, in .*shapes alone.*where"):
        fz.plan(step, params, world_size=2, inputs=(torch.ones(2, 3),))
    assert fz.plan(step, params, world_size=2).params


class Keeps(torch.nn.Module):
    """Has a counter, a table that it makes when it is first needed, and what it has given last."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = torch.nn.Linear(4, 4), 0
        self.tables, self.last = dict[int, torch.Tensor](), torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if len(x) not in self.tables:
            self.tables[len(x)] = torch.arange(len(x))[:, None] / len(x)
        out = self.inner(x) * self.calls + self.tables[len(x)] + self.last
        self.last = out.detach().mean()
        return out


def test_a_plan_and_a_check_leave_nothing_in_a_module() -> None:
    def losses(trials: bool) -> list[float]:
        torch.manual_seed(0)
        apply, params = fz.functional(Keeps())
        step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
        state, x, found = step.init(params), torch.ones(3, 4), list[float]()
        for _ in range(2):
            if trials:
                fz.plan(step, params, world_size=2, inputs=(x,))
                fz.parallel.check(step, params, x)
                fz.parallel.check(step, params, x, values=True)
            state, metrics = step(state, x)
            found.append(metrics["loss"].item())
        return found

    assert losses(trials=True) == losses(trials=False)


DERIVATIVES: dict[str, Callable[[Callable[..., Any], Any], Any]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones(5, 1))[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).sum(0))(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(lambda x: f(x).sum(0))(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
}


@in_turns(3)
@pytest.mark.parametrize("name", DERIVATIVES)
def test_of_functions_that_differentiate_their_units(name: str) -> None:
    apply, params = fz.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))
    step = fz.train_step(lambda p, x: DERIVATIVES[name](lambda x: apply(p, x), x).square().mean(), fz.sgd(0.1))
    x = torch.linspace(0, 1, 20).reshape(5, 4)
    assert fz.plan(step, params, world_size=2, inputs=(x,)).flops > 0
    assert fz.explain(step, step.init(params), x).fault is None


def test_what_torch_does_not_run_on_shapes_is_refused() -> None:
    apply, params = fz.functional(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(torch.func.hessian(lambda x: apply(p, x[None])[0, 0]))(x).square().mean()

    step = fz.train_step(loss, fz.sgd(0.1))
    with pytest.raises(TypeError, match=r"torch does not run the function on shapes alone .*, or leave inputs= of fz"):
        fz.plan(step, params, world_size=2, inputs=(torch.ones(5, 4),))
