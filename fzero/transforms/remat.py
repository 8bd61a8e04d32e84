"""Rematerialisation: a unit keeps only its inputs, and runs again to pull back (Chen et al. 2016)."""

from __future__ import annotations

from fzero.table.needs import need_step
from fzero.table.spec import S


def remat(step: S) -> S:
    """Recomputes every unit in the pullback instead of keeping its activations; its randomness is replayed.

    Example:
        >>> fz.remat(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))).remats
        True
    """
    need_step(step, "remat")
    return step.with_rule("remat", True, "remat()")
