"""Messages through memory that processes share: each comes whole, once, in order, however waits are ordered."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.comm import backend, same_host
from fzero.testing import run_ranks

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


def together(size: int, run: Callable[[int, same_host.Neighbours | None], Any], timeout: float = 30.0) -> list[Any]:
    """What `run(rank, neighbours)` gives on threads that have met."""
    barrier, said = threading.Barrier(size), [""] * size

    def gather(rank: int, text: str) -> list[str]:
        said[rank] = text
        barrier.wait()
        out = [*said]
        barrier.wait()
        return out

    def main(rank: int) -> Any:
        own = same_host.meet(rank, size, lambda text: gather(rank, text), timeout)
        try:
            return run(rank, own)
        finally:
            barrier.wait()
            if own is not None:
                own.close()

    with ThreadPoolExecutor(size) as pool:
        return [each.result() for each in [pool.submit(main, rank) for rank in range(size)]]


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(0, 2**32 - 1), st.booleans())
def test_exchanges_in_any_order(size: int, seed: int, shared: bool) -> None:
    """`shared`: each rank sends one tensor to all others."""
    draws = random.Random(seed)
    lengths = [0, 1, 7, 500, 3000, 40_000]
    plan = []
    for number in range(draws.randint(1, 12)):
        dtype = draws.choice(DTYPES)
        counts = [[draws.choice(lengths) for _ in range(size)] for _ in range(size)]
        counts = [[row[0]] * size for row in counts] if shared else counts
        plan.append((draws.choice([number, 3]), dtype, counts))

    def content(i: int, source: int, target: int) -> torch.Tensor:
        _, dtype, counts = plan[i]
        target = 0 if shared else target
        return (torch.arange(counts[source][target]) + 100 * i + 10 * source + target).remainder(251).to(dtype)

    def run(rank: int, own: same_host.Neighbours | None) -> bool:
        assert own is not None
        order, waits = random.Random(seed + rank), []
        for i, (number, dtype, counts) in enumerate(plan):
            send = [content(i, rank, to) for to in range(size)]
            send = [send[0]] * size if shared else send
            receive = [torch.empty(counts[source][0 if shared else rank], dtype=dtype) for source in range(size)]
            waits.append((i, receive, own.exchange(send, receive, number)))
            for x in send:
                x.zero_()  # it has left
            if order.random() < 0.3:
                order.shuffle(waits)
                waits[-1][2]()
        for _, _, wait in waits:
            wait()
            wait()
        return all(
            torch.equal(x, content(i, source, rank))
            for i, receive, _ in waits
            for source, x in enumerate(receive)
            if source != rank
        )

    assert all(together(size, run))


def test_segments_are_used_again() -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> tuple[int, int]:
        assert own is not None
        for number in range(60):
            x = torch.full((10_000 + number,), float(rank))
            out = [torch.empty_like(x) for _ in range(2)]
            own.exchange([x, x], out, number)()
            assert torch.equal(out[1 - rank], torch.full_like(x, 1.0 - rank))
        return len(own._peers[0]._lender._by_capacity), len(own._peers[0]._segments)

    for written, read in together(2, run):
        assert written <= 3 and read <= 3


def moved_elsewhere(rank: int) -> tuple[bool, list[list[float]], list[list[float]]]:
    """Each rank in turn sends last, when all others wait for it already."""
    group, here = backend.world(), same_host.AVAILABLE
    assert group is not None
    same_host.AVAILABLE = here and rank != 1
    gathered, summed = [], []
    for slow in range(3):
        full, total = torch.full((6000,), math.nan), torch.full((2000,), math.nan)
        time.sleep(0.2 if rank == slow else 0)
        backend.start_all_gather(full, torch.full((2000,), float(rank)), group, 1)()
        gathered.append(full[::2000].tolist())
        time.sleep(0.2 if rank == slow else 0)
        backend.start_reduce_scatter(torch.full((6000,), float(rank)), total, group, 2, 1)()
        summed.append(total[::1000].tolist())
    same_host.AVAILABLE = here
    return backend._neighbours[group] is None, gathered, summed


def test_one_of_another_machine() -> None:
    """All ranks are told, and stay with gloo."""
    expected = True, [[0.0, 1.0, 2.0]] * 3, [[3.0, 3.0]] * 3
    assert run_ranks(moved_elsewhere, 3, backend="processes") == [expected] * 3


def moved(rank: int) -> tuple[bool, list[float], list[float]]:
    group = backend.world()
    assert group is not None
    full, total = torch.empty(6000), torch.empty(2000)
    gathered = backend.start_all_gather(full, torch.full((2000,), float(rank)), group, 1)
    reduced = backend.start_reduce_scatter(torch.arange(6000.0), total, group, 2, 3)
    reduced()
    gathered()
    return backend._neighbours[group] is not None, full[::2000].tolist(), total[:2].tolist()


def test_processes_of_one_machine_share_memory() -> None:
    for rank, (near, full, total) in enumerate(run_ranks(moved, 3, backend="processes")):
        assert near == same_host.AVAILABLE and full == [0.0, 1.0, 2.0] and total == [2000.0 * rank, 2000.0 * rank + 1]


def test_other_sizes_are_refused_on_both_sides() -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> str:
        assert own is not None
        x, out = torch.ones(2000 + rank), [torch.empty(2000 + rank) for _ in range(2)]
        with pytest.raises(RuntimeError) as error:
            own.exchange([x, x], out, 1)()
        return str(error.value)

    said = together(2, run)
    assert any("bytes, expected" in each for each in said)
    assert all("bytes, expected" in each or "Connection closed by peer, rank" in each for each in said)


def test_who_waits_for_a_rank_that_ends() -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> None:
        assert own is not None
        x, out = torch.ones(2000), [torch.empty(2000) for _ in range(2)]
        if rank == 1:
            time.sleep(0.1)
            return own.close()
        began = time.monotonic()
        with pytest.raises(RuntimeError, match="Connection closed by peer, rank 1 of the group"):
            own.exchange([x, x], out, 1)()
        assert time.monotonic() - began < 10
        with pytest.raises(RuntimeError, match="Connection closed by peer, rank 1 of the group"):
            own.exchange([x, x], out, 2)()
        return None

    together(2, run)


def test_what_was_sent_before_its_end_arrives() -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> bool:
        assert own is not None
        out = [torch.empty(2000) for _ in range(2)]
        if rank == 1:
            own.exchange([torch.ones(2000)] * 2, out, 1)
            own.close()
            return True
        time.sleep(0.1)
        empty = torch.empty(0)
        own.exchange([empty, empty], out, 1)()
        return bool(out[1].eq(1).all())

    assert all(together(2, run))


def test_who_waits_for_too_long() -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> None:
        assert own is not None
        if rank == 0:
            x, out = torch.ones(2000), [torch.empty(2000) for _ in range(2)]
            with pytest.raises(RuntimeError, match="Timed out waiting for rank 1 of the group"):
                own.exchange([x, x], out, 1)()

    together(2, run, timeout=0.2)


@pytest.mark.parametrize(("count", "numel", "kept"), [(400, 500, same_host.KEPT), (6, 20_000, 10_000)])
def test_many_messages_that_nobody_reads(count: int, numel: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a socket holds: whoever sends reads meanwhile. More than what is kept of segments."""
    monkeypatch.setattr(same_host, "KEPT", kept)

    def run(rank: int, own: same_host.Neighbours | None) -> bool:
        assert own is not None
        waits, outs = [], []
        for number in range(count):
            outs.append([torch.empty(numel) for _ in range(2)])
            waits.append(own.exchange([torch.full((numel,), float(number))] * 2, outs[-1], number))
        for wait in waits:
            wait()
        return all(bool(out[1 - rank].eq(number).all()) for number, out in enumerate(outs))

    assert all(together(2, run))


def test_no_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int, own: same_host.Neighbours | None) -> str:
        assert own is not None
        own._peers[0]._lender.lend = lambda *_: None  # type: ignore[method-assign]
        out = [torch.empty(2000) for _ in range(2)]
        with pytest.raises(RuntimeError) as error:
            own.exchange([torch.ones(2000)] * 2, out, 1)
        return str(error.value)

    assert all("no shared memory" in said or "Connection closed by peer" in said for said in together(2, run))


def views(rank: int) -> list[list[complex]]:
    """Sums and pieces of what is conjugated, negated or transposed as a view alone."""
    group = backend.world()
    assert group is not None
    z = torch.complex(torch.ones(2), torch.full((2,), 2.0 * (rank + 1)))
    full = torch.empty(4, dtype=z.dtype)
    backend.start_all_gather(full, z.conj(), group, 1)()
    summed = z.clone().conj()
    backend.all_reduce(summed, group)
    negated = z.clone().conj().imag  # which negates as a view
    backend.all_reduce(negated, group)
    turned = torch.arange(6.0).view(2, 3).t() if rank else torch.arange(6.0).view(2, 3).t().contiguous()
    backend.all_reduce(turned, group)
    return [full.tolist(), summed.tolist(), negated.tolist(), turned.flatten().tolist()]


def test_views_travel_as_they_read() -> None:
    for full, summed, negated, turned in run_ranks(views, 2, backend="processes"):
        assert full == [1 - 2j, 1 - 2j, 1 - 4j, 1 - 4j] and summed == [2 - 6j] * 2 and negated == [-6.0] * 2
        assert turned == [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]


def crossed(rank: int) -> list[float]:
    """Two threads meet in two groups, on each rank in another order."""
    groups: list[Any] = [torch.distributed.new_group([0, 1]) for _ in range(2)]

    def one(place: int) -> float:
        if place != rank:
            time.sleep(0.2)
        out = torch.empty(4)
        backend.start_all_gather(out, torch.full((2,), float(rank + place)), groups[place], 1)()
        return out.sum().item()

    with ThreadPoolExecutor(2) as pool:
        return [each.result() for each in [pool.submit(one, place) for place in (rank, 1 - rank)]]


def test_threads_that_meet_in_other_orders() -> None:
    assert run_ranks(crossed, 2, backend="processes", timeout=20) == [[2.0, 6.0], [6.0, 2.0]]
