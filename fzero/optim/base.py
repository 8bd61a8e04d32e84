"""What optimizers share: the checks of their numbers, their states, and one pass over every buffer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from fzero.base import pytree
from fzero.base.follow import any_follows, follows
from fzero.base.rebound import rebound, tensors_held
from fzero.formats.bits import Counters
from fzero.kernels.onepass import LARGE, Formula, Piece, math_dtype, run_all, write
from fzero.state.items import spans
from fzero.state.moments import zeros_like
from fzero.state.sharded import Draw, Sharded, is_sharded, map_trees
from fzero.state.sliced import cuts, to_sharded
from fzero.table.layout import Key
from fzero.table.needs import is_component, need_rate, need_scalar, numbers_in
from fzero.table.optimizer import GradientTransformation, Number, Schedule

Tree = TypeVar("Tree")
Kept = tuple[pytree.Count, *tuple[object, ...]]  # an optimizer's state: applied updates, moments
_METHODS = ("init", "update", "fused", "label", "metrics", "paused", "combine")
_RANGES: dict[str, Callable[[float], bool]] = {
    "a number in [0, 1)": lambda value: 0.0 <= value < 1.0,
    "a number in [0, 1]": lambda value: 0.0 <= value <= 1.0,
    "at least 0": lambda value: value >= 0.0,
    "a positive number": lambda value: value > 0.0,
    "a number": lambda value: not math.isnan(value),
    "a finite number of at least 0": lambda value: 0.0 <= value < math.inf,
    "a finite number of at least -16": lambda value: -16.0 <= value < math.inf,
}


def need_hypers(who: str, **hypers: tuple[Number | Schedule, str]) -> None:
    """Refuses a hyper-parameter of a wrong kind, or out of the range that is given with it; b1 may be a schedule."""
    for argument, (value, expected) in hypers.items():
        if argument == "b1" and callable(value) and not is_component(value):
            continue
        need_scalar(value, who, argument, f"{expected}, or a 0-d floating tensor")
        wrong = [x for x in numbers_in(value) if not _RANGES[expected](x)]
        if wrong:
            raise ValueError(f"{who}({argument}=...): got {wrong[0]}, expected {expected}.")


def rate(lr: Number | Schedule, count: int) -> Number:
    """The learning rate of the update after `count` applied ones; a tensor where a transform goes on through it."""
    now = lr(count) if callable(lr) else lr
    if follows(now):  # of each element, perhaps (`to_sharded`)
        return now
    if not isinstance(now, float) or now != now:
        need_rate(now, "the optimizer", -math.inf)  # a schedule may make anything, and end a little below 0
    return float(now)


def at(number: Number | Schedule, count: int) -> Number:
    """A number, or what a schedule of it gives for the update of this count, which is 1 for the first one."""
    return rate(number, count - 1) if callable(number) else number


def known(number: Number, held_by: object = None) -> float:
    """A number of an update in place, which none of an optimizer's tensors come to that can be seen.

    Args:
        held_by: what it comes from. A tensor that this holds has been seen, and is a constant.
    """
    if isinstance(number, torch.Tensor):
        if any(number is x for x in tensors_held(held_by)):
            return _as_number(number)
        raise TypeError(
            "step: torch.func differentiates through a tensor of the optimizer's schedule that is in a module, a "
            "cache or a context variable, where it cannot be seen. Let the schedule close over the tensor: write "
            "rate = where.rate outside of it, and use rate inside."
        )
    return number


def _as_number(x: torch.Tensor) -> float:
    """A tensor that an optimizer was made with, and that is a constant here, as a number."""
    (number,) = numbers_in(x)
    return number


class Rated:
    """What has a name in the table, and a learning rate among an update's metrics."""

    name: str
    lr: Number | Schedule

    def label(self, path: str) -> str:
        return self.name

    def metrics(self, old: Kept) -> dict[str, Number]:
        return {"lr": rate(self.lr, old[0].value)}


def transformation_of(own: object, **more: Any) -> GradientTransformation:
    """One of fzero's, that takes a step's trees: of an object's methods, those that it has."""
    methods = {name: getattr(own, name, None) for name in _METHODS}
    return GradientTransformation(**{**methods, "elementwise": True, **more})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Elementwise(Rated):
    """An optimizer of elementwise formulas, whose moments begin with zeros; as data, so that it can be pickled.

    In all of these `now` is the learning rate and `count` the number of updates, this one included. Numbers may be 0-d
    tensors.
    """

    name: str  # of its column in the table; up to a comma, its function's
    lr: Number | Schedule  # or a schedule of the number of applied updates
    state: Callable[..., Kept]  # state(count, *moments)
    nonnegative: Sequence[bool]  # for each moment whether it never is negative
    # direction(now, count, g, *moments) -> (update, *moments), of a tensor; a moment may be None
    direction: Callable[..., tuple[Any, ...]]
    formula: Formula  # formula(o, h, p, g, *moments) -> (p, *moments); h[0] multiplies the gradient
    hyper: Callable[[float, int], Sequence[float]]  # hyper(now, count), the numbers h from h[1] on
    # kernel(now, count, params, grads, *moments) of lists, in place, where all is in the dtype that is computed in
    kernel: Callable[..., None] | None = None
    generated: bool = False  # whether the formula is preferred where a kernel can be generated, also without a compiler
    coupled: Number = 0.0  # a weight decay that is added to the gradients
    decoupled: Number = 0.0  # one that is multiplied by the rate

    def __post_init__(self) -> None:
        name = self.name.partition(",")[0]
        need_rate(self.lr, name, -math.inf if name == "sgd" else 0.0)  # in a chain it scales what others give

    @functools.cached_property
    def _scheduled(self) -> Elementwise:
        """The same with a constant in the place of a schedule, which may ask its own tensors for anything."""
        return dataclasses.replace(self, lr=0.0) if callable(self.lr) else self

    @functools.cached_property
    def _tensors(self) -> list[torch.Tensor]:
        """Those that it was made with, but for a schedule's own."""
        return tensors_held(self._scheduled)

    def _in_numbers(self) -> Elementwise:
        own = rebound(self._scheduled, _as_number)
        return dataclasses.replace(own, lr=self.lr) if callable(self.lr) else own

    @property
    def transformation(self) -> GradientTransformation:
        return transformation_of(self, blank=True)

    def init(self, params: object) -> Kept:
        return self.state(pytree.Count(0), *[zeros_like(params, flag) for flag in self.nonnegative])

    def update(self, grads: object, old: Kept, params: object = None, **extra: object) -> tuple[object, Kept]:
        now, trees = rate(self.lr, old[0].value), (grads, params, *old[1:])
        self._need_own(old)
        if params is None and (is_some(self.coupled) or is_some(self.decoupled)):
            raise ValueError(f"{self.name}: got no params, which its weight decay needs: update(grads, state, params).")
        if isinstance(grads, Sharded):
            keys, made = grads.groups, [self._of_group(now, old[0], key, grads, trees) for key in grads.groups]
            tree_of = lambda like, buffers: like.over(dict(zip(keys, buffers, strict=True)))
        else:
            (paths, leaves, spec), own = pytree.named_leaves(grads), old[0].own()
            columns = [[None] * len(leaves) if x is None else pytree.flatten(x)[0] for x in trees]
            nothing = (None,) * (len(trees) - 1)  # as of a None among the grads, which is no leaf
            rows = zip(paths, *columns, strict=True)
            made = [nothing if g is None else self._of_tensor(now, own(path) + 1, g, *x) for path, g, *x in rows]
            tree_of = lambda _, leaves: pytree.unflatten(spec, leaves)
        made_of = lambda i, like: None if like is None else tree_of(like, [each[i] for each in made])
        out = [made_of(i, like) for i, like in enumerate((grads, *old[1:]))]
        return out[0], self.state(old[0].next(), *out[1:])

    def _need_own(self, old: Kept) -> None:
        """Refuses the state of an optimizer with fewer moments, such as of sgd without momentum."""
        count = sum(x is not None for x in old[1:])
        if count < len(self.nonnegative):
            raise ValueError(
                f"{self.name}: got a state with {count} moments of each leaf, expected {len(self.nonnegative)}, those "
                "of its own init. Begin with optimizer.init(params), or take the optimizer that the state is of."
            )

    def _of_group(
        self, now: Number, count: pytree.Count, key: Key, grads: Sharded, trees: Sequence[object]
    ) -> Sequence[torch.Tensor | None]:
        """This rank's slice of a group's update and moments, of leaves with other counts each by its own."""
        own: Any = self
        if cuts(grads) and any_follows((now, *self._tensors)):
            # over which ranks the cotangents of numbers are summed is the group's; a schedule was asked before: what it
            # computes with all ranks have alike
            own = dataclasses.replace(self, lr=now)
            own = rebound(own, lambda x: to_sharded(grads, key, x) if follows(x) else x)
            now = own.lr
        slices, parts = [x.local(key) if isinstance(x, Sharded) else None for x in trees], spans(count, grads, key)
        made = {missed: own._of_tensor(now, count.value - missed + 1, *slices) for *_, missed in parts}
        if len(made) == 1:
            return made[parts[0][2]]
        columns = zip(*[made[missed] for *_, missed in parts], strict=True)
        cut = lambda each: torch.cat([x[a:b] for x, (a, b, _) in zip(each, parts, strict=True)])
        return [None if each[0] is None else cut(each) for each in columns]

    def _of_tensor(
        self, now: Number, count: int, g: torch.Tensor, p: torch.Tensor, *moments: torch.Tensor | None
    ) -> Sequence[torch.Tensor | None]:
        """The update of a tensor, and its moments."""
        g = g + self.coupled * p if is_some(self.coupled) else g
        update, *new = self.direction(now, count, g, *moments)
        return less(update, now * self.decoupled, p) if is_some(self.decoupled) else update, *new

    def fused(self, params: Sharded, grads: Sharded, old: Kept) -> Kept:
        self._need_own(old)
        if self._tensors:
            return self._in_numbers().fused(params, grads, old)
        run_all(self.formula, self._pieces(params, grads, old), self.generated)
        return self.state(old[0].next(), *old[1:])

    def _pieces(self, params: Sharded, grads: Sharded, old: Kept) -> Iterator[Piece]:
        """What is to be updated, one after the other."""
        now, draw = known(rate(self.lr, old[0].value), self.lr), params.draw or Draw(0, 0)

        @functools.cache
        def of_count(count: int) -> tuple[tuple[float, ...], Callable[..., None] | None]:
            one = functools.partial(self.kernel, now, count) if self.kernel else None
            return (1.0 / grads.scale, *self.hyper(now, count)), one

        moments = [tree for tree in old[1:] if isinstance(tree, Sharded)]
        # a kernel is worth its compilation for many small groups, too
        many = params.device.type == "cpu" and params.layout.shard_total >= LARGE
        for key in params.groups:
            stored = [tree.stored(key) for tree in (params, *moments)]
            rounds = any([own.format.rounds for own in stored])
            counters = draw.counters(params.layout, key, params.rank_of(key)) if rounds else Counters()
            compiles, g = many or key.unit in draw.compiled, grads.local(key)
            for start, stop, missed in spans(old[0], params, key):
                numbers, one = of_count(old[0].value - missed + 1)
                own, its, drawn = stored, g, counters
                if stop - start < g.numel():
                    own, its = [x.cut(start, stop) for x in stored], g[start:stop]
                    drawn = counters.cut(start, stop)
                if its.numel():
                    yield Piece(numbers, own, its, drawn, compiles, one)


def is_some(number: Number) -> bool:
    """False for the number zero; a tensor may be another one."""
    return isinstance(number, torch.Tensor) or bool(number)


def mixed(old: torch.Tensor, new: torch.Tensor, keep: Number) -> torch.Tensor:
    """keep * old + (1 - keep) * new, in one pass where it can be."""
    if isinstance(keep, torch.Tensor) or old.dtype != new.dtype:
        return keep * old + (1 - keep) * new
    return torch.lerp(old, new, 1 - keep)


def less(x: torch.Tensor, factor: Number, y: torch.Tensor) -> torch.Tensor:
    """x - factor * y, in one pass where it can be."""
    return x - factor * y if isinstance(factor, torch.Tensor) else torch.sub(x, y, alpha=factor)


def values(tree: Tree) -> Tree:
    """A tree of values to compute with: a step's own decoded, without its scale, in float32 or float64."""
    if not isinstance(tree, Sharded):
        return tree

    wide = {key: x.to(math_dtype(x.dtype)) for key, x in tree.locals().items()}
    own = wide if tree.scale == 1.0 else {key: x / tree.scale for key, x in wide.items()}
    return tree.with_buffers(own, 1.0).replaced(draw=tree.draw)  # type: ignore[return-value]


def write_values(tree: Sharded, key: Key, value: torch.Tensor, draw: Draw) -> None:
    """Encodes values into a group of a tree, in its format."""
    counters = draw.counters(tree.layout, key, tree.rank_of(key))
    write(tree.stored(key), value, counters.keys(value.device))


def call_update(
    member: GradientTransformation, updates: object, state: object, params: object, extra: Mapping[str, object]
) -> tuple[Any, Any]:
    """`member.update` of values; of trees as they are stored, if it scales."""
    if not member.scales:
        updates, params, state = values(updates), values(params), map_trees(values, state)
    return member.update(updates, state, params, **extra)


def call_fused(
    member: GradientTransformation, params: Sharded, grads: object, state: object, extra: Mapping[str, object]
) -> object:
    """Updates params and state in place: by `member.fused`, or by its update, whose results are written over them."""
    if member.fused is not None:
        return member.fused(params, grads, state)
    updates, new = written(member, grads, state, params, extra)
    after, draw = values(params).map(torch.add, values(updates)), params.draw or Draw(0, 0)
    for key in params.groups:
        write_values(params, key, after.local(key), draw)
    return new


def written(
    member: GradientTransformation, updates: object, state: object, params: Any, extra: Mapping[str, object]
) -> tuple[Any, object]:
    """`member.update`, and its next state written over the old one, in the formats of that."""
    updates, new = call_update(member, updates, state, params, extra)
    if member.scales:  # it keeps nothing
        return updates, new
    draw = params.draw or Draw(0, 0)

    def one(after: Any, before: object) -> object:
        if not is_sharded(before):
            return after
        for key, value in values(after).locals().items():
            write_values(before, key, value, draw)
        return before

    return updates, pytree.map(one, new, state, is_leaf=is_sharded)  # a count, which is no leaf, is the new one's


def keywords_of(fn: Any) -> frozenset[str] | None:
    """The names of a function's parameters, None where it takes any."""
    own = inspect.signature(fn.forward if isinstance(fn, torch.nn.Module) else fn).parameters
    return None if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in own.values()) else frozenset(own)
