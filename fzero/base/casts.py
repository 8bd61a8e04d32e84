"""What torch.autocast casts of leaves, for more than one of its contexts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def kept_casts() -> Iterator[None]:
    """Inside, what torch.autocast casts of leaves serves until the end, and not until its own context ends."""
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()  # a surrounding one would hold on to leaves
