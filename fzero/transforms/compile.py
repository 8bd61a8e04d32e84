"""torch.compile inside every unit, where no derivative is being traced and its graphs are real ones."""

from __future__ import annotations

from fzero.base.patterns import also
from fzero.table.spec import S, need_step


def compile(step: S, pattern: str = "*") -> S:
    """Compiles each unit's function with `torch.compile`. Units with the same code and shapes share a graph.

    - Random numbers stay the same. Other numbers are those of eager mode up to the last bits, if kernels are fused.
    - The first steps take long. On CPU they need a C++ compiler.
    - What is outside of units runs uncompiled, and so do derivatives of derivatives.
    - With `fz.shard_tensor`, units run uncompiled in each run that is looked at: see there. A unit of a module that
      needs conversions in between stays uncompiled.
    - Units of modules with `fz.functional(..., sync_batch_norm=True)` stay uncompiled. Those with `nn.SyncBatchNorm`
      are compiled around these.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves whose units are compiled. It must
            match all leaves of a unit or none.

    Returns:
        A new step.

    Example:
        >>> print(fz.compile(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))))  # doctest: +ELLIPSIS
        train_step(...
    """
    need_step(step, "compile", pattern)
    return step.with_rule("compile", True, f"compile({also(pattern)[2:]})", pattern)
