"""The elementwise part of an update in one pass over memory: decode, the optimizer's formula, encode, round.

A formula `formula(o, h, p, g, *moments) -> (p, *moments)` is written over the operations of
`fzero/formats/ops.py`, with its numbers in `h`, of which h[0] multiplies the gradient. It runs as a generated kernel on
CPU, under torch.compile on CUDA, and otherwise eagerly, chunk by chunk, with the same bits as the kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from fzero.base import private
from fzero.formats.bits import Counters, Fields, drawn_by, word
from fzero.formats.formats import CHUNK, GROUP, Format, Stored, chunks, load, store
from fzero.formats.ops import TorchOps
from fzero.kernels import build

T = torch.Tensor  # of formulas: in a generated kernel a value of its loop
Load = Callable[..., T]  # `load(times=1)`, a moment
Formula = Callable[..., Sequence[T]]
LARGE = 1 << 16  # elements from which a kernel is worth its compilation
ON_CUDA = 1 << 24


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
) -> None:
    """One chunk, in torch's operations; writes the parts."""
    dtype = hyper.dtype
    params, *moments = [_decoder(form, own, dtype) for form, own in zip(formats, parts, strict=True)]
    new = formula(TorchOps, hyper.unbind(), params(), grads.view(-1, GROUP).to(dtype), *moments)
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
    """
    params, *moments = buffers
    dtype = math_dtype(grads.dtype, *[stored.dtype for stored in buffers])
    cpu, large = grads.device.type == "cpu", compiles or grads.numel() >= LARGE
    by_formula = cpu and dtype == torch.float32
    simple = grads.dtype == dtype and all(m.format.plain and m.dtype == dtype for m in moments) and hyper[0] == 1.0
    if kernel is not None and simple and not (generated and by_formula):
        own = [m.parts[0] for m in moments]
        if params.format.plain and params.dtype == dtype:
            kernel(params.parts[0], grads, *own)
            return
        for start, stop in chunks(grads, CHUNK if cpu else ON_CUDA):
            part = params.cut(start, stop)
            value = part.to(dtype)
            kernel(value, grads[start:stop], *[m[start:stop] for m in own])
            write(part, value, counters.keys(value.device, start, stop))
        return
    formats = tuple([stored.format for stored in buffers])
    numbers = torch.tensor(hyper, dtype=dtype, device=grads.device)
    if large and by_formula and build.carries(formats, grads.dtype):
        fake = private.is_fake(grads)
        if fake and build.compiler() is not None:
            return  # of fake tensors only the memory counts, and a kernel takes none
        made = None if fake else build.kernel(formula, formats, grads.dtype, len(hyper))
        if made is not None:
            made([part for stored in buffers for part in stored.parts], grads, counters, numbers)
            return
    compiled = large and grads.device.type == "cuda"
    block, chunk = (_compiled(), grads.numel()) if compiled else (_block, CHUNK if cpu else ON_CUDA)
    for start, stop in chunks(grads, chunk):
        parts = [stored.cut(start, stop).parts for stored in buffers]
        keys = counters.keys(grads.device, start, stop)
        block(formula, formats, parts, grads[start:stop], keys, numbers)
