"""One graph's pullback in two halves: the inputs' cotangents first, and the params' from what they leave.

The nodes that lead to params and to no input fall into regions. What a region is given, by nodes that do lead to
inputs, is what the first half keeps of it; the second half pulls that back through the region. So a linear layer keeps
its input and its output's cotangent, and multiplies the two later (zero bubble pipelines, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node
from torch.utils.hooks import RemovableHandle

from fzero.base.edges import Edge, Grads, Kept, along, edge_of, is_python, meta_of
from fzero.base.hooks import Pass, keeping, register, running
from fzero.engine.regions import Region, Regions
from fzero.table.handle import storage_of


@dataclass(eq=False)
class _Value:
    """A cotangent that a region is given along an edge: a tensor, or what one is computed from."""

    edge: Edge
    of: torch.Tensor | Kept
    place: int = 0

    def take(self) -> torch.Tensor:
        return self.of.give(self.place) if isinstance(self.of, Kept) else self.of


@dataclass(eq=False)
class Part:
    """What the second half needs of one region.

    Attributes:
        params: the numbers of the params that it leads to.
        units: numbers of the nodes that hand on cotangents of these params by themselves, as they were pulled back.
        always: edges into it that are pulled back also where nothing came along them.
    """

    params: list[int]
    values: list[_Value] = field(default_factory=list)
    units: list[int] = field(default_factory=list)
    always: list[Edge] = field(default_factory=list)
    keeping: list[object] = field(default_factory=list)  # the graph

    def own(self, storages: Collection[int]) -> None:
        """Copies what lies in these storages, which are other people's, too."""
        for value in self.values:
            if isinstance(value.of, torch.Tensor):
                value.of = apart_from(value.of, storages)
            elif value.of.grad is not None:
                value.of.grad = apart_from(value.of.grad, storages)

    def pull(self, params: Sequence[torch.Tensor], retain_graph: bool) -> Sequence[torch.Tensor | None]:
        """The cotangents of this part's params, which are given."""
        values, self.values = self.values, []
        given = {value.edge for value in values}
        pairs = [(edge, _zeros(edge)) for edge in dict.fromkeys(self.always) if edge not in given]
        pairs += [(value.edge, value.take()) for value in values]
        if not pairs:
            return [None] * len(params)
        edges = [GradientEdge(*edge) for edge, _ in pairs]
        found = torch.autograd.grad(
            edges, list(params), [x for _, x in pairs], retain_graph=retain_graph, allow_unused=True
        )
        if not retain_graph:
            self.keeping = []
        return found


def _zeros(edge: Edge) -> torch.Tensor:
    meta = meta_of(edge)
    return torch.zeros((), dtype=meta.dtype, device=meta.device).expand(tuple(meta.shape))


def apart_from(tensor: torch.Tensor, storages: Collection[int]) -> torch.Tensor:
    """A copy of a tensor in one of these storages, as it lies there: others might be added up in another order."""
    if storage_of(tensor) not in storages:
        return tensor
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr() % 64 // tensor.element_size()
    copy = torch.empty(begin + span, dtype=tensor.dtype, device=tensor.device)
    copy[begin:].copy_(tensor.as_strided((span,), (1,)))
    return copy.as_strided(tensor.shape, tensor.stride(), begin)


class Split:
    """The first half: the inputs' cotangents by autograd alone, and what regions that wait are given, noted on the way.

    It knows the graph's nodes, and is to be dropped with them.

    Args:
        params: leaves, like the inputs.
        units: nodes that hand on cotangents by themselves -> their numbers, and along how many of their first edges.
        shapes_only: the params may be read in the first half only.

    Attributes:
        native: as of `Regions`.
    """

    def __init__(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        params: Sequence[torch.Tensor],
        units: Mapping[Node, tuple[int, int]] | None = None,
        shapes_only: bool = False,
    ) -> None:
        self._outputs, self._inputs, self._params = outputs, inputs, params
        self._regions = Regions(outputs, inputs, params, units, shapes_only)
        self.native = self._regions.native

    def is_alone(self, unit: Node) -> bool:
        """Tells whether nothing else uses the params that a unit hands on cotangents of by itself."""
        return self._regions.is_alone(unit)

    def pull(
        self, cotangents: Sequence[torch.Tensor | None], retain_graph: bool
    ) -> tuple[list[torch.Tensor | None], dict[int, torch.Tensor | None], list[Part]]:
        """The inputs' cotangents, those of params that do not wait, by number, and what the others are pulled from.

        None stands for what nothing depends on.
        """
        live = [
            (o, c.to(o.dtype))
            for o, c in zip(self._outputs, cotangents, strict=True)
            if c is not None and o.requires_grad
        ]
        kept = keeping(self._outputs)
        parts = {region: Part(sorted(region.params), keeping=kept) for region in self._regions.late}
        for region, part in parts.items():
            for i in region.outputs:
                o, c, edge = self._outputs[i], cotangents[i], self._regions.roots[i]
                assert edge is not None
                part.always.append(edge)
                if c is not None:
                    part.values.append(_Value(edge, c.to(o.dtype)))
        asked = [*self._inputs, *[self._params[i] for i in self._regions.early]]
        found: list[torch.Tensor | None] = [None] * len(asked)
        own = Pass(dict.fromkeys(edge[0] for edge in self._regions.roots if edge is not None))
        handles = self._watch(parts, own)
        try:
            if live and asked:
                found = list(
                    torch.autograd.grad(
                        [o for o, _ in live], asked, [c for _, c in live], retain_graph=retain_graph, allow_unused=True
                    )
                )
        finally:
            for handle in handles:
                handle.remove()
        early = dict(zip(self._regions.early, found[len(self._inputs) :], strict=True))
        return found[: len(self._inputs)], early, list(parts.values())

    def _watch(self, parts: Mapping[Region, Part], own: Pass) -> list[RemovableHandle]:
        """Notes what nodes hand on to the regions that wait, in the order in which they run."""
        given: dict[Node, dict[int, Part]] = {}
        for region, part in parts.items():
            for node, k in region.into:
                given.setdefault(node, {})[k] = part
                if k >= self._regions.units.get(node, (0, 0))[1]:
                    part.always.append(edge_of(node, k))
        return own.handles + [
            _watch_python(own, node, parts, self._regions.units.get(node))
            if is_python(node)
            else _watch_native(own, node, parts, [k for k in parts if self._regions.can_wait(node, k)])
            for node, parts in given.items()
        ]


def _watch_python(own: Pass, node: Node, given: Mapping[int, Part], unit: tuple[int, int] | None) -> RemovableHandle:
    """Such a node hands on everything, whatever is asked for."""

    def after(found: Grads, _: object) -> None:
        if own.number != running():
            return
        for k, part in given.items():
            value = found[k]
            if value is not None:
                part.values.append(_Value(edge_of(node, k), value))
        if unit is not None:
            for part in dict.fromkeys(given.values()):
                part.units.append(unit[0])

    return register(node.register_hook, after)


def _watch_native(own: Pass, node: Node, given: Mapping[int, Part], later: Collection[int]) -> RemovableHandle:
    now = [k for k in given if k not in later]

    def before(grads: Grads) -> None:
        if own.number != running():
            return
        values: dict[int, _Value] = {}
        if later and grads[0] is not None:
            kept = Kept(node, grads[0], later)
            values.update((k, _Value(edge_of(node, k), kept, k)) for k in later)
        for k, value in along(node, grads, now).items() if now else ():
            if value is not None:
                values[k] = _Value(edge_of(node, k), value)
        for k in sorted(values):
            given[k].values.append(values[k])

    return register(node.register_prehook, before)
