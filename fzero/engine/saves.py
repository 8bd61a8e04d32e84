"""What the graph of a run under torch.func saved: whoever writes to it before its node is pulled back is refused.

Plain autograd counts such writes. torch.func wraps what comes from around it for each operation anew, and its outputs
when they leave it, so that it counts the wrappers' writes, and would go on with other values without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.autograd import graph

from fzero.base import private
from fzero.base.edges import is_users
from fzero.base.hooks import Registrations, register
from fzero.base.node import Op
from fzero.engine.activations import refuse_writes

_HIDE = ("CopySlices", "CppFunction")  # nodes that do not tell what they saved: writes to views, torch._foreach_*


class Saves:
    """What the graph saved that leads to some outputs, once its forward has ended; nothing in that writes to it.

    Args:
        outputs: tensors of the level of torch.func that has made the graph.
        around: those that code outside of the run can write to; where a node hides what it saved, it is taken to be
            all of them.
        hooks: made before the run.
        once: whether there is one pullback, at once, which nobody differentiates.
        acts: whether a pullback runs users' code that does not show in this graph: within units.
    """

    def __init__(
        self,
        outputs: Iterable[torch.Tensor],
        around: Callable[[], Iterable[torch.Tensor]],
        hooks: Registrations,
        acts: bool,
        once: bool = False,
    ) -> None:
        outputs = [*outputs]
        nodes = _nodes(outputs)
        self._hooks, self._looks = hooks, False
        kinds = {type(node) for node in nodes}
        self._acts = acts or any(is_users(kind) and kind.__name__ != "CopySlices" for kind in kinds)  # torch's own
        hides = any(kind.__name__ in _HIDE for kind in kinds)
        hidden = [*around(), *_beside(outputs, nodes)] if hides else ()
        apart, saved = [], list[torch.Tensor]()
        for node in nodes:
            if not _names(type(node)):
                continue
            op = getattr(node, "op", None)
            if isinstance(op, Op) and not op.runs_again:
                apart.append(node)
            else:
                saved += _saved_by(node)
        self._counters = _counters_of(saved)
        known = {id(x) for x, *_ in self._counters}
        self._counters += [each for each in _counters_of(hidden, _HIDDEN) if id(each[0]) not in known]
        self._of_units = [] if once else _counters_of([x for node in apart for x in _saved_by(node)])

    def check(self, runs_again: bool = False) -> None:
        """Refuses what was written to since, in torch's words.

        Args:
            runs_again: whether units run again that keep graphs of their own, which look at what they saved themselves.

        Raises:
            RuntimeError: something was.
        """
        _check((*self._counters, *(self._of_units if runs_again else ())))

    def look_on(self, outputs: Iterable[torch.Tensor], runs_again: bool) -> None:
        """Has the same checked before each node of the graph from now on, where users' code may run in a pullback (a
        backward of their own, a hook). To be called right after `check`."""
        if self._looks or not (self._acts or self._hooks.any()):
            return
        self._looks, nodes = True, _nodes(outputs)
        every = _without_memory(self._counters) if any(map(_hides, nodes)) else []
        for node in nodes:
            needs = runs_again or not _is_apart(node)
            own = every if _hides(node) else _counters_of(_saved_by(node)) if needs else []
            if own:
                register(node.register_prehook, _Look(own))

    def check_rest(self) -> None:
        """`check` before the second half of a pullback, in whose first half somebody may have written to what nobody
        needs any more."""
        if not self._looks:
            self.check()

    def let_go(self) -> None:
        """Counts on without what was saved, some of which goes before the rest is pulled back."""
        self._counters, self._of_units = _without_memory(self._counters), []


_NEEDED = "the values that this pullback needs"
_HIDDEN = (
    "the values that a write to a view (x[...] = y) or torch._foreach_* in the function may have kept (they do not "
    "tell, so that all that it is given and gives is looked at)"
)
# what counts the writes to a tensor, how many are right, its shape, and of what it is one
Counter = tuple[torch.Tensor, int, torch.Size, str]


def _counters_of(tensors: Iterable[torch.Tensor], what: str = _NEEDED) -> list[Counter]:
    found = {id(x): x for x in map(private.unwrapped, tensors)}
    return [(x, private.version(x), x.shape, what) for x in found.values()]


def _without_memory(counters: Iterable[Counter]) -> list[Counter]:
    return [
        (private.counted(x.new_empty(0), x) if x.layout == torch.strided else x, version, shape, what)
        for x, version, shape, what in counters
    ]


def _check(counters: Iterable[Counter]) -> None:
    for x, version, shape, what in counters:
        if private.version(x) != version:
            refuse_writes(private.version(x), version, shape, what)


class _Look:
    """A hook before a node, which leads nowhere: the graph goes as it would without, and what this knows with it."""

    def __init__(self, counters: list[Counter]) -> None:
        self._counters = counters

    def __call__(self, _: object) -> None:
        _check(self._counters)
        if not private.keeps_graph():
            self._counters = []  # whose tensors go with the node


def _hides(node: graph.Node) -> bool:
    return type(node).__name__ in _HIDE


def _beside(outputs: Iterable[torch.Tensor], nodes: Iterable[graph.Node]) -> list[torch.Tensor]:
    """The outputs that nodes which do not tell it may have saved: those that they made or took, and views of these."""
    hiding = {node for node in nodes if _hides(node)}
    near = hiding | {taken for node in hiding for taken, _ in node.next_functions if taken is not None}
    made = [(x, x.grad_fn) for x in outputs if x.grad_fn is not None]
    return [x for x, node in made if node in near or any(taken in hiding for taken, _ in node.next_functions)]


def _is_apart(node: graph.Node) -> bool:
    """Tells whether it is of a unit that keeps a graph of its own, and needs what it saved in other runs only."""
    op = getattr(node, "op", None)
    return isinstance(op, Op) and not op.runs_again


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
