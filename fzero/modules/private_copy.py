"""A copy of a module that leads nowhere to the original: what its hooks and functions close over is mapped to the copy.

`copy.deepcopy` takes functions as they are, so that a hook of the copy would go on reading the original's params.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fzero.base import private
from fzero.base.node import edges_to
from fzero.base.texts import COMPRESSED
from fzero.base.thread_state import without_dispatch_modes
from fzero.engine.outlets import overlap
from fzero.modules.contents import BOUND, fill, names_of, referent, slots_of
from fzero.modules.holdings import SEQUENCES, WEAK, Holdings, globals_of, is_atom, rebuilt
from fzero.table.handle import StandIn, storage_of


def private_copy(
    module: nn.Module, shared: Mapping[int, torch.Tensor]
) -> tuple[nn.Module, Holdings, dict[int, torch.Tensor]]:
    """A copy of a module, everything that is reached from it, and id of its tensors -> what they were copied from.

    Functions, hooks, bound methods and the like that lead to the module, a submodule, a param or a buffer are made anew
    for the copy. What they hold besides stays what it is: a list that a hook appends to is the user's.

    Args:
        shared: id of a tensor -> what stands for it in the copy.

    Raises:
        ValueError: the copy would still lead to the original, and on which way.
    """
    with private.below_transforms(), private.outside_inference(), torch.no_grad():
        holdings = Holdings(module)
        copier = _Copier(holdings, module, shared)
        new = copier(module)
        found = Holdings(new)
    kept = set(shared) & {id(tensor) for tensor in shared.values()}
    held = ("param", module.named_parameters()), ("buffer", module.named_buffers())
    for what, named in (("submodule", module.named_modules()), *held):
        for name, original in named:
            if id(original) in found.objects and id(original) not in kept and not isinstance(original, Stale):
                whose = f"its {what} {name!r}" if name else "the module itself"
                raise ValueError(
                    f"fz.functional: {found.way(id(original))} leads to {whose}, and cannot be made anew for the copy "
                    "that apply works on, so that its gradient would be lost. Use self, or the module that a hook is "
                    "given, in its place; hold it in a closure, a default argument or a partial of a function that is "
                    "a hook or an attribute of the module; or, where it is not read, take it out there."
                )
    tensors = {i: x for i, x in holdings.objects.items() if isinstance(x, torch.Tensor) and i not in shared}
    return new, found, {id(copier.memo[i]): x for i, x in tensors.items() if i in copier.memo}


_NO_EVAL = (
    "apply.eval: the module's eval() raised {}, expected that it reads and changes no param: they are arguments of "
    "apply, and have no values before a call. Let forward compute what it needs of them where self.training is False. "
    "It said: {}"
)


def evaluating(pristine: nn.Module) -> nn.Module:
    """A copy of such a copy in evaluation mode, with the same stand-ins for its params.

    Raises:
        ValueError: the module's own `train` or `eval` needs values of its params.
    """
    with without_dispatch_modes():  # others run on it later
        module, _, _ = private_copy(pristine, {id(param): param for param in pristine.parameters()})
        try:
            module.eval()
        except Exception as error:
            raise ValueError(_NO_EVAL.format(type(error).__name__, error)) from error
    return module


_REFUSED = (
    (
        torch.jit.ScriptModule,
        "is a ScriptModule ({kind}), whose compiled code reads its own params. Pass the module that it was made from; "
        "fz.compile(step) compiles its units.",
    ),
    (
        (nn.parallel.DistributedDataParallel, nn.DataParallel),
        "is a {kind}, which copies and reduces by itself. Pass its .module; a step over it takes the mean over ranks.",
    ),
    (
        "OptimizedModule",
        "was compiled by torch.compile, and its code reads its own params. Pass its ._orig_mod, and compile the units "
        "by fz.compile(step).",
    ),
)


def refuse_kinds(module: nn.Module) -> None:
    """Refuses modules that work on no tensors but their own, and params that are more than their values."""
    for path, child in module.named_modules():
        where, kind = f"fz.functional: {f'submodule {path!r}' if path else 'the module'}", type(child).__name__
        for kinds, why in _REFUSED:
            if kind == kinds if isinstance(kinds, str) else isinstance(child, kinds):
                raise ValueError(f"{where} {why.format(kind=kind)}")
        for name, tensor in (*child._parameters.items(), *child._buffers.items()):
            if tensor is not None and nn.parameter.is_lazy(tensor):
                raise ValueError(
                    f"{where} ({kind}) has a lazy {name!r} without a shape yet. Call the module once "
                    "on an input, which initialises it, before fz.functional."
                )
    seen: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, param in module.named_parameters():
        if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"fz.functional: param {name!r} has a hook on its gradient (register_hook), which a param that is an "
                "argument does not have. Compute in forward with what the hook makes of it (w * mask + "
                "(w * (1 - mask)).detach()), or change gradients between a pullback and step.update."
            )
        memory = storage_of(param)  # 0 for one that has none
        for other, one in seen.setdefault(memory, []):
            if memory and (one.requires_grad or param.requires_grad) and overlap((one, param)):
                raise ValueError(
                    f"fz.functional: the params {other!r} and {name!r} are two that share memory, and would be updated "
                    "apart. Make them one param: other.weight = one.weight."
                )
        seen[memory].append((name, param))


_CONTAINERS = (list, set, dict, collections.OrderedDict, collections.deque)
_NOTHING = torch.empty(0, device="cpu")


class Stale(StandIn):
    """Stands in the copy for a tensor that was computed from the original's params before: reading it is an error."""

    readable = StandIn.readable | {
        *(getattr(torch.Tensor, name).__get__ for name in ("_version", "grad_fn", "is_leaf")),
        torch.Tensor.is_inference,
    }
    where: str

    def refusal(self, func: object) -> ValueError:
        return ValueError(
            f"apply: {self.where}, so that its gradient and its changes would be lost. Compute it in forward, of the "
            "param itself, before it is read."
        )


class Globals(dict[str, object]):
    """The global names of a function of the copy: the function's own, with the copy in the original's place.

    CPython looks global names up by `__getitem__` where they are not in a plain dict.
    """

    def __init__(self, real: dict[str, object]) -> None:
        super().__init__(real)  # for whoever looks past __getitem__
        self.real, self.mapped = real, dict[str, object]()

    def __getitem__(self, name: str) -> object:
        return self.mapped[name] if name in self.mapped else self.real[name]


class _Copier:
    """Copies what it is called with; every object once."""

    def __init__(self, holdings: Holdings, module: nn.Module, shared: Mapping[int, torch.Tensor]) -> None:
        self.holdings, self.params = holdings, {id(param) for param in module.parameters()}
        self.trained = [(name, x, storage_of(x)) for name, x in module.named_parameters() if x.requires_grad]
        self.leading = holdings.reaching({*map(id, module.modules()), *self.params, *map(id, module.buffers())})
        data = {i for i in holdings.owned if not isinstance(holdings.objects[i], (tuple, frozenset))}
        self.concerned = data | holdings.reaching(data)
        self.memo: dict[int, Any] = {**shared}
        self._globals: dict[int, Globals] = {}
        self._empty: dict[int, object] = {}  # shells that wait to be filled
        self._fill()

    def __call__(self, x: object) -> Any:
        if is_atom(x) or id(x) not in self.concerned:
            return x
        if id(x) not in self.memo:
            self.memo[id(x)] = self._made(x)
        return self.memo[id(x)]

    def _fill(self) -> None:
        """Makes all shells first: what they hold may lead back to them, on ways of any length."""
        objects = [x for i, x in self.holdings.objects.items() if i in self.concerned and i not in self.memo]
        self._empty = {id(x): x for x in objects if self._begun(x)}
        functions = [x for x in objects if isinstance(x, types.FunctionType)]
        for x in functions:
            cells = tuple(self(cell) for cell in x.__closure__ or ())
            self.memo[id(x)] = types.FunctionType(x.__code__, self._globals_of(x), x.__name__, None, cells)
        for x in list(self._empty.values()):
            self._fill_shell(x)
        for x in functions:
            new = self.memo[id(x)]
            new.__defaults__ = tuple(map(self, x.__defaults__)) if x.__defaults__ else None
            new.__kwdefaults__ = {k: self(v) for k, v in x.__kwdefaults__.items()} if x.__kwdefaults__ else None
            new.__dict__.update({name: self(value) for name, value in vars(x).items()})
            for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
                setattr(new, name, getattr(x, name))
            if isinstance(new.__globals__, Globals):
                mapped = {name: self(value) for name, value in globals_of(x).items() if id(value) in self.concerned}
                new.__globals__.mapped.update(mapped)
                dict.update(new.__globals__, mapped)

    def _begun(self, x: object) -> bool:
        shell = self._shell(x)
        if shell is not None:
            self.memo[id(x)] = shell
        return shell is not None

    def _shell(self, x: object) -> object:
        if isinstance(x, nn.Module) and type(x) is x.__class__:
            return object.__new__(type(x))  # a __new__ of its own may want arguments
        if isinstance(x, types.CellType):
            return types.CellType()
        if type(x) is collections.deque:
            return collections.deque(maxlen=x.maxlen)
        return type(x)() if type(x) in _CONTAINERS else None

    def _filled(self, x: object) -> object:
        """Its copy, for code that reads what is in it."""
        if type(x) in _CONTAINERS:
            self._fill_shell(x, self._filled)
        return self(x)

    def _fill_shell(self, x: object, inner: Callable[[object], object] | None = None) -> None:
        if self._empty.pop(id(x), None) is None:
            return
        inner, new = inner or self, self.memo[id(x)]
        if isinstance(x, nn.Module):
            vars(new).update({name: self(value) for name, value in vars(x).items()})
            for name in filter(functools.partial(hasattr, x), slots_of(type(x))):
                object.__setattr__(new, name, self(getattr(x, name)))
            if "_compiled_call_impl" in vars(x):  # of module.compile(): its code reads the original's params
                vars(new)["_compiled_call_impl"] = None
        else:
            fill(new, x, inner)

    def _globals_of(self, x: types.FunctionType) -> dict[str, object]:
        names = [name for name, value in globals_of(x).items() if id(value) in self.concerned]
        if not names or names_of(x.__code__).assigns:  # what it assigns would be lost
            return x.__globals__
        real = x.__globals__.real if isinstance(x.__globals__, Globals) else x.__globals__
        return self._globals.setdefault(id(real), Globals(real))

    def _made(self, x: object) -> object:
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, torch.Generator):
            return x.clone_state()
        if type(x) in weakref.ProxyTypes:
            return weakref.proxy(self(referent(x)))
        if isinstance(x, weakref.ref):
            return (weakref.WeakMethod if isinstance(x, weakref.WeakMethod) else weakref.ref)(self(x()))
        if isinstance(x, BOUND):
            return getattr(self(x.__self__), x.__name__)
        if isinstance(x, (types.MethodType, functools.partial)):
            return rebuilt(x, self)
        if isinstance(x, (tuple, frozenset)) and type(x) in SEQUENCES:
            return type(x)(map(self, x))
        if isinstance(x, WEAK):
            if isinstance(x, weakref.WeakSet):
                return type(x)(map(self, list(x)))
            return type(x)({self(key): self(value) for key, value in list(x.items())})
        with contextlib.suppress(Exception):  # what cannot be built again stays; if it leads to the module, that shows
            return self._instance(x)
        return x

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Stale):
            return x
        way = self.holdings.way(id(x))
        if private.is_wrapped(x) and not (private.is_differentiated(x) or private.is_mapped(x)):
            x = private.unwrapped(x)  # made inside of a transform, which does not go on through it
        memory = storage_of(x)
        if private.is_wrapped(x):
            return Stale.like(_NOTHING, where=f"{way} takes part in a transform of torch.func around fz.functional")
        if any(id(getattr(node, "variable", None)) in self.params for node, _ in edges_to((x,))):
            return Stale.like(_NOTHING, where=f"{way} was computed from the module's params before fz.functional")
        for name, own, of in self.trained:
            if memory and of == memory and overlap((own, x)):
                which = f"shares its memory with param {name!r}, and here is none that follows it"
                return Stale.like(_NOTHING, where=f"{way} {which}")
        if x.layout in COMPRESSED:  # which deepcopy does not know
            return x.detach().clone().requires_grad_(x.requires_grad)
        return copy.deepcopy(x.detach() if x.grad_fn is not None else x, self.memo)

    def _instance(self, x: object) -> object:
        build = self.holdings.builds.get(id(x))
        has_own_copy = hasattr(type(x), "__deepcopy__") and id(x) not in self.leading
        if has_own_copy or type(x).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(x, self.memo)
        if build is None:
            return x
        make, arguments, state, items, pairs = build
        if not (state or items or pairs or isinstance(x, Iterator)) and all(map(is_atom, arguments)):
            return x  # it says nothing but that it is itself
        new = self.memo[id(x)] = make(*map(self._filled, arguments))
        if hasattr(new, "__setstate__"):
            if state is not None:
                new.__setstate__(self._state(state))
        else:
            for part in state if isinstance(state, tuple) else (state,):
                for name, value in (part or {}).items():
                    object.__setattr__(new, name, self(value))
        for item in items:
            new.append(self(item))
        for key, value in pairs:
            new[self(key)] = self(value)
        return new

    def _state(self, state: object) -> object:
        """A state that only its object's class understands; the object is not in the holdings itself."""
        if type(state) is list:  # of a dataclass with slots: it must be full at once
            return [self._filled(value) for value in state]
        if id(state) in self.holdings.objects:
            return self._filled(state)
        if type(state) is dict:
            return {key: self._filled(value) for key, value in state.items()}
        return tuple(map(self._state, state)) if type(state) is tuple else self._filled(state)
