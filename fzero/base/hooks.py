"""Saved-tensor hooks and functorch, which refuses them: the private parts of torch for it, in one place."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import graph
from torch.utils.hooks import RemovableHandle

_C: Any = torch._C._autograd  # type: ignore[attr-defined]
_PASSING = "fzero.", "torch.autograd.graph", "torch.utils.checkpoint"  # whose hooks change no value


def is_users(kind: type) -> bool:
    """Tells whether nodes of a type are a Function's, but for this library's: they may write to what they are given.

    It is one in Python, as operators of torch.library are, or in C++; of CopySlices, a write to a view, only C++ sees
    what has written.
    """
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return not getattr(kind, "_forward_cls", kind).__module__.startswith("fzero.")
    return kind.__name__ in ("CppFunction", "CopySlices")


def is_hooked(node: graph.Node) -> bool:
    """Tells whether what a node saved passes through somebody's hooks, which may count on one look at it."""
    return any(
        getattr(each, "unpack_hook", None) is not None
        for name in _raw(type(node))
        for saved in [getattr(node, name)]
        for each in (saved if isinstance(saved, (tuple, list)) else (saved,))
    )


@functools.cache
def _raw(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def registered() -> int:
    """Counts the hooks that somebody has ever registered on a tensor, a node of a graph or a module, on any thread.

    Such a hook may change what is pulled back by it, and shows in no other way.
    """
    return RemovableHandle.next_id


def before(x: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    """Has a hook of this library's called before a tensor's cotangent is pulled back, and before others' hooks.

    `x.register_hook` takes ten times as long, and is counted by `registered`.
    """
    held: dict[object, object] | None = x._backward_hooks  # type: ignore[assignment]
    if held is None:
        x._backward_hooks = collections.OrderedDict(((hook, hook),))  # type: ignore[assignment]
        x.grad_fn._register_hook_dict(x)  # type: ignore[union-attr]
    else:
        others = dict(held)
        held.clear()  # autograd goes by the order in which they came, not by that of an OrderedDict
        held[hook] = hook
        held.update(others)


_OUTSIDE = "torch.func transforms don't support saved tensor hooks outside a unit."


def allow() -> bool:
    """Has saved-tensor hooks work although a functorch level switched them off: whether it had, for `refuse_again`."""
    refused = not _C._saved_tensors_hooks_is_enabled()
    if refused:
        _C._saved_tensors_hooks_enable()
    return refused


def refuse_again(refused: bool) -> None:
    if refused:
        _C._saved_tensors_hooks_disable(_OUTSIDE)


class refused:
    """Inside, saved-tensor hooks (torch.utils.checkpoint) are refused, as torch.func refuses them.

    Where some surround it, they stay at work: to refuse others would suspend them.
    """

    __slots__ = ("_refuses",)

    def __enter__(self) -> None:
        self._refuses = _C._saved_tensors_hooks_is_enabled() and _C._top_saved_tensors_default_hooks(True) is None
        if self._refuses:
            _C._saved_tensors_hooks_disable(_OUTSIDE)

    def __exit__(self, *_: object) -> None:
        if self._refuses:
            _C._saved_tensors_hooks_enable()


def any_around() -> bool:
    """Tells whether somebody's own saved-tensor hooks surround what runs now."""
    around = _C._top_saved_tensors_default_hooks(True)
    return around is not None and not _home(around[0]).startswith("fzero.")


def in_checkpoint() -> bool:
    """Tells whether a torch.utils.checkpoint that runs again later surrounds what runs now."""
    hooks = _C._top_saved_tensors_default_hooks(True)
    return hooks is not None and _home(hooks[0]) == "torch.utils.checkpoint"


def _home(fn: Callable[..., object]) -> str:
    """The module that a function says it is of; a method of a class in C, or a partial one, says none."""
    return str(getattr(fn, "__module__", None))


@contextlib.contextmanager
def putting_away(
    what: str, pack: Callable[[torch.Tensor], object], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """Inside, these hooks are at work, where torch.func's transforms refuse to begin.

    Raises:
        ValueError: somebody's own surround them, which would do nothing. Those of torch change no value, and may.
    """
    around = _C._top_saved_tensors_default_hooks(True)
    if around is not None and not _home(around[0]).startswith(_PASSING):
        raise ValueError(
            f"{what}: got torch.autograd.graph.saved_tensors_hooks around the unit, of {around[0]!r}, which would see "
            "nothing of what is put away; expected none. Use them within the unit's function, or leave out fz.remat's "
            "save= and fz.offload's activations=."
        )
    with graph.saved_tensors_hooks(pack, unpack):
        yield


def without_compiled_autograd() -> contextlib.AbstractContextManager[object]:
    """Inside, autograd's own engine pulls back, as torch.func has it do."""
    other = sys.modules.get("torch._dynamo.compiled_autograd")  # which nothing can have turned on before it is imported
    return other._disable() if other is not None else contextlib.nullcontext()


def number_of(node: graph.Node) -> int:
    """The number of a node among those that its thread has made; `next_number` at the end of its operation is more."""
    return node._sequence_nr()


# the node of a graph that autograd pulls back now on this thread; None outside of a pullback
node_that_runs: Callable[[], graph.Node | None] = torch._C._current_autograd_node  # type: ignore[attr-defined]
# the number that this thread's next node will have: in an operation that is looked at, its own is one less
next_number: Callable[[], int] = _C._get_sequence_nr
