"""nn.Module -> (apply, params): a pure function of the params, whose modules are units where the handles say so."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import sys
import threading
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self, overload

import torch
from torch import nn

from fzero.base import private
from fzero.base.arguments import need_bool, wrong
from fzero.base.context import during, own_copies, variable
from fzero.base.patterns import ROOT
from fzero.base.thread_state import without_dispatch_modes
from fzero.engine.compiled import compiled
from fzero.engine.dispatch import CHECKPOINTED, plain_call
from fzero.engine.traversal import here, leaves_below, origins_of, running, tensor_axis_of
from fzero.modules.buffers import Carried, call_carrying, need_apart, values_of
from fzero.modules.conversion import CutLeaf, fresh
from fzero.modules.converted import Cuts, converted, cut_leaves, need_slices
from fzero.modules.hints import hints_of_module, module_units
from fzero.modules.places import Absent, Places, full, need_names
from fzero.modules.private_copy import forgetting, need_no_way_back, private_copy, refuse_kinds
from fzero.modules.untouched import Originals, Untouched, originals_of
from fzero.parallel import piece, watched
from fzero.parallel.batch_norm import synchronise
from fzero.parallel.piece import Pieces
from fzero.table.handle import Function, Handle, reading
from fzero.table.module_params import ModuleParams, refuse_lost
from fzero.table.rows import Row

Params = Mapping[str, Any]
_Names = Mapping[int, Sequence[str]]  # of a unit's leaves, by their indices, as the modules around that unit read them
COPIES = 4  # of a module on a thread, converted for plans of `fz.shard_tensor`
# module path -> {name below that module: leaf}, for the apply that is running
_units: contextvars.ContextVar[Mapping[str, Mapping[str, object]] | None] = variable("module_units", None)
# those names, and name -> leaf, for the same
_outside: contextvars.ContextVar[tuple[_Names, Params]] = variable("module_leaves", ({}, {}))


@overload
def functional(
    module: nn.Module, buffers: Literal[False] = False, sync_batch_norm: bool = False
) -> tuple[Apply, ModuleParams]: ...


@overload
def functional(
    module: nn.Module, buffers: Literal[True], sync_batch_norm: bool = False
) -> tuple[Apply, ModuleParams, dict[str, torch.Tensor]]: ...


def functional(module: nn.Module, buffers: bool = False, sync_batch_norm: bool = False) -> tuple[object, ...]:
    """Makes a pure function and its params from an `nn.Module`. The module is left as it is.

    - `apply` works on a private copy of the module as it is now. What you change in the module later, such as `eval()`
      or a hook, has no effect on it: call `functional` again.
    - Call `apply(params, x)` in your loss, not `module(x)`: the module's own weights are constants to a step.
    - Attributes that `forward` sets are the copy's, and stay. In a unit they hold no tensor: `fz.collect` lets it out.
    - Params with `requires_grad=False` are frozen in a step, as by `fz.freeze`.
    - A module at the path of a unit runs as a unit. By default these are the elements of each `ModuleList`.

    Args:
        module: any module. A tied weight appears once, under its first name.
        buffers: False: buffers are constants, and a forward that writes to one is refused. True: buffers (running
            statistics, counters) go in and come out of each call. Compressed sparse buffers are always constants.
        sync_batch_norm: True: each `F.batch_norm` and `torch.batch_norm` in training takes mean and variance over all
            ranks of the step, as one process would over the whole batch. `nn.SyncBatchNorm` does so in any case.

    Returns:
        `(apply, params)`, or `(apply, params, buffers)` with `buffers=True`. All can be pickled if the module can.

        - `apply(params, *args, **kwargs)` returns what the module returns. With `buffers=True`, `apply(params, buffers,
          *args, **kwargs)` returns `(outputs, new_buffers)` and changes nothing in place.
        - `params` is `{fully qualified name: tensor}`, and shares the module's memory (`step.init` copies).
        - `buffers` is `{name: tensor}`, copies of the buffers as they are now.

        `apply.eval(params, *args)` is the module in evaluation mode over the same params: no dropout, and batch norm by
        its running statistics. With `buffers=True` it is `apply.eval(params, buffers, *args)`, and returns the outputs
        alone. In a step: `fz.with_fn(step, fn)`, with a function that calls it.

    Raises:
        TypeError: `module` is no `nn.Module`.
        ValueError: the module cannot be copied or called with other params: a ScriptModule, a lazy module, or a hook or
            an attribute that leads to the module itself, such as a closure over it. From `apply`: the forward changes a
            buffer, and `buffers` is False; or its code reads the module's own params, by a global name or a class.
        RuntimeError: from `apply`: it reads a param that is held besides its module, in a list or an object.

    Example:
        >>> apply, params = fz.functional(torch.nn.Linear(2, 1))
        >>> sorted(params), apply(params, torch.zeros(3, 2)).shape
        (['bias', 'weight'], torch.Size([3, 1]))
        >>> apply, params = fz.functional(torch.nn.Dropout(0.9))
        >>> apply.eval(params, torch.ones(2))
        tensor([1., 1.])
        >>> apply, params, buffers = fz.functional(torch.nn.BatchNorm1d(2, momentum=0.5), buffers=True)
        >>> out, new = apply(params, buffers, torch.full((4, 2), 3.0))
        >>> new["running_mean"], buffers["running_mean"]
        (tensor([1.5000, 1.5000]), tensor([0., 0.]))
    """
    if not isinstance(module, nn.Module):
        raise wrong("functional", "module", module, "a torch.nn.Module")
    need_bool(buffers, "functional", "buffers")
    need_bool(sync_batch_norm, "functional", "sync_batch_norm")
    refuse_kinds(module)
    frozen = [name for name, param in module.named_parameters() if not param.requires_grad]
    leaves = ((name, param.detach()) for name, param in module.named_parameters())
    params = ModuleParams(leaves, frozen=frozen, hints=hints_of_module(module))
    carried = values_of(module) if buffers else {}
    named = itertools.chain(module.named_parameters(), carried.items())
    pristine, constants = private_copy(module, {id(x): Absent.like(x, path=name) for name, x in named})
    need_no_way_back(pristine, module)
    if buffers:
        need_apart(module, constants)
    apply = Apply(pristine, tuple(frozen), buffers, sync_batch_norm, False, originals_of(module))
    values = {name: x.detach().clone() for name, x in carried.items()}
    return (apply, params, values) if buffers else (apply, params)


class _Structure(NamedTuple):
    """What apply finds out about its params once: their modules that are units, their leaves of the step, cut ones."""

    units: dict[str, dict[str, str]]
    origins: dict[str, Row | None]
    cut: tuple[CutLeaf, ...]
    names: _Names


class Apply:
    """The function of a module, as an object, so that it is pickled where the module can be.

    Args:
        pristine: the private copy, without values for the params.
        frozen: names of the params that the module does not train.
        carries: whether its buffers are given and returned.
        synchronises: whether all its batch norms take statistics over ranks.
        evaluates: whether it is `eval` of another one, which returns no buffers.
        originals: of the user's module, as long as there is one.
    """

    __name__ = "apply"

    def __init__(
        self,
        pristine: nn.Module,
        frozen: tuple[str, ...],
        carries: bool,
        synchronises: bool,
        evaluates: bool = False,
        originals: Originals = types.MappingProxyType({}),
    ) -> None:
        self._pristine, self._frozen, self._carries, self._synchronises = pristine, frozen, carries, synchronises
        self._evaluates, self._originals = evaluates, originals
        names = {id(param): name for name, param in pristine.named_parameters()}
        # every name, also a tied weight's second one -> the leaf's one name
        self._aliases = {name: names[id(p)] for name, p in pristine.named_parameters(remove_duplicate=False)}
        self._known = dict.fromkeys(names.values())  # in order, so that every rank says the same
        self._structures: dict[object, _Structure] = {}
        self._threads = threading.local()  # swapping a module's params is not safe across threads

    def __reduce__(self) -> tuple[object, ...]:
        return Apply, (self._pristine, self._frozen, self._carries, self._synchronises, self._evaluates)

    def __deepcopy__(self, memo: object) -> Apply:
        return self  # as any function

    @functools.cached_property
    def eval(self) -> Apply:
        """The module in evaluation mode, over the same params. With buffers it returns the outputs alone."""
        with without_dispatch_modes():  # others run on it later
            module, _ = private_copy(self._pristine)
            module.eval()
        return Apply(module, self._frozen, self._carries, False, True, self._originals)

    def __call__(self, params: Params, /, *args: object, **kwargs: object) -> Any:
        need_names(params, self._known)
        params = leaves_below(params) if private.level() else params
        buffers, args = (args[0] if args else None, args[1:]) if self._carries else ({}, args)
        layout, numbers = origins_of(list(params.values()))
        key = (layout, tuple(params), numbers)
        structure = self._structures.get(key)
        if structure is None:
            rows, named = layout.rows if layout else (), list(zip(params, numbers, strict=True))
            origins = {name: rows[abs(number) - 1] if number else None for name, number in named}
            handles = {name: -1 - number for name, number in named if number < 0}
            paths = module_units(origins, set(handles), self._aliases, self._pristine)
            cut = cut_leaves(origins, self._aliases, self._pristine) if layout and layout.tensor[1] > 1 else ()
            by_index: dict[int, list[str]] = {}
            for name, leaf in self._aliases.items():
                if leaf in handles:
                    by_index.setdefault(handles[leaf], []).append(name)
            structure = self._structures[key] = _Structure(paths, origins, cut, by_index)
        paths, origins, cut, names = structure
        if layout is not None and layout.tensor[1] > 1:
            need_slices(params, origins, self._pristine)
            watched.note_leaves(numbers)
        own = self._copy(Cuts.over(cut, *tensor_axis_of(list(params.values()))) if cut else None)
        if self._frozen and (rows := running.get()) is not None:
            refuse_lost(params, origins, self._frozen, rows)
        for path in paths:
            if path not in own.paths and path != ROOT:
                own.patch(path)
        units = {path: {below: params[leaf] for below, leaf in unit.items()} for path, unit in paths.items()}
        with own.untouched.around_call(params), during(_units, units):
            with own.carrying(buffers) as new:
                out = self._run(own, units, names, params, args, kwargs)
        return (out, new) if self._carries and not self._evaluates else out

    def _run(self, own: _Copy, units: Mapping[str, Params], names: _Names, params: Params, *given: object) -> object:
        if ROOT in units:  # the whole module is one unit
            root, given = own.root, (units[ROOT], *given)
            fast = lambda: root.fast if own.untouched.proven else root.call
            return own.whole(call_carrying(root.carried, root.call, given, None, fast, root.places.installed))
        outside = {name: params[leaf] for name, leaf in self._aliases.items()}
        with during(_outside, (names, outside)), during(reading, full):
            return own.whole(own.call(outside, *given))

    def _copy(self, cuts: Cuts | None) -> _Copy:
        """This thread's copy of the module, or that of a trial on it, converted for what is cut."""
        trial = own_copies.get()
        where = self._threads if trial is None else trial.setdefault(self, types.SimpleNamespace())
        copies: dict[Cuts | None, _Copy] = vars(where).setdefault("copies", {})
        own = copies.pop(cuts, None)
        if own is None or own.untouched.changed:
            with without_dispatch_modes():  # others run on it later
                own = _Copy(self, cuts)
        copies[cuts] = own  # as the last one
        for other in list(copies)[:-COPIES]:
            del copies[other]
        return own


class _Unit(NamedTuple):
    """A module of the copy: where its params are, what it reaches, and its call with other params, also compiled."""

    prefix: str  # of its params' names in the whole module
    places: Places
    module: nn.Module
    call: Function
    fast: Function
    carried: Carried | None


class _Copy:
    """One thread's copy of the module, whose submodules run as units where their leaves are handles.

    Attributes:
        paths: of the submodules that are units.
        call: runs the whole module.
        root: the whole module as one unit: none below it is one, also where it runs again.
    """

    def __init__(self, of: Apply, cuts: Cuts | None) -> None:
        pristine, carries, synchronises = of._pristine, of._carries, of._synchronises
        self.module, constants = private_copy(pristine)
        module = self.module
        self._over_ranks = synchronise(module, synchronises)
        self.carried = Carried(module, synchronises) if carries else None
        self.apart = converted(module, cuts) if cuts else {}
        self.watches = cuts.axis if cuts is not None else None
        self._is_of = weakref.ref(pristine)  # other threads' copies run as this one did
        self.synchronises = synchronises
        self.pieces = Pieces(cuts.axis) if cuts is not None and cuts.sequence else None
        self.paths, self._patched = set[str](), set[int]()
        self._forwards: dict[int, Function] = {}  # of those, as they were
        self.untouched = Untouched(module, constants, of._originals)
        root = self._unit("", module, lambda *args, **kwargs: module(*args, **kwargs))
        self.call, self.root = root.call, root._replace(call=_as_one(root.call), fast=_as_one(root.fast))

    def _unit(self, prefix: str, module: nn.Module, run: Function) -> _Unit:
        apart = {name.removeprefix(prefix): place for name, place in self.apart.items() if name.startswith(prefix)}
        places = Places(module, apart)
        call = functools.partial(places.call, self._fresh(run, prefix))
        # compiled code sees neither pieces nor batch norms that no layer calls
        stays = self.synchronises or self.pieces is not None
        fast = call if stays else functools.partial(places.call, self._fresh(run, prefix, compiled(run, module)))
        carried = self.carried and (self.carried.of(module) if prefix else self.carried)
        return _Unit(prefix, places, module, call, fast, carried)

    def _fresh(self, run: Function, path: str = "", code: Function | None = None) -> Function:
        """A module's function as it is called; `code` is what is compiled of it."""
        run = self._over_ranks(run)
        if self.watches is None:
            return code or run
        run = fresh(run if self.pieces is None else self.pieces.inside(run))
        return watched.watching(run, self.watches, piece.as_own, (self._is_of, path), code and fresh(code))

    def carrying(self, buffers: object) -> contextlib.AbstractContextManager[dict[str, torch.Tensor]]:
        """Inside, the module's buffers are copies of these; the result is filled with what they are at the end."""
        return contextlib.nullcontext({}) if self.carried is None else self.carried.carrying_alike(buffers)

    def whole(self, out: object) -> object:
        """What the module returns, without pieces."""
        return out if self.pieces is None else self.pieces.whole(out)

    def patch(self, path: str) -> None:
        own = self.module.get_submodule(path)
        if id(own) in self._patched:  # one module at two paths is one unit, called twice
            self.paths.add(path)
            return
        run_forward = self._forwards.setdefault(id(own), forgetting(own, own.forward))
        unit, run = self._unit(f"{path}.", own, run_forward), self._fresh(run_forward, f"{path}.")

        @functools.wraps(run_forward)
        def forward(*args: object, **kwargs: object) -> object:
            running_units = _units.get()
            if running_units is None:
                raise TypeError(CHECKPOINTED)
            leaves = running_units.get(path)
            caller = sys._getframe(1).f_locals.get("self")
            if caller is not own and isinstance(caller, nn.Module) and vars(caller).get("forward") is forward:
                # a shallow copy: it has this function, and attributes of its own
                return getattr(run_forward, "__func__", run_forward)(caller, *args, **kwargs)
            if leaves is None:
                return run_forward(*args, **kwargs)
            run = call if self.pieces is None else functools.partial(self.pieces.around, call)
            return run(leaves, args, kwargs) if self.watches is None else watched.around(run, leaves, args, kwargs)

        def call(leaves: Params, args: tuple[object, ...], kwargs: Params) -> object:
            leaves = unit.places.now(leaves)
            node = functools.partial(self._node, unit, leaves, args, kwargs)
            if Handle in map(type, leaves.values()):
                return node()
            if unit.carried is None:  # its params are in place already
                return plain_call(run, node, unit.module, args, kwargs, [*leaves.values()])
            # a run that is given up leaves no buffer changed
            own = functools.partial(unit.carried.alone, run)
            return plain_call(own, node, unit.module, args, kwargs, [*leaves.values()], unit.carried.undo)

        own.forward = forward
        self._patched.add(id(own))
        self.paths.add(path)

    def _node(
        self, unit: _Unit, leaves: Params, args: tuple[object, ...], kwargs: Params, seed: int | None = None
    ) -> object:
        call = _Call(unit.call, self, unit)
        # in a compiled step; in a first call, which a mode looks at, what runs in any other
        fast = lambda: _Call(unit.fast, self, unit) if self.untouched.proven else call
        return call_carrying(unit.carried, call, (leaves, args, kwargs), seed, fast, call.around)


class _Call(functools.partial[object]):
    """The call of a unit that is a module: it may run again where no apply runs, and finds what that one had."""

    _own: _Copy
    _unit: _Unit
    _around: tuple[tuple[_Names, Params], Mapping[str, Params] | None]
    module: nn.Module

    def __new__(cls, call: Function, own: _Copy, unit: _Unit) -> Self:
        self = super().__new__(cls, call)
        self._own, self._unit, self.module = own, unit, unit.module
        self._around = _outside.get(), _units.get()
        return self

    def __call__(self, leaves: Params, args: tuple[object, ...], kwargs: Params) -> object:
        if self._own.untouched.depth:
            return super().__call__(leaves, args, kwargs)
        with self._others(leaves):
            return super().__call__(leaves, args, kwargs)

    @contextlib.contextmanager
    def _others(self, leaves: Params) -> Iterator[None]:
        """Installs what an apply does where none runs: leaves by their names outside that the call reads, units."""
        ((names, values), units), prefix = self._around, self._unit.prefix
        every = [name for _, index in here.get() or () for name in names.get(index, ())]
        known = {x: values[x] for x in every if not (x.startswith(prefix) and x.removeprefix(prefix) in leaves)}
        installed = self._own.root.places.installed(known) if known else contextlib.nullcontext()
        with installed, during(reading, full), during(_units, units):
            yield

    @contextlib.contextmanager
    def around(self, leaves: Params) -> Iterator[None]:
        """Around a pullback that may run parts of it again."""
        with self._others(leaves), self._unit.places.installed(leaves):
            yield


def _as_one(call: Function) -> Function:
    def run(*args: object) -> object:
        with during(_units, {}):
            return call(*args)

    return run
