"""Torch's own state of a thread: its modes, and what is made under them; the private parts of torch for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from fzero.base import private

# torch.autograd.grad without its look at what it is given; it lets compiled code see this thread's settings
RUN_BACKWARD: Any = torch.autograd.graph._engine_run_backward
SET_GRAD_ENABLED = torch._C._set_grad_enabled  # what torch.no_grad and torch.enable_grad come down to
FORWARD_ENABLED, SET_FORWARD_ENABLED = torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
# whether names of process groups are each thread's own, or the process's
isolate_group_names: Callable[[bool], None] = torch._C._distributed_c10d._set_thread_isolation_mode  # type: ignore[attr-defined]
function_modes_on: Callable[[], int] = torch._C._len_torch_function_stack  # type: ignore[attr-defined]


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


def without_values() -> AbstractContextManager[Any]:
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


def only_maps() -> bool:
    """Tells whether no transform is active here but maps, which take no derivative."""
    functorch = torch._C._functorch  # type: ignore[attr-defined]
    keys = {each.key() for each in functorch.get_interpreter_stack() or ()}
    return keys <= {functorch.TransformType.Vmap} and not private.forward_mode()
