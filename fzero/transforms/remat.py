"""Rematerialisation: a unit keeps only its inputs, and runs again to pull back (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.base.arguments import wrong
from fzero.base.patterns import also
from fzero.table.names import NO_NAMES, Names
from fzero.table.spec import S, need_step


def remat(step: S, pattern: str = "*", save: Sequence[str] = (), offload: Sequence[str] = ()) -> S:
    """Activation checkpointing: a unit keeps its inputs only, and runs again in the pullback. No number changes.

    Random numbers, such as dropout's, are drawn again as they were. What is outside of units is never recomputed.

    With names, it is selective: tensors that the unit has named with `fz.name(x, "qkv")` are kept too. The second run
    leaves out the operations that have made them, and matrix products that go to nothing but the unit's output.

    - What came by messages (`fz.parallel`) is kept as well. What is written to in place, or drawn, is not kept.
    - A unit is recomputed as a whole in its first call, if it is compiled, and under transforms of `torch.func`.
    - `fz.plan(step, params, inputs=...)` says what each name takes in bytes, and saves in FLOPs.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves whose units are recomputed. It
            must match all leaves of a unit or none.
        save: names whose values are kept on the device. A view keeps all of the memory that it is a view of.
        offload: names whose values are kept in the host's memory, and brought back for the pullback.

    Returns:
        A new step.

    Raises:
        TypeError: names that are no strings, or no tuple or list of them.
        ValueError: a name in both `save` and `offload`. In the first run: a name that no unit gives.

    Source:
        Chen et al. 2016, arXiv 1604.06174. Selective: Korthikanti et al. 2022, arXiv 2205.05198.

    Example:
        >>> step = fz.remat(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)), "blocks.*")
        >>> [row.remat for row in step.rows([("blocks.0.w", (2,), torch.float32), ("head", (2,), torch.float32)])]
        [True, False]
        >>> @fz.unit
        ... def block(p, x):
        ...     hidden = fz.name(x @ p["up"], "hidden")
        ...     return torch.relu(hidden) @ p["down"]
        >>> def loss(params, x):
        ...     return block(params["blocks"][0], x).square().mean()
        >>> step = fz.remat(fz.train_step(loss, fz.sgd(0.1)), save=("hidden",))
        >>> state = step.init({"blocks": [{"up": torch.ones(2, 8), "down": torch.ones(8, 2)}]})
        >>> state, metrics = step(state, torch.ones(3, 2))
        >>> metrics["loss"]
        tensor(256.)
    """
    need_step(step, "remat", pattern)
    names = Names(_names("save", save), _names("offload", offload))
    if both := sorted({*names.save} & {*names.offload}):
        raise ValueError(f"remat: got {both[0]!r} in save= and in offload=; expected each name in one of them.")
    said = ", ".join([said for said in (also(pattern)[2:], names.said) if said])
    return step.with_rule("remat", names if names != NO_NAMES else True, f"remat({said})", pattern)


def _names(argument: str, names: object) -> tuple[str, ...]:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise wrong("remat", argument, names, "a tuple of names, as fz.name gives them")
    for name in names:
        if not isinstance(name, str) or not name:
            raise wrong("remat", argument, name, "names, as fz.name gives them")
    return tuple(dict.fromkeys(names))
