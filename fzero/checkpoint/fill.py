"""A new state from files: which leaves are read and where they go; filled on every rank, or refused on every rank."""

from __future__ import annotations

import builtins
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from fzero.base import private, pytree
from fzero.base.arguments import need_bool, need_int, need_str
from fzero.base.patterns import matches, unmatched
from fzero.checkpoint.manifest import DamagedCheckpoint, NoCheckpoint
from fzero.comm.axis import Axis
from fzero.state.check_state import check_same_optimizer
from fzero.state.init import check_tables, init_state, leaf_specs
from fzero.state.origin import Move, Origin
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.rows import Leaf
from fzero.table.spec import Spec


class Everyone(NamedTuple):
    """The ranks of a state, numbered: those of one slice of the leaves come one after the other, by data rank."""

    axis: Axis

    @property
    def number(self) -> int:
        """Which of them this one is."""
        return self.axis.place_on_tensor[0] * self.axis.ranks + self.axis.data_rank

    @property
    def count(self) -> int:
        return self.axis.place_on_tensor[1] * self.axis.ranks

    @property
    def leads(self) -> bool:
        return self.number == 0

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""
        tensor = self.axis.tensor
        return max(self.axis.timeout, tensor.timeout if tensor is not None else 0.0)

    def exchange(self, text: str, what: str) -> list[str]:
        """The texts of all ranks, by their numbers."""
        texts = self.axis.exchange(text, what) if self.axis.ranks > 1 else [text]
        if self.axis.tensor is None or self.axis.tensor.size == 1:
            return texts
        return [each for own in self.axis.tensor.exchange(json.dumps(texts), what) for each in json.loads(own)]


@dataclass(frozen=True)
class Wanted:
    """What somebody asked to be read; made where all ranks learn what is wrong with it."""

    who: str  # the function, for errors
    place: str  # where the leaves lie, for errors
    # like, pattern, lossy, lenient: as of `fz.load`
    like: object = None
    pattern: str = "*"
    lossy: bool = False
    lenient: bool = False
    seed: int = 0  # of the state, where the files have none

    def __post_init__(self) -> None:
        need_str(self.pattern, self.who, "pattern", "a pattern of leaves")
        need_bool(self.lossy, self.who, "lossy")
        need_bool(self.lenient, self.who, "lenient")
        need_int(self.seed, self.who, "seed")
        if self.like is None and (self.pattern != "*" or self.lenient):
            raise ValueError(
                f"{self.who}: got pattern={self.pattern!r}, lenient={self.lenient} and no like=. Give like=, a tree "
                "of params: leaves that are not read take their values from it."
            )


@dataclass(frozen=True)
class Choice:
    """The leaves of the state to be."""

    layout: Layout
    structure: pytree.Spec
    taken: frozenset[str]  # the paths of those that are read
    device: torch.device  # that computes with them
    others: tuple[str, ...]  # in words, the leaves that only one side has

    @property
    def partial(self) -> bool:
        """True where leaves keep values that are not read."""
        return len(self.taken) < len(self.layout.rows)

    @property
    def with_moments(self) -> list[str]:
        """The paths that are read of leaves which have moments."""
        return [row.path for row in self.layout.rows if row.path in self.taken and row.moments is not None]


def choose(
    wanted: Wanted,
    saved: Sequence[Leaf],
    structure: Callable[[], pytree.Spec],
    step: Spec,
    axis: Axis,
) -> Choice:
    """Decides on the leaves and their places.

    Args:
        saved: what there is.
        structure: of the state, where no `like` says it; its leaves are those saved, in that order.
    """
    there: Mapping[str, tuple[int, ...]] = {path: tuple(shape) for path, shape, _ in saved}
    device = torch.get_default_device()
    unknown = set[str]()  # values that `like` does not have
    if wanted.like is None:
        specs, own = list(saved), structure()
    else:
        try:
            specs, leaves, own = leaf_specs(wanted.like)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{wanted.who}, like: {error}") from None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        device = next((leaf.device for leaf in tensors if not leaf.is_meta), device)
        unknown = {
            path
            for (path, _, _), leaf in zip(specs, leaves, strict=True)
            if isinstance(leaf, torch.Tensor) and leaf.is_meta
        }
    if device.type == "meta":
        raise ValueError(
            f"{wanted.who}: got the meta device as the default, whose tensors have no values. Call it outside of "
            "torch.device('meta'); the tensors of like= may stay there."
        )
    if lost := unmatched(wanted.pattern, [path for path, _, _ in specs]):
        some = ", ".join(path for path, _, _ in specs[:6]) + (", ..." if len(specs) > 6 else "")
        raise ValueError(
            f"{wanted.who}: got pattern={wanted.pattern!r}, of which {lost[0]!r} matches no leaf; expected some of "
            f"{some}."
        )
    taken, others = set[str](), list[str]()
    for path, shape, _ in specs:
        if not matches(wanted.pattern, path):
            continue
        if there.get(path) == tuple(shape):
            taken.add(path)
        else:
            got = f"shape {there[path]}" if path in there else "none"
            others.append(f"leaf {path!r}: got {got} there, expected shape {tuple(shape)}")
    given = {path for path, _, _ in specs}
    others += [
        f"leaf {path!r} of shape {shape} is there, and not in like"
        for path, shape in there.items()
        if path not in given and matches(wanted.pattern, path)
    ]
    if others and not wanted.lenient:
        more = f" (and {len(others) - 1} more)" if others[1:] else ""
        raise ValueError(
            f"{wanted.who}: got a like= whose leaves differ from those of {wanted.place}: {others[0]}{more}. Give a "
            "tree of the params that were saved. Or say lenient=True, and leaves that differ keep the values of "
            "like=."
        )
    if missing := sorted(unknown - taken):
        raise ValueError(
            f"{wanted.who}: leaf {missing[0]!r} is not read from {wanted.place}, and is on the meta device in like=, "
            "without values. Give it values there, or read it."
        )
    layout = Layout.build(step.rows(specs, frozen_leaves(own), hints_of(own)), axis.size, axis.place_on_tensor)
    return Choice(layout, own, frozenset(taken), device, tuple(others))


T = TypeVar("T")


def agreed(axis: Axis, job: Callable[[], T], verb: str = "load") -> T:
    """What a job that communicates nothing gives; where it fails on one rank of those at a verb, every rank raises."""
    error, out = None, None
    try:
        out = job()
    except Exception as own:
        error = own
    if Everyone(axis).count > 1:
        said = json.dumps([type(error).__name__, str(error)] if error else [])
        for rank, text in enumerate(Everyone(axis).exchange(said, verb)):
            if error is None and (theirs := json.loads(text)):
                error = as_said(theirs[0], f"rank {rank}: {theirs[1]}")
    try:
        if error is not None:
            raise error
    finally:
        del error  # which holds this frame
    return cast(T, out)


def as_said(kind: str, text: str) -> Exception:
    """An error of another rank, of the same kind where a text makes one."""
    ours = {each.__name__: each for each in (DamagedCheckpoint, NoCheckpoint)}
    own = ours.get(kind) or getattr(builtins, kind, RuntimeError)
    try:
        error = own(text)
    except TypeError:  # UnicodeDecodeError and the like
        error = None
    return error if isinstance(error, Exception) else RuntimeError(text)


class Files(Origin):
    """Files as the origin of a state."""

    device, what = torch.device("cpu"), "The checkpoints"
    said = ""  # what all ranks must find
    seed: int | None = None  # that the state was saved with, where the files have one

    @property
    def leaves(self) -> Sequence[Leaf]:
        """Of the params."""
        raise NotImplementedError

    def structure(self) -> pytree.Spec:
        """Of the params, where nobody says another one."""
        raise NotImplementedError

    def need_ties(self, pattern: str, axis: Axis) -> None:
        """Refuses two names of a tied leaf that disagree."""

    def count(self, paths: Sequence[str]) -> int:
        """How many updates the moments of these leaves have seen."""
        raise NotImplementedError

    def check(self, number: int, count: int) -> None:
        """Refuses what is not, or no longer, as it was written; each rank looks at its share."""

    def close(self) -> None:
        """Nothing more is read."""


F = TypeVar("F", bound=Files)


def loaded(
    step: Spec,
    asked: Callable[[], Wanted],
    opened: Callable[[Wanted, Axis], F],
    params_only: Callable[[], bool],
    level: int = 3,
) -> tuple[TrainState, F]:
    """A state of files, and these, which are closed; all ranks call it.

    Args:
        asked: what is wanted; refuses what is wrong with it.
        opened: the files, which it closes where it fails.
        params_only: whether all but the params begins; looked at once `asked` has refused what is wrong.
        level: of warnings.
    """
    wanted = agreed(step.axis(), asked)
    with private.of_normal_tensors(), private.below_transforms():
        axis = step.axis().of_component(step.name)
        everyone, files = Everyone(axis), None
        try:
            files = own = agreed(axis, lambda: opened(wanted, axis))
            seed = wanted.seed if own.seed is None else own.seed
            advice = "Give every rank the same path, and let nobody save there meanwhile."
            axis.check_same(f"{own.said}\nseed {seed}", own.what, advice)
            agreed(axis, lambda: own.need_ties(wanted.pattern, axis))
            choice = agreed(axis, lambda: choose(wanted, own.leaves, own.structure, step, axis))
            count = agreed(axis, lambda: None if params_only() else own.count(choice.with_moments))
            state = _filled(own, choice, wanted, step, axis, seed, count)
            agreed(axis, lambda: own.check(everyone.number, everyone.count))
        finally:
            if files is not None:
                files.close()
        if everyone.leads and choice.others:
            warnings.warn(f"{wanted.who}({wanted.place!r}): " + "; ".join(choice.others), stacklevel=level)
        return state, own


def _filled(
    files: Files, choice: Choice, wanted: Wanted, step: Spec, axis: Axis, seed: int, count: int | None
) -> TrainState:
    """The state of a step with what files have; without a count of updates all but the params begins."""
    taken = sorted(choice.taken) if choice.partial else "all leaves"
    anew = "all but the params anew" if count is None else f"update {count}"
    check_tables(step, choice.layout, axis, f"seed {seed}, {anew}, lossy {wanted.lossy}, of {taken}")
    move = Move(files, step, choice.device, wanted.lossy, count or 0, choice.taken)
    base = init_state(step, _base(wanted.like, choice), seed, sync=False).params if choice.partial else None
    params = agreed(axis, lambda: move.params(choice.layout, axis, choice.structure, base))
    params = move.held(params)
    check_same_optimizer("load", step.optimizer, params)
    moments, extra = move.begun(params, overwritten=count is not None and not choice.partial)
    grads = None
    if count is not None:

        def rest() -> tuple[object, dict[str, object], Sharded | None]:
            return move.moments(moments, choice.layout), move.extra(extra), move.grads(params)

        moments, extra, grads = agreed(axis, rest)
    return TrainState(params, grads, moments, extra, count or 0, seed, step.signature)


def _base(like: object, choice: Choice) -> object:
    """The params that leaves have which are not read; those that are need no values yet."""
    taken = [row.path in choice.taken for row in choice.layout.rows]
    makers = [
        functools.partial(torch.zeros, row.shape, dtype=row.dtype, device=choice.device) for row in choice.layout.rows
    ]
    leaves, spec = pytree.flatten(like)
    return pytree.unflatten(
        spec, [make if read else leaf for read, make, leaf in zip(taken, makers, leaves, strict=True)]
    )
