"""Frozen leaves: used, sharded and gathered like all others, but never differentiated or updated."""

from __future__ import annotations

from fzero.base.arguments import need_bool
from fzero.table.rows import FROZEN, Frozen
from fzero.table.spec import S, need_step


def freeze(step: S, pattern: str, keep_moments: bool = False) -> S:
    """Freezes leaves: they are used as before, but get no gradients and no updates.

    They have no moments either, unless `keep_moments=True`. `fz.convert(state, step)` and `fz.load(path, step)` freeze
    and thaw leaves in the middle of a run. Then:

    - Each leaf has its own count of updates for bias correction, as torch's optimizers have with `requires_grad`.
    - A thawed leaf begins with moments and count of zero. If it has kept its moments, it goes on where it stopped.
    - Schedules, `state.step` and `metrics["lr"]` count the updates of the run.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to freeze. `plan` and `init`
            refuse an alternative that matches no leaf.
        keep_moments: True keeps moments and counts while the leaves are frozen. They take memory, and are saved and
            converted like others. Averages (`fz.ema`, `fz.lookahead`) are dropped in either case, and begin anew once
            the leaf is thawed.

    Returns:
        A new step.

    Raises:
        ValueError: a leaf is frozen both with and without its moments.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["a"] * p["b"] * x).sum(), fz.adam(0.1))
        >>> first = fz.freeze(step, "a", keep_moments=True)
        >>> state, _ = first(first.init({"a": torch.ones(1), "b": torch.ones(1)}), torch.ones(1))
        >>> fz.gather(state.params)
        {'a': tensor([1.]), 'b': tensor([0.9000])}
        >>> state, _ = step(fz.convert(state, step), torch.ones(1))
        >>> state.step, fz.gather(state.params)["a"]
        (2, tensor([0.9000]))
    """
    need_step(step, "freeze", pattern)
    need_bool(keep_moments, "freeze", "keep_moments")
    said = f"{pattern!r}, keep_moments=True" if keep_moments else repr(pattern)
    return step.with_rule(FROZEN, Frozen.KEEPS if keep_moments else True, f"freeze({said})", pattern)
