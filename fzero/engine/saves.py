"""What the graph of a run under torch.func saved: whoever writes to it before it is pulled back is refused.

Plain autograd counts such writes. torch.func wraps what comes from around it for each operation anew, and its outputs
when they leave it, so that it counts the wrappers' writes, and would go on with other values without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd import graph

from fzero.base import private
from fzero.engine.activations import refuse_writes

_HIDE = ("CopySlices", "CppFunction")  # nodes that do not tell what they saved: writes to views, torch._foreach_*


class Saves:
    """What the graph saved that leads to some outputs, once its forward has ended; nothing in that writes to it.

    Args:
        outputs: tensors of the level of torch.func that has made the graph.
        around: those that code outside of the run can write to; where a node hides what it saved, it is taken to be
            all of them.
    """

    def __init__(self, outputs: Iterable[torch.Tensor], around: Callable[[], Iterable[torch.Tensor]]) -> None:
        nodes = _nodes(outputs)
        saved = [x for node in nodes for x in _saved_by(node)]
        hidden = around() if any(type(node).__name__ in _HIDE for node in nodes) else ()
        found = {id(x): x for x in map(private.unwrapped, (*saved, *hidden))}
        self._counters = [(x, private.version(x), x.shape) for x in found.values()]

    def check(self) -> None:
        """Refuses what was written to since, in torch's words.

        Raises:
            RuntimeError: something was.
        """
        for x, version, shape in self._counters:
            if private.version(x) != version:
                refuse_writes(private.version(x), version, shape, "the values that this pullback needs")

    def let_go(self) -> None:
        """Counts on without what was saved, some of which goes before the rest is pulled back."""
        self._counters = [
            (private.counted(x.new_empty(0), x) if x.layout == torch.strided else x, version, shape)
            for x, version, shape in self._counters
        ]


def _nodes(outputs: Iterable[torch.Tensor]) -> list[graph.Node]:
    todo = list(dict.fromkeys(x.grad_fn for x in outputs if x.grad_fn is not None))
    seen = {*todo}
    for node in todo:  # which grows
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                todo.append(next_node)
    return todo


def _saved_by(node: graph.Node) -> Iterator[torch.Tensor]:
    """The tensors that a node saved. What hooks have put away is theirs: `unpack_hook` tells of them."""
    for raw, name in _names(type(node)):
        saved = getattr(node, raw)
        several = isinstance(saved, (tuple, list))
        if any(each.unpack_hook is not None for each in (saved if several else (saved,))):
            continue
        try:
            found = getattr(node, name)
        except RuntimeError:  # written to by the function itself: torch says so, if the pullback comes to it
            continue
        yield from [x for x in (found if several else (found,)) if x is not None]


@functools.cache
def _names(kind: type) -> tuple[tuple[str, str], ...]:
    """The attributes of nodes of a class that are saved tensors: as torch keeps them, and as tensors."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved_")]
    by_functions = ("_raw_saved_tensors", "saved_tensors")
    if by_functions[0] in raw and hasattr(kind, by_functions[1]):
        return (by_functions,)
    return tuple([(name, name.removeprefix("_raw")) for name in raw])
