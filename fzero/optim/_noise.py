"""Noise on gradients that fades with the updates (Neelakantan et al. 2015, 1511.06807)."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import as_float64, need_int
from fzero.base.follow import follows, root
from fzero.base.random import Seeds
from fzero.formats.bits import Counters, counters_of, first_of, normal
from fzero.formats.formats import ALIGN, CHUNK
from fzero.optim.base import need_hypers
from fzero.state.entered import entered
from fzero.state.sharded import Draw, Sharded
from fzero.table.layout import Key
from fzero.table.optimizer import GradientTransformation, Number


class NoiseState(NamedTuple):
    """Applied updates."""

    count: pytree.Count


def gradient_noise(eta: Number = 0.01, gamma: Number = 0.55, seed: int = 0) -> GradientTransformation:
    """Adds noise of the normal distribution N(0, eta / (1 + t)^gamma) to every gradient of update t, from 0 on.

    It is a member of `fz.chain`, as optax.add_noise is: before `fz.clip_by_global_norm` the sum is clipped, behind it
    the noise comes on top, and in `fz.partition` a part of the leaves has it. It is added once an update, to the mean
    gradient over microbatches and ranks, and the metric "grad_norm" is that without. Its random bits are hashed from
    (the state's seed, this seed, t, leaf path, offset in the leaf), so that they are the same on any number of ranks
    and after a restart, whatever lies where; of trees that are no step's, and in `fz.whole`, from this seed alone.
    Members of a map draw as `randomness=` of torch.func.vmap says. A joint norm to clip by (`grad_norm=`, pipelines) is
    of gradients without noise.

    Args:
        eta: the variance of update 0, finite and at least 0. It and `gamma` may be 0-d tensors, by which torch.func
            differentiates an update and what comes after it.
        gamma: how fast it fades, finite and at least -16, so that no number of updates is too large for a double.
        seed: tells two of these in one optimizer apart.

    Raises:
        TypeError, ValueError: one of these is no such number.

    Example:
        >>> noise = fz.gradient_noise(0.04, gamma=0.0)
        >>> updates, state = noise.update({"w": torch.ones(10_000)}, noise.init(None))
        >>> state.count, round(updates["w"].mean().item(), 1), round(updates["w"].std().item(), 1)
        (Count(1), 1.0, 0.2)
    """
    least = "a finite number of at least"
    need_hypers("gradient_noise", eta=(eta, f"{least} 0"), gamma=(gamma, f"{least} -16"))
    seed = need_int(seed, "gradient_noise", "seed")
    return GradientTransformation(
        _begun, functools.partial(_gradient_noise, eta, gamma, seed), by_leaf=True, blank=True
    )


def _begun(params: object) -> NoiseState:
    return NoiseState(pytree.Count(0))


def _gradient_noise(
    eta: Number, gamma: Number, seed: int, grads: object, state: NoiseState, params: object = None, **extra: object
) -> tuple[object, NoiseState]:
    count = state.count.value
    size, new = _deviation(eta, gamma, count), NoiseState(state.count.next())
    if not isinstance(grads, Sharded):
        names, leaves, spec = pytree.named_leaves(grads)
        draw = Draw(Seeds(0, seed).next(), count)
        pairs = zip(names, leaves, strict=True)
        return pytree.unflatten(spec, [g + size * _noise_of(draw, name, g) for name, g in pairs]), new
    own = params.draw if isinstance(params, Sharded) else None
    draw, out = Draw(Seeds(own.seed if own else 0, seed).next(), count), dict[Key, torch.Tensor]()
    for key in grads.groups:
        g, times = grads.local(key), size
        if isinstance(size, torch.Tensor):
            times = entered(grads, key, size).to(g.device, g.dtype)
        out[key] = g + times * _noise_in(draw, grads, key, g)
    return grads.with_buffers(out), new


def _deviation(eta: Number, gamma: Number, count: int) -> Number:
    if not (follows(eta) or follows(gamma)):
        return math.sqrt(float(eta) * float(1 + count) ** -float(gamma))  # which may end at 0, and not at infinity
    return root(as_float64(eta) * (1 + count) ** -as_float64(gamma))


def _noise_of(draw: Draw, path: str, leaf: torch.Tensor) -> torch.Tensor:
    """The noise of a whole leaf."""
    counters = counters_of(first_of(draw.seed, draw.count, path), leaf.numel())
    return _drawn(draw, counters, leaf)[: leaf.numel()].view(leaf.shape)


def _noise_in(draw: Draw, tree: Sharded, key: Key, own: torch.Tensor) -> torch.Tensor:
    """The noise of this rank's slice of a group; there is none between leaves."""
    rank, end, parts = tree.rank_of(key), 0, list[torch.Tensor]()
    noise = _drawn(draw, draw.counters(tree.layout, key, rank), own)
    for _, start, stop in tree.layout.pieces(key, rank):
        if start < stop:
            parts += [torch.zeros_like(noise[end:start]), noise[start:stop]]
            end = stop
    return torch.cat([*parts, torch.zeros_like(noise[end:])])


def _drawn(draw: Draw, counters: Counters, like: torch.Tensor) -> torch.Tensor:
    """What some counters draw, flat; of each member of a map by itself where it says so."""
    generator = torch.Generator().manual_seed(Seeds(draw.seed, draw.count).next())
    own = torch.randint(-(1 << 31), 1 << 31, (), generator=generator, dtype=torch.int64, device="cpu")
    own = own.to(like.device, torch.int32)
    end = counters.count * ALIGN
    parts = [counters.keys(like.device, at, min(at + CHUNK, end)) for at in range(0, max(1, end), CHUNK)]
    return torch.cat([normal(keys, own).to(like.dtype).flatten() for keys in parts])
