"""The facts that runs of a call show add up; what stands for a tensor that is not read says so where it is read."""

from __future__ import annotations

import pytest
import torch

from fzero.capture.again import Again, Facts, Unread


def test_facts_add_up() -> None:
    one = Facts(mutated=frozenset({0}), more=(3,), read=frozenset({1}))
    both = one.joined(Facts(mutated=frozenset({2}), more=(5,), returned=frozenset({0}), watched=True))
    assert both == Facts(frozenset({0, 2}), (3, 5), frozenset({1}), frozenset({0}), watched=True)


def test_shape_and_dtype_are_no_reading_and_values_are() -> None:
    real = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    unread = Unread(real, 7)
    assert unread.shape == (2, 3) and unread.dtype == torch.float64 and unread.numel() == 6
    for read in (lambda: unread + 1, lambda: unread.requires_grad, lambda: unread.tolist()):
        with pytest.raises(Again) as caught:
            read()
        assert caught.value.showed == Facts(read=frozenset({7}))
    assert torch.equal(unread.detach(), real.detach())  # a constant
