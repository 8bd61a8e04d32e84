"""Which params' cotangents are one product of two matrices each: added to a sum without a tensor between, or later.

So are those of the weights of linear layers: autograd would write the product to a new tensor, which is read again to
be added; and if autocast has rounded a weight, it would write one more. And a pullback in two halves leaves these
products to the second: a layer's input and its output's cotangent wait (zero bubble pipelines, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fzero.base import products
from fzero.base.hooks import Pass, is_hooked, is_users, register, running
from fzero.base.products import Later, Product
from fzero.table.handle import storage_of

_LEAF, _T, _CAST = "AccumulateGrad", "TBackward0", "ToCopyBackward0"
LEAST = 1 << 15  # elements from which a weight is worth a hook
Grad = torch.Tensor | Later | None


class Weight(NamedTuple):
    """A param that is used in one product of two matrices, and nowhere else.

    Attributes:
        number: the param's.
        node: of the product.
        place: of the edge that leads to the param.
        ends: whether the node leads to nothing else.
        transposed: whether its transpose is used.
    """

    number: int
    node: Node
    place: int
    ends: bool
    transposed: bool
    dtype: torch.dtype

    def product(self, grad: torch.Tensor) -> Product:
        """Its cotangent, by that of the product, while the node runs."""
        return products.product_of(self.node, self.place, grad, self.transposed, self.dtype)


def weights_of(
    outputs: Sequence[torch.Tensor], params: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], waits: bool = False
) -> list[Weight]:
    """Those of the params whose cotangents are products, in the graph that leads from some outputs to leaves.

    Args:
        waits: they are for later. So may small ones be, but none where a user's Function might write to a cotangent.
    """
    least = 1 if waits else LEAST
    large = {i: x for i, x in enumerate(params) if x.numel() >= least and x.ndim == 2 and not x.is_complex()}
    if not large:
        return []
    uses, leaves = _uses(outputs)
    if not leaves.keys() <= {id(x) for x in (*params, *inputs)}:
        return []  # autograd comes to no node that leads to others' leaves alone
    if waits and any(is_users(kind) for kind in {*map(type, uses)}):
        return []
    own = {id(param) for param in large.values()}
    todo = [node for x, node in leaves.items() if x not in own]
    runs = dict.fromkeys(todo)  # autograd runs a node only on its way to what is asked for
    for node in todo:  # which grows
        for use in uses[node]:
            if use is not None and use[0] not in runs:
                runs[use[0]] = None
                todo.append(use[0])
    out: list[Weight] = []
    for number, param in large.items():
        if id(param) not in leaves or param._backward_hooks:
            continue
        transposed, cast, of = False, False, uses[leaves[id(param)]]
        while len(of) == 1 and of[0] is not None:
            node, place = of[0]
            name = type(node).__name__
            if name != _T and (name != _CAST or cast):  # of two casts each would round
                if products.is_product(node, place) and not is_hooked(node):
                    ends = all(k == place or other is None for k, (other, _) in enumerate(node.next_functions))
                    if ends or node in runs:
                        out.append(Weight(number, node, place, ends, transposed, param.dtype))
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


def pull(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    take: Callable[[int, Product], object],
    retain_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """The cotangents of the leaves that are asked for, and none of these weights'.

    Args:
        take: is given the weights' by number, where they have any, before the graph is gone.
    """
    if not outputs or not (asked or weights):
        return [None] * len(asked)
    own = Pass(dict.fromkeys(o.grad_fn for o in outputs if o.grad_fn is not None) if weights else ())
    handles = own.handles

    def before(grads: Sequence[torch.Tensor | None], weight: Weight) -> None:
        if grads[0] is not None and own.number == running():
            take(weight.number, weight.product(grads[0]))

    for weight in weights:
        if not weight.ends:
            handles.append(register(weight.node.register_prehook, lambda grads, weight=weight: before(grads, weight)))
    ends = [weight for weight in weights if weight.ends]  # which autograd would not come by otherwise
    try:
        wanted = [*asked, *[GradientEdge(weight.node, 0) for weight in ends]]
        found = torch.autograd.grad(
            outputs,
            wanted,  # type: ignore[arg-type]
            cotangents,
            retain_graph=retain_graph,
            allow_unused=True,
        )
    finally:
        for handle in handles:
            handle.remove()
    for weight, grad in zip(ends, found[len(asked) :], strict=True):
        if grad is not None:
            take(weight.number, weight.product(grad))
    return found[: len(asked)]


def pull_first(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    waits: bool,
    retain_graph: bool,
) -> tuple[list[Grad], list[torch.Tensor | None]]:
    """The first half of a pullback: the cotangents of the params, of which products wait, and of the inputs.

    Args:
        waits: whether any may.
    """
    live = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if c is not None and o.requires_grad]
    ends = [o for o, _ in live]
    weights = weights_of(ends, params, inputs, waits=True) if waits else []
    found: list[Grad] = [None] * len(params)
    others = sorted({*range(len(params))} - {weight.number for weight in weights})
    own = {storage_of(x) for x in params}  # which may not be there any more

    def take(number: int, product: Product) -> None:
        is_own = not own.isdisjoint(map(storage_of, product[:2]))
        found[number] = product.value() if is_own else Later(product)

    asked = [*inputs, *[params[i] for i in others]]
    pulled = pull(ends, [c for _, c in live], asked, weights, take, retain_graph)
    for i, grad in zip(others, pulled[len(inputs) :], strict=True):
        found[i] = grad
    return found, list(pulled[: len(inputs)])


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
