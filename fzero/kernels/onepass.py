"""The elementwise part of an update in one pass over memory: decode, the optimizer's formula, encode, round.

A formula `formula(o, h, p, g, *moments) -> (p, *moments)` is written over the operations of
`fzero/formats/ops.py`, with its numbers in `h`, of which h[0] multiplies the gradient. It runs as a generated kernel on
CPU, under torch.compile on CUDA, and otherwise eagerly, chunk by chunk, with the same bits as the kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.formats.bits import Counters, Fields, drawn_by, word
from fzero.formats.formats import CHUNK, GROUP, Format, Stored, chunks, load, store
from fzero.formats.ops import TorchOps
from fzero.kernels import build

T = torch.Tensor  # of formulas: in a generated kernel a value of its loop
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
Load = Callable[..., T]  # `load(times=1)`, a moment
Formula = Callable[..., Sequence[T]]
LARGE = 1 << 16  # elements from which a kernel is worth its compilation
FEW = 1 << 12  # elements, up to which a kernel takes less time than its call
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


class Piece(NamedTuple):
    """What an update writes: a slice of a group, of leaves with one count.

    Attributes:
        hyper: the formula's numbers.
        buffers: params and moments.
        grads: flat, in the dtype that they are kept in.
        counters: none where nothing is rounded stochastically.
        compiles: whether a kernel is wanted for a small buffer too.
        kernel: `kernel(params, grads, *moments)` of lists of tensors, torch's own, for gradients without a factor and
            moments in the dtype that is computed in.
    """

    hyper: Sequence[float]
    buffers: Sequence[Stored]
    grads: torch.Tensor
    counters: Counters
    compiles: bool
    kernel: Callable[..., None] | None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in."""
        return math_dtype(self.grads.dtype, *[stored.dtype for stored in self.buffers])

    def takes(self, generated: bool) -> bool:
        """Tells whether torch's own kernel updates this."""
        if self.kernel is None or self.hyper[0] != 1.0 or self.grads.dtype != (dtype := self.dtype):
            return False
        if generated and self.grads.device.type == "cpu" and dtype == torch.float32:
            return False
        return all([own.format.plain and own.dtype == dtype for own in self.buffers[1:]])

    def made(self, formula: Formula) -> Made | None:
        """The generated kernel, if it is worth its compilation and can be had."""
        formats = tuple([stored.format for stored in self.buffers])
        if self.grads.device.type != "cpu" or not (self.compiles or self.grads.numel() >= LARGE):
            return None
        if self.dtype != torch.float32 or not build.carries(formats, self.grads.dtype):
            return None
        if private.is_fake(self.grads):  # of which only the memory counts, and a kernel takes none
            return None if build.compiler() is None else Made(lambda *_: None)
        run = build.kernel(formula, formats, self.grads.dtype, len(self.hyper))
        return None if run is None else Made(run)


class Made(NamedTuple):
    """A generated kernel."""

    run: Callable[..., None]

    def __call__(self, piece: Piece) -> None:
        numbers = torch.tensor(piece.hyper, dtype=torch.float32, device="cpu")
        self.run([part for stored in piece.buffers for part in stored.parts], piece.grads, piece.counters, numbers)


def run_all(formula: Formula, pieces: Iterable[Piece], generated: bool) -> None:
    """Updates params and moments in place; small pieces together, as operations cost more than they do.

    Args:
        generated: whether the formula is preferred to a kernel of torch's where updates have the bits of generated
            kernels: a matter of device and dtype, never of a compiler or size.
    """
    for kind, alike in itertools.groupby(pieces, functools.partial(_kind, formula, generated)):
        if isinstance(kind, Made):
            for piece in alike:
                kind(piece)
            continue
        for own in ([piece] for piece in alike) if kind is None else _batches(alike):
            _run(formula, own, generated)


def _kind(formula: Formula, generated: bool, piece: Piece) -> object:
    """What updates a piece by itself: a generated kernel, or None; or what it has in common with those beside it."""
    buffers, numel = piece.buffers, piece.grads.numel()
    alone = numel >= LARGE or piece.counters.count or not all([stored.format.plain for stored in buffers])
    if (alone or numel >= FEW) and not piece.takes(generated) and (made := piece.made(formula)) is not None:
        return made
    if alone:
        return None
    return piece.hyper, piece.kernel, piece.compiles, piece.grads.dtype, *[stored.dtype for stored in buffers]


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Consecutive ones, fewer than `LARGE` elements at once."""
    return pytree.batches(pieces, lambda piece: piece.grads.numel(), LARGE)


def _run(formula: Formula, pieces: Sequence[Piece], generated: bool) -> None:
    first = pieces[0]
    hyper, buffers, grads, counters, compiles, kernel = first
    (params, *moments), dtype, takes = buffers, first.dtype, first.takes(generated)
    if takes and params.format.plain and params.dtype == dtype:
        columns = zip(*[[stored.parts[0] for stored in piece.buffers] for piece in pieces], strict=True)
        every, *others = map(list, columns)
        kernel(every, [piece.grads for piece in pieces], *others)  # type: ignore[misc]
        return
    if len(pieces) > 1:
        _run_joined(formula, pieces, generated)
        return
    cpu = grads.device.type == "cpu"
    if takes:
        for start, stop in chunks(grads, CHUNK if cpu else ON_CUDA):
            part = params.cut(start, stop)
            value = part.to(dtype)
            kernel([value], [grads[start:stop]], *[[m.parts[0][start:stop]] for m in moments])  # type: ignore[misc]
            write(part, value, counters.keys(value.device, start, stop))
        return
    if (made := first.made(formula)) is not None:
        made(first)
        return
    numbers = torch.tensor(hyper, dtype=dtype, device=grads.device)
    compiled = (compiles or grads.numel() >= LARGE) and grads.device.type == "cuda"
    block, chunk = (_compiled(), grads.numel()) if compiled else (_block, CHUNK if cpu else ON_CUDA)
    formats = tuple([stored.format for stored in buffers])
    for start, stop in chunks(grads, chunk):
        parts = [stored.cut(start, stop).parts for stored in buffers]
        keys = counters.keys(grads.device, start, stop)
        block(formula, formats, parts, grads[start:stop], keys, numbers)


def _run_joined(formula: Formula, pieces: Sequence[Piece], generated: bool) -> None:
    """The same, on copies of small ones, one after the other in a buffer."""
    stored = list(zip(*[piece.buffers for piece in pieces], strict=True))
    buffers = [Stored(own[0].format, (torch.cat([each.parts[0] for each in own]),)) for own in stored]
    grads = torch.cat([piece.grads for piece in pieces])
    _run(formula, [pieces[0]._replace(buffers=buffers, grads=grads)], generated)
    sizes = [piece.grads.numel() for piece in pieces]
    for own, new in zip(stored, buffers, strict=True):
        torch._foreach_copy_([each.parts[0] for each in own], new.parts[0].split(sizes))
