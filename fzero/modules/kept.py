"""Tensors that known modules set as attributes in each forward, for that forward alone: they are put back after it.

A unit keeps nothing that it computes, and these do: torch's older hooks, which compute a weight before a forward, and
modules of `transformers` that keep a state which only generation reads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

Function = Callable[..., object]
# the attributes by which torch's hooks that compute a weight know its name
_HOOKS = {"WeightNorm": "name", "SpectralNorm": "name"}
_STATES = {"RecurrentGemmaRglru": ("recurrent_states",), "RecurrentGemmaRecurrentBlock": ("conv1d_state",)}
_MISSING = object()


def _name_of(hook: object) -> str | None:
    """The name of the weight that a hook computes."""
    kind = type(hook)
    if any(base.__name__ == "BasePruningMethod" for base in kind.__mro__):
        return getattr(hook, "_tensor_name", None)
    own = kind.__module__.startswith("torch.nn.utils") and kind.__name__ in _HOOKS
    return getattr(hook, _HOOKS[kind.__name__]) if own else None


def _kept(module: nn.Module) -> list[tuple[nn.Module, str]]:
    found = [(own, name) for own in module.modules() for name in _STATES.get(type(own).__name__, ())]
    hooks = [(own, hook) for own in module.modules() for hook in own._forward_pre_hooks.values()]
    return found + [(own, name) for own, hook in hooks if (name := _name_of(hook)) is not None]


def forgetting(module: nn.Module, forward: Function) -> Function:
    """A module's forward, which leaves these attributes as it has found them.

    The module's own hooks that compute a weight are moved into it.
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
