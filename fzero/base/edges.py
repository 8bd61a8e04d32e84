"""What one node of autograd's graph hands on along some of its edges: apart from the others, or later.

An edge is a place in `node.next_functions`. The names of native nodes and of what they saved are private parts of
torch, which `tests/base/test_edges.py` holds against torch's own pullbacks, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import GradientEdge, Node

from fzero.base import private, texts
from fzero.base.hooks import register
from fzero.base.products import Product, times

Edge = tuple[Node, int]


class InputMetadata(Protocol):
    """What torch notes of a tensor that an edge carries."""

    shape: Sequence[int]
    dtype: torch.dtype
    device: torch.device


Grads = Sequence["torch.Tensor | None"]


def name_of(node: Node) -> str:
    return type(node).__name__


def edge_of(node: Node, place: int) -> Edge:
    """Where an edge leads to that is there."""
    other, number = node.next_functions[place]
    assert other is not None
    return other, number


def is_python(node: Node) -> bool:
    """Tells whether a node is a torch.autograd.Function's, which pulls back everything whatever is asked for."""
    return isinstance(node, torch.autograd.function.BackwardCFunction)


def is_users(kind: type) -> bool:
    """Tells whether nodes of a type are a Function's, but for this library's: they may write to what they are given.

    It is one in Python, as operators of torch.library are, or in C++; of CopySlices, a write to a view, only C++ sees
    what has written.
    """
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return not getattr(kind, "_forward_cls", kind).__module__.startswith("fzero.")
    return kind.__name__ in ("CppFunction", "CopySlices")


# native nodes that compute what is asked for along each edge, with the same bits whatever is asked for along others
SEPARABLE = frozenset(
    f"{name}Backward0"
    for name in "Add Sub Mul Div Mm Addmm Bmm Baddbmm Mv Addmv Dot Convolution Cat Stack Where Addcmul Addcdiv Maximum "
    "Minimum MaskedScatter IndexPut NativeLayerNorm NativeGroupNorm NativeBatchNorm".split()
)
# nodes that save no tensors
SHAPES = frozenset(
    f"{name}Backward0"
    for name in "T Transpose Permute View UnsafeView ReshapeAlias Alias Expand Squeeze Unsqueeze ToCopy Clone Slice "
    "Select Split SplitWithSizes Narrow AsStrided Unbind Cat Stack".split()
) | {"SqueezeBackward1", "SqueezeBackward2", "UnsafeSplitBackward0"}


def is_hooked(node: Node) -> bool:
    """Tells whether what a node saved passes through somebody's hooks, which may count on one look at it."""
    return any(
        getattr(each, "unpack_hook", None) is not None
        for name in _raw(type(node))
        for saved in [getattr(node, name)]
        for each in (saved if isinstance(saved, (tuple, list)) else (saved,))
    )


@functools.cache
def _raw(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def meta_of(edge: Edge) -> InputMetadata:
    """The shape, dtype and device of what an edge carries."""
    return edge[0]._input_metadata[edge[1]]


def fitted(value: torch.Tensor | None, meta: InputMetadata) -> torch.Tensor | None:
    """A cotangent in the shape and dtype that an edge carries, as autograd makes it."""
    if value is None:
        return None
    if value.shape != torch.Size(meta.shape):
        value = value.sum_to_size(tuple(meta.shape))
    if value.is_complex() and not meta.dtype.is_complex:
        value = value.real
    return value.to(meta.dtype)


def along(node: Node, grads: Grads, places: Collection[int]) -> dict[int, torch.Tensor | None]:
    """The cotangents that a native node hands on along some edges alone, computed now.

    A node computes what the pass that is running asks for: here that is a pass of its own, which asks for these edges.

    Args:
        grads: the node's own cotangents.
        places: of the edges.
    """
    device = next((g.device for g in grads if g is not None), None)
    if device is None:
        return dict.fromkeys(places)
    edges, found = [edge_of(node, k) for k in places], []
    with torch.enable_grad():
        one = torch.zeros((), device=device, requires_grad=True)
        root = one.clone()
    assert root.grad_fn is not None
    register(root.grad_fn.register_prehook, lambda _: found.extend(node(*grads)))  # type: ignore[operator]
    asked: Sequence[torch.Tensor | GradientEdge] = [one, *[GradientEdge(*edge) for edge in edges]]
    torch.autograd.grad(root, asked, allow_unused=True)  # type: ignore[arg-type]
    return {k: fitted(found[k], meta_of(edge)) for k, edge in zip(places, edges, strict=True)}


# ---- later


class _Matmul(NamedTuple):
    """A matrix product among torch's nodes: the places of its edges, and the names of its operands.

    Attributes:
        added: of what is added to the product.
    """

    left: int
    right: int
    operands: tuple[str, str]
    batched: bool = False
    added: int | None = None


_MATMULS = {
    "MmBackward0": _Matmul(0, 1, ("self", "mat2")),
    "AddmmBackward0": _Matmul(1, 2, ("mat1", "mat2"), added=0),
    "BmmBackward0": _Matmul(0, 1, ("self", "mat2"), batched=True),
    "BaddbmmBackward0": _Matmul(1, 2, ("batch1", "batch2"), batched=True, added=0),
}
_CONVOLUTION = "ConvolutionBackward0"
_NUMBERS = "stride padding dilation transposed output_padding groups".split()
# edges along which a node does the work of a matrix product. Those of convolutions are computed together
WEIGHTS: Mapping[str, frozenset[int]] = {
    **{name: frozenset((own.left, own.right)) for name, own in _MATMULS.items()},
    _CONVOLUTION: frozenset((1, 2)),
    "EmbeddingBackward0": frozenset((0,)),
}


class Kept:
    """The cotangents that a node will hand on along some edges, without the node: only what they are computed from.

    Args:
        grad: the node's own cotangent.
        places: of the edges, to operands of matrix products and convolutions and what is added to them.

    Attributes:
        grad: the same, as long as it is needed.
    """

    def __init__(self, node: Node, grad: torch.Tensor, places: Collection[int]) -> None:
        self.grad: torch.Tensor | None = grad
        own = _MATMULS.get(name_of(node))
        saved, self._computes = _convolution(node, places) if own is None else _matmul(node, own, places)
        # what leads to the rest of the graph would keep it
        self._saved = [private.unwrapped(x).detach() for x in saved]
        self._versions = [private.version(x) for x in self._saved]
        self._metas = {k: meta_of(edge_of(node, k)) for k in places}

    @staticmethod
    def needs(node: Node, place: int) -> tuple[int, ...] | None:
        """The edges to the operands that the cotangent along an edge is computed from; None where it cannot wait."""
        own = _MATMULS.get(name_of(node))
        if own is None:
            return (0,) if name_of(node) == _CONVOLUTION and place > 0 else None
        return () if place == own.added else (own.right if place == own.left else own.left,)

    def give(self, place: int) -> torch.Tensor:
        """The cotangent along one edge, once."""
        value = fitted(self._take(place), self._metas[place])
        self._end()
        assert value is not None
        return value

    def _take(self, place: int) -> torch.Tensor:
        for x, version in zip(self._saved, self._versions, strict=True):
            if private.version(x) != version:
                raise RuntimeError(
                    f"one of the variables needed for gradient computation has been {texts.WRITES_SAVED}: of shape "
                    f"{tuple(x.shape)}, it is at version {private.version(x)}; expected version {version} instead."
                )
        assert self.grad is not None
        return self._computes.pop(place)(self.grad, self._saved)

    def _end(self) -> None:
        if not self._computes:
            self.grad, self._saved, self._metas = None, [], {}


class ProductOf:
    """What a node hands on along an edge where that is a product of two matrices: by torch's own formulas.

    Attributes:
        saved: the name of the other operand.

    Raises:
        ValueError: it is none.
    """

    def __init__(self, node: Node, place: int) -> None:
        own = _MATMULS.get(name_of(node))
        if own is None or own.batched or place not in (own.left, own.right):
            raise ValueError(f"{name_of(node)} hands on no product at {place}")
        self._right = place == own.right
        left, right = own.operands
        self.saved = f"_saved_{left if self._right else right}"
        mine = right if self._right else left
        read = functools.partial(getattr, node)
        sizes, strides = read(f"_saved_{mine}_sym_sizes"), read(f"_saved_{mine}_sym_strides")
        self._by_columns = strides[0] == 1 and strides[1] == sizes[0]
        self._alpha = 1 if own.added is None else read("_saved_alpha")

    def of(self, node: Node, grad: torch.Tensor) -> Product:
        """The product, of the node's own cotangent."""
        return self.with_saved(grad, getattr(node, self.saved))

    def with_saved(self, grad: torch.Tensor, other: torch.Tensor) -> Product:
        """The same without the node, of what it has in `saved`."""
        by_columns = self._by_columns and grad.layout == other.layout == torch.strided
        return Product(*(_right if self._right else _left)(grad, other, by_columns), self._alpha)


_Compute = Callable[[torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]


def _matmul(node: Node, own: _Matmul, places: Collection[int]) -> tuple[list[torch.Tensor], dict[int, _Compute]]:
    """What the cotangents of a product's operands are computed from, and how: by torch's own formulas."""
    read = functools.partial(getattr, node)
    left, right = own.operands
    alpha, beta = (read("_saved_alpha"), read("_saved_beta")) if own.added is not None else (1, 1)
    saved: list[torch.Tensor] = []
    steps: dict[int, _Compute] = {}
    for k in places:
        if k == own.added:
            steps[k] = lambda grad, _: times(grad, beta)
            continue
        at = len(saved)
        if own.batched:
            saved.append(read(f"_saved_{right if k == own.left else left}"))
            formula = _batched_left if k == own.left else _batched_right
            steps[k] = lambda grad, saved, at=at, formula=formula: times(formula(grad, saved[at]), alpha)
        else:
            product = ProductOf(node, k)
            saved.append(read(product.saved))
            steps[k] = lambda grad, saved, at=at, product=product: product.with_saved(grad, saved[at]).value()
    return saved, steps


def _left(grad: torch.Tensor, right: torch.Tensor, by_columns: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
    return (right.conj(), grad.t(), True) if by_columns else (grad, right.t().conj(), False)


def _right(grad: torch.Tensor, left: torch.Tensor, by_columns: bool) -> tuple[torch.Tensor, torch.Tensor, bool]:
    return (grad.t(), left.conj(), True) if by_columns else (left.t().conj(), grad, False)


def _batched_left(grad: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return grad.bmm(right.transpose(1, 2).conj())


def _batched_right(grad: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    return left.transpose(1, 2).conj().bmm(grad)


def _convolution(node: Node, places: Collection[int]) -> tuple[list[torch.Tensor], dict[int, _Compute]]:
    read = functools.partial(getattr, node)
    numbers, bias = [read(f"_saved_{name}") for name in _NUMBERS], read("_saved_bias_sym_sizes_opt")
    weight = private.unwrapped(read("_saved_weight"))
    sizes, strides, dtype = weight.shape, weight.stride(), weight.dtype
    found: dict[int, torch.Tensor] = {}

    def compute(grad: torch.Tensor, saved: Sequence[torch.Tensor], place: int) -> torch.Tensor:
        if not found:  # they are computed together
            (x,) = saved
            # the weight's values do not matter, and need not be there any more
            like = torch.empty_strided(sizes, strides, dtype=dtype, device=x.device)
            mask = [False, 1 in places, 2 in places]
            computed = torch.ops.aten.convolution_backward(grad, x, like, bias, *numbers, mask)
            found.update((k, computed[k]) for k in places)
        return found.pop(place)

    return [read("_saved_input")], {k: functools.partial(compute, place=k) for k in places}
