"""What autograd finds by itself in runs by plain autograd, held against plain torch: nothing is lost or written to."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from drawn_pipelines import Copied
from torch import Tensor

import fzero as fz
from fzero.base import pages
from fzero.engine.passes import Passes

DTYPE = torch.float64
WORK: dict[torch.Size, Tensor] = {}


class Checkpoint(torch.autograd.Function):
    """Runs again what it closes over, and pulls back by torch.autograd.backward, as well-known ones do."""

    @staticmethod
    def forward(ctx: Any, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.fn = fn
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.fn(x)
        torch.autograd.backward(out, cotangent)
        return None, x.grad


class Workspace(torch.autograd.Function):
    """A product whose backward returns memory that the next one writes to."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        work = WORK.setdefault(w.shape, torch.empty_like(w))
        torch.mm(x.t(), cotangent, out=work)
        return cotangent @ w.t(), work


class Writes(Copied):
    """A backward that writes to the cotangent that it is given, as it should not."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
        return cotangent.mul_(3)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DTYPE)


def expected(fn: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor, count: int) -> dict[str, Tensor]:
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    for part in x.chunk(count):
        (fn(leaves, part) / count).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def near(found: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    for name, grad in right.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-10, atol=1e-12)


HOW = ("backward", "early", "halves")


def pulled(
    fn: Callable[..., Tensor], params: dict[str, Tensor], x: Tensor, count: int, how: str, after: Callable[..., object]
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradients, and the input's cotangent, of a step's passes.

    Args:
        after: is called with what is outside of the library between the halves of a pullback.
    """
    step = fz.train_step(fn, fz.sgd(1.0))
    passes, own = Passes(step, step.init(params), count), list[Tensor]()
    for i, part in enumerate(x.chunk(count)):
        output, _ = passes.forward(i, (part,), (0,))
        ct = torch.full_like(output, 1 / count)  # type: ignore[arg-type]
        rest: Callable[[], object] = lambda: None
        if how == "backward":
            (cotangent,) = passes.backward(i, ct)
        elif how == "early":
            (cotangent,), rest = passes.early(i, ct)
        else:
            (cotangent,) = passes.inputs(i, ct)
            rest = functools.partial(passes.params, i)
        assert isinstance(cotangent, Tensor)
        own.append(cotangent.clone())
        after(ct, cotangent, output)
        rest()
    passes.reduce()
    return fz.gather(passes.grads()), torch.cat(own)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", HOW)
def test_a_backward_within_a_backward_counts(count: int, how: str) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return Checkpoint.apply(lambda h: torch.tanh(h @ p["w"]), x @ p["u"]).square().sum()

    params, x = {"u": drawn(3, 3), "w": drawn(3, 3, seed=1)}, drawn(6, 3, seed=2)
    found, _ = pulled(fn, params, x, count, how, lambda *_: None)
    near(found, expected(fn, params, x, count))
    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), count)
    new, _ = step(step.init(params), x)
    near({name: params[name] - leaf for name, leaf in fz.gather(new.params).items()}, expected(fn, params, x, count))


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("how", HOW)
def test_a_backward_within_a_backward_reaches_inputs(count: int, how: str) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return Checkpoint.apply(lambda y: (y + x).square() @ p["w"], x).sum()

    params, x = {"w": drawn(3, 3)}, drawn(6, 3, seed=2)
    found, own = pulled(fn, params, x, count, how, lambda *_: None)
    leaves, right = {"w": params["w"].clone().requires_grad_()}, list[Tensor]()
    for part in x.chunk(count):
        leaf = part.clone().requires_grad_()  # with which a stage's graph begins, too
        (fn(leaves, leaf) / count).backward()
        assert leaf.grad is not None
        right.append(leaf.grad)
    torch.testing.assert_close(own, torch.cat(right), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["w"], leaves["w"].grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("bias", [False, True])
def test_a_backward_that_writes_to_its_cotangent_changes_no_other_one(count: int, how: str, bias: bool) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(Writes.apply(x @ p["w"]) + (p["b"] if bias else x)).square().sum()

    params, x = {"w": drawn(3, 3), "b": drawn(6 // count, 3, seed=1)}, drawn(6, 3, seed=2)
    found, own = pulled(fn, params, x, count, how, lambda *_: None)
    near(found, expected(fn, params, x, count))
    leaf = x.clone().requires_grad_()
    for part in leaf.chunk(count):
        begun = part.detach().requires_grad_()
        (fn(params, begun) / count).backward()
        part.backward(begun.grad)
    torch.testing.assert_close(own, leaf.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_writes_to_a_cotangent_between_the_halves_changes_no_gradient(count: int, how: str) -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return x @ p["w"] + p["b"]

    def write(*values: Tensor) -> None:
        for each in values:
            each.zero_()

    params, x = {"w": drawn(3, 3), "b": drawn(6 // count, 3, seed=1)}, drawn(6, 3, seed=2)
    right, _ = pulled(fn, params, x, count, "backward", lambda *_: None)
    found, _ = pulled(fn, params, x, count, how, write)
    near(found, right)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_an_input_s_cotangent_may_be_a_backward_s_workspace(count: int, how: str) -> None:
    class Same(Copied):
        @staticmethod
        def backward(ctx: Any, cotangent: Tensor) -> Tensor:  # type: ignore[override]
            return WORK.setdefault(cotangent.shape, torch.empty_like(cotangent)).copy_(cotangent)

    step = fz.train_step(lambda p, x: (Same.apply(x) * p["w"]).square().sum(), fz.sgd(1.0))
    params, x = {"w": drawn(3)}, drawn(6, 3, seed=2)
    passes = Passes(step, step.init(params), count)
    for i, part in enumerate(x.chunk(count)):
        passes.forward(i, (part,), (0,))
    one = torch.ones((), dtype=DTYPE)
    pull = {"backward": passes.backward, "early": lambda i, ct: passes.early(i, ct)[0], "halves": passes.inputs}[how]
    own = [pull(i, one)[0] for i in range(count)]
    torch.testing.assert_close(torch.cat(own), 2 * x * params["w"].square())  # type: ignore[arg-type]


@pytest.mark.parametrize("how", ["early", "halves"])
def test_who_gives_up_between_the_halves_leaves_nothing(how: str) -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().sum(), fz.sgd(1.0))
    passes = Passes(step, step.init({"w": drawn(3, 3)}), 1)
    passes.forward(0, (drawn(6, 3),), (0,))
    run = weakref.ref(passes._runs[0])
    gc.collect()
    gc.disable()
    try:
        left = (passes.early if how == "early" else passes.inputs)(0, torch.ones((), dtype=DTYPE))
        del passes, left
        assert run() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("count", [1, 2])
def test_gaps_between_leaves_are_zeros(how: str, count: int) -> None:
    """Where sums lie in memory that others have left full of large numbers."""
    step = fz.train_step(lambda p, x: (x @ p["w"] @ p["v"]).square().sum(), fz.sgd(1.0))
    full = lambda numel, dtype, device: torch.full((numel,), 1e240, dtype=dtype, device=device)
    with mock.patch.object(pages, "empty", full):
        passes = Passes(step, step.init({"w": drawn(3, 3), "v": drawn(3, 3, seed=1)}), count)
        for i, part in enumerate(drawn(6, 3, seed=2).chunk(count)):
            output, _ = passes.forward(i, (part,), (0,))
            ct = torch.ones_like(output)  # type: ignore[arg-type]
            if how == "early":
                passes.early(i, ct)[1]()
            else:
                (passes.backward if how == "backward" else passes.inputs)(i, ct)
            if how == "halves":
                passes.params(i)
        passes.reduce()
        grads = passes.grads()
    for buffer in grads.locals().values():
        assert buffer.abs().max() < 1e6
        assert (buffer != 0).sum() <= 18


def _stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def _last(p: dict[str, Tensor], h: Tensor) -> Tensor:
    return torch.tanh(Workspace.apply(h, p["w"])).square().sum()


def _over_ranks(rank: int, name: str) -> Tensor:
    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    schedule = getattr(fz.schedules, name)(stages=2, microbatches=4)
    steps = [fz.train_step(fn, fz.sgd(1.0)) for fn in (_stage, _last)]
    pipe = fz.pipeline(steps, schedule, groups=mesh["pp"])
    params = [{"w": drawn(8, 8)}, {"w": drawn(8, 8, seed=1)}]
    state = pipe.init(params)
    new, _ = pipe(state, drawn(12, 8, seed=2))
    return params[rank]["w"] - fz.gather(new.params[rank])["w"]


def _named(name: str) -> Callable[[int], Tensor]:

    return functools.partial(_over_ranks, name=name)


@pytest.mark.parametrize("name", ["one_f_one_b", "gpipe", "zero_bubble"])
def test_what_a_backward_returns_may_be_its_workspace(name: str) -> None:
    found = fz.testing.run_ranks(_named(name), 2, backend="processes")
    params = {"a": drawn(8, 8), "b": drawn(8, 8, seed=1)}
    right = expected(lambda p, x: _last({"w": p["b"]}, _stage({"w": p["a"]}, x)), params, drawn(12, 8, seed=2), 4)
    near({"a": found[0], "b": found[1]}, right)


def test_all_params_frozen() -> None:
    step = fz.freeze(fz.accumulate(fz.train_step(lambda p, x: (x * p["w"]).sum(), fz.sgd(1.0)), 2), "*")
    state = step.init({"w": torch.ones(3)})
    new, metrics = step(state, torch.ones(4, 3))
    assert metrics["loss"] == 6 and torch.equal(fz.gather(new.params)["w"], torch.ones(3))


def test_a_real_weight_that_is_cast_to_complex() -> None:
    def fn(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (x @ p["w"].to(torch.complex128)).abs().square().mean()

    params, x = {"w": drawn(4, 4)}, torch.complex(drawn(8, 4), drawn(8, 4, seed=1))
    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0)), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new, _ = step(step.init(params), x)
    near({"w": params["w"] - fz.gather(new.params)["w"]}, expected(fn, params, x, 2))
