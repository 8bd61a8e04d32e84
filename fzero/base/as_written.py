"""What torch.compile has compiled runs as it is written, on threads that ask for it, as where functions are looked at.

Dynamo's stance is the process's. What stands in its place meanwhile answers each thread by itself, and where no thread
asks any more it is the stance that it was put over: whoever puts it back later, as the end of a
`with torch.compiler.set_stance(...)` on another thread does, puts back that one.
"""

from __future__ import annotations

import inspect
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from typing import TypeVar

from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    get_eval_frame_callback,
    set_code_exec_strategy,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

Mode = TypeVar("Mode", bound=TorchDispatchMode)

Called = tuple[tuple[object, ...], Mapping[str, object] | None]  # the operands of a function

_lock = threading.Lock()
_threads: dict[int, int] = {}  # id of what asks -> its thread


class _Stance:
    """Stands for one of Dynamo's."""

    def __init__(self, over: object) -> None:
        self.over = over

    def __getattr__(self, name: str) -> object:
        return getattr(self.over, name)

    @property
    def stance(self) -> object:
        asks = threading.get_ident() in _threads.values()
        return "force_eager" if asks else getattr(self.over, "stance")  # noqa: B009 - of a class of torch's own


def need_eager() -> None:
    """Refuses to run a step, or a unit of one, where torch.compile compiles what calls this."""
    if get_eval_frame_callback() not in (None, False):
        raise RuntimeError(_COMPILED)


_COMPILED = (
    "A step or a unit runs inside of a function that torch.compile compiles, where fzero cannot look at what it "
    "computes. Call it outside of that function, keep it out by torch.compiler.disable, or compile the step's units: "
    "fz.compile(step)."
)


class _Coming:
    """Has Dynamo, if something imports it while a thread asks, run nothing compiled there from its first moment.

    It would leave out for ever, and silently, what it then finds under modes.
    """

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(name, path, target) if name == _DYNAMO else None
        if found is not None and found.loader is not None:
            run = found.loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                run(module)
                with _lock:
                    if _threads:
                        _stand_in(module)

            setattr(found.loader, "exec_module", exec_module)  # noqa: B010 - of this one module's loader
        return found


_DYNAMO = "torch._dynamo.eval_frame"


def _stand_in(dynamo: types.ModuleType | None) -> None:
    stance = getattr(dynamo, "_stance", None)  # or another thread imports it just now
    if stance is not None and not isinstance(stance, _Stance):
        setattr(dynamo, "_stance", _Stance(stance))  # noqa: B010 - as `torch.compiler.set_stance` does


def begin(owner: object) -> None:
    """From now on nothing compiled runs on this thread, until `end`."""
    need_eager()
    with _lock:
        _threads[id(owner)] = threading.get_ident()
        _stand_in(sys.modules.get(_DYNAMO))
        if _Coming not in sys.meta_path:
            sys.meta_path.insert(0, _Coming)


def end(owner: object) -> None:
    with _lock:
        if _threads.pop(id(owner), None) is None or _threads:
            return
        dynamo = sys.modules.get(_DYNAMO)
        stance = getattr(dynamo, "_stance", None)
        if isinstance(stance, _Stance):
            setattr(dynamo, "_stance", stance.over)  # noqa: B010 - also where something is compiled


def uncompiled(mode: type[Mode]) -> type[Mode]:
    """A mode whose own code Dynamo leaves out; torch's wrapper for it imports Dynamo, which takes seconds."""
    own = inspect.unwrap(mode.__torch_dispatch__)
    own._torchdynamo_disable = True  # type: ignore[attr-defined]
    set_code_exec_strategy(own.__code__, _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP))
    setattr(mode, "__torch_dispatch__", own)  # noqa: B010 - of a class that is no variable's
    return mode


class Functions(TorchFunctionMode):
    """Shows functions of torch, above all levels.

    Args:
        called: given a function and its operands, the operands to call it with.
    """

    def __init__(self, called: Callable[..., Called]) -> None:
        super().__init__()
        self._called = called

    def __enter__(self) -> Functions:
        begin(self)  # Dynamo takes wrong steps under modes
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        end(self)

    def __torch_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> object:
        args, named = self._called(func, args, kwargs)
        return func(*args, **(named or {}))


Functions.__torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]
