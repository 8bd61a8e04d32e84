"""The params of one call in full, as the leaves with which graphs of plain autograd begin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from fzero.base import private, texts
from fzero.base.context import in_differentiated
from fzero.comm.axis import Axis
from fzero.engine.function import traversal_of
from fzero.engine.schedule import Record
from fzero.engine.traversal import Traversal
from fzero.engine.use import Use
from fzero.state.train_state import TrainState
from fzero.table.counting import Mask
from fzero.table.handle import is_same_view, storage_of
from fzero.table.layout import Key, Slot
from fzero.table.spec import Spec


class _Leaf(torch.Tensor):
    """A param as the function gets it: a tensor whose writes count, also those to its `data`, or are refused."""

    fzero_path = ""
    fzero_begins = False  # whether a run's graph begins with it

    # none, so that operations on it cost no more
    __torch_function__ = torch.nn.Parameter.__torch_function__  # type: ignore[assignment]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, value: object) -> None:
        if is_same_view(self, value):
            return
        raise ValueError(
            f"step: the function sets .data of leaf {self.fzero_path!r}. Params change in step.update only: compute "
            "with a copy (w = w.clone())."
        )

    def detach(self) -> torch.Tensor:
        out = super().detach().as_subclass(_Leaf)
        out.fzero_path = self.fzero_path
        return out

    def numpy(self, *, force: bool = False) -> np.ndarray:
        out = super().numpy(force=force)
        out.flags.writeable = False  # numpy's writes do not count
        return out

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain().requires_grad_(self.requires_grad))

    def __deepcopy__(self, memo: object) -> torch.Tensor:
        return self._plain().clone().requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: object) -> object:
        return self._plain().requires_grad_(self.requires_grad).__reduce_ex__(protocol)

    def _plain(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).detach()


class Alias(torch.autograd.Function):
    """The identity: an input that the function may write to, as one that a graph begins with may not be."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override] - quicker than setup_context
        return x.detach()

    @staticmethod
    def backward(ctx: object, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent


class Unfit(Exception):
    """It is no run for plain autograd: compiled code takes no tensor subclass, and a graph no inference tensor."""


UNFIT = object()


def says_unfit(error: BaseException) -> bool:
    """Tells whether an error is one of those by which torch says so, and not the user's, whatever he says in it."""
    text = str(error)
    if isinstance(error, TypeError) and text.startswith("Multiple dispatch failed for 'torch"):
        return True
    by_compiler = type(error).__module__.startswith("torch.") and _Leaf.__name__ in text
    return by_compiler or texts.says(error, texts.INFERENCE)


def need_own(variables: Iterable[object], params: Sequence[torch.Tensor]) -> None:
    """Refuses a graph that leads to the params of another run.

    Args:
        variables: with which the graph begins.
        params: of the run that has made it.
    """
    own = {id(x) for x in params}
    for x in variables:
        if isinstance(x, _Leaf) and x.fzero_begins and id(x) not in own:
            raise ValueError(
                f"step: the function goes on from what another run of it (another microbatch, or step) has computed of "
                f"leaf {x.fzero_path!r}, to which no gradient would go back. Keep h.detach() from one run to the next, "
                "or compute both in one."
            )


def need_apart(flat: Sequence[object], wanted: Sequence[int], versions: Sequence[int]) -> None:
    """Refuses a write to an input that shares its memory with another one, whose graph does not show it.

    Args:
        wanted: places of the inputs that are differentiated.
        versions: theirs before the function ran.
    """
    for place, before in zip(wanted, versions, strict=True):
        own = flat[place]
        assert isinstance(own, torch.Tensor)
        if private.version(own) == before:
            continue
        others = [x for i, x in enumerate(flat) if i != place and isinstance(x, torch.Tensor)]
        if any(storage_of(x) == storage_of(own) for x in others if x.layout == own.layout == torch.strided):
            raise ValueError(
                f"step: the function writes in place to an input, of shape {tuple(own.shape)}, that shares its "
                "memory with another input, and both are differentiated. Write to a copy: x = x.clone(), or use "
                "the operation that is not in place."
            )


class _Place(NamedTuple):
    key: Key
    slot: Slot


class Leaves:
    """The params of one call in full, with which the graphs of all its microbatches begin.

    Attributes:
        params: where those lie that are differentiated.
        keys: of their groups.
        fit: whether the function can be run with them, as far as is known.
        products: whether some cotangents are products that are added up in a quicker way than by autograd, once that is
            known.
        used: takes the leaves of which no graph shows that they are used, if somebody asks for them.
    """

    def __init__(self, traversal: Traversal, axis: Axis) -> None:
        self._traversal, self.uses, self.layout = traversal, traversal.uses, traversal.layout
        self._axis, self.fit = axis, True
        self.params: list[_Place] = []
        views: dict[int, tuple[torch.Tensor, bool, str]] = {}
        for key, group in self.layout.groups.items():
            cut, trains = group.cut(self.uses[key].value()), not group.row.frozen
            for slot in group.slots:
                views[slot.leaf] = cut[slot.leaf], trains, slot.path
                if trains:
                    self.params.append(_Place(key, slot))
        self._views = [views[index] for index in range(len(self.layout.rows))]
        self._storages = {storage_of(view) for view, *_ in self._views}
        self.keys = tuple(dict.fromkeys(param.key for param in self.params))
        self.products: bool | None = None
        self.used: set[int] | None = None
        self._cuts: dict[Key, tuple[torch.Tensor, dict[int, torch.Tensor]]] = {}

    def made(self) -> list[torch.Tensor]:
        """The leaves of the tree for one microbatch, in their order: what is done to one is no other one's."""
        out: list[torch.Tensor] = []
        for view, trains, path in self._views:
            leaf = torch.Tensor._make_subclass(_Leaf, view, trains)
            leaf.fzero_path, leaf.fzero_begins = path, True
            out.append(leaf)
        return out

    @staticmethod
    def of(step: Spec, state: TrainState, unreduced: bool) -> Leaves | None:
        """The leaves, where there is nothing to gather, to reduce or to do for units; None otherwise."""
        table = step.table(state.layout)
        if table.acting or table.compiled or private.transforms() or private.dispatch_modes() or in_differentiated():
            return None  # whoever differentiates around it goes on through the graph
        if state.params.axis.tensor is not None or state.params.axis.further or UNFIT in known(step, state):
            return None
        traversal = traversal_of(step, state, (), unreduced)[0]
        rows = traversal.layout.groups
        if not all(_is_at_hand(use, rows[key].row.frozen) for key, use in traversal.uses.items()):
            return None
        return Leaves(traversal, state.params.axis)

    def cut(self, key: Key, total: torch.Tensor) -> dict[int, torch.Tensor]:
        """The leaves of a group's sum, which serves all microbatches."""
        known = self._cuts.get(key)
        if known is None or known[0] is not total:
            known = self._cuts[key] = total, self.layout.groups[key].cut(total)
        return known[1]

    def traversal(self, seed: tuple[int, ...], leaves: Sequence[torch.Tensor], mask: Mask) -> Traversal:
        """Another run over the same buffers."""
        own = self._traversal
        out = Traversal(own.layout, own.table, own.uses, seed, own.device, self._axis)
        out.means, out.mask, out.run = own.means, mask, own.run
        out.given = leaves
        return out

    def given_out(self, outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs without their graph; what lies in the leaves' own memory is copied, as others may write to it."""
        plain = [x.as_subclass(torch.Tensor).detach() if isinstance(x, _Leaf) else x.detach() for x in outputs]
        return [x.clone() if storage_of(x) in self._storages else x for x in plain]

    def check(self, leaves: Sequence[torch.Tensor]) -> None:
        """Refuses what a function did to the leaves themselves."""
        for leaf, (view, trains, path) in zip(leaves, self._views, strict=True):
            if (leaf.data_ptr(), leaf.requires_grad) != (view.data_ptr(), trains):
                raise ValueError(
                    f"step: the function sets .requires_grad, or the memory, of leaf {path!r}. Params change in "
                    "step.update only: compute with a copy (w = w.clone()), detach() it where no gradient is wanted, "
                    "or freeze it: fz.freeze(step, pattern)."
                )


def known(step: Spec, state: TrainState) -> dict[object, Record]:
    """What is known of runs of the step's function, by their form."""
    with contextlib.suppress(TypeError):  # a callable that cannot be referred to weakly
        return state.params.axis.records.setdefault(step.fn, {})
    return {}


def _is_at_hand(use: Use, frozen: bool) -> bool:
    if use.transient or use.gather8 or (not frozen and use.axis.ranks > 1):
        return False
    # cotangents of leaves are not rounded on their way to their sum
    return frozen or torch.promote_types(use.compute, use.wire) == use.wire == torch.promote_types(use.wire, use.reduce)
