"""A unit's call after its first run: arguments go in, outputs come out, and nothing else is looked at.

The first run of a call (`fzero.engine.call`) finds out whether it is pure: it closes over constants only, changes
nothing that it did not make, and holds tensors in pytrees alone. Later calls of the same form come here.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch

from fzero.base import hooks, private, pytree, refusals, texts
from fzero.base.ambient import default_dtype, functions_seen
from fzero.base.context import averaged, during, in_function
from fzero.base.node import Tensors, apply
from fzero.base.quick_node import QuickOp, apply_at
from fzero.base.random import seeded
from fzero.base.thread_state import SET_GRAD_ENABLED
from fzero.capture.again import Again, Facts
from fzero.capture.exports import TAKES, Outlets, Slot, View
from fzero.capture.second_run import variables_here
from fzero.capture.watch import elsewhere, is_strict, leaf_of
from fzero.engine.activations import Inputs, Saved
from fzero.engine.op import NESTED, Pull, UnitOp
from fzero.engine.route import VALUES, Route, level_here
from fzero.engine.traversal import Traversal, current, here, inside, known
from fzero.stores.put import DEVICE
from fzero.table.names import NO_NAMES


class Same(NamedTuple):
    """Stands in a result for what is no tensor that the call has made."""

    value: object

    def outside(self, out: Sequence[torch.Tensor]) -> object:
        return self.value


Around = Callable[..., contextlib.AbstractContextManager[object]]


class StraightOp(UnitOp, QuickOp):
    """The node of such a call."""

    def __init__(
        self,
        traversal: Traversal,
        route: Route,
        fn: Callable[..., object],
        flat: Sequence[torch.Tensor],
        around: Around | None,
        number: int,
    ) -> None:
        self.seed, self.device, self.averaged = traversal.next_seed(), traversal.device, averaged.get()
        self.autocast = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        self.default_dtype, self.functions = torch.get_default_dtype(), functions_seen.now()
        self.node: weakref.ref[torch.autograd.graph.Node] | None = None
        self._names, self._gives_names = NO_NAMES, False
        self._memory, self.recompute = route.memory, route.remat
        self.traversal, self.route, self.unit_fn, self.number = traversal, route, fn, number
        self.keys, self.unit, self.joint = list(route.keys), route.unit, route.traits.joint
        self.name = f"unit {route.unit!r}"
        self.reduced = len(self.keys) if any(traversal.uses[key].axis.ranks > 1 for key in self.keys) else 0
        self._flat, self._around = flat, around
        self._pull, self._inputs, self._saved = None, None, None
        self._fulls, self._arriving = {}, {}
        self.used, self._watched, self._compiles = False, True, False
        self.wanted, self.real = route.wanted, list[int]()
        self._recipes: list[Slot | View | Same] = []
        self._puts_out: list[tuple[str, int]] | None = None
        self._variables = variables_here(ours=False) if self.recompute else ()
        traversal.schedule.runs(self)

    def fn(self, *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        """The call as a pure function of stored buffers and tensors, under any derivative."""
        leaves: dict[int, torch.Tensor] = {}
        for key, primal in zip(self.keys, tensors, strict=False):
            leaves.update(self.traversal.layout.groups[key].views(self.traversal.uses[key].apply(primal)))
        with torch.autograd.graph.disable_saved_tensors_hooks(NESTED):
            out = self._called(leaves, tensors[len(self.keys) :])
        assert self._puts_out is not None
        return tuple(TAKES[how](out[i]) for how, i in self._puts_out)

    def applied(self, level: int) -> object:
        """The call's result."""
        flat, route = self._flat, self.route
        operands = [flat[place].primal for place in route.primals]  # type: ignore[attr-defined]
        operands += [flat[place] for place in route.tensors]
        if level and route.wanted:
            if self._memory != DEVICE and self.recompute:
                alone = [i for i in route.wanted if i >= len(self.keys)]
                self._inputs = Inputs(operands, alone, self._memory, f"the inputs of {self.name}")
                self.stand_ins = self._inputs.stand_ins
            out = apply_at(level, self, operands)
        elif level:
            out = apply(self, route.wanted, *operands)
        else:
            out = self.run(tuple(operands), ())
        result = [recipe.outside(out) for recipe in self._recipes]
        self._recipes = []
        if self.stand_ins:  # whose tensors lie elsewhere now
            held = list(flat)
            for i, own in self.stand_ins.items():
                held[route.tensors[i - len(self.keys)]] = own
            self._flat, self.stand_ins = held, {}
        return pytree.unflatten(self._spec_out, result)

    def _called(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """The flat result of the function."""
        traversal, route = self.traversal, self.route
        filled, numbers = list(self._flat), dict[int, int]()
        present: dict[tuple[Traversal, int], torch.Tensor] = {}
        for place, index in route.handles:
            filled[place] = x = leaves[index]
            numbers[id(x)], present[traversal, index] = index, x
        for place, x in zip(route.tensors, tensors, strict=True):
            own = traversal.origins.get(id(filled[place]))
            if own is not None:
                numbers[id(x)] = own
            filled[place] = x
        args, kwargs = pytree.unflatten(route.spec, filled)
        tokens = current.set(None), here.set(present), known.set((traversal, numbers)), in_function.set(True)
        try:
            result = self.unit_fn(*args, **kwargs)
        except RuntimeError as error:
            if texts.says(error, texts.NO_MEMORY, texts.NO_STORAGE) and not refusals.is_ours(error):
                raise Again(Facts(watched=True)) from None
            raise self._refused(error) from error
        finally:
            current.reset(tokens[0])
            here.reset(tokens[1])
            known.reset(tokens[2])
            in_function.reset(tokens[3])
        out, self._spec_out = pytree.flatten(result)
        return cast(Sequence[torch.Tensor], out)  # and what is none, which nobody takes for one

    def _refused(self, error: RuntimeError) -> Exception:
        """What is said of an error of torch's."""
        if texts.says(error, texts.WRITES_LEAF):
            return ValueError(refusals.writes_leaf(self.unit))
        if texts.says(error, *texts.FREED):
            return ValueError(refusals.freed(f"{self.name}{refusals.place_of(error)}"))
        if texts.says(error, *refusals.of_derivatives()):
            return TypeError(refusals.twice(self.unit, error))
        return error

    def _forward(
        self, tensors: Tensors, wanted: Sequence[int], derived: bool, gather_ahead: Callable[[], None]
    ) -> Tensors:
        traversal, route, count = self.traversal, self.route, len(self.keys)
        schedule, groups = traversal.schedule, traversal.layout.groups
        self._fulls = {}
        leaves: dict[int, torch.Tensor] = {}
        differentiated: list[list[torch.Tensor]] = []
        fulls: list[torch.Tensor] = []
        for position, key in enumerate(self.keys):
            full, own = schedule.take(key)
            fulls.append(full)
            if own:
                self._fulls[key] = full
            views = groups[key].cut(full)
            if position in wanted:
                differentiated.append([view.requires_grad_() for view in views.values()])
            leaves.update(views)
        gather_ahead()
        inputs = {position: tensors[position] for position in wanted if position >= count}
        for x in inputs.values():
            x.requires_grad_()
        entered = _versions(tensors[count:], fulls)
        enabled, refused = torch.is_grad_enabled(), hooks.allow()
        SET_GRAD_ENABLED(route.grad)
        try:
            with self._saving(wanted, fulls, tensors[count:]), seeded(self.seed), private.without_dead_wrappers():
                out = self._called(leaves, tensors[count:])
                put = self._put_out(out, leaves, tensors[count:], fulls)
        except Again:
            for key, full in self._fulls.items():
                schedule.keep(key, full)
            raise
        finally:
            SET_GRAD_ENABLED(enabled)
            hooks.refuse_again(refused)
        if _versions(tensors[count:], fulls) != entered:
            self._refuse_writes(fulls, entered)
        self.real = [i for i, x in enumerate(put) if x.is_floating_point() or x.is_complex()]
        if wanted:
            self._pull = Pull(
                [self.keys[p] for p in wanted if p < count],
                differentiated,
                inputs,
                [put[i] for i in self.real],
                [(x, leaf_of(groups[key])) for x, key in zip(fulls, self.keys, strict=True)]
                if route.traits.users
                else (),
                functools.partial(self._refilled, leaves) if route.reruns else _nothing,
            )
        return tuple([x.detach() for x in put])

    def _refuse_writes(self, fulls: Sequence[torch.Tensor], entered: Sequence[int]) -> None:
        """Says what was written to in place."""
        if _versions((), fulls) != entered[len(entered) - len(fulls) :]:
            raise ValueError(refusals.writes_leaf(self.unit))
        raise ValueError(
            f"Unit {self.unit!r} changes one of its inputs in place, which it did not do in its first run. Write "
            "to a copy: x = x.clone(), or use the operation that is not in place."
        )

    def _put_out(
        self,
        out: Sequence[torch.Tensor],
        leaves: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fulls: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """Which tensors leave the node, and how the result is made of them."""
        first = self._puts_out is None
        places = {id(x): place for x, place in zip(inputs, self.route.tensors, strict=True)}
        memory = {x.untyped_storage()._cdata for x in (*inputs, *fulls) if x.layout == torch.strided}
        put: dict[int, int] = {}
        order: list[torch.Tensor] = []
        takes: list[tuple[str, int]] = []
        recipes: list[Slot | View | Same] = []
        for i, x in enumerate(out):
            if not isinstance(x, torch.Tensor):
                if not isinstance(x, VALUES) and type(x) not in self.route.opaque:
                    raise Again(Facts())
                recipes.append(Same(x))
            elif id(x) in places:
                recipes.append(Same(self._flat[places[id(x)]]))
            else:
                k = put.get(id(x))
                if k is None:
                    own = x.untyped_storage()._cdata if x.layout == torch.strided else 0
                    if own in memory:
                        return self._put_out_views(out, leaves, inputs, fulls)
                    if own:
                        memory.add(own)
                    k = put[id(x)] = len(order)
                    order.append(x)
                    takes.append(("as it is", i))
                recipes.append(Slot(k, self.route.grad and x.grad_fn is None))
        if first:
            self._puts_out, self._recipes = takes, recipes
        elif takes != self._puts_out:
            raise ValueError(refusals.another_run(self.unit))
        return order

    def _put_out_views(
        self,
        out: Sequence[torch.Tensor],
        leaves: Mapping[int, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        fulls: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor]:
        """The same where outputs share memory with each other, with inputs or with leaves."""
        places = {id(x): place for x, place in zip(inputs, self.route.tensors, strict=True)}
        index: dict[int, int] = {}
        own: list[tuple[int, torch.Tensor]] = []
        for i, x in enumerate(out):
            if isinstance(x, torch.Tensor) and id(x) not in places and id(x) not in index:
                index[id(x)] = len(own)
                own.append((i, x))
        tensors = [x for _, x in own]
        outer = [self._flat[place] for place in self.route.tensors]
        moving = {i for i, x in enumerate(inputs) if x.requires_grad}
        begin = {id(x) for x in (*inputs, *leaves.values())}
        memory = {full.untyped_storage()._cdata for full in fulls}
        outlets = Outlets(tensors, len(tensors), inputs, outer, memory, moving, begin)
        if self._puts_out is None:
            self._puts_out = [(how, own[i][0]) for how, i in outlets.chosen]
            self._recipes = []
            for x in out:
                if not isinstance(x, torch.Tensor):
                    self._recipes.append(Same(x))
                elif id(x) in places:
                    self._recipes.append(Same(self._flat[places[id(x)]]))
                else:
                    self._recipes.append(outlets.recipes[index[id(x)]])
        return [TAKES[how](out[i]) for how, i in self._puts_out]

    @contextlib.contextmanager
    def _refilled(self, leaves: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Around a pullback that may run parts of the function again (torch.utils.checkpoint)."""
        filled = list(self._flat)
        for place, index in self.route.handles:
            filled[place] = leaves[index]
        args, _ = pytree.unflatten(self.route.spec, filled)
        with inside({(self.traversal, index): x for index, x in leaves.items()}):
            with self._around(args[0]) if self._around else _NOTHING:
                yield

    def _saving(
        self, wanted: Sequence[int], fulls: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> contextlib.AbstractContextManager[object]:
        if self._memory == DEVICE or not wanted or self.recompute:
            return _NOTHING
        self._saved = saved = Saved(self._memory, f"the activations of {self.name}", [*fulls, *inputs])
        return saved.hooks()

    def back(
        self, tensors: Callable[[], Tensors], wanted: Sequence[int], cotangents: Sequence[torch.Tensor | None]
    ) -> dict[int, torch.Tensor] | None:
        with self.traversal.turn:
            return self._back(tensors, wanted, cotangents)

    def _run_again(self, tensors: Tensors, wanted: Sequence[int], gather_ahead: Callable[[], None]) -> None:
        enabled, dtype = self.autocast
        casts = torch.autocast(self.device, dtype=dtype, enabled=enabled, cache_enabled=False)
        with (
            functions_seen(self.functions),
            default_dtype(self.default_dtype),
            during(averaged, self.averaged),
            casts if enabled or torch.is_autocast_enabled(self.device) else _NOTHING,
        ):
            tokens = [(variable, variable.set(value)) for variable, value in self._variables]
            try:
                self._forward(tensors, wanted, True, gather_ahead)
            finally:
                for variable, token in tokens:
                    variable.reset(token)

    def _pulling(self, pull: Pull, keep: bool) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        if self.route.traits.users:
            return super()._pulling(pull, keep)
        return pull.surroundings()  # type: ignore[return-value]

    def forget(self) -> None:
        self.used, self._pull, self._inputs, self._saved = True, None, None, None
        self._flat, self.unit_fn = (), _forgotten


def _forgotten(*_: object) -> object:
    raise AssertionError("a call that was let go of")


def _nothing() -> contextlib.AbstractContextManager[None]:
    return _NOTHING


def call_straight(
    traversal: Traversal,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    around: Around | None,
) -> tuple[object] | None:
    """What a call returns whose first run was pure; None of another one."""
    schedule = traversal.schedule
    routes = cast(list[Route], schedule.routes())
    level = level_here() if routes else None
    if level is None or is_strict():
        return None
    flat, spec = pytree.flatten((args, kwargs))
    route = next((route for route in routes if route.fits(traversal, level, flat, spec)), None)
    if route is None:
        return None
    number = schedule.called(route.keys)
    schedule.pure += 1
    traversal.users = traversal.users or route.traits.users
    try:
        # where some calls are not pure, a guard looks at what the function does around this one
        with _NOTHING if schedule.record.pure else elsewhere(), autocast_to(traversal, route.casts):
            return (StraightOp(traversal, route, fn, flat, around, number).applied(level),)
    except Again:  # it reads what it had not read before: it is looked at once more, as are later ones
        routes.clear()
        schedule.forget_call()
        traversal.seeds.give_back()
        return None


def autocast_to(traversal: Traversal, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[object]:
    """A unit's call runs under its caller's autocast, but where its rows say another dtype."""
    if dtype == traversal.table.outside:
        return _NOTHING
    return torch.autocast(traversal.device, dtype=dtype, enabled=dtype is not None, cache_enabled=False)


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def _versions(inputs: Sequence[torch.Tensor], fulls: Sequence[torch.Tensor]) -> list[int]:
    return [0 if x.is_inference() else x._version for x in (*inputs, *fulls)]
