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
from fzero.optim._leaf_states import need_whole_leaves
from fzero.optim.base import need_hypers
from fzero.state.sharded import Draw, Sharded
from fzero.state.sliced import to_sharded
from fzero.table.layout import Key
from fzero.table.optimizer import GradientTransformation, Number


class NoiseState(NamedTuple):
    """State of `fz.gradient_noise`: number of applied updates."""

    count: pytree.Count


def gradient_noise(eta: Number = 0.01, gamma: Number = 0.55, seed: int = 0) -> GradientTransformation:
    """Adds Gaussian noise to the gradients, less of it with every update.

    The noise of update t, counted from 0, has the variance `eta / (1 + t) ** gamma`. It is a member of `fz.chain`, as
    `optax.add_noise`: before `fz.clip_by_global_norm` the noise is clipped too, behind it it is not.

    - It is added once per update, to the mean gradient over microbatches and ranks.
    - `metrics["grad_norm"]` is without noise, and so is the norm over all stages that a pipeline clips by.
    - It depends on the state's seed, on `seed`, t and the leaf. So it is the same on any number of ranks and after a
      restart; slices of `fz.shard_tensor` have their own. On plain pytrees and inside `fz.whole`, the state's seed is
      left out.

    Source: Neelakantan et al., 2015 (arXiv 1511.06807).

    Args:
        eta: variance of the first update's noise, at least 0.
        gamma: how fast the noise fades, at least -16.
        seed: give different ones to two of these in one optimizer.

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
        _begun, functools.partial(_gradient_noise, eta, gamma, seed), blank=True, elementwise=True
    )


def _begun(params: object) -> NoiseState:
    return NoiseState(pytree.Count(0))


def _gradient_noise(
    eta: Number, gamma: Number, seed: int, grads: object, state: NoiseState, params: object = None, **extra: object
) -> tuple[object, NoiseState]:
    count = state.count.value
    size, new = _deviation(eta, gamma, count), NoiseState(state.count.next())
    if not isinstance(grads, Sharded):
        need_whole_leaves("gradient_noise")
        names, leaves, spec = pytree.named_leaves(grads)
        draw = Draw(Seeds(0, seed).next(), count)
        pairs = zip(names, leaves, strict=True)
        return pytree.unflatten(spec, [g + size * _noise_of(draw, name, g) for name, g in pairs]), new
    own = params.draw if isinstance(params, Sharded) else None
    draw, out = Draw(Seeds(own.seed if own else 0, seed).next(), count), dict[Key, torch.Tensor]()
    for key in grads.groups:
        g, times = grads.local(key), size
        if isinstance(size, torch.Tensor):
            times = to_sharded(grads, key, size).to(g.device, g.dtype)
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
    rank = tree.rank_of(key)
    noise = _drawn(draw, draw.counters(tree.layout, key, rank), own)
    for gap in tree.layout.gaps(key, rank, noise):
        gap.zero_()
    return noise


def _drawn(draw: Draw, counters: Counters, like: torch.Tensor) -> torch.Tensor:
    """What some counters draw, flat; of each member of a map by itself where it says so."""
    generator = torch.Generator().manual_seed(Seeds(draw.seed, draw.count).next())
    own = torch.randint(-(1 << 31), 1 << 31, (), generator=generator, dtype=torch.int64, device="cpu")
    own = own.to(like.device, torch.int32)
    end = counters.count * ALIGN
    parts = [counters.keys(like.device, at, min(at + CHUNK, end)) for at in range(0, max(1, end), CHUNK)]
    return torch.cat([normal(keys, own).to(like.dtype).flatten() for keys in parts])
