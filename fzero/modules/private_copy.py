"""A copy of a module that does not lead to the original: `copy.deepcopy`, and a refusal of what that leaves behind."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import gc
import logging
import types
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fzero.base import private
from fzero.base.random import is_shared
from fzero.base.texts import COMPRESSED
from fzero.engine.outlets import overlap
from fzero.table.handle import Function, StandIn, storage_of

REGISTRIES = {"_buffers": "buffer", "_parameters": "param", "_modules": "submodule"}
_HOOKS = {name: name[1:-1].replace("_", " ") for name in vars(nn.Module()) if name.endswith("hooks")}
_ATOMS = (
    *(type(None), int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, logging.Logger),
    *(type, enum.Enum, types.ModuleType, types.CodeType, types.FrameType, types.TracebackType, types.GenericAlias),
)


class Constant(NamedTuple):
    """A tensor of a copy that is no argument of its calls, and the one that it was copied from."""

    label: str
    tensor: torch.Tensor
    source: torch.Tensor


def private_copy(
    module: nn.Module, stand_ins: Mapping[int, torch.Tensor] = types.MappingProxyType({})
) -> tuple[nn.Module, list[Constant]]:
    """A copy of a module, and its tensors that have no stand-in.

    As by `copy.deepcopy`: functions, and what they close over, stay what they are. So does what cannot be copied, such
    as a lock or a process group.

    Args:
        stand_ins: id of a tensor -> what stands for it in the copy. Those that stand in the module already stay.
    """
    with private.below_transforms(), private.outside_inference(), torch.no_grad():
        memo: dict[int, Any] = dict(stand_ins)
        constants = list[Constant]()
        names = {id(x): f"its buffer {name!r}" for name, x in module.named_buffers()}
        trained = collections.defaultdict[int, list[tuple[str, torch.Tensor]]](list)  # by their memory
        params = {id(x): name for name, x in module.named_parameters()}
        for name, x in module.named_parameters():
            trained[storage_of(x) if x.requires_grad else 0].append((name, x))
        for way, x in _reached(module, through_functions=False):
            if isinstance(x, StandIn) or is_shared(x) or type(x) is object:  # which says that it is itself
                memo[id(x)] = x
            elif isinstance(x, torch.Tensor) and id(x) not in memo:
                if why := _stale(x, trained):
                    memo[id(x)] = Stale.like(_NOTHING, where=f"{way} {why}")
                    continue
                memo[id(x)] = _copied(x)
                constants.append(Constant(names.get(id(x), f"the tensor of {way}"), memo[id(x)], x))
            elif isinstance(x, (dict, set, frozenset)) and (keys := [k for k in map(id, x) if k in params]):
                raise ValueError(
                    f"fz.functional: {way} finds something by param {params[keys[0]]!r} itself, in a dict or a set. "
                    "A param is another tensor in each call, and would not be found. Use its name as the key."
                )
        return _by_attributes(module, memo), constants


def _by_attributes(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """The copy: first its modules without attributes, as these lead back to them."""
    made = [(own, object.__new__(type(own))) for own in module.modules()]  # a __new__ of its own may want arguments
    memo.update({id(own): new for own, new in made})
    tried = list[object]()  # which keeps their ids valid

    def copied(x: object) -> object:
        trial = collections.ChainMap[int, Any]({}, memo)
        tried.append(trial)
        try:
            out = copy.deepcopy(x, trial)  # type: ignore[arg-type]
        except Exception:  # it stays; if it leads to the module, `need_no_way_back` says so
            return x
        memo.update(trial.maps[0])
        return out

    for own, new in made:
        for name, x in vars(own).items():
            each = name in _HOOKS or name in REGISTRIES
            vars(new)[name] = type(x)((key, copied(item)) for key, item in x.items()) if each else copied(x)
        if "_compiled_call_impl" in vars(new):  # of module.compile(): its code reads the original's params
            vars(new)["_compiled_call_impl"] = None
        if isinstance(new, nn.RNNBase):  # by which it would find that its params are others now, and lay them out anew
            new._flat_weight_refs = [None] * len(new._flat_weights)
    return made[0][1]


def need_no_way_back(new: nn.Module, module: nn.Module) -> None:
    """Refuses a copy that leads to the original, and says by which attribute."""
    held = {"submodule": module.named_modules(), "param": module.named_parameters(), "buffer": module.named_buffers()}
    originals = {id(x): (what, name) for what, named in held.items() for name, x in named}
    for way, x in _reached(new, through_functions=True):
        if id(x) in originals:
            what, name = originals[id(x)]
            raise ValueError(
                f"fz.functional: {way} leads to {f'its {what} {name!r}' if name else 'the module itself'}, also in the "
                "copy that apply works on, so that its gradient would be lost. A closure over the module, or a weak "
                "reference to it, may be no hook and no attribute. Use self, or the module that a hook is given, in "
                "its place; methods of the module and functools.partial are copied with it."
            )


def _reached(root: nn.Module, through_functions: bool) -> Iterator[tuple[str, object]]:
    """What a module's attributes lead to, and which it is; by global names and classes they lead nowhere."""
    modules = dict(root.named_modules())
    seen = set(map(id, modules.values()))
    for path, own in modules.items():
        for name, value in vars(own).items():
            kind = _HOOKS.get(name) or REGISTRIES.get(name)
            for key, item in [(name, value)] if kind is None else value.items():
                label = getattr(item, "__qualname__", type(item).__name__) if name in _HOOKS else repr(key)
                way = f"{f'submodule {path!r}' if path else 'the module'}, {kind or 'attribute'} {label}"
                waiting = [item]
                while waiting:
                    x = waiting.pop()
                    if id(x) not in seen and not isinstance(x, _ATOMS):
                        seen.add(id(x))
                        yield way, x
                        waiting += _parts(x, through_functions)


def _parts(x: object, through_functions: bool) -> Sequence[object]:
    """What an object holds itself."""
    if isinstance(x, types.FunctionType):
        own = *(x.__closure__ or ()), *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values(), vars(x)
        return own if through_functions else ()
    if isinstance(x, weakref.ref):
        return (x(),) if through_functions else ()
    return () if isinstance(x, (torch.Tensor, torch.Generator)) else gc.get_referents(x)


def _stale(x: torch.Tensor, trained: Mapping[int, Sequence[tuple[str, torch.Tensor]]]) -> str:
    """Why a copy of a tensor would not be what the tensor is to the module."""
    if private.is_wrapped(_inner(x)):
        return "takes part in a transform of torch.func around fz.functional"
    if _inner(x).grad_fn is not None:
        return "was computed from params before fz.functional"
    memory = storage_of(x)
    for name, param in trained.get(memory, ()) if memory else ():
        if overlap((param, x)):
            return f"shares its memory with param {name!r}, and here is none that follows it"
    return ""


def _copied(x: torch.Tensor) -> torch.Tensor:
    x = _inner(x)
    if x.layout in COMPRESSED:  # which deepcopy does not know
        return x.detach().clone().requires_grad_(x.requires_grad)
    return copy.deepcopy(x)


def _inner(x: torch.Tensor) -> torch.Tensor:
    """A tensor that was made inside of a transform, which does not go on through it, without its wrapper."""
    differs = private.is_differentiated(x) or private.is_mapped(x)
    return private.unwrapped(x) if private.is_wrapped(x) and not differs else x


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


# ---- what a forward sets for itself alone

_STATES = {"RecurrentGemmaRglru": ("recurrent_states",), "RecurrentGemmaRecurrentBlock": ("conv1d_state",)}
_MISSING = object()


def _name_of(hook: object) -> str | None:
    """The name of the weight that one of torch's older hooks computes."""
    kind = type(hook)
    if any(base.__name__ == "BasePruningMethod" for base in kind.__mro__):
        return getattr(hook, "_tensor_name", None)
    known = kind.__module__.startswith("torch.nn.utils") and kind.__name__ in ("WeightNorm", "SpectralNorm")
    return getattr(hook, "name", None) if known else None


def _kept(module: nn.Module) -> list[tuple[nn.Module, str]]:
    found = [(own, name) for own in module.modules() for name in _STATES.get(type(own).__name__, ())]
    hooks = [(own, hook) for own in module.modules() for hook in own._forward_pre_hooks.values()]
    return found + [(own, name) for own, hook in hooks if (name := _name_of(hook)) is not None]


def forgetting(module: nn.Module, forward: Function) -> Function:
    """A module's forward, which puts back the tensors that known modules set as attributes for that forward alone.

    A unit keeps nothing that it computes, and these do: torch's older hooks, which compute a weight before a forward,
    and are moved into it; and modules of `transformers` with a state that only generation reads.
    """
    kept = _kept(module)
    if not kept:
        return forward
    own = {number: hook for number, hook in module._forward_pre_hooks.items() if _name_of(hook) is not None}
    for number in own:
        del module._forward_pre_hooks[number]

    @functools.wraps(forward)
    def run(*args: object, **kwargs: object) -> object:
        before = [vars(each).get(name, _MISSING) for each, name in kept]
        try:
            for hook in own.values():
                hook(module, args)
            return forward(*args, **kwargs)
        finally:
            for (each, name), value in zip(kept, before, strict=True):
                vars(each).pop(name, None) if value is _MISSING else vars(each).update({name: value})

    return run
