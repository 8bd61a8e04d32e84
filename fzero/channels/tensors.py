"""Tensors as bytes: which there are, where their memory lies, and what a message says of each."""

from __future__ import annotations

import ctypes
import math
from typing import NamedTuple

import torch

from fzero.base import private

# a dtype's number on the wire is its place here: only append
DTYPES: tuple[torch.dtype, ...] = (
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex32, torch.complex64),
    *(torch.complex128, torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz),
    *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
)
NUMBERS = {dtype: number for number, dtype in enumerate(DTYPES)}

INLINE = -1  # in no segment of shared memory, but behind the message


class Row(NamedTuple):
    """One tensor of a message."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    segment: int = INLINE

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def need_plain(tensor: torch.Tensor) -> None:
    """Refuses a tensor that is more than its values: it would arrive as something else."""
    kind, advice = "", "Send tensor.detach()."
    if private.is_wrapped(tensor):
        kind, advice = "is being differentiated or mapped by torch.func", "Send it outside of that transform."
    elif tensor.requires_grad:
        kind = "requires a gradient, which ends here"
    elif type(tensor) is not torch.Tensor:
        kind = f"is a {type(tensor).__name__}"
    elif tensor.layout is not torch.strided or tensor.is_quantized or tensor.dtype not in NUMBERS:
        kind, advice = f"has layout {tensor.layout} and dtype {tensor.dtype}", "Send the dense tensors it is made of."
    elif tensor.device.type not in ("cpu", "cuda"):
        kind, advice = f"lies on {tensor.device}", "Send tensor.cpu(), where it has values."
    if kind:
        raise TypeError(f"connection.send: a tensor of shape {tuple(tensor.shape)} {kind}. {advice}")


def empty(row: Row) -> torch.Tensor:
    """Memory for a tensor, whatever torch's default device is."""
    return shaped(torch.empty(row.nbytes, dtype=torch.uint8, device="cpu"), row)


def shaped(data: torch.Tensor, row: Row) -> torch.Tensor:
    """Bytes as the tensor of a row."""
    return data.view(row.dtype).view(row.shape)


def as_contiguous(tensor: torch.Tensor, row: Row) -> torch.Tensor:
    """The same values as the memory of a contiguous CPU tensor says them; the same tensor where it is one."""
    if tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return empty(row).copy_(tensor)


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor."""
    nbytes = tensor.numel() * tensor.element_size()
    array = (ctypes.c_char * nbytes).from_address(tensor.data_ptr() if nbytes else 0)
    array.tensor = tensor  # type: ignore[attr-defined]  # which lives as long as they are used
    return memoryview(array).cast("B")
