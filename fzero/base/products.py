"""Products of two matrices: what nodes of torch's graph hand on, now or later.

The names of nodes and of what they saved are private parts of torch, which `tests/base/test_products.py` holds against
torch's own pullbacks, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
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
        out = self.left.mm(self.right)
        out = out.real if out.is_complex() and not self.dtype.is_complex else out  # of a real leaf that was cast
        out = out.to(self.dtype)
        return out.t() if self.transposed else out


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


def product_of(node: Node, place: int, transposed: bool, dtype: torch.dtype) -> Callable[[torch.Tensor], Product]:
    """What a node hands on along such an edge, by its own cotangent, by torch's own formulas: also once it has run.

    Args:
        transposed: whether its transpose is meant.
        dtype: that it is rounded to.
    """
    mine, other = _OPERANDS[type(node).__name__, place]
    saved: torch.Tensor = getattr(node, f"_saved_{other}")
    sizes, strides = getattr(node, f"_saved_{mine}_sym_sizes"), getattr(node, f"_saved_{mine}_sym_strides")

    def product(grad: torch.Tensor) -> Product:
        by_columns = strides[0] == 1 and strides[1] == sizes[0] and grad.layout == saved.layout == torch.strided
        if mine == "mat2":
            left, right = (grad.t(), saved.conj()) if by_columns else (saved.t().conj(), grad)
        else:
            left, right = (saved.conj(), grad.t()) if by_columns else (grad, saved.t().conj())
        return Product(left, right, by_columns is not transposed, dtype)

    return product
