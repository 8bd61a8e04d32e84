"""How values are stored: a format turns float32 values into the parts that a buffer consists of, and back.

Formats are written over a small set of operations `o`, so that one text serves torch (`TorchOps`) and the kernels that
`fzero/_kernel.py` generates. What a lossy format rounds it rounds stochastically, so that small updates and slow decays
are kept in the mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fzero import _private

GROUP = 32  # elements that share a scale

Bits = Callable[..., Any]  # (n, place=0) -> random integers in [0, 2**n), times 2**place, one per element

_MAGNITUDE, _EXPONENT, _HIGH = 0x7FFFFFFF, 0x7F800000, -65536
_LARGEST = 0x7F7F0000  # the largest finite bfloat16, as float32 bits
_MOST = 0x437F0000  # 255.0
_SMALLEST = 2.0**-126  # the smallest float32 whose inverse is finite


@dataclass(frozen=True)
class Part:
    """One of the buffers that a format stores: its dtype, and how many elements share an entry."""

    name: str
    dtype: torch.dtype
    every: int = 1


@dataclass(frozen=True)
class Plain:
    """Values in one dtype, rounded to nearest, or stochastically (to bfloat16).

    An exact value stays as it is, infinities and NaN are kept, and a finite value does not become infinite by luck.
    """

    dtype: torch.dtype
    stochastic: bool = False

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part("", self.dtype),)

    def __str__(self) -> str:
        return _short(self.dtype) + (" stochastic" if self.stochastic else "")

    def decode(self, o: Any, stored: Sequence[Any]) -> Any:
        return stored[0]

    def encode(self, o: Any, x: Any, noise: Bits | None) -> list[Any]:
        if not self.stochastic or noise is None:
            return [x]
        return [_upper_half(o, x, noise(16))]


@dataclass(frozen=True)
class Exact:
    """A float32 value in two halves, bit for bit: a bfloat16, and what it leaves, in int16."""

    parts = (Part("", torch.bfloat16), Part("remainder", torch.int16))

    def __str__(self) -> str:
        return "bf16 + int16"

    def decode(self, o: Any, stored: Sequence[Any]) -> Any:
        return o.floats(o.bits(stored[0]) + stored[1])

    def encode(self, o: Any, x: Any, noise: Bits | None) -> list[Any]:
        bits = o.bits(x)
        low = o.extended(bits, 16)
        return [o.floats(bits - low), low]


@dataclass(frozen=True)
class Corrected:
    """A bfloat16 and an 8-bit correction in units of half its last place / 127: 24 bits (FlashOptim, 2602.23349)."""

    parts = (Part("", torch.bfloat16), Part("remainder", torch.int8))

    def __str__(self) -> str:
        return "bf16 + int8"

    def decode(self, o: Any, stored: Sequence[Any]) -> Any:
        return stored[0] + o.to_float(stored[1]) * (self._exponent(o, stored[0]) * (1 / (127 * 256)))

    def encode(self, o: Any, x: Any, noise: Bits | None) -> list[Any]:
        bits = o.bits(x)
        high = _upper_half(o, x, (o.shift(bits, 16) & 1) + 0x7FFF)
        exponent = o.most(o.bits(high) & _EXPONENT, 1 << 23)
        left = (x - high) * o.floats(_EXPONENT - exponent) * (127 * 128.0)  # of half the last place, in 127ths
        code = o.clamp(_rounded(o, left, noise), -127, 127)
        return [high, o.where((bits & _MAGNITUDE) >= _EXPONENT, 0, code)]

    def _exponent(self, o: Any, high: Any) -> Any:
        return o.floats(o.least(o.bits(high) & _EXPONENT, _LARGEST & _EXPONENT))


@dataclass(frozen=True)
class Companded:
    """Moments in 8 or 4 bits: groups of 32 share a scale, their largest magnitude; codes are finer near zero.

    Signed values go through softsign, 2y / (1 + |y|), where y is the value over the scale; second moments through the
    square root, in 8 bits, rounded so that their mean is right, and what is not zero stays so. The scale keeps 8 bits
    of exponent and 8 of mantissa, as float16 has no room for small gradients; it is rounded up, so that no value is
    cut off.
    """

    signed: bool
    width: int = 8

    @property
    def parts(self) -> tuple[Part, ...]:
        codes = Part("", torch.int8 if self.signed else torch.uint8)
        return (codes if self.width == 8 else Part("", torch.uint8, 2), Part("scale", torch.int16, GROUP))

    @property
    def most(self) -> int:
        return (127 if self.width == 8 else 7) if self.signed else 255

    def __str__(self) -> str:
        return f"{self.width}-bit"

    def decode(self, o: Any, stored: Sequence[Any]) -> Any:
        code, scale = o.to_float(stored[0]), o.floats((stored[1] & 0xFFFF) << 15)
        if self.signed:
            return code / (2.0 * self.most - o.abs(code)) * scale
        root = code * (scale * (1 / self.most))
        return root * root

    def scaled(self, o: Any, x: Any) -> Any:
        """What is divided by its group's scale, the largest of its magnitudes."""
        return x if self.signed else o.sqrt(x)

    def scale(self, o: Any, largest: Any) -> Any:
        """The stored scale of a group."""
        return _scale(o, largest)

    def codes(self, o: Any, scaled: Any, scale: Any, noise: Bits | None) -> Any:
        """The codes of values, of which none is larger than the scale that is stored for its group."""
        stored = o.most(o.floats(scale << 15), _SMALLEST)
        if self.signed:
            return _rounded(o, scaled / (stored + o.abs(scaled)) * (2.0 * self.most), noise)
        y = o.floats(o.least(o.bits(scaled * (self.most / stored)), _MOST))  # also of an infinite value
        code = o.to_int(y)
        low = o.to_float(code)
        between = o.where(code > 0, low + low + 1.0, 0.0)  # the next square over this one; nothing is rounded to zero
        part = _fraction(o, noise, 1) - 1.0
        up = (y - low) * (y + low) > between * part  # the mean of squares is kept, not that of roots
        return o.where(up, code + 1, code)


@dataclass(frozen=True)
class Blocks:
    """Values in 8 bits, evenly between plus and minus their group's largest: what params may travel in."""

    parts = (Part("", torch.int8), Part("scale", torch.int16, GROUP))

    def __str__(self) -> str:
        return "8-bit blocks"

    def decode(self, o: Any, stored: Sequence[Any]) -> Any:
        return o.to_float(stored[0]) * (o.floats((stored[1] & 0xFFFF) << 15) * (1 / 127))

    def encode(self, o: Any, x: Any, noise: Bits | None) -> list[Any]:
        scale = _scale(o, x.abs().amax(-1, keepdim=True))
        stored = o.floats(scale << 15)
        inverse = o.where(stored >= _SMALLEST, 127.0 / stored, 0.0)
        return [o.clamp(_rounded(o, x * inverse, None), -127, 127), scale]


Format = Plain | Exact | Corrected | Companded | Blocks


def _upper_half(o: Any, x: Any, carry: Any) -> Any:
    """A bfloat16: x cut off after `carry` of the lower half was added, which makes nothing finite infinite."""
    bits = o.bits(x * 1.0)  # arithmetic sets the upper half of a NaN, which is kept
    return o.floats((bits + o.where((bits & _MAGNITUDE) >= _LARGEST, 0, carry)) & _HIGH)


def _scale(o: Any, largest: Any) -> Any:
    """What a group stores of its largest magnitude: 8 bits of exponent and 8 of mantissa, rounded up."""
    return o.shift(o.least(o.bits(largest), _LARGEST) + 0x7FFF, 15)


def _rounded(o: Any, x: Any, noise: Bits | None) -> Any:
    """To an int32, up with the probability of the fraction; the 8-bit noise is centred, so integers stay.

    Args:
        x: more than -128, so that cutting off what follows the point rounds down.
    """
    return o.to_int(x + _fraction(o, noise, 128)) - 128


def _fraction(o: Any, noise: Bits | None, over: int) -> Any:
    """`over`, 1 or 128, and a random number in (0, 1) of 8 bits, which are put in their place in the mantissa."""
    if noise is None:
        return over + 0.5
    place, base = (15, 0x3F800000) if over == 1 else (8, 0x43000000)
    return o.floats(noise(8, place) | (base + (1 << place - 1)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


class TorchOps:
    """The operations of formats and formulas on float32 (or float64) and int32 tensors of shape [groups, 32]."""

    @staticmethod
    def bits(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.int32)

    @staticmethod
    def floats(x: torch.Tensor) -> torch.Tensor:
        return x.view(torch.float32)

    @staticmethod
    def shift(x: torch.Tensor, count: int) -> torch.Tensor:
        return (x >> count) & ((1 << (32 - count)) - 1)

    @staticmethod
    def extended(x: torch.Tensor, count: int) -> torch.Tensor:
        """The low bits as a signed number."""
        return (x << (32 - count)) >> (32 - count)

    @staticmethod
    def sqrt(x: torch.Tensor) -> torch.Tensor:
        # torch's float32 square root is not always correctly rounded on CPU, and a kernel's is
        exact = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
        return x.double().sqrt().float() if exact else x.sqrt()

    where, abs, clamp = torch.where, torch.abs, torch.clamp
    sign = torch.sign

    @staticmethod
    def least(x: torch.Tensor, bound: Any) -> torch.Tensor:
        return torch.clamp(x, max=bound)

    @staticmethod
    def most(x: torch.Tensor, bound: Any) -> torch.Tensor:
        return torch.clamp(x, min=bound)

    @staticmethod
    def to_float(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32)

    @staticmethod
    def to_int(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.int32)


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
    if not isinstance(format, Companded):
        return format.encode(TorchOps, x, noise)
    scaled = format.scaled(TorchOps, x)
    scale = format.scale(TorchOps, scaled.abs().amax(-1, keepdim=True))
    return [format.codes(TorchOps, scaled, scale, noise), scale]


CHUNK = 1 << 14  # elements decoded at a time, so that temporaries stay small


def chunks(flat: torch.Tensor, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over a flat tensor; of a fake one, which only takes memory, the first stands for all."""
    numel = flat.numel()
    for start in range(0, min(numel, size) if _private.is_fake(flat) else numel, size):
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
