"""The elementwise part of an update in one pass over memory: decode, the optimizer's formula, encode, round.

A formula `formula(o, h, p, g, *moments) -> (p, *moments)` is written over the operations of
`fzero/formats/ops.py`, with its numbers in `h`, of which h[0] multiplies the gradient. It runs as a generated kernel on
CPU, under torch.compile on CUDA, and otherwise eagerly, chunk by chunk, with the same bits as the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.formats.bits import Counters, Fields, drawn_by, word
from fzero.formats.formats import ALIGN, CHUNK, GROUP, Format, Stored, chunks, load, store, zeros
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
        sums: float64[pieces, 2 + moments], of new params, of what is added to them, of new moments; they are added to.
    """

    pieces: Sequence[tuple[int, int]]
    sums: torch.Tensor

    def ranges(self, numel: int) -> Iterator[tuple[int, int, int, torch.Tensor]]:
        """(start, end of what is measured, stop, sums) of a buffer's parts, with what lies behind a piece."""
        end = 0
        for (start, stop), sums in zip(self.pieces, self.sums, strict=True):
            if start < stop:
                end = -(-stop // ALIGN) * ALIGN
                yield start, stop, end, sums
        if end < numel:
            yield end, end, numel, torch.zeros_like(self.sums[0])


def _cuts(
    flat: torch.Tensor, size: int, measure: Measure | None
) -> Iterator[tuple[int, int, int, torch.Tensor | None]]:
    """(start, stop, end of what is measured, sums) of a flat tensor's parts of at most so many elements."""
    if measure is None:
        for start, stop in chunks(flat, size):
            yield start, stop, stop, None
        return
    for low, end, high, sums in measure.ranges(flat.numel()):
        for start in range(low, high, size):
            stop = min(start + size, high)
            yield start, stop, max(min(end, stop), start), sums


def _measured(sums: torch.Tensor | None, count: int, old: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
    """Adds the squares of the first values of new params, of what was added to the old ones, and of new moments."""
    if sums is not None and count:
        values = [x.reshape(-1)[:count] for x in (new[0], new[0] - old, *new[1:])]
        sums += torch.stack([torch.linalg.vector_norm(x, dtype=torch.float64) for x in values]).square().to(sums.device)


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
    sums: torch.Tensor | None = None,
    count: int = 0,
) -> None:
    """One chunk, in torch's operations; writes the parts.

    Args:
        sums, count: to which squares are added, of so many of its elements.
    """
    dtype = hyper.dtype
    params, *moments = [_decoder(form, own, dtype) for form, own in zip(formats, parts, strict=True)]
    old = params()
    new = formula(TorchOps, hyper.unbind(), old, grads.view(-1, GROUP).to(dtype), *moments)
    _measured(sums, count, old, new)
    noise = _drawn(keys)
    for i in sorted(range(len(formats)), key=lambda i: formats[i].group):
        store(formats[i], parts[i], new[i], noise)


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
def _compiled() -> Callable[..., None]:
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
        for start, stop, end, sums in _cuts(grads, CHUNK if cpu else ON_CUDA, measure):
            part, rest = params.cut(start, stop), [m[start:stop] for m in own]
            value = part.to(dtype)
            old = value.clone() if sums is not None else value
            kernel(value, grads[start:stop], *rest)
            _measured(sums, end - start, old[: end - start], [value[: end - start], *rest])
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
            run_all = functools.partial(made, [part for each in buffers for part in each.parts], grads, counters)
            if measure is None:
                run_all(numbers)
                return
            for start, end, stop, sums in measure.ranges(grads.numel()):
                run_all(numbers, (start, end, stop), sums)
            return
    compiled = large and grads.device.type == "cuda"
    block, chunk = (_compiled(), grads.numel()) if compiled else (_block, CHUNK if cpu else ON_CUDA)
    for start, stop, end, sums in _cuts(grads, chunk, measure):
        parts = [stored.cut(start, stop).parts for stored in buffers]
        keys = counters.keys(grads.device, start, stop)
        block(formula, formats, parts, grads[start:stop], keys, numbers, sums, end - start)
