"""Streams of a thread's own; what is drawn from them: tests/base/test_random.py."""

from __future__ import annotations

import threading

import torch

from fzero.base import intercept
from fzero.base.random import seeded


def on_thread(fn: object) -> list[object]:
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(fn()))  # type: ignore[operator]
    thread.start()
    thread.join()
    return found


def test_only_the_main_thread_acts_for_it() -> None:
    assert intercept.acts_for_main() and on_thread(intercept.acts_for_main) == [False]


def test_a_swapped_stream_is_given_back_and_the_default_one_is_in_use_where_nothing_is_intercepted() -> None:
    def work() -> tuple[object, ...]:
        outer = intercept.swap_stream(None)
        with seeded(3) as _, intercept.unseen():
            before = torch.get_rng_state()
            torch.rand(1)
            moved = not torch.equal(before, torch.get_rng_state())
            torch.set_rng_state(before)
        return outer, moved, intercept.swap_stream(None)

    assert on_thread(work) == [(None, True, None)]


def test_the_default_generator_of_a_device() -> None:
    assert intercept.default_generator(torch.device("cpu")) is torch.default_generator
