"""Inputs and outputs of a function in a dry run: as patterns over paths say, and of a step as its plan cuts params."""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fzero.base import private, pytree, thread_state
from fzero.base.arguments import need_int, need_str, wrong
from fzero.base.context import during, proves
from fzero.base.patterns import PATTERN, matches, unmatched
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.backend import axes_in
from fzero.engine.outcome import split_result
from fzero.engine.traversal import Traversal, autocast
from fzero.parallel.axis import need_dim
from fzero.parallel.forms import set_forms
from fzero.parallel.types import WHO, Type, set_type
from fzero.state.init import leaf_specs
from fzero.state.sliced import slice_of
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.placements import Notes, notes
from fzero.table.policy import Policy
from fzero.table.rows import Row
from fzero.table.slices import Hint
from fzero.table.spec import Spec

Patterns = Mapping[str, str | Sequence[str] | Mapping[str, int]]
Dims = dict[str, int | None]  # axis -> the dim that is cut over it, where that is said
_OF_FUNCTIONS = ("tensor axis", "tensor", "frozen")  # the rules that change what a function is given


class Planned:
    """The function of a step on one rank, with params as its plan cuts them.

    Args:
        axis: of a state of the step, where there is one.

    Attributes:
        rows: one for each leaf of the params.
        over: the axis that leaves are cut over, if there is one.
    """

    def __init__(self, step: Spec, params: object, axis: Axis | None = None) -> None:
        if not backend.initialized() and (step.sharding is not None or step.tensor_axis is not None):
            raise RuntimeError(
                f"{WHO}: the step goes over ranks, and there is no process group. Make it on a mesh to which nothing "
                "is sent: with fz.testing.fake_mesh({'dp': 2, 'tp': 4}) as mesh: fz.parallel.check(...)."
            )
        self.step = step
        self._specs, leaves, self._structure = leaf_specs(params)
        self._leaves: list[Any] = leaves
        self._axis = axis or step.axis()
        self.rows = step.rows(self._specs, *self._known)  # which refuses what `init` does
        self._place(*self._axis.place_on_tensor)

    @property
    def _known(self) -> tuple[frozenset[int], dict[int, Hint]]:
        return frozen_leaves(self._structure), hints_of(self._structure)

    def on(self, rank: int, ranks: int) -> Planned:
        """The same on another rank, of others."""
        out = copy.copy(self)
        out._place(rank, ranks)
        return out

    def _place(self, rank: int, ranks: int) -> None:
        """Cuts the leaves; of all other rules none changes what the function is given."""
        rules = tuple([rule for rule in self.step.rules if rule.column in _OF_FUNCTIONS])
        plain = replace(self.step, policy=Policy(), rules=rules)
        self._layout = Layout.build(plain.rows(self._specs, *self._known), 1, (rank, ranks))
        self._table = plain.table(self._layout)
        self._shapes = {slot.leaf: slot.shape for group in self._layout.groups.values() for slot in group.slots}

    @property
    def over(self) -> Axis | None:
        return self._axis.tensor

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype of torch.autocast; that of some units holds for all."""
        return next((row.autocast for row in self.rows if row.autocast is not None), None)

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The axes that the step takes means over, and one of a single rank."""
        sharding = self.step.sharding
        data = () if sharding is None else (*axes_in(sharding.axes), *axes_in(sharding.replicate))
        return (*data, self.over.name) if self.over is not None and self.over.size == 1 else data

    def inputs(self, batch: Sequence[object]) -> tuple[object, ...]:
        """The function's inputs of one microbatch."""
        return self.step.microbatches.split(batch)[0]

    def whole(self, index: int) -> torch.Tensor:
        """A leaf as the function computes with it, but for the plan."""
        if not isinstance(self._leaves[index], torch.Tensor):
            self._leaves[index] = self._leaves[index]()  # once, as it may draw random numbers
        return self._leaves[index].detach().to(dtype_of(self.rows[index]))

    def own(self, index: int) -> torch.Tensor:
        """This rank's slice of a leaf."""
        return slice_of(self.rows[index], *self._layout.tensor, self.whole(index))

    def empty(self, index: int) -> torch.Tensor:
        """The same without values."""
        leaf = self._leaves[index]
        device = leaf.device if isinstance(leaf, torch.Tensor) else torch.get_default_device()
        return torch.empty(self._shapes[index], dtype=dtype_of(self.rows[index]), device=device)

    @contextlib.contextmanager
    def running(self, params: object) -> Iterator[None]:
        """Inside, the step's function runs on these params, which modules know as the leaves of the step."""
        leaves = pytree.flatten(params)[0]
        device = leaves[0].device.type
        traversal = Traversal(self._layout, self._table, {}, (0,), device, self._axis)
        traversal.origins = {id(leaf): index for index, leaf in enumerate(leaves)}
        known = Notes(self.over) if self.over is not None else None
        # a proof of units' purity runs them without the modes that give types
        with autocast(device, self.cast), traversal.running(), during(notes, known), during(proves, False):
            yield

    def outputs(self, result: object) -> object:
        """What is pulled back of what the function returned."""
        return split_result(self.step, result)[0]


def dtype_of(row: Row) -> torch.dtype:
    """The dtype that a leaf is computed with in."""
    return row.policy.compute or row.dtype


@dataclass(frozen=True, eq=False)
class Input:
    """One leaf of the inputs."""

    index: int
    path: str
    leaf: object
    dims: Dims
    row: Row | None  # what a plan says of it, where it is one of a step's params
    tracked: bool  # gradients are taken by it


class Inputs:
    """The inputs of a dry run, and what is said of them.

    Args:
        planned: says it of the first input, where a step does.
        differentiated: of the other inputs' leaves those that gradients are taken by, by their numbers; the others have
            values. None for all that can be, of which none has one.

    Attributes:
        tracked: path -> what gradients are taken by.
    """

    def __init__(
        self,
        fn: Callable[..., object],
        inputs: Sequence[object],
        varying: dict[str, Dims],
        constants: str,
        values: bool,
        planned: Planned | None,
        differentiated: Container[int] | None = None,
    ) -> None:
        self.planned, self._values, self._differentiated = planned, values, differentiated
        self.tracked: dict[str, torch.Tensor] = {}
        self._spec = pytree.flatten(dict(enumerate(inputs)))[1]
        named = paths_of(fn, inputs)
        every = [self._input(i, path, leaf, varying, constants) for i, (path, leaf) in enumerate(named)]
        places = [each.path for each in every if each.row is not None or isinstance(each.leaf, torch.Tensor)]
        for argument, pattern in [("varying", "|".join(varying)), ("constants", constants)]:
            if pattern and (unknown := unmatched(pattern, places)):
                raise ValueError(
                    f"{WHO}: got {argument} with {unknown[0]!r}, which matches no tensor of the inputs; there are "
                    f"{', '.join(map(repr, places)) or 'none'}."
                )
        self.leaves = every

    def _input(self, index: int, path: str, leaf: object, varying: Mapping[str, Dims], constants: str) -> Input:
        fixed = bool(constants and matches(constants, path))
        planned = self.planned
        if planned is not None and index < len(planned.rows):
            row, over = planned.rows[index], planned.over
            dims = dims_of(path, len(row.shape), varying, "varying")
            if row.slices is not None and over is not None and over.size > 1:
                dims = {**dims, over.name: row.slices.dim}
            return Input(index, path, leaf, dims, row, not (fixed or row.frozen))
        if not isinstance(leaf, torch.Tensor):
            return Input(index, path, leaf, {}, None, False)
        dims = dims_of(path, leaf.ndim, varying, "varying")
        if self._differentiated is not None and planned is not None:
            fixed = index - len(planned.rows) not in self._differentiated
        return Input(index, path, leaf, dims, None, pytree.is_real(leaf) and not fixed)

    def typed(self) -> list[Any]:
        """The arguments of the function: new tensors, with types."""
        return self.arguments([self._typed(each) for each in self.leaves])

    def arguments(self, leaves: Sequence[object]) -> list[Any]:
        """The arguments with other leaves."""
        return [*pytree.unflatten(self._spec, list(leaves)).values()]

    def _typed(self, each: Input) -> object:
        if each.row is not None:
            assert self.planned is not None
            planned, index = self.planned, each.index
            made = self._valued(each.path, planned.own(index)) if self._values else planned.empty(index)
        elif isinstance(each.leaf, torch.Tensor):
            real = self._differentiated is not None and not each.tracked and not private.is_wrapper(each.leaf)
            x = each.leaf
            if self._values or real:
                made = self._valued(each.path, x)
            else:
                made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        else:
            return each.leaf
        own = Type(frozenset(each.dims), False, repr(each.path), each.path if each.dims else "")
        if each.tracked:
            self.tracked[each.path] = set_type(made, own).requires_grad_()
            made = made.clone()  # which may be written to
        return set_forms(set_type(made, replace(own)), each.dims)

    def _valued(self, path: str, leaf: torch.Tensor) -> torch.Tensor:
        if leaf.is_meta or private.is_fake(leaf):
            raise wrong(WHO, f"values=True and {path}", leaf, "a tensor with values, which a meta or fake one has not")
        with thread_state.without_dispatch_modes():
            return leaf.detach().clone()


def paths_of(fn: Callable[..., object], inputs: Sequence[object]) -> list[tuple[str, object]]:
    """The leaves of a function's inputs, with their paths; arguments without a name are called by their numbers."""
    try:
        parameters = [*inspect.signature(fn).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    named = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    names = [*named, *map(str, range(len(named), len(inputs)))]
    paths, leaves, _ = pytree.named_leaves(dict(enumerate(inputs)))
    found = []
    for path, leaf in zip(paths, leaves, strict=True):
        number, dot, rest = path.partition(".")
        found.append((names[int(number)] + dot + rest, leaf))
    return found


def patterns_of(given: Patterns | None, argument: str) -> dict[str, Dims]:
    """Pattern -> axes, with dims."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise wrong(WHO, argument, given, "a dict of patterns over leaf paths to names of axes")
    out: dict[str, Dims] = {}
    for pattern, said in given.items():
        need_str(pattern, WHO, argument, f"{PATTERN} for each key")
        one = f"{argument}[{pattern!r}]"
        if not isinstance(said, (str, tuple, list, Mapping)):
            raise wrong(WHO, one, said, "the name of an axis, a tuple of names, or a dict of names to dims")
        names = (said,) if isinstance(said, str) else said
        out[pattern] = dict(said) if isinstance(said, Mapping) else dict.fromkeys(names)
        for axis, dim in out[pattern].items():
            need_str(axis, WHO, one, "names of axes, or a dict of them to dims")
            if dim is not None:
                need_int(dim, WHO, one, "a dim for each axis")
    return out


def dims_of(path: str, ndim: int, patterns: Mapping[str, Dims], argument: str) -> Dims:
    """The axes on which a leaf varies, and the dims that are cut over them."""
    out: Dims = {}
    for pattern, axes in patterns.items():
        if matches(pattern, path):
            for axis, dim in axes.items():
                out[axis] = dim if dim is None else need_dim(dim, ndim, f"check {argument} {path!r}")
    return out
