"""What a trace depends on: trees of states, tensors and values, functions and what they close over, modules."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as torch_pytree

from fzero.base import private, pytree
from fzero.base.rebound import parts_of
from fzero.comm.axis import Axis
from fzero.graph.numbers import NUMBERS, as_tensor, number_of
from fzero.state.sharded import Sharded, is_item, map_trees
from fzero.state.train_state import TrainState
from fzero.table.spec import Spec

T = TypeVar("T")

_VALUES = (*NUMBERS, str, bytes, type(None), torch.dtype, torch.device, type, types.BuiltinFunctionType)
_LEAD_NOWHERE = frozenset({*_VALUES, torch.Tensor})
_UNSET = types.CellType()  # of a variable that has no value
_HOOKS = {name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called"))}
_OWN = {"_parameters", "_buffers", "_modules", "forward", *_HOOKS}


def meta_of(x: torch.Tensor) -> tuple[object, ...]:
    """What a trace depends on of a tensor."""
    return tuple(x.shape), x.stride(), x.dtype, x.device, number_of(x)


def ambient_of(device: str) -> tuple[object, ...]:
    """What a trace depends on of what is set around it."""
    casts = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return *casts, torch.get_default_dtype(), torch.is_grad_enabled()


def value_of(x: object) -> object:
    """A static value, as a part of a signature: 1 is not True, and 0.0 is not -0.0, nor in a tuple or a dataclass."""
    try:
        hash(x)
    except TypeError as error:
        raise ValueError(
            f"jit: got a {type(x).__name__} among the inputs, which is no tensor and cannot be hashed, so that nobody "
            "sees when it changes. Give a tensor, or a tuple."
        ) from error
    own = closed_over(x) if callable(x) and type(x) not in _LEAD_NOWHERE else ()
    return _kind_of(x), None if isinstance(x, (float, complex)) else x, own


def _kind_of(x: object) -> object:
    """What values differ in that Python calls equal."""
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    if isinstance(x, (tuple, frozenset)):
        return type(x), *map(_kind_of, x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return type(x), *[_kind_of(getattr(x, field.name, None)) for field in dataclasses.fields(x)]
    return type(x)


class Identity:
    """Equal to itself alone; it keeps its object alive."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and other.value is self.value


@functools.lru_cache(64)
def order_of(structure: Identity) -> pytree.Spec:
    """A structure in the order of its dicts' entries, which equal ones may have in another."""
    spec: pytree.Spec = structure.value  # type: ignore[assignment]
    return pytree.ordered(pytree.unflatten(spec, range(spec.num_leaves)))[1]


def form_of(value: object) -> Hashable:
    """What a function, or what it closes over, is; equal forms are traced alike."""
    if isinstance(value, _VALUES):
        return value_of(value)
    if type(value) in (tuple, list):
        return type(value), *map(form_of, value)  # type: ignore[call-overload]
    if type(value) is dict:
        return dict, *[(form_of(k), form_of(v)) for k, v in value.items()]  # type: ignore[attr-defined]
    if type(value) in (set, frozenset):
        return type(value), frozenset(map(form_of, value))  # type: ignore[call-overload]
    module = getattr(value, "module", None)
    if isinstance(value, functools.partial) and isinstance(module, nn.Module):  # a module's call as a unit
        return "unit", _of_module(module)
    if isinstance(value, types.FunctionType) and not value.__defaults__ and not value.__kwdefaults__:
        return "function", value.__code__, closed_over(value), Identity(value.__globals__)
    return Identity(value)


def _of_module(module: nn.Module) -> Hashable:
    own = vars(module)
    if any(own.get(name) for name in _HOOKS):
        return Identity(module)
    attributes = [(name, form_of(value)) for name, value in own.items() if name not in _OWN]
    buffers = [(name, Identity(value)) for name, value in module._buffers.items()]
    children = [(name, None if x is None else _of_module(x)) for name, x in module._modules.items()]
    forward: Any = own.get("forward")
    while hasattr(forward, "__wrapped__") and _is_own(forward):  # the unit's own, around that of its class
        forward = forward.__wrapped__
    usual = forward is None or getattr(forward, "__func__", None) is type(module).forward
    return type(module), usual or Identity(forward), tuple(module._parameters), *attributes, *buffers, *children


def _is_own(forward: object) -> bool:
    name = getattr(forward, "__globals__", {}).get("__name__", "")
    return name.startswith(("fzero.functional", "fzero.modules"))


def closed_over(value: object) -> Hashable:
    """What the variables hold now that functions close over, of all that a function or a step leads to."""
    out, todo, seen = list[Hashable](), [value], set[int]()  # once each, as functions may call themselves
    for each in todo:  # which grows
        if isinstance(each, types.FunctionType):
            for cell in each.__closure__ or ():
                held = cell if cell == _UNSET else cell.cell_contents
                out.append(value_of(held) if isinstance(held, _VALUES) else Identity(held))
        elif isinstance(each, types.MethodType):
            todo.append(each.__func__)
        elif isinstance(each, Spec):
            each = each.fn, each.optimizer, each.extras, each.microbatches.weights
        for part in (*parts_of(each), getattr(each, "__dict__", {}).get("__wrapped__")):  # as of a jitted function
            if type(part) not in _LEAD_NOWHERE and id(part) not in seen:
                seen.add(id(part))
                todo.append(part)
    return tuple(out)


# ---- trees, taken apart for a graph and put together again


class Flat:
    """A tree of states, tensors and values, taken apart: what a graph takes, and what its signature is.

    Counts (a state's updates, an optimizer's) and seeds are 0-d tensors of the graph. Other numbers are values, but
    for tensors that are known for one.

    Attributes:
        tensors: all of them.
        leaves: of each a number's type, a tensor's dtype, or None of states and values.
        counts: the places of the counts among the tensors.
        axes: those of its states and trees, one of each component; `updates`, how many its state has had.
        form: what two trees of one signature have in common.
    """

    def __init__(self, tree: object) -> None:
        leaves, self.spec = pytree.ordered(tree, is_leaf=is_state)
        self.axes, self.updates = list[Axis](), list[int]()
        for node in pytree.flatten(tree, is_leaf=lambda x: is_state(x) or is_item(x))[0]:
            scaled = isinstance(node, Sharded) and node.scale != 1.0
            if isinstance(node, pytree.Count) or scaled:
                what = "grads with a loss scale" if scaled else "an optimizer's count outside of its state"
                raise ValueError(
                    f"jit: got or returns {what}, which a function's graph would not see change. Give or "
                    "return the state."
                )
            axis = node.params.axis if is_state(node) else node.axis if isinstance(node, Sharded) else None
            if axis is not None and axis.identity not in [own.identity for own in self.axes]:
                self.axes.append(axis)
                self.updates.append(getattr(node, "step", 0))
        self.tensors: list[torch.Tensor] = []
        self.counts = set[int]()
        self._makers: list[Callable[[Iterator[torch.Tensor], bool], object]] = []  # of each leaf
        forms: list[object] = []
        for leaf in leaves:
            if is_state(leaf):
                own, spec = torch_pytree.tree_flatten(leaf)
                counts = _counts_of(leaf)
                self.counts.update(range(begin := len(self.tensors) + len(own), begin + len(counts)))
                self.tensors += [*own, *counts]
                self._makers.append(functools.partial(_state, spec, len(own)))
                place = [axis.identity for axis in self.axes].index(leaf.params.axis.identity)
                nodes = [(x.missed, x.paused) if isinstance(x, pytree.Count) else x for x in _nodes(leaf)]
                others = [value_of(x) for x in nodes if type(x) in (tuple, int, float, bool, str)]
                order = order_of(Identity(leaf.params.structure))
                forms.append((spec, order, leaf.signature, place, *others))
            elif isinstance(leaf, torch.Tensor):
                self.tensors.append(leaf)
                self._makers.append(lambda rest, _: next(rest))
                forms.append(number_of(leaf) or leaf.dtype)
            else:
                self._makers.append(lambda _, __, leaf=leaf: leaf)
                forms.append(value_of(leaf))
        self.leaves = [None if isinstance(form, tuple) else form for form in forms]
        self.form = self.spec, tuple(forms), tuple([(axis.ranks, axis.data_rank) for axis in self.axes])

    def made(self, tensors: Sequence[torch.Tensor], values: bool) -> Any:
        """The tree again, with other tensors.

        Args:
            values: whether counts, and what is known for a number, become numbers.
        """
        rest = iter(tensors)
        leaves = [maker(rest, values) for maker in self._makers]
        if values:
            leaves = [kind(x) if callable(kind) else x for kind, x in zip(self.leaves, leaves, strict=True)]
        return pytree.unflatten(self.spec, leaves)


def over_axes(tree: T, axes: Mapping[object, Axis]) -> T:
    """A result over other axes, by the identities of those that it was traced over."""
    same = all(axis.identity == identity for identity, axis in axes.items())

    def one(x: object) -> object:
        if isinstance(x, TrainState):
            own = map_trees(one, (x.params, x.grads, x.moments, x.extra))
            return x if same else x.changed(**dict(zip(("params", "grads", "moments", "extra"), own, strict=True)))
        return x.replaced(axis=axes.get(x.axis.identity, x.axis)) if isinstance(x, Sharded) else x

    return pytree.map(one, tree, is_leaf=lambda x: isinstance(x, (TrainState, Sharded)))


def is_state(x: object) -> TypeGuard[TrainState]:
    return isinstance(x, TrainState)


def _nodes(state: TrainState) -> list[Any]:
    return pytree.flatten((state.moments, state.extra), is_leaf=is_item)[0]


def _counts_of(state: TrainState) -> list[torch.Tensor]:
    """The numbers of a state that each update changes, and its seed."""
    counts: list[Any] = [state.step, *[x.value for x in _nodes(state) if isinstance(x, pytree.Count)]]
    out = [x if pytree.is_tensor(x) else torch.tensor(float(x), dtype=torch.float64, device="cpu") for x in counts]
    out.append(as_tensor(state.seed))
    for i, x in enumerate(out):
        while private.is_wrapper(x) and private.level_of(x) < 0:  # of an aux of torch.func, which unwraps no counts
            out[i] = x = private.inner(x)
    return out


def _state(spec: Any, own: int, rest: Iterator[torch.Tensor], values: bool) -> TrainState:
    """A state of its tensors, and behind them of its counts and its seed."""
    state: TrainState = torch_pytree.tree_unflatten([next(rest) for _ in range(own)], spec)

    def count() -> Any:
        x: Any = next(rest)
        if values and getattr(x, "ndim", 0):
            raise ValueError(
                "jit: a state comes out of torch.vmap with a count of each member's own, where a state has one. Return "
                "its params, or leave jit out."
            )
        return int(x) if values else x

    def one(x: object) -> object:
        return pytree.Count(count(), x.missed, x.paused) if isinstance(x, pytree.Count) else x

    step = count()
    moments, extra = pytree.map(one, (state.moments, state.extra), is_leaf=is_item)
    return state.changed(moments=moments, extra=extra, step=step, seed=count())
