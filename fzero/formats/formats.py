"""How values are stored: a format turns float32 values into the parts that a buffer consists of, and back.

Formats are written over a small set of operations `o`, so that one text serves torch (`fzero/formats/ops.py`) and the
kernels that `fzero/kernels/source.py` generates. What a lossy format rounds it rounds stochastically, so that small
updates and slow decays are kept in the mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from fzero.base import pages, private
from fzero.formats.ops import Ops, TorchOps

GROUP = 32  # elements that share a scale
CHUNK = 1 << 15  # elements at a time: temporaries stay small, and calls take no longer than the work
ALIGN = 64  # elements: fused kernels give the same bits for every cut at multiples of it

T = torch.Tensor  # in a generated kernel a value of its loop
Bits = Callable[..., torch.Tensor]  # (n, own=n) -> random integers in [0, 2**n), one per element

_MAGNITUDE, _SIGN = 0x7FFFFFFF, -(1 << 31)
_LARGEST = 0x7F7F0000  # the largest finite bfloat16, as float32 bits
_SMALLEST = 2.0**-126  # the smallest float32 whose inverse is finite


@dataclass(frozen=True)
class Part:
    """One of the buffers that a format stores: its dtype, and how many elements share an entry."""

    name: str
    dtype: torch.dtype
    every: int = 1


class Format:
    """A way to store values: the parts of a buffer, and the maps between them and floats.

    Attributes:
        parts: the buffers; the first has the group's own name.
        group: how many elements are encoded together, as they share a scale that is found from all of them: 1 or 32.
        plain: whether the values themselves are stored, in `dtype`.
        rounds: whether encoding draws random bits.
        dtype: of the decoded values.
        upper: the dtype in which the values are the first part as it is, where there is one.
    """

    parts: tuple[Part, ...]
    group = 1
    plain = False
    rounds = True
    dtype: torch.dtype = torch.float32
    upper: torch.dtype | None = None

    def keeps(self, other: Format) -> bool:
        """Tells whether every value of another format is one of this one."""
        return self.parts == other.parts

    def decode(self, o: Ops, stored: Sequence[T], times: T | None = None) -> T:
        """The values, of parts as floats and int32, times a factor."""
        raise NotImplementedError

    def encode(self, o: Ops, x: T, noise: Bits | None) -> list[T]:
        """The parts of float32 values; rounded to nearest without noise."""
        raise NotImplementedError

    def cast(self, parts: Sequence[T], dtype: torch.dtype) -> T | None:
        """The values in a dtype that takes no arithmetic, or the stored tensor itself; None for any other."""
        return None


@dataclass(frozen=True)
class Plain(Format):
    """Values in one dtype, rounded to nearest, or stochastically (to bfloat16).

    An exact value stays as it is, infinities and NaN are kept, and a finite value does not become infinite by luck.
    """

    dtype: torch.dtype
    rounds: bool = False
    plain = True

    @property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        return (Part("", self.dtype),)

    def keeps(self, other: Format) -> bool:
        if self.dtype == torch.float32:
            return other.dtype != torch.float64
        return self.dtype == torch.float64 or super().keeps(other)

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")
        return name + (" stochastic" if self.rounds else "")

    def decode(self, o: Ops, stored: Sequence[T], times: T | None = None) -> T:
        return _times(stored[0], times)

    def cast(self, parts: Sequence[T], dtype: torch.dtype) -> T | None:
        return pages.cast(parts[0], dtype)

    def encode(self, o: Ops, x: T, noise: Bits | None) -> list[T]:
        if not self.rounds or noise is None:
            return [x]
        return [o.upper(_carried(o, x, noise(16)))]


@dataclass(frozen=True)
class Exact(Format):
    """A float32 value in two halves, bit for bit: a bfloat16, and what it leaves, in int16."""

    parts = (Part("", torch.bfloat16), Part("remainder", torch.int16))
    rounds = False

    def __str__(self) -> str:
        return "bf16 + int16"

    def keeps(self, other: Format) -> bool:
        return other.dtype != torch.float64

    def cast(self, parts: Sequence[T], dtype: torch.dtype) -> T | None:
        """Ties to even, as float32 is cast: in the upper halves they go away from 0."""
        if dtype != torch.bfloat16:
            return None
        out = pages.empty(parts[0].numel(), parts[0].dtype, parts[0].device)
        for start, stop in chunks(out, 1 << 17):
            bits, remainder = parts[0][start:stop].view(torch.int16), parts[1][start:stop]
            odd = torch.eq(remainder, -(1 << 15), out=torch.empty_like(bits)).bitwise_and_(bits)
            torch.sub(bits, odd, out=out[start:stop].view(torch.int16))
        return out

    def decode(self, o: Ops, stored: Sequence[T], times: T | None = None) -> T:
        return _times(o.floats(o.bits(stored[0]) + stored[1]), times)

    def encode(self, o: Ops, x: T, noise: Bits | None) -> list[T]:
        bits = o.bits(x)
        return [_upper(o, bits), o.extended(bits, 16)]


@dataclass(frozen=True)
class Corrected(Format):
    """The leading 24 bits of a float32: a bfloat16, and what it leaves, in int8 (FlashOptim's idea, 2602.23349)."""

    parts = (Part("", torch.bfloat16), Part("remainder", torch.int8))
    upper = torch.bfloat16

    def __str__(self) -> str:
        return "bf16 + int8"

    def keeps(self, other: Format) -> bool:
        return super().keeps(other) or (other.plain and other.dtype == torch.bfloat16)

    def cast(self, parts: Sequence[T], dtype: torch.dtype) -> T | None:
        return parts[0] if dtype == self.upper else None

    def decode(self, o: Ops, stored: Sequence[T], times: T | None = None) -> T:
        return _times(o.floats(o.bits(stored[0]) + (stored[1] << 8)), times)

    def encode(self, o: Ops, x: T, noise: Bits | None) -> list[T]:
        bits = _carried(o, x, 0x80 if noise is None else noise(8))
        return [_upper(o, bits), o.extended(bits, 16) >> 8]


class Grouped(Format):
    """Codes, and a scale for every 32 of them, which comes from the largest magnitude."""

    group = GROUP

    def magnitude(self, o: Ops, x: T) -> T:
        """The bits of the magnitude, whose order is its own."""
        return o.bits(x) & _MAGNITUDE

    def scale(self, o: Ops, largest: T) -> T:
        """The stored scale of a group, of the bits of its largest magnitude."""
        raise NotImplementedError

    def codes(self, o: Ops, x: T, magnitude: T, scale: T, noise: Bits | None) -> T:
        """The codes of values, of which none is too large for the scale that is stored for its group."""
        raise NotImplementedError

    def encode(self, o: Ops, x: T, noise: Bits | None) -> list[T]:
        magnitude = self.magnitude(o, x)
        scale = self.scale(o, magnitude.amax(-1, keepdim=True))
        return [self.codes(o, x, magnitude, scale, noise), scale]


@dataclass(frozen=True)
class Companded(Grouped):
    """Moments in 8 or 4 bits: groups of 32 share a scale; codes are finer near zero.

    The companding is piecewise linear, as in G.711 (ITU-T 1988): a magnitude over its scale plus a bias is a float, and
    the code is its leading bits, so that segments double in width and have as many codes each. Magnitudes in 8 bits
    have 4 segments of 32 codes, second moments, which need no sign, 8 of 32, and magnitudes in 4 bits 2 of 4. The scale
    is a power of two, 8 bits of exponent (OCP Microscaling 1.0), the least for which the largest code is enough.
    What rounds to zero becomes the smallest code in second moments, as they are divided by.
    """

    signed: bool
    width: int = 8

    @property
    def parts(self) -> tuple[Part, ...]:  # type: ignore[override]
        codes = Part("", torch.int8 if self.signed else torch.uint8)
        return (codes if self.width == 8 else Part("", torch.uint8, 2), Part("scale", torch.uint8, GROUP))

    @property
    def most(self) -> int:
        """The largest code of a magnitude."""
        return (127 if self.width == 8 else 7) if self.signed else 255

    @property
    def place(self) -> int:
        """Position of a code's lowest bit in a float32."""
        return 18 if self.width == 8 else 21

    @property
    def bias(self) -> float:
        """The float whose code is 0; that of the largest code is just less than 2."""
        return 2.0 ** -(self.most >> 23 - self.place)

    def __str__(self) -> str:
        return f"{self.width}-bit"

    def decode(self, o: Ops, stored: Sequence[T], times: T | float | None = None) -> T:
        scale = _times(o.floats(stored[1] << 23), times)
        if self.width == 4:
            return o.level(stored[0], self.level) * scale
        code = stored[0] & self.most if self.signed else stored[0]
        x = o.less_times(o.floats((code << self.place) | _bits(self.bias)), self.bias, scale)
        return o.floats(o.bits(x) | (stored[0] & _SIGN)) if self.signed else x

    def level(self, o: Ops, code: T) -> T:
        """A signed code's value over its scale: exact, so that one product of it has one rounding."""
        x = o.floats(((code & self.most) << self.place) | _bits(self.bias)) - self.bias
        return o.floats(o.bits(x) | (code & _SIGN))

    @property
    def levels(self) -> list[float]:
        """Values of the codes 0, 1, ... as they are stored."""
        codes = torch.arange(1 << self.width, dtype=torch.int32, device="cpu")
        return self.level(TorchOps, TorchOps.extended(codes, self.width)).tolist()

    def magnitude(self, o: Ops, x: T) -> T:
        return super().magnitude(o, x) if self.signed else o.bits(x)

    def scale(self, o: Ops, largest: T) -> T:
        # makes the next exponent of one whose fraction is more than the largest code's
        carry = (1 << self.place) + int(self.bias * 2**23)
        return o.least(o.shift(largest + carry, 23), 253)

    def codes(self, o: Ops, x: T, magnitude: T, scale: T, noise: Bits | None) -> T:
        y = o.bits(o.times_plus(o.floats(magnitude), o.floats((254 - scale) << 23), self.bias))
        if not self.signed:
            y = o.most(y, _bits(self.bias) + (1 << self.place))
        part = 1 << self.place - 1 if noise is None else noise(self.place, 6 if self.width == 8 else 5)
        code = o.shift(y + part, self.place)
        if not self.signed:
            return code  # whose low 8 bits are stored
        sign = o.shift(o.bits(x), 32 - self.width)
        return ((code ^ sign) & self.most) ^ sign


@dataclass(frozen=True)
class Blocks(Grouped):
    """Values in 8 bits, evenly between plus and minus their group's largest; params may travel so, in no kernel."""

    parts = (Part("", torch.int8), Part("scale", torch.int16, GROUP))
    rounds = False

    def __str__(self) -> str:
        return "8-bit blocks"

    def decode(self, o: Ops, stored: Sequence[T], times: T | None = None) -> T:
        return _times(stored[0].to(torch.float32) * (o.floats((stored[1] & 0xFFFF) << 15) * (1 / 127)), times)

    def scale(self, o: Ops, largest: T) -> T:
        """8 bits of exponent and 8 of mantissa, rounded up."""
        return o.shift(o.least(largest, _LARGEST) + 0x7FFF, 15)

    def codes(self, o: Ops, x: T, magnitude: T, scale: T, noise: Bits | None) -> T:
        stored = o.floats(scale << 15)
        inverse = o.where(stored >= _SMALLEST, 127.0 / stored, 0.0)
        return ((x * inverse + 128.5).to(torch.int32) - 128).clamp(-127, 127)


def _times(x: T, times: T | float | None) -> T:
    return x if times is None else x * times


def _bits(x: float) -> int:
    """The bits of a power of two, as float32."""
    return int(math.log2(x)) + 127 << 23


def _carried(o: Ops, x: T, carry: T | int) -> T:
    """The bits of x with `carry` added to the lower half, which makes nothing finite infinite."""
    bits = o.bits(x)
    return bits + o.where((bits & _MAGNITUDE) >= _LARGEST, 0, carry)


def _upper(o: Ops, bits: T) -> T:
    """The bfloat16 beside a lower half that is stored as a signed number."""
    return o.upper(bits + 0x8000)


def chunks(flat: T, size: int) -> Iterator[tuple[int, int]]:
    """(start, stop) over a flat tensor; of a fake one, which only takes memory, the first stands for all."""
    numel = flat.numel()
    for start in range(0, min(numel, size) if private.is_fake(flat) else numel, size):
        yield start, min(start + size, numel)


def nbytes(format: Format, numel: int) -> int:
    return sum(numel // part.every * part.dtype.itemsize for part in format.parts)


def zeros(format: Format, numel: int, device: torch.device | str) -> tuple[torch.Tensor, ...]:
    """The parts of zeros."""
    return tuple(pages.zeros(numel // part.every, part.dtype, device) for part in format.parts)


def entries(form: Format, part: Part, count: int) -> int:
    """How many entries a part has for a leaf's elements: those that share a scale or a byte stay together."""
    return (count if form.group == 1 else -(-count // ALIGN) * ALIGN) // part.every


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


def store(format: Format, parts: Sequence[torch.Tensor], x: torch.Tensor, noise: Bits | None) -> None:
    """Encodes x[groups, 32] into flat parts, from float32 unless a plain format rounds it to nearest."""
    x = x if format.plain and not format.rounds else x.to(torch.float32)
    new = format.encode(TorchOps, x * 1.0, noise)  # arithmetic sets a bit in the upper half of a NaN, which is kept
    for part, target, value in zip(format.parts, parts, new, strict=True):
        if part.every == 2:
            value = (value[:, : GROUP // 2] & 15) | ((value[:, GROUP // 2 :] & 15) << 4)
        target.view(value.shape).copy_(value)


def decode(format: Format, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Values in a dtype; of a plain format in that dtype the stored tensor itself."""
    return Stored(format, tuple(parts)).to(dtype)


def encode(format: Format, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The parts of a flat buffer, rounded to nearest."""
    if format.plain:
        return (x.to(format.dtype),)
    out = Stored(format, zeros(format, x.numel(), x.device))
    for start, stop in chunks(x, CHUNK):
        store(format, out.cut(start, stop).parts, x[start:stop].view(-1, GROUP), None)
    return out.parts


@dataclass(frozen=True)
class Stored:
    """A flat buffer as it is stored: the parts of its format."""

    format: Format
    parts: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        return self.format.dtype

    def numel(self) -> int:
        return self.parts[0].numel() * self.format.parts[0].every

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """Values in a dtype: the stored tensor itself where it is that already."""
        quick = self.format.cast(self.parts, dtype)
        if quick is not None:
            return quick
        out = pages.empty(self.numel(), dtype, self.parts[0].device)
        for start, stop in chunks(out, CHUNK):
            rows = self.format.decode(TorchOps, load(self.format, self.cut(start, stop).parts))
            out[start:stop].view(-1, GROUP).copy_(rows)
        return out

    def cut(self, start: int, stop: int) -> Stored:
        """A range of elements, at multiples of 64."""
        pairs = zip(self.format.parts, self.parts, strict=True)
        return Stored(self.format, tuple([t[start // p.every : stop // p.every] for p, t in pairs]))
