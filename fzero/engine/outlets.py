"""How the tensors that a unit returns leave its node: as they are, as copies of params, or as inputs of it.

Those that share memory are no views of one another outside, so that nothing may be written to them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.base.node import OWNER
from fzero.base.rebound import tensors_inside
from fzero.purity.look import Impure
from fzero.table.handle import Valueless, storage_of

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


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of elements of its storage that a tensor lies in."""
    low = int(tensor.storage_offset())
    if tensor.numel() == 0:
        return low, low
    return low, low + 1 + sum((int(n) - 1) * int(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def overlap(tensors: Sequence[torch.Tensor]) -> bool:
    spans = sorted(map(span, tensors))
    return any(b[0] < a[1] for a, b in itertools.pairwise(spans))


class Dressed(NamedTuple):
    """Gives what stands for a tensor outside its class, and what was set on it."""

    recipe: Slot
    kind: type[torch.Tensor]
    attributes: dict[str, object]

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        made = self.recipe.outside(out)
        made = made.as_subclass(self.kind) if type(made) is not self.kind else made
        vars(made).update(self.attributes)
        return made


def _dressed(x: torch.Tensor, recipe: Slot) -> Slot | Dressed:
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

    tensors: list[torch.Tensor]
    takes: list[tuple[str, int]]
    recipes: list[Slot | Same | Dressed]


# how an output leaves the node
TAKES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"as it is": lambda x: x, "copy": torch.Tensor.clone}


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
    params = {x.untyped_storage()._cdata for x in fulls}
    tells = grad and (bool(fulls) or not (private.level() or any(map(private.is_wrapped, inputs))))  # by its graph
    put: dict[int, int] = {}
    made = Leaving([], [], [])
    for i, x in enumerate(out):
        if not isinstance(x, torch.Tensor) or isinstance(x, Valueless):
            made.recipes.append(Same(x))
        elif id(x) in places:
            made.recipes.append(Same(outer[places[id(x)]]))
        else:
            constant, k = tells and x.grad_fn is None, put.get(id(x))
            of_params = bool(params) and x.layout == torch.strided and x.untyped_storage()._cdata in params
            if of_params and constant:
                constant = all(x is not leaf for leaf in leaves)
            if k is None:
                k = put[id(x)] = len(made.takes)
                how = "copy" if of_params else "as it is"
                made.takes.append((how, i))
                made.tensors.append(TAKES[how](x))
            recipe = Slot(k, constant)
            made.recipes.append(recipe if type(x) is torch.Tensor and not x.__dict__ else _dressed(x, recipe))
    return made


def sharing(out: Sequence[object], given: Sequence[object]) -> Iterator[torch.Tensor]:
    """Those of what a call returns that share memory with what it was given, or with one another."""
    known = {storage_of(x): [x] for x in given if isinstance(x, torch.Tensor)}
    for x in out:
        if isinstance(x, torch.Tensor) and (memory := storage_of(x)):
            others = known.setdefault(memory, [])
            if any(x is not y and overlap((x, y)) for y in others):
                yield x
            others.append(x)
