"""What a unit's pullback needs, of which some is kept by name and the rest is computed again from that.

Selective recomputation (Korthikanti et al. 2022): the graph of the run stays, and in the place of what it saved stands
which operations make it, of the unit's inputs and of what has a name.
"""

from __future__ import annotations

import contextlib
import contextvars
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import hooks, private
from fzero.base.context import variable
from fzero.base.program import Part, Program, Value, View, flat, noting
from fzero.base.refusals import noted
from fzero.capture.again import Again, Facts
from fzero.capture.handle import Function, Operands, storage_of
from fzero.capture.handle import Named as Keywords
from fzero.engine.activations import Activations, Kept, refuse_writes
from fzero.stores.put import DEVICE, HOST, Memory
from fzero.table.names import Names

# by which others may write to a tensor's memory, and no operation says so
_EXPOSES = {
    torch.Tensor.numpy,
    torch.Tensor.data_ptr,
    torch.Tensor.untyped_storage,
    torch.Tensor.storage,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}


class Unit(NamedTuple):
    """One call of a unit, as it has run.

    Attributes:
        saved: what its graph saved, as `tensors`.
        inputs: those that are differentiated.
    """

    name: str
    program: Program
    saved: list[View]
    tensors: list[torch.Tensor]
    inputs: list[torch.Tensor]


# takes each call of a unit that runs
looking: contextvars.ContextVar[Callable[[Unit], None] | None] = variable("looking_at_units", None)


class Saved:
    """One tensor that the graph saved.

    Attributes:
        written: the version that it was at as the unit's run had ended, where that is another one.
    """

    def __init__(self, tensor: torch.Tensor, view: View) -> None:
        self.tensor: torch.Tensor | None = tensor  # until the run has ended
        self.view, self.version, self.written = view, private.version(tensor), private.version(tensor)


class Recorded(Activations):
    """What the graph of a unit saved, as operations of its run that begin with its inputs and what has a name.

    Args:
        names: what is kept, and which of it in the host's memory.
        memory: where all of it is kept, and the inputs too.
        what: words for errors.
    """

    def __init__(self, names: Names, memory: Memory, what: str) -> None:
        self._names, self._memory, self._what = names, memory, what
        self._program = Program()
        self._saved: list[Saved] = []
        self._part = Part([], {})
        self._versions: dict[Value, int] = {}
        self._kept: dict[Value, Kept] = {}
        self._given: dict[Value, int] = {}  # a value -> the place of the unit's input that it is
        self._made: dict[Saved, torch.Tensor] = {}
        self._inputs: Sequence[torch.Tensor] = ()

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        return hooks.putting_away(self._pack, self._unpacked)

    @contextlib.contextmanager
    def noting(self, first: bool) -> Iterator[None]:
        """Around the unit's function.

        Args:
            first: whether nothing is known of this call: then it is found out who opens a tensor's memory to others.
        """
        with noting(self._program), _Exposing() if first else contextlib.nullcontext():
            yield

    def _pack(self, tensor: torch.Tensor) -> Saved | torch.Tensor:
        own = tensor.detach()  # or an output that its own operation saves would keep itself alive
        view = self._program.known_view(own)
        if view is None:
            return own
        self._saved.append(Saved(own, view))
        return self._saved[-1]

    def shown(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Shows the call to who looks at it."""
        look = looking.get()
        if look is not None:
            inputs = [x for x in inputs if x.requires_grad]
            look(Unit(name, self._program, self._wanted(), self._tensors(), inputs))

    def settle(self, away: Collection[tuple[int, torch.Tensor]]) -> set[str]:
        """Chooses what is kept, once the unit has run; returns the names that it has given.

        Args:
            away: the unit's inputs that lie elsewhere meanwhile, with their places.
        """
        program, names, saved = self._program, {*self._names.save, *self._names.offload}, self._saved
        looked_at = zip(self._wanted(), self._tensors(), strict=True) if looking.get() is not None else ()
        everything = {view.value: ("", tensor) for view, tensor in looked_at}
        for each in saved:
            assert each.tensor is not None
            each.written, each.tensor = private.version(each.tensor), None
        named = everything | {
            (view.buffer, view.buffer.writes): (name, tensor)
            for name in program.names.keys() & names
            for view, tensor in program.names[name]
        }
        self._part = part = program.part(self._wanted(), {value: tensor for value, (_, tensor) in named.items()})
        places = {storage_of(x): i for i, x in away if x.nbytes == x.untyped_storage().nbytes()}
        for value, tensor in [*part.given.items()]:
            name, _ = named.get(value, ("", None))
            memory = HOST if name in self._names.offload and self._memory == DEVICE else self._memory
            if (place := places.get(storage_of(tensor))) is not None:
                self._given[value] = place
            elif value in named and (kept := Kept.of(flat(tensor.untyped_storage(), tensor), memory, self._what)):
                self._kept[value] = kept
            else:
                self._versions[value] = private.version(tensor)
                continue
            del part.given[value]
        self._program = Program()  # lets go of the rest
        return {*program.names}

    def _wanted(self) -> list[View]:
        return [each.view._replace(writes=each.view.buffer.writes) for each in self._saved]

    def _tensors(self) -> list[torch.Tensor]:
        return [each.tensor for each in self._saved if each.tensor is not None]

    def kept(self) -> Iterable[Kept]:
        return self._kept.values()

    def comes_with(self, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Takes the unit's inputs, for the pullback that follows, where some of them lay elsewhere."""
        self._inputs = inputs() if self._given else ()

    def leave(self) -> None:
        super().leave()
        self._made, self._inputs = {}, ()

    def _unpacked(self, packed: Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        refuse_writes(packed.written, packed.version, packed.view.shape)
        if packed not in self._made:
            self._made = dict(zip(self._saved, self._computed(), strict=True))
        return self._made.pop(packed)

    def _computed(self) -> list[torch.Tensor]:
        for value, tensor in self._part.given.items():
            refuse_writes(private.version(tensor), self._versions[value], tensor.shape)
        storages = {value: tensor.untyped_storage() for value, tensor in self._part.given.items()}
        storages |= {value: _storage(self._inputs[place]) for value, place in self._given.items()}
        storages |= {value: _storage(kept.value()) for value, kept in self._kept.items()}
        return self._part.run(self._wanted(), storages)


def _storage(x: torch.Tensor) -> torch.UntypedStorage:
    """Memory that begins with a tensor's."""
    return (x.clone() if x.storage_offset() else x).untyped_storage()


class _Exposing(torch.overrides.TorchFunctionMode):
    """Finds who opens a tensor's memory to others: what they write there no operation makes again.

    The unit is then recomputed as a whole.
    """

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Keywords = None) -> object:
        if func in _EXPOSES and not sys._getframe(1).f_globals.get("__name__", "").startswith("fzero."):
            raise noted(Again(Facts(whole=True)))
        return func(*args, **(kwargs or {}))
