"""How the tensors that a unit returns leave its node: as they are, as views of one another, or as inputs of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fzero.base import private
from fzero.base.node import OWNER
from fzero.base.rebound import tensors_inside
from fzero.purity.look import Impure
from fzero.table.handle import Valueless, storage_of

Reading = tuple[int, torch.dtype, bool, bool]
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def alike(inner: torch.Tensor, outer: torch.Tensor) -> torch.Tensor:
    """Gives what stands for a tensor inside its class, and the two one dict for what its user sets on either."""
    if not (private.is_dispatched(type(outer)) or private.is_dispatched(type(inner))):
        kind = torch.Tensor if type(outer) in _PLAIN else type(outer)
        if type(inner) is not kind and not (kind is torch.Tensor and type(inner) in _PLAIN):
            inner = inner.as_subclass(kind)  # below a level of torch.func the class is that of what it wraps
        inner.__dict__ = vars(outer)  # type: ignore[assignment]
    return inner


class Slot(NamedTuple):
    """Stands for a tensor that the call puts out."""

    index: int
    constant: bool = False

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        return out[self.index].detach() if self.constant else out[self.index]


class Same(NamedTuple):
    """Stands in a result for what is no tensor that the call has made."""

    value: object

    def outside(self, out: Sequence[torch.Tensor]) -> object:
        return self.value


class View:
    """A tensor that outside is a view of `base`, as `inner` is one of `whole` inside."""

    def __init__(self, base: Slot | torch.Tensor, inner: torch.Tensor, whole: torch.Tensor, constant: bool) -> None:
        self.base, self.constant = base, constant  # no derivative goes through a constant one
        self.size, self.stride = inner.shape, inner.stride()
        self.offset = inner.storage_offset() - whole.storage_offset()

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        base = out[self.base.index] if isinstance(self.base, Slot) else self.base
        base = base.detach() if self.constant else base
        return base.as_strided(self.size, self.stride, base.storage_offset() + self.offset)


def base_of(tensor: torch.Tensor) -> torch.Tensor:
    if tensor._base is None:
        raise ValueError(
            f"A unit returns several tensors that overlap in memory (one of shape {tuple(tensor.shape)}), and nothing "
            "says what they are views of. Return the whole tensor and slice it outside, or return clones."
        )
    return tensor._base


def reading(tensor: torch.Tensor) -> Reading:
    """A tensor's memory and how it is read: among those of one reading, a view is told by its size and strides."""
    strided = tensor.layout == torch.strided
    return memory(tensor), tensor.dtype, strided and tensor.is_conj(), strided and tensor.is_neg()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of elements of its storage that a tensor lies in."""
    low = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return low, low
    return low, low + 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    spans = sorted(map(span, tensors))
    return any(b[0] < a[1] for a, b in itertools.pairwise(spans))


def memory(tensor: torch.Tensor) -> int:
    """Returns a number that tensors which share memory have in common."""
    return storage_of(tensor) or id(tensor)


# how an output leaves the node
TAKES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "base": base_of,
    "copy": lambda x: x.resolve_conj().resolve_neg().clone(),
}


class Outlets:
    """Which tensors leave the node, and which are views of those, or of inputs, outside.

    Args:
        out: the tensors of one run that are put out.
        inputs: the tensors that the run was given; `outer` the same outside.
        own: memory of the gathered buffers.
        moving: places of the inputs that are differentiated.
        leaves: ids of what the graph of the run begins with.
    """

    def __init__(
        self,
        out: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outer: Sequence[torch.Tensor],
        own: Collection[int],
        moving: Collection[int],
        leaves: Collection[int],
    ) -> None:
        self._leaves = leaves
        self.chosen: list[tuple[str, int]] = []
        self.recipes: list[Any] = [None] * len(out)  # how each comes from what the node puts out
        if private.level() > 0 or any(map(private.is_wrapped, out)):
            for i in range(len(out)):
                self._put_out(i, "as it is", False)
            return
        places: dict[Reading, list[int]] = {}
        for place, x in enumerate(inputs):
            places.setdefault(reading(x), []).append(place)
        families: dict[Reading, list[int]] = {}
        for i, tensor in enumerate(out):
            families.setdefault(reading(tensor), []).append(i)
        first = {key[0]: key for key in reversed((*places, *families))}  # how a memory is read by who comes first
        for family, members in families.items():
            sharing = [p for p in places.get(family, ()) if inputs[p].stride() == outer[p].stride()]
            if sharing:
                for i in members:
                    # of several that share memory, the one whose gradient it is part of
                    place = next((p for p in sharing if out[i]._base is inputs[p]), None)
                    told = place is not None or len(sharing) == 1 or not torch.is_grad_enabled()
                    place = sharing[-1] if place is None else place
                    constant = place in moving and self._is_constant(out[i])
                    if told or constant:
                        self.recipes[i] = View(outer[place], out[i], inputs[place], constant)
                    else:
                        self._put_out(i, "copy", False)
                continue
            copied = family[0] in own or first[family[0]] != family  # of a param, or a real part beside the whole
            if not copied and overlap([out[i] for i in members]):
                self._put_out_views(out, members)
                continue
            for i in members:
                self._put_out(i, "copy" if copied else "as it is", self._is_constant(out[i]))

    def _put_out(self, i: int, how: str, constant: bool) -> Slot:
        self.recipes[i] = slot = Slot(len(self.chosen), constant)
        self.chosen.append((how, i))
        return slot

    def _put_out_views(self, out: Sequence[torch.Tensor], members: Sequence[int]) -> None:
        """Outputs that overlap: what they are views of leaves the node, and they are views of that outside too."""
        constant = {i for i in members if self._is_constant(out[i])}
        moving = [i for i in members if i not in constant] or members
        spans = {i: span(out[i]) for i in members}
        whole = max(moving, key=lambda i: out[i].numel())
        low, high = spans[whole]
        covers = out[whole].numel() == high - low and all(low <= a and b <= high for a, b in spans.values())
        base = out[whole] if covers else base_of(out[whole])
        if reading(base) != reading(out[whole]):  # real and imaginary parts
            for i in members:
                self._put_out(i, "copy", i in constant)
            return
        slot = self._put_out(whole, "as it is" if covers else "base", False)
        for i in members:
            self.recipes[i] = View(slot, out[i], base, i in constant)

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Tells whether nothing differentiates what is put out, where something is differentiated at all."""
        if not torch.is_grad_enabled():
            return False
        # a view that was taken without gradients says that it needs one, as what it is a view of does
        blind = tensor.grad_fn is None and id(tensor) not in self._leaves
        return not tensor.requires_grad or blind


class Dressed(NamedTuple):
    """Gives what stands for a tensor outside its class, and what was set on it."""

    recipe: Slot | View
    kind: type[torch.Tensor]
    attributes: dict[str, object]

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        made = self.recipe.outside(out)
        made = made.as_subclass(self.kind) if type(made) is not self.kind else made
        vars(made).update(self.attributes)
        return made


def _dressed(x: torch.Tensor, recipe: Slot | View) -> Slot | View | Dressed:
    """The recipe of a tensor that may be of a class of the user's."""
    kind, attributes = type(x), {name: own for name, own in vars(x).items() if name != OWNER}
    if private.is_dispatched(kind) or (kind in _PLAIN and not attributes):
        return recipe
    if tensors_inside(attributes):
        what = f"returns a tensor of shape {tuple(x.shape)} on which it has set another one ({', '.join(attributes)})"
        raise Impure(what, None, "Return both, in a tuple.")
    return Dressed(recipe, kind if kind not in _PLAIN else torch.Tensor, attributes)


@dataclass(slots=True)
class Leaving:
    """What leaves a node, and how the call's result is made of that.

    Attributes:
        tensors: what the node puts out.
        takes: how each is made of the flat result of the function, and of which place of it.
        recipes: for each place of the flat result.
    """

    tensors: Sequence[torch.Tensor]
    takes: list[tuple[str, int]]
    recipes: list[Slot | View | Same | Dressed]


def leaving(
    out: Sequence[object],
    inputs: Sequence[torch.Tensor],
    outer: Sequence[torch.Tensor],
    leaves: Collection[torch.Tensor],
    fulls: Sequence[torch.Tensor],
    grad: bool,
) -> Leaving:
    """Chooses how the tensors of a function's flat result leave its node.

    Args:
        inputs: the tensors that the function was given; `outer` the same outside.
        leaves: the leaves that it was given, views of `fulls`.
        grad: whether something may be differentiated.
    """
    places = {id(x): i for i, x in enumerate(inputs)}
    memory = {x.untyped_storage()._cdata for x in (*inputs, *fulls) if x.layout == torch.strided} if fulls else set()
    put: dict[int, int] = {}
    order: list[torch.Tensor] = []
    takes: list[tuple[str, int]] = []
    recipes: list[Slot | View | Same | Dressed] = []
    plain = bool(fulls)
    for i, x in enumerate(out):
        if not isinstance(x, torch.Tensor) or isinstance(x, Valueless):
            recipes.append(Same(x))
        elif id(x) in places:
            recipes.append(Same(outer[places[id(x)]]))
        else:
            k = put.get(id(x))
            if k is None:
                own = x.untyped_storage()._cdata if plain and x.layout == torch.strided else 0
                if not plain or own in memory:
                    return _leaving_views(out, inputs, outer, leaves, fulls)
                if own:
                    memory.add(own)
                k = put[id(x)] = len(order)
                order.append(x)
                takes.append(("as it is", i))
            recipe = Slot(k, grad and x.grad_fn is None)
            recipes.append(recipe if type(x) is torch.Tensor and not x.__dict__ else _dressed(x, recipe))
    return Leaving(order, takes, recipes)


def _leaving_views(
    out: Sequence[object],
    inputs: Sequence[torch.Tensor],
    outer: Sequence[torch.Tensor],
    leaves: Collection[torch.Tensor],
    fulls: Sequence[torch.Tensor],
) -> Leaving:
    """The same if outputs share memory with each other, with inputs or with leaves."""
    places = {id(x): i for i, x in enumerate(inputs)}
    index: dict[int, int] = {}
    own: list[tuple[int, torch.Tensor]] = []
    for i, x in enumerate(out):
        if isinstance(x, torch.Tensor) and not isinstance(x, Valueless) and id(x) not in places and id(x) not in index:
            index[id(x)] = len(own)
            own.append((i, x))
    tensors = [x for _, x in own]
    moving = {i for i, x in enumerate(inputs) if x.requires_grad}
    begin = {id(x) for x in (*inputs, *leaves)}
    outlets = Outlets(tensors, inputs, outer, {storage_of(x) for x in fulls}, moving, begin)
    recipes: list[Slot | View | Same | Dressed] = []
    for x in out:
        if not isinstance(x, torch.Tensor) or isinstance(x, Valueless):
            recipes.append(Same(x))
        else:
            same = id(x) in places
            recipes.append(Same(outer[places[id(x)]]) if same else _dressed(x, outlets.recipes[index[id(x)]]))
    takes = [(how, own[i][0]) for how, i in outlets.chosen]
    return Leaving([TAKES[how](out[i]) for how, i in takes], takes, recipes)  # type: ignore[arg-type]
