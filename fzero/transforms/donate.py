"""Donation: the state that a step takes is overwritten by the one it returns (JAX's donate_argnums)."""

from __future__ import annotations

import dataclasses

from fzero.table.spec import S, need_step


def donate(step: S) -> S:
    """Updates in place: the state passed in is dead afterwards, and using it raises an error that says so.

    A buffer that somebody else still holds is copied instead, with one warning that names the leaf.

    Example:
        >>> step = fz.donate(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> old = step.init({"w": torch.ones(1)})
        >>> new, _ = step(old, torch.ones(1))
        >>> old
        TrainState(dead: This state was donated to the step that applied update 1; ...)
    """
    need_step(step, "donate")
    return dataclasses.replace(step, donates=True)
