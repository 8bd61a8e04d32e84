"""What is known of tensors that vary between the ranks of a tensor axis, in the first run of a function.

The function is checked before that on shapes alone (`checks`). In the run, what a map of `fz.parallel` or a module that
is cut gives is noted, for the modules that take it. A note goes with a tensor into units and out of them. Where the
check could not be done, a note also goes on to what is computed of a tensor (`Following`). Later runs under the same
signature (the function, its layout, the structure, shapes and dtypes of its inputs) repeat what the first one showed
that modules need (`FirstRun`).
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fzero.base import private, pytree
from fzero.base.context import variable
from fzero.comm.axis import Axis
from fzero.table.handle import BOTH, READABLE, Function, Handle, Named, Operands, named, writes
from fzero.table.rows import Row


class Cut(NamedTuple):
    """How a tensor is cut.

    Attributes:
        dim: from the end.
        parts: of what is fused there (gate and up), one after the other: the size of every rank's slice of it; None
            where they are not known.
        rank: this one.
        outer: how many of the rank's slices follow one another along it: of each example its heads, say.
    """

    dim: int
    parts: tuple[tuple[int, ...], ...] | None = None
    rank: int = 0
    outer: int = 1

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
    """How a tensor varies.

    Attributes:
        source: the path of the module whose outputs are cut, or of the leaf, that it comes from; "" for each rank's
            own copy of what is the same on all.
        cut: along which dim; None where that is not known, of what has no elements or what maps gave.
    """

    source: str
    cut: Cut | None = None


class Action(NamedTuple):
    """What is done for slices where a module calls a function.

    Attributes:
        places: the operands that are made each rank's own, by their places among all leaves of the arguments.
        draws: each rank draws random numbers of its own.
    """

    places: tuple[int, ...] = ()
    draws: bool = False


# function -> (number of its call -> what is done there, how many calls there are)
Actions = Mapping[object, tuple[Mapping[int, Action], int]]
FORMS = 64  # of inputs, of which a function's first runs are kept


class FirstRun:
    """What a function's first run under a signature showed, and what later runs do because of it.

    Attributes:
        unsure: whether later runs are followed too, as they may do other things: this one read a tensor's value, say.
        actions: (module, form of its arguments) -> what is done in it.
        floats: among the inputs, in runs that showed this. Where modules are cut, a run with others is looked at too.
    """

    def __init__(self) -> None:
        self.unsure = False
        self.actions: dict[object, Actions] = {}
        self.acting: set[object] = set()  # the modules among them
        self.floats: set[object] = set()

    def note(self, module: object, given: object, actions: Actions) -> None:
        """Notes what one call of a module needed; another one with arguments of the same forms needs the same."""
        key = module, form_of(given)
        self.unsure = self.unsure or self.actions.setdefault(key, actions) != actions or (bool(actions) and not key[1])
        if actions:
            self.acting.add(module)

    def shows(self, given: object) -> bool:
        """Tells whether a run of these inputs does the same."""
        return not self.unsure and (not self.actions or _floats_of(given) in self.floats)

    def of(self, module: object, given: object) -> Actions:
        return self.actions.get((module, form_of(given)), {}) if module in self.acting else {}


_VALUES = (bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def form_of(given: object) -> object:
    """What the operations of a function depend on, of what it is given; None where nobody knows."""
    flat, spec = pytree.flatten(given)
    forms: list[object] = []
    for x in flat:
        if isinstance(x, torch.Tensor):
            forms.append((x.shape, x.dtype))
        elif isinstance(x, _VALUES):
            forms.append((type(x), x))
        elif isinstance(x, (float, complex)):
            forms.append(type(x))
        else:
            return None
    return spec, tuple(forms)


def _floats_of(given: object) -> object:
    """The numbers of which a form says the type alone, as they may be others in each run."""
    return tuple([x for x in pytree.leaves(given) if isinstance(x, (float, complex))])


class Notes:
    """Tensor -> how it varies over an axis, by identity; it keeps no tensor alive.

    Attributes:
        first: what the run shows, for later ones.
        follows: whether notes go on to what is computed.
    """

    follows = False

    def __init__(self, axis: Axis, first: FirstRun | None = None) -> None:
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

    def note_cut(self, leaves: Mapping[int, torch.Tensor], rows: Sequence[Row]) -> None:
        """Notes the leaves of a step that are cut, where they are followed: index of a leaf -> its tensor."""
        for index, leaf in leaves.items() if self.follows else ():
            if rows[index].slices is not None and not isinstance(leaf, Handle):
                self.note(leaf, Mark(rows[index].path))

    def among(self, values: Sequence[object]) -> list[Mark]:
        """How those vary that are among some values, or in containers of them."""
        found = []
        for x in values:
            own = [self.of(x)] if isinstance(x, torch.Tensor) else []
            if isinstance(x, (tuple, list, dict)):
                own = map(self.of, pytree.leaves(x))
            found += [mark for mark in own if mark is not None]
        return found

    def forget(self, tensor: torch.Tensor) -> None:
        self._known.pop(id(tensor), None)

    def __bool__(self) -> bool:
        return bool(self._known)


class Straight(Notes):
    """Those of a later run: nothing is noted, as nothing is followed."""

    def note(self, tensor: torch.Tensor, mark: Mark) -> None:
        pass

    def of(self, x: object) -> None:
        return None


# those of the function that is running, where its leaves are cut
notes: contextvars.ContextVar[Notes | None] = variable("notes", None)


def noting() -> Notes | None:
    """The notes of the function that is running, if it is followed."""
    known = notes.get()
    return None if isinstance(known, Straight) else known


# check(step, params, inputs) of what runs for the first time tells whether it reads a tensor's value; None if it cannot
# be checked
checks: list[Callable[..., bool | None]] = []


def followed(
    axis: Axis | None,
    leaves: Sequence[torch.Tensor],
    rows: Sequence[Row],
    before: MutableMapping[object, FirstRun],
    given: object,
    checked: Sequence[object] | None,
) -> tuple[Notes | None, contextlib.AbstractContextManager[object]]:
    """The notes of a function of these leaves, and what follows them in it; None where no leaf is cut.

    Args:
        axis: that leaves are cut over.
        before: the function's first runs, by the forms of what it is given.
        given: its inputs, and what else it depends on.
        checked: what `checks` take, before it runs for the first time; None of what is not differentiated.
    """
    if axis is None or axis.size == 1:
        return None, contextlib.nullcontext()
    first = before.get(form_of(given))
    if first is not None and first.shows(given):
        return Straight(axis, first), contextlib.nullcontext()
    known = Notes(axis, first)
    if first is None and checked is not None:
        reads = [check(*checked) for check in checks]
        if reads and None not in reads:
            known.first.unsure = any(reads)
            return known, contextlib.nullcontext()
    known.follows = True
    known.note_cut(dict(enumerate(leaves)), rows)
    return known, Following(known)


def has_run(known: Notes | None, before: MutableMapping[object, FirstRun], given: object) -> None:
    """Notes that a function has run to its end and was not refused."""
    if known is None or isinstance(known, Straight):
        return
    form = form_of(given)
    known.first.unsure = known.first.unsure or form is None
    for old in list(before)[: 1 - FORMS]:
        del before[old]
    before[form] = known.first
    known.first.floats.add(_floats_of(given))


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


_LIKE = {
    *named("zeros_like ones_like empty_like full_like rand_like randn_like randint_like", torch),
    *named("new_zeros new_ones new_empty new_full new_tensor", torch.Tensor),
}
# whose further operands say a dtype or a shape
_FIRST = set(named("to type_as expand_as view_as reshape_as", torch.Tensor))


class Following(TorchFunctionMode):
    """Inside, what is computed of tensors that vary is known to vary, on whichever dims.

    What torch.func maps (vmap) along another dim than the first is not followed out of the map.
    """

    of_slices = True

    def __init__(self, known: Notes) -> None:
        super().__init__()
        self._known = known

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if func == torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))  # type: ignore[call-overload]
        if reads(func, args):
            self._known.first.unsure = True
        out = func(*args, **(kwargs or {}))
        if not self._known or func in READABLE or func in _LIKE:
            return out
        given = args[:1] if func in _FIRST else (*args, *kwargs.values()) if kwargs else args
        found = self._known.among(given)
        if found:
            self._follow(func, given, kwargs, out, Mark(max(mark.source for mark in found)))
        return out

    def _follow(self, func: Function, given: Operands, kwargs: Named, out: object, mark: Mark) -> None:
        known, into = self._known, _written(func, given, kwargs)
        by_place = _by_place(func, given, kwargs, out)
        if by_place is not None:
            for x, operands in by_place:
                own = known.among(operands)
                if own and isinstance(x, torch.Tensor):
                    known.note(x, Mark(max(each.source for each in own)))
            return
        results = [out] if isinstance(out, torch.Tensor) else pytree.leaves(out)
        for x in results:
            if isinstance(x, torch.Tensor) and (x is into or not any(x is each for each in given)):
                known.note(x, mark)
        if into is not None:
            others = [x for x in given if x is not into]
            if _is_overwritten(func, others) and not known.among(others):
                known.forget(into)
                return
            known.note(into, mark)
            if into._is_view() and into._base is not None:
                known.note(into._base, mark)


def _written(func: Function, given: Operands, kwargs: Named) -> torch.Tensor | None:
    """The tensor that a function writes to."""
    if not writes(func, kwargs):
        return None
    into = (kwargs or {}).get("out")
    into = given[0] if into is None and given else into
    return into if isinstance(into, torch.Tensor) else None


def _is_overwritten(func: Function, others: Sequence[object]) -> bool:
    """Tells whether nothing stays of what was in a tensor."""
    name = getattr(func, "__name__", "")
    if func == torch.Tensor.__setitem__:
        index = others[0] if isinstance(others[0], tuple) else (others[0],)
        return all(each is ... or (isinstance(each, slice) and each == slice(None)) for each in index)
    return name in ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_", "random_")


def _by_place(
    func: Function, given: Operands, kwargs: Named, out: object
) -> list[tuple[object, tuple[object, ...]]] | None:
    """Results of a function of several tensors one by one, each with the operands that it comes of; None of others."""
    name = getattr(func, "__name__", "")
    if not isinstance(out, (tuple, list)):
        return None
    if func is torch.autograd.grad:  # those by what is the same on all ranks are so, too
        inputs = (kwargs or {}).get("inputs", given[1] if len(given) > 1 else ())
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        return [(x, (y,)) for x, y in zip(out, inputs, strict=True)]
    if name.startswith("_foreach_"):
        lists = [x for x in given if isinstance(x, (tuple, list)) and len(x) == len(out)]
        return [(x, tuple(own)) for x, *own in zip(out, *lists, strict=True)]
    if name in ("broadcast_tensors", "meshgrid", "atleast_1d", "atleast_2d", "atleast_3d"):
        tensors = given[0] if isinstance(given[0], (tuple, list)) else [x for x in given if isinstance(x, torch.Tensor)]
        return [(x, (y,)) for x, y in zip(out, tensors, strict=True)]
    return None
