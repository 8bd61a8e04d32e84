"""How gloo's threads are scheduled."""

from __future__ import annotations

import os

import pytest
import torch

import fzero as fz
from fzero.comm import transport
from fzero.testing import run_ranks


def classes(rank: int) -> tuple[list[int], list[int]]:
    before = [os.sched_getscheduler(thread) for thread in transport.threads()]
    fz.parallel.axis(None, "tp")
    return before, [os.sched_getscheduler(thread) for thread in transport.threads()]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="the system has no such class")
@pytest.mark.skipif(torch.__version__ < "2.13", reason="older versions do not name gloo's threads")
def test_they_take_nobodys_place_once_there_is_an_axis() -> None:
    for before, after in run_ranks(classes, 2, backend="processes"):
        assert after and len(after) == len(before) and set(after) == {os.SCHED_BATCH}


def test_without_gloo_there_are_none() -> None:
    assert run_ranks(lambda rank: [*transport.threads()], 2) == [[], []]
    transport.make_way()
