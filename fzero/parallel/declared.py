"""What the inputs and outputs of a function are said to be: patterns over paths, with axes and dims."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_int, need_str, wrong
from fzero.base.patterns import PATTERN, matches, unmatched
from fzero.parallel.axis import need_dim
from fzero.parallel.planned import Planned
from fzero.parallel.types import WHO, Type, set_forms, set_type

Patterns = Mapping[str, str | Sequence[str] | Mapping[str, int]]
Dims = dict[str, int | None]  # axis -> the dim that is cut over it, where that is said


@dataclass(eq=False)
class Inputs:
    """The inputs of a dry run: their paths, and the types that they are said to have.

    Attributes:
        planned: says it of the first input, where a step does.
        tracked: path -> what gradients are taken by.
    """

    fn: Callable[..., object]
    inputs: Sequence[object]
    varying: dict[str, Dims]
    constants: str
    values: bool
    planned: Planned | None = None
    tracked: dict[str, torch.Tensor] = field(default_factory=dict)

    def make(self) -> list[Any]:
        """The arguments of the function: new tensors, with types."""
        paths, leaves, spec = pytree.named_leaves(dict(enumerate(self.inputs)))
        paths = [_named(path, self._names()) for path in paths]
        count = len(self.planned.given) if self.planned is not None else 0
        places = [path for i, path in enumerate(paths) if i < count or isinstance(leaves[i], torch.Tensor)]
        for argument, pattern in [("varying", "|".join(self.varying)), ("constants", self.constants)]:
            if pattern and (unknown := unmatched(pattern, places)):
                raise ValueError(
                    f"{WHO}: got {argument} with {unknown[0]!r}, which matches no tensor of the inputs; there are "
                    f"{', '.join(map(repr, places)) or 'none'}."
                )
        out = [self._of_plan(path, i) if i < count else self._made(path, leaves[i]) for i, path in enumerate(paths)]
        return [*pytree.unflatten(spec, out).values()]

    def _names(self) -> list[str]:
        """The names of arguments; those that have none are called by their numbers."""
        try:
            parameters = [*inspect.signature(self.fn).parameters.values()]
        except (TypeError, ValueError):
            parameters = []
        named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        return [*named, *map(str, range(len(named), len(self.inputs)))]

    def _made(self, path: str, leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        made = self._valued(path, leaf.detach()).clone() if self.values else _like(leaf)
        return self._typed(path, made, dims_of(path, leaf, self.varying, "varying"), False)

    def _of_plan(self, path: str, index: int) -> torch.Tensor:
        """This rank's slice of a leaf."""
        assert self.planned is not None
        given, over = self.planned.given[index], self.planned.over
        if self.values:
            made = self._valued(path, self.planned.own(index)).clone()
        else:
            made = torch.empty(given.shape, dtype=given.dtype, device=self.planned.device(index))
        dims = dims_of(path, made, self.varying, "varying")
        if given.slices is not None and over is not None and over.size > 1:
            dims = {**dims, over.name: given.slices.dim}
        return self._typed(path, made, dims, given.fixed)

    def _valued(self, path: str, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or private.is_fake(leaf):
            raise wrong(WHO, f"values=True and {path}", leaf, "a tensor with values, which a meta or fake one has not")
        return leaf

    def _typed(self, path: str, made: torch.Tensor, dims: Dims, fixed: bool) -> torch.Tensor:
        own = Type(frozenset(dims), False, repr(path))
        fixed = fixed or bool(self.constants and matches(self.constants, path))
        if pytree.is_real(made) and not fixed:
            self.tracked[path] = set_type(made, own).requires_grad_()
            made = made.clone()  # which may be written to
        return set_forms(set_type(made, replace(own)), dims)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape; under a mode without values one that has none."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _named(path: str, names: Sequence[str]) -> str:
    first, _, rest = path.partition(".")
    return f"{names[int(first)]}.{rest}" if rest else names[int(first)]


def patterns_of(given: Patterns | None, argument: str) -> dict[str, Dims]:
    """Pattern -> axes, with dims."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise wrong(WHO, argument, given, "a dict of patterns over leaf paths to names of axes")
    out: dict[str, Dims] = {}
    for pattern, said in given.items():
        need_str(pattern, WHO, argument, f"{PATTERN} for each key")
        axes = _axes_of(said, f"{argument}[{pattern!r}]")
        for axis, dim in axes.items():
            need_str(axis, WHO, f"{argument}[{pattern!r}]", "names of axes, or a dict of them to dims")
            if dim is not None:
                need_int(dim, WHO, f"{argument}[{pattern!r}]", "a dim for each axis")
        out[pattern] = axes
    return out


def _axes_of(said: object, argument: str) -> Dims:
    if isinstance(said, Mapping):
        return dict(said)
    if not isinstance(said, (str, tuple, list)):
        raise wrong(WHO, argument, said, "the name of an axis, a tuple of names, or a dict of names to dims")
    return dict.fromkeys((said,) if isinstance(said, str) else said)


def dims_of(path: str, tensor: torch.Tensor, patterns: Mapping[str, Dims], argument: str) -> Dims:
    """The axes on which a leaf varies, and the dims that are cut over them."""
    out: Dims = {}
    for pattern, axes in patterns.items():
        if matches(pattern, path):
            for axis, dim in axes.items():
                out[axis] = dim if dim is None else need_dim(dim, tensor.ndim, f"check {argument} {path!r}")
    return out
