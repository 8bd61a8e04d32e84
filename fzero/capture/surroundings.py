"""What a unit reaches beside its tensors: the containers and objects in its arguments, its closure and its module.

A unit is one node of the derivative, so what it reads and writes there must enter and leave the node with the rest. A
`Reach` finds these places. While the unit runs it fills them with the unit's own tensors; afterwards it puts back what
was there, and says what the unit changed, whose tensors become outputs of the node.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fzero.base import texts
from fzero.base.refusals import place_of
from fzero.capture.containers import Container, Content, Params, moves
from fzero.capture.contents import replaced
from fzero.capture.found import Found
from fzero.capture.handle import Handle


class Surroundings:
    """What a function or a module reaches, found once; at each call it is seen whether that is still so."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self._own = {id(m) for m in of.modules()} if isinstance(of, nn.Module) else set()
        self._kept: Found | None = None

    def found(self, seen: set[int]) -> Found:
        """What is there now, without what was seen before."""
        if self._kept is None or not self._kept.holds():
            self._kept = None
            found = self._search(())
            # what is kept alive is no tensor of a graph
            if found.settled and not any(isinstance(x, Handle) or moves(x) for x, _ in found.tensors):
                self._kept = found
                found.keep()
        else:
            found = self._kept
        return found if seen.isdisjoint(found.ids) else self._search(seen)

    def params(self, found: Found) -> list[Container]:
        """The params of modules around the unit."""
        around = [module._parameters for module in found.modules if id(module) not in self._own]
        return [container for own in around if own and (container := Params(own)).found]

    def _search(self, seen: Iterable[int]) -> Found:
        found = Found(seen)
        found.function(self.of, True)
        return found


class Reach:
    """The places that one call reaches.

    Args:
        arguments: all of whose tensors enter the unit.
        around: what the unit's function or module reaches.

    Attributes:
        tensors: that enter the unit: every one among the arguments, but compressed sparse ones; elsewhere those that
            something differentiates and that it reads.
        constants: the others, which stay where they are.
        handles: in the order in which they were found.
        generators: random ones, which a second run must find as the first one did.
        iterators: which a second run would find where the first one left them.
        long: lists, dicts and arrays that are too long to be put back.
    """

    def __init__(self, arguments: Sequence[object], around: Surroundings) -> None:
        own = Found()
        for value in arguments:
            own.search(value, True)
        other = around.found(own.ids)
        self._parts = (_Part(own), _Part(other))
        self.tensors: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []
        self.handles: list[Handle] = []
        self.generators = [*own.generators, *other.generators]
        self.iterators = [*own.iterators, *other.iterators]
        self.long = [*own.long, *other.long]
        self._elsewhere: list[torch.Tensor] = []  # in objects, and differentiated
        self._read: frozenset[int] = frozenset()
        for tensor, argument in (*own.tensors, *other.tensors):
            self._tensor(tensor, argument)
        for container in around.params(other):
            own.containers.append(container)
            for tensor in container.found.values():
                if not self.knows(tensor):
                    own.ids.add(id(tensor))
                    self._tensor(tensor, False)

    def _tensor(self, tensor: torch.Tensor, argument: bool) -> None:
        if isinstance(tensor, Handle):
            self.handles.append(tensor)
        elif tensor.is_nested:
            raise TypeError(
                f"A unit{place_of()} got or reaches a nested tensor, expected ordinary ones, whose memory can be "
                "told. Give it the values and the offsets, and make the nested tensor inside."
            )
        elif tensor.layout in texts.COMPRESSED:  # no operator under functorch takes it: it enters as it is
            if moves(tensor):
                raise TypeError(
                    f"A unit{place_of()} got or reaches a sparse tensor in compressed form (CSR, CSC, BSR, BSC) that "
                    "is differentiated, expected COO or dense ones. Give it x.to_sparse() or its values, and make the "
                    "compressed tensor inside."
                )
            self.constants.append(tensor)
        elif argument:
            self.tensors.append(tensor)
        elif moves(tensor):
            self._elsewhere.append(tensor)
        else:
            self.constants.append(tensor)

    def names(self, words: frozenset[str]) -> bool:
        """Whether some code that was seen names one of these words."""
        return any(not part.found.names.isdisjoint(words) for part in self._parts)

    def knows(self, value: Any) -> bool:
        return any(id(value) in part.found.ids for part in self._parts)

    @property
    def containers(self) -> list[Container]:
        return [container for part in self._parts for container in part.containers]

    # ---- what lies in objects

    def reads(self, places: frozenset[int]) -> None:
        """Lets those at these places enter the unit too."""
        own = [self._elsewhere[place] for place in sorted(places - self._read) if place < len(self._elsewhere)]
        self.tensors += own
        self._read |= places

    def stand_ins(self, make: Callable[[torch.Tensor, int], torch.Tensor]) -> dict[int, torch.Tensor]:
        """Id of every other -> what stands for it inside."""
        return {id(x): make(x, i) for i, x in enumerate(self._elsewhere) if i not in self._read}

    def unread(self, mapping: Mapping[int, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The others, each with what stands for it."""
        return [(x, mapping[id(x)]) for i, x in enumerate(self._elsewhere) if i not in self._read]

    # ---- filling, and seeing what changed

    def fill(self, mapping: Mapping[int, torch.Tensor]) -> Filling:
        """Puts the unit's own tensors into the places, which are as they were found; what was put, for `put_again`."""
        for part in self._parts:
            part.fill(mapping)
        return [(part, dict(part.entered)) for part in self._parts if part.entered]

    def entered(self, container: Container) -> Content:
        """What a container was filled with."""
        return next((own for part in self._parts if (own := part.entered.get(id(container)))), container.found)

    def changes(self) -> list[tuple[Container, Content]]:
        """The containers that are not as they were filled, each with its content."""
        return [change for part in self._parts for change in part.changes()]

    def leave(self, stays: Sequence[Container] = ()) -> None:
        """After `changes`: puts back what was found, but for some."""
        for part in self._parts:
            if part.differs:
                part.restore([(c, c.found) for c in part.containers if c not in stays])

    def restore(self) -> None:
        """Puts back what was found."""
        for part in self._parts:
            part.restore()

    def clear(self) -> Before:
        """Puts back what was found, for a second run at any time later; what was there, for `put_back`."""
        before = [(part, part.now()) for part in self._parts]
        for part, contents in before:
            if contents is not None:
                part.restore()
        return before


class _Part:
    """The containers of one search, during one call.

    Attributes:
        entered: id of a container -> what it was filled with, where that is not what was found.
        differs: whether anything was not as it was found when `changes` was asked for.
    """

    def __init__(self, found: Found) -> None:
        self.found = found
        self.containers = found.containers
        self.entered: dict[int, Content] = {}
        self.differs = False

    def is_as_found(self) -> bool:
        if not self.entered and self.found.holds():
            return True
        known = {id(container.of) for container in self.containers}
        hooks = [one for one in self.found.vacant if one and id(one) not in known]
        self.containers = [*self.containers, *map(_once_empty, hooks)]
        return False

    def fill(self, mapping: Mapping[int, torch.Tensor]) -> None:
        for container in self.found.exchanging:
            content = {key: replaced(value, mapping) for key, value in container.found.items()}
            if not all(map(operator.is_, content.values(), container.found.values())):
                container.write(content)
                self.entered[id(container)] = content

    def changes(self) -> list[tuple[Container, Content]]:
        self.differs = not self.is_as_found()
        if not self.differs:
            return []
        return [
            (container, now)
            for container in self.containers
            if container.observed
            and (now := container.differs(self.entered.get(id(container), container.found))) is not None
        ]

    def now(self) -> list[tuple[Container, Content]] | None:
        """What is in the containers at this moment; None for what was found there."""
        return None if self.is_as_found() else [(container, container.read()) for container in self.containers]

    def restore(self, contents: Iterable[tuple[Container, Content]] | None = None) -> None:
        """Puts back what was found, or other contents."""
        if contents is None and not self.is_as_found():
            contents = [(container, container.found) for container in self.containers]
        for container, content in contents or ():
            container.put(content)
        self.entered = {}


Before = list[tuple[_Part, list[tuple[Container, Content]] | None]]
Filling = list[tuple[_Part, dict[int, Content]]]


def put_back(before: Before) -> None:
    """Puts the places back to what they were before `Reach.clear`."""
    for part, contents in before:
        part.restore(contents)


def put_again(filling: Filling) -> list[tuple[Container, Content, Content]]:
    """Puts the tensors that the unit was run with into the places, where parts of it may run again, for `take_out`.

    Whatever else such a part (of torch.utils.checkpoint, a hook) reads it finds as it is at that time, and what it
    writes stays: it is so in plain torch too.
    """
    put = []
    for part, entered in filling:
        for container in part.containers:
            own = entered.get(id(container))
            if own is None:
                continue
            now = container.read()
            inner = {k: own[k] for k, x in now.items() if k in own and own[k] is not x and x is container.found.get(k)}
            if inner:
                container.write({**now, **inner})
                put.append((container, now, inner))
    return put


def take_out(put: Sequence[tuple[Container, Content, Content]]) -> None:
    for container, before, inner in put:
        now = container.read()
        container.write({k: before[k] if k in inner and x is inner[k] else x for k, x in now.items()})


def _once_empty(hooks: object) -> Container:
    container = Container(hooks)
    container.found = {}
    return container
