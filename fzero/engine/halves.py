"""The first half of a pullback: which params' cotangents are one product of two matrices each, and wait.

So are those of the weights of linear layers: a layer's input and its output's cotangent wait for the second half (zero
bubble pipelines, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fzero.base import private
from fzero.base.hooks import is_hooked, is_users, without_compiled_autograd
from fzero.base.refusals import refuse_writes
from fzero.table.handle import storage_of

_LEAF, _T, _CAST, _VIEW = "AccumulateGrad", "TBackward0", "ToCopyBackward0", "AliasBackward0"


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
        self._versions = private.versions((left, right))

    def now(self) -> Product:
        for x, version in zip(self.product[:2], self._versions, strict=True):
            refuse_writes(private.version(x), version, x.shape)
        return self.product


Grad = torch.Tensor | Later | None


class Weight(NamedTuple):
    """A param that is used in one product of two matrices, and nowhere else.

    Attributes:
        number: the param's.
        node: of the product.
        product: its cotangent, by that of the product.
    """

    number: int
    node: Node
    product: Callable[[torch.Tensor], Product]


def _weights_of(outputs: Sequence[torch.Tensor], params: Sequence[torch.Tensor]) -> list[Weight]:
    """Those of the params whose cotangents are products, in the graph that leads from some outputs to leaves.

    None where a user's Function might write to a cotangent.
    """
    uses, leaves = _uses(outputs)
    if any(is_users(kind) for kind in {*map(type, uses)}):
        return []
    out: list[Weight] = []
    for number, param in enumerate(params):
        if id(param) not in leaves or not param.numel() or param.ndim != 2 or param.is_complex():
            continue
        transposed, cast, of = False, False, uses[leaves[id(param)]]
        while len(of) == 1 and of[0] is not None:
            node, place = of[0]
            name = type(node).__name__
            if name not in (_T, _VIEW) and (name != _CAST or cast):  # of two casts each would round
                if is_product(node, place) and not is_hooked(node):
                    out.append(Weight(number, node, product_of(node, place, transposed, param.dtype)))
                break
            transposed, cast, of = transposed is not (name == _T), cast or name == _CAST, uses[node]
    return out


def _uses(outputs: Sequence[torch.Tensor]) -> tuple[dict[Node, list[tuple[Node, int] | None]], dict[int, Node]]:
    """For each node the nodes that lead to it, with the places of their edges, None for an output; id of a leaf -> its
    node."""
    roots = [o.grad_fn if o.grad_fn is not None else get_gradient_edge(o).node for o in outputs]
    uses: dict[Node, list[tuple[Node, int] | None]] = {node: [None] for node in roots}
    nodes, leaves = list(uses), dict[int, Node]()
    for node in nodes:  # which grows
        k = 0
        for other, _ in node.next_functions:
            if other is not None:
                if other in uses:
                    uses[other].append((node, k))
                else:
                    uses[other] = [(node, k)]
                    nodes.append(other)
            k += 1
        if not k and type(node).__name__ == _LEAF:
            leaves[id(node.variable)] = node  # type: ignore[attr-defined]
    return uses, leaves


def pull_first(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    retain_graph: bool,
) -> tuple[list[Grad], Sequence[torch.Tensor | None]]:
    """The first half of a pullback: the cotangents of the params, of which products wait, and of the inputs."""
    live = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    ends = [o for o, _ in live]
    weights = _weights_of(ends, params)
    found: list[Grad] = [None] * len(params)
    others = sorted({*range(len(params))} - {weight.number for weight in weights})
    asked = [*inputs, *[params[i] for i in others]]
    wanted: Any = [*asked, *[GradientEdge(weight.node, 0) for weight in weights]]
    if not (ends and wanted):
        return found, [None] * len(inputs)
    with without_compiled_autograd():
        given = [c for _, c in live]
        pulled = torch.autograd.grad(ends, wanted, given, retain_graph=retain_graph, allow_unused=True)
    own = {storage_of(x) for x in params}  # which may not be there any more
    for weight, grad in zip(weights, pulled[len(asked) :], strict=True):
        if grad is not None:
            product = weight.product(grad)
            is_own = not own.isdisjoint(map(storage_of, product[:2]))
            found[weight.number] = product.value() if is_own else Later(product)
    for i, grad in zip(others, pulled[len(inputs) : len(asked)], strict=True):
        found[i] = grad
    return found, pulled[: len(inputs)]


def apart_from(grad: Grad, storages: Collection[int]) -> Grad:
    """The same with a copy of what lies in these storages, as it lies there: others might be added up otherwise."""
    if grad is None:
        return None
    if isinstance(grad, Later):
        left, right = [_apart_from(x, storages) for x in grad.product[:2]]
        same = left is grad.product.left and right is grad.product.right
        return grad if same else Later(grad.now()._replace(left=left, right=right))
    return _apart_from(grad, storages)


def _apart_from(tensor: torch.Tensor, storages: Collection[int]) -> torch.Tensor:
    if storage_of(tensor) not in storages:
        return tensor
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() % 64 // tensor.element_size()
    copy = torch.empty(begin + span, dtype=tensor.dtype, device=tensor.device)
    copy[begin:].copy_(tensor.as_strided((span,), (1,)))
    return copy.as_strided(tensor.shape, tensor.stride(), begin)


# ---- products, by the nodes of torch's graph and what they saved, whose names are private parts of torch

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
