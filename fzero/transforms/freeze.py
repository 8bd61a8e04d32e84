"""Frozen leaves: used, sharded and gathered like all others, but never differentiated or updated."""

from __future__ import annotations

from fzero.base.arguments import need_bool
from fzero.table.rows import FROZEN, Frozen
from fzero.table.spec import S, need_step


def freeze(step: S, pattern: str, keep_moments: bool = False) -> S:
    """Leaves whose path matches get no grads and no updates, and no moments unless they keep those that they have.

    `fz.convert(state, step)` freezes and thaws leaves between two updates, and so does `fz.load` into another step. As
    with `requires_grad` and torch's optimizers, each leaf has its own count of updates, by which its bias correction
    goes. A leaf that is thawed begins at zero, or goes on where it stopped if it kept its moments. Schedules,
    `state.step` and `metrics["lr"]` count the run's updates.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths, alternatives separated by `|`. An alternative that matches nothing is an
            error at `plan` and `init`: what should be frozen would be trained.
        keep_moments: keeps moments and counts while the leaves are frozen, as torch does. They take memory, and are
            saved and converted like all others. Otherwise a conversion drops them, as it drops averages (`fz.ema`,
            `fz.lookahead`) in either case: they begin anew when the leaf is thawed.

    Raises:
        ValueError: a column of a leaf is set twice: frozen with and without its moments. At `init` and `convert`: an
            optimizer of your own has one count for all leaves, and some keep their moments; `fz.whole(optimizer)` gives
            each leaf a count of its own.

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
