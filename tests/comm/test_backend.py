"""The one place that calls torch.distributed: bytes move alike on threads and on processes."""

from __future__ import annotations

import pytest
import torch

from fzero.comm import backend
from fzero.testing import run_ranks


def moved(rank: int) -> tuple[list[float], list[float], list[str], list[float]]:
    group = backend.world()
    assert group is not None and backend.members(group) == (0, 1, 2) and backend.global_rank() == rank
    full = torch.empty(6)
    backend.start_all_gather(full, torch.tensor([rank, 10.0 * rank]), group, 1)()
    total = torch.empty(2, dtype=torch.float64)  # the dtype that is summed in
    backend.start_reduce_scatter(torch.arange(6.0) * (rank + 1), total, group, 2, 3)()
    texts = backend.gather_strings("é" * rank, group)
    first = torch.full((2,), float(rank + 5))
    backend.broadcast(first, group)
    return full.tolist(), total.tolist(), texts, first.tolist()


@pytest.mark.parametrize("ranks", ["threads", "processes"])
def test_every_rank_has_what_it_should(ranks: str) -> None:
    for rank, (full, total, texts, first) in enumerate(run_ranks(moved, 3, backend=ranks)):
        assert full == [0.0, 0.0, 1.0, 10.0, 2.0, 20.0] and first == [5.0, 5.0]
        assert total == pytest.approx([2 * (2 * rank), 2 * (2 * rank + 1)])
        assert texts == ["", "é", "éé"]


def test_without_a_group_there_is_one_rank() -> None:
    assert (backend.size_of(None), backend.rank_in(None), backend.members(None)) == (1, 0, ())
    assert not backend.initialized()
