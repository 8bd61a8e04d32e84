"""The weights of a call's microbatches, of which every rank knows the sum before the first of them runs."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch

from fzero.base import private, pytree
from fzero.base.arguments import named
from fzero.base.context import jitting
from fzero.comm.axis import Axis
from fzero.state.train_state import TrainState
from fzero.table.counting import Counts
from fzero.table.microbatch import Microbatches

Parts = Sequence[Sequence[object]]


def counted(micro: Microbatches, state: TrainState | None, inputs: Sequence[object]) -> tuple[Parts, Counts]:
    """The inputs of each microbatch of a call, and what they count.

    Args:
        state: whose ranks tell each other weights, if there are any, and what is wrong with them.
    """
    if micro.weights is not None and jitting.get() is not None:
        raise ValueError(
            "jit: a step that the function calls weighs its microbatches (weights=), which decides by values, and the "
            "graph of a function has none. Take fz.jit(step), or leave weights= out and weigh in the loss."
        )
    counts, error = Counts(), None
    own = [math.nan] * micro.count
    parts: Parts = ()
    try:
        parts = micro.split(inputs)
        if micro.count > 1:
            counts.split(micro.examples(inputs))
        own = own if micro.weights is None else own_weights(micro, parts)
    except Exception as caught:  # of which the others are told
        if micro.weights is None or state is None or state.params.axis.ranks == 1:
            raise
        error = caught
    if micro.weights is not None:
        assert state is not None
        share(counts, state.params.axis, state.params.device, own, error)
    return parts, counts


def share(
    counts: Counts, axis: Axis, device: torch.device, own: list[float], error: Exception | None = None
) -> None:
    """Notes what microbatches count by these weights, of which all ranks of a state tell each other the sums.

    Args:
        axis, device: the state's.
        own: NaN where there is an error.
    """
    with private.below_transforms():
        sums = torch.tensor(own, dtype=torch.float64, device=device)
        means = axis.mean(sums, "the weights of microbatches").tolist()
    if any(map(math.isnan, means)):
        raise _told(axis, error)
    counts.weigh(own, means)


def _told(axis: Axis, error: Exception | None) -> Exception:
    """This rank's error, or in other words that of another one."""
    said = axis.exchange("" if error is None else f"{type(error).__name__}: {error}", "the weights of microbatches")
    if error is not None:
        return error
    rank, text = next((i, text) for i, text in enumerate(said) if text)
    return (TypeError if text.startswith("TypeError") else ValueError)(f"on data rank {rank}: {text}")


def own_weights(micro: Microbatches, parts: Parts) -> list[float]:
    """The weights of this rank's microbatches, outside of any derivative, or inside of one through which they are seen
    to be no constants."""
    leaves = [x for x in pytree.leaves(parts) if isinstance(x, torch.Tensor)]
    with contextlib.ExitStack() as outside:
        if all(private.transform_of(x) is None for x in leaves):
            outside.enter_context(private.below_transforms())
            outside.enter_context(torch.no_grad())
        return micro.weights_at([[pytree.map_leaves(_plain, x) for x in part] for part in parts])


def _plain(x: object) -> object:
    if not isinstance(x, torch.Tensor):
        return x
    if private.is_mapped(x):
        raise TypeError(
            f"weights: got {named(private.unwrapped(x))} that torch.func.vmap maps over, expected inputs that all of "
            "the map have alike: each would have weights of its own. Map over the state alone, or leave weights= out."
        )
    return private.unwrapped(x).detach() if private.transform_of(x) is None else x
