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
    """Keeps `average = decay * average + (1 - decay) * params` in `state.extra[name]`, after each update.

    It begins with init's params, without a correction of its bias, and stays where an update is skipped. It has the
    leaves that are trained, in float32, or float64 where params are, also where these are stored in fewer bits. It lies
    where a leaf's moments do (`fz.offload`), and is saved and converted like them; with `fz.donate` it is overwritten,
    as soon as a group's params are final. `step.forward` uses the params; the average's outputs are those of
    `step.forward(state.replace(params=state.extra["ema"]), *inputs)`.

    Args:
        step: any step.
        decay: in [0, 1): how much of the average an update keeps.
        name: of the entry of `state.extra`. A step may keep any number of averages, each by a name of its own:
            `fz.ema(fz.ema(step, 0.9999), 0.99, name="fast")`.

    Raises:
        TypeError, ValueError: the decay is no such number, or the step keeps something else by this name.

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
    return step.with_state(Extra(name, source, _begun, update, kind="an ema", wide=True, fused=fused))


def _begun(params: Sharded) -> Sharded:
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
