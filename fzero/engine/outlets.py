"""How the tensors that a unit returns leave its node: as they are, as copies of params, or as inputs of it.

Those that share memory are no views of one another outside, so that nothing may be written to them there.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import private
from fzero.base.node import OWNER
from fzero.base.rebound import tensors_inside
from fzero.purity.observer import Impure
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


class Constant(NamedTuple):
    """Stands for a tensor that the call puts out, and that nothing differentiates."""

    index: int

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        return out[self.index].detach()


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

    recipe: int | Constant
    kind: type[torch.Tensor]
    attributes: dict[str, object]

    def outside(self, out: Sequence[torch.Tensor]) -> torch.Tensor:
        made = out[self.recipe] if isinstance(self.recipe, int) else self.recipe.outside(out)
        made = made.as_subclass(self.kind) if type(made) is not self.kind else made
        vars(made).update(self.attributes)
        return made


# what stands in a result for a leaf of it; a number for a tensor that the call puts out, as it is
Recipe = int | Constant | Same | Dressed
Takes = Sequence[tuple[int, bool]]  # for each tensor that a node puts out: its place in the flat result, whether copied


def _dressed(x: torch.Tensor, recipe: int | Constant) -> int | Constant | Dressed:
    """The recipe of a tensor that may be of a class of the user's."""
    kind, attributes = type(x), {name: own for name, own in vars(x).items() if name != OWNER}
    if private.is_dispatched(kind) or (kind in _PLAIN and not attributes):
        return recipe
    if tensors_inside(attributes):
        what = f"returns a tensor of shape {tuple(x.shape)} on which it has set another one ({', '.join(attributes)})"
        raise Impure(what, None, "Return both, in a tuple.")
    return Dressed(recipe, kind if kind not in _PLAIN else torch.Tensor, attributes)


def leaving(
    out: Sequence[object],
    inputs: Sequence[torch.Tensor],
    outer: Sequence[torch.Tensor],
    leaves: Collection[torch.Tensor],
    fulls: Sequence[torch.Tensor],
    grad: bool,
) -> tuple[list[torch.Tensor], Takes, list[Recipe]]:
    """Chooses how the tensors of a function's flat result leave its node.

    Args:
        inputs: the tensors that the function was given; `outer` the same outside.
        leaves: the leaves that it was given, views of `fulls`.
        grad: whether something may be differentiated.

    Returns:
        What the node puts out, how that is taken from the flat result, and how the call's result is made of it.
    """
    given = dict(zip(map(id, inputs), outer, strict=True))
    params: set[int] = set()
    for full in fulls:
        params.add(full.untyped_storage()._cdata)
    tells = grad and (bool(fulls) or not (private.level() or any(map(private.is_wrapped, inputs))))  # by its graph
    put: dict[int, int] = {}
    tensors: list[torch.Tensor] = []
    takes: list[tuple[int, bool]] = []
    recipes: list[Recipe] = []
    for i, x in enumerate(out):
        if not isinstance(x, torch.Tensor) or isinstance(x, Valueless):
            recipes.append(Same(x))
        elif id(x) in given:
            recipes.append(Same(given[id(x)]))
        else:
            of_params = bool(params) and x.layout == torch.strided and x.untyped_storage()._cdata in params
            constant = tells and x.grad_fn is None
            if constant and of_params:
                constant = all(x is not leaf for leaf in leaves)
            k = put.setdefault(id(x), len(takes))
            if k == len(takes):
                takes.append((i, of_params))
                tensors.append(x.clone() if of_params else x)
            recipe = Constant(k) if constant else k
            recipes.append(recipe if type(x) is torch.Tensor and not x.__dict__ else _dressed(x, recipe))
    return tensors, takes, recipes


def sharing(out: Sequence[object], given: Sequence[object]) -> Iterator[torch.Tensor]:
    """Those of what a call returns that share memory with what it was given, or with one another."""
    known = {storage_of(x): [x] for x in given if isinstance(x, torch.Tensor)}
    for x in out:
        if isinstance(x, torch.Tensor) and (memory := storage_of(x)):
            others = known.setdefault(memory, [])
            if any(x is not y and overlap((x, y)) for y in others):
                yield x
            others.append(x)
