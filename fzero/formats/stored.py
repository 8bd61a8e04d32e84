"""A flat buffer in a format: encoding and decoding it with torch, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.formats.formats import CHUNK, GROUP, Bits, Format, Part, chunks
from fzero.formats.ops import TorchOps


def entries(part: Part, numel: int) -> int:
    """How many entries a part of so many elements has."""
    return numel // part.every


def nbytes(format: Format, numel: int) -> int:
    return sum(entries(part, numel) * part.dtype.itemsize for part in format.parts)


def zeros(format: Format, numel: int, device: Any) -> tuple[torch.Tensor, ...]:
    """The parts of zeros."""
    return tuple(torch.zeros(entries(part, numel), dtype=part.dtype, device=device) for part in format.parts)


def load(format: Format, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Flat parts as what `decode` takes, of shape [groups, 32] or [groups, 1]: floats and int32."""
    out = []
    for part, stored in zip(format.parts, parts, strict=True):
        if part.every == 2:  # two codes a byte: the first half of a group in the low bits
            pairs = stored.view(-1, GROUP // 2).to(torch.int32)
            out.append(((torch.cat([pairs & 15, pairs >> 4], 1)) ^ 8) - 8)
        else:
            rows = stored.view(-1, GROUP // part.every)
            wide = torch.float32 if stored.dtype in (torch.bfloat16, torch.float16) else stored.dtype
            out.append(rows.to(wide if stored.dtype.is_floating_point else torch.int32))
    return out


def store(format: Format, parts: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Writes what `encode` made into flat parts."""
    for part, target, value in zip(format.parts, parts, values, strict=True):
        if part.every == 2:
            value = (value[:, : GROUP // 2] & 15) | ((value[:, GROUP // 2 :] & 15) << 4)
        target.view(value.shape).copy_(value)


def encoded(format: Format, x: Any, noise: Bits | None) -> list[torch.Tensor]:
    """The values for the parts, of x[groups, 32]."""
    x = x * 1.0  # arithmetic sets a bit in the upper half of a NaN, which is kept
    return format.encode(TorchOps, x, noise)


def decode(format: Format, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Values in a dtype; of a plain format in that dtype the stored tensor itself."""
    quick = format.cast(parts, dtype)
    if quick is not None:
        return quick
    numel = parts[0].numel() * format.parts[0].every
    out = torch.empty(numel, dtype=dtype, device=parts[0].device)
    for start, stop in chunks(out, CHUNK):
        cut = [t[start // p.every : stop // p.every] for p, t in zip(format.parts, parts, strict=True)]
        out[start:stop].view(-1, GROUP).copy_(format.decode(TorchOps, load(format, cut)))
    return out


def encode(format: Format, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a flat buffer, rounded to nearest."""
    if format.plain:
        return (x.to(format.dtype),)
    out = zeros(format, x.numel(), x.device)
    for start, stop in chunks(x, CHUNK):
        cut = [t[start // p.every : stop // p.every] for p, t in zip(format.parts, out, strict=True)]
        store(format, cut, encoded(format, x[start:stop].to(torch.float32).view(-1, GROUP), None))
    return out


@dataclass(frozen=True)
class Stored:
    """A flat buffer as it is stored: the parts of its format."""

    format: Format
    parts: tuple[torch.Tensor, ...]

    @property
    def plain(self) -> bool:
        return self.format.plain

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoded values."""
        return self.format.dtype

    def numel(self) -> int:
        return self.parts[0].numel() * self.format.parts[0].every

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Values in a dtype: the stored tensor itself where it is that already."""
        return decode(self.format, self.parts, dtype)

    def cut(self, start: int, stop: int) -> Stored:
        """A range of elements, at multiples of 64."""
        pairs = zip(self.format.parts, self.parts, strict=True)
        return Stored(self.format, tuple(t[start // p.every : stop // p.every] for p, t in pairs))
