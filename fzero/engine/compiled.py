"""Compiled units: torch.compile of a unit's own function, called where no functorch level is active."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable

import torch
from torch import nn

from fzero.base import private
from fzero.table.placements import noting

_left_out: list[tuple[types.ModuleType, str]] = []
_compiled: weakref.WeakKeyDictionary[object, Callable[..., object]] = weakref.WeakKeyDictionary()


def compiled(fn: Callable[..., object], owner: nn.Module | None = None) -> Callable[..., object]:
    """`fn`, compiled where it runs on plain tensors, and nothing follows them; under a functorch level it is no graph.

    The compiler is not even imported before the first call.

    Args:
        owner: the module that it is of. What was compiled for one module serves all others of its class, and whether
            they have other hooks is not looked at (torch._dynamo.config.skip_nnmodule_hook_guards): one with hooks has
            code of its own.
    """
    if owner is not None and any(m._forward_hooks or m._forward_pre_hooks for m in owner.modules()):
        fn = _with_own_code(fn)

    def call(*args: object, **kwargs: object) -> object:
        return (fn if private.level() or noting() is not None else _code_of(fn))(*args, **kwargs)

    return call


def _with_own_code(fn: Callable[..., object]) -> Callable[..., object]:
    """Returns the function over another code object, by which the compiler keeps what it made."""
    function: object = getattr(fn, "__func__", fn)
    if not isinstance(function, types.FunctionType):
        return fn
    code = function.__code__.replace()
    new = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    new.__kwdefaults__ = function.__kwdefaults__
    return new if function is fn else types.MethodType(new, fn.__self__)  # type: ignore[attr-defined]


def leave_out(module: str, name: str) -> None:
    """Has a module's function run as it is where compiled code calls it."""
    _left_out.append((sys.modules[module], name))


def _code_of(fn: Callable[..., object]) -> Callable[..., object]:
    while _left_out:  # only now the compiler is imported
        module, name = _left_out.pop()
        setattr(module, name, torch.compiler.disable(getattr(module, name)))
    function = getattr(fn, "__func__", fn)  # a bound method is another object at every look
    try:
        code = _compiled.get(function)
    except TypeError:  # cannot be referred to weakly
        return torch.compile(fn, backend=private.inductor)
    if code is None:
        code = _compiled[function] = torch.compile(function, backend=private.inductor)
    return code if function is fn else functools.partial(code, fn.__self__)  # type: ignore[attr-defined]
