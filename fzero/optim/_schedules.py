"""Schedules: functions from the number of applied updates to a learning rate; of numbers, or of 0-d tensors."""

from __future__ import annotations

import functools
import math

import torch

from fzero.base.arguments import need_int, renamed
from fzero.table.needs import need_scalar
from fzero.table.optimizer import Number, Schedule


def constant(lr: Number) -> Schedule:
    """A schedule with the same rate for all updates.

    Args:
        lr: the rate, a float or a 0-d tensor.

    Returns:
        A function of the number of updates applied so far.

    Example:
        >>> fz.constant(0.1)(1000)
        0.1
    """
    need_scalar(lr, "constant", "lr")
    return functools.partial(_constant, lr)


def _constant(lr: Number, count: int) -> Number:
    return lr


@renamed(init_value="start", end_value="end", transition_steps="steps")
def linear(start: Number, end: Number, steps: int) -> Schedule:
    """A schedule that goes from `start` to `end` on a straight line, and stays there.

    Args:
        start: rate of the first update.
        end: rate after `steps` updates and later.
        steps: length of the line, in updates.

    Returns:
        A function of the number of updates applied so far.

    Example:
        >>> fz.linear(1.0, 0.0, 4)(1)
        0.75
    """
    need_scalar(start, "linear", "start")
    need_scalar(end, "linear", "end")
    need_int(steps, "linear", "steps", "a number of updates", least=1)
    return functools.partial(_linear, start, end, steps)


def _linear(start: Number, end: Number, steps: int, count: Number) -> Number:
    if isinstance(count, torch.Tensor):  # in a graph
        return torch.where(count >= steps, end, start + (end - start) * count / steps)
    return end if count >= steps else start + (end - start) * count / steps


@renamed(peak_value="peak", warmup_steps="warmup", decay_steps="total", end_value="end")
def warmup_cosine(peak: Number, warmup: int, total: int, end: Number = 0.0) -> Schedule:
    """A schedule with linear warm-up to `peak`, then a half cosine down to `end`.

    The first update already has the rate `peak / warmup`, not zero. optax's names of the arguments work too.

    Source: Loshchilov & Hutter, SGDR, 2017 (arXiv 1608.03983).

    Args:
        peak: the largest rate.
        warmup: length of the warm-up, in updates.
        total: the update at which the rate is `end`, counted from the start of the warm-up.
        end: the last rate, which then stays.

    Returns:
        A function of the number of updates applied so far.

    Raises:
        ValueError: not `0 <= warmup <= total`.

    Example:
        >>> schedule = fz.warmup_cosine(1.0, warmup=10, total=110)
        >>> schedule(0), schedule(9), round(schedule(59), 3), schedule(200)
        (0.1, 1.0, 0.5, 0.0)
    """
    need_scalar(peak, "warmup_cosine", "peak")
    need_scalar(end, "warmup_cosine", "end")
    need_int(warmup, "warmup_cosine", "warmup", "a number of updates")
    need_int(total, "warmup_cosine", "total", "a number of updates")
    if not 0 <= warmup <= total:
        raise ValueError(f"warmup_cosine: got warmup={warmup}, total={total}; expected 0 <= warmup <= total updates.")

    return functools.partial(_warmup_cosine, peak, warmup, total, end)


def _warmup_cosine(peak: Number, warmup: int, total: int, end: Number, count: Number) -> Number:
    if isinstance(count, torch.Tensor):  # in a graph
        progress = ((count - warmup + 1) / max(1, total - warmup)).clamp(max=1.0)
        falling = end + (peak - end) * 0.5 * (1 + torch.cos(math.pi * progress))
        return torch.where(count < warmup, peak * (count + 1) / max(1, warmup), falling)
    if count < warmup:
        return peak * (count + 1) / warmup
    progress = min(1.0, (count - warmup + 1) / max(1, total - warmup))
    return end + (peak - end) * 0.5 * (1 + math.cos(math.pi * progress))
