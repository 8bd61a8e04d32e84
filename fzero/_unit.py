"""The engine: a unit's call gathers its params, runs, frees them, and pulls cotangents back.

Two forms. Without recomputation the unit's own graph is kept and the gathered buffers' storage is emptied in between;
with it (`remat`) only the shards and the inputs are kept. Both are one `Node` of the outer derivative.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fzero import _private, _tree
from fzero._again import Again
from fzero._arguments import need_function, wrong
from fzero._call import Call
from fzero._collectives import done
from fzero._compile import compiled, without_donation
from fzero._handle import Handle, storage_of
from fzero._node import Op, Tensors, apply, gradients, joint_outputs, refuse_foreign_leaves
from fzero._plain_unit import CHECKPOINTED, plain_call
from fzero._refusals import is_ours, noted
from fzero._sharded import is_sharded
from fzero._surroundings import Surroundings
from fzero._traversal import Traversal, current
from fzero._watch import begins, begun, elsewhere, is_strict, refuse_leaks, watching


class _Pull:
    """The kept graph of one first-order run of a unit."""

    __slots__ = ("inputs", "keys", "leaves", "outputs", "surroundings")

    def __init__(self, keys: list[Any], leaves: list[list[torch.Tensor]], inputs: dict[int, torch.Tensor]) -> None:
        self.keys, self.leaves, self.inputs = keys, leaves, inputs
        self.outputs: list[torch.Tensor] = []
        self.surroundings: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


class UnitOp(Op):
    """A unit's call: gather, run, free; and to pull back, gather again into the same storage, or recompute."""

    def __init__(
        self, traversal: Traversal, keys: list[Any], call: Call, recompute: bool, seed: int, number: int
    ) -> None:
        def pure(*tensors: torch.Tensor) -> Tensors:
            leaves: dict[int, torch.Tensor] = {}
            for key, primal in zip(keys, tensors, strict=False):
                leaves.update(traversal.layout.groups[key].views(traversal.uses[key].apply(primal)))
            # what they would run again later is not surrounded by what this run finds
            with torch.autograd.graph.disable_saved_tensors_hooks("saved tensor hooks in a derivative's derivative"):
                return call.body(leaves, tensors[len(keys) :])

        super().__init__(pure, seed, traversal.device)
        self.traversal, self.keys, self.call, self.recompute, self.number = traversal, keys, call, recompute, number
        self.name = f"unit {self.unit!r}"
        self._pull: _Pull | None = None
        self._fulls: dict[Any, torch.Tensor] = {}  # of this call's own graph
        self._is_begun, self._records, self._watched = begun(), torch.is_grad_enabled(), False
        self._arriving: dict[Any, Callable[[], None]] = {}  # to be waited for before the graph is pulled back
        self.used = False
        # under a single vjp what a unit closes over is no part of any graph: one run shows the mistake
        self._suspicious = not (traversal.schedule.on_track and _private.single_level()) or is_strict()
        traversal.schedule.runs(self)

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        schedule = self.traversal.schedule
        # also where it is recomputed: the graph, which ends with the run, shows what no derivative goes through
        out = self._forward(tensors, wanted, bool(wanted), schedule.gather_next)
        if self.recompute:
            self._pull = None
        if not wanted:
            self._fulls = {}
        elif self.recompute:
            if schedule.is_last():
                for key, full in self._fulls.items():
                    schedule.keep(key, full)
            self._fulls = {}
        elif schedule.is_last():  # the pullback starts with what is gathered last
            self._arriving = dict.fromkeys(self._fulls, done)
        else:
            self._empty()
        return out

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        keep = ends = self.traversal.retain_graph or _private.keeps_graph()
        if self.used:
            raise RuntimeError(used_up(f"unit {self.unit!r}"))
        if self.recompute:
            with torch.no_grad():
                self._forward(tuple(t.detach() for t in tensors()), wanted, True, self._gather_previous)
            keep = False
            if self.traversal.schedule.lean:
                self.traversal.schedule.finish_reduction()
        elif self._pull is None:
            return None
        else:
            self._refill()
            self._gather_previous()
        pull = self._pull
        assert pull is not None
        flat = [leaf for leaves in pull.leaves for leaf in leaves]
        inputs = list(pull.inputs.values())
        # not after the run: of each node that was looked at torch keeps a Python object, as long as the graph lives
        if not self._watched:
            refuse_foreign_leaves(pull.outputs, [*flat, *inputs], self._is_begun)
        with without_donation() if keep and self.traversal.compiles else contextlib.nullcontext(), pull.surroundings():
            found = list(gradients(pull.outputs, [*flat, *inputs], cotangents, keep))
        out = {
            i: torch.zeros_like(x) if g is None else g
            for (i, x), g in zip(pull.inputs.items(), found[len(flat) :], strict=True)
        }
        del found[len(flat) :], flat
        keys, sizes = pull.keys, [len(leaves) for leaves in pull.leaves]
        if keep:
            self._empty()
        else:
            self._pull, self._fulls = None, {}
            pull.outputs, pull.leaves, pull.surroundings = [], [], contextlib.nullcontext
        for key, size in zip(reversed(keys), reversed(sizes), strict=True):
            grads = found[len(found) - size :]
            del found[len(found) - size :]
            shard = self.traversal.collect(key, grads) if self.traversal.wants(key) else None
            if shard is not None:
                out[self.keys.index(key)] = shard
        if not ends:
            self.forget()
        return out

    def forget(self) -> None:
        """Lets go of the call: an output lies in an object that the call knows, and leads to the call by its graph."""
        self.used, self._pull = True, None
        self.call.forget()
        del self.call, self.fn

    @property
    def unit(self) -> str:
        return self.traversal.layout.groups[self.keys[0]].unit if self.keys else "of full params"

    def _forward(
        self, tensors: Tensors, wanted: Sequence[int], derived: bool, gather_ahead: Callable[[], None]
    ) -> Tensors:
        """Runs the unit's function.

        Args:
            wanted: positions to differentiate now: a graph is kept for them.
            derived: whether something differentiates this run, now or by running it again.
        """
        traversal, count = self.traversal, len(self.keys)
        self._fulls = {}
        leaves: dict[int, torch.Tensor] = {}
        differentiated: list[list[torch.Tensor]] = []
        fulls: list[torch.Tensor] = []
        for position, key in enumerate(self.keys):
            full, own = traversal.schedule.take(key, tensors[position])
            fulls.append(full)
            if own:
                self._fulls[key] = full
            views = traversal.layout.groups[key].cut(full)
            if position in wanted:
                differentiated.append([view.requires_grad_() for view in views.values()])
            leaves.update(views)
        gather_ahead()
        inputs = list(tensors[count:])
        for position in wanted:
            if position >= count:
                inputs[position - count] = inputs[position - count].detach().requires_grad_()
        grad_mode = torch.enable_grad() if self._records else torch.no_grad()
        begin = [
            *(leaf for group in differentiated for leaf in group),
            *(inputs[p - count] for p in wanted if p >= count),
        ]
        begins(self.unit, begin)
        thorough = (self._suspicious and derived) or self.call.facts.watched
        # what is no input shows itself, as an error, or to the watch
        guard = contextlib.nullcontext() if thorough or traversal.compiles else _private.without_dead_wrappers()
        with self.surroundings(), _private.saved_tensor_hooks(), guard, grad_mode:
            watch = self._watch(fulls, begin) if thorough and not traversal.compiles else None
            self._watched = watch is not None
            try:
                out = self.call.run(leaves, inputs, fulls, derived, self.unit, watch or contextlib.nullcontext())
            except Again:  # with what is gathered: the other ranks need not run again
                for key, full in self._fulls.items():
                    traversal.schedule.keep(key, full)
                raise
        every = frozenset(range(len(out)))
        if watch is not None and wanted:
            self.call.facts = self.call.facts._replace(joint=joint_outputs(out))
        self.joint = {i: every for i in every} if traversal.compiles else self.call.facts.joint
        if wanted:
            self._pull = _Pull(
                [self.keys[p] for p in wanted if p < count],
                differentiated,
                {p: inputs[p - count] for p in wanted if p >= count},
            )
            self._pull.outputs = [o for o in out if o.is_floating_point() or o.is_complex()]
            self._pull.surroundings = functools.partial(self.call.refilled, leaves, self.call.inner)
            if watch is not None:
                refuse_foreign_leaves(self._pull.outputs, begin, lambda leaf: id(leaf) not in watch.own)
        self.call.inner = (), []
        return tuple(o.detach() for o in out)

    def _watch(self, fulls: Sequence[torch.Tensor], begin: Sequence[torch.Tensor]) -> Any:
        groups = [self.traversal.layout.groups[key] for key in self.keys]
        return watching(
            self.unit,
            {
                storage_of(full): lambda x, group=group: f"Leaf {group.leaf_at(int(x.storage_offset()))!r}"
                for full, group in zip(fulls, groups, strict=True)
            },
            {*map(id, begin)},
        )

    def _empty(self) -> None:
        """Gives back the memory of the gathered buffers; the call's graph still refers to them."""
        for full in self._fulls.values():
            self.traversal.schedule.empty(full)

    def _gather_previous(self) -> None:
        self.traversal.schedule.gather_previous(self)

    def gather_ahead(self) -> None:
        """Starts to gather what the pullback of this call will need, where the pass that is running comes to it.

        That it still exists says nothing: whether what nobody needs is collected yet may differ between ranks.
        """
        node = self.node() if self.node is not None else None
        if node is None or not _private.will_run(node):
            return
        if self.recompute:
            self.traversal.schedule.gather_ahead(tuple(self.keys))
        elif self._pull is not None:
            for key, full in self._fulls.items():
                if key not in self._arriving:
                    self._arriving[key] = self.traversal.schedule.refill(key, full)

    def forget_ahead(self) -> None:
        """Leaves what was gathered ahead and not used."""
        for key in list(self._arriving):
            self._arriving.pop(key)()
            self.traversal.schedule.empty(self._fulls[key])

    def _refill(self) -> None:
        for key, full in self._fulls.items():
            (self._arriving.pop(key, None) or self.traversal.schedule.refill(key, full))()


def used_up(what: str) -> str:
    return (
        f"The pullback of {what} was used up by an earlier call, which freed what it kept. "
        "Pass retain_graph=True to every call but the last."
    )


def unit(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `fn(params_subtree, *args, **kwargs)` a unit: the grain at which params are gathered, freed and recomputed.

    Called with the leaves of a step's params it gathers them for this one use; outside of a step it is `fn`. It may use
    what functorch refuses elsewhere, such as `torch.utils.checkpoint` and old-style Functions.
    Arguments and outputs may be any pytrees and objects; what the function changes in them is changed for its caller.
    It may close over tensors and over objects that hold some: each that it reads is one of its inputs. A unit inside a
    unit is a plain call.

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


def call_unit(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    seed: int | None = None,
    compilable: Callable[..., Any] | None = None,
    surroundings: Surroundings | None = None,
    around: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None,
) -> Any:
    """Runs `fn(*args, **kwargs)` as one node, gathering the handles among its arguments.

    Args:
        seed: as in `plain_call`, where there are no handles.
        compilable: what runs in a compiled step in `fn`'s place; `fn` itself, compiled, by default.
        surroundings: what the function reads and writes beside its arguments; what it closes over by default.
        around: `around(args[0])` surrounds the pullback, which may run parts of the function again.
    """
    traversal, around_it = current.get(), surroundings or Surroundings(fn)
    plainly = functools.partial(
        plain_call,
        lambda: fn(*args, **kwargs),
        lambda seed: call_unit(fn, args, kwargs, seed, compilable, surroundings, around),
        (*args, *kwargs.values()),
        around_it,
    )
    if seed is None and (traversal is None or not traversal.acts):
        return plainly()
    if traversal is not None and traversal.acts and _private.in_checkpoint():
        raise noted(TypeError(CHECKPOINTED))
    with elsewhere():
        call = Call(fn, args, kwargs, around_it, around)
        if call.reach.handles or seed is not None:
            try:
                return _call(call, traversal, seed, compilable)
            except Exception as error:
                if is_ours(error):
                    noted(error)
                raise
    return plainly()


def _call(call: Call, traversal: Traversal | None, seed: int | None, compilable: Callable[..., Any] | None) -> Any:
    handles = call.reach.handles
    traversal = handles[0].traversal if handles else traversal
    assert traversal is not None
    if traversal.compiles:
        call.fn, call.compiles = compilable or compiled(call.fn), True
    seed = traversal.next_seed() if seed is None else seed
    schedule = traversal.schedule
    number = schedule.called(tuple(dict.fromkeys(handle.key for handle in handles)))
    moving = call.moving
    call.knows(traversal, schedule.facts(number, moving))
    again: Again | None = None
    while True:
        if again is not None:  # known from now on
            known, again = again, None
            call.learn(known)
            del known  # it leads to this frame
        try:
            result = _attempt(traversal, call, seed, number)
            break
        except Again as raised:
            again = raised
    schedule.record.facts[number, moving] = call.known
    return result


def _attempt(traversal: Traversal, call: Call, seed: int, number: int) -> Any:
    refuse_leaks(call.reach.tensors)
    primals = {handle.key: handle.primal for handle in (*call.reach.handles, *call.more)}
    # a derivative of a derivative recomputes anyway: keep no graph for it
    recompute = traversal.remat or _private.level() > 1
    op = UnitOp(traversal, list(primals), call, recompute, seed, number)
    call.unit, call.recomputes = op.unit, recompute
    operands, wanted = call.operands(list(primals.values()))
    return call.finish(apply(op, wanted, *operands))


def sum_over(params: Any, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The sum of `fn(leaf)` over all leaves of a tree of params: a regulariser, such as a weight decay in the loss.

    Inside a step's function it gathers the leaves unit by unit, one unit at a time; elsewhere it is the plain sum.

    Args:
        params: the params that the step's function is given, or any part of them.
        fn: `fn(leaf) -> 0-d tensor`.

    Raises:
        ValueError: the tree has no tensor, or `fn` returns something else.

    Example:
        >>> fz.sum_over({"a": torch.ones(2), "b": [torch.ones(3)]}, lambda leaf: leaf.square().sum())
        tensor(5.)
    """

    need_function(fn, "sum_over")
    leaves = [leaf for leaf in _tree.flatten(params, is_leaf=is_sharded)[0] if leaf is not None]
    if not leaves or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        raise wrong("sum_over", "params", params, "a tree of tensors: the params of a step, or a part of them")
    groups: dict[Any, list[torch.Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.unit if isinstance(leaf, Handle) else None, []).append(leaf)

    def summed(group: list[torch.Tensor]) -> torch.Tensor:
        total: Any = 0
        for leaf in group:
            value = fn(leaf)
            if not isinstance(value, torch.Tensor) or value.ndim:
                got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"sum_over: fn(leaf): got {got}, expected a 0-d tensor. Reduce it, e.g. .sum().")
            total = total + value
        return total

    reached = Surroundings(fn)
    parts = [
        summed(own) if unit is None else call_unit(summed, (own,), {}, surroundings=reached)
        for unit, own in groups.items()
    ]
    return functools.reduce(torch.add, parts)
