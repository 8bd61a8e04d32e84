"""fz.unit and fz.sum_over: functions of a part of the params as units."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fzero.base import pytree
from fzero.base.arguments import wrong
from fzero.capture.handle import Handle
from fzero.capture.surroundings import Surroundings
from fzero.engine.dispatch import call_unit
from fzero.state.sharded import is_sharded
from fzero.table.needs import need_function


def unit(fn: Callable[..., object]) -> Callable[..., Any]:
    """Makes `fn(params_subtree, *args, **kwargs)` a unit: the grain at which params are gathered, freed and recomputed.

    Called with the leaves of a step's params it gathers them for this one use; outside of a step it is `fn`. It may use
    what functorch refuses elsewhere, such as `torch.utils.checkpoint` and old-style Functions.
    Arguments and outputs may be any pytrees and objects; what the function changes in them is changed for its caller.
    It may close over tensors and over objects that hold some: each that it reads is one of its inputs. A unit inside a
    unit is a plain call. As of any decorated function, pickle takes its name: `@fz.unit` at module level.

    Example:
        >>> block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
        >>> block({"w": torch.eye(2)}, torch.zeros(1, 2))
        tensor([[0., 0.]])
    """
    need_function(fn, "unit")

    @functools.wraps(fn)
    def call(*args: object, **kwargs: object) -> Any:
        return call_unit(fn, args, kwargs)

    return call


def sum_over(params: object, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The sum of `fn(leaf)` over all leaves of a tree of params: a regulariser, such as a weight decay in the loss.

    Inside a step's function it gathers the leaves unit by unit, one unit at a time; elsewhere it is the plain sum.

    Args:
        params: the params that the step's function is given, or any part of them.
        fn: `fn(leaf) -> 0-d tensor`.

    Raises:
        ValueError: the tree has no tensor, or `fn` returns something else.

    Example:
        >>> fz.sum_over({"a": torch.ones(2), "b": [torch.ones(3)]}, lambda leaf: leaf.square().sum())
        tensor(5.)
    """
    need_function(fn, "sum_over")
    leaves = [leaf for leaf in pytree.flatten(params, is_leaf=is_sharded)[0] if leaf is not None]
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise wrong("sum_over", "params", params, "a tree of tensors: the params of a step, or a part of them")
    groups: dict[str | None, list[torch.Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.unit if isinstance(leaf, Handle) else None, []).append(leaf)

    def summed(group: list[torch.Tensor]) -> torch.Tensor:
        total: Any = 0
        for leaf in group:
            value = fn(leaf)
            if not isinstance(value, torch.Tensor) or value.ndim:
                got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"sum_over: fn(leaf): got {got}, expected a 0-d tensor. Reduce it, e.g. .sum().")
            total = total + value
        return total

    reached = Surroundings(fn)
    parts = [
        summed(own) if unit is None else call_unit(summed, (own,), {}, surroundings=reached)
        for unit, own in groups.items()
    ]
    return functools.reduce(torch.add, parts)
