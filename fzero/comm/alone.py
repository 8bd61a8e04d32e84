"""One rank that stands for all of an axis, without a process group: shapes are right, and nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import ParamSpec, TypeVar, cast

import torch

from fzero.comm import backend
from fzero.comm.axis import Axis, Into
from fzero.comm.backend import Group, Wait, done

P = ParamSpec("P")
T = TypeVar("T")


class _Ranks:
    """A group that is its numbers alone."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class Alone(Axis):
    """An axis whose collectives make what they would make, and leave it as it is."""

    sent: list[tuple[str, Hashable, int]]  # (operation, tag, bytes) of each collective

    @staticmethod
    def of_ranks(size: int, rank: int = 0, tensor: tuple[int, int] = (0, 1)) -> Alone:
        """An axis of that many ranks.

        Args:
            tensor: this rank's number on the axis that leaves are cut over, and the number of ranks there.
        """
        group, out = backend.standing_for_all(cast(Group, _Ranks(size, rank))), object.__new__(Alone)
        over = Alone.of_ranks(tensor[1], tensor[0]) if tensor[1] > 1 else None
        own = {"group": group, "_size": size, "_rank": rank, "ranks": size, "tensor": over, "sent": []}
        vars(out).update(vars(Axis()) | own)
        return out

    def start_gather(self, full: torch.Tensor, shard: torch.Tensor, tag: Hashable = "") -> Wait:
        return done

    def _sum(self, tensor: torch.Tensor, tag: Hashable, groups: Sequence[Group]) -> torch.Tensor:
        for group in groups:
            tensor = tensor.clone()
            self._announced("all_reduce", tag, tensor, group, into=(tensor,))
        return tensor

    def _announced(
        self,
        operation: str,
        tag: Hashable,
        tensor: torch.Tensor,
        group: Group,
        sent: int | None = None,
        into: Into = (),
    ) -> Callable[[Callable[P, T]], Callable[P, T]]:
        self.sent.append((operation, tag, tensor.nbytes if sent is None else sent))
        return lambda call: call
