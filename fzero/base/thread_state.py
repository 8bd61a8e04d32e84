"""Torch's own state of a thread, noted and put back: levels, modes, autocast; the private parts of torch for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fzero.base import private

# torch.autograd.grad without its look at what it is given; it lets compiled code see this thread's settings
RUN_BACKWARD: Any = torch.autograd.graph._engine_run_backward
_functorch = torch._C._functorch  # type: ignore[attr-defined]
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # what torch.no_grad and torch.enable_grad come down to
FORWARD_ENABLED, SET_FORWARD_ENABLED = torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
function_modes_on: Callable[[], int] = torch._C._len_torch_function_stack  # type: ignore[attr-defined]


def note_state() -> Callable[[], None]:
    """Notes torch's own state of this thread; what it returns puts it back."""
    modes, grad, depth = private.function_modes(), torch.is_grad_enabled(), _functorch.get_dynamic_layer_stack_depth()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    cached, nesting = torch.is_autocast_cache_enabled(), _autocast_nesting()

    def restore() -> None:
        if _functorch.get_dynamic_layer_stack_depth() > depth:
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        torch.set_grad_enabled(grad)
        private.exchange_function_modes(len(private.function_modes()), modes)
        for kind, enabled, dtype in casts:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(cached)
        for _ in range(_autocast_nesting() - nesting):
            torch.autocast_decrement_nesting()

    return restore


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


def without_dispatch_modes() -> AbstractContextManager[object]:
    """Inside, no mode looks at operators: what is made is a tensor with values."""
    if not private.dispatch_modes():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def without_users_modes() -> AbstractContextManager[object]:
    """The same, but modes that fake, functionalize or trace tensors stay, as those need them."""
    keys = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
    get = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
    if any(get(key) is not None for key in (keys.FAKE, keys.FUNCTIONAL, keys.PROXY)):
        return contextlib.nullcontext()
    return without_dispatch_modes()


def without_values() -> AbstractContextManager[object]:
    """Inside, tensors that are made are fake: a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import, and rarely needed

    return FakeTensorMode(allow_non_fake_inputs=True)


def prepare_for_fakes() -> None:
    """Called before threads start that may make fake tensors and end before this one.

    torch 2.11 built with CUDA keeps a guard for all threads where there is no device, and frees it when the thread ends
    that made the first fake tensors: the next ones are a segmentation fault.
    """
    if torch.backends.cuda.is_built() and not torch.cuda.device_count():
        with without_values():
            pass


def isolate_group_names(on: bool) -> None:
    """Whether names of process groups are each thread's own, or the process's."""
    torch._C._distributed_c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]
