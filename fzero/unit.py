"""fz.unit, fz.name and fz.sum_over: functions of a part of the params as units, and what they compute by name."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool, wrong
from fzero.base.replay import naming, tracing
from fzero.comm.axis import Axis
from fzero.engine.dispatch import call_unit
from fzero.engine.traversal import origins_of, tensor_axis_of
from fzero.parallel import maps
from fzero.state.sharded import is_sharded
from fzero.state.sliced import in_order
from fzero.table.handle import Handle
from fzero.table.needs import need_function
from fzero.table.slices import Slices

T = TypeVar("T")
Fn = TypeVar("Fn", bound=Callable[..., object])


def unit(fn: Fn, prove: bool = True) -> Fn:
    """Makes a function a unit: what params are gathered, freed and recomputed for. Usually a transformer block.

    In a step, call it with a subtree of the params: `block(params["blocks"][0], x)`. Its leaves are gathered for this
    call. Outside of a step it is the plain function, and so is a unit inside a unit.

    - It is pure: it depends on its arguments, on constants that it closes over and on torch's random numbers, and
      writes to nothing that it did not make. Its first run proves it, in which it runs twice. `fz.check_pure` proves it
      at any time.
    - Arguments and outputs are pytrees, dataclasses too. What it may change is registered: `fz.register_carrier`.
    - What has a gradient is an argument. Other values leave it by `fz.collect`.
    - It may change what it made in place, differentiate and hook it, and use what `torch.func` refuses elsewhere, such
      as `torch.utils.checkpoint` and old-style autograd Functions.
    - To pickle a step, decorate functions at the top of a module.

    Args:
        fn: `fn(params_subtree, *args, **kwargs)`, a pure function.
        prove: `False` takes it out of the proof, and its first run runs it once: if it counts, prints or measures on
            purpose. Its results must be right nevertheless. `fz.check_pure` lists such units.

    Returns:
        A function with the arguments and outputs of `fn`. In a step, its first call raises a ValueError if `fn` is not
        pure. It names the unit, your file and line, and what to write instead.

    Example:
        >>> block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
        >>> block({"w": torch.eye(2)}, torch.zeros(1, 2))
        tensor([[0., 0.]])
    """
    need_function(fn, "unit")
    need_bool(prove, "unit", "prove")

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        return call_unit(fn, args, kwargs, prove=prove)

    return cast(Fn, call)


def name(x: T, name: str) -> T:
    """Names a tensor inside a unit, so that `fz.remat(step, save=...)` can keep it instead of recomputing it.

    Without such a step it does nothing. One name may be given to several tensors, in one unit and in others.

    Args:
        x: a tensor. A view stands for all of the memory that it is a view of.
        name: such as `"qkv"`.

    Returns:
        `x` itself.

    Raises:
        TypeError: `x` is no tensor, or `name` is no string.

    Example:
        >>> @fz.unit
        ... def block(p, x):
        ...     return torch.tanh(fz.name(x @ p["w"], "hidden"))
        >>> block({"w": torch.eye(2)}, torch.zeros(1, 2))
        tensor([[0., 0.]])
    """
    if torch.compiler.is_dynamo_compiling():
        return x
    if not isinstance(x, torch.Tensor):
        raise wrong("name", "x", x, "a tensor")
    if not isinstance(name, str):
        raise wrong("name", "name", name, "a name, such as 'qkv'")
    run, graph = tracing.get(), naming.get()
    if run is not None:
        run.name(x, name)
    if graph is not None:
        graph(x.detach(), name)
    return x


def sum_over(params: object, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Sums `fn(leaf)` over all leaves of a tree of params: for regularisers in a loss, such as weight decay.

    Inside a step's function it gathers one unit at a time. `fn` gets whole leaves, even those that `fz.shard_tensor`
    cuts, and the sum is the same on all ranks of that axis. Outside of a step it is the plain sum.

    Args:
        params: the params that the step's function got, or any part of them.
        fn: `fn(leaf)` returns a 0-d tensor.

    Returns:
        A 0-d tensor, differentiable.

    Raises:
        TypeError: the tree has no tensor, or something else than tensors.
        ValueError: `fn` returns no 0-d tensor. Reduce it, e.g. with `.sum()`.

    Example:
        >>> fz.sum_over({"a": torch.ones(2), "b": [torch.ones(3)]}, lambda leaf: leaf.square().sum())
        tensor(5.)
    """
    need_function(fn, "sum_over")
    leaves = [leaf for leaf in pytree.flatten(params, is_leaf=is_sharded)[0] if leaf is not None]
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise wrong("sum_over", "params", params, "a tree of tensors: the params of a step, or a part of them")
    groups: dict[str | None, list[int]] = {}
    for number, leaf in enumerate(leaves):
        groups.setdefault(leaf.unit if isinstance(leaf, Handle) else None, []).append(number)
    whole = _wholes(leaves)

    def summed(group: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
        total: Any = 0
        for number, leaf in zip(numbers, group, strict=True):
            value = fn(whole[number](leaf) if number in whole else leaf)
            if not isinstance(value, torch.Tensor) or value.ndim:
                got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"sum_over: fn(leaf): got {got}, expected a 0-d tensor. Reduce it, e.g. .sum().")
            total = total + value
        return total

    parts = []
    for unit, numbers in groups.items():
        args = [leaves[number] for number in numbers], numbers
        parts.append(summed(*args) if unit is None else call_unit(summed, args, {}))
    return functools.reduce(torch.add, parts)


def _wholes(leaves: Sequence[torch.Tensor]) -> dict[int, Callable[[torch.Tensor], torch.Tensor]]:
    """The numbers of leaves that are cut over a tensor axis, and what makes each of them whole."""
    layout, origins = origins_of(leaves)
    if layout is None or layout.tensor[1] == 1:
        return {}
    rows = [layout.rows[abs(origin) - 1] if origin else None for origin in origins]
    ax, *_ = tensor_axis_of(leaves)
    return {
        number: functools.partial(_joined, row.slices, ax)
        for number, row in enumerate(rows)
        if row is not None and row.slices is not None
    }


def _joined(slices: Slices, ax: Axis, own: torch.Tensor) -> torch.Tensor:
    """A whole leaf of the ranks' slices, the same on all of them."""
    full = maps.gather(own, ax, slices.dim, slices.sizes(ax.size))
    return in_order(slices.ranges(ax.size), full, slices.dim)
