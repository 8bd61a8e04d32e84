"""Segments of shared memory: one in use is never written, a free one is used again, and idle ones are given back."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from channel_peers import pair, same
from hypothesis import given
from hypothesis import strategies as st

from fzero.channels import Connection
from fzero.channels.segments import FREE, IN_USE, PAGE, RETIRED, SHARED_FROM, Lender, size_class

MIB = 1 << 20


def there_is_one(lender: Lender, nbytes: int = SHARED_FROM) -> int | None:
    """The number of the segment that is lent next."""
    lent = lender.lend(nbytes, True)
    if lent is None:
        return None
    segment, new = lent
    for descriptor in new:
        os.close(descriptor)
    return segment.number


def free(lender: Lender, number: int) -> None:
    segments = [segment for group in lender._by_capacity.values() for segment in group]
    (segment,) = [segment for segment in segments if segment.number == number]
    assert segment.state == IN_USE
    segment.state = FREE


@given(st.integers(1, 1 << 40))
def test_size_classes(nbytes: int) -> None:
    capacity = size_class(nbytes)
    assert nbytes <= capacity <= max(nbytes + PAGE, nbytes * 9 / 8) and capacity % PAGE == 0
    assert size_class(capacity) == capacity


def test_free_segments_are_lent_again() -> None:
    lender = Lender()
    assert [there_is_one(lender), there_is_one(lender)] == [0, 1]
    free(lender, 0)
    assert there_is_one(lender, SHARED_FROM - 100) == 0
    assert there_is_one(lender) == 2
    free(lender, 1)
    assert there_is_one(lender, SHARED_FROM // 4) == 3  # which is of another size
    assert lender.lend(MIB, False) is None


def test_the_bound_of_the_pool() -> None:
    lender = Lender(4 * MIB)
    assert [there_is_one(lender, MIB) for _ in range(5)] == [0, 1, 2, 3, None]
    free(lender, 2)
    free(lender, 1)
    assert there_is_one(lender, 2 * MIB) == 4 and lender.nbytes == 4 * MIB
    assert there_is_one(lender, MIB) is None


def test_idle_segments_are_let_go() -> None:
    lender = Lender()
    for _ in range(3):
        there_is_one(lender, MIB)
    free(lender, 1)
    kept = {segment.number: segment for group in lender._by_capacity.values() for segment in group}
    lender.trim(60.0)
    assert lender.nbytes == 3 * MIB
    lender.trim(0.0)
    assert lender.nbytes == 2 * MIB
    assert [kept[number].state for number in range(3)] == [IN_USE, RETIRED, IN_USE]


def test_without_memory_tensors_go_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> int:
        raise OSError("no more")

    with pair("shared") as (here, there):
        for name in ("memfd_create", "posix_fallocate"):
            with monkeypatch.context() as patch:
                patch.setattr(os, name, fails)
                here.send([x := torch.arange(MIB), 3])
                assert same(there.receive(5.0), [x, 3])
        assert here._lender is not None and here._lender.nbytes == 0


def number_of(connection: Connection) -> int:
    assert connection._lender is not None
    return sum(map(len, connection._lender._by_capacity.values()))


def test_a_segment_is_used_by_the_last_view() -> None:
    with pair("shared") as (here, there):
        here.send(torch.arange(MIB))
        got = there.receive(5.0)
        assert isinstance(got, torch.Tensor)
        view = got.view(2, -1)[1, ::7].unflatten(0, (1, -1)).detach()
        del got
        for _ in range(5):
            here.send(torch.zeros(MIB, dtype=torch.int64))
            there.receive(5.0)
        assert number_of(here) == 2 and torch.equal(view[0], torch.arange(MIB)[MIB // 2 :: 7])
        assert view.untyped_storage().nbytes() == 8 * MIB
        del view
        for _ in range(5):
            here.send([torch.arange(MIB), torch.arange(MIB)])
            there.receive(5.0)
        assert number_of(here) == 2  # both of them again


def test_tensors_live_on_behind_the_connection() -> None:
    with pair("shared") as (here, there):
        here.send([torch.arange(MIB), torch.ones(MIB)])
        got = there.receive(5.0)
    for _ in range(3):
        with pair("shared") as (here, there):
            here.send(torch.zeros(MIB))
            there.receive(5.0)
    assert same(got, [torch.arange(MIB), torch.ones(MIB)])


def test_more_new_segments_than_a_message_takes() -> None:
    with pair("shared") as (here, there):
        several = [torch.full((SHARED_FROM,), number, dtype=torch.uint8) for number in range(150)]
        for expected in (64, 128, 150, 150):
            here.send(several)
            assert same(there.receive(5.0), several)
            assert number_of(here) == expected


def test_nothing_in_use_is_written() -> None:
    """A receiver that keeps some of what comes, drawn anew, and drops others in threads of its own."""
    random = torch.Generator().manual_seed(0)
    with pair("shared") as (here, there):
        kept: list[tuple[int, torch.Tensor]] = []
        for number in range(300):
            here.send(torch.full((SHARED_FROM << int(torch.randint(3, (), generator=random)),), number % 251))
            got = there.receive(5.0)
            assert isinstance(got, torch.Tensor)
            kept.append((number % 251, got))
            del got
            while len(kept) > 12 or (kept and torch.rand((), generator=random) < 0.5):
                value, one = kept.pop(int(torch.randint(len(kept), (), generator=random)))
                assert (one == value).all()
                thread = threading.Thread(target=lambda box: box.clear(), args=([one],))
                del one
                thread.start()
                if number % 2:
                    thread.join()
        assert all((one == value).all() for value, one in kept)
        assert number_of(here) < 60


def test_idle_segments_go_while_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fzero.channels.wire.TICK", 0.05)
    monkeypatch.setattr(Lender.trim, "__defaults__", (0.2,))
    with pair("shared") as (here, there):
        here.send(torch.ones(MIB))
        there.receive(5.0)
        end = time.monotonic() + 5.0
        while number_of(here) or there._borrower._mapped:
            assert time.monotonic() < end
            time.sleep(0.02)
        here.send(x := torch.ones(MIB))
        assert same(there.receive(5.0), x)
