"""Shares of a batch in the order of microbatches, each of which has its part of every share, and the way back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fzero.components.shares import Shares
from fzero.table.counting import Counts
from fzero.table.microbatch import Microbatches


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 7), st.integers(1, 3))
def test_there_and_back(shares: int, count: int, examples: int, rows: int) -> None:
    """Of tensors with any number of rows for each example."""
    micro, counts = Microbatches(count), Counts()
    own, x = Shares(shares, micro), torch.arange(shares * examples)
    own.count_examples((x,), counts)
    want = [torch.cat(parts) for parts in zip(*[s.tensor_split(count) for s in x.chunk(shares)], strict=True)]
    if not examples:
        want = [x] * count
    (moved,) = own.inputs_apart((x,))
    assert isinstance(moved, torch.Tensor)
    found = micro.split((moved,), shares)
    parts: list[torch.Tensor] = [part for (part,) in found if isinstance(part, torch.Tensor)]
    assert [part.tolist() for part in parts] == [part.tolist() for part in want]
    assert counts.sizes == [len(part) for part in want]
    wide = x.repeat_interleave(rows)
    assert own.together(own.apart(wide, "x"), "x").tolist() == wide.tolist()  # type: ignore[attr-defined]
    assert own.inputs_together((x,), [moved])[0].tolist() == x.tolist()  # type: ignore[union-attr]
    in_order = torch.cat(want).repeat_interleave(rows)
    assert own.together(in_order, "x").tolist() == wide.tolist()  # type: ignore[attr-defined]


def test_shares_of_other_sizes_are_refused() -> None:
    own = Shares(2, Microbatches(2))
    with pytest.raises(ValueError, match=r"pipeline: input 0 has shape \(5,\), expected dim 0 to divide into 2 parts"):
        own.inputs_apart((torch.ones(5),))
    own.count_examples((torch.ones(6),), Counts())
    with pytest.raises(ValueError, match=r"pipeline: what has shape \(8,\), expected .* a multiple of 3 rows"):
        own.together(torch.ones(8), "what")
