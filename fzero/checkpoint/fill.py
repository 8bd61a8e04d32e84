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

from fzero.base import pytree
from fzero.base.arguments import need_bool, need_str
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
    """What somebody asked to be read; made where all ranks learn what is wrong with it.

    Attributes:
        who: the function, for errors.
        place: where the leaves lie, for errors.
        like, pattern, lossy, lenient: as of `fz.load`.
    """

    who: str
    place: str
    like: object = None
    pattern: str = "*"
    lossy: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        need_str(self.pattern, self.who, "pattern", "a pattern of leaves")
        need_bool(self.lossy, self.who, "lossy")
        need_bool(self.lenient, self.who, "lenient")
        if self.like is None and (self.pattern != "*" or self.lenient):
            raise ValueError(
                f"{self.who}: got pattern={self.pattern!r}, lenient={self.lenient} and no like=. Give like=, a tree "
                "of params: leaves that are not read take their values from it."
            )


@dataclass(frozen=True)
class Choice:
    """The leaves of the state to be.

    Attributes:
        taken: the paths of those that are read.
        device: that computes with them.
        others: in words, the leaves that only one side has.
    """

    layout: Layout
    structure: pytree.Spec
    taken: frozenset[str]
    device: torch.device
    others: tuple[str, ...]

    @property
    def partial(self) -> bool:
        """True where leaves keep values that are not read."""
        return len(self.taken) < len(self.layout.rows)

    @property
    def with_moments(self) -> list[str]:
        """The paths that are read of leaves which have moments."""
        return [row.path for row in self.layout.rows if row.path in self.taken and row.moments is not None]

    def warn(self, wanted: Wanted, level: int) -> None:
        """Reports what only one side has."""
        if self.others:
            warnings.warn(f"{wanted.who}({wanted.place!r}): " + "; ".join(self.others), stacklevel=level + 1)


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
    """What a job that communicates nothing gives; where it fails on one rank, every rank raises.

    Args:
        verb: that all ranks are at, or are told so.
    """
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


def filled(
    origin: Origin, choice: Choice, wanted: Wanted, step: Spec, axis: Axis, seed: int, count: int | None
) -> TrainState:
    """The state of a step with the values of an origin.

    Args:
        count: the number of updates so far; None where all but the params begins.
    """
    taken = sorted(choice.taken) if choice.partial else "all leaves"
    anew = "all but the params anew" if count is None else f"update {count}"
    check_tables(step, choice.layout, axis, f"seed {seed}, {anew}, lossy {wanted.lossy}, of {taken}")
    move = Move(origin, step, choice.device, wanted.lossy, count or 0, choice.taken)
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
