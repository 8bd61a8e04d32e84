"""Rematerialisation: a unit keeps only its inputs, and runs again to pull back (Chen et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.base.arguments import wrong
from fzero.base.patterns import also
from fzero.table.names import NO_NAMES, Names
from fzero.table.spec import S, need_step


def remat(step: S, pattern: str = "*", save: Sequence[str] = (), offload: Sequence[str] = ()) -> S:
    """Recomputes units in the pullback instead of keeping their activations; their randomness is replayed.

    With names, selectively (Korthikanti et al. 2022): what the unit calls `fz.name(x, "qkv")` is kept, and of the rest
    is computed again what the pullback needs, from the kept values and the unit's inputs: neither what lies before a
    kept value alone, nor the unit's outputs. Numbers are the same to the bit whatever is kept. What cannot be computed
    again alone is kept as well: what comes by messages (`fz.parallel`), and results of other libraries' operators. A
    unit is recomputed as a whole under derivatives of derivatives, where it is compiled, and where its operations, run
    again in its first run, make something else, as others have written to their memory (numpy, an extension).
    `fz.plan(step, params, inputs=...)` says what each name takes and saves.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths: the leaves whose units are recomputed, of a unit all or none.
        save: names whose values are kept on the device, each with all of the memory that it is a view of.
        offload: names whose values are kept in the host's memory, and brought back for the pullback.

    Raises:
        TypeError, ValueError: names that are no strings, or that stand in both; in the first run of a function, a name
            that no unit gives.

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
