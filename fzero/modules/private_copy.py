"""A copy of a module that leads nowhere to the original: what its hooks and functions close over is mapped to the copy.

`copy.deepcopy` takes functions as they are, so that a hook of the copy would go on reading the original's params.
"""

from __future__ import annotations

import contextlib
import copy
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fzero.base import private
from fzero.base.node import edges_to
from fzero.base.texts import COMPRESSED
from fzero.base.thread_state import without_dispatch_modes
from fzero.engine.outlets import overlap
from fzero.modules.reach import BOUND, Reach, is_atom
from fzero.table.handle import StandIn, storage_of


def private_copy(
    module: nn.Module, shared: Mapping[int, torch.Tensor]
) -> tuple[nn.Module, Reach, dict[int, torch.Tensor]]:
    """A copy of a module, everything that is reached from it, and id of its tensors -> what they were copied from.

    Functions, hooks, bound methods and the like that lead to the module, a submodule, a param or a buffer are made anew
    for the copy. What they hold besides stays what it is: a list that a hook appends to is the user's.

    Args:
        shared: id of a tensor -> what stands for it in the copy.

    Raises:
        ValueError: the copy would still lead to the original, and on which way.
    """
    with private.below_transforms(), private.outside_inference(), torch.no_grad():
        reach = Reach(module)
        copier = _Copier(reach, module, shared)
        new = copier(module)
        found = Reach(new)
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
    tensors = {i: x for i, x in reach.objects.items() if isinstance(x, torch.Tensor) and i not in shared}
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


class _Copier:
    """Copies what it is called with, every object once, as `copy.deepcopy` does, and functions too.

    Attributes:
        memo: id of an object -> its copy, or the object itself where it stays.
    """

    def __init__(self, reach: Reach, module: nn.Module, shared: Mapping[int, torch.Tensor]) -> None:
        self.reach, self.params = reach, {id(param) for param in module.parameters()}
        self.trained = [(name, x, storage_of(x)) for name, x in module.named_parameters() if x.requires_grad]
        owned = {i for i in reach.owned if not isinstance(reach.objects[i], (tuple, frozenset))}
        concerned = owned | reach.reaching(owned)
        self.memo: dict[int, Any] = {i: x for i, x in reach.objects.items() if i not in concerned} | dict(shared)
        self._built: list[object] = []  # which keeps their ids valid
        own = [x for i, x in reach.objects.items() if i not in self.memo]
        for x in own:  # shells first: what they hold leads back to them, on ways of any length
            if isinstance(x, nn.Module):
                self.memo[id(x)] = object.__new__(type(x))  # a __new__ of its own may want arguments
            elif isinstance(x, types.CellType):
                self.memo[id(x)] = types.CellType()
        functions = [x for x in own if isinstance(x, types.FunctionType)]
        for x in functions:
            cells = tuple(map(self, x.__closure__ or ()))
            self.memo[id(x)] = types.FunctionType(x.__code__, x.__globals__, x.__name__, None, cells)
        for x in own:
            if isinstance(x, nn.Module):
                self._fill_module(x)
            elif isinstance(x, types.CellType):
                with contextlib.suppress(ValueError):  # an empty one
                    self.memo[id(x)].cell_contents = self(x.cell_contents)
        for x in functions:
            new = self.memo[id(x)]
            new.__defaults__, new.__kwdefaults__ = self(x.__defaults__), self(x.__kwdefaults__)
            new.__dict__.update(self(vars(x)))
            for name in ("__qualname__", "__module__", "__doc__", "__annotations__"):
                setattr(new, name, getattr(x, name))

    def __call__(self, x: object) -> Any:
        if is_atom(x):
            return x
        if id(x) not in self.memo:
            made = self._made(x)
            self.memo.setdefault(id(x), made)
            self._built.append(x)
        return self.memo[id(x)]

    def _fill_module(self, x: nn.Module) -> None:
        new, state = self.memo[id(x)], object.__getstate__(x)  # type: ignore[attr-defined]
        own, slots = state if isinstance(state, tuple) else (vars(x), {})
        vars(new).update({name: self(value) for name, value in own.items()})
        for name, value in slots.items():
            object.__setattr__(new, name, self(value))
        if "_compiled_call_impl" in vars(x):  # of module.compile(): its code reads the original's params
            vars(new)["_compiled_call_impl"] = None

    def _made(self, x: object) -> object:
        if isinstance(x, torch.Tensor):
            return self._tensor(x)
        if isinstance(x, torch.Generator):
            return x.clone_state()
        if isinstance(x, weakref.ref):
            return x if x() is None else type(x)(self(x()))
        if isinstance(x, BOUND):
            return getattr(self(x.__self__), x.__name__)
        if isinstance(x, types.MethodType):
            return types.MethodType(self(x.__func__), self(x.__self__))
        if type(x) is tuple:
            return tuple(map(self, x))
        with contextlib.suppress(Exception):  # what cannot be built again stays; if it leads to the module, that shows
            return self._instance(x)
        self.memo[id(x)] = x
        return x

    def _tensor(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(x, Stale):
            return x
        why = self._stale(x)
        if why:
            return Stale.like(_NOTHING, where=f"{self.reach.way(id(x))} {why}")
        x = _inner(x).detach() if x.grad_fn is not None else _inner(x)
        if x.layout in COMPRESSED:  # which deepcopy does not know
            return x.detach().clone().requires_grad_(x.requires_grad)
        return copy.deepcopy(x, self.memo)

    def _stale(self, x: torch.Tensor) -> str:
        if private.is_wrapped(_inner(x)):
            return "takes part in a transform of torch.func around fz.functional"
        if any(id(getattr(node, "variable", None)) in self.params for node, _ in edges_to((_inner(x),))):
            return "was computed from the module's params before fz.functional"
        memory = storage_of(x)
        for name, own, of in self.trained:
            if memory and of == memory and overlap((own, x)):
                return f"shares its memory with param {name!r}, and here is none that follows it"
        return ""

    def _instance(self, x: Any) -> object:
        if hasattr(type(x), "__deepcopy__") or type(x).__module__.partition(".")[0] == "numpy":
            return copy.deepcopy(x, self.memo)
        build: Any = x.__reduce_ex__(4)
        if isinstance(build, str):
            return x
        make, arguments, *others = build
        state, items, pairs = (*others, None, None, None)[:3]
        if not any((state, items, pairs, isinstance(x, Iterator))) and all(map(is_atom, arguments)):
            return x  # it says nothing but that it is itself
        new = self.memo[id(x)] = make(*map(self, arguments))
        if hasattr(new, "__setstate__"):
            if state is not None:
                new.__setstate__(self(state))
        else:
            for part in state if isinstance(state, tuple) else (state,):
                for name, value in (part or {}).items():
                    object.__setattr__(new, name, self(value))
        for item in items or ():
            new.append(self(item))
        for key, value in pairs or ():
            new[self(key)] = self(value)
        return new


def _inner(x: torch.Tensor) -> torch.Tensor:
    """A tensor that was made inside of a transform, which does not go on through it, without its wrapper."""
    differs = private.is_differentiated(x) or private.is_mapped(x)
    return private.unwrapped(x) if private.is_wrapped(x) and not differs else x
