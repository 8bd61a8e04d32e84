"""Muon: momentum whose matrices are made orthogonal (Jordan 2024, kellerjordan.github.io/posts/muon), as torch has it.

Each matrix is brought to one rank, in bf16, orthogonalised there, and brought back, while others are on their way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool, need_int, need_number, renamed, wrong
from fzero.base.follow import is_transformed
from fzero.kernels.onepass import math_dtype
from fzero.optim._paused import Steps, run_all, together
from fzero.optim.base import Rated, known, need_hypers, rate, transformation_of, values, write_values
from fzero.state.moments import zeros_like
from fzero.state.owners import Leaves, on_every_rank, start_slices, start_whole
from fzero.state.sharded import Draw, Sharded
from fzero.state.speed import SLOW, slowdown
from fzero.table.layout import Key
from fzero.table.needs import need_rate, numbers_in
from fzero.table.optimizer import GradientTransformation, Number, Paused, Schedule

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of the quintic whose slope at zero is the largest
CHUNK = 1 << 16  # elements that stay in cache from one operation to the next
AHEAD = 2  # groups that are on their way to their owners while one is computed with
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class MuonState(NamedTuple):
    """State of `fz.muon`: number of applied updates, and the momentum (a tree like the params)."""

    count: pytree.Count
    momentum: object


@renamed(steps="ns_steps", adjust_lr="adjust_lr_fn")
def muon(
    lr: Number | Schedule,
    momentum: Number = 0.95,
    weight_decay: Number = 0.1,
    nesterov: bool = True,
    ns_steps: int = 5,
    eps: float = 1e-7,
    adjust_lr_fn: str = "original",
) -> GradientTransformation:
    """Muon: momentum whose matrices are made orthogonal, as `torch.optim.Muon`.

    `b = lerp(b, g, 1 - momentum)` and `d = lerp(g, b, momentum)`, then
    `p -= lr * (scale * orthogonal(d) + weight_decay * p)`.

    - Every leaf is a matrix [rows, columns], or a stack of matrices [n, rows, columns]. Give the other leaves another
      optimizer: `fz.partition({"*norm*|*bias|*embed*": fz.adamw(lr), "*": fz.muon(lr)})`.
    - `orthogonal` runs Newton-Schulz iterations in bfloat16, or in float64 if the params are float64.
    - Under ZeRO each matrix is made orthogonal on one rank, which holds the whole matrix only for that time.

    Source: Jordan, 2024 (kellerjordan.github.io/posts/muon).

    Args:
        lr: learning rate, or a schedule: a function of the number of updates applied so far.
        momentum: decay rate of the momentum, in [0, 1).
        weight_decay: decoupled. It is multiplied by the learning rate.
        nesterov: step along `d`; otherwise along `b`.
        ns_steps: number of Newton-Schulz iterations. Until 1.0 the older names of this and of `adjust_lr_fn` work
            too, `steps` and `adjust_lr`.
        eps: the smallest norm that a matrix is divided by.
        adjust_lr_fn: how `scale` follows the shape. "original": `sqrt(max(1, rows / columns))`. "match_rms_adamw":
            `0.2 * sqrt(max(rows, columns))`, which keeps AdamW's learning rates and decays (Moonshot, 2025, arXiv
            2502.16982).

    Raises:
        ValueError: when the state begins, a leaf is not a matrix.

    Example:
        >>> optimizer = fz.muon(1.0, weight_decay=0.0)
        >>> params = {"w": torch.eye(2, dtype=torch.float64)}
        >>> updates, _ = optimizer.update({"w": params["w"] / 8}, optimizer.init(params), params)
        >>> updates["w"].round(decimals=2)
        tensor([[-1.1100, -0.0000],
                [-0.0000, -1.1100]], dtype=torch.float64)
    """
    need_rate(lr, "muon")
    need_bool(nesterov, "muon", "nesterov")
    need_int(ns_steps, "muon", "ns_steps", "how many steps of Newton and Schulz", least=1)
    unit, least = "a number in [0, 1)", "at least 0"
    need_hypers("muon", momentum=(momentum, unit), weight_decay=(weight_decay, least), eps=(eps, "a positive number"))
    need_number(eps, "muon", "eps")
    if not isinstance(adjust_lr_fn, str):
        raise wrong("muon", "adjust_lr_fn", adjust_lr_fn, f"one of {', '.join(map(repr, SCALES))}")
    if adjust_lr_fn not in SCALES:
        raise ValueError(f"muon: got adjust_lr_fn={adjust_lr_fn!r}, expected one of {', '.join(map(repr, SCALES))}.")
    own = _Muon(lr, momentum, weight_decay, nesterov, ns_steps, eps, adjust_lr_fn)
    return transformation_of(own, blank=True, exchanges=2)


def orthogonal(x: torch.Tensor, steps: int, eps: float) -> torch.Tensor:
    """A matrix of nearly the same singular vectors, with singular values near one; [..., rows, columns]."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    norm = x.norm() if x.ndim == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=eps)
    if x.dtype == torch.bfloat16 and x.device.type == "cpu" and slowdown(torch.bfloat16) >= SLOW:
        x = _iterated(x.float(), steps, lambda y: y.bfloat16().float()).bfloat16()  # the same roundings
    else:
        x = _iterated(x, steps, lambda y: y)
    return x.mT if tall else x


def _iterated(x: torch.Tensor, steps: int, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    a, b, c = COEFFICIENTS
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = rounded(x @ x.mT)
        x = rounded(add(x, rounded(add(gram, gram, gram, beta=b, alpha=c)), x, beta=a))
    return x


@dataclass(frozen=True)
class _Muon(Rated):
    lr: Number | Schedule
    momentum: Number
    weight_decay: Number
    nesterov: bool
    steps: int
    eps: float
    adjust_lr: str
    name = "muon"

    def init(self, params: object) -> MuonState:
        if isinstance(params, Sharded):
            slots = [slot for key in params.groups for slot in params.layout.groups[key].slots]
            shapes = [(slot.path, slot.shape) for slot in slots]
        else:
            shapes = [(path, tuple(leaf.shape)) for path, leaf in zip(*pytree.named_leaves(params)[:2], strict=True)]
        for path, shape in shapes:
            if len(shape) not in (2, 3):
                raise ValueError(
                    f"muon: leaf {path!r} has shape {shape}, expected a matrix, or several [n, rows, columns]. Give it "
                    f"another optimizer: fz.partition({{{path!r}: fz.adamw(lr), '*': fz.muon(lr)}})."
                )
        return MuonState(pytree.Count(0), zeros_like(params))

    def update(self, grads: object, old: MuonState, params: object, **extra: object) -> tuple[object, MuonState]:
        now, new = rate(self.lr, old.count.value), old.count.next()
        of_leaf = functools.partial(self._of_leaf, now)
        if not isinstance(grads, Sharded) or not isinstance(params, Sharded):
            pairs = [of_leaf(*each) for each in zip(*map(pytree.leaves, (grads, params, old.momentum)), strict=True)]
            trees = [pytree.unflatten(pytree.flatten(grads)[1], each) for each in zip(*pairs, strict=True)]
            return trees[0], MuonState(new, trees[1])
        assert isinstance(old.momentum, Sharded)
        if not is_transformed():
            own = MuonState(old.count, old.momentum.map(torch.clone))  # as it is written
            made = run_all([self._group(params, grads, own, key, passes=True) for key in params.groups], AHEAD)
            updates = grads.with_buffers({key: tree.local(key) for tree in made for key in tree.groups}, 1.0)
            return updates, self.combine(params, own, ())
        updates, moved = on_every_rank((grads, params, old.momentum), lambda _, leaves: of_leaf(*leaves))
        return updates, MuonState(new, moved)

    def _of_leaf(
        self, now: Number, g: torch.Tensor, p: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The update of one whole leaf, and its momentum."""
        b = g + self.momentum * (b - g)
        d = b + (1 - self.momentum) * (g - b) if self.nesterov else b
        o = orthogonal(d.to(_wire(d.dtype)), self.steps, self.eps).to(d.dtype)
        return -now * (SCALES[self.adjust_lr](*p.shape[-2:]) * o + self.weight_decay * p), b

    def paused(self, params: Sharded, grads: Sharded, old: MuonState, **extra: object) -> Paused:
        return together([self._group(params, grads, old, key) for key in params.groups], AHEAD)

    def combine(self, params: Sharded, old: MuonState, parts: Sequence[object]) -> MuonState:
        return MuonState(old.count.next(), old.momentum)

    def _group(self, params: Sharded, grads: Sharded, old: MuonState, key: Key, passes: bool = False) -> Steps[Sharded]:
        """Updates one group, over an exchange in and one out; or returns updates, where others come behind it."""
        assert isinstance(old.momentum, Sharded)
        now, (decay,) = known(rate(self.lr, old.count.value), self.lr), numbers_in(self.weight_decay)
        coming, device = self._start(params, grads, old.momentum, key), grads.device
        del grads  # or those of every group that waits would be kept
        (leaves,) = yield coming
        del coming
        found = {leaf: orthogonal(x, self.steps, self.eps) for leaf, x in leaves.items()}
        del leaves
        like = torch.empty(0, dtype=_wire(_dtype(params, key)), device=device)
        (made,) = yield start_slices(params, key, [found], like, "orthogonal matrices")
        own = values(params.only([key])).map(torch.clone) if passes else params
        self._apply(own, key, made, now, (0.0 if passes else 1.0) - now * decay)
        return own

    def _start(self, params: Sharded, grads: Sharded, momentum: Sharded, key: Key) -> Callable[[], list[Leaves]]:
        """Writes a group's momentum, and begins to bring the directions to their owners."""
        (keep,) = numbers_in(self.momentum)
        dtype = _dtype(params, key)
        g, b, wire = grads.local(key), momentum.local(key), _wire(dtype)
        there = momentum.format(key).plain and b.dtype == dtype
        b = b if there else b.to(dtype)
        d = torch.empty_like(b, dtype=wire)
        for own, moved, way in zip(g.split(CHUNK), b.split(CHUNK), d.split(CHUNK), strict=True):
            own = own.to(dtype) if grads.scale == 1.0 else own.to(dtype) / grads.scale
            moved.lerp_(own, 1 - keep)
            way.copy_(own.lerp(moved, keep) if self.nesterov else moved)
        if not there:
            write_values(momentum, key, b, params.draw or Draw(0, 0))
        return start_whole(params, key, [d], "matrices to orthogonalise")

    def _apply(self, params: Sharded, key: Key, found: Leaves, now: float, keep: float) -> None:
        """Writes keep * params - now * scale * orthogonal over a group's params."""
        p, rows, dtype = params.local(key), params.layout.rows, _dtype(params, key)
        there = params.format(key).plain and p.dtype == dtype and not params.format(key).rounds
        p = p if there else p.to(dtype, copy=True)
        for slot, start, stop in params.layout.pieces(key, params.rank_of(key)):
            scale, way = now * SCALES[self.adjust_lr](*rows[slot.leaf].shape[-2:]), found[slot.leaf]
            for place in range(start, stop, CHUNK):
                own = p[place : min(place + CHUNK, stop)]
                own.mul_(keep).add_(way[place - start :][: own.numel()], alpha=-scale)
        if not there:
            write_values(params, key, p, params.draw or Draw(0, 0))


def _dtype(params: Sharded, key: Key) -> torch.dtype:
    """The dtype that an update of a group is computed in."""
    return math_dtype(params.format(key).dtype)


def _wire(dtype: torch.dtype) -> torch.dtype:
    """The dtype that matrices are sent and orthogonalised in."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16
