"""Checksums of tensors, by which ranks find out whether they have the same values."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch

from fzero.base import private
from fzero.base.context import jitting
from fzero.base.follow import tangents_of
from fzero.comm.axis import Axis


def checksum(leaf: torch.Tensor) -> int:
    if private.is_fake(leaf) or jitting.get() is not None:
        return 0
    with private.below_transforms():
        data = private.unwrapped(leaf).detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy()
    return zlib.crc32(data)  # type: ignore[arg-type]


def checksums(x: torch.Tensor) -> str:
    tangents = "".join(f", a tangent with checksum {checksum(tangent + 0.0)}" for tangent in tangents_of(x))
    return f"checksum {checksum(x)}{tangents}"


def check_values(axis: Axis, tensors: Iterable[torch.Tensor], what: str, advice: str) -> None:
    """Raises ValueError on every rank where the ranks have other tensors.

    Args:
        what: they are, in words.
        advice: what to do.
    """
    said = [f"a tensor of shape {tuple(x.shape)} with {checksums(x)}" for x in tensors]
    axis.check_same("\n".join(said), what, advice)
