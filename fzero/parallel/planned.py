"""A step's function in a dry run: what it is given of params that a plan cuts, without a state."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree
from fzero.comm import backend
from fzero.comm.axis import Axis, axes_in
from fzero.engine.run import split_result
from fzero.engine.traversal import Traversal, autocast
from fzero.parallel.types import WHO
from fzero.state.init import leaf_specs
from fzero.state.whole import slice_of
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.policy import Policy
from fzero.table.slices import Slices
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

    Attributes:
        given: one for each leaf of the params.
        over: the axis that leaves are cut over, if there is one.
    """

    def __init__(self, step: Spec, params: object) -> None:
        need_ranks(step)
        self.step = step
        specs, self._leaves, self.structure = leaf_specs(params)
        known = frozen_leaves(self.structure), hints_of(self.structure)
        rows = step.rows(specs, *known)  # which refuses what `init` does
        plain = dataclasses.replace(
            step, policy=Policy(), rules=tuple([rule for rule in step.rules if rule.column in _OF_FUNCTIONS])
        )
        self.axis = step.axis()
        self.layout = Layout.build(plain.rows(specs, *known), 1, self.axis.place_on_tensor)
        self._table = plain.table(self.layout)
        shapes = {slot.leaf: slot.shape for group in self.layout.groups.values() for slot in group.slots}
        self.given = [
            Given(row.slices, shapes[index], row.policy.compute or row.dtype, row.frozen)
            for index, row in enumerate(rows)
        ]
        self._autocast = next((row.autocast for row in rows if row.autocast is not None), None)

    @property
    def over(self) -> Axis | None:
        return self.axis.tensor

    @property
    def unchecked(self) -> tuple[str, ...]:
        """The axes that the step takes means over, and one of a single rank."""
        sharding = self.step.sharding
        data = () if sharding is None else (*axes_in(sharding.axes), *axes_in(sharding.replicate))
        return (*data, self.over.name) if self.over is not None and self.over.size == 1 else data

    def inputs(self, batch: Sequence[object]) -> tuple[object, ...]:
        """The function's inputs of one microbatch."""
        return self.step.microbatches.split(batch)[0]

    def own(self, index: int) -> torch.Tensor:
        """The values of this rank's slice of a leaf."""
        leaf, row = self._leaves[index], self.layout.rows[index]
        full = leaf if isinstance(leaf, torch.Tensor) else leaf()  # type: ignore[operator]
        assert isinstance(full, torch.Tensor)
        return slice_of(row, self.axis, full.detach()).to(self.given[index].dtype)

    def device(self, index: int) -> torch.device:
        """The device that a leaf lies on."""
        leaf = self._leaves[index]
        return leaf.device if isinstance(leaf, torch.Tensor) else torch.get_default_device()

    @contextlib.contextmanager
    def running(self, params: object) -> Iterator[None]:
        """Inside, the step's function runs on these params, which modules know as the leaves of the step."""
        leaves = pytree.flatten(params)[0]
        device = leaves[0].device.type
        traversal = Traversal(self.layout, self._table, {}, (0,), device, self.axis)
        traversal.origins = {id(leaf): index for index, leaf in enumerate(leaves)}
        with autocast(device, self._autocast), traversal.running():
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
