"""The maps between ranks against one process that has all ranks' tensors in a list: drawn programs of them."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from nightly import NIGHTLY, in_turns
from orders import derivatives

import fzero as fz
from fzero.base import pytree
from fzero.base.context import averaged, during
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.testing import RankError, assert_collectives, assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")
F64 = torch.float64
Ranks = list[torch.Tensor]  # one process's view: a tensor for each rank


class Instruction(NamedTuple):
    """A map, or what each rank computes by itself, and its arguments."""

    name: str
    arguments: dict[str, Any]


class Program(NamedTuple):
    """Instructions, in the right places for an axis on which a value is the same on all ranks or each rank's own."""

    world: int
    shapes: list[tuple[int, ...]]  # of each rank's input
    invariant: bool  # whether the input is
    instructions: list[Instruction]
    ends_invariant: bool
    seed: int


@st.composite
def programs(draw: st.DrawFn, most: int = 6) -> Program:
    world = draw(st.integers(1, 4))
    invariant = begins = draw(st.booleans())
    # of every dim the sizes on all ranks; a dim at most has several
    dims = [[size] * world for size in draw(st.lists(st.integers(0, 3), min_size=2, max_size=3))]
    uneven = None if invariant else draw(st.sampled_from([None, *range(len(dims))]))
    if uneven is not None:
        dims[uneven] = draw(st.lists(st.integers(0, 3), min_size=world, max_size=world))
    shapes, instructions = [tuple(own[rank] for own in dims) for rank in range(world)], []

    def cut(size: int) -> list[int]:
        ends = sorted(draw(st.lists(st.integers(0, size), min_size=world - 1, max_size=world - 1)))
        return [b - a for a, b in zip([0, *ends], [*ends, size], strict=True)]

    for _ in range(draw(st.integers(1, most))):
        names = ["each"] + (["copy", "split"] if invariant else ["gather"]) + (["double_"] if instructions else [])
        uneven = next((dim for dim, own in enumerate(dims) if len(set(own)) > 1), None)
        if not invariant:
            names += ["all_to_all"] + (["sum", "reduce_scatter", "ring_shift"] if uneven is None else [])
        name, arguments = draw(st.sampled_from(names)), {}
        if name in ("split", "reduce_scatter", "gather"):
            dim = arguments["dim"] = draw(st.integers(0, len(dims) - 1)) if uneven is None else uneven
            if name == "gather":
                arguments["sizes"] = draw(st.sampled_from([None, dims[dim]]))
                dims[dim] = [sum(dims[dim])] * world
            else:
                sizes = draw(st.sampled_from([None, cut(dims[dim][0])]))
                arguments["sizes"] = sizes
                dims[dim] = sizes or pieces.balanced(dims[dim][0], world)
            if draw(st.booleans()):
                arguments["dim"] -= len(dims)
        elif name == "all_to_all":
            join = draw(st.integers(0, len(dims) - 1)) if uneven is None else uneven
            own = draw(st.sampled_from([dim for dim in range(len(dims)) if dim != join]))
            sizes = draw(st.sampled_from([None, cut(dims[own][0])]))
            known = draw(st.sampled_from([None, dims[join]]))
            arguments.update(split=own, concat=join, sizes=sizes, concat_sizes=known)
            dims[own], dims[join] = sizes or pieces.balanced(dims[own][0], world), [sum(dims[join])] * world
        elif name == "ring_shift":
            arguments["by"] = draw(st.integers(-5, 5))
        elif name == "each":
            arguments["alike"] = invariant
        assume(max(sum(own) for own in dims) < 40)
        invariant = name in ("sum", "gather") or (invariant and name in ("each", "double_"))
        instructions.append(Instruction(name, arguments))
    return Program(world, shapes, begins, instructions, invariant, draw(st.integers(0, 2**31)))


def each(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Something of every rank's own, which stays within a few times x."""
    if not (x.is_floating_point() or x.is_complex()):
        return x + rank
    return (0.5 * x + torch.complex(x.real.sin(), x.imag.sin()) if x.is_complex() else 0.5 * x + x.sin()) * (
        1 + 0.1 * rank
    )


def run(program: Program, ax: Axis, x: torch.Tensor) -> torch.Tensor:
    for name, arguments in program.instructions:
        if name == "each":
            x = each(x, 0 if arguments["alike"] else ax.rank)
        elif name == "double_":
            x = x.mul_(2)  # what the instruction before has made
        else:
            x = getattr(fz.parallel, name)(x, ax=ax, **arguments)
    return x


def run_in_one(program: Program, ranks: Ranks) -> Ranks:
    """The same on all ranks' tensors, with torch alone."""
    for name, arguments in program.instructions:
        ranks = _IN_ONE[name](ranks, **arguments)
    return ranks


def _summed(ranks: Ranks) -> Ranks:
    dtype = ranks[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    return [functools.reduce(torch.add, [x.to(wide) for x in ranks]).to(dtype)] * len(ranks)


def _cut(ranks: Ranks, dim: int, sizes: Sequence[int] | None) -> Ranks:
    sizes = sizes or pieces.balanced(ranks[0].shape[dim], len(ranks))
    return [x.split(list(sizes), dim)[rank] for rank, x in enumerate(ranks)]


def _exchanged(ranks: Ranks, split: int, concat: int, sizes: Sequence[int] | None, concat_sizes: object) -> Ranks:
    del concat_sizes
    sizes = list(sizes or pieces.balanced(ranks[0].shape[split], len(ranks)))
    return [torch.cat([x.split(sizes, split)[rank] for x in ranks], concat) for rank in range(len(ranks))]


_IN_ONE: dict[str, Callable[..., Ranks]] = {
    "each": lambda ranks, alike: [each(x, 0 if alike else rank) for rank, x in enumerate(ranks)],
    "double_": lambda ranks: [2 * x for x in ranks],
    "copy": lambda ranks: ranks,
    "sum": _summed,
    "gather": lambda ranks, dim, sizes: [torch.cat(ranks, dim)] * len(ranks),
    "split": _cut,
    "reduce_scatter": lambda ranks, dim, sizes: _cut(_summed(ranks), dim, sizes),
    "all_to_all": _exchanged,
    "ring_shift": lambda ranks, by: [ranks[(rank - by) % len(ranks)] for rank in range(len(ranks))],
}


def randn(shape: Sequence[int], seed: int, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Case(NamedTuple):
    """A program with inputs, directions and cotangents of every rank; with `averages` each rank has its own of all."""

    program: Program
    averages: bool = False
    dtype: torch.dtype = F64

    @property
    def begins_alike(self) -> bool:
        return self.program.invariant and not self.averages

    @property
    def ends_alike(self) -> bool:
        return self.program.ends_invariant and not self.averages

    def drawn(self, salt: int, shapes: Sequence[Sequence[int]], alike: bool, batch: tuple[int, ...]) -> Ranks:
        seed = self.program.seed + 10 * salt
        return [randn((*batch, *shape), seed + (0 if alike else rank), self.dtype) for rank, shape in enumerate(shapes)]

    def inputs(self, batch: tuple[int, ...] = ()) -> Ranks:
        return self.drawn(0, self.program.shapes, self.program.invariant, batch)

    def directions(self) -> Ranks:
        return self.drawn(1, self.program.shapes, self.begins_alike, ())

    def cotangents(self, batch: tuple[int, ...] = ()) -> Ranks:
        ends = run_in_one(self.program, [torch.zeros(shape) for shape in self.program.shapes])
        return self.drawn(2, [x.shape for x in ends], self.ends_alike, batch)

    def setting(self, ax: Axis) -> contextlib.AbstractContextManager[object]:
        """The surroundings of a step's function: whether it takes means over the ranks."""
        return during(averaged, (ax,)) if self.averages else contextlib.nullcontext()

    def in_one(self, x: Any) -> Any:
        """The program as a function of all ranks' tensors, or of the one that all ranks have."""
        out = run_in_one(self.program, [x] * self.program.world if self.begins_alike else list(x))
        return out[0] if self.ends_alike else tuple(out)

    def expected(self, fn: Callable[..., dict[str, Any]], *operands: tuple[Ranks, bool]) -> list[dict[str, Any]]:
        """`fn(program, *operands)` in one process, and what each rank has of the results."""
        one = fn(self.in_one, *[own[0] if alike else tuple(own) for own, alike in operands])
        world = range(self.program.world)
        return [{key: own[rank] if isinstance(own, tuple) else own for key, own in one.items()} for rank in world]


def as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def derive(rank: int, case: Case) -> dict[str, Any]:
    ax = fz.parallel.axis(None, "tp")
    operands = [own[rank] for own in (case.inputs(), case.directions(), case.cotangents())]
    with case.setting(ax):
        return derivatives(functools.partial(run, case.program, ax), *operands)


def check_derivatives(case: Case, backend: str = "threads") -> None:
    begins, ends = case.begins_alike, case.ends_alike
    operands = (case.inputs(), begins), (case.directions(), begins), (case.cotangents(), ends)
    expected = case.expected(derivatives, *operands)
    got = run_ranks(functools.partial(derive, case=case), case.program.world, backend=backend)
    assert_trees_close(*(pytree.map(as_real, tree) for tree in (got, expected)), rtol=1e-10, atol=1e-12)
    alike = ["value", "jvp"] * ends + ["vjp", "jvp of vjp", "vjp of vjp", "third"] * begins
    for name in alike:
        assert_trees_equal(*[own[name] for own in got])


# every map alone, between ranks of which no two are each other's neighbours on both sides
EACH = [
    Instruction("copy", {}),
    Instruction("sum", {}),
    Instruction("gather", {"dim": 1, "sizes": None}),
    Instruction("split", {"dim": 1, "sizes": [2, 0, 3, 1]}),
    Instruction("reduce_scatter", {"dim": 1, "sizes": [2, 0, 3, 1]}),
    Instruction("all_to_all", {"split": 0, "concat": 1, "sizes": [1, 0, 0, 1], "concat_sizes": None}),
    Instruction("ring_shift", {"by": 1}),
    Instruction("ring_shift", {"by": -2}),
]


@in_turns(11)
@pytest.mark.parametrize("instruction", EACH, ids=lambda own: f"{own.name}-{own.arguments.get('by', '')}")
@pytest.mark.parametrize(
    ("backend", "averages"),
    [("threads", False), ("threads", True), ("processes", False), *([("processes", True)] if NIGHTLY else [])],
)
def test_every_map(instruction: Instruction, averages: bool, backend: str) -> None:
    """Between what each rank computes before and after, so that the second derivatives are not zero."""
    before, after = instruction.name in ("copy", "split"), instruction.name in ("sum", "gather")
    uneven = instruction.name in ("gather", "all_to_all")
    shapes = [(2, 6 - rank if uneven else 6) for rank in range(4)]
    around = [Instruction("each", {"alike": alike}) for alike in (before, after)]
    program = Program(4, shapes, before, [around[0], instruction, around[1]], after, 1)
    check_derivatives(Case(program, averages), backend)


@given(program=programs(), averages=st.booleans(), dtype=st.sampled_from([F64, F64, torch.complex128]))
@settings(max_examples=40)
def test_derivatives_of_any_order(program: Program, averages: bool, dtype: torch.dtype) -> None:
    check_derivatives(Case(program, averages and program.world > 1, dtype))


@given(program=programs(4), averages=st.booleans())
@settings(max_examples=2)
def test_derivatives_on_real_processes(program: Program, averages: bool) -> None:
    check_derivatives(Case(program, averages and program.world > 1), "processes")


def mapped(fn: Callable[[Any], Any], x: Any, cotangent: Any, dim: int) -> dict[str, Any]:
    f = torch.func

    def pulled(x: Any, cotangent: Any) -> Any:
        return f.vjp(fn, x)[1](cotangent)[0]  # type: ignore[misc]

    return {
        "value": f.vmap(fn, in_dims=dim, out_dims=dim)(x),
        "vjp": f.vmap(pulled, in_dims=dim)(x, cotangent),
        "twice": f.vmap(f.vmap(fn, in_dims=dim), in_dims=0)(_stacked(x)),
        "one pullback": f.vmap(lambda c: f.vjp(fn, _first(x, dim))[1](c)[0], in_dims=dim)(cotangent),  # type: ignore[misc]
    }


def _stacked(x: Any) -> Any:
    return tuple(map(_stacked, x)) if isinstance(x, tuple) else torch.stack([x, 2 * x])


def _first(x: Any, dim: int) -> Any:
    return tuple(_first(own, dim) for own in x) if isinstance(x, tuple) else x.select(dim, 0)


def map_over(rank: int, case: Case, dim: int) -> dict[str, Any]:
    ax = fz.parallel.axis(None, "tp")
    operands = [own[rank].movedim(0, dim) for own in (case.inputs((3,)), case.cotangents((3,)))]
    with case.setting(ax):
        return mapped(functools.partial(run, case.program, ax), *operands, dim)  # type: ignore[call-arg]


@given(program=programs(), averages=st.booleans(), dim=st.sampled_from([0, 1, 2, -1]))
@settings(max_examples=30)
def test_it_maps(program: Program, averages: bool, dim: int) -> None:
    case = Case(program, averages and program.world > 1)
    inputs, cotangents = ([x.movedim(0, dim) for x in own] for own in (case.inputs((3,)), case.cotangents((3,))))
    fn = functools.partial(mapped, dim=dim)
    expected = case.expected(fn, (inputs, case.begins_alike), (cotangents, case.ends_alike))
    got = run_ranks(functools.partial(map_over, case=case, dim=dim), program.world)
    assert_trees_close(got, expected, rtol=1e-10, atol=1e-12)


@given(program=programs(4))
@settings(max_examples=20)
def test_jacobians_of_what_is_the_same_on_all_ranks(program: Program) -> None:
    """Basis vectors are the same on all ranks, too."""
    assume(program.invariant and program.ends_invariant)
    case, f = Case(program), torch.func

    def jacobians(fn: Callable[[Any], Any], x: Any) -> dict[str, Any]:
        return {"reverse": f.jacrev(fn)(x), "forward": f.jacfwd(fn)(x), "hessian": f.hessian(lambda x: fn(x).sum())(x)}

    def rank_main(rank: int) -> dict[str, Any]:
        return jacobians(functools.partial(run, program, fz.parallel.axis(None, "tp")), case.inputs()[rank])

    expected = case.expected(jacobians, (case.inputs(), True))
    assert_trees_close(run_ranks(rank_main, program.world), expected, rtol=1e-10, atol=1e-12)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.int8]


@given(program=programs(3), dtype=st.sampled_from(DTYPES), strided=st.booleans())
@settings(max_examples=30)
def test_values_of_other_dtypes(program: Program, dtype: torch.dtype, strided: bool) -> None:
    """Integers pass, too; sums are in rank order, those of 16-bit floats in float32."""
    case = Case(program, dtype=torch.complex128 if dtype.is_complex else F64)
    inputs = [(3 * x).to(dtype) for x in case.inputs()]

    def rank_main(rank: int) -> torch.Tensor:
        x = inputs[rank]
        x = torch.stack([x, x], -1)[..., 0] if strided else x
        return run(program, fz.parallel.axis(None, "tp"), x).clone(memory_format=torch.contiguous_format)

    assert_trees_equal(run_ranks(rank_main, program.world), run_in_one(program, inputs))


@given(program=programs(4), averages=st.booleans(), in_unit=st.booleans())
def test_inside_a_step(program: Program, averages: bool, in_unit: bool) -> None:
    """A step that takes means over the ranks says so by itself; one over other ranks does not."""
    assume(not program.invariant and all(map(torch.Size.numel, map(torch.Size, program.shapes))))
    case = Case(program, averages and program.world > 1)
    weights = case.cotangents()

    def rank_main(rank: int) -> tuple[torch.Tensor, object]:
        shape = (program.world, 1) if averages else (1, program.world)
        mesh = torch.distributed.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        ax = fz.parallel.axis(mesh, "dp" if averages else "tp")

        def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return run(program, ax, x * p["w"])

        def loss(params: list[dict[str, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
            return ((fz.unit(block) if in_unit else block)(params[0], x) * weights[rank]).sum()

        step = fz.train_step(loss, fz.sgd(0.1), units=None if in_unit else [])
        step = fz.shard_zero2(step, mesh=mesh, axis="dp")
        state = step.init([{"w": torch.tensor(1.5, dtype=F64)}])
        value, pullback = step.vjp(state, case.inputs()[rank])
        return value, pullback(torch.ones((), dtype=F64))[1]

    def in_one(inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        ends = run_in_one(program, [1.5 * x for x in inputs])
        losses = [(x * w).sum() for x, w in zip(ends, weights, strict=True)]
        return losses[0] if case.ends_alike else functools.reduce(torch.add, losses)

    expected = torch.func.grad(in_one)(tuple(case.inputs()))
    for (_, (got,)), own in zip(run_ranks(rank_main, program.world), expected, strict=True):  # type: ignore[misc]
        torch.testing.assert_close(got, own, rtol=1e-10, atol=1e-12)


def test_messages() -> None:
    def rank_main(rank: int) -> None:
        ax, x = fz.parallel.axis(None, "tp"), torch.ones(4, 4)
        for count, fn in (
            (0, lambda x: fz.parallel.copy(x, ax)),
            (0, lambda x: fz.parallel.split(x, ax, 0)),
            (1, lambda x: fz.parallel.sum(x, ax)),
            (1, lambda x: fz.parallel.gather(x, ax, 0, [4, 4])),
            (2, lambda x: fz.parallel.gather(x, ax, 0)),
            (1, lambda x: fz.parallel.reduce_scatter(x, ax, 0)),
            (1, lambda x: fz.parallel.all_to_all(x, ax, 0, 1, concat_sizes=[4, 4])),
            (1, lambda x: fz.parallel.ring_shift(x, ax)),
        ):
            assert_collectives(lambda: fn(x), {"exchange": count})
        back = {"copy": 1, "split": 1, "sum": 1, "gather": 1}  # the last two whether cotangents are the same
        for name, count in back.items():
            arguments = (
                {"dim": 0, "sizes": [2, 2] if name == "split" else [4, 4]} if name in ("split", "gather") else {}
            )
            out, pull = torch.func.vjp(lambda x: getattr(fz.parallel, name)(x, ax, **arguments), x)  # type: ignore[misc]
            assert_collectives(lambda: pull(out), {"exchange": count})

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("order", ["vjp", "grad", "nested", "plain", "step"])
@pytest.mark.parametrize("reads", [False, True])
def test_writes_to_a_copy_are_refused_or_change_nothing_else(order: str, reads: bool) -> None:
    def rank_main(rank: int) -> torch.Tensor:
        ax, x = fz.parallel.axis(None, "tp"), torch.tensor([1.0, 2.0], dtype=F64)

        def fn(x: torch.Tensor) -> torch.Tensor:
            whole = x * 1
            own = fz.parallel.copy(whole, ax)
            squares = own**2 if reads else 0 * x
            own.mul_(3.0)
            return fz.parallel.sum(own.square() + squares, ax).sum() + (whole**3).sum()

        if order == "plain":
            x.requires_grad_()
            return torch.autograd.grad(fn(x), x)[0]
        if order == "vjp":
            with torch.no_grad():
                return torch.func.vjp(fn, x)[1](torch.ones((), dtype=F64))[0]  # type: ignore[misc]
        if order == "step":
            step = fz.shard_tensor(
                fz.train_step(lambda p: fn(p["x"]) + 0 * fz.parallel.sum(p["w"].sum(), ax), fz.sgd(1.0)), {"w": 0}
            )
            return fz.gather(step.vjp(step.init({"x": x, "w": x}))[1](torch.ones((), dtype=F64))[0])["x"]
        if order == "nested":
            return torch.func.grad(lambda x: torch.func.grad(fn)(x).sum())(x) * x / 2
        return torch.func.grad(fn)(x)

    try:
        found = run_ranks(rank_main, 2)
    except RankError as error:
        # as torch refuses them: of a view, or of what was saved
        words = "is being modified inplace", "modified by an inplace operation", "A conversion is missing"
        assert any(each in str(error) for each in words)
        return
    x = torch.tensor([1.0, 2.0], dtype=F64)
    want = 2 * (18 + 2 * reads) * x + 3 * x**2
    if order == "nested":
        want = (2 * (18 + 2 * reads) + 6 * x) * x / 2
    for own in found:
        torch.testing.assert_close(own, want)


def test_one_rank_sends_nothing_and_gets_a_new_tensor() -> None:
    def rank_main(rank: int) -> None:
        ax, x = fz.parallel.axis(None, "tp"), torch.ones(2, 3)
        for name in ("sum", "gather", "split", "reduce_scatter", "ring_shift"):
            arguments = {} if name in ("sum", "ring_shift") else {"dim": 1}
            fn = functools.partial(getattr(fz.parallel, name), x, ax, **arguments)
            out = assert_collectives(fn, {"exchange": 0})
            assert torch.equal(out, x) and out.data_ptr() != x.data_ptr(), name

    run_ranks(rank_main, 1)


def test_what_is_refused() -> None:
    """On every rank, with the same words."""

    def rank_main(rank: int) -> None:
        p, ax, x = fz.parallel, fz.parallel.axis(None, "tp"), torch.ones(2, 3)
        own = torch.ones(2 + rank, 3)
        for name in ("copy", "sum", "ring_shift"):
            with pytest.raises(TypeError, match=f"parallel.{name}: got x=1.0, expected a tensor"):
                getattr(p, name)(1.0, ax)
            with pytest.raises(TypeError, match=f"parallel.{name}: got ax='tp', expected an axis"):
                getattr(p, name)(x, "tp")
        for name in ("gather", "split", "reduce_scatter"):
            with pytest.raises(ValueError, match=f"parallel.{name}: got dim=2 of a tensor with 2 dims"):
                getattr(p, name)(x, ax, 2)
            with pytest.raises(TypeError, match=f"parallel.{name}: got dim=None, expected a dim"):
                getattr(p, name)(x, ax, None)
            with pytest.raises(ValueError, match=rf"parallel.{name}: got sizes=\[1\], expected 2 of them"):
                getattr(p, name)(x, ax, 0, [1])
            with pytest.raises(ValueError, match=f"parallel.{name}: got sizes=-1, expected at least 0"):
                getattr(p, name)(x, ax, 0, [3, -1])
        for wrong, match in (
            (lambda: p.split(x, ax, 1, [1, 1]), r"split: got sizes=\[1, 1\].* add up to 3, the size of dim 1"),
            (lambda: p.gather(own, ax, 1), r"gather: got tensors of shapes \[\(2, 3\), \(3, 3\)\]"),
            (
                lambda: p.gather(torch.ones([1] * (rank + 1)), ax, 0),
                r"gather: got tensors of shapes \[\(1,\), \(1, 1\)\]",
            ),
            (lambda: p.gather(torch.ones([1] * 9 + [1 + rank]), ax, 0), r"gather: got tensors of shapes"),
            (lambda: p.all_to_all(x, ax, 1, -1), "all_to_all: got split and concat both 1"),
            (lambda: p.all_to_all(own, ax, 0, 1), r"all_to_all: got tensors of shapes \[\(2, 3\), \(3, 3\)\]"),
            (lambda: p.all_to_all(own, ax, 0, 1, [1, 1]), r"all_to_all: got tensors of shapes \[\(2, 3\), \(3, 3\)\]"),
        ):
            with pytest.raises(ValueError, match=f"parallel.{match}"):
                wrong()

    run_ranks(rank_main, 2)


DIVERGING: dict[str, Callable[[int, Axis], torch.Tensor]] = {
    "sum of (2, 3)": lambda rank, ax: fz.parallel.sum(torch.ones(2 + rank, 3), ax),
    "sum of (2,)": lambda rank, ax: fz.parallel.sum(torch.ones(2, dtype=(F64, torch.float32)[rank]), ax),
    "reduce_scatter of (2, 3)": lambda rank, ax: fz.parallel.reduce_scatter(torch.ones(2 + rank, 3), ax, 1),
    "ring_shift of (2, 3)": lambda rank, ax: fz.parallel.ring_shift(torch.ones(2 + rank, 3), ax),
    "ring_shift of (2, 3) by 1": lambda rank, ax: fz.parallel.ring_shift(torch.ones(2, 3), ax, 1 + rank),
    "gather of [2, 2]": lambda rank, ax: fz.parallel.gather(torch.ones(2 + rank, 3), ax, 0, [2, 2 + rank]),
    "all_to_all of [1, 1]": lambda rank, ax: fz.parallel.all_to_all(torch.ones(2 + rank, 3), ax, 0, 1, None, [3, 3]),
}


def diverge(rank: int, what: str) -> str:
    with pytest.raises(RuntimeError, match="The ranks have diverged") as raised:
        DIVERGING[what](rank, fz.parallel.axis(None, "tp"))
    return str(raised.value)


@pytest.mark.parametrize("what", DIVERGING)
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_ranks_that_disagree_are_told(what: str, backend: str) -> None:
    """About sizes that they did not tell each other, where collectives are checked."""
    words = run_ranks(functools.partial(diverge, what=what), 2, backend=backend)
    assert words[0] == words[1] and f"rank 0: exchange of parallel.{what}" in words[0]


def test_an_axis_of_which_a_step_takes_means_over_a_part() -> None:
    def rank_main(rank: int) -> None:
        ax = fz.parallel.axis(None, "tp")
        some: Any = types.SimpleNamespace(members=(0, 1))
        with during(averaged, (some,)):
            with pytest.raises(
                ValueError, match=r"axis 'tp' goes over ranks \[0, 1, 2\].* means over only some of them"
            ):
                fz.parallel.sum(torch.ones(2), ax)

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize(
    ("joined", "words"),
    [
        (lambda x, ax: fz.parallel.gather(x, ax, 0), r"parallel.gather: .*own=True"),
        (lambda x, ax: fz.parallel.sum(x, ax), r"parallel.sum: .*copy\(fz.parallel.sum"),
    ],
)
def test_a_loss_of_each_ranks_own_outside_of_a_step(joined: Any, words: str, plainly: bool) -> None:
    """Each rank takes another element: sums of their cotangents are alike, and the cotangents are not."""

    def rank_main(rank: int) -> None:
        ax, x = fz.parallel.axis(None, "dp"), torch.ones(2, dtype=F64, requires_grad=plainly)
        own = lambda x: joined(x, ax)[rank].square()
        with pytest.raises(ValueError, match=words):
            own(x).backward() if plainly else torch.func.grad(own)(x)
        alike = torch.func.grad(lambda x: joined(x, ax).square().sum())
        assert torch.vmap(alike)(torch.ones(3, 2, dtype=F64)).shape == (3, 2)
        assert torch.func.jacfwd(alike)(x.detach()).shape == (2, 2)

    run_ranks(rank_main, 2)


def test_a_loss_of_each_ranks_own_says_so() -> None:
    def rank_main(rank: int) -> list[float]:
        ax, x = fz.parallel.axis(None, "dp"), torch.tensor([1.0 + rank])
        gathered = torch.func.grad(lambda x: fz.parallel.gather(x, ax, 0, own=True)[1 - rank].square())(x)
        summed = torch.func.grad(lambda x: (fz.parallel.copy(fz.parallel.sum(x, ax), ax) * (rank + 1)).sum())(x)
        return [gathered.item(), summed.item()]

    assert run_ranks(rank_main, 2) == [[2.0, 3.0], [4.0, 3.0]]
