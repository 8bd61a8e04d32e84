"""How to write a transform that adds state: an exponential moving average of the params (Polyak & Juditsky 1992).

A step that keeps more in its state is still a `Step`: any other transform goes around it, in any order, and it has
`vjp`, `update` and `forward`. `map` sees this rank's slices only, so the average is sharded as the params are.
"""

from __future__ import annotations

import functools

import fzero as fz


def ema(step: fz.Step, decay: float = 0.999) -> fz.Step:
    """After every update `average = decay * average + (1 - decay) * params`, in `state.extra["ema"]`.

    Example:
        >>> step = ema(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(1.0)), decay=0.5)
        >>> state, _ = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> fz.gather(state.extra["ema"])["w"]
        tensor([0.5000, 0.5000])
        >>> step.forward(state.replace(params=state.extra["ema"]), torch.ones(2))
        tensor(1.)
    """
    # functions of this module, so that the step can be pickled
    return step.with_state(fz.Extra("ema", f"ema({decay})", copied, functools.partial(averaged, decay)))


def copied(params: fz.Sharded) -> fz.Sharded:
    return params.map(lambda p: p)


def averaged(decay: float, average: fz.Sharded, params: fz.Sharded, applied: bool) -> fz.Sharded:
    return average.map(lambda a, p: decay * a + (1 - decay) * p, params) if applied else average
