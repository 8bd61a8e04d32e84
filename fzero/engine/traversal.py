"""One run of the step's function: the tree that it receives, of handles and full leaves, and what its units share.

And which run, and which unit of it, goes on at the moment.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from fzero.base import private, pytree
from fzero.base.context import averaged, beside, during, exchanges, in_function, means, variable
from fzero.base.hooks import registered
from fzero.base.node import Tensors, direct, first_order
from fzero.base.random import Seeds, seeded
from fzero.comm.axis import Axis
from fzero.engine.delivery import Delivery
from fzero.engine.schedule import Schedule
from fzero.engine.use import Use
from fzero.purity.collectives import Collectives
from fzero.table.counting import Mask
from fzero.table.handle import Handle
from fzero.table.layout import Key, Layout
from fzero.table.rows import Table

# the leaves of the step whose function runs, also inside its units
running: contextvars.ContextVar[Layout | None] = variable("running", None)
current: contextvars.ContextVar[Traversal | None] = variable("traversal", None)
# where no run is current, in a unit, whose leaves are full tensors there: the run, and id of a leaf -> its index
known: contextvars.ContextVar[tuple[Traversal, Mapping[int, int]] | None] = variable("known_leaves", None)
T = TypeVar("T")
Present = Mapping["tuple[Traversal, int]", torch.Tensor]  # by run and index
# the leaves that the unit that is running has; None outside of units
here: contextvars.ContextVar[Present | None] = variable("here", None)


class inside:
    """Within a unit another one is a plain call; `leaves` are those that it has, None where all are full."""

    def __init__(self, leaves: Present | None) -> None:
        self.leaves = leaves

    def __enter__(self) -> None:
        own = current.get()
        numbers = (own, own.origins) if own is not None else known.get()
        self.before = current.set(None), here.set(self.leaves), known.set(numbers)

    def __exit__(self, *_: object) -> None:
        current.reset(self.before[0])
        here.reset(self.before[1])
        known.reset(self.before[2])


class Traversal:
    """One run of the step's function: what its units share. Lives as long as that run's graph, never longer."""

    def __init__(
        self, layout: Layout, table: Table, uses: Mapping[Key, Use], seed: tuple[int, ...], device: str, axis: Axis
    ) -> None:
        self.layout, self.table, self.uses, self.device = layout, table, uses, device
        self.tensor, self.beside = axis.tensor, axis.further.setdefault
        self.averaged = axis.of_means
        self.run = ""  # `Axis.run`, where other ranks run it too
        self.means: tuple[int, bool] = (1, False)  # what is not exact in the function, as its step takes means of it
        self.mask = Mask()
        self.guards = False  # whether a transform around the run sends cotangents to what it masks
        self.traced_unit: Callable[..., object] | None = None  # what a unit's call is where the run is traced
        self.plain = False  # whether plain autograd differentiates the run
        self.straight = False  # whether no graph goes on through the run's
        self.acts = bool(table.acting)  # whether there is anything to do where a unit is used
        self.retain_graph = False
        self.turn = threading.RLock()  # one unit is pulled back at a time: threads may walk one graph at once
        self.delivery: Delivery | None = None  # of the pullback that is running, where it has one
        self.hooks = registered()  # before the function runs
        self.tokens: dict[Key, torch.Tensor] = {}  # group -> its stored buffer, as its uses see it
        self.schedule = Schedule(uses)
        self.origins: dict[int, int] = {}  # id of a full leaf -> its index, while the function runs
        self.fn: Callable[..., object] | None = None  # what runs in the place of the step's function
        # group -> its leaves, in full, where a graph begins with them, so that a pullback may come in halves
        self.begins: dict[Key, list[torch.Tensor]] | None = None
        # the names that each call of a unit has given which keeps some; None where it is not to be pulled back so
        self.named: list[set[str] | None] = []
        self.collected: dict[str, list[torch.Tensor]] = {}  # what the function has collected, at its own level
        self.seeds = Seeds(*seed)
        self.next_seed = self.seeds.next

    def collectives(self, who: str) -> Collectives:
        """What looks at torch's collectives where nothing is known of a function yet."""
        return Collectives(who, self.run)

    def leaves(self, primals: Mapping[Key, torch.Tensor]) -> list[torch.Tensor]:
        """The leaves of the tree that the function receives, in leaf order: full tensors, or handles."""
        out: dict[int, torch.Tensor] = {}
        apart: list[Key] = []
        for key, primal in primals.items():
            group = self.layout.groups[key]
            if private.is_differentiated(primal):  # or a leaf of a graph, of which no pass says whether it wants it
                primal = primal.view_as(primal)
            self.tokens[key] = primal
            if group.unit in self.table.acting:
                rows, dtype = self.layout.rows, self.uses[key].compute
                for slot in group.slots:
                    out[slot.leaf] = Handle(self, key, slot.leaf, rows[slot.leaf], dtype, primal, slot.shape)
            elif self.uses[key].followed:  # by torch's own operations, which cost least under several levels
                self._full_leaves(out, (key,), group.views(self.uses[key].apply(primal)).values())
            else:
                self.schedule.note_use((key,))
                if self.begins is not None and primal.requires_grad:
                    full = group.cut(self.uses[key].value()).values()
                    self.begins[key] = [x.detach().requires_grad_() for x in full]
                    # as an operation's outputs are
                    self._full_leaves(out, (key,), map(torch.ops.aten.alias, self.begins[key]))
                else:
                    apart.append(key)
        for keys in self._together(apart):
            self._full_leaves(out, keys, _full(self, keys, *[self.tokens[key] for key in keys]))
        return [out[index] for index in range(len(self.layout.rows))]

    def _full_leaves(self, out: dict[int, torch.Tensor], keys: Sequence[Key], views: Iterable[torch.Tensor]) -> None:
        """Notes the leaves of some groups in full."""
        slots = [slot for key in keys for slot in self.layout.groups[key].slots]
        for slot, view in zip(slots, views, strict=True):
            out[slot.leaf] = view
            self.origins[id(view)] = slot.leaf

    def _together(self, keys: Iterable[Key]) -> Iterator[tuple[Key, ...]]:
        """Groups that share a node, where nothing is sent of them: small ones, and those that need no cotangent."""
        level, moving, still = private.level(), list[Key](), list[Key]()
        for key in keys:
            if level or self.uses[key].axis.ranks > 1:
                yield (key,)
            else:
                (moving if self.tokens[key].requires_grad else still).append(key)
        small = self.layout.together(moving)
        yield from ((key,) for key in moving if key not in small)
        yield from (tuple(own) for own in (small, still) if own)

    def depth(self) -> int:
        """Counts what goes on through an operation of the function: levels of torch.func, and plain autograd."""
        return private.level() + self.plain

    def read(self, handle: Handle) -> torch.Tensor:
        """As the function of this name, where the run is traced."""
        raise NotImplementedError

    def wants(self, key: Key) -> bool:
        """Tells whether the pass of autograd that is running asks for the cotangent of a group."""
        if self.delivery is None:
            return True
        node = self.tokens[key].grad_fn
        return node is None or private.will_run(node)

    def collected_of(self, key: Key, cotangents: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """The cotangent of a group's stored buffer, from those of its leaves in full; None where it is delivered."""
        if first_order():
            return self.collect(key, cotangents)
        self.schedule.note_use((key,))
        use = self.uses[key]
        return use.collect(self.layout.groups[key].joined(cotangents, use.compute, use.device))

    def collect(self, key: Key, cotangents: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        """This rank's share of the reduced cotangent of a group, from those of its leaves; a list of them is emptied.

        Where cotangents are delivered None, otherwise what has arrived.
        """
        delivery, use = self.delivery, self.uses[key]
        if delivery is not None and delivery.used is not None:
            delivery.note(key, cotangents)
        own = [None] * len(cotangents) if self.mask.counts is not True and self.mask.masked else cotangents
        if delivery is not None and delivery.into and delivery.add_into(key, own):
            return None
        self.schedule.make_room(key)
        full = self.layout.groups[key].full_of(own, use.wire, use.device)
        if isinstance(cotangents, list):
            cotangents.clear()
        if delivery is not None:
            delivery.add(key, full)
            return None
        arrived: list[torch.Tensor] = []
        self.schedule.reduce(key, full, arrived.append)
        self.schedule.finish_reductions()
        return arrived[0].to(use.reduce)

    def collects_together(self, keys: tuple[Key, ...], cotangents: Sequence[torch.Tensor | None]) -> bool:
        """Delivers the cotangents of groups that share a node as parts of one buffer, if all leaves have one."""
        delivery, dtype = self.delivery, self.uses[keys[0]].wire
        if delivery is None or delivery.into or delivery.used is not None or self.mask.masked:
            return False
        for key in keys:
            if self.uses[key].wire != dtype or not self.wants(key):
                return False
        fulls = self.layout.packed(keys, cotangents, dtype)
        for key, full in zip(keys, fulls, strict=False):
            delivery.add(key, full)
        return bool(fulls)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Units that are called inside draw their seeds from here."""
        self.plain = torch.is_grad_enabled() and private.level() == 0
        try:
            with (
                during(current, self),
                during(running, self.layout),
                during(in_function, True),
                during(averaged, self.averaged),
                during(beside, self.beside),
                during(exchanges, self.mask.exchanges),
                during(means, self.means),
                seeded(self.next_seed()),
            ):
                yield
        finally:
            self.origins = {}


def autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """torch.autocast where there is a dtype, otherwise what the caller's own says."""
    return torch.autocast(device, dtype=dtype, cache_enabled=False) if dtype else contextlib.nullcontext()


def _run_of(values: Sequence[object]) -> tuple[Traversal | None, Mapping[int, int]]:
    """The run whose leaves are among some values, and id of a full leaf -> its index."""
    owner = next((x.owner for x in values if isinstance(x, Handle)), None) or current.get()
    return (owner, owner.origins) if owner is not None else known.get() or (None, {})


def _leaf_below(x: torch.Tensor, numbers: Mapping[int, int]) -> torch.Tensor:
    """The leaf that functorch has wrapped here; x itself where there is none, or where it is differentiated."""
    own = x
    has_values = not isinstance(private.unwrapped(x), Handle)  # a tangent would have been refused as it was made
    while not isinstance(own, Handle) and id(own) not in numbers:
        if not private.is_wrapper(own) or own.requires_grad:
            return x
        below = private.inner(own)
        is_mapped = below.ndim != own.ndim
        if is_mapped or (has_values and private.is_dual(own, private.level_of(own))):
            return x
        own = below
    return own


def leaves_below(tree: T) -> T:
    """A tree with a run's leaves in the place of what functorch has wrapped of them and does not differentiate.

    So does `torch.func.grad` with all that its function is given. The same tree where there is nothing of the kind.
    """
    (leaves, spec), numbers = pytree.flatten(tree), _run_of(())[1]
    below = [_leaf_below(x, numbers) if isinstance(x, torch.Tensor) and private.is_wrapper(x) else x for x in leaves]
    return pytree.unflatten(spec, below) if any(map(operator.is_not, below, leaves)) else tree


def origins_of(values: Sequence[object]) -> tuple[Layout | None, tuple[int, ...]]:
    """The layout that some values come from, and for each its leaf's number from 1; negative for a handle, else 0."""
    traversal, numbers = _run_of(values)
    if traversal is None:
        return None, (0,) * len(values)
    full = numbers.get
    return traversal.layout, tuple([-1 - x.index if isinstance(x, Handle) else full(id(x), -1) + 1 for x in values])


def tensor_axis_of(values: Sequence[object]) -> tuple[Axis, bool]:
    """The axis that leaves among some values are cut over, and whether modules keep pieces of tokens."""
    traversal, _ = _run_of(values)
    assert traversal is not None and traversal.tensor is not None
    return traversal.tensor, traversal.table.sequence


class _Full(torch.autograd.Function):
    """`apply(traversal, keys, *buffers)`: groups' stored buffers -> their leaves in full, outside of units."""

    @staticmethod
    def forward(traversal: Traversal, keys: Sequence[Key], *buffers: torch.Tensor) -> Tensors:  # type: ignore[override]
        groups, take = traversal.layout.groups, traversal.schedule.take
        return tuple([view for key in keys for view in groups[key].cut(take(key)[0]).values()])

    @staticmethod
    def setup_context(ctx: private.Context, inputs: tuple[Traversal, Sequence[Key], *Tensors], _: object) -> None:
        ctx.traversal, ctx.keys = inputs[:2]
        private.pull_back_early(ctx)  # made before the function runs, it would come last, with cotangents waiting
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor | None) -> object:  # type: ignore[override]
        traversal, given = ctx.traversal, iter(cotangents)
        if len(ctx.keys) > 1 and first_order() and traversal.collects_together(ctx.keys, cotangents):
            return None, None, *[None for _ in ctx.keys]
        out: list[object] = [None, None]
        for key in ctx.keys:
            own = list(itertools.islice(given, len(traversal.layout.groups[key].slots)))
            used = len(ctx.keys) == 1 or any(x is not None for x in own)
            wanted = used and (not first_order() or traversal.wants(key))
            out.append(traversal.collected_of(key, own) if wanted else None)
        return tuple(out)

    @staticmethod
    def jvp(ctx: private.Context, _: object, __: object, tangent: torch.Tensor) -> object:  # type: ignore[override]
        (key,) = ctx.keys
        full = ctx.traversal.uses[key].spread(tangent)
        return tuple(ctx.traversal.layout.groups[key].views(full).values())

    @staticmethod
    def vmap(  # type: ignore[override]
        _: object, in_dims: Sequence[int], traversal: Traversal, keys: tuple[Key], buffer: torch.Tensor
    ) -> tuple[Tensors, object]:
        full = traversal.uses[keys[0]].spread(buffer.movedim(in_dims[2], -1).contiguous())
        out = tuple(torch.func.vmap(traversal.layout.groups[keys[0]].views)(full.t()).values())
        return out, (0,) * len(out)


_full = direct(_Full)


def read(handle: Handle) -> torch.Tensor:
    """A unit's leaf in full, outside that unit, differentiable; for this use alone its group is gathered."""
    traversal, key = handle.owner, handle.key
    if traversal.traced_unit is not None:
        return traversal.read(handle)
    traversal.schedule.called((key,))
    views, slots = _full(traversal, (key,), handle.primal), traversal.layout.groups[key].slots
    return next(x for x, slot in zip(views, slots, strict=True) if slot.leaf == handle.index).clone()
