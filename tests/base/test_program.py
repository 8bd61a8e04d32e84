"""A run's operations as a program: what is wanted is made again, to the bit, from what cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.base.program import Program, View, noting, once

F64 = torch.float64
Tensors = list[torch.Tensor]


def made_again(fn: Callable[[torch.Tensor], Tensors], kept: tuple[int, ...] = ()) -> None:
    """Runs a function, makes its results again, twice, and holds them to what they were.

    Args:
        kept: numbers of the results that are kept.
    """
    program, x = Program(), torch.linspace(-1, 2, 12, dtype=F64).view(3, 4)
    with noting(program):
        out = fn(x)
    views = [program.known_view(each) for each in out]
    assert all(isinstance(view, View) for view in views)
    wanted, expected = [view for view in views if view is not None], [each.clone() for each in out]
    part = program.part(wanted, {wanted[i].value: out[i] for i in kept})
    for _ in range(2):
        for again, once_made in zip(part.run(wanted, part.given), expected, strict=True):
            assert torch.equal(again, once_made) and again.stride() == once_made.stride()


def test_an_input_that_is_written_over() -> None:
    def fn(x: torch.Tensor) -> Tensors:
        y = x.sin()
        x.mul_(2)
        return [y, x, x + y]

    made_again(fn)
    made_again(fn, kept=(1,))


def test_what_is_kept_is_not_written_over() -> None:
    def fn(x: torch.Tensor) -> Tensors:
        y = x.sin()
        z = y.exp()
        z[1:] += y[1:]
        return [y, z, z * 2]

    made_again(fn, kept=(0,))
    made_again(fn, kept=(1,))
    made_again(fn, kept=(0, 2))


def test_memory_that_is_filled_unseen() -> None:
    def fn(x: torch.Tensor) -> Tensors:
        room = torch.empty(4, dtype=F64)
        room.numpy()[:] = 3.0
        return [x * room, room + 1]

    made_again(fn)


def test_what_comes_by_a_message() -> None:
    """And what is written over it."""

    def arrive(room: torch.Tensor) -> None:
        room.add_(torch.full_like(room, 5.0)).mul_(2)

    def fn(x: torch.Tensor) -> Tensors:
        room = x.exp()
        once(arrive, room)(room)
        read = room * x
        room.mul_(3)
        return [read, room, room + read]

    calls: list[int] = []
    made_again(fn)
    made_again(lambda x: [once(lambda room: calls.append(room.numel()) or room, x)(x) + 1])
    assert calls == [12]


def test_nothing_runs_that_is_not_wanted() -> None:
    program = Program()
    x = torch.ones(3, dtype=F64)
    with noting(program):
        first = x.sin()
        second = first.cos()
        first.exp()
    view = program.known_view(second)
    assert view is not None
    part = program.part([view], {})
    assert [operation.function for operation in part.operations] == [
        torch.ops.aten.sin.default,
        torch.ops.aten.cos.default,
    ]
    kept = program.known_view(first)
    assert kept is not None
    assert len(program.part([view], {kept.value: first}).operations) == 1


def test_operators_of_others_are_not_called_again() -> None:
    calls: list[int] = []

    @torch.library.custom_op("fzero_tests::counted", mutates_args=())
    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * 2

    made_again(lambda x: [counted(x.sin()).cos()])
    assert calls == [1]


def test_sparse_and_complex_tensors_and_lists() -> None:
    made_again(lambda x: [torch.sparse.mm(x.to_sparse(), x.t()) + 1])
    made_again(lambda x: [(torch.complex(x, x.cos()).conj() * 2j).abs()])
    made_again(lambda x: [torch.stack(torch.unbind(x.exp(), 0)[::-1]), torch.cat(x.split(2, 1))])
