"""Which params' cotangents are one product of two matrices each, and are added to a sum without a tensor between.

So are those of the weights of linear layers: where torch adds them up (AccumulateGrad) it writes the product to a new
tensor first, and reads it again; and where autocast has rounded a weight, once more in between.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from fzero.base import private, texts
from fzero.base.edges import Edge, Grads, Kept, ProductOf, is_hooked, is_users, name_of
from fzero.base.hooks import Pass, register, running
from fzero.base.products import Product
from fzero.engine.halves import Part, apart_from
from fzero.engine.leaves import Alias, need_own

_LEAF, _EMBEDDING = "AccumulateGrad", "EmbeddingBackward0"
_T, _CAST = "TBackward0", "ToCopyBackward0"  # what lies between a weight and its product


class Weight(NamedTuple):
    """A param that is used in one product of two matrices, and nowhere else.

    Attributes:
        number: the param's.
        place: of the edge that leads to it, of the product's node.
        transposed: whether its transpose is used.
        product: its cotangent, while the node runs.
    """

    number: int
    place: int
    transposed: bool
    dtype: torch.dtype
    product: ProductOf

    def add_to(self, product: Product | Kept, total: torch.Tensor, first: bool) -> bool:
        """Adds its cotangent to its sum; tells whether that takes less than what autograd does."""
        own = total.t() if self.transposed else total
        if isinstance(product, Product):
            return product.add_to(own, first, self.dtype)
        return product.add_to(self.place, own, first, self.dtype)


class Waiting(NamedTuple):
    """A weight's cotangent that is not added yet, and how often what it is made of was written to."""

    weight: Weight
    product: Product
    versions: tuple[int, int]

    def apart_from(self, storages: Collection[int]) -> Waiting:
        """The same, made of nothing in these storages."""
        self._need_unwritten()
        left, right = (apart_from(x, storages) for x in (self.product.left, self.product.right))
        product = self.product._replace(left=left, right=right)
        return self._replace(product=product, versions=_versions(product))

    def add(self, total: torch.Tensor, first: bool) -> bool:
        """As `Weight.add_to`."""
        self._need_unwritten()
        return self.weight.add_to(self.product, total, first)

    def _need_unwritten(self) -> None:
        if _versions(self.product) != self.versions:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been {texts.WRITES_SAVED}: the cotangent of "
                f"a product, or what was multiplied, of shapes {tuple(self.product.left.shape)} and "
                f"{tuple(self.product.right.shape)}. A backward may not write to the cotangent that it is given, "
                "nor the function to what it has multiplied while microbatches of it wait for their pullbacks, as in a "
                "pipeline over ranks."
            )


class Rest(NamedTuple):
    """What the first half of a pullback leaves to the second."""

    parts: list[Part]
    found: dict[int, torch.Tensor | None]
    weights: dict[int, tuple[Weight, Edge]]  # and where its product's node hands its cotangent on to
    retain_graph: bool


def _versions(product: Product) -> tuple[int, int]:
    return private.version(product.left), private.version(product.right)


@functools.lru_cache(256)
def _is_torchs(kind: type) -> bool:
    return getattr(kind, "_forward_cls", None) is Alias or not (issubclass(kind, BackwardCFunction) or is_users(kind))


class Graph:
    """The graph that leads from outputs to leaves. To be dropped with it.

    Args:
        params: of the run that has made it.

    Raises:
        ValueError: it leads to other runs' params, too, which nobody would look at.

    Attributes:
        ends: the outputs that depend on anything.
        roots: their nodes.
        uses: node -> the nodes that lead to it, and the places of their edges.
        leaves: id of a leaf -> its node.
        native: whether all nodes are torch's own, which write to nothing that anybody else has.
    """

    def __init__(self, outputs: Iterable[torch.Tensor], params: Sequence[torch.Tensor]) -> None:
        self.ends = [o for o in outputs if o.requires_grad]
        nodes = [o.grad_fn if o.grad_fn is not None else get_gradient_edge(o).node for o in self.ends]  # of a leaf
        self.roots = dict.fromkeys(nodes)
        nodes = list(self.roots)
        self.uses: dict[Node, list[tuple[Node, int]]] = {node: [] for node in nodes}
        uses, append = self.uses, nodes.append
        variables: dict[Node, torch.Tensor] = {}
        for node in nodes:  # which grows
            k = 0
            for other, _ in node.next_functions:
                if other is not None:
                    if other in uses:
                        uses[other].append((node, k))
                    else:
                        uses[other] = [(node, k)]
                        append(other)
                k += 1
            if not k and type(node).__name__ == _LEAF:
                variables[node] = node.variable  # type: ignore[attr-defined]
        self.native = all(map(_is_torchs, {*map(type, nodes)}))
        self.leaves = {id(variable): node for node, variable in variables.items()}
        need_own(variables.values(), params)

    def weights(self, params: Sequence[torch.Tensor]) -> list[tuple[Node, Weight]]:
        """Those among some leaves that are used in one product each, and its node."""
        out: list[tuple[Node, Weight]] = []
        for number, param in enumerate(params):
            node = self.leaves.get(id(param))
            if node is None or param.ndim != 2 or param.is_complex():
                continue
            transposed, cast, uses = False, False, self.uses[node]
            while len(uses) == 1 and node not in self.roots:
                node, place = uses[0]
                name = name_of(node)
                if name != _T and (name != _CAST or cast):  # of two casts each would round
                    with contextlib.suppress(ValueError):
                        product = ProductOf(node, place)
                        if not is_hooked(node):
                            out.append((node, Weight(number, place, transposed, param.dtype, product)))
                    break
                transposed, cast, uses = transposed is not (name == _T), cast or name == _CAST, self.uses[node]
        return out

    def is_light(self, params: Iterable[torch.Tensor]) -> bool:
        """Tells whether no product is behind the cotangents of some params: they take little time beside those."""
        matrices = [self.leaves[id(x)] for x in params if x.ndim > 1 and id(x) in self.leaves]
        return all(name_of(user) == _EMBEDDING for node in matrices for user, _ in self.uses[node])

    def above(self, nodes: Iterable[Node], seen: set[Node]) -> None:
        """Adds these nodes, and all that lead to them, to those that were seen."""
        todo = [node for node in nodes if node not in seen]
        seen.update(todo)
        uses = self.uses
        for node in todo:
            for other, _ in uses[node]:
                if other not in seen:
                    seen.add(other)
                    todo.append(other)


def pull(
    graph: Graph,
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    weights: Sequence[tuple[Node, Weight]],
    totals: Mapping[int, tuple[torch.Tensor, bool]] | None,
    retain_graph: bool,
    later: list[Waiting],
) -> tuple[list[torch.Tensor | None], set[int], bool]:
    """The cotangents of the leaves that are asked for, the numbers of the weights whose were added to their sums, and
    whether that took less for any than what autograd does.

    All nodes are torch's own, and nobody has registered a hook: it would not be called with what is added at once, and
    might write to what others are computed from.

    Args:
        cotangents: of the graph's ends.
        totals: the weights' sums by number, and whether they begin.
        later: takes what is to be added where there are no sums yet.
    """
    if totals is None:
        return _pulled_first(graph, cotangents, asked, weights, retain_graph, later)
    added: set[int] = set()
    gains: list[bool] = []

    def add(node: Node, weight: Weight, grad: torch.Tensor) -> None:
        gains.append(weight.add_to(weight.product.of(node, grad), *totals[weight.number]))
        added.add(weight.number)

    runs: set[Node] = set()
    graph.above([graph.leaves[id(x)] for x in asked if id(x) in graph.leaves], runs)
    graph.above([user for node, _ in weights for user, _ in graph.uses[node]], runs)
    ends: list[tuple[Node, Weight]] = []  # whose cotangents are asked for, as autograd would not come by otherwise
    own = Pass(graph.roots)
    handles: list[RemovableHandle] = own.handles
    for node, weight in weights:
        if node not in runs:
            ends.append((node, weight))
            continue

        def before(grads: Grads, node: Node = node, weight: Weight = weight) -> None:
            if grads[0] is not None and own.number == running():
                add(node, weight, grads[0])

        handles.append(register(node.register_prehook, before))
    try:
        found = _passed(graph, cotangents, asked, ends, retain_graph)
    finally:
        for handle in handles:
            handle.remove()
    for (node, weight), grad in zip(ends, found[len(asked) :], strict=True):
        if grad is not None:
            add(node, weight, grad)
    return list(found[: len(asked)]), added, any(gains)


def _pulled_first(
    graph: Graph,
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    weights: Sequence[tuple[Node, Weight]],
    retain_graph: bool,
    later: list[Waiting],
) -> tuple[list[torch.Tensor | None], set[int], bool]:
    """`pull`, where nothing is added yet: one pass, in which nobody is called."""
    saved = [getattr(node, weight.product.saved) for node, weight in weights]
    found = _passed(graph, cotangents, asked, weights, retain_graph)
    count, added = len(asked), set[int]()
    for (_, weight), grad, other in zip(weights, found[count:], saved, strict=True):
        if grad is not None:
            product = weight.product.with_saved(grad, other)
            later.append(Waiting(weight, product, _versions(product)))
            added.add(weight.number)
    return list(found[:count]), added, False


def _passed(
    graph: Graph,
    cotangents: Sequence[torch.Tensor],
    asked: Sequence[torch.Tensor],
    weights: Sequence[tuple[Node, Weight]],
    retain_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """The cotangents of leaves, and behind them those of the products of some weights, by one pass of autograd."""
    wanted = [*asked, *[GradientEdge(node, 0) for node, _ in weights]]
    if not wanted or not graph.ends:
        return [None] * len(wanted)
    return torch.autograd.grad(
        graph.ends,
        wanted,  # type: ignore[arg-type]
        cotangents,
        retain_graph=retain_graph,
        allow_unused=True,
    )
