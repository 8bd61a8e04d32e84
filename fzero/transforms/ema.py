"""An exponential moving average of the params (Polyak & Juditsky 1992), sharded and placed as moments are."""

from __future__ import annotations

import functools

import torch

from fzero.base.arguments import need_number, need_str
from fzero.formats.formats import CHUNK, chunks
from fzero.kernels.onepass import ON_CUDA, math_dtype
from fzero.state.sharded import Sharded
from fzero.table.spec import Extra, S, need_step


def ema(step: S, decay: float, *, name: str = "ema") -> S:
    """Keeps an exponential moving average of the params.

    After each update, `average = decay * average + (1 - decay) * params`.

    - The average is `state.extra[name]`, sharded and offloaded as moments are, and saved with the state.
    - It begins with the params of `init`, without bias correction. If an update is skipped, it stays.
    - It has the trained leaves, in float32 (float64 for float64 params), even if params are stored in fewer bits.
    - Evaluate it with `step.forward(state.replace(params=state.extra["ema"]), *inputs)`.

    Args:
        step: any step.
        decay: in [0, 1): how much of the average an update keeps.
        name: the name of the entry. A step may keep several averages: `fz.ema(fz.ema(step, 0.9999), 0.99,
            name="fast")`.

    Returns:
        A new step.

    Raises:
        TypeError: `decay` is no number, or `name` no string.
        ValueError: `decay` is not in [0, 1), or the step keeps something else by this name.

    Source:
        Polyak & Juditsky 1992, https://doi.org/10.1137/0330046.

    Example:
        >>> step = fz.ema(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(1.0)), 0.5)
        >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> fz.gather(state.extra["ema"])["w"]
        tensor([0.5000, 0.5000])
        >>> step.forward(state.replace(params=state.extra["ema"]), torch.ones(2))
        tensor(1.)
    """
    need_step(step, "ema")
    need_number(decay, "ema", "decay", "a number in [0, 1)")
    if not 0.0 <= decay < 1.0:
        raise ValueError(f"ema: got decay={decay}, expected a number in [0, 1).")
    update, fused = functools.partial(_averaged, float(decay)), functools.partial(_write, float(decay))
    need_str(name, "ema", "name", "the name of an entry of state.extra")
    source = f"ema({float(decay)})" if name == "ema" else f"ema({float(decay)}, name={name!r})"
    return step.with_state(Extra(name, source, begun, update, kind="an ema", fused=fused))


def begun(params: Sharded) -> Sharded:
    """The trained params, in float32 or float64."""
    return params.only(params.layout.trainable).map(lambda p: p.to(math_dtype(p.dtype)))


def _averaged(decay: float, average: Sharded, params: Sharded, applied: bool) -> Sharded:
    def one(a: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        return decay * a + (1 - decay) * p.to(math_dtype(p.dtype))

    return average.map(one, params.only(average.groups)) if applied else average


def _write(decay: float, average: Sharded, params: Sharded) -> None:
    """The same, written to the average: in one pass over it, chunk by chunk, so that nothing else is made."""
    for key in average.groups:
        own, stored = average.local(key), params.stored(key)
        for start, stop in chunks(own, CHUNK if own.device.type == "cpu" else ON_CUDA):
            part = own[start:stop]
            part.mul_(decay).add_((1 - decay) * stored.cut(start, stop).to(part.dtype))
