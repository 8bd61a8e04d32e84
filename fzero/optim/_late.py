"""What leaves that begin later than the run, or were frozen for a while, ask of an optimizer."""

from __future__ import annotations

from collections.abc import Set

import torch

from fzero.base import pytree
from fzero.base.rebound import is_others
from fzero.optim._join import members_and_states
from fzero.state.sharded import is_sharded, trees_of
from fzero.table.layout import Layout
from fzero.table.optimizer import GradientTransformation


def need_own_counts(
    who: str, optimizer: GradientTransformation, moments: object, layout: Layout, begins: Set[str] = frozenset()
) -> None:
    """Refuses one that has one count for all leaves where some have seen fewer updates than others, or will have.

    Args:
        begins: the leaves whose moments begin now, and the run has begun before.

    Raises:
        ValueError: it is the user's own, and keeps numbers that are of all leaves.
    """
    keeping = {slot.path for key in layout.keeping for slot in layout.groups[key].slots}
    for member, state in members_and_states(optimizer, moments) if keeping or begins else ():
        leaf = next((path for tree in trees_of(state) for path in tree if path in keeping | begins), None)
        if leaf is None or not is_others(member.update):
            continue
        names, nodes, _ = pytree.named_leaves(state, lambda x: is_sharded(x) or isinstance(x, pytree.Count))
        number = next(
            (n for n, x in zip(names, nodes, strict=True) if isinstance(x, (int, float, torch.Tensor, pytree.Count))),
            None,
        )
        if number is not None:
            label = f" ({member.label(leaf)})" if member.label else ""
            what = "keeps its moments frozen" if leaf in keeping else "begins later than others"
            raise ValueError(
                f"{who}: leaf {leaf!r} {what}, and the optimizer{label} keeps one number for all leaves "
                f"({number!r}), such as a count. It needs one for each leaf. Use fz.whole(optimizer) from the run's "
                "beginning, or keep only trees like the params."
            )
