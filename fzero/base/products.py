"""Products of two matrices: what nodes of torch's graph hand on, and how it is added to a sum.

It is added in one pass over the sum where that gives the bits of two. The names of nodes and of what they saved are
private parts of torch, which `tests/base/test_products.py` holds against torch's own pullbacks, bit for bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch.autograd.graph import Node

from fzero.base import private, texts

FROM = (
    128  # the inner dim from which one pass is quicker: below it, libraries read the sum more slowly than `add_` does
)

LEAST = 4096  # elements from which it is worth its while, and from which a draw shows whether bits are the same


class Product(NamedTuple):
    """`factor.conjugate() * left @ right`, transposed or not, as long as nobody has asked for its value.

    Attributes:
        left, right: matrices.
        transposed: whether the value is the product's transpose.
        dtype: that the value is rounded to.
    """

    left: torch.Tensor
    right: torch.Tensor
    transposed: bool
    dtype: torch.dtype
    factor: complex = 1

    def value(self) -> torch.Tensor:
        out = self._unrounded().to(self.dtype)
        return out.t() if self.transposed else out

    def _unrounded(self) -> torch.Tensor:
        out = self.left.mm(self.right)
        out = out if self.factor == 1 else out * self.factor.conjugate()
        return out.real if out.is_complex() and not self.dtype.is_complex else out  # of a real leaf that was cast

    def add_to(self, total: torch.Tensor, first: bool) -> None:
        """Adds it to a sum of its shape, with the bits that it has if its value is added.

        Args:
            first: whether the sum begins with it, and what is there does not count.
        """
        own, dtype = total.t() if self.transposed else total, self.dtype
        is_dense = self.left.layout == self.right.layout == torch.strided
        if is_dense and self.factor == 1 and self.left.dtype == dtype == total.dtype and total.numel() >= LEAST:
            if first:
                torch.mm(self.left, self.right, out=own)
                return
            if _is_alike(self.left, self.right, own):
                own.addmm_(self.left, self.right)
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
    return (type(node).__name__, place) in _OPERANDS


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
    return Product(left, right, by_columns is not transposed, dtype, getattr(node, "_saved_alpha", 1))


# ---- in one pass


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
