"""The thorough look at a function's first run: what is captured, leaked or written in place is refused by name.

Every operation of the run is looked at, which costs a few microseconds each; so later runs that call the same units in
the same order go without. `fz.testing.strict_capture` looks at all of them.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Self

import torch

from fzero.base import as_written, private, pytree
from fzero.base.context import during, variable
from fzero.base.edges import is_users
from fzero.base.hooks import register
from fzero.base.node import Op, closed_over, edges_to, refuse_foreign_leaves
from fzero.base.rebound import is_of_library
from fzero.base.refusals import noted, place_of, writes_param
from fzero.capture.handle import (
    SET_DATA,
    Function,
    Handle,
    Named,
    Operands,
    Seen,
    copy_of,
    is_same_view,
    name_of,
    seen,
    storage_of,
    writes,
)
from fzero.purity.observer import current
from fzero.table.layout import Group

LeafOf = Callable[[torch.Tensor], str]
_AS_IT_IS: contextlib.nullcontext[None] = contextlib.nullcontext()
_strict: contextvars.ContextVar[bool] = variable("strict_capture", False)
_elsewhere: contextvars.ContextVar[bool] = variable("elsewhere", False)


def leaf_of(group: Group, start: int = 0) -> LeafOf:
    """Names the leaf of a group that a tensor in its buffer, or in a part of that from `start` on, belongs to."""
    return lambda x: f"Leaf {group.leaf_at(start + int(private.unwrapped(x).storage_offset()))!r}"


def is_strict() -> bool:
    return _strict.get()


@contextlib.contextmanager
def strict_capture(enabled: bool = True) -> Iterator[None]:
    """A context that checks every run of every unit for tensors that it closes over or passes on unseen.

    Outside of it, a first run is checked. Use it in tests.

    Args:
        enabled: False switches it off inside another one.

    Example:
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> with fz.testing.strict_capture():
        ...     state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> metrics["loss"]
        tensor(2.)
    """
    with during(_strict, enabled):
        yield


_ASKS = {torch.autograd.grad, torch.Tensor.register_hook, torch.Tensor.retain_grad}
_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}
_SET_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]


class _AsWritten(torch.overrides.TorchFunctionMode):
    """A mode under which nothing compiled runs: Dynamo takes wrong steps under those that look at operations."""

    def __enter__(self) -> Self:
        as_written.begin(self)
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        as_written.end(self)


class Watch(_AsWritten):
    """Looks at every operation of a unit or, if that is None, of the function around the units.

    Args:
        protected: storage -> what names the leaf that a view of it belongs to.
        own: ids of what the unit made, or made a leaf of a graph, itself.
        given: gives the ids of the tensors that it is given.
    """

    def __init__(
        self,
        unit: str | None,
        protected: Mapping[int, LeafOf],
        own: Iterable[int] = (),
        given: Callable[[], Collection[int]] = tuple,
    ) -> None:
        super().__init__()
        self.unit, self.protected = unit, protected
        self.seen = seen.get()
        self.own, self.given = {*own}, given

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if (observer := current.get()) is not None:
            observer.note(func, args, kwargs)
        if self.unit is None and _elsewhere.get():
            return func(*args, **(kwargs or {}))
        operands = [x for x in pytree.flatten((args, kwargs or {}))[0] if isinstance(x, torch.Tensor)]
        for x in operands:
            if self.unit is not None and private.is_wrapped(x) and (private.level() == 0 or self._is_of_around(x)):
                raise noted(ValueError(closed_over(x)))
            unit = None if self.seen is None or id(x) in self.own else self.seen.unit_of(x)
            if unit is not None:
                raise noted(ValueError(leaked(x, unit)))
        if writes(func, kwargs) and operands:
            _refuse_writes(func, args, kwargs, self.protected)
        if func in _ASKS:
            _refuse_parts(func, args, kwargs or {})
        if func in _HOOKS and id(args[0]) in self.given():
            raise noted(
                ValueError(
                    f"Unit {self.unit!r} calls {name_of(func)!r} of a tensor that it is given{place_of()}, of shape "
                    f"{tuple(operands[0].shape)}: a hook is for the whole gradient of a tensor, and a unit's call sees "
                    "its own part alone. Call it where the tensor is computed, or compute another one here "
                    "(x = x.view_as(x)) whose gradient is this call's."
                )
            )
        out = func(*args, **(kwargs or {}))
        if self.unit is not None:
            results = pytree.flatten(out)[0] if isinstance(out, (tuple, list)) else (out,)
            for x in results if func != _SET_REQUIRES_GRAD else args[:1]:
                if isinstance(x, torch.Tensor) and (x.requires_grad or storage_of(x) in self.protected):
                    self.own.add(id(x))
                    if self.seen is not None:
                        self.seen.note(x, self.unit)
        return out

    def _is_of_around(self, x: torch.Tensor) -> bool:
        """Tells whether a tensor that is differentiated is of a level around the unit.

        One that a transform in the unit opens has the number of one around it, and takes such a tensor for its own.
        What it differentiates itself was made a leaf here.
        """
        return x.requires_grad and x.is_leaf and id(x) not in self.own and not private.is_mapped(x)


class _Guard(torch.overrides.TorchFunctionMode):
    """Refuses what a unit passed on unseen, where the function around it uses that: in every run, at little cost.

    Under a functorch level without plain autograd around it nothing else is in a graph and not wrapped.
    """

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if not _elsewhere.get():
            refuse_leaks((args, kwargs or {}))
            if func in _ASKS:
                _refuse_parts(func, args, kwargs or {})
            own = seen.get()
            if own is not None and own.copies and writes(func, kwargs):
                _refuse_writes(func, args, kwargs, {})
        return func(*args, **(kwargs or {}))


class _Backward(torch.overrides.TorchFunctionMode):
    """Refuses writes to params in users' backwards, before they are done."""

    def __init__(self, protected: Mapping[int, LeafOf]) -> None:
        super().__init__()
        self.protected = protected

    def begin(self, _: object) -> None:
        """As a hook before a node: what that runs is looked at, on the thread that it runs on."""
        self.__enter__()

    def end(self, *_: object) -> None:
        """As one behind it. An error takes the mode off by itself: what a thread has on is put back by autograd."""
        self.__exit__(None, None, None)

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        if args and writes(func, kwargs):
            _refuse_writes(func, args, kwargs, self.protected)
        return func(*args, **(kwargs or {}))


class OneLevel(_AsWritten):
    """Refuses, in a unit that more than one derivative goes through, what acts on the one alone that sees it.

    A hook of a tensor, or what `x.data` leaves out, belongs to the derivative that is the innermost as the unit runs.
    A unit runs again for each of them by itself, and would have it in all, or in others.
    """

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        differentiated = func in _OF_ONE_LEVEL and isinstance(args[0], torch.Tensor) and args[0].requires_grad
        # what only reads may be a library, such as a step within the unit
        if differentiated and (func in _HOOKS or not is_of_library(sys._getframe(1).f_globals.get("__name__"))):
            raise noted(
                ValueError(
                    f"Unit {self.unit!r} takes {name_of(func)!r} of a tensor that is differentiated{place_of()}, where "
                    "more than one derivative goes through it (torch.func.grad around it, fz.hvp, create_graph=True). "
                    "That acts on one of them alone, and a unit runs again for each. Compute the same by operations "
                    "(detach() for .data, an autograd.Function for a hook), or do it outside of units."
                )
            )
        return func(*args, **(kwargs or {}))


_OF_ONE_LEVEL = {
    *_HOOKS,
    *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.detach_, torch.detach_),
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined] # whose hooks are no operations
}


for _mode in (Watch, _Guard, _Backward, OneLevel):  # torch.compile in the function must not compile these
    _mode.__torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]


def _refuse_writes(func: Function, args: Operands, kwargs: Named, protected: Mapping[int, LeafOf]) -> None:
    """Refuses to write in place, or as `out`, to a leaf or to a copy that was read of one."""
    if func == SET_DATA and is_same_view(*args):
        return
    out = (kwargs or {}).get("out")
    for target in filter(pytree.is_tensor, pytree.flatten(args[:1] if out is None else out)[0]):
        leaf_of, leaf = protected.get(storage_of(target)), copy_of(target)
        what = leaf_of(target) if leaf_of is not None else None if leaf is None else f"Leaf {leaf.path!r}"
        if what is not None:
            raise noted(ValueError(writes_param(what, name_of(func), place_of())))


def _refuse_parts(func: Function, args: Operands, kwargs: Mapping[str, object]) -> None:
    """Refuses to tell the gradient by one of several tensors that a unit puts out: their ways inside are not known."""
    is_grad = func == torch.autograd.grad
    given = dict(zip(("outputs", "inputs") if is_grad else ("inputs",), args, strict=False)) | dict(kwargs)
    for x in pytree.flatten(given["inputs"])[0]:
        node = getattr(x, "grad_fn", None)
        op = getattr(node, "op", None)
        if node is None or not isinstance(op, Op):
            continue
        others = op.joint.get(x.output_nr, frozenset())
        if is_grad and others:  # those that what is differentiated depends on
            others = edges_to(pytree.flatten(given["outputs"])[0]) & {(node, other) for other in others}
        if others:
            raise noted(
                ValueError(
                    f"{name_of(func)!r} by one of {len(node.real)} tensors that {op.name} puts out, of shape "
                    f"{tuple(x.shape)}: another one depends on it inside, which is not seen outside. Differentiate "
                    "inside the unit, or compute the other one of it outside."
                )
            )


def is_watch(mode: object) -> bool:
    """Tells whether a torch function mode is one of this file's."""
    return isinstance(mode, (Watch, _Guard, _Backward, OneLevel))


def refuse_leaks(tree: object) -> None:
    """Refuses tensors of units' own graphs: those that a watch saw, and where one functorch level is alone all."""
    own, alone = seen.get(), None
    if own is None:
        return
    for x in pytree.flatten(tree)[0]:
        if isinstance(x, torch.Tensor) and not isinstance(x, Handle) and x.requires_grad:
            unit = own.unit_of(x)
            if unit is not None:
                raise noted(ValueError(leaked(x, unit)))
            if own.knows(x):
                continue
            alone = private.single_level() if alone is None else alone
            if alone and x.grad_fn is not None and not private.is_wrapper(x):
                refuse_foreign_leaves((x,), (), own.is_of_unit, lambda leaf: leaked(x, own.unit_of(leaf)))
                own.note(x, None)  # of a graph around the step, where it is a constant


def leaked(tensor: torch.Tensor, unit: str | None = None) -> str:
    which = f"unit {unit!r}" if unit else "a unit"
    return (
        f"A tensor of shape {tuple(tensor.shape)} that {which} computed is used outside of it, where its gradient "
        "would be lost: the unit passed it on in a way that cannot be seen (a class's attribute, an object of another "
        "library). Return it as an output, or keep it in one of the unit's arguments or its module."
    )


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Around a unit's call, which is none of the operations of the function that calls it."""
    mode = private.function_mode()
    if seen.get() is None and not isinstance(mode, _Guard):
        yield
        return
    with during(_elsewhere, True), private.without_function_mode() if isinstance(mode, _Guard) else _AS_IT_IS:
        yield


@contextlib.contextmanager
def watching_run(protected: Mapping[int, LeafOf] | None) -> Iterator[None]:
    """Around a run of a step's function; thoroughly where it is said what is protected."""
    alone = _Guard() if private.single_level() else _AS_IT_IS
    with during(seen, Seen()), Watch(None, protected) if protected is not None else alone:
        yield


@contextlib.contextmanager
def watching_pullback(outputs: Sequence[torch.Tensor], protected: Mapping[int, LeafOf]) -> Iterator[None]:
    """Around the pullback of what a thorough look was taken at: the backwards of users' Functions are looked at, too.

    Args:
        outputs: the graph's.
        protected: as of `Watch`; where it is empty nothing is looked at.
    """
    users = {node for node, _ in edges_to(outputs) if is_users(type(node))} if protected else ()
    if not users:
        yield
        return
    mode = _Backward(protected)
    as_written.begin(mode)
    # torch.autograd.grad itself would take the mode off
    handles = [register(node.register_prehook, mode.begin) for node in users]
    handles += [register(node.register_hook, mode.end) for node in users]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        as_written.end(mode)
