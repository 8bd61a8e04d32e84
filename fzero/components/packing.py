"""A pytree with tensors as one buffer of bytes, and back: what places of a pipeline send one another."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch

from fzero.base import pytree

ALIGN = 64  # bytes, at which tensors begin, so that they can be viewed where they arrived
HEAD = 16  # bytes: how many there are in all, and how many of them the header has


class Packed:
    """A tree on its way: its header, its tensors, and how many bytes they take.

    The header is pickled: it goes between ranks of one program, which run the same code.

    Raises:
        TypeError: there is something in it that cannot be sent.
    """

    def __init__(self, tree: object) -> None:
        leaves, spec = pytree.flatten(tree)
        self.tensors: list[tuple[int, torch.Tensor]] = []
        kept: list[object] = []
        sizes = 0
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "meta":
                kept.append(tuple(_Sent(-1, leaf.dtype, tuple(leaf.shape), tuple(range(leaf.ndim)))))
            elif isinstance(leaf, torch.Tensor) and leaf.layout != torch.strided:
                raise TypeError(
                    f"pipeline: got a tensor of layout {leaf.layout} and shape {tuple(leaf.shape)}, expected a dense "
                    "one, as it goes to another place. Say .to_dense()."
                )
            elif isinstance(leaf, torch.Tensor):
                # in the order in which it lies in memory: sums over it are then formed in the same order there
                order = _order(leaf)
                own = leaf.detach().permute(order).contiguous()
                self.tensors.append((sizes, own))
                kept.append(tuple(_Sent(sizes, own.dtype, tuple(own.shape), order)))
                sizes += _aligned(own.numel() * own.element_size())
            else:
                kept.append((leaf,))
        try:
            self._header = pickle.dumps((spec, kept))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"pipeline: got a value that cannot be sent to another place ({error}), expected tensors, numbers, "
                "texts and what else can be pickled, in containers that can."
            ) from None
        self._start = _aligned(HEAD + len(self._header))
        self.total = self._start + sizes

    def write(self, buffer: torch.Tensor) -> None:
        """Writes it into a buffer of at least `total` bytes."""
        numbers = torch.tensor([self.total, len(self._header)], dtype=torch.int64, device="cpu")
        buffer[:HEAD] = numbers.view(torch.uint8)
        buffer[HEAD : HEAD + len(self._header)] = torch.frombuffer(bytearray(self._header), dtype=torch.uint8)
        for place, tensor in self.tensors:
            if tensor.numel():
                start = self._start + place
                end = start + tensor.numel() * tensor.element_size()
                buffer[start:end].view(tensor.dtype).copy_(tensor.view(-1))


def total_of(buffer: torch.Tensor) -> int:
    """The bytes of the packed whose first ones these are."""
    return int(buffer[:8].view(torch.int64))


def opened(buffer: torch.Tensor) -> Any:
    """The tree, in the buffer's memory: each tensor begins a storage of its own."""
    length = int(buffer[8:HEAD].view(torch.int64))
    spec, kept = pickle.loads(buffer[HEAD : HEAD + length].numpy().tobytes())
    start = _aligned(HEAD + length)
    entries = [entry[0] if len(entry) == 1 else _Sent(*entry) for entry in kept]
    return pytree.unflatten(spec, [x.within(buffer, start) if isinstance(x, _Sent) else x for x in entries])


class _Sent(NamedTuple):
    """A tensor as the header has it.

    Attributes:
        place: in bytes; negative for one without memory.
        order: its dims as they lie in memory.
    """

    place: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def within(self, buffer: torch.Tensor, start: int) -> torch.Tensor:
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        if 0 in self.shape or self.place < 0:
            device = "meta" if self.place < 0 else "cpu"
            return torch.empty(self.shape, dtype=self.dtype, device=device).permute(back)
        size = self.dtype.itemsize * torch.Size(self.shape).numel()
        own = torch.frombuffer(buffer.numpy(), dtype=torch.uint8, offset=start + self.place, count=size)
        return own.view(self.dtype).view(self.shape).permute(back)


def _order(x: torch.Tensor) -> tuple[int, ...]:
    """The dims of a tensor as they lie in memory, the slowest first; of one that is no dense block as they are."""
    every = tuple(range(x.ndim))
    order = tuple(sorted(every, key=lambda dim: -x.stride(dim)))
    return order if x.permute(order).is_contiguous() else every


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
