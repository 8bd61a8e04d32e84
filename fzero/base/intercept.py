"""Operators that draw random numbers, given a thread's own generator: the private parts of torch's dispatcher for it.

A dispatch key that torch leaves unused lies above autograd and functorch. Kernels under it are met only by threads that
include the key, and only by operators that draw: every other operator passes at no cost, and so does compiled code.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fzero.base import private
from fzero.base.checkpointing import Region, take_over

_C: Any = torch._C
_NAME = "TESTING_ONLY_GenericMode"
_KEY = _C._parse_dispatch_key(_NAME)
_ALONE = _C.DispatchKeySet(_KEY)
_BELOW = _C._dispatch_keyset_full_after(_KEY)
_STREAM, _MAIN = "fzero.stream", "fzero.main"  # autograd's threads inherit these from whoever calls a backward
_libraries: list[torch.library.Library] = []  # what is registered lasts as long as these
_once = threading.Lock()
_stashed: set[int] = set()  # native ids of threads with a stream


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
    """What a thread draws from."""

    def generator(self, device: torch.device) -> torch.Generator | None:
        """Its own generator; None for a device that has no default one either."""
        ...

    def here(self) -> Region:
        """A region that draws what this one will from here on."""
        ...

    def lend(self, device: torch.device, name: str, run: Callable[[], object]) -> Any:
        """Runs what draws from the device's default generator and cannot be given another."""
        ...


def acts_for_main() -> bool:
    """Whether this is the main thread, or one of autograd's that works for it while it waits."""
    if threading.get_ident() == threading.main_thread().ident:
        if not _C._is_key_in_tls(_MAIN):
            _C._stash_obj_in_tls(_MAIN, True)
        return True
    return _C._is_key_in_tls(_MAIN)


def swap_stream(stream: Stream | None) -> Stream | None:
    """Makes this thread draw from `stream`, None for the default generators; returns what it drew from before."""
    if not _libraries:
        _install()
    if not _C._is_key_in_tls(_STREAM):
        _stashed.add(threading.get_native_id())
        before = None
    else:
        before = _C._get_obj_in_tls(_STREAM)
    _C._stash_obj_in_tls(_STREAM, stream)
    _C._dispatch_tls_set_dispatch_key_included(_KEY, stream is not None)
    return before


def unseen() -> contextlib.AbstractContextManager[None]:
    """Inside, this thread's operators are not intercepted."""
    return _C._ExcludeDispatchKeyGuard(_ALONE)


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


def _kernel_of(op: Any) -> Callable[..., Any] | None:
    names = [argument.name for argument in op._schema.arguments]
    if "generator" in names:
        return _with_generator(op, names.index("generator"))
    if any("seed" in name for name in names):
        return None  # told what to draw
    packet = op._overloadpacket
    signature = [(argument.name, str(argument.type)) for argument in op._schema.arguments]
    for other in (getattr(packet, overload) for overload in packet.overloads()):
        arguments = [a for a in other._schema.arguments if not (a.name == "generator" and a.kwarg_only)]
        takes = len(arguments) < len(other._schema.arguments)
        if takes and [(argument.name, str(argument.type)) for argument in arguments] == signature:
            return _by_overload(op, other)
    return _without_generator(op, names)


def _with_generator(op: Any, place: int) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        given = args[place] if place < len(args) else kwargs.get("generator")
        if given is None or _is_default(given):
            own = _own_generator(args, kwargs)
            if own is not None:
                if place < len(args):
                    args = (*args[:place], own, *args[place + 1 :])
                else:
                    kwargs["generator"] = own
                with unseen():
                    return op.redispatch(keyset & _BELOW, *args, **kwargs)
        return op.redispatch(keyset & _BELOW, *args, **kwargs)

    return kernel


def _by_overload(op: Any, other: Any) -> Callable[..., Any]:
    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        own = _own_generator(args, kwargs)
        if own is None:
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        with unseen():
            return other(*args, generator=own, **kwargs)

    return kernel


def _without_generator(op: Any, names: list[str]) -> Callable[..., Any]:
    composite = _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    chances = [names.index(name) for name in ("dropout_p", "dropout", "p") if name in names]
    modes = [names.index(name) for name in ("train", "training") if name in names]

    def draws(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
        def value(place: int, default: object) -> Any:
            return args[place] if place < len(args) else kwargs.get(names[place], default)

        return not (any(value(i, 0) == 0 for i in chances) or any(value(i, True) is False for i in modes))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        device, plain = _look(args, kwargs)
        if device is None or not draws(args, kwargs):
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        shown = plain and not _C._len_torch_dispatch_stack()  # whether what it calls comes by here
        if shown and op.namespace == "aten" and (composite or device.type == "cpu"):
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        if composite and not torch.is_inference_mode_enabled():
            return op.redispatch(keyset & _BELOW, *args, **kwargs)  # is taken apart before any mode or subclass sees it
        if op is torch.ops.aten.native_dropout.default and plain and device.type == "cpu":
            own = _own_generator(args, kwargs)
            keep = 1 - args[1]
            mask = torch.empty_like(args[0], dtype=torch.bool).bernoulli_(keep, generator=own)
            return args[0].mul(mask).mul(1 / keep if keep else 0.0), mask
        stream: Stream = _C._get_obj_in_tls(_STREAM)
        take_over(stream.here)
        return stream.lend(device, op.name(), lambda: op.redispatch(keyset & _BELOW, *args, **kwargs))

    return kernel


def _refuse_compiled_checkpoint(op: object, *_: object, **__: object) -> Any:
    raise RuntimeError(
        f"{op} draws random numbers under torch.utils.checkpoint, in a unit that is compiled and does not run on the "
        "main thread: it would draw other numbers when it is recomputed. Take fz.remat(step) in checkpoint's place, or "
        "run this rank on the main thread of a process of its own."
    )


def _own_generator(args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Generator | None:
    device, _ = _look(args, kwargs)
    stream: Stream = _C._get_obj_in_tls(_STREAM)
    own = stream.generator(device) if device is not None else None
    if own is not None:
        take_over(stream.here)
    return own


def _look(args: tuple[object, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, bool]:
    """Where an operator draws, None for fakes, which draw nothing; and whether all its tensors are plain ones."""
    if _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE) is not None:
        return None, True
    device, plain = None, True
    for argument in (*args, *kwargs.values()):
        for tensor in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(tensor, torch.Tensor):
                if private.is_fake(tensor):
                    return None, True
                device = device or tensor.device
                plain = plain and not _C._dispatch_keys(tensor).has("Python")
    return device or torch.device(kwargs.get("device") or "cpu"), plain


def _is_default(generator: Any) -> bool:
    default: Any = torch.default_generator
    if generator.device.type == "cuda":
        default = torch.cuda.default_generators[generator.device.index]
    return generator._cdata == default._cdata  # a kernel gets another Python object for the same generator
