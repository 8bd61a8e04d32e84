"""Numbers of Python in a graph: what they make of each other and of tensors is what it is without, or is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fzero as fz

GENERATOR = torch.Generator().manual_seed(0)
TENSORS = {
    f"{name}{'' if shape else '0'}": (torch.rand(shape, generator=GENERATOR) * 3 + 0.5).to(dtype)
    for name, dtype in (("x", torch.float32), ("y", torch.float64), ("z", torch.bfloat16), ("i", torch.int64))
    for shape in ((5,), ())
}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 1e-2, torch.complex64: 1e-6}
NUMBERS = "n", "m", "a", "b"  # two ints and two floats
FIRST, SECOND = (3, 1, 0.3, 1.7), (2, 5, 0.1, 2.5)

leaves = st.sampled_from([*NUMBERS * 3, *TENSORS, "2", "0.1", "3", "True", "1j", "(n > 2)", "torch.tensor(a)"])
plain = st.sampled_from([*NUMBERS, *TENSORS, "2", "0.1"])
few = st.one_of(
    st.builds("({} {} {})".format, plain, st.sampled_from(["//", "%"]), plain),
    st.builds("({} ** {})".format, plain, plain),
    leaves,
)
expressions = st.recursive(
    few,
    lambda own: st.one_of(
        st.builds("({} {} {})".format, own, st.sampled_from(["+", "-", "*", "/", "*", "+"]), own),
        st.builds("({} {} {})".format, own, st.sampled_from(["<", "==", ">="]), own),
        st.builds("(-{})".format, own),
        st.builds("abs({})".format, own),
        st.builds("torch.where(x > 1, {}, {})".format, own, own),
        st.builds("torch.as_tensor({})".format, own),
        st.builds("unit({}, {})".format, st.just("x"), own),
    ),
    max_leaves=6,
)
unit = fz.unit(lambda x, own: (own, own * 2))


def function_of(expression: str) -> Any:
    source = f"lambda n, m, a, b: {expression}"
    return eval(source, {"torch": torch, "unit": lambda x, own: unit(x, own)[1], **TENSORS})


@pytest.mark.filterwarnings("ignore:B?Complex.* support is experimental:UserWarning")  # torch's, once in a process
@given(expressions)
def test_numbers_of_python_make_what_they_make_without_a_graph(expression: str) -> None:
    fn = function_of(expression)
    try:
        fn(*FIRST)
        want = fn(*SECOND)
    except (TypeError, RuntimeError, ZeroDivisionError, OverflowError):
        assume(False)
    fast = fz.jit(fn, backend="graph")
    try:
        fast(*FIRST)
        got = fast(*SECOND)
    except ValueError as error:
        assert str(error).startswith("jit: the function (in '<lambda>'"), error
        return
    assert fast.traces == 1 and type(got) is type(want), (got, want)
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype, (got.dtype, want.dtype)
        torch.testing.assert_close(got, want, rtol=TOLERANCE.get(want.dtype, 0), atol=0, equal_nan=True)
    else:
        assert got == want or abs(got - want) <= 1e-15 * abs(want), (got, want)


X = TENSORS["x"]
REFUSED = {
    "math": lambda n: X * math.sqrt(n),
    "range": lambda n: sum(X for _ in range(n)),
    "float": lambda n: X * float(n),
    "complex": lambda n: X * complex(n, 1),
    "numpy": lambda n: X * numpy.sqrt(n),
    "full": lambda n: torch.full((), n * 0.1),
    "zeros": lambda n: torch.zeros(n),
    "slice": lambda n: X[:n],
    "alpha": lambda n: torch.add(X, X, alpha=n),
    "round": lambda n: X * round(n),
    "divmod": lambda n: X * divmod(n, 2)[0],
    "min": lambda n: X * min(n, 3),
    "branch": lambda n: X if n > 1 else 2 * X,
    "power": lambda n: X * 2**n,
    "text": lambda n: X * len(f"{n}"),
    "repr": lambda n: X * len(str([n])),
    "power of integers": lambda n: TENSORS["i"] ** n,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_asks_for_a_number_is_refused(name: str) -> None:
    fast = fz.jit(REFUSED[name], backend="graph")
    with pytest.raises(ValueError, match=r"in '<lambda>', test_jit_numbers.py, line \d+.*static"):
        fast(2)
    static: Any = fz.jit(REFUSED[name], backend="graph", static_argnums=0)
    for n in (1, 2, 1, 2):
        torch.testing.assert_close(static(n), REFUSED[name](n))
    assert static.traces == 2


def test_numbers_of_a_step() -> None:
    def loss(params: Any, x: torch.Tensor, n: int, a: float) -> torch.Tensor:
        out, twice = unit(params["blocks"][0], n * a)
        return ((x @ params["o"]) * 0.1 * n + out + twice / n).square().mean() + torch.where(x > 1, a, n / 7).mean()

    drawn = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)
    params = {"blocks": [{"w": drawn(2)}], "o": drawn(4, 2)}
    step = fz.train_step(loss, fz.sgd(0.1))
    fast = fz.jit(step, backend="graph")
    state, other = step.init(params), fast.init(params)
    for n in (1, 3, 7):
        x = drawn(3, 4)
        state, metrics = step(state, x, n, 0.3)
        other, found = fast(other, x, n, 0.3)
        torch.testing.assert_close(found["loss"], metrics["loss"], rtol=1e-14, atol=0)
        torch.testing.assert_close(other.params["o"], state.params["o"], rtol=1e-13, atol=1e-15)
    assert fast.traces == 1


def test_a_number_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 64 bits"):
        fz.jit(lambda n: X * n, backend="graph")(2**70)


@pytest.mark.parametrize("fn", [lambda n, x: n * x, lambda n, x: n * x.sum(), lambda n, x: (1 - n) * x + n * x.flip(0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_number_before_a_tensor_of_few_bits_is_not_rounded(fn: Any, dtype: torch.dtype) -> None:
    fast, x = fz.jit(fn, backend="graph"), (X * 1e-4).to(dtype)
    for n in (0.3, 0.1, 1e6):
        assert torch.equal(fast(n, x), fn(n, x))
