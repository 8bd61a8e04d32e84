"""Mixed precision: params with two or more dims are used in a low-precision dtype (Micikevicius et al. 2018)."""

from __future__ import annotations

import torch

from fzero.base.arguments import named
from fzero.base.patterns import also
from fzero.table.spec import S, need_step


def autocast(step: S, dtype: torch.dtype = torch.bfloat16, pattern: str = "*") -> S:
    """Computes in `dtype`: matrices are cast before they are gathered, and the function runs under torch.autocast.

    Leaves with fewer than two dims keep their dtype, and so do float64 leaves and those that a module's weights are
    computed of (`parametrizations.weight.original`, `weight_orig`), as in torch.autocast; a policy's `compute` beats
    all of these.

    On a CPU without instructions for `dtype` a matmul in it takes many times as long as in float32: where a state for
    such a CPU is made, one warning says so, with the figure measured.

    Args:
        step: any step.
        dtype: torch.bfloat16 or torch.float16.
        pattern: fnmatch over dotted paths: the leaves that are computed with so, of a unit all or none, as a unit runs
            under one torch.autocast. What lies outside of units follows the leaves there.

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
