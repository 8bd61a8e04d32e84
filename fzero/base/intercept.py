"""Operators that draw random numbers, given a thread's own generator: the private parts of torch for it, in one place.

A dispatch key that torch leaves unused lies above autograd and functorch. Kernels under it are met only by threads that
include the key, and only by operators that draw: every other operator passes at no cost, and so does compiled code.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils import checkpoint

from fzero.base import private

Operator = torch._ops.OpOverload
_C: Any = torch._C
_NAME = "TESTING_ONLY_GenericMode"
_KEY = _C._parse_dispatch_key(_NAME)
_ALONE = _C.DispatchKeySet(_KEY)
_BELOW = _C._dispatch_keyset_full_after(_KEY)
_STREAM, _MAIN = "fzero.stream", "fzero.main"  # autograd's threads inherit these from whoever calls a backward
_libraries: list[torch.library.Library] = []  # what is registered lasts as long as these
_once = threading.Lock()
_stashed: set[int] = set()  # native ids of threads that keep one


@atexit.register
def _wait_for_threads() -> None:
    """Waits until threads that have ended for Python have ended for the system too.

    What they have stashed is destroyed last of all, under Python's lock; a thread that asks for it while the
    interpreter ends is ended on the spot, inside a destructor, which aborts the process.
    """
    _stashed.difference_update(thread.native_id for thread in threading.enumerate() if thread.native_id)
    until = time.monotonic() + 0.5
    while time.monotonic() < until and any(map(os.path.exists, [f"/proc/self/task/{number}" for number in _stashed])):
        time.sleep(0.001)


class Stream(Protocol):
    """A source of random numbers that a thread draws from."""

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Its own generator; None for a device that has no default one either."""

    def here(self) -> Callable[[], AbstractContextManager[object]]:
        """Makes regions that draw what this one will from here on."""
        ...

    def lend(self, device: torch.device, name: str, run: Callable[[], object]) -> object:
        """Runs what draws from the device's default generator and cannot be given another."""


def acts_for_main() -> bool:
    """True on the main thread, and on one of autograd's that works for it while it waits."""
    if not _C._is_key_in_tls(_MAIN) and threading.get_ident() == threading.main_thread().ident:
        stash(_MAIN, True)
    return _C._is_key_in_tls(_MAIN)


def current_stream() -> Stream | None:
    """What this thread draws from; None for the default generators."""
    return _C._get_obj_in_tls(_STREAM) if _C._is_key_in_tls(_STREAM) else None


def swap_stream(stream: Stream | None) -> Stream | None:
    """Makes this thread draw from `stream`, None for the default generators; returns what it drew from before."""
    if not _libraries:
        _install()
    before = current_stream()
    stash(_STREAM, stream)
    _C._dispatch_tls_set_dispatch_key_included(_KEY, stream is not None)
    return before


def stash(name: str, value: object) -> None:
    """Keeps a value for this thread, until another takes its place or the thread ends."""
    if not _C._is_key_in_tls(name):
        _stashed.add(threading.get_native_id())
    _C._stash_obj_in_tls(name, value)
    if not _takes_hold():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


@functools.cache
def _takes_hold() -> bool:
    """Whether torch counts a reference to what it keeps for a thread: torch 2.11 lets go of one that it never had."""
    probe = object()
    before = sys.getrefcount(probe)
    _C._stash_obj_in_tls("fzero.probe", probe)
    taken = sys.getrefcount(probe) > before
    if not taken:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    return taken


def unseen() -> AbstractContextManager[None]:
    """Inside, this thread's operators are not intercepted."""
    return _C._ExcludeDispatchKeyGuard(_ALONE)


def detached(x: torch.Tensor) -> torch.Tensor:
    """A tensor's values without a gradient, whose writes count as the tensor's: `x.detach()` in an operator's kernel.

    There autograd is passed already, and what that makes counts by itself.
    """
    with _C._SetExcludeDispatchKeyGuard(_C.DispatchKey.ADInplaceOrView, False):
        return x.detach()


# ---- kernels


def _install() -> None:
    with _once:
        if _libraries:
            return
        # operators written in Python have no fallback: the key is declared one that they pass
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(_KEY)
        torch._ops._higher_order_ops["run_and_save_rng_state"].py_impl(_KEY)(_refuse_compiled_checkpoint)
        libraries = {"_": torch.library.Library("_", "IMPL")}
        libraries["_"].fallback(torch.library.fallthrough_kernel, _NAME)
        for name in _C._dispatch_get_all_op_names():
            base, _, overload = name.partition(".")
            found = _C._get_operation_overload(base, overload)
            if found is None or torch.Tag.nondeterministic_seeded not in found[2]:
                continue
            namespace, _, packet = base.partition("::")
            op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
            kernel = _kernel_of(op)
            if kernel is not None:
                if namespace not in libraries:
                    libraries[namespace] = torch.library.Library(namespace, "IMPL")
                libraries[namespace].impl(op, kernel, _NAME, with_keyset=True)
        _libraries.extend(libraries.values())


def _kernel_of(op: Operator) -> Callable[..., object] | None:
    arguments = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    names = [name for name, _ in arguments]
    if "generator" in names:
        return _with_generator(op, op, names)
    if any("seed" in name for name in names):
        return None  # told what to draw
    packet = op._overloadpacket
    for other in (getattr(packet, overload) for overload in packet.overloads()):
        alike = [(a.name, str(a.type)) for a in other._schema.arguments if not (a.name == "generator" and a.kwarg_only)]
        if alike == arguments and other is not op:
            return _with_generator(op, other, names)
    return _without_generator(op, names)


def _with_generator(op: Operator, taking: Operator, names: list[str]) -> Callable[..., object]:
    """The kernel of an operator that takes a generator, or has another overload that does."""

    def kernel(keyset: Any, *args: object, **kwargs: object) -> object:
        given = dict(zip(names, args, strict=False), **kwargs)
        own = _own_generator(given, op.name()) if _is_default(given.get("generator")) else None
        if own is None:
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        with unseen():
            return taking(**(given | {"generator": own}))

    return kernel


def _without_generator(op: Operator, names: list[str]) -> Callable[..., object]:
    composite = _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    chances = {"dropout_p", "dropout", "p"}.intersection(names)

    def kernel(keyset: Any, *args: object, **kwargs: object) -> object:
        given: dict[str, Any] = dict(zip(names, args, strict=False), **kwargs)
        device, plain = _look(given)
        trains = given.get("train", given.get("training")) is not False
        if device is None or not trains or any(given.get(name, 0) == 0 for name in chances):
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        shown = plain and not private.dispatch_modes() and op.namespace == "aten"  # what it calls comes by here
        # a composite one is taken apart before any mode or subclass sees it
        if (shown and device.type == "cpu") or (composite and (shown or not torch.is_inference_mode_enabled())):
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        stream: Stream = _C._get_obj_in_tls(_STREAM)
        _refuse_checkpoint(op.name())
        return stream.lend(device, op.name(), lambda: op.redispatch(keyset & _BELOW, *args, **kwargs))

    return kernel


def _own_generator(given: Mapping[str, object], name: str) -> torch.Generator | None:
    device, _ = _look(given)
    stream: Stream = _C._get_obj_in_tls(_STREAM)
    own = stream.generator(device) if device is not None else None
    if own is not None:
        _refuse_checkpoint(name)
    return own


def _look(given: Mapping[str, Any]) -> tuple[torch.device | None, bool]:
    """The device that an operator draws on, None for fakes, which draw nothing; True if its tensors are plain."""
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        return None, True
    device, plain = None, True
    for argument in given.values():
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, torch.Tensor):
                if private.is_fake(tensor):
                    return None, True
                device = device or tensor.device
                plain = plain and not _C._dispatch_keys(tensor).has("Python")
    return device or torch.device(given.get("device") or "cpu"), plain


def default_generator(device: torch.device) -> torch.Generator:
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _is_default(generator: Any) -> bool:
    """Compares addresses: a kernel gets another Python object for the same generator."""
    if generator is None:
        return True
    default: Any = default_generator(generator.device)
    return generator._cdata == default._cdata


# ---- checkpoints

# the functions of torch's that call what will run again, and the variable of each that says whether by the same numbers
# since torch 2.15 `checkpoint` has another one do it
_CHECKPOINTS = {
    inspect.unwrap(getattr(checkpoint, "_checkpoint_impl", checkpoint.checkpoint)).__code__: "preserve",
    checkpoint.CheckpointFunction.forward.__code__: "preserve_rng_state",
}


def _refuse_checkpoint(name: str) -> None:
    """A checkpoint notes the state of the default generator for its second run, and not that of a thread's own.

    One around a unit is no matter: the unit draws by its seed, whenever it runs.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not str(frame.f_globals.get("__name__")).startswith("fzero.engine."):
        if frame.f_code in _CHECKPOINTS and frame.f_locals.get(_CHECKPOINTS[frame.f_code], True):
            raise ValueError(_OTHER_NUMBERS.format(name))
        frame = frame.f_back


def _refuse_compiled_checkpoint(op: object, *_: object, **__: object) -> object:
    raise ValueError(_OTHER_NUMBERS.format(op))


_OTHER_NUMBERS = (
    "{} draws random numbers under torch.utils.checkpoint, in a unit that does not run on the main thread: it would "
    "draw other numbers when it is recomputed. Take fz.remat(step) in checkpoint's place, run this rank on the main "
    "thread of a process of its own, or say preserve_rng_state=False where other numbers are right."
)
