"""Pieces of tokens against whole tensors: drawn programs of operations, in place and by views too, of any order."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, cast

import einops
import numpy as np
import optree
import pytest
import torch
import torch.nn.functional as F
from backwards import with_backward
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fzero as fz
from fzero.base.random import seeded
from fzero.comm.divergence import recorded_collectives
from fzero.parallel import piece
from fzero.parallel.piece import Piece, wholes
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


def seen_before(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What was read whole is written to by functions of one token."""
    out, other = x * 1, y * 1
    seen = out.flip(1) + other.flip(1)
    F.relu(out, True)
    F.silu(other, inplace=True)
    return seen + out.flip(1) * other.flip(1) + out + other


def the_same(x: torch.Tensor, y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Functions that return what they are given."""
    out = x * 1
    same = out.to(out.dtype)
    same += y
    return out * w


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
    "seen before": seen_before,
    "the same": the_same,
    "split": lambda x, y, w: torch.stack([row * w for row in x]) + torch.cat([*y.unbind(1)], -1).sum(),
    "einsum": lambda x, y, w: torch.einsum("btd,bsd->bts", x, y) @ y,
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


@in_turns(8)
@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_each_operation(name: str) -> None:
    for off in run_ranks(functools.partial(difference, program=[(name, 0, 0), (name, 2, 1)], tokens=5), 2):
        assert off < 1e-10


def set_data(x: torch.Tensor) -> torch.Tensor:
    out = x * 1
    out.data = out.new_ones(2, 5, WIDTH)
    return out + 0


def out_of_place(x: torch.Tensor) -> torch.Tensor:
    out = x * 1
    torch.add(torch.ones(2, 5, WIDTH, dtype=F64), 1, out=out)
    return out + 0


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "copies": lambda x: (copy.deepcopy(x), copy.copy(x) + 0, pickle.loads(pickle.dumps(x))),
    "numpy": lambda x: (x.numpy(), np.asarray(x), torch.as_tensor(x), x.tolist(), x.sum().item(), f"{x.mean():.3f}"),
    "data": lambda x: (x.data + 0, set_data(x), out_of_place(x), (x * 1).detach_()),
    "sizes": lambda x: (x.size(), x.numel(), x.dim(), len(x), x.stride(0), x.element_size(), x.is_contiguous()),
    "einops": lambda x: einops.rearrange(x, "b t (h d) -> b h t d", h=3),
    "parts": lambda x: ([*x], x.chunk(2, -1), x.unbind(1), x[:, -1], x[x > 0], x.reshape(-1, 3), x.mT),
    "joined": lambda x: (torch.cat([x, x], 1), torch.stack([x, x]), torch.bmm(x, x.mT), x.roll(1, 1)),
    "made": lambda x: (x.new_zeros(3), torch.zeros_like(x), x.new_tensor([1.0]), torch.ones_like(x)),
    "places": lambda x: torch.where(x > 0),
    "over dims": lambda x: (x.max(1), x.topk(2, -1), x.sort(-1), x.norm(dim=-1), x.std(-1), x.cumprod(1), x.argmax(1)),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "operators": lambda x: (2 / x, 2 ** (x / 10), x // 1, x % 2, -x, x.cpu(), (x * 3).to(torch.int64), 0.0 in x * 0),
    "of the object": lambda x: (isinstance(x, torch.Tensor), x.requires_grad, len({x}), x.dtype, x.device, x.is_leaf),
}


@pytest.mark.parametrize("name", sorted(READS))
def test_whoever_reads_it_finds_it_whole(name: str) -> None:
    x = inputs_of(5, 0)[0]
    found = run_ranks(lambda rank: wholes(READS[name](piece.cut(x, fz.parallel.axis(None, "tp")))), 2)
    wanted = optree.tree_leaves(READS[name](x))
    for rank in found:
        got = optree.tree_leaves(cast(Any, rank))
        assert len(got) == len(wanted)
        for a, b in zip(got, wanted, strict=True):
            assert np.array_equal(a, b) if isinstance(b, (torch.Tensor, np.ndarray)) else a == b


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


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


@in_turns(2)
@pytest.mark.parametrize("sharded", [False, True])
def test_units_read_no_more_than_their_modules_do(sharded: bool) -> None:
    """Each block gathers what its column reads and scatters what its row gives; the first reads what is whole."""
    blocks, x = 4, torch.ones(2, 6, 4)
    apply, params = fz.functional(nn.Sequential(*[Residual() for _ in range(blocks)]))

    def sent(rank: int) -> list[str]:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        step = fz.train_step(lambda p: apply(p, x).sum(), fz.sgd(0.1))
        step = fz.shard_tensor(step, {"*.first": "column", "*.second": "row"}, mesh=mesh, sequence=True)
        step = fz.shard_zero3(step, mesh=mesh, axis="dp") if sharded else step
        state = step.init(params)
        step.vjp(state)  # in which units run twice
        with recorded_collectives() as record:
            step.vjp(state)
        return [call for call, *_ in record]

    for own in run_ranks(sent, 2):
        assert own == ["exchange"] * (2 * blocks)


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


twice = with_backward(lambda x: x * 2, lambda cotangent: cotangent * 2)


def test_a_function_of_autograd_is_given_whole_tensors_or_refuses() -> None:
    def loss(x: torch.Tensor, whole: bool) -> torch.Tensor:
        own = piece.cut(x, fz.parallel.axis(None, "tp"))
        out: Any = twice(own.view_as(own) if whole else own)
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


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_nothing_is_computed_twice() -> None:
    """What a rank cannot compute of its tokens alone is known by shapes, before it runs."""

    def rank_main(rank: int) -> list[str]:
        x = piece.cut(torch.ones(2, 4, WIDTH, dtype=F64), fz.parallel.axis(None, "tp"))
        with Counting() as counting:
            assert x.mean(1).shape == (2, WIDTH) and isinstance(x.mean(-1, keepdim=True), Piece)
        return counting.names

    for names in run_ranks(rank_main, 2):
        assert names.count("aten.mean.dim") == 2
