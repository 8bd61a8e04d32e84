"""What cannot be traced is refused, with the user's line."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fzero as fz

Body = Callable[[torch.Tensor], torch.Tensor]


def loop(x: torch.Tensor) -> torch.Tensor:
    while x.norm() > 0.5:
        x = x / 2
    return x


def counted(x: torch.Tensor) -> torch.Tensor:
    for _ in range(int(x.argmax())):
        x = x * 2
    return x


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert x.sum() < 1e9
    return x


def ranged(x: torch.Tensor) -> torch.Tensor:
    end: Any = x.detach().abs().max().long() + 1
    return x + torch.arange(end).sum()


def finite(x: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(x).all():
        raise FloatingPointError
    return x


BODIES: dict[str, Body] = {
    "loop": loop,
    "counted": counted,
    "asserted": asserted,
    "ranged": ranged,
    "finite": finite,
    "branch": lambda x: x if x.sum() > 0 else -x,
    "conditional": lambda x: x.exp() if bool((x > 0).all()) else x,
    "item": lambda x: x / x.sum().item(),
    "floated": lambda x: x * float(x.detach().max()),
    "listed": lambda x: x * sum(x.detach().flatten().tolist()),
    "masked": lambda x: x[x > 0].sum() + x,
    "nonzero": lambda x: x + x.nonzero().shape[0],
    "unique": lambda x: x + torch.unique(x.round()).numel(),
    "selected": lambda x: x + torch.masked_select(x, x > 0).sum(),
    "largest": lambda x: x * max(x.flatten()[0], x.flatten()[1]),
    "ordered": lambda x: torch.stack(sorted(x.flatten(), key=lambda v: v)).view(x.shape),
    "equal": lambda x: x if torch.equal(x, x.round()) else x * 2,
    "close": lambda x: x if torch.allclose(x, x.round()) else x * 2,
    "array": lambda x: x * float(np.asarray(x.detach()).max()),
    "mathematical": lambda x: x * math.sqrt(x.detach().square().sum()),
    "repeated": lambda x: x + torch.repeat_interleave(x[0], (x.detach()[0] > 0).long()).sum(),
    "indexed": lambda x: x * [1.0, 2.0][int(x.sum() > 0)],
    "sliced": lambda x: x + x[: int(x.detach().abs().sum()) % 2 + 1].sum(),
    "looked up": lambda x: x * {True: 2.0, False: 3.0}[bool(x.sum() > 0)],
    "conjunct": lambda x: x if x.sum() > 0 and x.min() < 0 else x * 2,
    "negated": lambda x: x if not x.sum() > 0 else x * 2,
    "counting": lambda x: x + torch.bincount(x.detach().abs().long().flatten()).numel(),
    "iterated": lambda x: x * len([v for v in x.flatten() if v > 0]),
    "matched": lambda x: x * (2 if x.flatten()[0] in [1.0, 2.0] else 3),
    "formatted": lambda x: x * len(f"{x.sum():.1f}"),
}
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


def need_line(body: Body, said: str) -> None:
    found = re.search(r"test_jit_refused\.py, line (\d+)", said)
    assert found, said
    first = body.__code__.co_firstlineno
    assert first <= int(found[1]) < first + 6, said


def of_unit(body: Body) -> Any:
    unit = fz.unit(lambda p, x: body(x * p["w"]))
    return lambda p, x: unit(p["blocks"][0], x).sum() + p["s"].sum()


def of_function(body: Body) -> Any:
    return lambda p, x: body(x * p["s"]).sum()


@pytest.mark.parametrize("where", [of_unit, of_function])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_refused_with_its_line(body: Body, where: Any) -> None:
    step = fz.jit(fz.train_step(where(body), fz.sgd(0.1)), backend="graph")
    state = step.init({"blocks": [{"w": torch.ones(3)}], "s": torch.ones(3)})
    with pytest.raises((ValueError, TypeError)) as caught:
        step(state, X)
    need_line(body, str(caught.value))


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_refused_in_a_function(body: Body) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:
        fz.jit(body, backend="graph")(X)
    need_line(body, str(caught.value))


FEW_BITS = fz.Policy(param=torch.bfloat16, compute=torch.float32, rounding="stochastic")
STEPS: dict[str, tuple[Callable[[fz.Step], fz.Step], str]] = {
    "weights": (lambda step: fz.accumulate(step, 2, weights=lambda x: x.abs().sum()), r"weights=.* fz\.jit\(step\)"),
    "torch's": (
        lambda step: fz.train_step(step.fn, fz.from_torch(torch.optim.NAdam, 0.1)),
        r"line \d+\) decides by a value .*fzero\.optim",
    ),
    "loss scale": (fz.loss_scale, r"loss scale changes .*fz\.jit\(step\)"),
    "few bits": (lambda step: fz.train_step(step.fn, fz.sgd(0.1), policy=FEW_BITS), "are rounded stochastically"),
}


@pytest.mark.parametrize("name", STEPS)
def test_steps_refused_in_a_function(name: str) -> None:
    change, said = STEPS[name]
    step = change(fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(3)})
    with pytest.raises((ValueError, TypeError), match=said):
        fz.jit(lambda state: step(state, X)[0], backend="graph")(state)


def test_updates_that_draw_by_a_seed_are_refused_in_a_function() -> None:
    step = fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.chain(fz.gradient_noise(0.1), fz.sgd(0.1)))
    state = step.init({"w": torch.ones(3)})

    def begun(state: fz.TrainState, x: torch.Tensor) -> torch.Tensor:  # with counts that are known
        return step(state.replace(moments=step.init({"w": torch.ones(3)}).moments, step=0), x)[1]["loss"]

    with pytest.raises(ValueError, match=r"by a count or a seed .* Take fz\.jit\(step\)"):
        fz.jit(lambda state: torch.func.jvp(lambda x: begun(state, x), (X,), (X,)), backend="graph").lower(state)


@pytest.mark.parametrize("kind", ["closure", "default", "list"])
def test_a_unit_that_reads_what_the_function_made_is_refused(kind: str) -> None:
    def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
        mask = x > 0
        held = [mask]
        made: dict[str, Any] = {
            "closure": lambda p, x: x * p["w"] * mask,
            "default": lambda p, x, mask=mask: x * p["w"] * mask,
            "list": lambda p, x: x * p["w"] * held[0],
        }
        return fz.unit(made[kind])(params["blocks"][0], x).square().sum()  # type: ignore[no-any-return]

    step = fz.jit(fz.train_step(loss, fz.sgd(0.1)), backend="graph")
    state = step.init({"blocks": [{"w": torch.ones(3)}]})
    with pytest.raises(ValueError, match=r"'loss', test_jit_refused.py, line .* Pass it as an argument of the unit"):
        step(state, X)


CHECKED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cholesky": torch.linalg.cholesky,
    "inverse": lambda x: torch.linalg.inv(x.clamp(min=0)),
    "asserted": lambda x: (torch._assert_async(x[0, 0] > 0), x * 2)[1],  # type: ignore[func-returns-value]
}


@pytest.mark.parametrize("backend", ["graph", "inductor"])
@pytest.mark.parametrize("name", CHECKED)
def test_checks_of_torch_raise_as_without_a_graph(name: str, backend: str) -> None:
    unit = fz.unit(lambda p, x: CHECKED[name](x * p["w"]))
    step = fz.jit(fz.train_step(lambda p, x: unit(p["blocks"][0], x).sum(), fz.sgd(0.1)), backend=backend)
    state = step.init({"blocks": [{"w": torch.ones(3)}]})
    through = fz.jit(CHECKED[name], backend=backend)
    for call in (through, lambda x: step(state, x)):
        call(torch.eye(3))
        call(torch.eye(3))
        with pytest.raises(RuntimeError, match=r"linalg\.(cholesky|inv)|Expected Tensor with single nonzero"):
            call(-torch.eye(3))


def test_a_step_that_donates_is_refused_in_a_function() -> None:
    step = fz.donate(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
    with pytest.raises(TypeError, match=r"that fz\.jit transforms, .* Leave fz\.donate out"):
        fz.jit(lambda state: step(state, X)[0], backend="graph").lower(step.init({"w": torch.ones(3)}))


def test_a_step_whose_function_runs_another_is_named() -> None:
    inner = fz.train_step(lambda p, x: (p["w"] * x).square().sum(), fz.sgd(0.1))
    loss = lambda p, x: inner.forward(inner.init({"w": torch.ones(3)}), x * p["s"])
    step = fz.train_step(loss, fz.sgd(0.1))
    state = step.init({"s": torch.ones(3)})
    with pytest.raises(TypeError, match=r"in '<lambda>', test_jit_refused.py, line .*fz\.jit\(lambda state, x:"):
        fz.jit(step, backend="graph")(state, X)
    through = fz.jit(lambda state, x: step(state, x), backend="graph")
    for _ in range(2):
        torch.testing.assert_close(through(state, X)[1]["loss"], step(state, X)[1]["loss"])


def test_a_module_that_asks_for_a_value_is_named_by_the_functions_line() -> None:
    norm = torch.nn.BatchNorm1d(3, momentum=None)  # type: ignore[arg-type]
    apply, params, buffers = fz.functional(norm, buffers=True)
    loss = lambda p, carry, x: (lambda out, new: (out.sum(), new))(*apply(p, carry, x))
    step = fz.jit(fz.carry(fz.train_step(loss, fz.sgd(0.1)), buffers), backend="graph")
    with pytest.raises(ValueError, match=r"in '<lambda>', test_jit_refused.py, line \d+\) asks for the value"):
        step(step.init(params), X)


@dataclasses.dataclass(frozen=True)
class Hiding:
    x: torch.Tensor


HIDES = {"object": Hiding, "function": lambda x: lambda: x, "pullback": lambda x: torch.func.vjp(torch.sin, x)[1]}


@pytest.mark.parametrize("hide", HIDES.values(), ids=HIDES)
def test_a_result_that_hides_tensors_is_refused(hide: Callable[[torch.Tensor], Any]) -> None:
    fast = fz.jit(lambda x: {"hidden": hide(2 * x)}, backend="graph")
    for _ in range(2):
        with pytest.raises(ValueError, match="that holds tensors and is no pytree"):
            fast(X)


def test_an_aux_that_hides_tensors_is_refused() -> None:
    loss = lambda p, x: ((p["w"] * x).sum(), lambda: x)
    step = fz.train_step(loss, fz.sgd(0.1), has_aux=True)
    with pytest.raises(ValueError, match="a function that holds tensors and is no pytree"):
        fz.jit(step, backend="graph")(step.init({"w": torch.ones(3)}), X)
