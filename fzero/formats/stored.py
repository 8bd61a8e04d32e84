"""A flat buffer in a format: encoding and decoding it with torch, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero.base import private
from fzero.formats.formats import GROUP, Bits, Companded, Corrected, Exact, Format, Part, Plain
from fzero.formats.ops import TorchOps


def entries(part: Part, numel: int) -> int:
    """How many entries a part of so many elements has."""
    return numel // part.every


def nbytes(format: Format, numel: int) -> int:
    return sum(entries(part, numel) * part.dtype.itemsize for part in format.parts)


def is_plain(format: Format) -> bool:
    return isinstance(format, Plain)


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
    if not isinstance(format, Companded):
        return format.encode(TorchOps, x, noise)
    magnitude = format.magnitude(TorchOps, x)
    scale = format.scale(TorchOps, magnitude.amax(-1, keepdim=True))
    return [format.codes(TorchOps, x, magnitude, scale, noise), scale]


CHUNK = 1 << 15  # elements at a time: temporaries stay small, and calls take no longer than the work


def chunks(flat: torch.Tensor, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over a flat tensor; of a fake one, which only takes memory, the first stands for all."""
    numel = flat.numel()
    for start in range(0, min(numel, size) if private.is_fake(flat) else numel, size):
        yield start, min(start + size, numel)


def decode(format: Format, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Values in a dtype; of a plain format in that dtype the stored tensor itself."""
    if isinstance(format, Plain):
        return parts[0].to(dtype)
    if isinstance(format, Corrected) and dtype == torch.bfloat16:
        return parts[0]
    if isinstance(format, Exact) and dtype == torch.bfloat16:
        return _to_even(*parts)
    numel = parts[0].numel() * format.parts[0].every
    out = torch.empty(numel, dtype=dtype, device=parts[0].device)
    for start, stop in chunks(out, CHUNK):
        cut = [t[start // p.every : stop // p.every] for p, t in zip(format.parts, parts, strict=True)]
        out[start:stop].view(-1, GROUP).copy_(format.decode(TorchOps, load(format, cut)))
    return out


def _to_even(high: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The values of `Exact` in bfloat16, ties to even as float32 is cast: in their upper halves ties go away from 0."""
    out = torch.empty_like(high)
    for start, stop in chunks(out, 1 << 17):
        bits = high[start:stop].view(torch.int16)
        odd = torch.eq(remainder[start:stop], -(1 << 15), out=torch.empty_like(bits)).bitwise_and_(bits)
        torch.sub(bits, odd, out=out[start:stop].view(torch.int16))
    return out


def encode(format: Format, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a flat buffer, rounded to nearest."""
    if isinstance(format, Plain):
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
        return isinstance(self.format, Plain)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Of the decoded values."""
        return self.parts[0].dtype if self.plain else torch.float32

    def numel(self) -> int:
        return self.parts[0].numel() * self.format.parts[0].every

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Values in a dtype: the stored tensor itself where it is that already."""
        return decode(self.format, self.parts, dtype)

    def cut(self, start: int, stop: int) -> Stored:
        """A range of elements, at multiples of 64."""
        pairs = zip(self.format.parts, self.parts, strict=True)
        return Stored(self.format, tuple(t[start // p.every : stop // p.every] for p, t in pairs))
