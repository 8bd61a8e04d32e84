"""Functions on ranks, each right as it stands, whose conversions can be left out or made twice one by one."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch

import fzero as fz
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps

F = torch.nn.functional
Tree = dict[str, Any]
CHANGING = ("copy", "sum", "gather", "split")  # a type into another one


class Counted(threading.local):
    """The names and lines of the calls that a thread has made."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.lines: list[int] = []


class Maps:
    """The maps of fz.parallel, counted; one may be left out, in favour of something local of the same shape."""

    def __init__(self, left_out: int | None = None, twice: int | None = None) -> None:
        self.left_out, self.twice = left_out, twice
        self.calls = Counted()

    @property
    def names(self) -> list[str]:
        return self.calls.names

    @property
    def lines(self) -> list[int]:
        return self.calls.lines

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        number, call = len(self.names), getattr(fz.parallel, name)
        self.names.append(name)
        self.lines.append(sys._getframe(1).f_lineno)
        if number == self.left_out:
            return LOCAL[name]
        return (lambda x, *rest: call(call(x, *rest), *rest)) if number == self.twice else call


Sizes = Sequence[int] | None


def _piece(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes = None) -> torch.Tensor:
    sizes = sizes or pieces.balanced(x.shape[dim], ax.size)
    return x.narrow(dim, pieces.starts(sizes)[ax.rank], sizes[ax.rank])


def _stretched(x: torch.Tensor, ax: Axis, dim: int, sizes: Sizes = None) -> torch.Tensor:
    """As if all ranks had what this one has."""
    count = sum(sizes) if sizes else x.shape[dim] * ax.size
    return x.index_select(dim, torch.arange(count) % x.shape[dim])


LOCAL: dict[str, Callable[..., torch.Tensor]] = {
    **dict.fromkeys(("copy", "sum", "ring_shift"), lambda x, ax: x),
    "gather": _stretched,
    **dict.fromkeys(("split", "reduce_scatter"), _piece),
    "all_to_all": lambda x, ax, split, concat: torch.cat([_piece(x, ax, split)] * ax.size, concat),
}


@contextlib.contextmanager
def changed(left_out: int | None = None, twice: int | None = None) -> Iterator[list[str]]:
    """Inside, one of the calls of maps that the library makes is left out or made twice; yields their names."""
    calls = Counted()

    def instead(name: str, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(x: torch.Tensor, ax: Axis, *rest: Any) -> torch.Tensor:
            number = len(calls.names)
            calls.names.append(name)
            if number == left_out:
                return LOCAL[name](x, ax, *rest)
            return own(own(x, ax, *rest), ax, *rest[:1]) if number == twice else own(x, ax, *rest)

        return call

    with contextlib.ExitStack() as stack:
        for name in LOCAL:
            own = "shared" if name == "copy" else name  # what the library itself calls
            stack.enter_context(mock.patch.object(maps, own, instead(name, getattr(maps, own))))
        yield calls.names


def mlp(m: Maps, tp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:], p["norm"])
    h = F.gelu(m.copy(h, tp) @ p["up"])
    return (x + m.sum(h @ p["down"], tp)).square().mean()


def attention(m: Maps, tp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    """Grouped queries: each rank has some KV heads, and the query heads that share them."""
    batch, length, _ = x.shape
    h = m.copy(x, tp)
    q, k, v = [(h @ p[name]).view(batch, length, -1, 4).transpose(1, 2) for name in "qkv"]
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    return (x + m.sum(out @ p["o"], tp)).sin().mean()


def vocabulary(m: Maps, tp: Axis, p: Tree, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """An embedding that is cut, tied to the head, and the cross-entropy of logits that are cut."""
    count = p["table"].shape[0]
    start = [rank * count for rank in range(tp.size)]
    local = tokens - start[tp.rank]
    outside = (local < 0) | (local >= count)
    rows = F.embedding(local.masked_fill(outside, 0), p["table"]).masked_fill(outside[..., None], 0.0)
    h = torch.tanh(m.sum(rows, tp))
    logits = m.copy(h, tp) @ p["table"].t()
    top = m.gather(logits.detach().amax(-1, keepdim=True), tp, -1).amax(-1)
    total = m.sum((logits - top[..., None]).exp().sum(-1), tp)
    places = targets - start[tp.rank]
    missing = (places < 0) | (places >= count)
    own = logits.gather(-1, places.masked_fill(missing, 0)[..., None])[..., 0].masked_fill(missing, 0.0)
    return (total.log() + top - m.sum(own, tp)).mean()


def sequence_norms(m: Maps, tp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    """Between blocks the sequence is cut (Korthikanti et al. 2022)."""
    x = m.split(x, tp, 1)
    h = F.layer_norm(x, x.shape[-1:]) * m.copy(p["norm"], tp)
    h = F.gelu(m.copy(m.gather(h, tp, 1), tp) @ p["up"])
    x = x + m.reduce_scatter(h @ p["down"], tp, 1)
    return m.sum(x.square().sum(), tp)


def ulysses(m: Maps, sp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    batch, length, _ = x.shape
    q, k, v = [(x @ m.copy(p[name], sp)).view(batch, length, -1, 4) for name in "qkv"]
    q, k, v = [m.all_to_all(each, sp, 2, 1).transpose(1, 2) for each in (q, k, v)]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    out = m.all_to_all(out, sp, 1, 2).flatten(2) @ m.copy(p["o"], sp)
    return m.sum((x + out).square().sum(), sp)


def ring(m: Maps, sp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    q, k, v = [x @ m.copy(p[name], sp) for name in "qkv"]
    top = torch.full(q.shape[:2], -torch.inf, dtype=x.dtype)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for turn in range(sp.size):
        if turn:
            k, v = m.ring_shift(k, sp), m.ring_shift(v, sp)
        scores = q @ k.transpose(1, 2)
        new = torch.maximum(top, scores.amax(-1).detach())
        weights, shrink = (scores - new[..., None]).exp(), (top - new).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ v
        top = new
    return m.sum((out / total[..., None]).square().sum(), sp)


def experts(m: Maps, ep: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    gates = (x @ p["router"]).softmax(-1)
    own = m.split(gates, ep, 1)
    hidden = torch.einsum("td,edf->tef", m.copy(x, ep), p["up"]).relu()
    out = torch.einsum("tef,efd,te->td", hidden, p["down"], own)
    return (x + m.sum(out, ep)).square().mean()


def two_axes(m: Maps, tp: Axis, sp: Axis, p: Tree, x: torch.Tensor) -> torch.Tensor:
    h = F.layer_norm(x, x.shape[-1:]) * m.copy(p["norm"], sp)
    up, down = m.copy(p["up"], sp), m.copy(p["down"], sp)
    x = x + m.sum(F.gelu(m.copy(h, tp) @ up) @ down, tp)
    return m.sum(x.square().sum(), sp)


class Case(NamedTuple):
    """A function, its axes, shapes of its whole inputs, and path -> (axis, dim) of those that are cut."""

    fn: Callable[..., torch.Tensor]
    axes: tuple[str, ...]
    params: dict[str, tuple[int, ...]]
    inputs: tuple[tuple[int, ...], ...]
    cut: dict[str, tuple[str, int]]
    integers: int = 0  # below which inputs are numbers


CASES = [
    Case(
        mlp, ("tp",), {"norm": (6,), "up": (6, 8), "down": (8, 6)}, ((2, 3, 6),), {"up": ("tp", 1), "down": ("tp", 0)}
    ),
    Case(
        attention,
        ("tp",),
        {"q": (6, 32), "k": (6, 16), "v": (6, 16), "o": (32, 6)},
        ((2, 3, 6),),
        {"q": ("tp", 1), "k": ("tp", 1), "v": ("tp", 1), "o": ("tp", 0)},
    ),
    Case(vocabulary, ("tp",), {"table": (12, 5)}, ((2, 3), (2, 3)), {"table": ("tp", 0)}, integers=12),
    Case(
        sequence_norms,
        ("tp",),
        {"norm": (6,), "up": (6, 8), "down": (8, 6)},
        ((2, 4, 6),),
        {"up": ("tp", 1), "down": ("tp", 0)},
    ),
    Case(ulysses, ("sp",), {name: (8, 16) for name in "qkv"} | {"o": (16, 8)}, ((2, 8, 8),), {"x": ("sp", 1)}),
    Case(ring, ("sp",), {name: (6, 5) for name in "qkv"}, ((2, 8, 6),), {"x": ("sp", 1)}),
    Case(
        experts,
        ("ep",),
        {"router": (6, 4), "up": (4, 6, 5), "down": (4, 5, 6)},
        ((7, 6),),
        {"up": ("ep", 0), "down": ("ep", 0)},
    ),
    Case(
        two_axes,
        ("tp", "sp"),
        {"norm": (6,), "up": (6, 8), "down": (8, 6)},
        ((2, 4, 6),),
        {"up": ("tp", 1), "down": ("tp", 0), "x": ("sp", 1)},
    ),
]


def whole(case: Case, seed: int) -> tuple[Tree, list[torch.Tensor]]:
    """Params and inputs as one process has them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    params = {name: draw(shape) for name, shape in case.params.items()}
    if case.integers:
        return params, [torch.randint(case.integers, shape, generator=generator) for shape in case.inputs]
    return params, [draw(shape) for shape in case.inputs]


def cut(case: Case, params: Tree, inputs: list[torch.Tensor], axes: dict[str, Axis]) -> tuple[Tree, list[torch.Tensor]]:
    """This rank's pieces of them."""

    def own(name: str, x: torch.Tensor) -> torch.Tensor:
        if name not in case.cut:
            return x
        axis, dim = case.cut[name]
        return _piece(x, axes[axis], dim).clone()

    return {name: own(name, x) for name, x in params.items()}, [own("x", x) for x in inputs]


def varying(case: Case) -> dict[str, str]:
    """What check is told of the inputs."""
    return {"x" if name == "x" else f"p.{name}": axis for name, (axis, _) in case.cut.items()}
