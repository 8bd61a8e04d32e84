"""Refusals are heard whatever a caller's except has done, and say where they come from."""

from __future__ import annotations

import traceback

import pytest
import torch

from fzero.base import refusals, texts
from fzero.base.arguments import need_bool
from fzero.purity import observer


def test_torchs_refusals_are_said_in_other_words() -> None:
    def refused(words: str) -> RuntimeError:
        with pytest.raises(RuntimeError) as caught:
            raise RuntimeError(words)
        return caught.value

    with pytest.raises(TypeError, match=r"backward\(\) called inside a functorch transform.*fz\.unit"):
        refusals.refuse_outside(refused(texts.BACKWARD))
    with pytest.raises(ValueError, match="memory was given back"):
        refusals.refuse_outside(refused(texts.FREED[0]))
    refusals.refuse_outside(refused("something else"))


def test_what_torch_raises_in_a_mode_of_ours_is_torchs() -> None:
    """Where a mode of fzero passes a call on, its frame is among the last."""
    with pytest.raises(RuntimeError) as caught, observer.Look({}):
        torch.dot(torch.ones(2), torch.ones(3))
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    assert any(frame.f_globals["__name__"] == observer.__name__ for frame in frames)
    assert not refusals.is_ours(caught.value)
    with pytest.raises(TypeError, match="expected True or False") as own:
        need_bool(1, "here", "it")
    assert refusals.is_ours(own.value)
