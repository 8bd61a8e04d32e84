"""Pieces of tokens against whole tensors: drawn programs of operations, in place and by views too, of any order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.base.random import seeded
from fzero.comm.divergence import recorded_collectives
from fzero.parallel import piece
from fzero.parallel.piece import Piece
from fzero.parallel.spread import wholes
from fzero.testing import RankError, run_ranks

F64, WIDTH = torch.float64, 3
Values = list[torch.Tensor]
Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]


def in_place(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    other = out
    out += y
    out.mul_(2)
    return other + out


def through_a_view(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x * 1
    row = out[:, :1]
    row.add_(w)
    return out * y


def of_a_view(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x * 1
    seen = out.flatten()
    out.mul_(y)
    return out + seen.sum()


def set_item(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out = x + 0
    out[:, 0] = y[:, -1]
    return out


# each of two values [2, t, 3], and a weight [3]
OPERATIONS: dict[str, Operation] = {
    "add": lambda x, y, w: x + y,
    "gate": lambda x, y, w: torch.sigmoid(x) * y,
    "weight": lambda x, y, w: x * w,
    "from the left": lambda x, y, w: 1 - w * x / 2,
    "relu": lambda x, y, w: F.silu(x) + F.relu(y),
    "relu in place": lambda x, y, w: F.relu(x * 1, inplace=True) + y,
    "layer norm": lambda x, y, w: F.layer_norm(x, (WIDTH,), w, w) + y,
    "layer norm of tokens": lambda x, y, w: F.layer_norm(x, tuple(x.shape[1:])),
    "rms": lambda x, y, w: w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2)) + y,
    "mean of tokens": lambda x, y, w: x - y.mean(1, keepdim=True),
    "mean over the batch": lambda x, y, w: x + y.mean(0),
    "softmax": lambda x, y, w: x.softmax(-1) + torch.softmax(y, 1),
    "linear": lambda x, y, w: F.linear(x, torch.outer(w, w), w) + y,
    "matmul": lambda x, y, w: x @ torch.outer(w, w.sin()) + y @ x.mT @ y,
    "cumsum": lambda x, y, w: x + y.cumsum(1),
    "flip": lambda x, y, w: x + y.flip(1),
    "where": lambda x, y, w: torch.where(x > w, x, y),
    "masked": lambda x, y, w: x.masked_fill(y.detach() > 0, 0.5),
    "positions": lambda x, y, w: x + torch.arange(x.shape[1], dtype=F64)[:, None] * y,
    "another dim": lambda x, y, w: x + y.sum(-1).unsqueeze(-1),
    "dtype": lambda x, y, w: x.to(torch.float64).type_as(y) * y.double(),
    "in place": in_place,
    "through a view": through_a_view,
    "of a view": of_a_view,
    "set item": set_item,
    "more dims": lambda x, y, w: (x[None] * torch.stack([y, y])).sum(0),
    "no grad": lambda x, y, w: x * y.detach().abs().max(),
}
programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=6
)


def run(program: Any, cut: Any, x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values: Values = [cut(x), y]
    for name, first, second in program:
        values.append(OPERATIONS[name](values[first % len(values)], values[second % len(values)], w))  # type: ignore[arg-type]
    total: Any = wholes(values[2:])
    return torch.stack([(value * value.sin()).sum() for value in total]).tanh().sum()


def derivatives(fn: Any, inputs: Any, directions: Any) -> Values:
    grad = torch.func.grad(fn, argnums=(0, 1, 2))
    batched = [torch.stack([x, 2 * x]) for x in inputs]
    return [
        *torch.func.jvp(fn, inputs, directions),
        *grad(*inputs),
        *torch.func.jvp(grad, inputs, directions)[1],
        *torch.func.grad(lambda *x: sum((g * d).sum() for g, d in zip(grad(*x), directions, strict=True)), (0, 1, 2))(
            *inputs
        ),
        *torch.func.vmap(grad)(*batched),
    ]


def inputs_of(tokens: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((2, tokens, WIDTH), (2, tokens, WIDTH), (WIDTH,))
    return tuple(torch.randn(shape, dtype=F64, generator=generator) for shape in shapes)


def difference(rank: int, program: Any, tokens: int) -> float:
    ax = fz.parallel.axis(None, "tp")
    inputs, directions = inputs_of(tokens, 0), inputs_of(tokens, 1)
    found = derivatives(functools.partial(run, program, lambda x: piece.cut(x, ax)), inputs, directions)
    wanted = derivatives(functools.partial(run, program, lambda x: x), inputs, directions)
    return max((a - b).abs().max().item() / max(1, b.abs().max().item()) for a, b in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("hazards")
@given(program=programs, tokens=st.integers(1, 5), ranks=st.integers(1, 4))
def test_drawn_programs(program: Any, tokens: int, ranks: int) -> None:
    for off in run_ranks(functools.partial(difference, program=program, tokens=tokens), ranks):
        assert off < 1e-10


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation(name: str) -> None:
    for off in run_ranks(functools.partial(difference, program=[(name, 0, 0), (name, 2, 1)], tokens=5), 2):
        assert off < 1e-10


ALONE = ("add", "gate", "weight", "from the left", "relu", "layer norm", "rms", "softmax", "linear", "where", "dtype")


def test_what_is_of_one_token_sends_nothing() -> None:
    def sent(rank: int) -> list[str]:
        x, y, w = inputs_of(4, 0)
        ax, found = fz.parallel.axis(None, "tp"), []
        a, b = piece.cut(x, ax), piece.cut(y, ax)
        for name in ALONE:
            with recorded_collectives() as record:
                out = OPERATIONS[name](a, b, w) if name != "softmax" else a.softmax(-1)
            found += [name] if record or not isinstance(out, Piece) else []
        return found

    assert run_ranks(sent, 2) == [[], []]


def test_dropout_draws_for_each_piece() -> None:
    def dropped(rank: int, draw: bool) -> Any:
        x: Any = piece.cut(torch.ones(2, 8, 4, dtype=F64), fz.parallel.axis(None, "tp"))
        with seeded(3):
            out = F.dropout(x, 0.5, draw)
            assert isinstance(out, Piece)
            return wholes(out), torch.rand(())

    (first, then), (second, other) = run_ranks(functools.partial(dropped, draw=True), 2)
    assert torch.equal(first, second) and torch.equal(then, other)  # the stream goes on alike
    assert not torch.equal(first[:, :4], first[:, 4:]) and set(first.unique().tolist()) == {0.0, 2.0}
    assert all(
        torch.equal(out, torch.ones_like(out)) for out, _ in run_ranks(functools.partial(dropped, draw=False), 2)
    )


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent * 2


def test_a_function_of_autograd_is_given_whole_tensors_or_refuses() -> None:
    def loss(x: torch.Tensor, whole: bool) -> torch.Tensor:
        own = piece.cut(x, fz.parallel.axis(None, "tp"))
        out: Any = Twice.apply(own.view_as(own) if whole else own)
        return (out * x).sum()

    def grad(rank: int, whole: bool, functional: bool) -> torch.Tensor:
        x = torch.ones(4, 2, requires_grad=not functional)
        if functional:
            return torch.func.grad(functools.partial(loss, whole=whole))(x)
        return torch.autograd.grad(loss(x, whole), x)[0]

    for whole, functional in ((True, True), (False, True), (True, False)):
        found = run_ranks(functools.partial(grad, whole=whole, functional=functional), 2)
        assert torch.equal(found[1], torch.full((4, 2), 4.0))
    with pytest.raises(RankError, match=r"of which each rank has a piece .* Give it x\.view_as\(x\)"):
        run_ranks(functools.partial(grad, whole=False, functional=False), 2)
