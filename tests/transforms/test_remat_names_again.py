"""What names leave to be computed again is what it was, whatever has changed between a unit's run and its pullback."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import default_dtype
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
Params = dict[str, torch.Tensor]
Body = Callable[..., torch.Tensor]
KEEP = [{"save": ("a",)}, {"offload": ("a",)}]


def params() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {"blocks": [{"w": torch.randn(4, 4, generator=generator, dtype=F64) / 2} for _ in range(2)]}


def made(body: Body, transform: Callable[[fz.Step], fz.Step]) -> tuple[fz.Step, fz.TrainState]:
    unit = fz.unit(body)

    def loss(p: Any, x: torch.Tensor, *others: object) -> torch.Tensor:
        for block in p["blocks"]:
            x = unit(block, x, *others)
        return x.square().mean()

    step = transform(fz.train_step(loss, fz.sgd(1e-2)))
    return step, step.init(params())


def keeping(keep: dict[str, tuple[str, ...]]) -> Callable[[fz.Step], fz.Step]:
    return lambda step: fz.remat(step, "blocks.*", **keep)


def same(body: Body, *given: object) -> None:
    """Steps with other arguments, one after the other, have the bits of a step that keeps all."""
    found = []
    for transform in (lambda step: step, keeping(KEEP[0])):
        step, state = made(body, transform)
        for each in given:
            state, metrics = step(state, torch.ones(3, 4, dtype=F64), each)
        found.append([metrics["loss"], fz.gather(state.params)])
    assert_trees_equal(*found)


def pulled(body: Body, transform: Callable[[fz.Step], fz.Step], around: Any = contextlib.nullcontext) -> list[object]:
    """Gradients of two pullbacks, each within `around`."""
    (step, state), found = made(body, transform), []
    for number in range(2):
        x = torch.linspace(-1, 1 + number, 12, dtype=F64).view(3, 4)
        loss, pullback = step.vjp(state, x)
        with around():
            found.append([loss, fz.gather(pullback(torch.ones_like(loss))[0])])
    return found


@pytest.mark.parametrize("keep", KEEP)
def test_another_default_dtype_around_the_pullback(keep: Any) -> None:
    """Tensors of no dtype, whole numbers that are divided, and draws."""

    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(3, 4).to(F64) + torch.arange(4.0).to(F64) / 3 + (torch.arange(4) / 7).to(F64)
        return torch.sin(fz.name(x @ p["w"], "a") * mask)

    def around() -> Any:
        return default_dtype(F64)

    assert_trees_equal(pulled(body, lambda step: step), pulled(body, keeping(keep), around))


def test_another_default_dtype_in_a_later_run() -> None:
    def body(p: Params, x: torch.Tensor, wide: bool) -> torch.Tensor:
        with default_dtype(F64 if wide else torch.float32):
            scale = torch.arange(4.0) / 3
        return torch.sin(fz.name(x @ p["w"], "a") * scale.to(F64))

    same(body, False, True, True)


LIBRARY = torch.library.Library("fzero_names", "DEF")
LIBRARY.define("doubled_(Tensor(a!) x) -> ()")
LIBRARY.impl("doubled_", lambda x: [x.mul_(2), None][1], "CompositeExplicitAutograd")


@pytest.mark.parametrize(
    "write",
    [
        lambda x: torch.ops.fzero_names.doubled_(x),
        lambda x: x.add_(torch.eye(4, dtype=F64)[0].to_sparse()),
        lambda x: x.uniform_(1, 2, generator=torch.Generator().manual_seed(0)),
        lambda x: x.mul_(2),
    ],
    ids=["an operator of others", "a sparse operand", "a draw", "in place"],
)
@pytest.mark.parametrize("later", [False, True])
def test_writes_to_memory_that_no_operation_made(write: Callable[[torch.Tensor], object], later: bool) -> None:
    """First of all in a run that is not looked at any more."""

    def body(p: Params, x: torch.Tensor, writes: bool) -> torch.Tensor:
        scale = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
        out = torch.tanh(scale) * fz.name(x @ p["w"], "a")
        if writes:
            write(scale)
        return torch.sin(out + scale)

    same(body, not later, True, True)


class Reusing(torch.autograd.Function):
    """Its backward computes in the memory of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return x.mul_(2).mul_(cotangent)


@pytest.mark.parametrize("size", [4, 400])  # that stays, and that is worth its way
@pytest.mark.parametrize("keep", [*KEEP, {"save": ("b",)}])
def test_a_backward_that_writes_to_what_it_saved(keep: Any, size: int) -> None:
    """Is right once; then the same or torch's error."""

    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        hidden = fz.name(x @ p["w"], "a")
        return fz.name(Reusing.apply(hidden), "b") * 1.0  # type: ignore[operator]

    found = []
    for transform in (lambda step: step, keeping(keep)):
        step, state = made(body, transform)
        for _ in range(3):
            loss, pullback = step.vjp(state, torch.linspace(-1, 1, 4 * size, dtype=F64).view(size, 4))
            found.append(fz.gather(pullback(torch.ones_like(loss), retain_graph=True)[0]))
            try:
                again = fz.gather(pullback(torch.ones_like(loss))[0])
            except RuntimeError as error:
                assert "modified by an inplace operation" in str(error)
            else:
                assert_trees_equal(again, found[-1])
    assert_trees_equal(*found)


def test_a_backward_that_writes_to_what_another_one_saved() -> None:
    """Which comes first, and torch refuses it."""

    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        fz.name(x * 1, "a")
        hidden = x @ p["w"]
        early = hidden.sin()
        return Reusing.apply(hidden) + early  # type: ignore[operator]

    for transform in (lambda step: step, keeping(KEEP[0])):
        step, state = made(body, transform)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(state, torch.ones(3, 4, dtype=F64))


def test_what_is_written_to_before_the_pullback_is_said_of_which_unit() -> None:
    scale = torch.ones(4, dtype=F64)
    step, state = made(lambda p, x: torch.sin(fz.name(x @ p["w"], "a") * scale.sin()), keeping(KEEP[0]))
    loss, pullback = step.vjp(state, torch.ones(3, 4, dtype=F64))
    scale.mul_(2)
    with pytest.raises(ValueError, match=r"^Unit 'blocks\.1' .* when it runs again"):
        pullback(torch.ones_like(loss))


def test_draws_are_made_again_on_another_thread_and_disturb_nobody() -> None:
    """The main thread draws from the default generator meanwhile."""
    generator = torch.default_generator

    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        out = fz.name(x @ p["w"], "a")
        for _ in range(6):
            out = F.dropout(out.sin(), 0.3)
        return out

    step, state = made(body, keeping(KEEP[0]))
    x, before, pulled, seen = torch.ones(3, 4, dtype=F64), generator.get_state(), [], []

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
            out = func(*args, **(kwargs or {}))
            if torch.Tag.nondeterministic_seeded in func.tags:
                seen.append(torch.equal(generator.get_state(), entered))
            return out

    for on_a_thread in (False, True):
        generator.set_state(before)
        loss, pullback = step.vjp(state, x)
        entered = generator.get_state()

        def pull(pullback: Any = pullback, loss: torch.Tensor = loss, looks: bool = on_a_thread) -> None:
            with Looks() if looks else contextlib.nullcontext():
                pulled.append(fz.gather(pullback(torch.ones_like(loss))[0]))

        if on_a_thread:
            thread = threading.Thread(target=pull)
            thread.start()
            thread.join()
        else:
            pull()
        assert torch.equal(generator.get_state(), entered)
    assert_trees_equal(*pulled)
    assert seen and all(seen)


@pytest.mark.parametrize("names", [("a",), ("sum",), ("a", "sum")])
def test_what_is_sent_again_is_computed_again(names: tuple[str, ...]) -> None:
    def run(rank: int, transform: Callable[[fz.Step], fz.Step]) -> Any:
        ax = fz.parallel.axis(None, "tp")

        def body(p: Params, x: torch.Tensor) -> torch.Tensor:
            a = fz.name(torch.tanh(fz.parallel.copy(x, ax) @ p["w"]), "a")
            total = fz.name(fz.parallel.sum(a @ p["w"].t(), ax), "sum")
            return x + torch.sin(2 * total)

        step, state = made(body, lambda step: fz.shard_tensor(transform(step), {"*w": 1}))
        for count in range(3):
            state, _ = step(state, torch.ones(3, 4, dtype=F64) * count)
        return fz.gather(state.params)

    (want,) = run_ranks(functools.partial(run, transform=lambda step: step), 1)
    for own in run_ranks(functools.partial(run, transform=lambda step: fz.remat(step, save=names)), 2):
        assert_trees_close(own, want, rtol=1e-10)


def test_a_generator_of_the_users_own_is_refused() -> None:
    """What it gives depends on whoever drew from it before."""
    generator = torch.Generator().manual_seed(1)
    step, state = made(lambda p, x: x @ p["w"] * torch.rand(3, 4, generator=generator, dtype=F64), keeping(KEEP[0]))
    with pytest.raises(ValueError, match=r"random generator of your own"):
        step.vjp(state, torch.ones(3, 4, dtype=F64))


def _opens(p: Params, x: torch.Tensor) -> torch.Tensor:
    """Writes to memory unseen, so that its operations do not say what it computes."""
    hidden, scale = fz.name(x @ p["w"], "a"), torch.ones(4, dtype=F64) * 2
    read = scale.sin()
    scale.numpy()[:] = 3.0
    return (hidden * read).sin() * scale


@pytest.mark.parametrize(
    "before",
    [lambda step: step, lambda step: fz.remat(step, "blocks.*"), lambda step: fz.remat(step, "blocks.*", ("a", "b"))],
    ids=["plain", "whole", "other names"],
)
def test_a_function_that_ran_in_another_step_before_is_looked_at(before: Callable[[fz.Step], fz.Step]) -> None:
    unit = fz.unit(_opens)
    base = fz.train_step(lambda p, x: unit(p["blocks"][1], unit(p["blocks"][0], x)).square().mean(), fz.sgd(1e-2))
    state, x, found = base.init(params()), torch.ones(3, 4, dtype=F64), []
    for step in (base, before(base), keeping(KEEP[0])(base)):
        with contextlib.suppress(ValueError):  # a name that nobody gives
            loss, pullback = step.vjp(state, x)
            found.append(fz.gather(pullback(torch.ones_like(loss))[0]))
    assert_trees_equal(*found)


def test_a_second_run_with_other_operations_is_refused() -> None:
    """Of a function that begins to be impure after its first runs."""
    turned = [False]

    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        hidden = fz.name(x @ p["w"], "a")
        return hidden.cos() if turned[0] else hidden.sin()

    step, state = made(body, keeping(KEEP[0]))
    for last in (False, False, True):
        loss, pullback = step.vjp(state, torch.ones(3, 4, dtype=F64))
        turned[0] = last
        if not last:
            pullback(torch.ones_like(loss))
    with pytest.raises(ValueError, match=r"calls other operations when it runs again"):
        pullback(torch.ones_like(loss))


def test_another_unit_in_the_place_of_one_is_looked_at() -> None:
    units = fz.unit(lambda p, x: fz.name(x @ p["w"], "a").sin()), fz.unit(_opens)

    def loss(p: Any, x: torch.Tensor, which: int) -> torch.Tensor:
        for block in p["blocks"]:
            x = units[which](block, x)
        return x.square().mean()

    found = []
    for transform in (lambda step: step, keeping(KEEP[0])):
        step = transform(fz.train_step(loss, fz.sgd(1e-2)))
        state = step.init(params())
        for which in (0, 1, 1):
            state, metrics = step(state, torch.ones(3, 4, dtype=F64), which)
        found.append([metrics["loss"], fz.gather(state.params)])
    assert_trees_equal(*found)


def test_higher_order_operators() -> None:
    def body(p: Params, x: torch.Tensor) -> torch.Tensor:
        hidden = fz.name(x @ p["w"], "a")
        scale = torch.cond(hidden.detach().sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (hidden.detach(),))
        return (hidden * scale).sin()

    assert_trees_equal(pulled(body, lambda step: fz.remat(step, "blocks.*")), pulled(body, keeping(KEEP[0])))


def refuses_residuals(rank: int, keep: dict[str, tuple[str, ...]], shard: Callable[[fz.Step], fz.Step]) -> None:
    unit = fz.unit(lambda p, x: torch.tanh(fz.name(x @ p["w"], "a")))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0 @ p["first"]
        for block in p["blocks"]:
            h = unit(block, x)
            x += h
        return x.square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        x = x @ p["first"]
        for block in p["blocks"]:
            x = x + torch.tanh(x @ block["w"])
        return x.square().mean()

    tree, x = {"first": torch.eye(4, dtype=F64), **params()}, torch.linspace(-1, 1, 12, dtype=F64).view(3, 4)
    step = keeping(keep)(shard(fz.train_step(loss, fz.sgd(1.0))))
    state, right = step.init(tree), torch.func.grad(plain)(tree, x)
    for number in range(3):
        try:
            value, pullback = step.vjp(state, x)
            found = fz.gather(pullback(torch.ones_like(value))[0])
        except ValueError as error:
            assert "was changed in place after it was called" in str(error)
        else:
            assert number == 0, "an operation ran again on what had been written to"
            assert_trees_close(found, right)


@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("shard", [lambda step: step, fz.shard_zero3], ids=["unsharded", "zero3"])
def test_writes_to_what_a_unit_computed_with(keep: Any, shard: Any) -> None:
    """In a residual connection that is added in place, as torch refuses it; at latest once it was looked at."""
    run_ranks(functools.partial(refuses_residuals, keep=keep, shard=shard), 2)
