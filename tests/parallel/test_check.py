"""check: right functions are accepted and are one process's; with a conversion left out or made twice they are not."""

from __future__ import annotations

import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checked import CASES, CHANGING, Case, Maps, Tree, cut, mlp, varying, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.comm.axis import Axis
from fzero.parallel import AxisTypeError

case_of = pytest.mark.parametrize("case", CASES, ids=lambda case: case.fn.__name__)


def checked(case: Case, m: Maps, size: int, rank: int = 0) -> fz.parallel.Report:
    """The report on a function, on a fake mesh."""
    with fz.testing.fake_mesh(dict.fromkeys(case.axes, size), rank) as mesh:
        axes = {name: fz.parallel.axis(mesh, name) for name in case.axes}
        params, inputs = cut(case, *whole(case, 0), axes)

        def fn(p: Tree, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            return case.fn(m, *axes.values(), p, x, *more)

        return fz.parallel.check(fn, params, *inputs, varying=varying(case))


def changing(case: Case, size: int = 2) -> list[tuple[int, str, int]]:
    """Number, name and line of the calls that change a type."""
    m = Maps()
    checked(case, m, size)
    return [(n, name, line) for n, (name, line) in enumerate(zip(m.names, m.lines, strict=True)) if name in CHANGING]


@in_turns(3)
@case_of
@pytest.mark.parametrize("size", [1, 2, 4])
def test_right_functions_are_accepted(case: Case, size: int) -> None:
    m = Maps()
    report = checked(case, m, size, size - 1)
    assert report.outputs == {"": ()}
    there = [each.name for each in report.conversions if not each.transposed]
    back = [each.name for each in report.conversions if each.transposed]
    assert sorted(there) == sorted(m.names)
    assert set(back) <= set(there) and "sum" in back
    assert (report.sent() > 0) == (report.messages() > 0) == (size > 1)


@case_of
def test_a_conversion_left_out_is_refused_where_it_is_missing(case: Case) -> None:
    for number, name, line in changing(case):
        with pytest.raises(AxisTypeError) as caught:
            checked(case, Maps(left_out=number), 2)
        place, text = caught.value.place, str(caught.value)
        if place is None:
            assert "the output varies on axis" in text and "fz.parallel.sum or gather is missing" in text
            continue
        assert place.file.endswith("checked.py") and place.function in (case.fn.__name__, "<listcomp>")
        assert line <= place.line <= line + 10, (name, text)
        assert "missing" in text and any(f"axis {axis!r}" in text for axis in case.axes)


@case_of
def test_a_conversion_made_twice_is_refused(case: Case) -> None:
    for number, name, _ in changing(case):
        with pytest.raises(AxisTypeError, match=rf"fz\.parallel\.{name} takes a value that is .* too many"):
            checked(case, Maps(twice=number), 2)


# ---- what is accepted is right, and what is refused is not


def grads_on(case: Case, m: Callable[[], Maps], rank: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss and whole gradients, pieces joined, on each rank of a process group."""
    size = torch.distributed.get_world_size()
    sizes = (size,) if len(case.axes) == 1 else (size // 2, 2) if size > 1 else (1, 1)
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=case.axes)
    axes = {name: fz.parallel.axis(mesh, name) for name in case.axes}
    params, inputs = cut(case, *whole(case, 0), axes)

    tree = params if case.integers else params | {"x": inputs.pop(0)}

    def loss(tree: Tree) -> torch.Tensor:
        return case.fn(m(), *axes.values(), tree, *([] if case.integers else [tree["x"]]), *inputs)

    grads = torch.func.grad(loss)(tree)
    for name, (axis, dim) in case.cut.items():
        grads[name] = fz.parallel.gather(grads[name], axes[axis], dim)
    return loss(tree), grads


def same(case: Case, answers: list[Any]) -> bool:
    """Whether all ranks have the loss and the gradients of one process."""
    [(loss, grads)] = fz.testing.run_ranks(functools.partial(grads_on, case, Maps), 1)
    expected = [loss, *grads.values()]
    found = [[loss, *grads.values()] for loss, grads in answers]
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-10, atol=1e-12)
        for each in found
        for a, b in zip(each, expected, strict=True)
    )


@case_of
def test_what_is_accepted_is_one_process(case: Case) -> None:
    with fz.testing.hazards():
        assert same(case, fz.testing.run_ranks(functools.partial(grads_on, case, Maps), 2 * len(case.axes)))


@in_turns(5)
@case_of
def test_what_is_refused_is_wrong(case: Case) -> None:
    ranks = 2 * len(case.axes)
    for kind, (number, name, _) in [(kind, each) for kind in ("left_out", "twice") for each in changing(case)]:
        if kind == "twice" and name in ("gather", "split"):
            continue  # shapes do not fit
        try:
            answers = fz.testing.run_ranks(
                functools.partial(grads_on, case, functools.partial(Maps, **{kind: number})), ranks, checked=False
            )
        except fz.testing.RankError as error:  # a pullback has seen it
            assert "gave its result different cotangents" in str(error)
            continue
        if case.fn.__name__ == "vocabulary" and name == "gather":
            continue  # a constant that cancels
        assert not same(case, answers), (kind, name, number)


# ---- drawn functions

Step = tuple[str, tuple[int, ...]]
SIDE = 3
# invariant, varying, replicated (the same, as each rank's own)
TAKES = {"copy": "I", "split": "I", **dict.fromkeys(("sum", "gather", "reduce_scatter", "ring_shift"), "VR")}
GIVES = {"copy": "R", "split": "V", "sum": "I", "gather": "I", "reduce_scatter": "V", "ring_shift": "V"}
BINARY: dict[str, Callable[..., torch.Tensor]] = {"add": operator.add, "mul": operator.mul, "matmul": operator.matmul}
UNARY: dict[str, Callable[..., torch.Tensor]] = {"tanh": torch.tanh, "t": torch.t, "detach": torch.detach}


class Value:
    """What the model knows of a value: its type, and whether it has a derivative."""

    def __init__(self, kind: str, differentiable: bool) -> None:
        self.kind, self.differentiable = kind, differentiable


def modelled(known: list[Value], name: str, operands: tuple[int, ...]) -> Value | None:
    """The value that a step makes; None where it is refused."""
    given = [known[i] for i in operands]
    differentiable = name != "detach" and any(each.differentiable for each in given)
    if name in TAKES:
        return Value(GIVES[name], differentiable) if given[0].kind in TAKES[name] else None
    kinds = {each.kind for each in given}
    kind = "V" if "V" in kinds else "R" if "R" in kinds else "I"
    mixed = kind != "I" and any(each.kind == "I" and each.differentiable for each in given)
    return None if mixed else Value(kind, differentiable)


@st.composite
def programs(draw: st.DrawFn) -> tuple[list[Step], bool]:
    """Steps on an invariant value (0) and a varying one (1), mostly right, and whether a loss of the last one is."""
    known, steps, right = [Value("I", True), Value("V", True)], [], True
    for _ in range(draw(st.integers(1, 8))):
        for _ in range(8):
            name = draw(st.sampled_from([*TAKES, *BINARY, *UNARY]))
            operands = tuple(draw(st.integers(0, len(known) - 1)) for _ in range(2 if name in BINARY else 1))
            value = modelled(known, name, operands)
            if value is not None or draw(st.integers(0, 15)) == 0:
                break
        steps.append((name, operands))
        right = right and value is not None
        known.append(value or Value("V", True))
    while right and known[-1].kind == "V" and draw(st.integers(0, 3)):
        steps.append(("sum", (len(known) - 1,)))
        known.append(Value("I", known[-1].differentiable))
    return steps, right and known[-1].kind == "I"


def on_rank(ax: Axis, steps: list[Step], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The loss as the ranks compute it."""
    values, size = [x, y], ax.size
    for name, operands in steps:
        first, *rest = [values[i] for i in operands]
        if name in BINARY or name in UNARY:
            values.append((BINARY | UNARY)[name](first, *rest))
        elif name in ("split", "reduce_scatter"):
            joined = torch.cat([first * (rank + 1) for rank in range(size)])
            values.append(getattr(fz.parallel, name)(joined, ax, 0))
        elif name == "gather":
            pieces = fz.parallel.gather(first, ax, 0).view(size, SIDE, SIDE)
            values.append((pieces * torch.arange(1.0, size + 1, dtype=first.dtype)[:, None, None]).sum(0))
        else:
            values.append(getattr(fz.parallel, name)(first, ax))
    return values[-1].square().sum()


def in_one_process(size: int, steps: list[Step], x: torch.Tensor, pieces: torch.Tensor) -> torch.Tensor:
    """The same loss by plain torch: a varying value is the list of what the ranks have."""
    values: list[Any] = [x, [*pieces]]
    for name, operands in steps:
        given = [values[i] for i in operands]
        first = given[0]
        if name in BINARY or name in UNARY:
            call = (BINARY | UNARY)[name]
            spread = [each if isinstance(each, list) else [each] * size for each in given]
            values.append(list(map(call, *spread)) if any(isinstance(each, list) for each in given) else call(*given))
        elif name in ("copy", "split"):
            values.append([first * (rank + 1 if name == "split" else 1) for rank in range(size)])
        elif name == "ring_shift":
            values.append([first[rank - 1] for rank in range(size)])
        elif name == "reduce_scatter":
            values.append([functools.reduce(operator.add, first) * (rank + 1) for rank in range(size)])
        else:
            terms = [each * (rank + 1 if name == "gather" else 1) for rank, each in enumerate(first)]
            values.append(functools.reduce(operator.add, terms))
    return values[-1].square().sum()


def drawn_inputs(size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64) / 2, (
        torch.randn(size, SIDE, SIDE, generator=generator, dtype=torch.float64) / 2
    )


@settings(max_examples=150)
@given(program=programs(), size=st.integers(1, 4))
def test_drawn_functions_are_judged_as_the_model_says(program: tuple[list[Step], bool], size: int) -> None:
    steps, right = program
    with fz.testing.fake_mesh({"tp": size}, size // 2) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        fn = functools.partial(on_rank, ax, steps)
        inputs = torch.empty(SIDE, SIDE), torch.empty(SIDE, SIDE)
        if right:
            report = fz.parallel.check(fn, *inputs, varying={"y": "tp"})
            met = [each.name for each in report.conversions if not each.transposed]
            assert met == [name for name, _ in steps if name in TAKES]
        else:
            with pytest.raises(AxisTypeError):
                fz.parallel.check(fn, *inputs, varying={"y": "tp"})


@settings(max_examples=40)
@given(program=programs().filter(lambda program: program[1]), size=st.integers(2, 4), seed=st.integers(0, 99))
def test_drawn_functions_that_are_accepted_are_one_process(
    program: tuple[list[Step], bool], size: int, seed: int
) -> None:
    """Losses, gradients, and Hessians times a vector."""
    steps, _ = program
    x, pieces = drawn_inputs(size, seed)

    def derivatives(loss: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        gradient: Any = torch.func.grad(loss, argnums=(0, 1))
        jvp: Any = torch.func.jvp
        grads, products = jvp(gradient, (x, y), (torch.cos(x), torch.sin(y)))
        return [loss(x, y), *grads, *products]

    def rank_main(rank: int) -> list[torch.Tensor]:
        ax = fz.parallel.axis(None, "tp")
        return derivatives(functools.partial(on_rank, ax, steps), x, pieces[rank].clone())

    expected = derivatives(functools.partial(in_one_process, size, steps), x, pieces)
    with fz.testing.hazards():
        answers = fz.testing.run_ranks(rank_main, size)
    for rank, found in enumerate(answers):
        own = [each if each.ndim < 3 else each[rank] for each in expected]
        for a, b in zip(found, own, strict=True):
            scale = b.abs().max().item() + 1.0
            assert (a - b).abs().max().item() <= 1e-10 * scale


# ---- what else functions do


def test_torch_func_inside() -> None:
    """A gradient penalty, a map over examples, tangents: types are those below all levels."""

    def fn(m: Any, ax: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
        def energy(x: torch.Tensor) -> torch.Tensor:
            return m.sum(torch.tanh(m.copy(x, ax) @ p["up"]) @ p["down"], ax).sum()

        slopes = torch.vmap(torch.func.grad(energy))(x)
        jvp: Any = torch.func.jvp
        _, along = jvp(energy, (x,), (torch.ones_like(x),))
        return slopes.square().sum() + along.square() + energy(x)

    def refused(m: Maps) -> bool:
        with fz.testing.fake_mesh({"tp": 2}) as mesh:
            ax = fz.parallel.axis(mesh, "tp")
            p, x = {"up": torch.empty(4, 3), "down": torch.empty(3, 1)}, torch.empty(5, 4)
            call = lambda p, x: fn(m, ax, p, x)
            try:
                report = fz.parallel.check(call, p, x, varying={"p.*": "tp"})
            except AxisTypeError:
                return True
            assert report.outputs == {"": ()}
            return False

    m = Maps()
    assert not refused(m)
    assert len(m.names) == 6
    for number in range(len(m.names)):
        # without the first sum the ranks' slopes are the same: what a gradient starts with is a constant
        assert refused(Maps(left_out=number)) == (number != 0) and refused(Maps(twice=number))


def judged(fn: Callable[..., object], *inputs: object, size: int = 2, **more: Any) -> fz.parallel.Report:
    """The report on `fn(axis, *inputs)`."""
    with fz.testing.fake_mesh({"tp": size}) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        return fz.parallel.check(functools.partial(fn, ax), *inputs, **more)


ONE = torch.ones(4)
V = {"v": "tp"}


@pytest.mark.parametrize(
    "fn",
    [
        lambda ax, v, x: fz.parallel.sum(torch.where(torch.arange(4) > 2, v, 0.0), ax),
        lambda ax, v, x: fz.parallel.sum(v * x.detach() + torch.zeros_like(x), ax),
        lambda ax, v, x: fz.parallel.sum(v * (x > 0), ax),
        lambda ax, v, x: fz.parallel.sum(v[x.argsort()], ax),
        lambda ax, v, x: fz.parallel.sum(v * x.new_full((4,), 2.0), ax) + x,
        lambda ax, v, x: fz.parallel.sum(torch.nn.functional.dropout(v), ax) * torch.nn.functional.dropout(x),
        lambda ax, v, x: fz.parallel.sum(torch.zeros(4).add_(v).mul_(2), ax).add_(x),
        lambda ax, v, x: x / fz.parallel.sum(torch.ones(()), ax),
        lambda ax, v, x: fz.parallel.sum(v + fz.parallel.copy(torch.ones(4), ax), ax) + x,
        lambda ax, v, x: (fz.parallel.sum((v > 0).sum(), ax), x),
        lambda ax, v, x: {"loss": fz.parallel.gather(v, ax, 0).view(2, 4).sum(0) + x, "n": 3, "none": None},
    ],
)
def test_accepted(fn: Callable[..., object]) -> None:
    judged(fn, ONE, ONE, varying=V)


@pytest.mark.parametrize(
    "fn",
    [
        lambda ax, v, x: v,
        lambda ax, v, x: (x, fz.parallel.sum(v, ax), v.detach()),
        lambda ax, v, x: fz.parallel.sum(v * x, ax),
        lambda ax, v, x: fz.parallel.sum(torch.cat([v, x]), ax),
        lambda ax, v, x: fz.parallel.sum(torch.stack([v, v]) * x.view(2, 2).t().flatten(), ax),
        lambda ax, v, x: torch.zeros(4).add_(v),
        lambda ax, v, x: torch.zeros(4, 2).t().copy_(v).sum(),
        lambda ax, v, x: (x.clone().mul_(2) * 3).add_(v),
        lambda ax, v, x: fz.parallel.sum((v > 0).sum(), ax) + (v > 0).sum(),
        lambda ax, v, x: fz.parallel.all_to_all(x.view(2, 2), ax, 0, 1).sum(),
        lambda ax, v, x: fz.parallel.sum(fz.parallel.ring_shift(x, ax), ax),
        lambda ax, v, x: fz.parallel.reduce_scatter(x, ax, 0),
        lambda ax, v, x: torch.func.grad(lambda x: (x * v).sum())(x),
        lambda ax, v, x: fz.parallel.sum(torch.nn.functional.dropout(x), ax),
    ],
)
def test_refused(fn: Callable[..., object]) -> None:
    with pytest.raises(AxisTypeError, match="'tp'"):
        judged(fn, ONE, ONE, varying=V)


def test_a_write_through_a_view_types_its_base() -> None:
    def fn(ax: Axis, v: torch.Tensor) -> torch.Tensor:
        buffer = torch.zeros(2, 4)
        buffer[0] = v
        return buffer[1].sum()

    with pytest.raises(AxisTypeError, match="output varies"):
        judged(fn, ONE, varying=V)


def test_constants_and_outputs_are_declared() -> None:
    fn = lambda ax, v, mask: v * mask
    with pytest.raises(AxisTypeError, match="'mask'"):
        judged(fn, ONE, ONE, varying=V)
    with pytest.raises(AxisTypeError, match=r"the output varies on axis 'tp'.*sum or gather is missing"):
        judged(fn, ONE, ONE, varying=V, constants="mask")
    report = judged(fn, ONE, ONE, varying=V, constants="mask", outputs={"*": "tp"})
    assert report.outputs == {"": ("tp",)} and "the output: varies on tp" in str(report)
    with pytest.raises(AxisTypeError, match="is invariant on axis 'tp'"):
        judged(lambda ax, v, x: {"a": {"b": x}}, ONE, ONE, varying=V, outputs={"a.b": "tp"})


def test_nothing_is_checked_on_axes_that_are_averaged_over() -> None:
    """The same function, with copies and sums, is right there too."""
    fn = lambda ax, v, x: fz.parallel.sum(v * x, ax).sum() * v.mean()
    assert judged(fn, ONE, ONE, averaged="tp").outputs == {"": ()}
    with pytest.raises(AxisTypeError):
        judged(fn, ONE, ONE, varying=V)


def test_several_axes_as_one() -> None:
    with fz.testing.fake_mesh({"dp": 2, "tp": 3}) as mesh:
        both, tp = fz.parallel.axis(mesh, ("dp", "tp")), fz.parallel.axis(mesh, "tp")
        report = fz.parallel.check(lambda x: fz.parallel.sum(x.sum(), both), ONE, varying={"x": ("dp", "tp")})
        assert report.outputs == {"": ()} and report.sent() == 20
        with pytest.raises(AxisTypeError, match="'dp'"):
            fz.parallel.check(lambda x: fz.parallel.sum(x.sum(), tp), ONE, varying={"x": ("dp", "tp")})
        with pytest.raises(AxisTypeError, match=r"invariant.*added up"):
            fz.parallel.check(lambda x: fz.parallel.sum(x.sum(), both), ONE, varying={"x": "dp"})


def test_captured_params_are_invariant() -> None:
    layer = torch.nn.Linear(4, 4)
    with pytest.raises(AxisTypeError, match="that the function captures"):
        judged(lambda ax, v: fz.parallel.sum(layer(v), ax), ONE, varying=V)
    layer.requires_grad_(False)
    judged(lambda ax, v: fz.parallel.sum(layer(v), ax), ONE, varying=V)


def test_functions_that_read_values() -> None:
    def fn(ax: Axis, v: torch.Tensor) -> torch.Tensor:
        if (v.sum() > 0).item():
            v = v[v > 0.5]
        return fz.parallel.sum(v.sum(), ax)

    with pytest.raises(TypeError, match=r"test_check.py:\d+, in fn.*reads a tensor's value.*values=True"):
        judged(fn, ONE, varying=V)
    assert judged(fn, ONE, varying=V, values=True).outputs == {"": ()}
    with pytest.raises(TypeError, match="has not"):
        judged(fn, torch.empty(4, device="meta"), varying=V, values=True)
    with pytest.raises(TypeError, match="reads a tensor's value"):
        judged(lambda ax, v: v[v > 0].sum(), ONE, varying=V)


def test_an_error_of_the_function_itself_is_raised_as_it_is() -> None:
    with pytest.raises(RuntimeError, match="reduction dim") as caught:
        judged(lambda ax, v: v @ torch.ones(3, 3), ONE)
    assert any("test_check.py" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError):
        judged(lambda ax, v: 1 // 0, ONE)


def test_wrong_arguments() -> None:
    fn = lambda ax, v: v
    with pytest.raises(TypeError, match="fn=3"):
        fz.parallel.check(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"varying with 'w', which matches no tensor.*'v'"):
        judged(fn, ONE, varying={"w": "tp"})
    with pytest.raises(ValueError, match="constants with 'w'"):
        judged(fn, ONE, constants="w")
    with pytest.raises(ValueError, match="outputs with 'loss', which matches no output"):
        judged(fn, ONE, outputs={"loss": "tp"})
    with pytest.raises(TypeError, match="a dict of patterns"):
        judged(fn, ONE, varying="tp")
    with pytest.raises(TypeError, match="name of an axis"):
        judged(fn, ONE, varying={"v": 0})
    error = pickle.loads(pickle.dumps(AxisTypeError("words", None)))
    assert str(error) == "words" and error.place is None


# ---- replicated values, pieces and summands


def forms(fn: Callable[..., object], **more: Any) -> fz.parallel.Report:
    """The report on `fn(axis, x, up, down, bias)`, whose matrices are cut along what is between them."""
    x, up, down, bias = torch.empty(2, 4, 6), torch.empty(6, 4), torch.empty(4, 6), torch.empty(6)
    return judged(fn, x, up, down, bias, varying={"up": {"tp": 1}, "down": {"tp": 0}}, **more)


def test_what_is_added_to_a_summand() -> None:
    def fn(before: bool, ax: Axis, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> Any:
        h = torch.relu(fz.parallel.copy(x, ax) @ up)
        if before:
            return fz.parallel.sum(h @ down + fz.parallel.copy(bias, ax), ax)
        return fz.parallel.sum(h @ down, ax) + bias

    forms(functools.partial(fn, False))
    with pytest.raises(AxisTypeError, match=r"add takes a value that is partial on axis 'tp'.*once for each rank"):
        forms(functools.partial(fn, True))


LINEAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "orders": lambda s: s.flip(0).roll(1, 1).tril().cumsum(-1).view_as(s).type_as(s),
    "sums": lambda s: (s + s * 2 - s / 3).mean(-1),
    "in place": lambda s: s.clone().add_(s).mul_(2),
    "of a buffer": lambda s: operator.iadd(torch.zeros_like(s).add_(s), s),
    "of another buffer": lambda s: operator.iadd(torch.zeros_like(s), s),
    "repeated": lambda s: s.repeat(2, 1, 1) @ torch.ones(6, 2),
    "overwritten": lambda s: s.clone().zero_(),
}
THREE: Any = np.float32(3)
NOT_LINEAR: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a number": lambda s: s + 3.0,
    "a number of numpy": lambda s: s + THREE,
    "a constant": lambda s: s + torch.ones(6),
    "minus": lambda s: 1 - s,
    "a bias": lambda s: F.linear(s, torch.ones(6, 6), torch.ones(6)),
    "in place": lambda s: s.clone().relu_(),
    "said to be in place": lambda s: F.relu(s.clone(), inplace=True),
    "added in place": lambda s: s.clone().add_(1.0),
    "by an operator": lambda s: operator.iadd(s.clone(), 1.0),
    "dropped": lambda s: F.dropout(s, 0.5),
    "where": lambda s: torch.where(s > 0, s, 0.0),
    "filled": lambda s: s.masked_fill(torch.ones(6) > 0, 1.0),
    "a norm": lambda s: F.normalize(s, dim=-1),
    "sorted": lambda s: s.sort(-1)[0],
    "a product": lambda s: s.prod(-1),
    "in groups": lambda s: F.group_norm(s, 2),
    "by another name": lambda s: torch.special.expit(s),
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_of_a_summand(name: str) -> None:
    forms(lambda ax, x, up, down, bias: fz.parallel.sum(LINEAR[name](fz.parallel.copy(x, ax) @ up @ down), ax))


@pytest.mark.parametrize("name", NOT_LINEAR)
def test_what_is_not_linear_of_a_summand(name: str) -> None:
    with pytest.raises(AxisTypeError, match=r"partial on axis 'tp'"):
        forms(lambda ax, x, up, down, bias: fz.parallel.sum(NOT_LINEAR[name](fz.parallel.copy(x, ax) @ up @ down), ax))


@pytest.mark.parametrize("scatter", [True, False])
def test_a_slice_in_place_of_a_reduce_scatter(scatter: bool) -> None:
    def fn(ax: Axis, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        own = fz.parallel.split(x, ax, 1)
        part = torch.relu(fz.parallel.copy(fz.parallel.gather(own, ax, 1), ax) @ up) @ down
        out = own + (fz.parallel.reduce_scatter(part, ax, 1) if scatter else part[:, :2])
        return fz.parallel.sum(out.square().sum(), ax)

    if scatter:
        forms(fn)
    else:
        with pytest.raises(AxisTypeError, match=r"add takes a value that is partial on axis 'tp'"):
            forms(fn)


def test_pieces_are_followed_through_views() -> None:
    def fn(ax: Axis, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        heads = (fz.parallel.copy(x, ax) @ up).view(2, 4, 2, 2).transpose(1, 2)
        return torch.softmax(heads, -1).permute(0, 2, 1, 3).unsqueeze(0).squeeze(0)

    assert forms(fn, outputs={"*": {"tp": 2}}).outputs == {"": ("tp",)}


# ---- on ranks that there are


def _bytes_on(case: Case, rank: int) -> tuple[Any, int, int, int, int]:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=case.axes)
    axes = {name: fz.parallel.axis(mesh, name) for name in case.axes}
    params, inputs = cut(case, *whole(case, 0), axes)

    def fn(p: Tree, x: torch.Tensor) -> torch.Tensor:
        return case.fn(Maps(), *axes.values(), p, x)

    with fz.testing.recorded_collectives() as dry:
        report = fz.parallel.check(fn, params, *inputs, varying=varying(case))
    with fz.testing.recorded_collectives() as real:
        torch.func.grad(fn, argnums=(0, 1))(params, *inputs)
    kept = [size for _, what, size in real if "cotangents" not in str(what)]  # as in a step, where they are proven
    return dry, report.messages(), report.sent(), len(kept), sum(kept)


@pytest.mark.parametrize(("number", "ranks"), [(0, 3), (3, 3), (4, 2), (5, 2), (6, 3)])
def test_a_dry_run_sends_nothing_and_counts_what_a_run_sends(number: int, ranks: int) -> None:
    """Also where pieces are uneven."""
    answers = fz.testing.run_ranks(functools.partial(_bytes_on, CASES[number]), ranks)
    for dry, messages, sent, calls, size in answers:
        assert not dry
        assert (messages, sent) == (calls, size)


def test_thousands_of_ranks() -> None:
    with fz.testing.fake_mesh({"dp": 512, "tp": 8}, rank=4095) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        p = {"norm": torch.empty(1 << 14), "up": torch.empty(1 << 14, 1 << 13), "down": torch.empty(1 << 13, 1 << 14)}
        p = {name: each.to("meta") for name, each in p.items()}
        x = torch.empty(64, 4096, 1 << 14, device="meta", dtype=torch.bfloat16)
        p = {name: each.bfloat16() for name, each in p.items()}
        report = fz.parallel.check(lambda p, x: mlp(Maps(), ax, p, x), p, x, varying={"p.up|p.down": "tp"})
        assert report.sent("tp") == 2 * 2 * x.nbytes * 7 // 8 and report.sent("dp") == 0
        assert ax.rank == 7


def test_fake_meshes() -> None:
    for axes, rank, words in [({}, 0, "axes"), ({"tp": 0}, 0, "at least 1"), ({"tp": 2}, 2, "rank=2"), (3, 0, "axes")]:
        with pytest.raises((TypeError, ValueError), match=words), fz.testing.fake_mesh(axes, rank):  # type: ignore[arg-type]
            pass
    with fz.testing.fake_mesh({"a": 2}), pytest.raises(RuntimeError, match="already"), fz.testing.fake_mesh({"a": 2}):
        pass
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(("numel", "ranks"), [(40_000, 3), (9_000, 3), (40_000, 2)])
def test_values_of_a_dry_run_are_those_of_equal_ranks(numel: int, ranks: int) -> None:
    """Also of sums that are large enough to be sent in two rounds: as many rows are made as an input says."""
    counts = torch.zeros(numel, dtype=torch.long)
    counts[:3] = torch.tensor([2, 1, 3])
    params = {"up": torch.ones(2, 6, dtype=torch.float64), "down": torch.ones(6, 2, dtype=torch.float64)}

    def main(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
        ax = fz.parallel.axis(mesh, "tp")

        def loss(p: Any, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            own = fz.parallel.sum(fz.parallel.copy(counts, ax), ax) // ax.size
            y = fz.parallel.copy(x * x.new_ones(len(torch.repeat_interleave(own)), 1), ax)
            return fz.parallel.sum(torch.tanh(y @ p["up"]) @ p["down"], ax).square().mean()

        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"up": 1, "down": 0}, mesh=mesh)
        _, metrics = step(step.init(params), torch.ones(6, 2, dtype=torch.float64), counts)
        want = (torch.tanh(torch.ones(6, 2, dtype=torch.float64) @ params["up"]) @ params["down"]).square().mean()
        torch.testing.assert_close(metrics["loss"], want)

    fz.testing.run_ranks(main, ranks)
