"""Donation: the state that a step takes is overwritten by the one it returns (JAX's donate_argnums)."""

from __future__ import annotations

import dataclasses

from fzero.table.spec import S, need_step


def donate(step: S) -> S:
    """Updates the state in place, as JAX's `donate_argnums` does: half the memory for state.

    The state that you pass to a step is dead afterwards. If you use it, the error says which update took it. A buffer
    that something else still holds is copied instead, and one warning names its leaf.

    Args:
        step: any step. `torch.func` does not go through a step that donates.

    Returns:
        A new step.

    Example:
        >>> step = fz.donate(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> old = step.init({"w": torch.ones(1)})
        >>> new, _ = step(old, torch.ones(1))
        >>> old
        TrainState(dead: This state was donated to the step that applied update 1; ...)
    """
    need_step(step, "donate")
    return dataclasses.replace(step, donates=True)
