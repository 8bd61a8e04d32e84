"""A step's function in a dry run: what it is given of params that a plan cuts, without a state."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.base.context import during, proves
from fzero.comm import backend
from fzero.comm.axis import Axis
from fzero.comm.mesh_axes import axes_in
from fzero.engine.outcome import split_result
from fzero.engine.traversal import Traversal, autocast
from fzero.parallel.types import WHO
from fzero.state.init import leaf_specs
from fzero.state.sliced import cut
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.placements import Notes, notes
from fzero.table.policy import Policy
from fzero.table.slices import Hint, Slices
from fzero.table.spec import Spec

_OF_FUNCTIONS = ("tensor axis", "tensor", "frozen")  # the rules that change what a function is given


class Given(NamedTuple):
    """What a function is given of one leaf.

    Attributes:
        slices: how the leaf is cut over the tensor axis, if it is.
        shape, dtype: of this rank's slice, and that which it is computed with in.
        fixed: nothing is differentiated by it.
    """

    slices: Slices | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    fixed: bool


class Planned:
    """The function of a step on one rank, with params as its plan cuts them.

    Args:
        axis: of a state of the step, where there is one.

    Attributes:
        given: one for each leaf of the params.
        over: the axis that leaves are cut over, if there is one.
    """

    def __init__(self, step: Spec, params: object, axis: Axis | None = None) -> None:
        need_ranks(step)
        self.step = step
        self._specs, leaves, self._structure = leaf_specs(params)
        self._leaves: list[Any] = leaves
        self._axis = axis or step.axis()
        self._rows = step.rows(self._specs, *self._known)  # which refuses what `init` does
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
        plain = dataclasses.replace(self.step, policy=Policy(), rules=rules)
        self._layout = Layout.build(plain.rows(self._specs, *self._known), 1, (rank, ranks))
        self._table = plain.table(self._layout)
        shapes = {slot.leaf: slot.shape for group in self._layout.groups.values() for slot in group.slots}
        self.given = [
            Given(row.slices, shapes[index], row.policy.compute or row.dtype, row.frozen)
            for index, row in enumerate(self._rows)
        ]

    @property
    def over(self) -> Axis | None:
        return self._axis.tensor

    @property
    def cast(self) -> torch.dtype | None:
        """The dtype of torch.autocast; that of some units holds for all."""
        return next((row.autocast for row in self._rows if row.autocast is not None), None)

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
        return self._leaves[index].detach().to(self.given[index].dtype)

    def own(self, index: int) -> torch.Tensor:
        """This rank's slice of a leaf."""
        slices = self.given[index].slices
        return self.whole(index) if slices is None else cut(slices, *self._layout.tensor, self.whole(index))

    def device(self, index: int) -> torch.device:
        """The device that a leaf lies on."""
        leaf = self._leaves[index]
        return leaf.device if isinstance(leaf, torch.Tensor) else torch.get_default_device()

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


def need_ranks(step: Spec) -> None:
    """Refuses a step over ranks where there are none."""
    if not backend.initialized() and (step.sharding is not None or step.tensor_axis is not None):
        raise RuntimeError(
            f"{WHO}: the step goes over ranks, and there is no process group. Make it on a mesh to which nothing is "
            "sent: with fz.testing.fake_mesh({'dp': 2, 'tp': 4}) as mesh: fz.parallel.check(...)."
        )
