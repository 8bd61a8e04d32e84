"""The words of torch tell its refusals from other errors; that torch says them: tests/base/test_private.py."""

from __future__ import annotations

from fzero.base import texts


def test_only_a_runtime_error_with_these_words_is_a_refusal() -> None:
    error = RuntimeError(f"some function: {texts.NO_MEMORY} of its own")
    assert texts.says(error, texts.BACKWARD, texts.NO_MEMORY) and texts.says(error, *texts.REFUSED)
    assert not texts.says(error, texts.BACKWARD) and not texts.says(TypeError(texts.NO_MEMORY), texts.NO_MEMORY)
