"""Trees of states, tensors and values, taken apart for a graph and put together again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from fzero.base import pytree
from fzero.state.sharded import Sharded, is_item
from fzero.state.train_state import TrainState


class Opened:
    """A tree of states, tensors and values, taken apart: what a graph takes, and what its signature is.

    Counts (a state's updates, an optimizer's) are 0-d tensors of the graph, as Python's numbers are.

    Args:
        numbers: whether Python's numbers become tensors, too.

    Attributes:
        tensors: all of them.
        counts: the places of the counts among them.
        seen: whether it is known which leaves are numbers of Python.
        form: what two trees of one signature have in common.
    """

    def __init__(self, tree: object, numbers: bool) -> None:
        leaves, self.spec = pytree.flatten(tree, is_leaf=is_state)
        for node in pytree.flatten(tree, is_leaf=lambda x: is_state(x) or is_item(x))[0]:
            scaled = isinstance(node, Sharded) and node.scale != 1.0
            if isinstance(node, pytree.Count) or scaled:
                what = "grads with a loss scale" if scaled else "an optimizer's count outside of its state"
                raise ValueError(
                    f"jit: got or returns {what}, which a function's graph would not see change. Give or "
                    "return the state."
                )
        self.tensors: list[torch.Tensor] = []
        self.counts: set[int] = set()  # places
        self.seen = False
        self._makers: list[tuple[str, Any]] = []
        forms: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, TrainState):
                own, spec = torch_pytree.tree_flatten(leaf)
                _need_plain_counts(leaf)
                counts = [_as_count(x) for x in _counts_of(leaf)]
                self._makers.append(("state", (spec, len(own), len(counts), [type(x) for x in _counts_of(leaf)])))
                begin = len(self.tensors) + len(own)
                self.counts.update(range(begin, begin + len(counts)))
                self.tensors += [*own, *counts]
                forms.append((spec, leaf.seed, leaf.signature, len(counts)))
            elif isinstance(leaf, torch.Tensor):
                self._makers.append(("tensor", None))
                self.tensors.append(leaf)
                forms.append("tensor")
            elif numbers and type(leaf) in (int, float):
                self._makers.append(("tensor", None))
                self.tensors.append(as_number(leaf))
                forms.append(type(leaf))
            else:
                self._makers.append(("value", leaf))
                forms.append(value_of(leaf))
        self.form = self.spec, tuple(forms)

    def see(self, tree: object) -> None:
        """Takes from a result without a graph which of its leaves are numbers of Python."""
        self.seen = True
        for i, leaf in enumerate(pytree.flatten(tree, is_leaf=is_state)[0]):
            if type(leaf) in (bool, int, float) and self._makers[i][0] == "tensor":
                self._makers[i] = "number", type(leaf)

    def made(self, tensors: Sequence[torch.Tensor], values: bool) -> Any:
        """The tree again, with other tensors.

        Args:
            values: whether counts become numbers.
        """
        rest = iter(tensors)
        return pytree.unflatten(self.spec, [self._one(*maker, rest, values) for maker in self._makers])

    def _one(self, kind: str, about: Any, rest: Iterator[torch.Tensor], values: bool) -> object:
        if kind == "value":
            return about
        if kind == "tensor":
            return next(rest)
        if kind == "number":
            return about(next(rest))
        spec, own, counts, _ = about
        state: TrainState = torch_pytree.tree_unflatten([next(rest) for _ in range(own)], spec)
        every = [next(rest) for _ in range(counts)]
        return _with_counts(state, [int(x) for x in every] if values else every)


def is_state(x: object) -> bool:
    return isinstance(x, TrainState)


def value_of(x: object) -> object:
    """A static value, as a part of a signature."""
    try:
        hash(x)
    except TypeError as error:
        raise ValueError(
            f"jit: got a {type(x).__name__} among the inputs, which is no tensor and cannot be hashed, so that nobody "
            "sees when it changes. Give a tensor, or a tuple."
        ) from error
    return type(x), repr(x) if isinstance(x, float) else x


def _need_plain_counts(state: TrainState) -> None:
    nodes = pytree.flatten((state.moments, state.extra), is_leaf=is_item)[0]
    if any(isinstance(x, pytree.Count) and (x.missed or x.paused) for x in nodes):
        raise ValueError(
            "jit: got a function of a state whose leaves have been frozen for a while and count their own updates, "
            "which a function's graph does not take. Take fz.jit(step)."
        )


def as_number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64 if type(x) is float else torch.int64, device="cpu")


def _as_count(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64, device="cpu")


def _counts_of(state: TrainState) -> list[Any]:
    nodes = pytree.flatten((state.moments, state.extra), is_leaf=is_item)[0]
    return [state.step, *[x.value for x in nodes if isinstance(x, pytree.Count)]]


def _with_counts(state: TrainState, counts: Sequence[Any]) -> TrainState:
    step, *others = counts
    rest = iter(others)

    def one(x: object) -> object:
        return pytree.Count(next(rest), x.missed, x.paused) if isinstance(x, pytree.Count) else x

    moments, extra = pytree.map(one, (state.moments, state.extra), is_leaf=is_item)
    return state.changed(moments=moments, extra=extra, step=step)
