"""Which leaves are read, and where they go: what `fz.load` and the readers of others' files decide first."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from fzero.base import pytree
from fzero.base.arguments import need_bool, need_str
from fzero.base.patterns import matches, unmatched
from fzero.comm.axis import Axis
from fzero.state.init import leaf_specs
from fzero.table.layout import Layout
from fzero.table.module_params import frozen_leaves, hints_of
from fzero.table.rows import Leaf
from fzero.table.spec import Spec


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
