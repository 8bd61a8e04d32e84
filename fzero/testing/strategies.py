"""Hypothesis strategies: pytrees of params, policies, orders of transforms. Needs hypothesis.

Leaves are made from a drawn seed, so that examples stay small and shrink well; the global generators are not touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

import fzero as fz

Transform = Callable[[fz.Step], fz.Step]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@st.composite
def leaves(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_dim: int = 9) -> torch.Tensor:
    """A floating tensor of zero to three dims of odd and even sizes."""
    shape = draw(st.lists(st.integers(1, max_dim), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def pytrees(draw: st.DrawFn, dtype: torch.dtype = torch.float64, max_leaves: int = 8) -> Any:
    """A nested dict, list or tuple of floating tensors, with at least one."""
    keys = st.sampled_from(["w", "bias", "norm", "head", "blocks"])
    tree = st.recursive(
        leaves(dtype),
        lambda inner: st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3),
            st.lists(inner, min_size=1, max_size=3),
            st.tuples(inner, inner),
        ),
        max_leaves=max_leaves,
    )
    return {"root": draw(tree)}


def policies() -> st.SearchStrategy[fz.Policy]:
    """Policies of every mix of storage dtypes."""
    dtype = st.sampled_from([None, *FLOATS])
    return st.builds(fz.Policy, param=dtype, grad=dtype, moment=dtype, compute=dtype, reduce=dtype)


def transforms(stages: Sequence[int] = (0, 1, 2, 3), count: int = 2) -> st.SearchStrategy[list[tuple[str, Transform]]]:
    """Some transforms in some order, each named; at most one sharding, from `stages`; accumulation over `count`.

    All of them leave the numbers of a float64 step alone.
    """
    shards: dict[int, Transform] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
    others: list[tuple[str, Transform]] = [
        ("remat", fz.remat),
        ("donate", fz.donate),
        ("accumulate", lambda step: fz.accumulate(step, count)),
        ("loss_scale", lambda step: fz.loss_scale(step, 64.0)),
        ("autocast", fz.autocast),
        ("fuse_update", fz.fuse_update),
    ]

    @st.composite
    def draw_all(draw: st.DrawFn) -> list[tuple[str, Transform]]:
        chosen = draw(st.lists(st.sampled_from(others), unique_by=lambda pair: pair[0]))
        stage = draw(st.sampled_from(list(stages)))
        if stage:
            chosen = [*chosen, (f"shard_zero{stage}", shards[stage])]
        return draw(st.permutations(chosen))

    return draw_all()


def apply(step: fz.Step, chosen: Sequence[tuple[str, Transform]]) -> fz.Step:
    """The step with these transforms, in this order."""
    for _, transform in chosen:
        step = transform(step)
    return step
