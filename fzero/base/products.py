"""Products of two matrices, and how they are added to a sum: in one pass over it where that gives the bits of two."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

FROM = (
    128  # the inner dim from which one pass is quicker: below it, libraries read the sum more slowly than `add_` does
)

LEAST = 4096  # elements from which it is worth its while, and from which a draw shows whether bits are the same


class Product(NamedTuple):
    """`factor.conjugate() * left @ right`, transposed or not, as long as nobody has asked for its value.

    Attributes:
        left, right: matrices.
        transposed: whether the value is the product's transpose.
    """

    left: torch.Tensor
    right: torch.Tensor
    transposed: bool
    factor: complex = 1

    def value(self) -> torch.Tensor:
        out = self.left.mm(self.right)
        return times(out.t() if self.transposed else out, self.factor)

    def add_to(self, total: torch.Tensor, first: bool, dtype: torch.dtype) -> None:
        """Adds it to a sum of its shape, with the bits that it has if its value is added.

        Args:
            first: whether the sum begins with it, and what is there does not count.
            dtype: that its value is rounded to before.
        """
        own = total.t() if self.transposed else total
        is_dense = self.left.layout == self.right.layout == torch.strided
        if is_dense and self.factor == 1 and self.left.dtype == dtype == total.dtype:
            if first:
                torch.mm(self.left, self.right, out=own)
                return
            if _is_alike(self.left, self.right, own):
                own.addmm_(self.left, self.right)
                return
        value = times(self.left.mm(self.right), self.factor)
        if value.is_complex() and not dtype.is_complex:
            value = value.real  # of a real leaf that was cast
        if torch.promote_types(value.dtype, dtype) != dtype or value.device != total.device:
            value = value.to(total.device, dtype)
        if first:
            own.copy_(value)
        else:
            own.add_(value)


def times(x: torch.Tensor, factor: complex) -> torch.Tensor:
    """A cotangent, of what was multiplied by a factor."""
    return x if factor == 1 else x * factor.conjugate()


def _is_alike(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> bool:
    if total.device.type != "cpu" or left.shape[1] < FROM or total.numel() < LEAST:
        return False
    if total.dtype not in (torch.float32, torch.float64) or torch.get_float32_matmul_precision() != "highest":
        return False
    if 0 in (*left.stride(), *right.stride()):  # expanded, as the cotangent of a sum is: few of its numbers are drawn
        return False
    forms = [(tuple(x.shape), x.stride()) for x in (left, right, total)]
    return _adds_alike(*forms, total.dtype, (torch.get_num_threads(), torch.backends.mkldnn.enabled))


_Form = tuple[tuple[int, ...], tuple[int, ...]]


@functools.lru_cache(4096)
def _adds_alike(left: _Form, right: _Form, total: _Form, dtype: torch.dtype, settings: object) -> bool:
    """Tells whether addmm has the bits of a product that is added: which sums are formed depends on shapes alone.

    Libraries add up short inner dims (up to 384 in MKL) before they touch the sum, and cut longer ones.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.autocast("cpu", enabled=False):
        for _ in range(2):
            a, b, c = [_drawn(form, dtype, generator) for form in (left, right, total)]
            separate = c + a.mm(b)
            if not torch.equal(c.addmm_(a, b), separate):
                return False
    return True


def _drawn(form: _Form, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    shape, strides = form
    out = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
    return out.copy_(torch.randn(shape, dtype=dtype, generator=generator, device="cpu"))
