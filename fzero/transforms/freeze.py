"""Frozen leaves: used, sharded and gathered like all others, but never differentiated or updated."""

from __future__ import annotations

from fzero.table.rows import FROZEN
from fzero.table.spec import S, need_step


def freeze(step: S, pattern: str) -> S:
    """Leaves whose path matches get no grads, no moments and no updates.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths, alternatives separated by `|`. An alternative that matches nothing is an
            error at `plan` and `init`: what should be frozen would be trained.

    Example:
        >>> step = fz.freeze(fz.train_step(lambda p, x: (p["a"] * p["b"] * x).sum(), fz.sgd(0.1)), "a")
        >>> state, _ = step(step.init({"a": torch.ones(1), "b": torch.ones(1)}), torch.ones(1))
        >>> fz.gather(state.params)
        {'a': tensor([1.]), 'b': tensor([0.9000])}
    """
    need_step(step, "freeze", pattern)
    return step.with_rule(FROZEN, True, f"freeze({pattern!r})", pattern)
