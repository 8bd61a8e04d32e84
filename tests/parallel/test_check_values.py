"""check with values: all ranks are played, and what is accepted is one process, also where types say nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checked import CASES, Case, Maps, Tree, cut, whole
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.comm.axis import Axis
from fzero.parallel import AxisTypeError

# ---- functions that are there


def report_on(case: Case, m: Maps, size: int, rank: int = 0) -> fz.parallel.Report:
    with fz.testing.fake_mesh(dict.fromkeys(case.axes, size), rank) as mesh:
        axes = {name: fz.parallel.axis(mesh, name) for name in case.axes}
        params, inputs = cut(case, *whole(case, 0), axes)

        def fn(p: Tree, x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
            return case.fn(m, *axes.values(), p, x, *more)

        dims = {"x" if name == "x" else f"p.{name}": {axis: dim} for name, (axis, dim) in case.cut.items()}
        return fz.parallel.check(fn, params, *inputs, varying=dims, values=True)


@in_turns(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.fn.__name__)
@pytest.mark.parametrize("size", [2, 4])
def test_each_map_left_out_is_refused(case: Case, size: int) -> None:
    """Also those that take and give values of one type."""
    m = Maps()
    report = report_on(case, m, size, size - 1)
    assert report.played == dict.fromkeys(case.axes, size) and "one process's values" in str(report)
    for number in range(len(m.names)):
        with pytest.raises(AxisTypeError):
            report_on(case, Maps(left_out=number), size)


# ---- drawn functions: a matrix that all have, of which ranks have rows or columns, or summands

SIDE = 4
# name -> (what it takes, what it gives)
STEPS: dict[str, tuple[str, str]] = {
    "split rows": ("whole", "rows"),
    "split columns": ("whole", "columns"),
    "own columns": ("whole", "columns"),
    "gather rows": ("rows", "whole"),
    "gather columns": ("columns", "whole"),
    "to columns": ("rows", "columns"),
    "to rows": ("columns", "rows"),
    "transpose": ("rows", "columns"),
    "softmax": ("rows", "rows"),
    "times all": ("rows", "rows"),
    "times own": ("columns", "summands"),
    "sum": ("summands", "whole"),
    "scatter rows": ("summands", "rows"),
    "scatter columns": ("summands", "columns"),
    "add y": ("rows", "rows"),
    "turn": ("rows", "rows"),
}


@st.composite
def programs(draw: st.DrawFn) -> list[str]:
    """Steps on a whole matrix, until it is whole again."""
    steps, kind = [], "whole"
    for number in range(12):
        names = [name for name, (takes, gives) in STEPS.items() if takes == kind and (number < 6 or gives != takes)]
        if number >= 6:
            names = [name for name in names if STEPS[name][1] == "whole"] or names
        steps.append(draw(st.sampled_from(names)))
        kind = STEPS[steps[-1]][1]
        if kind == "whole" and (number >= 6 or draw(st.booleans())):
            break
    return (
        steps
        if kind == "whole"
        else [*steps, *{"rows": ["gather rows"], "columns": ["gather columns"]}.get(kind, ["sum"])]
    )


def on_rank(
    steps: list[str], scaled: int | None, m: Any, ax: Axis, w: torch.Tensor, y: torch.Tensor, x: torch.Tensor
) -> torch.Tensor:
    """The loss of what a rank has; after one step it is multiplied by a number that depends on the rank."""
    for number, name in enumerate(steps):
        if name == "split rows":
            x = m.split(x, ax, 0)
        elif name == "split columns":
            x = m.split(x, ax, 1)
        elif name == "own columns":
            x = m.copy(x, ax) @ m.split(w, ax, 1)
        elif name.startswith("gather"):
            x = m.gather(x, ax, int(name == "gather columns"))
        elif name == "to columns":
            x = m.all_to_all(x, ax, 1, 0)
        elif name == "to rows":
            x = m.all_to_all(x, ax, 0, 1)
        elif name == "transpose":
            x = x.t()
        elif name == "softmax":
            x = torch.softmax(x, 1)
        elif name == "times all":
            x = x @ m.copy(w, ax)
        elif name == "times own":
            x = x @ m.split(w, ax, 0)
        elif name == "sum":
            x = m.sum(x, ax)
        elif name.startswith("scatter"):
            x = m.reduce_scatter(x, ax, int(name == "scatter columns"))
        elif name == "add y":
            x = x + y
        else:  # all the way round
            for _ in range(ax.size):
                x = m.ring_shift(x, ax)
        if STEPS[name][1] != "summands":
            x = torch.sin(x)
        if number == scaled:
            x = x * (1 + ax.rank)
    return x.square().sum()


def drawn_inputs(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIDE, SIDE, dtype=torch.float64, generator=generator) for _ in range(3)]


def answers(fn: Callable[..., torch.Tensor], inputs: list[torch.Tensor], ax: Axis) -> list[Any]:
    """The loss, and whole gradients."""
    w, y, x = inputs
    y = y.chunk(ax.size)[ax.rank]
    grads: Any = torch.func.grad(fn, argnums=(0, 1, 2))(w, y, x)
    return [fn(w, y, x), grads[0], fz.parallel.gather(grads[1], ax, 0), grads[2]]


def is_one_process(fn: Callable[..., torch.Tensor], size: int, inputs: list[torch.Tensor]) -> bool:
    """Whether real ranks have the loss and gradients of one, to which ranks that wait for others do not belong."""

    def rank_main(rank: int) -> list[Any]:
        ax = fz.parallel.axis(None, "tp")
        return answers(functools.partial(fn, ax), inputs, ax)

    [expected] = fz.testing.run_ranks(rank_main, 1)
    return all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-6, atol=1e-9)
        for found in fz.testing.run_ranks(rank_main, size, checked=False)
        for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=60)
@given(
    steps=programs(),
    size=st.sampled_from([2, 4]),
    rank=st.integers(0, 3),
    seed=st.integers(0, 9),
    wrong=st.none() | st.tuples(st.sampled_from(["left_out", "scaled"]), st.integers(0, 20)),
)
def test_what_is_accepted_is_one_process(
    steps: list[str], size: int, rank: int, seed: int, wrong: tuple[str, int] | None
) -> None:
    scaled, left_out, inputs = None, None, drawn_inputs(seed)
    with fz.testing.fake_mesh({"tp": size}, rank % size) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        w, y, x = inputs
        pieces = w, y.chunk(size)[ax.rank], x
        call = lambda m, scaled: fz.parallel.check(
            functools.partial(on_rank, steps, scaled, m, ax), *pieces, varying={"y": {"tp": 0}}, values=True
        )
        m = Maps()
        report = call(m, None)
        assert report.played == {"tp": size} and report.outputs == {"": ()}
        if wrong is None:
            return
        kind, number = wrong
        if kind == "scaled":
            scaled = number % len(steps)
        else:
            left_out = number % len(m.names)
        try:
            call(Maps(left_out=left_out), scaled)
        except AxisTypeError:
            return
    # ranks other than the first one that multiply zero by a number
    assert is_one_process(lambda ax, *given: on_rank(steps, scaled, Maps(left_out=left_out), ax, *given), size, inputs)


@settings(max_examples=60)
@given(steps=programs(), size=st.sampled_from([2, 4]), rank=st.integers(0, 3), number=st.integers(0, 20))
def test_types_alone_tell_all_maps_but_those_of_pieces(steps: list[str], size: int, rank: int, number: int) -> None:
    """Where the dims of inputs are said."""
    with fz.testing.fake_mesh({"tp": size}, rank % size) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        pieces = torch.empty(SIDE, SIDE), torch.empty(SIDE // size, SIDE), torch.empty(SIDE, SIDE)
        call = lambda m: fz.parallel.check(
            functools.partial(on_rank, steps, None, m, ax), *pieces, varying={"y": {"tp": 0}}
        )
        m = Maps()
        assert call(m).outputs == {"": ()}
        if m.names[number := number % len(m.names)] not in ("all_to_all", "ring_shift"):
            with pytest.raises(AxisTypeError):
                call(Maps(left_out=number))


# ---- what is played, and what is not

ONE = torch.ones(4)


def judged(fn: Callable[..., object], *inputs: object, size: int = 2, **more: Any) -> fz.parallel.Report:
    """The report on `fn(axis, *inputs)`, with values."""
    with fz.testing.fake_mesh({"dp": 2, "tp": size}) as mesh:
        ax = fz.parallel.axis(mesh, "tp")
        return fz.parallel.check(functools.partial(fn, ax), *inputs, values=True, **more)


def test_numbers_that_depend_on_the_rank() -> None:
    """The outputs are others, or only gradients are, or ranks do not call the same."""

    def branch(ax: Axis, x: torch.Tensor) -> torch.Tensor:
        return fz.parallel.sum(fz.parallel.split(x, ax, 0).sum(), ax) if ax.rank == 0 else x.sum()

    def gradient(ax: Axis, x: torch.Tensor) -> torch.Tensor:
        x = x + (1 + ax.rank) * (x - x.detach())
        return fz.parallel.sum(fz.parallel.split(x, ax, 0).sum(), ax)

    with pytest.raises(AxisTypeError, match=r"the output, played on rank 1 of axis 'tp', is not that of one process"):
        judged(lambda ax, x: fz.parallel.sum(fz.parallel.split(x, ax, 0).sum(), ax) * (1 + ax.rank), ONE)
    with pytest.raises(AxisTypeError, match=r"the cotangent of 'x', played on rank 1 .* 1 apart"):
        judged(gradient, ONE)
    with pytest.raises(AxisTypeError, match=r"ranks wait for one another, .* in parallel\.sum"):
        judged(branch, ONE)


def test_outputs_that_vary() -> None:
    fn = lambda ax, v: {"own": v * 2, "all": fz.parallel.sum(v.sum(), ax), "count": v.numel()}
    said: Any = {"varying": {"v": {"tp": 0}}}
    shifted = lambda ax, v: {**fn(ax, v), "own": fz.parallel.ring_shift(v, ax)}
    assert judged(fn, ONE, outputs={"own": {"tp": 0}}, **said).played == {"tp": 2}
    with pytest.raises(AxisTypeError, match="output 'own', played on rank 0"):
        judged(shifted, ONE, outputs={"own": {"tp": 0}}, **said)
    assert judged(fn, ONE, outputs={"own": "tp"}, **said).played == {"tp": 2}  # each its own, of which nothing is known
    assert judged(fn, ONE, outputs={"own": "tp"}, varying={"v": "tp"}).played == {}


def test_not_played_are_too_many_ranks_averaged_axes_and_those_that_no_map_goes_over() -> None:
    fn = lambda ax, x: fz.parallel.sum(fz.parallel.split(x, ax, 0).sum(), ax)
    assert judged(fn, torch.ones(65), size=65).played == {}
    assert judged(fn, ONE, averaged="tp").played == {}
    assert judged(lambda ax, x: x.sum(), ONE).played == {}
    assert judged(fn, ONE, size=1).played == {}


def test_leaves_that_vary_on_another_axis_than_the_plans() -> None:
    """What other ranks of it have is not known."""
    with fz.testing.fake_mesh({"tp": 2, "sp": 2}) as mesh:
        tp, sp = fz.parallel.axis(mesh, "tp"), fz.parallel.axis(mesh, "sp")

        def fn(p: Tree, x: torch.Tensor) -> torch.Tensor:
            x = fz.parallel.copy(fz.parallel.copy(x, tp), sp)
            return fz.parallel.sum(fz.parallel.sum((x * p["w"]).sum(), tp), sp)

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1)), {"w": 0}, mesh=mesh)
        inputs = {"w": torch.ones(4, 2)}, torch.ones(())
        assert fz.parallel.check(step, *inputs, varying={"p.w": {"sp": 1}}, values=True).played == {"tp": 2}


def test_a_function_that_fits_one_number_of_ranks_only() -> None:
    with pytest.raises(RuntimeError, match="shape") as caught:
        judged(lambda ax, v: fz.parallel.sum(v.view(2, 2).sum(), ax), ONE, varying={"v": {"tp": 0}}, size=2)
    assert any("read ax.size and ax.rank itself" in note for note in caught.value.__notes__)


def test_dropout_of_a_piece_is_said_to_be_another_one() -> None:
    def fn(ax: Axis, x: torch.Tensor) -> torch.Tensor:
        return fz.parallel.sum(torch.nn.functional.dropout(fz.parallel.split(x, ax, 0)).sum(), ax)

    with pytest.raises(AxisTypeError, match="also draws random numbers"):
        judged(fn, torch.ones(64))
    dropped = lambda ax, x: fz.parallel.sum(fz.parallel.split(torch.nn.functional.dropout(x), ax, 0).sum(), ax)
    assert judged(dropped, torch.ones(64)).played == {"tp": 2}


def test_steps_with_units_frozen_leaves_and_16_bits() -> None:
    """On ranks that there are, too, of which nobody hears; with a leaf that a callable makes once."""

    @fz.unit
    def block(ax: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
        return x + fz.parallel.sum(torch.tanh(fz.parallel.copy(x, ax) @ p["up"]) @ p["down"], ax) + p["bias"]

    def loss(ax: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
        for each in p["blocks"]:
            x = block(ax, each, x)
        return fz.sum_over(p, torch.sum) + x.square().mean()

    def rank_main(rank: int) -> None:
        ax, generator = fz.parallel.axis(None, "tp"), torch.Generator().manual_seed(3)
        make = functools.partial(torch.randn, 4, 6, generator=torch.Generator().manual_seed(rank))
        blocks = [{"up": make, "down": torch.randn(6, 4, generator=generator), "bias": torch.ones(4)} for _ in range(2)]
        step = fz.train_step(lambda p, x: loss(ax, p, x), fz.sgd(0.1))
        step = fz.freeze(fz.shard_tensor(fz.autocast(step), {"*.up": 1, "*.down": 0}), "blocks.0.*")
        x = torch.randn(3, 4, generator=generator)
        with fz.testing.recorded_collectives() as sent:
            assert fz.parallel.check(step, {"blocks": blocks}, x, values=True).played == {"tp": 2}
        assert not sent
        step = fz.train_step(lambda p, x: loss(ax, p, x) + ax.rank * p["blocks"][0]["bias"].sum(), fz.sgd(0.1))
        step = fz.shard_tensor(fz.autocast(step), {"*.up": 1, "*.down": 0})
        with pytest.raises(AxisTypeError, match="rank 1"):
            fz.parallel.check(step, {"blocks": blocks}, x, values=True)

    fz.testing.run_ranks(rank_main, 2)
