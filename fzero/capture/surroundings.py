"""The containers and objects that a unit reaches beside its tensors: in its arguments, its closure and its module.

A unit is one node of the derivative, so what it reads and writes there must enter and leave the node with the rest. A
`Reach` finds these places. While the unit runs it fills them with the unit's own tensors; afterwards it puts back what
was there, and says what the unit changed, whose tensors become outputs of the node.
"""

from __future__ import annotations

import contextvars
import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from fzero.base import texts
from fzero.base.context import variables
from fzero.base.refusals import place_of
from fzero.capture.containers import Container, Content, Params, moves
from fzero.capture.contents import replaced
from fzero.capture.found import Found
from fzero.capture.handle import Handle, Valueless

Filling = Sequence[tuple[Container, Content]]


class Surroundings:
    """Finds once what a function or a module reaches, and looks at each call whether that is still so."""

    def __init__(self, of: object) -> None:
        self.of = of
        self._own = {id(m) for m in of.modules()} if isinstance(of, nn.Module) else set()
        self._kept: Found | None = None

    def found(self, seen: set[int]) -> Found:
        """Returns what is there now, without what was seen before."""
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

    def buffers(self, modules: Iterable[nn.Module]) -> list[torch.Tensor]:
        """Those of modules that a function reaches; of one that is a function itself they are its own matter."""
        if isinstance(self.of, nn.Module):
            return []
        return [x for module in modules for x in module._buffers.values() if x is not None]

    def _search(self, seen: Iterable[int]) -> Found:
        found = Found(seen)
        found.function(self.of, True)
        return found


class Reach:
    """The places that one call reaches: in its arguments, in context variables, around its function or module."""

    def __init__(self, arguments: Sequence[object], around: Surroundings) -> None:
        own = Found()
        for value in arguments:
            own.search(value, True)
        for value in _in_context():
            own.search(value, False)
        other = around.found(own.ids)
        self._founds = (own, other)
        self._entered: dict[int, Content] = {}  # id of a container -> what it was filled with
        self._filled: set[Found] = set()
        self._looked_at: list[Container] = []
        # those that enter the unit: all among the arguments, elsewhere those that are differentiated and that it reads
        self.tensors: list[torch.Tensor] = []
        self.constants: list[torch.Tensor] = []  # the others, which stay where they are; compressed sparse ones too
        self.handles: list[Handle] = []
        self.generators = [*own.generators, *other.generators]
        self.iterators = [*own.iterators, *other.iterators]
        self.long = [*own.long, *other.long]
        self._elsewhere: list[torch.Tensor] = []  # in objects, and differentiated
        self._read: frozenset[int] = frozenset()
        for tensor, argument in (*own.tensors, *other.tensors):
            self._tensor(tensor, argument)
        for tensor in around.buffers((*own.modules, *other.modules)):
            if not self.knows(tensor):
                self._tensor(tensor, False)
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
        """Tells whether some code that was seen names one of these words."""
        return any(not found.names.isdisjoint(words) for found in self._founds)

    def knows(self, value: object) -> bool:
        return any(id(value) in found.ids for found in self._founds)

    def is_alone(self, tensor: torch.Tensor) -> bool:
        """Tells whether a tensor lies in no object, but in tuples at most, and has nothing set on it."""
        if vars(tensor):
            return False
        mapping = {id(tensor): tensor.new_empty(0)}
        values = [value for found in self._founds for own in found.exchanging for value in own.found.values()]
        return all(replaced(value, mapping) is value for value in values)

    def let_go(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        """Lets go of tensors that lie in no object, for others in their places."""
        own = self._founds[0]
        own.tensors = [(stand_ins.get(id(x), x), argument) for x, argument in own.tensors]
        self.tensors = [stand_ins.get(id(x), x) for x in self.tensors]
        own.ids -= stand_ins.keys()
        own.ids |= {id(x) for x in stand_ins.values()}

    def reads(self, places: frozenset[int]) -> None:
        """Lets those at these places enter the unit too."""
        self.tensors += [x for i, x in enumerate(self._elsewhere) if i in places - self._read]
        self._read |= places

    @property
    def unread(self) -> list[tuple[int, torch.Tensor]]:
        """The others, each with its place."""
        return [(i, x) for i, x in enumerate(self._elsewhere) if i not in self._read]

    def fill(self, mapping: Mapping[int, torch.Tensor]) -> Filling:
        """Puts the unit's own tensors into the places, which are as they were found; what was put, for `put_again`."""
        filling = []
        for found in self._founds:
            for container in found.exchanging:
                content = {key: replaced(value, mapping) for key, value in container.found.items()}
                if not all(map(operator.is_, content.values(), container.found.values())):
                    container.write(content)
                    filling.append((container, content))
                    self._entered[id(container)], self._filled = content, {*self._filled, found}
        return filling

    def entered(self, container: Container) -> Content:
        """Returns what a container was filled with."""
        return self._entered.get(id(container), container.found)

    def changes(self) -> Filling:
        """The containers that are not as they were filled, each with its content."""
        self._looked_at = self._moved()
        observed = [container for container in self._looked_at if container.observed]
        contents = [container.differs(self.entered(container)) for container in observed]
        return [(c, now) for c, now in zip(observed, contents, strict=True) if now is not None]

    def leave(self, stays: Sequence[Container] = ()) -> None:
        """After `changes`: puts back what was found, but for some."""
        self._put([(container, container.found) for container in self._looked_at if container not in stays])

    def restore(self, before: Filling = ()) -> None:
        """Puts back what was found, or after a second run what was there before it."""
        self._put([*((container, container.found) for container in self._moved()), *before])

    def clear(self) -> Filling:
        """Puts back what was found, for a second run at any time later; what was there, for `restore`."""
        before = [(container, container.read()) for container in self._moved()]
        self._put([(container, container.found) for container, _ in before])
        return before

    def _moved(self) -> list[Container]:
        """The containers of each search that something was put into since, with dicts that were empty at that time."""
        moved: list[Container] = []
        for found in self._founds:
            if found in self._filled or not found.holds():
                known = {id(container.of) for container in found.containers}
                moved += found.containers
                moved += [Container(own, {}) for own in found.vacant if own and id(own) not in known]
        return moved

    def _put(self, contents: Filling) -> None:
        for container, content in contents:
            container.put(content)
        self._entered, self._filled = {}, set()


def _in_context() -> list[object]:
    """The dicts and lists that context variables hold, which code anywhere may fill: what is collected of layers."""
    held = contextvars.copy_context().items()
    return [value for variable, value in held if isinstance(value, (dict, list)) and variable not in variables]


def put_again(filling: Filling) -> list[tuple[Container, Content, Content]]:
    """Puts the tensors that the unit was run with into the places, where parts of it may run again, for `take_out`.

    Whatever else such a part (of torch.utils.checkpoint, a hook) reads it finds as it is at that time, and what it
    writes stays: it is so in plain torch too.
    """
    put = []
    for container, own in filling:
        now = container.read()
        inner = {k: own[k] for k, x in now.items() if k in own and own[k] is not x and _is_free(container, k, x)}
        if inner:
            container.write({**now, **inner})
            put.append((container, now, inner))
    return put


def _is_free(container: Container, key: object, value: object) -> bool:
    """Tells whether a place has what was found there, or, in a module that is not running, what says so."""
    return value is container.found.get(key) or (isinstance(value, Valueless) and not isinstance(value, Handle))


def take_out(put: Sequence[tuple[Container, Content, Content]]) -> None:
    for container, before, inner in put:
        now = container.read()
        container.write({k: before[k] if k in inner and x is inner[k] else x for k, x in now.items()})
