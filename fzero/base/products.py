"""Products of two matrices: what nodes of torch's graph hand on, now or later, and how it is added to a sum.

The names of nodes and of what they saved are private parts of torch, which `tests/base/test_products.py` holds against
torch's own pullbacks, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from fzero.base import private, texts


class Product(NamedTuple):
    """`left @ right`, transposed or not, as long as nobody has asked for its value.

    Attributes:
        left, right: matrices.
        transposed: whether the value is the product's transpose.
        dtype: that the value is rounded to.
    """

    left: torch.Tensor
    right: torch.Tensor
    transposed: bool
    dtype: torch.dtype

    def value(self) -> torch.Tensor:
        out = self._unrounded().to(self.dtype)
        return out.t() if self.transposed else out

    def _unrounded(self) -> torch.Tensor:
        out = self.left.mm(self.right)
        return out.real if out.is_complex() and not self.dtype.is_complex else out  # of a real leaf that was cast

    def add_to(self, total: torch.Tensor, first: bool) -> None:
        """Adds it to a sum of its shape, with the bits that it has if its value is added.

        Args:
            first: whether the sum begins with it, and what is there does not count.
        """
        own, dtype = total.t() if self.transposed else total, self.dtype
        is_dense = self.left.layout == self.right.layout == torch.strided
        if first and is_dense and self.left.dtype == dtype == total.dtype:
            torch.mm(self.left, self.right, out=own)
            return
        value = self._unrounded()
        if torch.promote_types(value.dtype, dtype) != dtype or value.device != total.device:
            value = value.to(total.device, dtype)
        if first:
            own.copy_(value)
        else:
            own.add_(value)


class Later:
    """A product that is computed later, of operands that stay as they are until then. It leads to no graph."""

    def __init__(self, product: Product) -> None:
        left, right = [private.unwrapped(x).detach() for x in product[:2]]
        self.product = product._replace(left=left, right=right)
        self._versions = [private.version(x) for x in (left, right)]

    def now(self) -> Product:
        for x, version in zip(self.product[:2], self._versions, strict=True):
            if private.version(x) != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been {texts.WRITES_SAVED}: of shape "
                    f"{tuple(x.shape)}, it is at version {private.version(x)}; expected version {version} instead."
                )
        return self.product


# ---- of a graph

# a node, and the place of an edge -> the name of the operand whose cotangent it carries, and that of the other one
_OPERANDS = {
    ("MmBackward0", 0): ("self", "mat2"),
    ("MmBackward0", 1): ("mat2", "self"),
    ("AddmmBackward0", 1): ("mat1", "mat2"),
    ("AddmmBackward0", 2): ("mat2", "mat1"),
}


def is_product(node: Node, place: int) -> bool:
    """Tells whether what a node hands on along an edge is a product of two matrices."""
    return (type(node).__name__, place) in _OPERANDS and getattr(node, "_saved_alpha", 1) == 1


def product_of(node: Node, place: int, grad: torch.Tensor, transposed: bool, dtype: torch.dtype) -> Product:
    """What a node hands on along such an edge of its own cotangent, by torch's own formulas.

    Args:
        transposed: whether its transpose is meant.
        dtype: that it is rounded to.
    """
    mine, other = _OPERANDS[type(node).__name__, place]
    saved: torch.Tensor = getattr(node, f"_saved_{other}")
    sizes, strides = getattr(node, f"_saved_{mine}_sym_sizes"), getattr(node, f"_saved_{mine}_sym_strides")
    by_columns = strides[0] == 1 and strides[1] == sizes[0] and grad.layout == saved.layout == torch.strided
    if mine == "mat2":
        left, right = (grad.t(), saved.conj()) if by_columns else (saved.t().conj(), grad)
    else:
        left, right = (saved.conj(), grad.t()) if by_columns else (grad, saved.t().conj())
    return Product(left, right, by_columns is not transposed, dtype)
