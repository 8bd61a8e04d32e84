"""The engine: a unit's call gathers its params, runs, frees them, and pulls cotangents back.

Two forms. Without recomputation the unit's own graph is kept and the gathered buffers' storage is emptied in between;
with it (`remat`) only the shards and the inputs are kept. Both are one `Node` of the outer derivative.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero import _private, _tree
from fzero._arguments import need_function
from fzero._capture import containers, guard, is_kept, is_strict, refuse_caches, refuse_captures
from fzero._collectives import done
from fzero._compile import compiled, without_donation
from fzero._handle import Handle
from fzero._node import Op, Tensors, active, apply, gradients, refuse_foreign_leaves
from fzero._random import seeded
from fzero._schedule import Room
from fzero._traversal import Traversal, current


class _Pull:
    """The kept graph of one first-order run of a unit."""

    __slots__ = ("inputs", "keys", "leaves", "outputs")

    def __init__(self, keys: list[str], leaves: list[list[torch.Tensor]], inputs: dict[int, torch.Tensor]) -> None:
        self.keys, self.leaves, self.inputs = keys, leaves, inputs
        self.outputs: list[torch.Tensor] = []


class UnitOp(Op):
    """A unit's call: gather, run, free; and to pull back, gather again into the same storage, or recompute."""

    def __init__(
        self,
        traversal: Traversal,
        keys: list[str],
        body: Callable[[Mapping[int, torch.Tensor], Sequence[torch.Tensor]], Tensors],
        recompute: bool,
        seed: int,
        trusted: bool = False,
    ) -> None:
        def pure(*tensors: torch.Tensor) -> Tensors:
            leaves: dict[int, torch.Tensor] = {}
            for key, primal in zip(keys, tensors, strict=False):
                leaves.update(traversal.layout.groups[key].views(traversal.uses[key].apply(primal)))
            return body(leaves, tensors[len(keys) :])

        super().__init__(pure, seed, traversal.device)
        self.traversal, self.keys, self.body, self.recompute = traversal, keys, body, recompute
        self._pull: _Pull | None = None
        self._rooms: dict[str, Room] = {}
        self._used = False
        self._refilling: dict[str, Callable[[], None]] = {}
        self.number = traversal.schedule.called(self)
        self.trusted = trusted
        # under a single vjp what a unit closes over is no part of any graph: one run shows the mistake
        self.suspicious = not (traversal.schedule.ran_before and _private.single_level()) or is_strict()
        self.arguments: set[int] = set()

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        schedule = self.traversal.schedule
        out = self._forward(tensors, () if self.recompute else wanted, schedule.gather_next)
        if not (wanted and schedule.is_last()):
            self._free()
        elif self.recompute:
            for key, room in self._rooms.items():
                schedule.keep(key, room)
            self._rooms = {}
        else:  # the pullback starts with what is gathered last
            for room in self._rooms.values():
                room.user = weakref.ref(self)
            self._refilling = dict.fromkeys(self._rooms, done)
        return out

    def back(
        self, tensors: Tensors, wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        keep = self.traversal.retain_graph or _private.keeps_graph()
        if self.recompute:
            with torch.no_grad():
                self._forward(tuple(t.detach() for t in tensors), wanted, self._gather_previous)
            keep = False
            if self.traversal.schedule.lean:
                self.traversal.schedule.finish_reduction()
        elif self._used:
            raise RuntimeError(used_up(f"unit {self.unit!r}"))
        elif self._pull is None:
            return None
        else:
            self._refill()
            self._gather_previous()
            self.traversal.schedule.empty_rooms()
        pull = self._pull
        assert pull is not None
        flat = [leaf for leaves in pull.leaves for leaf in leaves]
        inputs = list(pull.inputs.values())
        with without_donation() if keep and self.traversal.compiles else contextlib.nullcontext():
            found = list(gradients(pull.outputs, [*flat, *inputs], cotangents, keep))
        out = {
            i: torch.zeros_like(x) if g is None else g
            for (i, x), g in zip(pull.inputs.items(), found[len(flat) :], strict=True)
        }
        del found[len(flat) :], flat
        if not keep:
            self._pull, self._used = None, not self.recompute
            pull.outputs = []
        self._free()
        for key, leaves in zip(reversed(pull.keys), reversed(pull.leaves), strict=True):
            grads = found[len(found) - len(leaves) :]
            del found[len(found) - len(leaves) :]
            shard = self.traversal.collect(key, grads, self.traversal.schedule.uses_of(key) == 1)
            if shard is not None:
                out[self.keys.index(key)] = shard
        if not keep:
            self._rooms = {}
        return out

    @property
    def unit(self) -> str:
        return self.traversal.layout.groups[self.keys[0]].unit if self.keys else "of full params"

    def _forward(self, tensors: Tensors, wanted: Sequence[int], gather_ahead: Callable[[], None]) -> Tensors:
        traversal, count = self.traversal, len(self.keys)
        self._rooms = {}
        leaves: dict[int, torch.Tensor] = {}
        differentiated: list[list[torch.Tensor]] = []
        own: dict[int, torch.Tensor] = {}
        for position, key in enumerate(self.keys):
            full, room = traversal.schedule.take(key, tensors[position])
            if room is not None:
                self._rooms[key] = room
            own = traversal.layout.groups[key].cut(full)
            if position in wanted:
                differentiated.append([view.requires_grad_() for view in own.values()])
            leaves.update(own)
        del own
        gather_ahead()
        traversal.schedule.empty_rooms()
        held = {index: sys.getrefcount(leaves[index]) for index in leaves}
        inputs = list(tensors[count:])
        for position in wanted:
            if position >= count:
                inputs[position - count] = inputs[position - count].detach().requires_grad_()
        grad_mode = torch.enable_grad() if wanted else contextlib.nullcontext()
        with self.surroundings(), _private.saved_tensor_hooks(), grad_mode:
            out = self.body(leaves, inputs)
        storages = {room.full.untyped_storage()._cdata for room in self._rooms.values()}
        views = [o.untyped_storage()._cdata in storages for o in out]
        slack = bool(wanted) or any(views)  # the unit's own graph, or an output that is a view, is one more holder
        returned = {id(o) for o in out}
        ours = self.arguments | {id(leaves), *map(id, differentiated)}
        for index in leaves:
            more = sys.getrefcount(leaves[index]) > held[index] + slack and id(leaves[index]) not in returned
            if more and not self.trusted and is_kept(leaves[index], ours):
                raise ValueError(
                    f"Unit {self.unit!r} kept leaf {traversal.layout.rows[index].path!r} beyond its call; its values "
                    "are freed there. Return what is needed from the unit as an output instead."
                )
        if wanted:
            self._pull = _Pull(
                [self.keys[p] for p in wanted if p < count],
                differentiated,
                {p: inputs[p - count] for p in wanted if p >= count},
            )
            self._pull.outputs = [o for o in out if o.is_floating_point() or o.is_complex()]
            if self.suspicious:
                ours = [*(leaf for group in differentiated for leaf in group), *self._pull.inputs.values()]
                refuse_foreign_leaves(self._pull.outputs, ours)
        # an output that is a view of a param would be freed with it
        return tuple(o.detach().clone() if view else o.detach() for o, view in zip(out, views, strict=True))

    def _free(self) -> None:
        for room in self._rooms.values():
            self.traversal.schedule.release(room, self)
        if self._pull is None:
            self._rooms = {}

    def _gather_previous(self) -> None:
        self.traversal.schedule.gather_previous(self)

    def gather_ahead(self) -> None:
        """Starts to gather what the pullback of this call will need, where its room is free."""
        if self.recompute:
            self.traversal.schedule.gather_ahead(tuple(self.keys))
        elif self._pull is not None:
            for key, room in self._rooms.items():
                if key not in self._refilling and not room.busy:
                    self._refilling[key] = self.traversal.schedule.refill(key, room, self)

    def lose(self, room: Room) -> None:
        """Another call takes the room: what was gathered for this one is gone."""
        for key in [key for key, own in self._rooms.items() if own is room]:
            self._refilling.pop(key, done)()

    def forget_ahead(self) -> None:
        """Leaves what was gathered ahead and not used."""
        for key in list(self._refilling):
            self._refilling.pop(key)()
            self._rooms[key].busy = False

    def _refill(self) -> None:
        for key, room in self._rooms.items():
            (self._refilling.pop(key, None) or self.traversal.schedule.refill(key, room, self))()


def used_up(what: str) -> str:
    return (
        f"The pullback of {what} was used up by an earlier call, which freed what it kept. "
        "Pass retain_graph=True to every call but the last."
    )


def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn(params_subtree, *args, **kwargs)` a unit: the grain at which params are gathered, freed and recomputed.

    Called with the leaves of a step's params it gathers them for this one use; outside of a step it is `fn`. It may use
    what functorch refuses elsewhere, such as `torch.utils.checkpoint` and old-style Functions.
    Everything differentiable must be an argument. Arguments and outputs may be any pytrees; a unit inside a unit is a
    plain call.

    Example:
        >>> block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
        >>> block({"w": torch.eye(2)}, torch.zeros(1, 2))
        tensor([[0., 0.]])
    """

    need_function(fn, "unit")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        return call_unit(fn, args, kwargs)

    return call


def plain_call(fn: Callable[[], Any], node: Callable[[int], Any]) -> Any:
    """A unit whose leaves are full tensors already is a plain call, which costs least.

    Where its function does what functorch refuses (torch.utils.checkpoint, old-style Functions), it runs as a node, as
    it does when it is sharded: `node(seed)`.
    """
    traversal = current.get()
    if traversal is None:
        return fn()
    seed = traversal.next_seed()
    try:
        with seeded(seed), _inside():
            return fn()
    except RuntimeError as error:
        if not any(text in str(error) for text in ("saved tensor hooks", "setup_context")):
            raise
    return node(seed)


def call_unit(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    trusted: bool = False,
    seed: int | None = None,
    compilable: Callable[..., Any] | None = None,
) -> Any:
    """Runs `fn(*args, **kwargs)` as one node, gathering the handles among its arguments.

    A trusted function may hold on to leaves between its calls, as it overwrites them before it reads them.

    Args:
        compilable: what runs in a compiled step in `fn`'s place; `fn` itself, compiled, by default.
    """
    flat, spec = _tree.flatten((args, dict(kwargs)))
    handles = [leaf for leaf in flat if isinstance(leaf, Handle)]
    places = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor)]
    if not handles and seed is None:
        return plain_call(lambda: fn(*args, **kwargs), lambda seed: call_unit(fn, args, kwargs, trusted, seed))
    traversal = handles[0].traversal if handles else current.get()
    assert traversal is not None
    primals = {handle.key: handle.primal for handle in handles}
    keys = list(primals)
    refuse_captures(fn)
    if traversal.compiles:
        fn, trusted = compilable or compiled(fn), True  # a compiler looks at the leaves, and keeps none
    box: dict[str, Any] = {}
    mine: set[int] = set()  # not the op itself, which would be a cycle

    def body(leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> Tensors:
        filled = [leaves[leaf.index] if isinstance(leaf, Handle) else leaf for leaf in flat]
        for place, tensor in zip(places, tensors, strict=True):
            filled[place] = tensor
        arguments, keywords = _tree.unflatten(spec, filled)
        mine.clear()
        mine.update(containers((arguments, keywords)))  # recomputation inside the unit may hold on to these
        del filled
        with _inside():
            out, box["spec"] = _tree.flatten(fn(*arguments, **keywords))
        box["places"] = [i for i, o in enumerate(out) if isinstance(o, torch.Tensor)]
        box["static"] = [None if isinstance(o, torch.Tensor) else o for o in out]
        return tuple(out[i] for i in box["places"])

    tensors = (*primals.values(), *[flat[i] for i in places])
    # a derivative of a derivative recomputes anyway: keep no graph for it
    nested = _private.level() > 1
    traversal.nested = traversal.nested or nested
    recompute = traversal.remat or nested
    op = UnitOp(traversal, keys, body, recompute, traversal.next_seed() if seed is None else seed, trusted)
    op.arguments = mine
    wanted = active(tensors)
    if wanted:
        refuse_caches(flat)
    out = apply(op, wanted, *tensors)
    result = list(box["static"])
    for place, tensor in zip(box["places"], out, strict=True):
        result[place] = tensor
    return _tree.unflatten(box["spec"], result)


class _inside:
    """A unit within a unit is a plain call."""

    __slots__ = ("guard", "token")

    def __enter__(self) -> None:
        self.token, self.guard = current.set(None), guard()
        self.guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self.guard.__exit__(*exc)
        current.reset(self.token)
