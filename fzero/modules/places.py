"""Where a module's params stand, in its submodules and wherever else it holds one; what is read of them there."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fzero.base import private
from fzero.base.refusals import noted
from fzero.engine.traversal import current, here, read
from fzero.modules.reach import Reach
from fzero.state.sharded import Sharded
from fzero.table.handle import Function, Handle, Valueless, name_of

Leaves = Mapping[str, object]
_FIXED = (tuple, weakref.ref)  # whoever holds one holds another instead


class Places:
    """Where a module's params are, found once: torch's functional_call looks for them at every call.

    Args:
        elsewhere: `places_of` the copy that the module is part of.
        apart: name of a param -> where it is read instead of from its module.
        registry: where modules hold them; "_buffers" for buffers.
    """

    def __init__(
        self,
        module: nn.Module,
        elsewhere: Mapping[int, list[Place]],
        apart: Mapping[str, tuple[dict[str, Any], str]] = MappingProxyType({}),
        registry: str = "_parameters",
    ) -> None:
        self.of: dict[str, tuple[dict[str, Any], str]] = {
            (f"{path}.{name}" if path else name): (getattr(owner, registry), name)
            for path, owner in module.named_modules(remove_duplicate=False)
            for name in getattr(owner, registry)
        }
        self.of.update(apart)
        held = {name: owner[own] for name, (owner, own) in self.of.items()}
        self.elsewhere = {name: (p, elsewhere[id(p)]) for name, p in held.items() if id(p) in elsewhere}

    def now(self, leaves: Leaves) -> Leaves:
        """Returns what stands for the module's params, if others were put there (torch.func.functional_call)."""
        for name, leaf in leaves.items():
            owner, own = self.of[name]
            if owner.get(own) is not leaf:
                places = [(name, *self.of[name]) for name in leaves]
                return {name: owner[own] for name, owner, own in places if owner.get(own) is not None}
        return leaves

    def call(self, run: Function, leaves: Leaves, args: tuple[object, ...], kwargs: Leaves) -> object:
        """Runs with these leaves for the module's params; every name of a tied one is among them."""
        with _Installed(self, leaves):
            return run(*args, **kwargs)

    def installed(self, leaves: Leaves) -> _Installed:
        """Inside, these leaves are the module's params, also where they are held besides their module."""
        return _Installed(self, leaves)


class _Installed:
    """See `Places.installed`."""

    def __init__(self, places: Places, leaves: Leaves) -> None:
        self._places, self._leaves = places, leaves
        self._old: list[tuple[dict[str, Any], str, object]] = []
        self._moved: list[tuple[Place, torch.Tensor, object]] = []

    def __enter__(self) -> None:
        try:
            old, of = self._old, self._places.of
            for name, leaf in self._leaves.items():
                owner, own = of[name]
                old.append((owner, own, owner[own]))
                owner[own] = leaf
            for name, (placeholder, others) in self._places.elsewhere.items():
                if name in self._leaves:
                    for place in others:
                        self._moved.append((place, placeholder, place.put(placeholder, self._leaves[name])))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        for place, placeholder, before in reversed(self._moved):
            place.put(placeholder, before)
        for owner, own, leaf in reversed(self._old):
            owner[own] = leaf


def need_names(params: Leaves, names: Mapping[str, None]) -> None:
    """Refuses params that are not a module's own."""
    if isinstance(params, Sharded):
        raise TypeError(
            "apply: got the params of a state, which are sharded, expected full ones. Write "
            "step.forward(state, ...), or apply(fz.gather(state.params), ...)."
        )
    missing = [name for name in names if name not in params]
    extra = [name for name in params if name not in names]
    if missing or extra:
        raise ValueError(
            f"apply: the params do not have the module's names: missing {missing[:4]}, unknown {extra[:4]}. "
            "Pass the dict that fz.functional returned, or the subtree of the params that stands for this module."
        )


class Place:
    """One that holds params' placeholders besides their modules: an entry of a dict or a list, or a closure."""

    def __init__(self, holder: Any, key: Any) -> None:
        self._holder, self._key = holder, key
        self._holds = holder.cell_contents if isinstance(holder, types.CellType) else holder[key]
        self._now: dict[int, object] = {}

    def put(self, placeholder: torch.Tensor, leaf: object) -> object:
        """Puts a leaf there for the placeholder, or the placeholder itself; returns what stood there for it."""
        before = self._now.get(id(placeholder), placeholder)
        self._now[id(placeholder)] = leaf
        value = _with(self._holds, self._now)
        if isinstance(self._holder, types.CellType):
            self._holder.cell_contents = value
        else:
            self._holder[self._key] = value
        return before


def places_of(module: nn.Module, reach: Reach, registry: str = "_parameters") -> dict[int, list[Place]]:
    """Id of a param's placeholder, or of a buffer -> where it is held besides its module.

    Raises:
        ValueError: something holds one that can hold no other in its place.
    """
    own = {id(getattr(m, registry)) for m in module.modules()}
    what, named = ("buffer", module.named_buffers()) if registry == "_buffers" else ("param", module.named_parameters())
    found: dict[int, list[Place]] = {}
    known: dict[object, Place] = {}  # one that holds several params is filled with all of them
    for name, param in named:
        waiting, seen = [id(param)], set[tuple[int, int]]()
        while waiting:
            value = waiting.pop()
            for user in reach.users.get(value, ()):
                if (value, user) in seen or user in own or user not in reach.objects:
                    continue
                seen.add((value, user))
                holder = reach.objects[user]
                if type(holder) in _FIXED:
                    waiting.append(user)
                    continue
                keys = _keys(holder, reach.objects[value])
                places = [known.setdefault((user, key), Place(holder, key)) for key in keys]
                found.setdefault(id(param), []).extend(places)
                if not places:
                    raise ValueError(
                        f"fz.functional: {reach.way(user)} is a {type(holder).__name__} that holds {what} {name!r} "
                        "where apply cannot put another tensor. Hold it in a list or a dict's value, as an attribute, "
                        "or hold its name."
                    )
    return {number: places for number, places in found.items() if places}


def _keys(holder: object, value: object) -> list[object]:
    """Where a holder has a value that can be exchanged."""
    if isinstance(holder, types.CellType):
        return [None]
    if isinstance(holder, (dict, list, collections.deque)):
        return [key for key, x in (holder.items() if isinstance(holder, dict) else enumerate(holder)) if x is value]
    return []


def _with(x: object, now: Mapping[int, object]) -> object:
    """The same with leaves in the placeholders' places."""
    if id(x) in now:
        return now[id(x)]
    if type(x) is tuple:
        return tuple([_with(item, now) for item in x])
    leaf = now.get(id(x())) if isinstance(x, weakref.ref) else None
    return x if leaf is None else (lambda: leaf) if isinstance(leaf, Handle) else weakref.ref(leaf)


def full(handle: Handle) -> torch.Tensor:
    """A module's leaf of another unit in full, differentiable."""
    leaves = here.get()
    if leaves is not None:
        own = leaves.get((handle.owner, handle.index))
        if own is None:
            raise noted(handle._refuse("read inside another unit, which is not given it"))
        return own
    if current.get() is not handle.owner:
        raise noted(handle._refuse("read where its step's function is not running"))
    if private.below(handle.primal) or (private.in_function() and handle.primal.requires_grad):
        raise noted(handle._refuse("read inside a torch.autograd.Function, as its argument or not; give it w * 1"))
    return read(handle)


class Absent(Valueless):
    """A module's param where its function is not running: its values are not there, and nobody is to go on without."""

    path: str

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        return Absent.of, (self.shape, self.dtype, self.device, vars(self))

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.path!r}, {tuple(self.shape)}, {self.dtype})"

    def refusal(self, func: object) -> RuntimeError:
        return RuntimeError(
            f"Leaf {self.path!r} of a module is read, by {name_of(func)!r}, when the function that fz.functional made "
            "of it is not running, so that its values are not there (torch.utils.checkpoint under plain autograd and "
            "hooks of a backward do so). Leave the checkpoint out (of a model of Hugging Face: "
            "model.gradient_checkpointing_disable()), as fz.remat(step) recomputes units; or pull back by step.vjp in "
            "place of step(...) and fz.tape."
        )
