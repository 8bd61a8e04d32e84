"""Collectives along one mesh axis, as one component sees them."""

from __future__ import annotations

import json
import uuid
import weakref
import zlib
from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import Any, ParamSpec, TypeVar

import torch

from fzero.base import private
from fzero.base.context import jitting
from fzero.base.replay import sending
from fzero.comm import backend
from fzero.comm.backend import Group, Mesh, Wait, axes_in, done, need_axes
from fzero.comm.divergence import announce, explained, need_alike
from fzero.comm.known import GroupName, group_of, name_of_group, need_here, need_running
from fzero.comm.playing import playing

P = ParamSpec("P")
T = TypeVar("T")
Into = Sequence[torch.Tensor]


class Axis:
    """One mesh axis seen from one rank, and others over which everything is replicated.

    Opaque to pytrees. `size` 1 communicates nothing. A state's axis knows its component: two components over the same
    ranks, or two runs of one that ranks start in different order, never take each other's messages or grads.

    Attributes:
        size, rank: of the axis that buffers are cut over.
        ranks: how many ranks hold different data: the size of the mean.
        data_rank: which of those this one is.
        tensor: the axis that leaves are cut over, whose ranks hold the same data; None where there is none.
    """

    def __init__(self, group: Group | None = None, replicas: Group | None = None, name: str = "") -> None:
        self.group, self.name = group, name
        self._size, self._rank = backend.size_of(group), backend.rank_in(group)
        copies = backend.size_of(replicas)
        self.replicas: tuple[Group, ...] = (replicas,) if replicas is not None and copies > 1 else ()
        self.ranks, self.data_rank = self._size * copies, backend.rank_in(replicas) * self._size + self._rank
        # the global ranks in group order, noted now: two axes of one name and size may be over other ranks
        self.members, self.others = backend.members(group), backend.members(replicas)
        self.component, self.identity = "", ""
        self.tensor: Axis | None = None
        self.further: dict[tuple[int, ...], Axis] = {}  # further ones that functions of this component have maps over
        self._runs: dict[int, int] = {}  # update -> runs of the function since then
        self._run, self._counts = "", dict[str, int]()
        # function -> what its last run showed: the units that it called, which the next will probably call too
        self.records: weakref.WeakKeyDictionary[object, Any] = weakref.WeakKeyDictionary()

    @property
    def size(self) -> int:
        player = playing.get()
        return self._size if player is None else player.size(self.name, self._size)

    @property
    def rank(self) -> int:
        player = playing.get()
        return self._rank if player is None else player.rank(self.name, self._rank)

    @staticmethod
    def of(mesh: Mesh | None, axis: str | Sequence[str], replicate: str | Sequence[str] | None, who: str) -> Axis:
        """The axis of a mesh (or several as one), or of the default process group where there is no mesh."""
        if not backend.initialized():
            raise RuntimeError(
                f"{who}: there is no process group, and this step is sharded. Start one with "
                "torch.distributed.init_process_group('gloo') under torchrun, or run on ranks with "
                "fz.testing.run_ranks. One process needs no sharding; a script for both says "
                "if torch.distributed.is_initialized(): step = fz.shard_zero3(step)."
            )
        name = axis if isinstance(axis, str) else ", ".join(axis)
        if mesh is None:
            return Axis(backend.world(), name=name)
        need_axes(mesh, axes_in(axis), who)
        need_axes(mesh, axes_in(replicate), who, "replicate")
        replicas = backend.group_over(mesh, axes_in(replicate)) if replicate else None
        return Axis(backend.group_over(mesh, axes_in(axis)), replicas, name)

    def beside(self, tensor: Axis) -> Axis:
        """This axis of ranks that have different data, and beside it one over which leaves are cut."""
        return self._with(tensor=tensor)

    @property
    def place_on_tensor(self) -> tuple[int, int]:
        """This rank's number on the axis that leaves are cut over, and the number of ranks there."""
        return (self.tensor.rank, self.tensor.size) if self.tensor is not None else (0, 1)

    def of_component(self, label: str) -> Axis:
        """This axis for one component, with an identity that its ranks agree on."""
        if (graph := jitting.get()) is not None:  # each run of which begins one of its own
            return graph.begun(self._with(component=label, identity=uuid.uuid4().hex, further={}), self)
        identity = uuid.uuid4().hex
        for group in self._all_groups:
            identity = self._by_all(identity, f"init of {label!r}", group)[0]
        return self._with(component=label, identity=identity, further={})._noted()

    def _noted(self) -> Axis:
        _alive[self.identity, self.data_rank, self.place_on_tensor[0]] = self
        return self

    def _with(self, **changes: object) -> Axis:
        out = object.__new__(Axis)
        vars(out).update(vars(self) | changes)
        for name in ("uncut", "of_means"):
            vars(out).pop(name, None)
        return out

    def of_component_of(self, other: Axis) -> Axis:
        """This axis for the component of an equal one, over whose ranks it goes too."""
        if self.group is other.group and self.replicas == other.replicas and self.tensor == other.tensor:
            return other  # which counts its runs
        return self._with(component=other.component, identity=other.identity, records=other.records)

    @cached_property
    def of_means(self) -> tuple[Axis, ...]:
        """The ranks that hold different data, as an axis for each process group of theirs: means are over all."""
        return tuple([Axis(group, None, self.name) for group in self._groups])

    @cached_property
    def uncut(self) -> Axis:
        """This axis for what every rank holds whole: nothing is gathered, and a mean is one over the same ranks."""
        return self._with(group=None, _size=1, _rank=0, replicas=self._groups)

    def of_next_run(self, step: int) -> Axis:
        """This axis for one run of the component's function, which every rank must start in the same order.

        Runs are counted anew after every update, so that one that failed on one rank does not shift all later ones.
        """
        self._runs[step] = self._runs.pop(step, 0) + 1
        if len(self._runs) > 8:  # older states are gone back to rarely
            del self._runs[next(iter(self._runs))]
        return self._with(_run=f"{self._runs[step]} after update {step}", _counts={})

    @property
    def run(self) -> str:
        """A name of one run of the component's function, the same on its ranks and no other one's; "" for none."""
        return f"{self.identity} {self._run}" if self.identity and self._run else ""

    @property
    def fake(self) -> bool:
        """True where one rank stands for all, and nothing is sent."""
        return playing.get() is None and backend.is_fake(self.group)

    @property
    def device(self) -> torch.device:
        """The device whose tensors are sent."""
        return torch.device("cpu") if playing.get() is not None else backend.device_of(self.group)

    @property
    def adds_here(self) -> bool:
        """Tells whether sums are best added up here, of what the ranks send one another."""
        return playing.get() is not None or (self.group is not None and backend.adds_here(self.group))

    @property
    def who(self) -> str:
        """The component in words."""
        return f"{self.component!r} [{self.identity[:4]}]" if self.identity else "a step"

    @property
    def _groups(self) -> tuple[Group, ...]:
        """The process groups that the ranks are in, but for those of one."""
        return self.replicas if self.group is None or self.size == 1 else (self.group, *self.replicas)

    @property
    def _all_groups(self) -> tuple[Group, ...]:
        """The same, and that of the axis that leaves are cut over."""
        return (*self._groups, *(self.tensor._groups if self.tensor is not None else ()))

    @property
    def place(self) -> str:
        """The ranks in words."""
        ranks = f"ranks {list(self.members)} of axis {self.name!r}" if self.members else "one rank"
        if self.others:
            ranks = f"{ranks}, replicated over ranks {list(self.others)}"
        return f"{ranks}, leaves cut over {self.tensor.place}" if self.tensor is not None else ranks

    def __eq__(self, other: object) -> bool:
        """Two axes are equal that go over the same ranks in the same order, for the same purpose."""
        if not isinstance(other, Axis):
            return False
        names = (self.name, self.members, self.others) == (other.name, other.members, other.others)
        return names and self.tensor == other.tensor

    def __hash__(self) -> int:
        return hash((self.name, self.members, self.others))

    def __deepcopy__(self, memo: object) -> Axis:
        return self  # the same ranks, and the same component

    def __reduce__(self) -> tuple[object, ...]:
        group = self.group and name_of_group(self.group)
        replicas = [name_of_group(each) for each in self.replicas]
        rank = backend.global_rank() if group or replicas else 0
        return _again, (group, replicas, rank, self.name, self.component, self.identity, self.data_rank, self.tensor)

    def __repr__(self) -> str:
        copies = "" if self.ranks == self.size else f", {self.ranks // self.size} copies"
        return f"Axis({self.name!r}, rank {self.rank} of {self.size}{copies})"

    def need_running(self) -> None:
        """Refuses an axis whose process groups have ended."""
        need_running(self._all_groups, f"A state of {self.who} over {self.place}")

    # ---- what is said about a collective

    def _announced(
        self,
        operation: str,
        tag: Hashable,
        tensor: torch.Tensor,
        group: Group,
        sent: int | None = None,
        into: Into = (),
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """Announces a collective; the result makes calls that name it where they fail.

        Args:
            sent: bytes that go to other ranks, of a collective whose tensors differ between ranks in their shapes.
            into: the tensors that it writes to.
        """
        dtype, shape = tensor.dtype, f"{tuple(tensor.shape)}, " if sent is None else ""

        def words() -> str:
            run = f", run {self._run}" if self._run else ""
            return f"{operation} of {tag} ({shape}{dtype}) of {self.who} over axis {self.name!r}{run}"

        need_running((group,), f"A state of {self.who} over {self.place}")
        announce(operation, tag, tensor.numel() * tensor.element_size() if sent is None else sent, words, group)
        return lambda call: explained(sending(call, *into), words, group)

    def _number(self, operation: str, tag: Hashable) -> int:
        """The tag of one collective's messages; a run may have two reductions of one buffer in flight."""
        key = f"{operation} {tag!r} {self.identity} {self._run}"
        if self._run:
            self._counts[key] = count = self._counts.get(key, 0) + 1
            key = f"{key} {count}"
        return zlib.crc32(key.encode()) & 0x7FFFFFFF

    # ---- the collectives

    def start_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: Hashable = "") -> Wait:
        """Begins to fill `full[numel]` with the shards of all ranks, in rank order; the result waits for its end."""
        if self.size == 1:
            if not private.same_place(full, shard):
                full.copy_(shard)
            return done
        if jitting.get() is not None:
            full.copy_(self.gather(shard, tag))
            return done
        assert self.group is not None
        explained = self._announced("all_gather", tag, shard, self.group, into=(full,))
        number = self._number("all_gather", tag)
        return explained(explained(backend.start_all_gather)(full, shard, self.group, number))

    def gather(self, shard: torch.Tensor, tag: Hashable = "") -> torch.Tensor:
        """The full tensor whose slices along dim 0 are the ranks' shards: a new one, also on one rank."""
        if self.size > 1 and (graph := jitting.get()) is not None:
            return graph.sent(self, "gather", shard, shard.shape[0] * self.size, tag)
        full = shard.new_empty((shard.shape[0] * self.size, *shard.shape[1:]))
        self.start_gather(full, shard, tag)()
        return full

    def start_reduce_scatter(
        self, full: torch.Tensor, tag: Hashable = "", dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, Wait]:
        """This rank's slice of the mean over all ranks, summed in rank order in `dtype`, and what waits for it.

        Until then `full` belongs to the collective; over one rank it is the result where it has the sum's dtype.
        """
        full, dtype = full.contiguous(), dtype or full.dtype
        if self.ranks == 1:
            return full.to(dtype), done
        if (graph := jitting.get()) is not None:
            return graph.sent(self, "reduce_scatter", full, full.shape[0] // self.size, tag, dtype), done
        if self.group is not None and self.size > 1:
            out = full.new_empty((full.shape[0] // self.size, *full.shape[1:]), dtype=dtype)
            explained = self._announced("reduce_scatter", tag, full, self.group, into=(out,))
            number, divisor = self._number("reduce_scatter", tag), 1 if self.replicas else self.ranks
            wait = explained(explained(backend.start_reduce_scatter)(full, out, self.group, number, divisor))
        else:
            out, wait = full.to(dtype, copy=True), done

        def finish() -> None:
            wait()
            for group in self.replicas:
                self._announced("all_reduce", tag, out, group, into=(out,))(backend.all_reduce)(out, group)
            if self.replicas:
                out.div_(self.ranks)

        return out, finish

    def reduce_scatter(self, full: torch.Tensor, tag: Hashable = "", dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's slice of the mean over all ranks, summed in rank order in `dtype`; consumes nothing."""
        out, wait = self.start_reduce_scatter(full, tag, dtype)
        wait()
        return out

    def sum(self, tensor: torch.Tensor, tag: Hashable = "") -> torch.Tensor:
        """The sum over the sharded axis: replicas hold the same values."""
        if self.size > 1 and (graph := jitting.get()) is not None:
            return graph.sent(self, "sum", tensor, None, tag)
        return self._sum(tensor, tag, self._groups[:1] if self.size > 1 else ())

    def mean(self, tensor: torch.Tensor, tag: Hashable = "") -> torch.Tensor:
        """The mean over all ranks that hold different data."""
        if self.ranks > 1 and (graph := jitting.get()) is not None:
            return graph.sent(self, "mean", tensor, None, tag)
        total = self._sum(tensor, tag, self._groups)
        return total / self.ranks if self.ranks > 1 else total

    def _sum(self, tensor: torch.Tensor, tag: Hashable, groups: Sequence[Group]) -> torch.Tensor:
        for group in groups:
            tensor = tensor.clone()
            self._announced("all_reduce", tag, tensor, group, into=(tensor,))(backend.all_reduce)(tensor, group)
        return tensor

    def broadcast(self, tensor: torch.Tensor, tag: Hashable = "") -> torch.Tensor:
        """Rank 0's tensor, written into this one."""
        for group in self._all_groups:
            self._announced("broadcast", tag, tensor, group, into=(tensor,))(backend.broadcast)(tensor, group)
        return tensor

    def _by_all(self, text: str, what: str, group: Group) -> list[str]:
        gather = self._announced("exchange", what, torch.empty(0, device="cpu"), group)(backend.gather_strings)
        with private.below_transforms():  # words are nothing that one could go on through
            heard = [own.partition("\n") for own in gather(f"{what}\n{text}", group)]
        need_alike([verb for verb, _, _ in heard], group)
        return [own for _, _, own in heard]

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks, by data rank."""
        texts = [text]
        for group in (self.group, *self.replicas) if self.size > 1 else self._groups:
            assert group is not None
            texts = [each for own in self._by_all(json.dumps(texts), what, group) for each in json.loads(own)]
        return texts

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""
        return max((backend.timeout_of(group) for group in self._groups), default=0.0)

    def check_same(self, text: str, what: str, advice: str) -> None:
        """Raises ValueError on every rank where the ranks' texts differ."""
        # a graph's function has run without it before, and has compared
        said, groups = "", self._all_groups if jitting.get() is None else ()
        for group in groups:
            first, *others = self._by_all(text, what, group)
            own = self.tensor if self.tensor is not None and group is self.tensor.group else self
            for rank, other in enumerate(others, 1):
                if other != first and not said:
                    ours, theirs = _first_difference(first, other), _first_difference(other, first)
                    said = f"{what} differ between the ranks of axis {own.name!r}: rank 0 has {ours}, rank {rank} has "
                    said += f"{theirs}. {advice}"
        for group in groups if len(groups) > 1 else ():  # those that agree with all in their groups hear it too
            said = next((each for each in self._by_all(said, what, group) if each), "")
        if said:
            raise ValueError(said)


def _first_difference(text: str, other: str) -> str:
    lines, others = text.splitlines(), set(other.splitlines())
    return repr(next((line for line in lines if line not in others), "nothing more"))


# (identity, data rank, rank on the tensor axis) -> the axis of a component, which counts its runs
_alive: weakref.WeakValueDictionary[tuple[str, int, int], Axis] = weakref.WeakValueDictionary()


def _again(
    group: GroupName | None,
    replicas: list[GroupName],
    rank: int,
    name: str,
    component: str,
    identity: str,
    data_rank: int,
    tensor: Axis | None,
) -> Axis:
    """A pickled axis, over the groups of this process that it was over."""
    names = [name for name in (group, *replicas) if name]
    need_here("state", names, rank, "To keep a state for another run, use fz.save and fz.load.")
    if (alive := _alive.get((identity, data_rank, tensor.rank if tensor else 0))) is not None:
        return alive
    axis = Axis(group_of(group) if group else None, group_of(replicas[0]) if replicas else None, name)
    return axis._with(component=component, identity=identity, tensor=tensor)._noted()
