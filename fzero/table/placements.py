"""What is known of tensors that vary between the ranks of a tensor axis, in the first run of a function.

The function is checked before that on shapes alone (`checks`). In the run, what a map of `fz.parallel` or a module that
is cut gives is noted, for the modules that take it. A note goes with a tensor into units and out of them. Later runs
under the same signature (the function, its layout, the structure, shapes and dtypes of its inputs) repeat what the
first one showed that modules need (`FirstRun`).
"""

from __future__ import annotations

import contextvars
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.comm.axis import Axis
from fzero.table.handle import BOTH, Function, Operands, named


class Cut(NamedTuple):
    """How a tensor is cut."""

    dim: int  # from the end
    # of what is fused there (gate and up), one after the other: the size of every rank's slice of it; None where
    # they are not known
    parts: tuple[tuple[int, ...], ...] | None = None
    rank: int = 0  # this one
    outer: int = 1  # how many of the rank's slices follow one another along it: of each example its heads, say

    @property
    def own(self) -> tuple[int, ...] | None:
        """The sizes of this rank's slices of the parts."""
        return None if self.parts is None else tuple([part[self.rank] for part in self.parts])

    def sized(self, before: int, now: int) -> Cut | None:
        """The same, where the slice has another number of elements: larger ones, or more of smaller ones.

        None where that of another rank could not have.
        """
        if self.parts is None or before == now:
            return self
        scaled = [[size * now for size in part] for part in self.parts]
        if not before or any(size % before for part in scaled for size in part):
            return None
        return self._replace(parts=tuple([tuple([size // before for size in part]) for part in scaled]))


class Mark(NamedTuple):
    """How a tensor varies."""

    # the path of the module whose outputs are cut, or of the leaf, that it comes from; "" for each rank's own
    # copy of what is the same on all
    source: str
    cut: Cut | None = None  # along which dim; None where that is not known, of what has no elements or what maps gave


class Action(NamedTuple):
    """What is done for slices where a module calls a function."""

    # the operands that are made each rank's own, by their places among all leaves of the arguments
    places: tuple[int, ...] = ()
    draws: bool = False  # each rank draws random numbers of its own


# function -> (number of its call -> what is done there, how many calls there are)
Actions = Mapping[object, tuple[Mapping[int, Action], int]]
FORMS = 64  # of inputs, of which a function's first runs are kept


@dataclass(eq=False)
class FirstRun:
    """What a function's first run under a signature showed, and what later runs do because of it."""

    # whether later runs are looked at too, as they may do other things: this one read a tensor's value, say
    unsure: bool = False
    checked_again: bool = False  # so are all of the function by `checks`, as what they saw depends on a value
    blind: bool = False  # nothing is known of the function outside of modules
    actions: dict[object, Actions] = field(default_factory=dict)  # (module, form of arguments) -> what is done in it
    acting: set[object] = field(default_factory=set)  # the modules among them

    def note(self, module: object, given: object, actions: Actions) -> None:
        """Notes what one call of a module needed; another one with arguments of the same forms needs the same."""
        key = module, form_of(given)
        self.unsure = self.unsure or self.actions.setdefault(key, actions) != actions or (bool(actions) and not key[1])
        if actions:
            self.acting.add(module)

    def of(self, module: object, given: object) -> Actions:
        return self.actions.get((module, form_of(given)), {}) if module in self.acting else {}


_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def form_of(given: object) -> object:
    """What the operations of a function depend on, of what it is given; None where nobody knows."""
    flat, spec = pytree.flatten(given)
    forms: list[object] = []
    for x in flat:
        if isinstance(x, torch.Tensor):
            forms.append((x.shape, x.dtype))
        elif isinstance(x, _VALUES):
            forms.append((type(x), x))
        else:
            return None
    return spec, tuple(forms)


class Notes:
    """Tensor -> how it varies over an axis, by identity; it keeps no tensor alive.

    Attributes:
        first: what the run shows, for later ones.
        unchecked: what is not known of it.
        of_modules: the leaves that modules were given, by their numbers.
        copies: the name of a map that has made a copy outside of modules.
    """

    unchecked: Unchecked | None = None
    copies = ""

    def __init__(self, axis: Axis, first: FirstRun | None = None) -> None:
        self.of_modules: set[int] = set()
        self.axis, self._level, self.first = axis, private.level(), first or FirstRun()
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], Mark]] = {}

    def note(self, tensor: torch.Tensor, mark: Mark) -> None:
        if not mark.source and not private.is_differentiated(tensor):  # a copy's value is the same on all
            return self.forget(tensor)
        self._known[id(tensor)] = weakref.ref(tensor), mark
        if private.level_of(tensor) > self._level:  # what is left of it when that level ends
            self.note(private.inner(tensor), Mark(mark.source))

    def of(self, x: object) -> Mark | None:
        found = self._known.get(id(x))
        if found is not None and found[0]() is x:
            return found[1]
        if not isinstance(x, torch.Tensor) or not private.is_wrapper(x) or 0 < private.level_of(x) <= self._level:
            return None
        return self.of(private.inner(x))  # of a level that began in the function, or did and has ended

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def __bool__(self) -> bool:
        return bool(self._known)


class Straight(Notes):
    """Those of a later run, of which there are none, as nothing is followed."""


# those of the function that is running, where its leaves are cut
notes: contextvars.ContextVar[Notes | None] = variable("notes", None)


def noting() -> Notes | None:
    """The notes of the function that is running, if it is followed."""
    known = notes.get()
    return None if isinstance(known, Straight) else known


class Unchecked(NamedTuple):
    """What is known of a function that does not run on shapes alone."""

    # index -> path of those that are cut, but for those of modules, whose own runs show what they do
    leaves: dict[int, str]
    why: str  # in words


# check(step, params, inputs) of what runs for the first time tells whether it reads a tensor's value
checks: list[Callable[..., bool | Unchecked]] = []


def noted(
    axis: Axis | None, before: MutableMapping[object, FirstRun], given: object, checked: Sequence[object] | None
) -> Notes | None:
    """The notes of a function that is about to run; None where no leaf is cut.

    Args:
        axis: that leaves are cut over.
        before: the function's first runs, by the forms of what it is given.
        given: its inputs, and what else it depends on.
        checked: what `checks` take, before it runs for the first time; None of what is not differentiated.
    """
    if axis is None or axis.size == 1:
        return None
    form = form_of(given)
    first = before.get(form)
    if first is not None and not first.unsure:
        return Straight(axis, first)
    known = Notes(axis, first)
    if checked is not None and (first is None or first.checked_again or form is None):
        for check in checks:
            found = check(*checked)
            known.unchecked = found if isinstance(found, Unchecked) else None
            known.first.checked_again, known.first.blind = found is True, known.unchecked is not None
        known.first.unsure = known.first.unsure or known.first.checked_again or known.first.blind
    return known


def has_run(known: Notes | None, before: MutableMapping[object, FirstRun], given: object) -> None:
    """Notes that a function has run to its end; refuses one that could not be checked."""
    if known is None or isinstance(known, Straight):
        return
    if known.unchecked is not None and (own := known.unchecked.leaves.keys() - known.of_modules):
        raise TypeError(
            f"step: what the function does with its slice of leaf {known.unchecked.leaves[min(own)]!r} cannot be "
            f"checked, as it does not run on shapes alone: {known.unchecked.why}. Expected a function that neither "
            "reads a tensor's value nor communicates but by the maps of fz.parallel. Let it take an operator that "
            "needs no value (torch.where, a mask in place of an index); or write what reads it as a module for "
            "fz.functional, whose own run is looked at."
        )
    if known.first.blind and known.copies:
        raise ValueError(
            f"parallel.{known.copies}: got a call outside of modules in a function that does not run on shapes alone, "
            "and nobody can check whether what it computes of the copy is put together again. Call it in a module, "
            "compute without a tensor's value (torch.where, a mask in place of an index), or give sizes= to the maps "
            "that join pieces of uneven sizes."
        )
    form = form_of(given)
    known.first.unsure = known.first.unsure or form is None
    for old in list(before)[: 1 - FORMS]:
        del before[old]
    before[form] = known.first


def marks_of(known: Notes | None, tensors: Sequence[object]) -> list[Mark | None]:
    return [known.of(x) for x in tensors] if known else []


def hand_on(known: Notes | None, marks: Sequence[Mark | None], tensors: Sequence[torch.Tensor]) -> None:
    """Notes tensors as those vary that they stand for: `marks_of` these."""
    for mark, tensor in zip(marks, tensors, strict=False):
        if mark is not None and known is not None:
            known.note(tensor, mark)


_READS = frozenset(
    named(
        "item tolist numpy nonzero argwhere unique unique_consecutive masked_select equal allclose is_nonzero "
        "bincount __bool__ __int__ __float__ __index__ __complex__ __array__ __contains__",
        *BOTH,
    )
)


def reads(func: Function, args: Operands) -> bool:
    """Tells whether Python learns something of a tensor's values, on which it may depend what runs next."""
    if func is torch.where:
        return len(args) == 1
    if func == torch.Tensor.__getitem__:
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(x, torch.Tensor) and x.dtype == torch.bool for x in index)
    return func in _READS
