"""What a unit's pullback needs, of which some is kept by name and the rest is computed again from that.

Selective recomputation (Korthikanti et al. 2022): the graph of the run stays, and in the place of what it saved stands
which operations make it, of the unit's inputs and of what has a name.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from fzero.base import hooks, private
from fzero.base.context import variable
from fzero.base.program import Part, Program, Value, View, flat, noting
from fzero.base.thread_state import without_dispatch_modes
from fzero.engine.activations import Activations, Kept, refuse_writes
from fzero.stores.put import DEVICE, HOST, Memory
from fzero.table.handle import storage_of
from fzero.table.names import Names


class Whole(BaseException):
    """A unit's operations do not say all that it computes: it is recomputed as a whole."""


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


class _Unplain(NamedTuple):
    """What the graph saved and no operation of a program makes, as a sparse tensor: it stays."""

    tensor: torch.Tensor
    version: int


class Recorded(Activations):
    """What the graph of a unit saved, as operations of its run that begin with its inputs and what has a name.

    Args:
        names: what is kept, and which of it in the host's memory.
        memory: where all of it is kept, and the inputs too.
        what: words for errors.
        keeps_all: whether all is kept that the graph saved, whatever has a name.
    """

    def __init__(self, names: Names, memory: Memory, what: str, keeps_all: bool = False) -> None:
        self.keeps_all = keeps_all
        self._names, self._memory, self._what = names, memory, what
        self._program = Program()
        self._saved: list[weakref.ref[Saved]] = []  # which live as long as what saved them
        self._part = Part([], {})
        self._versions: dict[Value, int] = {}
        self._kept: dict[Value, Kept] = {}
        self._given: dict[Value, int] = {}  # a value -> the place of the unit's input that it is
        self._made: dict[Saved, tuple[torch.Tensor, int]] = {}  # each with its version
        self._inputs: Sequence[torch.Tensor] = ()

    def hooks(self) -> contextlib.AbstractContextManager[None]:
        return hooks.putting_away(self._what, self._pack, self._unpacked)

    @contextlib.contextmanager
    def noting(self, first: bool) -> Iterator[None]:
        """Around the unit's function.

        Args:
            first: whether nothing is known of this call: then its operations run again at once, as somebody may write
                to memory unseen (numpy, an extension, a thread). So they do where a mode looks at operators, which may
                have changed what they compute. If that shows, the unit is recomputed as a whole, or nothing of it is
                where it sends messages: that it shows on this rank says nothing of others.
        """
        looked_at = private.dispatch_modes()
        with noting(self._program):
            yield
        if not (first or looked_at) or self.keeps_all or looking.get() is not None or self._is_made_again():
            return
        if not self._program.sends:
            raise Whole
        self.keeps_all = True

    @contextlib.contextmanager
    def around(self, first: bool) -> Iterator[bool]:
        """Around the unit's function; see `noting`."""
        with self.hooks(), self.noting(first):
            yield True

    def _is_made_again(self) -> bool:
        saved = self._alive()
        part = self._program.part(self._wanted(saved), {value: x for value, (_, x) in self._named().items()})
        try:
            with self._unseen(saved):
                made = part.run(self._wanted(saved), part.given)
        except Exception:  # an operator that is not as its schema says
            return False
        return all(each.tensor is None or _alike(x, each.tensor) for x, each in zip(made, saved, strict=True))

    @staticmethod
    def _unseen(saved: Sequence[Saved]) -> contextlib.AbstractContextManager[object]:
        """Inside, no mode that looks at operators changes what they compute; those that fake tensors need stay."""
        fake = any(private.is_fake(each.tensor) for each in saved)
        return contextlib.nullcontext() if fake else without_dispatch_modes()

    def _pack(self, tensor: torch.Tensor) -> Saved | _Unplain:
        own = tensor.detach()  # or an output that its own operation saves would keep itself alive
        view = self._program.known_view(own)
        if view is None:
            return _Unplain(own, private.version(own))
        saved = Saved(own, view)
        self._saved.append(weakref.ref(saved))
        return saved

    def _alive(self) -> list[Saved]:
        """What the graph has saved and still has: a derivative inside of the unit lets go of its part."""
        return [saved for reference in self._saved if (saved := reference()) is not None]

    def _named(self) -> dict[Value, tuple[str, torch.Tensor]]:
        """What is kept, of what has a name: the last value of its memory."""
        return {
            (view.buffer, view.buffer.writes): (name, tensor)
            for name in self._program.names.keys() & {*self._names.all}
            for view, tensor in self._program.names[name]
        }

    def shown(self, name: str, inputs: Sequence[torch.Tensor]) -> None:
        """Shows the call to who looks at it."""
        look = looking.get()
        if look is not None:
            look(Unit(name, self._program, *self._graph(self._alive()), [x for x in inputs if x.requires_grad]))

    def settle(self, away: Collection[tuple[int, torch.Tensor]], leaves: Collection[torch.Tensor]) -> set[str]:
        """Chooses what is kept, once the unit has run; returns the names that it has given.

        Args:
            away: the unit's inputs that lie elsewhere meanwhile, with their places.
            leaves: the buffers that its params lie in.
        """
        program, saved, named = self._program, self._alive(), self._named()
        if self.keeps_all or looking.get() is not None:  # nothing is to run again, or its FLOPs are counted
            kept = zip(*self._graph(saved), strict=True)
            named |= {view.value: ("", x) for view, x in kept if view.value not in program.given}
        for each in saved:
            assert each.tensor is not None
            each.written, each.tensor = private.version(each.tensor), None
        self._part = part = program.part(self._wanted(saved), {value: tensor for value, (_, tensor) in named.items()})
        places = {storage_of(x): i for i, x in away if x.nbytes == x.untyped_storage().nbytes()}
        own = {storage_of(leaf): leaf for leaf in leaves}
        for value, tensor in [*part.given.items()]:
            name, _ = named.get(value, ("", None))
            memory = HOST if name in self._names.offload and self._memory == DEVICE else self._memory
            storage = tensor.untyped_storage()
            if (place := places.get(storage_of(tensor))) is not None:
                self._given[value] = place
                del part.given[value]
            elif value in named and (kept := Kept.of(flat(storage, tensor), memory, self._what)):
                self._kept[value] = kept
                del part.given[value]
            elif (leaf := own.get(storage_of(tensor))) is not None:  # a backward's writes count as those to the params
                part.given[value] = private.counted(tensor, leaf)
            elif not storage.resizable():  # somebody else's, as an array of numpy
                part.given[value] = flat(storage.clone(), tensor)
        self._versions = {value: private.version(tensor) for value, tensor in part.given.items()}
        self._program = Program()  # lets go of the rest
        return {*program.names}

    @staticmethod
    def _wanted(saved: Sequence[Saved]) -> list[View]:
        return [each.view._replace(writes=each.view.buffer.writes) for each in saved]

    def _graph(self, saved: Sequence[Saved]) -> tuple[list[View], list[torch.Tensor]]:
        """What the graph saved, before that is chosen from: which values, and as tensors."""
        return self._wanted(saved), [each.tensor for each in saved if each.tensor is not None]

    def kept(self) -> Iterable[Kept]:
        return self._kept.values()

    def comes_with(self, inputs: Callable[[], Sequence[torch.Tensor]]) -> None:
        """Takes the unit's inputs, for the pullback that follows, where some of them lay elsewhere."""
        self._inputs = inputs() if self._given else ()

    def leave(self) -> None:
        super().leave()
        self._made, self._inputs = {}, ()

    def _unpacked(self, packed: Saved | _Unplain) -> torch.Tensor:
        if isinstance(packed, _Unplain):
            refuse_writes(private.version(packed.tensor), packed.version, packed.tensor.shape, self._what)
            return packed.tensor
        if packed.tensor is not None:  # by a derivative inside of the unit
            refuse_writes(private.version(packed.tensor), packed.version, packed.view.shape, self._what)
            return packed.tensor
        refuse_writes(packed.written, packed.version, packed.view.shape, self._what)
        if packed not in self._made:
            saved = self._alive()
            made = self._computed(saved)
            self._made = {each: (x, private.version(x)) for each, x in zip(saved, made, strict=True)}
        made, version = self._made.pop(packed)
        # by a backward that came before
        refuse_writes(private.version(made), version, packed.view.shape, self._what)
        return made

    def _computed(self, saved: Sequence[Saved]) -> list[torch.Tensor]:
        for value, tensor in self._part.given.items():
            refuse_writes(private.version(tensor), self._versions[value], tensor.shape, self._what)
        given = {value: _at_its_start(self._inputs[place]) for value, place in self._given.items()}
        given |= {value: _at_its_start(kept.value()) for value, kept in self._kept.items()}
        wanted, given = self._wanted(saved), self._part.given | given
        made = self._part.run(wanted, given)
        if private.dispatch_modes() and not any(map(private.is_fake, made)):
            with without_dispatch_modes():
                unseen = self._part.run(wanted, given)
            if not all(map(_alike, made, unseen)):
                raise ValueError(_changed_by_a_mode(self._what))
        return made


def _changed_by_a_mode(what: str) -> str:
    return (
        f"A TorchDispatchMode around a pullback changes what {what} are made of again (fz.remat(save=), "
        "fz.remat(offload=)), which plain autograd would have kept; expected one that looks at operators only. Pull "
        "back outside of it, or leave the names out."
    )


def _at_its_start(x: torch.Tensor) -> torch.Tensor:
    """A tensor's values, with which its memory begins."""
    return x.detach() if x.storage_offset() == 0 else private.counted(x.detach().clone(), x)


def _alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tells whether two runs have computed the same: to the bit on the CPU, elsewhere but for the order of sums."""
    if private.is_fake(x) or torch.equal(x, y) or (x.isnan() & y.isnan() | (x == y)).all():
        return True
    if x.device.type == "cpu" or not (x.is_floating_point() or x.is_complex()):
        return False
    return torch.allclose(x, y, rtol=1e-2, atol=1e-2 * float(y.abs().amax()), equal_nan=True)
