"""Which params' cotangents are one product of two matrices each, and are added to a sum without a tensor between.

So are those of the weights of linear layers: autograd would write the product to a new tensor, which is read again to
be added; and if autocast has rounded a weight, it would write one more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from fzero.base.edges import Grads, ProductOf, is_hooked, name_of
from fzero.base.hooks import Pass, register, running

_LEAF, _T, _CAST = "AccumulateGrad", "TBackward0", "ToCopyBackward0"
LEAST = 1 << 15  # elements from which a weight is worth a hook
Totals = Mapping[int, tuple[torch.Tensor, bool]]


class Weight(NamedTuple):
    """A param that is used in one product of two matrices, and nowhere else.

    Attributes:
        number: the param's.
        node: of the product.
        ends: whether the node leads to nothing else.
        transposed: whether its transpose is used.
        product: its cotangent, while the node runs.
    """

    number: int
    node: Node
    ends: bool
    transposed: bool
    dtype: torch.dtype
    product: ProductOf

    def add(self, grad: torch.Tensor, totals: Totals) -> None:
        """Adds its cotangent to its sum, by that of the product."""
        total, first = totals[self.number]
        own = total.t() if self.transposed else total
        self.product.of(self.node, grad).add_to(own, first, self.dtype)


def weights_of(
    outputs: Sequence[torch.Tensor], params: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> list[Weight]:
    """Those of the params whose cotangents are products, in the graph that leads from some outputs to leaves."""
    large = {i: x for i, x in enumerate(params) if x.numel() >= LEAST and x.ndim == 2 and not x.is_complex()}
    if not large:
        return []
    uses, leaves = _uses(outputs)
    if not leaves.keys() <= {id(x) for x in (*params, *inputs)}:
        return []  # autograd comes to no node that leads to others' leaves alone
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
            name = name_of(node)
            if name != _T and (name != _CAST or cast):  # of two casts each would round
                with contextlib.suppress(ValueError):
                    product = ProductOf(node, place)
                    ends = all(k == place or other is None for k, (other, _) in enumerate(node.next_functions))
                    if not is_hooked(node) and (ends or node in runs):
                        out.append(Weight(number, node, ends, transposed, param.dtype, product))
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
        if not k and name_of(node) == _LEAF:
            leaves[id(node.variable)] = node  # type: ignore[attr-defined]
    return uses, leaves


def pull(
    outputs: Sequence[torch.Tensor],
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    weights: Sequence[Weight],
    totals: Totals,
    retain_graph: bool,
) -> tuple[Sequence[torch.Tensor | None], set[int]]:
    """The cotangents of the leaves that are asked for, and the numbers of the weights whose were added to their sums.

    Args:
        totals: the weights' sums by number, and whether they begin.
    """
    if not outputs or not (asked or weights):
        return [None] * len(asked), set()
    added: set[int] = set()
    own = Pass(dict.fromkeys(o.grad_fn for o in outputs if o.grad_fn is not None) if weights else ())
    handles = own.handles

    def before(grads: Grads, weight: Weight) -> None:
        if grads[0] is not None and own.number == running():
            weight.add(grads[0], totals)
            added.add(weight.number)

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
            weight.add(grad, totals)
            added.add(weight.number)
    return found[: len(asked)], added
