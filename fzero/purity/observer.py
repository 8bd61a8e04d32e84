"""One observer of torch's operations in the first run of a function: rules see each of them before it is done.

The observer is a dispatch mode, so it runs below every level of torch.func. What it is given there says
`requires_grad=False`, whatever is differentiated. The tensors that the caller gave to the call that led there tell
more, and the frames of that call hold them.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, Protocol

import torch
from torch.utils import _python_dispatch as dispatch

from fzero.base import private
from fzero.base.context import variable
from fzero.base.operators import Operator
from fzero.base.thread_state import SET_GRAD_ENABLED

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
Arguments = tuple[object, ...]
_MODES = "__torch_function__", "__torch_dispatch__"


class Caller(NamedTuple):
    """Who called an operation.

    Attributes:
        frames: of the call, from the innermost to the caller's own.
        functions: the calls of autograd Functions in whose forward it is, the innermost first: these have derivatives
            of their own, and autograd says nothing of what they compute.
        records: whether grad mode is on for the caller.
    """

    frames: Sequence[FrameType]
    functions: Sequence[FrameType]
    records: bool

    def differentiates(self, operand: torch.Tensor) -> bool:
        """Tells whether any derivative goes on through an operand, as autograd knows of what the caller has given."""
        plain = private.unwrapped(operand)
        given, torchs, own = [operand], self.frames[:-1], self.frames[-1:]
        for frames in (torchs, own):  # its own may hold x beside the x.data that it has given
            held = [x for frame in frames for x in _tensors(list(frame.f_locals.values()))]
            given += [x for x in held if x is not plain and private.unwrapped(x) is plain]
            if len(given) > 1:
                break
        return any(map(private.is_differentiated, given))


class Rule(Protocol):
    """Looks at an operation before it is done."""

    def look(self, operator: str, caller: Caller, args: Arguments) -> Arguments:
        """Returns what the operation is done with, if it is an operator ("namespace::name"): its arguments, mostly."""
        ...

    def refuses(self) -> bool:
        """Tells whether `end` will raise."""
        ...

    def end(self) -> None:
        """After the run, also after one that has failed; may raise what is to be said of it."""


class Observer(dispatch.TorchDispatchMode):
    """Shows operations to rules.

    Args:
        rules: by the namespace of the operators that they look at, or the module of the functions.
    """

    supports_higher_order_operators = True
    looks = True  # and changes nothing of what is computed

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        super().__init__()
        self._rules, self._records = rules, torch.is_grad_enabled()

    def __torch_dispatch__(
        self, func: Operator, types: object, args: Arguments = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        rule = self._rules.get(func.namespace)
        if rule is not None:
            caller = _caller(self._records)
            if caller is not None:
                args = rule.look(func._schema.name, caller, args)
        return func(*args, **(kwargs or {}))

    def refuses(self) -> bool:
        """Tells whether the run is refused at its end, to which it goes on: others wait for what it sends."""
        return any(rule.refuses() for rule in self._rules.values())

    def note(self, func: object, args: Arguments, kwargs: Mapping[str, object] | None) -> None:
        """Told of functions of torch above all levels, where grad mode is what the caller has set.

        On ranks that are threads no operator is behind a collective.
        """
        if func is SET_GRAD_ENABLED:
            self._records = bool(args[0])
            return
        self._records = torch.is_grad_enabled()  # a Function that has ended has put it back without a call
        rule = self._rules.get(getattr(func, "__module__", None) or "")
        caller = _caller(self._records) if rule is not None else None
        if rule is not None and caller is not None:
            rule.look(str(getattr(func, "__name__", "")), caller, (*args, *(kwargs or {}).values()))

    def __enter__(self) -> Observer:
        self._token = current.set(self)
        dispatch._push_mode(self)  # `super().__enter__` notes a mode for all threads, which several may leave so
        return self

    def __exit__(self, *error: object) -> None:
        dispatch._pop_mode()
        current.reset(self._token)
        if error[1] is None or isinstance(error[1], Exception):
            for rule in dict.fromkeys(self._rules.values()):
                rule.end()


current: contextvars.ContextVar[Observer | None] = variable("observer", None)


def _caller(records: bool) -> Caller | None:
    """Who called the operation that is being looked at; None if that is this library."""
    frames, functions, frame, ends = list[FrameType](), list[FrameType](), sys._getframe(2), False
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        name = module.partition(".")[0]
        passes = frame.f_code.co_name in _MODES or module.startswith("fzero.base.")  # calls on
        if name == "fzero" and not passes:  # has called the caller, or is it
            break
        if frame.f_code is _APPLY:
            functions.append(frame)
        if not ends:
            frames.append(frame)
            ends = name not in ("torch", "fzero", "typing_extensions", *sys.stdlib_module_names)
        frame = frame.f_back
    return Caller(frames, functions, records) if ends else None


def _tensors(values: Sequence[object], depth: int = 2) -> Iterator[torch.Tensor]:
    """The tensors among values, in their lists and in lists of lists."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif depth and isinstance(x, (list, tuple)):
            yield from _tensors(x, depth - 1)
