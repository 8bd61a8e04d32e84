"""What looks at the functions that units call: classes of tensors, and modes. Units compute what these make of them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from units import forms

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
SINE = (torch.sin, torch.Tensor.sin)


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Thrice(torch.Tensor):
    """A tensor whose sine is three times as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 3 if func in SINE else out


class Fivefold(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 5 if func in SINE else out


PARAMS = {"blocks": [{"w": draw(4, 4, seed=i)} for i in range(2)]}
ALONG = {"blocks": [{"w": draw(4, 4, seed=i)} for i in (2, 3)]}
X = draw(3, 4, seed=4)
Fn = Callable[[Any, torch.Tensor], torch.Tensor]


def plain(x: torch.Tensor) -> torch.Tensor:
    return torch.Tensor.as_subclass(x, torch.Tensor)


def function(unit: Callable[[Any], Any], by: str) -> Fn:
    def body(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ p["w"]
        return (h.as_subclass(Thrice) if by == "unit" else h).sin() * p["w"][0]

    block = unit(body)

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        with Fivefold() if by == "mode" else contextlib.nullcontext():
            for p in params["blocks"]:
                x = block(p, x)
        return plain(x).sum()

    return fn


def scaled(params: Any, by: torch.Tensor) -> Any:
    return {"blocks": [{"w": p["w"] * by} for p in params["blocks"]]}


TRANSFORMS: dict[str, Callable[[Callable[[Any], torch.Tensor]], Any]] = {
    "none": lambda f: f(PARAMS),
    "grad": lambda f: torch.func.grad(f)(PARAMS),
    "jvp": lambda f: torch.func.jvp(f, (PARAMS,), (ALONG,)),
    "vmap": lambda f: torch.func.vmap(lambda by: f(scaled(PARAMS, by)))(torch.tensor([1.0, 2.0], dtype=F64)),
    "hvp": lambda f: torch.func.jvp(torch.func.grad(f), (PARAMS,), (ALONG,)),
}
STEPS = forms("plain", "ZeRO-3", "ZeRO-3, remat", "ZeRO-2")


def computes_the_same(rank: int, by: str, kind: str, transform: str) -> None:
    x = X.as_subclass(Thrice) if by == "input" else X
    step = STEPS[kind](fz.train_step(function(fz.unit, by), fz.sgd(0.1)))
    reference = function(lambda f: f, by)
    expected = TRANSFORMS[transform](lambda params: reference(params, x))
    for _ in range(2):
        found = TRANSFORMS[transform](lambda params: step.forward(step.init(params), x))
        torch.testing.assert_close(found, expected)


@by_day(6)
@given(
    st.sampled_from(["input", "unit", "mode"]),
    st.sampled_from(sorted(STEPS)),
    st.sampled_from(sorted(TRANSFORMS)),
    st.sampled_from([1, 2]),
)
def test_classes_and_function_modes_see_into_units_under_transforms(
    by: str, kind: str, transform: str, ranks: int
) -> None:
    run_ranks(functools.partial(computes_the_same, by=by, kind=kind, transform=transform), ranks)


@pytest.mark.parametrize("kind", STEPS)
def test_an_input_that_is_differentiated_keeps_its_class(kind: str) -> None:
    """Under torch.func.vjp alone it would be a plain tensor, in the function and not in its units."""

    def rank_main(rank: int) -> None:
        step = STEPS[kind](fz.train_step(function(fz.unit, "input"), fz.sgd(0.1)))
        state = step.init(PARAMS)
        for _ in range(2):
            x = X.clone().as_subclass(Thrice).requires_grad_()
            out = function(lambda f: f, "input")(PARAMS, x)
            (expected,) = torch.autograd.grad(out, x)
            found, pullback = step.vjp(state, x.detach())
            torch.testing.assert_close(found, out.detach())
            torch.testing.assert_close(plain(pullback(torch.ones((), dtype=F64))[1][0]), plain(expected))

    run_ranks(rank_main, 1)


def test_where_torch_func_makes_a_plain_tensor_of_it_a_unit_has_one() -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(function(fz.unit, "input"), fz.sgd(0.1)))
        x, reference = X.as_subclass(Thrice), function(lambda f: f, "input")
        state = step.init(PARAMS)
        expected = torch.func.grad(lambda x: reference(PARAMS, x))(x)
        torch.testing.assert_close(torch.func.grad(lambda x: step.forward(state, x))(x), expected)

    run_ranks(rank_main, 1)


class Doubled(TorchDispatchMode):
    """Makes hyperbolic tangents twice as large."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func == torch.ops.aten.tanh.default else out


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def named(unit: Callable[[Any], Any], inside: bool) -> Fn:
    block = unit(lambda p, x: fz.name(x @ p["w"], "h").tanh() * x)

    def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
        with Doubled() if inside else contextlib.nullcontext():
            for p in params["blocks"]:
                x = block(p, x)
        return x.sum()

    return fn


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "changes": Doubled,
    "looks": Looking,
}


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("names", ["save", "offload"])
def test_what_a_mode_changes_is_not_made_again_otherwise(names: str, inside: bool) -> None:
    """One that changes a unit's forward run is refused."""

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(named(fz.unit, inside), fz.sgd(0.1)))
        step = fz.remat(step, save=("h",)) if names == "save" else fz.remat(step, offload=("h",))
        state = step.init(PARAMS)
        refused = set()
        for forward, back in [("none", "none"), ("looks", "looks"), ("changes", "changes"), ("changes", "none")]:
            leaves = [p["w"].clone().requires_grad_() for p in PARAMS["blocks"]]
            with MODES[forward]():
                out = named(lambda f: f, inside)({"blocks": [{"w": w} for w in leaves]}, X)
            with MODES[back]():
                expected = torch.autograd.grad(out, leaves)
            try:
                with MODES[forward]():
                    found, pullback = step.vjp(state, X)
                torch.testing.assert_close(found, out.detach())
                with MODES[back]():
                    grads = fz.gather(pullback(torch.ones((), dtype=F64))[0])
            except ValueError as error:
                assert "that is around it" in str(error), error
                refused.add((forward, back))
            else:
                torch.testing.assert_close([p["w"] for p in grads["blocks"]], list(expected))
        if not inside:
            assert refused == {("changes", "changes"), ("changes", "none")}
        else:
            assert len(refused) == 4

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "none"])
def test_a_unit_in_inference_mode_is_a_constant_to_transforms(kind: str, transform: str) -> None:
    def function(unit: Callable[[Any], Any]) -> Fn:
        block = unit(lambda p, x: (x @ p["w"]).tanh())

        def fn(params: Any, x: torch.Tensor) -> torch.Tensor:
            x = x.clone()  # of the transform's level
            with torch.inference_mode():
                chosen = block(params["blocks"][0], x).argmax(-1)
            return block(params["blocks"][1], x).square().gather(1, chosen.clone()[:, None]).sum()

        return fn

    def rank_main(rank: int) -> None:
        expected = TRANSFORMS[transform](lambda params: function(lambda f: f)(params, X))
        step = STEPS[kind](fz.train_step(function(fz.unit), fz.sgd(0.1)))
        for _ in range(2):
            found = TRANSFORMS[transform](lambda params: step.forward(step.init(params), X))
            torch.testing.assert_close(found, expected)

    run_ranks(rank_main, 1)
