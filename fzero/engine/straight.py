"""A unit's call after its first run: arguments go in, outputs come out, and nothing else is looked at.

The first run of a call (`fzero.engine.call`) finds out whether it is pure: it closes over constants only, changes
nothing that it did not make, and holds tensors in pytrees alone. Later calls of the same form come here.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fzero.base import hooks, private, pytree, refusals, texts
from fzero.base.context import averaged, in_function
from fzero.base.node import Tensors, apply, closed_over
from fzero.base.pytree import is_real
from fzero.base.ambient import default_dtype, functions_seen
from fzero.base.context import during
from fzero.base.random import seeded
from fzero.capture.again import Again
from fzero.capture.exports import Outlets, base_of
from fzero.capture.handle import Handle
from fzero.capture.notes import notes
from fzero.capture.watch import is_strict
from fzero.engine.activations import Inputs, Saved
from fzero.engine.call import Call
from fzero.engine.op import NESTED, Pull, UnitOp
from fzero.engine.traversal import Traversal, current, here, inside, known
from fzero.capture.watch import leaf_of
from fzero.stores.put import DEVICE, Memory
from fzero.table.names import NO_NAMES

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_VALUES = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
ROUTES = 8  # forms of one call that are kept
_grad = torch._C._set_grad_enabled


class Route:
    """The form of a call whose first run was pure.

    Attributes:
        keys: the groups of its leaves, in order.
        handles: for each leaf, its place among the flat arguments and its index.
        primals: for each key, the place of one of its leaves.
        tensors: the places of its tensors.
        wanted: the positions of what is differentiated, keys first and then tensors.
        draws: whether torch's generator was drawn from.
    """

    def __init__(self, call: Call, flat: Sequence[object], spec: pytree.Spec, remat: bool, memory: Memory) -> None:
        self.reruns = call.reach.names(_RERUN)
        self.spec, self.keys, self.traits = spec, tuple(call.primals), call.facts
        self.unit, self.remat, self.memory = call.unit, remat, memory
        self.handles = [(place, x.index) for place, x in enumerate(flat) if isinstance(x, Handle)]
        first = {x.key: place for place, x in reversed([*enumerate(flat)]) if isinstance(x, Handle)}
        self.primals = [first[key] for key in self.keys]
        self.tensors = [p for p, x in enumerate(flat) if isinstance(x, torch.Tensor) and not isinstance(x, Handle)]
        self.grad, self.level = torch.is_grad_enabled(), private.level()
        operands = [*call.primals.values(), *[flat[place] for place in self.tensors]]
        moves = [self.grad and private.is_differentiated(x) for x in operands]  # type: ignore[arg-type]
        self.wanted = [i for i, own in enumerate(moves) if own]
        moving = {place for place, own in zip(self.tensors, moves[len(self.keys) :], strict=True) if own}
        self.forms: list[tuple[int, object]] = []
        for place, x in enumerate(flat):
            if isinstance(x, Handle):
                self.forms.append((_HANDLE, x.index))
            elif isinstance(x, torch.Tensor):
                self.forms.append((_TENSOR, (x.dtype, x.ndim, place in moving)))
            else:
                self.forms.append((_VALUE, x))

    def fits(self, traversal: Traversal, level: int, flat: Sequence[Any], spec: pytree.Spec) -> bool:
        """Tells whether a call has this form."""
        if level != self.level or torch.is_grad_enabled() != self.grad or spec != self.spec:
            return False
        for x, (kind, own) in zip(flat, self.forms, strict=True):
            if kind == _HANDLE:
                if type(x) is not Handle or x.index != own or x.owner is not traversal:
                    return False
            elif kind == _TENSOR:
                moves = type(x) in _PLAIN and x.requires_grad and self.grad and private.is_differentiated(x)
                if type(x) not in _PLAIN or (x.dtype, x.ndim, moves) != own:
                    return False
            elif x is not own and (type(x) is not type(own) or type(x) not in _VALUES or x != own):
                return False
        return True


_HANDLE, _TENSOR, _VALUE = range(3)
# what runs parts of a function again in its pullback
_RERUN = frozenset("checkpoint checkpoint_sequential saved_tensors_hooks register_hook".split())


def note_route(call: Call, traversal: Traversal, number: int, remat: bool, memory: Memory) -> None:
    """Notes the form of a call that has run, if it was pure."""
    flat, spec = pytree.flatten((call.args, call.kwargs))
    if _level() is None or call.compiles or not call.is_pure(flat) or notes.get() is not None:
        return
    traversal.schedule.pure += 1
    routes = traversal.schedule.record.routes.setdefault(number, [])
    routes[:] = [Route(call, flat, spec, remat, memory), *routes[: ROUTES - 1]]


def _level() -> int | None:
    """The level of torch.func that is alone all that differentiates here, 0 where nothing does; None for more."""
    level = private.single_level()
    return level or (0 if not (private.transforms() or torch.is_grad_enabled()) else None)


class NotPure(Exception):
    """A later run showed more of a call than its first one: it is looked at once more."""


def call_straight(
    traversal: Traversal,
    fn: Callable[..., object],
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    around: Callable[[Any], contextlib.AbstractContextManager[object]] | None,
) -> tuple[object] | None:
    """What a call returns whose first run was pure; None of another one."""
    schedule = traversal.schedule
    routes = schedule.routes()
    level = _level() if routes else None
    if level is None or is_strict():
        return None
    flat, spec = pytree.flatten((args, kwargs))
    route = next((route for route in routes if route.fits(traversal, level, flat, spec)), None)
    if route is None:
        return None
    number = schedule.called(route.keys)
    schedule.pure += 1
    traversal.users = traversal.users or route.traits.users
    return (StraightOp(traversal, route, fn, flat, around, number).applied(),)


class StraightOp(UnitOp):
    """The node of such a call."""

    def __init__(
        self,
        traversal: Traversal,
        route: Route,
        fn: Callable[..., object],
        flat: Sequence[object],
        around: Callable[[Any], contextlib.AbstractContextManager[object]] | None,
        number: int,
    ) -> None:
        self.seed, self.device, self.averaged = traversal.next_seed(), traversal.device, averaged.get()
        self.autocast = (torch.is_autocast_enabled(self.device), torch.get_autocast_dtype(self.device))
        self.default_dtype, self.functions = torch.get_default_dtype(), functions_seen.now()
        self.node = None
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
        self._recipes: list[tuple[int, object, bool]] = []
        self._puts_out: list[tuple[str, int]] | None = None
        traversal.schedule.runs(self)

    def fn(self, *tensors: torch.Tensor) -> Tensors:  # type: ignore[override]
        """The call as a pure function of stored buffers and tensors, under any derivative."""
        leaves: dict[int, torch.Tensor] = {}
        for key, primal in zip(self.keys, tensors, strict=False):
            leaves.update(self.traversal.layout.groups[key].views(self.traversal.uses[key].apply(primal)))
        with torch.autograd.graph.disable_saved_tensors_hooks(NESTED):
            out = self._called(leaves, tensors[len(self.keys) :])
        assert self._puts_out is not None
        return tuple(_TAKES[how](out[i]) for how, i in self._puts_out)

    def applied(self) -> object:
        """The call's result."""
        flat, route = self._flat, self.route
        operands = [flat[place].primal for place in route.primals]  # type: ignore[attr-defined]
        operands += [flat[place] for place in route.tensors]
        inputs = None
        if self._memory != DEVICE and self.recompute and route.wanted:
            count = len(self.keys)
            alone = [i for i in route.wanted if i >= count]
            self._inputs = inputs = Inputs(operands, alone, self._memory, f"the inputs of {self.name}")
            self.stand_ins = inputs.stand_ins
        out = apply(self, route.wanted, *operands)
        result = []
        for kind, own, constant in self._recipes:
            if kind == _OUT:
                x = out[own]
                result.append(x.detach() if constant else x)
            else:
                result.append(own.outside(out) if kind == _VIEW else own)
        self._recipes = []
        if inputs is not None:
            self.stand_ins = {}
            held = list(flat)
            for i, own in inputs.stand_ins.items():
                held[route.tensors[i - len(self.keys)]] = own
            self._flat = held
        return pytree.unflatten(self._spec_out, result)

    def _called(self, leaves: Mapping[int, torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The flat result of the function."""
        traversal, route = self.traversal, self.route
        filled, numbers = list(self._flat), {id(x): index for index, x in leaves.items()}
        for place, index in route.handles:
            filled[place] = leaves[index]
        for place, x in zip(route.tensors, tensors, strict=True):
            own = traversal.origins.get(id(filled[place]))
            if own is not None:
                numbers[id(x)] = own
            filled[place] = x
        args, kwargs = pytree.unflatten(route.spec, filled)
        present = {(traversal, index): x for index, x in leaves.items()}
        tokens = current.set(None), here.set(present), known.set((traversal, numbers)), in_function.set(True)
        try:
            result = self.unit_fn(*args, **kwargs)
        except RuntimeError as error:
            raise self._refused(error) from error
        finally:
            current.reset(tokens[0])
            here.reset(tokens[1])
            known.reset(tokens[2])
            in_function.reset(tokens[3])
        out, self._spec_out = pytree.flatten(result)
        return out

    def _refused(self, error: RuntimeError) -> Exception:
        """What is said of an error of torch's."""
        if texts.says(error, texts.NO_MEMORY, texts.NO_STORAGE) and not refusals.is_ours(error):
            return ValueError(f"{closed_over(torch.empty(0))} Its first run did not.")
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
        inputs = list(tensors[count:])
        for position in wanted:
            if position >= count:
                inputs[position - count].requires_grad_()
        before = [x._version for x in inputs], [x._version for x in fulls]
        enabled, refused = torch.is_grad_enabled(), hooks.allow()
        _grad(route.grad)
        try:
            with self._saving(wanted, fulls, inputs), seeded(self.seed), private.without_dead_wrappers():
                out = self._called(leaves, inputs)
        except Again:
            for key, full in self._fulls.items():
                schedule.keep(key, full)
            raise
        finally:
            _grad(enabled)
            hooks.refuse_again(refused)
        if [x._version for x in fulls] != before[1]:
            raise ValueError(refusals.writes_leaf(self.unit))
        if [x._version for x in inputs] != before[0]:
            raise ValueError(
                f"Unit {self.unit!r} changes one of its inputs in place, which it did not do in its first run. Write "
                "to a copy: x = x.clone(), or use the operation that is not in place."
            )
        put = self._put_out(out, leaves, inputs, fulls)
        if wanted:
            self._pull = Pull(
                [self.keys[p] for p in wanted if p < count],
                differentiated,
                {p: inputs[p - count] for p in wanted if p >= count},
                [o for o in put if is_real(o)],
                [(x, leaf_of(groups[key])) for x, key in zip(fulls, self.keys, strict=True)] if route.traits.users else (),
                functools.partial(self._refilled, leaves) if route.reruns else _nothing,
            )
        return tuple([o.detach() for o in put])

    def _put_out(
        self,
        out: Sequence[Any],
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
        recipes: list[tuple[int, object, bool]] = []
        for i, x in enumerate(out):
            if not isinstance(x, torch.Tensor):
                recipes.append((_AS_IT_IS, x, False))
            elif id(x) in places:
                recipes.append((_AS_IT_IS, self._flat[places[id(x)]], False))
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
                recipes.append((_OUT, k, self.route.grad and x.grad_fn is None))
        if first:
            self._puts_out, self._recipes = takes, recipes
        elif takes != self._puts_out:
            raise ValueError(refusals.another_run(self.unit))
        return order

    def _put_out_views(
        self,
        out: Sequence[Any],
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
            self._puts_out = [(how, own[i][0]) for how, i in outlets._chosen]
            self._recipes = [
                (_AS_IT_IS, x, False)
                if not isinstance(x, torch.Tensor)
                else (_AS_IT_IS, self._flat[places[id(x)]], False)
                if id(x) in places
                else (_VIEW, outlets.recipes[index[id(x)]], False)
                for x in out
            ]
        return [_TAKES[how](out[i]) for how, i in self._puts_out]

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
            self._forward(tensors, wanted, True, gather_ahead)

    def _pulling(self, pull: Pull, keep: bool) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        if self.route.traits.users:
            return super()._pulling(pull, keep)
        return pull.surroundings()  # type: ignore[return-value]

    def forget(self) -> None:
        self.used, self._pull, self._inputs, self._saved = True, None, None, None
        self._flat, self.unit_fn = (), None  # type: ignore[assignment]



def _nothing() -> contextlib.AbstractContextManager[None]:
    return _NOTHING


_NOTHING: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
_OUT, _VIEW, _AS_IT_IS = range(3)
_TAKES: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda x: x,
    "base": base_of,
    "copy": lambda x: x.resolve_conj().resolve_neg().clone(),
}
