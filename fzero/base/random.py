"""Random numbers of a unit's call depend on (seed, step, rank, microbatch, call); global generators stay as found.

On threads other than the main one, operators that draw are given the thread's own generator. A dispatch key that torch
leaves unused lies above autograd and functorch. Kernels under it are met only by threads that include the key, and only
by operators that draw: every other operator passes at no cost, and so does compiled code.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import inspect
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils import checkpoint

from fzero.base import private
from fzero.base.context import jitting

Operator = torch._ops.OpOverload
_C: Any = torch._C
_NAME = "TESTING_ONLY_GenericMode"
_KEY = _C._parse_dispatch_key(_NAME)
_BELOW = _C._dispatch_keyset_full_after(_KEY)
_STREAM, _MAIN = "fzero.stream", "fzero.main"  # autograd's threads inherit these from whoever calls a backward
_libraries: list[torch.library.Library] = []  # what is registered lasts as long as these
_stashed: set[int] = set()  # native ids of threads that keep one
_MASK = (1 << 64) - 1
# a generator's own lock is taken with Python's, which may be given away inside: two threads would wait for each other
_one_at_a_time = threading.Lock()
_in_use: list[seeded] = []  # regions that have seeded the default generators


def _mixed(state: int, number: int) -> int:
    state = (state + (number & _MASK) * 0xBF58476D1CE4E5B9 + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


class Later(int):
    """A seed in a graph: that of `Seeds(*numbers)` after so many calls, of which a run knows those that are tensors."""

    numbers: tuple[int | torch.Tensor, ...]
    calls: int

    def of(self, *known: int) -> int:
        """The seed, where these are the numbers that the graph has."""
        rest = iter(known)
        seeds = Seeds(*[next(rest) if isinstance(x, torch.Tensor) else x for x in self.numbers])
        seeds._calls = self.calls - 1
        return seeds.next()


class Seeds:
    """63-bit seeds, one after the other, from several numbers (splitmix64 steps, Steele et al. 2014)."""

    def __init__(self, *numbers: int | torch.Tensor) -> None:
        self._calls, self._state = 0, 0x9E3779B97F4A7C15
        self._later = numbers if any(isinstance(x, torch.Tensor) for x in numbers) else ()
        for number in numbers if not self._later else ():
            self._state = _mixed(self._state, int(number))

    def next(self) -> int:
        self._calls += 1
        if self._later:
            out = Later()
            out.numbers, out.calls = self._later, self._calls
            return out
        return _mixed(self._state, self._calls) >> 1


class seeded:
    """Draws from a stream of its own inside, and leaves the default generators as they were; `None` changes nothing.

    On the main thread torch's default generators are seeded, and put back. On any other, as they are one for all
    threads, each operator that draws is given the region's own generator, which makes the same numbers of the same
    seed; torch.manual_seed does not reach that one. `states` are those of generators that have been drawn from already.
    """

    __slots__ = ("default", "generators", "outer", "seed", "start", "states", "traced")

    def __init__(self, seed: int | None, states: Mapping[torch.device, torch.Tensor] | None = None) -> None:
        self.seed, self.start = seed, states
        self.default: tuple[torch.Generator, ...] = ()
        self.generators: dict[torch.device, torch.Generator] | None = None
        self.traced: AbstractContextManager[object] | None = None  # what takes their place in a trace

    def __enter__(self) -> None:
        if self.seed is None:
            return
        if (graph := jitting.get()) is not None:
            self.traced = drawing = graph.effects.drawing(self.seed)
            drawing.__enter__()
            return
        if not (_is_known_as_main() or acts_for_main()):
            self.generators = {}
            self.outer = swap_stream(self)
            return
        default: tuple[torch.Generator, ...] = (torch.default_generator,)
        if torch.cuda.default_generators and torch.cuda.is_initialized():
            default += (torch.cuda.default_generators[torch.cuda.current_device()],)
        with _one_at_a_time:
            self.states = list(map(torch.Generator.get_state, default))
            self.default = default
            _in_use.append(self)
            for generator in default:
                self._begin(generator)

    def __exit__(self, *_: object) -> None:
        if self.default:
            with _one_at_a_time:
                for generator, state in zip(self.default, self.states, strict=True):
                    generator.set_state(state)
                _in_use.remove(self)
        elif self.generators is not None:
            swap_stream(self.outer)
        elif self.traced is not None:
            self.traced.__exit__(None, None, None)

    def _begin(self, generator: torch.Generator) -> torch.Generator:
        state = self.start.get(generator.device) if self.start else None
        assert self.seed is not None
        generator.manual_seed(self.seed) if state is None else generator.set_state(state)
        return generator

    def generator(self, device: torch.device) -> torch.Generator | None:
        """This region's own generator on a device, for a thread that must leave the default ones alone."""
        assert self.generators is not None
        if device.type not in ("cpu", "cuda"):
            return None
        if device.type == "cpu":
            device = torch.device("cpu")  # cpu:0 is the same
        elif device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self.generators:
            self.generators[device] = self._begin(torch.Generator(device))
        return self.generators[device]

    def here(self) -> Callable[[], seeded]:
        """Makes regions that draw what this one will from here on."""
        states = {**(self.start or {}), **{device: g.get_state() for device, g in (self.generators or {}).items()}}
        return functools.partial(seeded, self.seed, states)

    def lend(self, device: torch.device, name: str, run: Callable[[], object]) -> object:
        """`run()`, which draws from a device's default generator, with this region's numbers."""
        own = self.generator(device)
        if own is None:
            return run()
        default = default_generator(own.device)
        with _one_at_a_time, unseen():
            if _in_use:
                raise RuntimeError(
                    f"{name} takes no generator, so it draws from torch's default one, which a unit on the main thread "
                    "is using right now. Run the two one after the other, or on processes of their own."
                )
            state = default.get_state()
            default.set_state(own.get_state())
            try:
                return run()
            finally:
                own.set_state(default.get_state())
                default.set_state(state)


# those that the functions of the modules `random` and `numpy.random` draw from
_SHARED = {id(random.getstate.__self__), id(np.random.get_state.__self__)}  # type: ignore[attr-defined]


def is_shared(generator: object) -> bool:
    """Tells whether a generator is one of torch's default ones, or of the modules `random` and `numpy.random`."""
    defaults = torch.default_generator, *torch.cuda.default_generators
    return id(generator) in _SHARED or any(generator is default for default in defaults)


# ---- what a thread draws from


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


_is_known_as_main: Callable[[], bool] = functools.partial(_C._is_key_in_tls, _MAIN)


def acts_for_main() -> bool:
    """True on the main thread, and on one of autograd's that works for it while it waits."""
    if not _is_known_as_main() and threading.get_ident() == threading.main_thread().ident:
        stash(_MAIN, True)
    return _is_known_as_main()


def current_stream() -> seeded | None:
    """What this thread draws from; None for the default generators."""
    return _C._get_obj_in_tls(_STREAM) if _C._is_key_in_tls(_STREAM) else None


def swap_stream(stream: seeded | None) -> seeded | None:
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
    return _C._ExcludeDispatchKeyGuard(_C.DispatchKeySet(_KEY))


# ---- kernels


def _install() -> None:
    with _one_at_a_time:
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
        device = _look(given)[0] if _is_default(given.get("generator")) else None
        stream: seeded = _C._get_obj_in_tls(_STREAM)
        own = stream.generator(device) if device is not None else None
        if device is None or own is None:
            return op.redispatch(keyset & _BELOW, *args, **kwargs)
        _refuse_checkpoint(op.name())
        if private.level() and op._opname.endswith("_like"):  # which follow a map's randomness only without a generator
            return stream.lend(device, op.name(), lambda: op.redispatch(keyset & _BELOW, *args, **kwargs))
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
        stream: seeded = _C._get_obj_in_tls(_STREAM)
        _refuse_checkpoint(op.name())
        return stream.lend(device, op.name(), lambda: op.redispatch(keyset & _BELOW, *args, **kwargs))

    return kernel


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
    default: Any = default_generator(generator.device) if generator is not None else None
    return generator is None or generator._cdata == default._cdata


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
