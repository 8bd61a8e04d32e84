"""The elementwise part of an update in one pass over memory: decode, the optimizer's formula, encode, round.

A formula `formula(o, h, p, g, *moments) -> (p, *moments)` is written over the operations of
`fzero/formats/ops.py`, with its numbers in `h`, of which h[0] multiplies the gradient. It runs as a generated kernel on
CPU, under torch.compile on CUDA, and otherwise eagerly, chunk by chunk, with the same bits as the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.base.norms import norms_of
from fzero.formats.bits import Counters, Fields, drawn_by, word
from fzero.formats.formats import CHUNK, GROUP, Format, Stored, chunks, load, store, zeros
from fzero.formats.ops import TorchOps
from fzero.kernels import build

T = torch.Tensor  # of formulas: in a generated kernel a value of its loop
Load = Callable[..., T]  # `load(times=1)`, a moment
Formula = Callable[..., Sequence[T]]
LARGE = 1 << 16  # elements from which a kernel is worth its compilation
ON_CUDA = 1 << 24


class Measure(NamedTuple):
    """Sums of squares that an update is asked for as it comes by, before anything is rounded.

    Attributes:
        pieces: [start, stop) of a buffer, in order, each of which begins at a multiple of 64.
        sums: float64[pieces + 1, 2 + moments], of new params, of what is added to them, of new moments; they are added
            to. The last ones are of what lies in no piece, and may be anything.
    """

    pieces: Sequence[tuple[int, int]]
    sums: torch.Tensor

    def add(self, start: int, values: Sequence[torch.Tensor]) -> None:
        """Adds the squares of these values, each of a part of the buffer that begins at `start`."""
        flat = [x.reshape(-1) for x in values]
        stop = start + flat[0].numel()
        met = [(i, max(a, start), min(b, stop)) for i, (a, b) in enumerate(self.pieces)]
        met = [(i, low, high) for i, low, high in met if low < high]
        if met:
            cuts = [x[low - start : high - start] for _, low, high in met for x in flat]
            self.sums[[i for i, _, _ in met]] += norms_of(cuts).square().view(len(met), -1)


def _drawn(keys: torch.Tensor) -> Fields:
    """Random bits of [groups, 32] elements."""
    words: dict[int, torch.Tensor] = {}

    def read(number: int) -> torch.Tensor:
        if number not in words:
            words[number] = word(drawn_by(keys), 0, number, TorchOps.shift).view(-1, GROUP)
        return words[number]

    return Fields(read, TorchOps.shift)


def _block(
    formula: Formula,
    formats: Sequence[Format],
    parts: Sequence[Sequence[torch.Tensor]],
    grads: torch.Tensor,
    keys: torch.Tensor,
    hyper: torch.Tensor,
    measures: bool = False,
) -> Sequence[torch.Tensor]:
    """One chunk, in torch's operations; writes the parts.

    Returns:
        What is measured: new params, what was added to them, new moments.
    """
    dtype = hyper.dtype
    params, *moments = [_decoder(form, own, dtype) for form, own in zip(formats, parts, strict=True)]
    old = params()
    new = formula(TorchOps, hyper.unbind(), old, grads.view(-1, GROUP).to(dtype), *moments)
    measured = [new[0], new[0] - old, *new[1:]] if measures else ()
    noise = _drawn(keys)
    for i in sorted(range(len(formats)), key=lambda i: formats[i].group):
        store(formats[i], parts[i], new[i], noise)
    return measured


def _decoder(form: Format, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """`decode(times=None)` of stored parts, in the dtype that is computed in."""
    stored = load(form, parts)
    if form.plain:
        stored = [x.to(dtype) for x in stored]
    return lambda *times: form.decode(TorchOps, stored, *times).to(dtype)


def write(stored: Stored, x: torch.Tensor, keys: torch.Tensor) -> None:
    """Encodes flat values into the stored parts."""
    store(stored.format, stored.parts, x.view(-1, GROUP), _drawn(keys))


def rounded(formats: Sequence[Format], values: Sequence[torch.Tensor], counters: Counters | None) -> list[torch.Tensor]:
    """What flat float32 values become in some formats, with the random bits that one update has for all of them.

    Args:
        counters: of the buffers; None rounds to nearest.
    """
    out = [torch.empty_like(x) for x in values]
    for start, stop in chunks(values[0], CHUNK):
        noise = None if counters is None else _drawn(counters.keys(values[0].device, start, stop))
        for i in sorted(range(len(formats)), key=lambda i: formats[i].group):
            stored = Stored(formats[i], zeros(formats[i], stop - start, values[i].device))
            store(stored.format, stored.parts, values[i][start:stop].view(-1, GROUP), noise)
            out[i][start:stop] = stored.to(formats[i].dtype)
    return out


@functools.cache
def _compiled() -> Callable[..., Sequence[torch.Tensor]]:
    return torch.compile(_block, dynamic=True)


def math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that an update computes in: float64 where any state is, otherwise float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def run(
    formula: Formula,
    hyper: Sequence[float],
    buffers: Sequence[Stored],
    grads: torch.Tensor,
    counters: Counters,
    compiles: bool,
    kernel: Callable[..., None] | None,
    generated: bool,
    measure: Measure | None = None,
) -> None:
    """Updates params and moments in place.

    Args:
        hyper: the formula's numbers.
        buffers: params and moments.
        grads: flat, in the dtype that they are kept in.
        counters: none where nothing is rounded stochastically.
        compiles: whether a kernel is wanted for a small buffer too.
        kernel: `kernel(p, g, *moments)`, torch's own, for gradients without a factor and moments in the dtype that is
            computed in.
        generated: whether the formula is preferred to it where updates have the bits of generated kernels: a matter of
            device and dtype, never of a compiler or size.
        measure: what is to be summed up of new values meanwhile.
    """
    params, *moments = buffers
    dtype = math_dtype(grads.dtype, *[stored.dtype for stored in buffers])
    cpu, large = grads.device.type == "cpu", compiles or grads.numel() >= LARGE
    by_formula = cpu and dtype == torch.float32
    simple = grads.dtype == dtype and all(m.format.plain and m.dtype == dtype for m in moments) and hyper[0] == 1.0
    if kernel is not None and simple and not (generated and by_formula):
        own, in_place = [m.parts[0] for m in moments], params.format.plain and params.dtype == dtype
        if in_place and measure is None:
            kernel(params.parts[0], grads, *own)
            return
        for start, stop in chunks(grads, CHUNK if cpu else ON_CUDA):
            part, rest = params.cut(start, stop), [m[start:stop] for m in own]
            value = part.to(dtype)
            old = value.clone() if measure is not None else value
            kernel(value, grads[start:stop], *rest)
            if measure is not None:
                measure.add(start, [value, value - old, *rest])
            if not in_place:
                write(part, value, counters.keys(value.device, start, stop))
        return
    formats = tuple([stored.format for stored in buffers])
    numbers = torch.tensor(hyper, dtype=dtype, device=grads.device)
    # a kernel counts by blocks
    if large and by_formula and not counters.scattered and build.carries(formats, grads.dtype):
        fake = private.is_fake(grads)
        if fake and build.compiler() is not None:
            return  # of fake tensors only the memory counts, and a kernel takes none
        made = None if fake else build.kernel(formula, formats, grads.dtype, len(hyper), measure is not None)
        if made is not None:
            ends = None if measure is None else torch.tensor([stop for _, stop in measure.pieces], device="cpu")
            sums = None if measure is None else measure.sums
            made([part for stored in buffers for part in stored.parts], grads, counters, numbers, ends, sums)
            return
    compiled = large and grads.device.type == "cuda"
    block, chunk = (_compiled(), grads.numel()) if compiled else (_block, CHUNK if cpu else ON_CUDA)
    for start, stop in chunks(grads, chunk):
        parts = [stored.cut(start, stop).parts for stored in buffers]
        keys = counters.keys(grads.device, start, stop)
        values = block(formula, formats, parts, grads[start:stop], keys, numbers, measure is not None)
        if measure is not None:
            measure.add(start, values)
