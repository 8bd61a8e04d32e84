"""Rematerialisation: a unit keeps only its inputs, and runs again to pull back (Chen et al. 2016)."""

from __future__ import annotations

from fzero.base.patterns import also
from fzero.table.spec import S, need_step


def remat(step: S, pattern: str = "*") -> S:
    """Recomputes units in the pullback instead of keeping their activations; their randomness is replayed.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths: the leaves whose units are recomputed, of a unit all or none.

    Example:
        >>> step = fz.remat(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), "blocks.*")
        >>> [row.remat for row in step.rows([("blocks.0.w", (2,), torch.float32), ("head", (2,), torch.float32)])]
        [True, False]
    """
    need_step(step, "remat", pattern)
    return step.with_rule("remat", True, f"remat({also(pattern)[2:]})", pattern)
