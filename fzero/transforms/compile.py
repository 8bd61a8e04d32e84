"""torch.compile inside every unit, where no derivative is being traced and its graphs are real ones."""

from __future__ import annotations

from fzero.base.patterns import also
from fzero.table.spec import S, need_step


def compile(step: S, pattern: str = "*") -> S:
    """Compiles units' functions with torch.compile; units of one code and shape share their graphs.

    The numbers are eager's up to the last bits, where kernels are fused; random numbers are the same. What is outside
    of units, and derivatives of derivatives, run as they are. The first steps take long; on CPU they need a C++
    compiler. A unit whose leaves `fz.shard_tensor` cuts is not compiled in its first run with inputs of some shapes,
    which shows what it does with slices; nor later, with a warning, where something has to be done for them besides.

    Args:
        step: any step.
        pattern: fnmatch over dotted paths: the leaves whose units are compiled, of a unit all or none.

    Example:
        >>> print(fz.compile(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))))  # doctest: +ELLIPSIS
        train_step(...
    """
    need_step(step, "compile", pattern)
    return step.with_rule("compile", True, f"compile({also(pattern)[2:]})", pattern)
