"""Attention of one process, written with torch alone, and everything that an attention function owes beside values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fzero as fz
from fzero.base.context import averaged, during
from fzero.comm.axis import Axis
from fzero.parallel.ring import spans_of

F64 = torch.float64
Attend = Callable[..., torch.Tensor]


class Case(NamedTuple):
    """One drawn attention over a cut sequence.

    Attributes:
        chunks: 0 for a ring, else the parts that Ulysses' heads come in.
        averaged: as in a step that takes means over the ranks.
    """

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    d: int = 3
    size: int = 2
    chunks: int = 0
    order: str = "contiguous"
    options: tuple[tuple[str, Any], ...] = ()
    custom: bool = False
    batch: int = 2
    averaged: bool = False

    @property
    def total(self) -> int:
        return sum(self.lengths)

    def tensors(self, seed: int) -> tuple[torch.Tensor, ...]:
        """q, k and v of the whole sequence, and a cotangent."""
        generator = torch.Generator().manual_seed(seed)
        kinds = ((self.heads, self.d), (self.kv_heads, self.d), (self.kv_heads, self.size), (self.heads, self.size))
        return tuple(
            torch.randn(self.batch, heads, self.total, d, generator=generator, dtype=F64) for heads, d in kinds
        )

    def places(self, rank: int) -> torch.Tensor:
        """Those of a rank's tokens in the whole sequence."""
        spans = spans_of(self.lengths, self.order, "a test")[rank]
        return torch.cat([torch.arange(start, stop) for start, stop in spans])

    def attention(self, ax: Axis) -> Attend:
        options = dict(self.options)
        if not self.chunks:
            return fz.parallel.ring(ax, self.order, **options)
        if self.custom:
            return fz.parallel.ulysses(functools.partial(plain, **options), ax)
        return fz.parallel.ulysses(None, ax, self.chunks, **options)

    def plain(self) -> Attend:
        return functools.partial(plain, **dict(self.options))


def plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    window: int | None = None,
    documents: tuple[int, ...] | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """All scores at once."""
    place = torch.arange(q.shape[2])
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
    if is_causal:
        seen &= place <= place[:, None]
    if window is not None:
        seen &= (place - place[:, None]).abs() < window
    if documents is not None:
        which = torch.bucketize(place, torch.tensor(documents[1:]), right=True)
        seen &= which == which[:, None]
    k, v = [x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v)]
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v


def derivatives(
    attend: Attend, tensors: tuple[torch.Tensor, ...], along: tuple[torch.Tensor, ...]
) -> dict[str, torch.Tensor]:
    """Values and derivatives of several orders by q, k and v in directions `along`; the token is dim -2 of each."""
    f, (*inputs, weight), directions = torch.func, tensors, along[:3]

    def loss(*inputs: torch.Tensor) -> torch.Tensor:
        return (attend(*inputs).sin() * weight).sum()

    def slope(*inputs: torch.Tensor) -> torch.Tensor:
        return sum([(g * d).sum() for g, d in zip(grad(*inputs), directions, strict=True)], torch.zeros(()))

    grad: Callable[..., Any] = f.grad(loss, argnums=(0, 1, 2))
    pair: Any = f.vjp(attend, *inputs)
    several = [torch.stack([x, 2 * x, x.sin()]) for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    once = torch.autograd.grad(loss(*leaves), leaves, create_graph=True)
    found: dict[str, Any] = {
        "value": pair[0],
        "vjp": pair[1](weight),
        "jvp": f.jvp(attend, tuple(inputs), directions)[1],
        "jvp of grad": f.jvp(grad, tuple(inputs), directions)[1],
        "jvp of jvp": f.jvp(lambda *own: f.jvp(attend, own, directions)[1], tuple(inputs), directions)[1],
        "grad of grad": f.grad(slope, argnums=(0, 1, 2))(*inputs),
        "third": f.jvp(f.grad(slope, argnums=(0, 1, 2)), tuple(inputs), directions)[1],
        "vmap": f.vmap(grad)(*several),
        "vmap of one": f.vmap(grad, in_dims=(None, 0, None))(inputs[0], several[1], inputs[2]),
        "vmap of pullback": f.vmap(pair[1])(torch.stack([weight, weight.cos()])),
        "vmap of hvp": f.vmap(lambda *d: f.jvp(grad, tuple(inputs), d)[1])(*[torch.stack([d, -d]) for d in directions]),
        "autograd": once,
        "autograd twice": torch.autograd.grad(sum([x.square().sum() for x in once], torch.zeros(())), leaves),
    }
    return {
        f"{name} {place}": each.detach()
        for name, of in found.items()
        for place, each in enumerate(of if isinstance(of, tuple) else (of,))
    }


def differences(rank: int, case: Case) -> dict[str, float]:
    """The largest difference of each derivative on this rank from that of one process."""
    places = case.places(rank)

    def cut(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(x[..., places, :] for x in tensors)

    tensors, along = case.tensors(0), case.tensors(1)
    ax = fz.parallel.axis(None, "sp")
    with during(averaged, (ax,) if case.averaged else ()):
        found = derivatives(case.attention(ax), cut(tensors), cut(along))
    expected = derivatives(case.plain(), tensors, along)
    return {
        name: (found[name] - whole[..., places, :]).abs().max().item() if len(places) else 0.0
        for name, whole in expected.items()
    }


def need_equal(case: Case, backend: str = "threads") -> None:
    for found in fz.testing.run_ranks(functools.partial(differences, case=case), len(case.lengths), backend=backend):
        far = {name: size for name, size in found.items() if not size < 1e-10}
        assert not far, (case, far)
