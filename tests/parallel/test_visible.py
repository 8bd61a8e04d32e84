"""What tokens see of a block, in regions: together exactly what is not hidden."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from hypothesis import given
from hypothesis import strategies as st
from test_ring import options

from fzero.parallel import visible
from fzero.parallel.visible import options_of, regions


@st.composite
def blocks(draw: st.DrawFn) -> tuple[int, tuple[int, int], tuple[int, int], Any]:
    """Tokens, the places of some, and of a block that these may see, and options."""
    total = draw(st.integers(1, 9))

    def part() -> tuple[int, int]:
        first, last = sorted([draw(st.integers(0, total)), draw(st.integers(0, total))])
        return first, last

    return total, part(), part(), draw(options(total))


@given(made=blocks(), shortest=st.sampled_from([1, 4, 32]))
def test_regions_are_what_is_not_hidden(made: Any, shortest: int) -> None:
    total, (place, stop), (start, end), given = made
    seen = visible.visible(total, options_of("a test", **dict(given))).of(place, stop)
    expected = ~seen.hidden(torch.arange(start, end))
    with mock.patch.object(visible, "SHORTEST", shortest):
        found = regions(seen, place, start, end - start)
    if found is None:  # tiles, then
        assert (seen.low.unique().numel() > 1) or dict(given).get("window") is not None
        return
    got = torch.zeros_like(expected, dtype=torch.int64)
    for rows, columns, causal in found:
        ones = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.int64)
        assert ones.numel()
        got[rows, columns] += ones.tril() if causal else ones
    assert torch.equal(got, expected.long())


def test_what_is_usual_is_one_or_two_regions() -> None:
    for causal, count in ((False, 1), (True, 1)):
        seen = visible.visible(64, options_of("a test", causal=causal))
        found = regions(seen, 0, 0, 64)
        assert found is not None and len(found) == count and found[0].causal == causal
    seen = visible.visible(64, options_of("a test", causal=True, documents=[0, 32, 64]))
    assert len(regions(seen, 0, 0, 64) or ()) == 2
    assert len(regions(seen.of(48, 64), 48, 0, 64) or ()) == 2  # what lies before, and their own
    assert regions(visible.visible(64, options_of("a test", window=3)), 0, 0, 64) is None
