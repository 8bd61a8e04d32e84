"""Mixed precision: params with two or more dims are used in a low-precision dtype (Micikevicius et al. 2018)."""

from __future__ import annotations

import torch

from fzero.base.arguments import named
from fzero.base.patterns import also
from fzero.table.spec import S, need_step


def autocast(step: S, dtype: torch.dtype = torch.bfloat16, pattern: str = "*") -> S:
    """Mixed precision: computes in bfloat16 or float16, and keeps the stored params and moments as they are.

    - Leaves with two or more dims are cast before they are gathered, so gathers send half the bytes.
    - The function runs under `torch.autocast`, with its rules for each operation.
    - Leaves with fewer dims (biases, norms) keep their dtype. So do float64 leaves, and those that a module computes
      its weights from (`parametrizations.weight.original`, `weight_orig`).
    - A policy's `compute` beats all of these.

    With float16, use `fz.loss_scale` too. On a CPU without instructions for `dtype`, matrix products are many times
    slower than in float32: `python -m fzero` measures it.

    Args:
        step: any step.
        dtype: `torch.bfloat16` or `torch.float16`.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to compute so. It must match all
            leaves of a unit or none, as a unit runs under one `torch.autocast`. What is outside of units follows the
            leaves there.

    Returns:
        A new step.

    Raises:
        ValueError: another dtype.

    Source:
        Micikevicius et al. 2018, arXiv 1710.03740.

    Example:
        >>> step = fz.autocast(fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.sgd(0.1)), torch.bfloat16)
        >>> step.vjp(step.init({"w": torch.ones(2, 2)}), torch.ones(1, 2))[0].dtype
        torch.bfloat16
    """
    need_step(step, "autocast", pattern)
    if not isinstance(dtype, torch.dtype) or dtype not in (torch.bfloat16, torch.float16):
        got = dtype if isinstance(dtype, torch.dtype) else f"dtype={named(dtype)}"
        raise ValueError(f"autocast: got {got}, expected torch.bfloat16 or torch.float16.")
    return step.with_rule("compute", dtype, f"autocast({dtype}{also(pattern)})", pattern)
