"""What a module leads to, and on which way: its attributes, hooks, closures, bound objects, weak references."""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import gc
import itertools
import logging
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fzero.base.random import is_shared

HOOKS = {name: name[1:-1].replace("_", " ") for name in vars(nn.Module()) if name.endswith("hooks")}
REGISTRIES = {"_buffers": "buffer", "_parameters": "param", "_modules": "submodule"}
_LABELS = HOOKS | REGISTRIES
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)  # functions of Python's own; those of an object know it
# what they hold is their own affair
_CALLABLES = (types.FunctionType, types.MethodType, types.GeneratorType, functools.partial, *BOUND)
_ATOMS = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, slice, range, type(Ellipsis), type(NotImplemented)),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout, *weakref.ProxyTypes),
    }
)
_STAY = (
    *(type, enum.Enum, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, types.GenericAlias),
    *(logging.Logger, torch.UntypedStorage, torch.TypedStorage),
)


def is_atom(x: object) -> bool:
    """Tells whether an object leads nowhere, as far as a copy is concerned."""
    if isinstance(x, types.BuiltinFunctionType):
        return x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type))
    return type(x) in _ATOMS or isinstance(x, _STAY) or is_shared(x)


def contents_of(cell: types.CellType) -> object:
    """The value of a variable that functions share; None of an empty one."""
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return None


def own_dict(x: object) -> dict[str, object] | None:
    own = None if isinstance(x, type) else getattr(x, "__dict__", None)
    return own if type(own) is dict else None


def _parts(x: object) -> Sequence[object]:
    """What an object holds itself."""
    if isinstance(x, (torch.Tensor, torch.Generator)) or type(x).__module__.partition(".")[0] == "numpy":
        return ()
    if isinstance(x, weakref.ref):
        return (x(),)
    if isinstance(x, types.CellType):
        return (contents_of(x),)
    if isinstance(x, types.FunctionType):
        return (*(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), vars(x))
    own = own_dict(x)
    if own is None:
        return gc.get_referents(x)
    values = {id(own), *map(id, list(own.values()))}  # which some versions of Python count as the object's
    return (own, *(part for part in gc.get_referents(x) if id(part) not in values))


class Reach:
    """Everything that a module leads to, breadth first; what only functions and hooks hold is not its own.

    Nothing is followed by global names and classes.
    """

    def __init__(self, root: nn.Module) -> None:
        self.objects: dict[int, object] = {}  # by their ids, which stay valid so
        self.owned: set[int] = set()  # ids of the module's own data: modules, tensors, containers, instances
        self.users: dict[int, list[int]] = collections.defaultdict(list)  # id -> ids of the objects that hold it
        self.paths = {id(module): path for path, module in root.named_modules()}
        hooks = set[int]()  # ids of dicts of hooks
        mine: collections.deque[tuple[object, object]] = collections.deque([(None, root)])
        others: collections.deque[tuple[object, object]] = collections.deque()
        while mine or others:
            own = bool(mine)
            user, x = (mine or others).popleft()
            if own and isinstance(x, _CALLABLES):
                others.append((user, x))
                continue
            self.users[id(x)].append(id(user))
            if id(x) in self.objects:
                continue
            self.objects[id(x)] = x
            if own:
                self.owned.add(id(x))
            if isinstance(x, nn.Module):
                hooks |= {id(vars(x).get(name)) for name in HOOKS}
            found = mine if own and id(x) not in hooks else others
            found.extend((x, part) for part in _parts(x) if not is_atom(part))

    def reaching(self, targets: Iterable[int]) -> set[int]:
        """The ids of all objects that lead to one of these."""
        waiting, found = list(targets), set[int]()
        while waiting:
            for user in self.users.get(waiting.pop(), ()):
                if user not in found and user in self.objects:
                    found.add(user)
                    waiting.append(user)
        return found

    def way(self, target: int) -> str:
        """Says how an object is reached, from the module that is nearest to it on that way."""
        steps = [target]
        while steps[-1] not in self.paths and self.users[steps[-1]][0] in self.objects:
            steps.append(self.users[steps[-1]][0])
        path = self.paths.get(steps[-1])
        labels = [] if path is None else [f"submodule {path!r}" if path else "the module"]
        kind = ""  # of the names in a dict
        for holder, part in itertools.pairwise([self.objects[i] for i in reversed(steps)]):
            kind, label = _label(kind, holder, part)
            labels += [label] if label else []
        return ", ".join(labels)


def _label(kind: str, holder: object, part: object) -> tuple[str, str]:
    """What the names are in a part that is a dict, and what the part is called."""
    if part is own_dict(holder):
        return "attribute", ""
    if isinstance(holder, dict):
        name = next((name for name, value in holder.items() if value is part), None)
        if kind == "attribute" and name in _LABELS:
            return _LABELS[name], ""
        hook = getattr(part, "__qualname__", type(part).__name__) if kind in HOOKS.values() else repr(name)
        return "", f"a key of a {type(holder).__name__}" if name is None else f"{kind or 'entry'} {hook}"
    if isinstance(holder, (list, tuple, collections.deque)):
        return "", f"item {next(i for i, item in enumerate(holder) if item is part)}"
    if isinstance(holder, types.FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=False)
        return "", next((f"closure variable {name!r}" for name, cell in cells if cell is part), "a default argument")
    if isinstance(holder, types.CellType):
        return "", ""
    if isinstance(holder, types.GeneratorType):
        own: Mapping[str, object] = holder.gi_frame.f_locals if holder.gi_frame else {}
        return "", next((f"local {name!r}" for name, value in own.items() if value is part), "inside of a generator")
    if isinstance(holder, weakref.ref):
        return "", "a weak reference"
    if isinstance(holder, (types.MethodType, *BOUND)):
        return "", "the object that it is bound to" if part is holder.__self__ else "its function"
    return "", f"inside of a {type(holder).__name__}"
