"""Random bits for rounding: what they depend on, and that no two fields share one."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import fzero as fz
from fzero.formats.bits import Counters, Fields
from fzero.state.sharded import Draw
from fzero.table.layout import Key

FIELDS = {"p": (16, 16), "short": (8, 8), "m": (18, 6), "m4": (21, 5), "v": (18, 6)}


def test_random_bits_depend_on_leaf_offset_step_and_seed_only() -> None:
    """Whatever shares the buffer and however it is cut."""
    params = {"a": torch.empty(70, device="meta"), "b": torch.empty(1000, device="meta")}
    step = fz.shard_zero3(fz.train_step(lambda p: p, fz.sgd(0.1)))
    alone = fz.plan(step, {"b": params["b"]}).layout
    want = Draw(3, 5).counters(alone, Key("", 0), 0).keys("cpu")
    for ranks in (1, 2, 3, 4):
        layout = fz.plan(step, params, world_size=ranks).layout
        blocks = torch.cat([Draw(3, 5).counters(layout, Key("", 0), rank).keys("cpu") for rank in range(ranks)])
        assert torch.equal(blocks[2 : 2 + want.numel()], want)
    others = [draw.counters(alone, Key("", 0), 0).keys("cpu") for draw in (Draw(3, 6), Draw(4, 5))]
    assert all((other != want).all() for other in others) and len(set(want.tolist())) == want.numel()


def test_slices_over_a_tensor_axis_draw_their_own() -> None:
    params = {name: torch.empty(256, device="meta") for name in "ab"}
    step = fz.shard_tensor(fz.train_step(lambda p: p, fz.sgd(0.1)), {"b": 0})
    holdings = fz.plan(step, params, mesh={"tp": 2}).holdings
    one, two = (Draw(3, 5).counters(holdings.layout(rank), Key("", 0), 0).keys("cpu") for rank in range(2))
    assert torch.equal(one[:4], two[:4]) and not set(one[4:].tolist()) & set(two[4:].tolist())  # a is whole, b is cut


def test_a_part_of_a_buffer_counts_as_in_the_whole() -> None:
    counters = Counters(((0, 5, 7), (3, -100, 2), (5, 1 << 30, 1 << 30)), 7)
    for start, stop in itertools.combinations(range(0, 8 * 64, 64), 2):
        own = counters.cut(start, stop).keys("cpu")
        assert torch.equal(own, counters.keys("cpu", start, stop))
    assert not Counters().cut(64, 128).keys("cpu").numel()


@given(st.lists(st.sampled_from(sorted(FIELDS)), min_size=1, max_size=5), st.integers(0, 2**32 - 1))
def test_random_fields_have_bits_of_their_own(names: list[str], word: int) -> None:
    """A bit of a word changes the upper bits of one field at most, and every upper bit of a field is such a bit."""

    def drawn(words: dict[int, int]) -> list[int]:
        read: Any = lambda number: words.get(number, word)
        fields: Any = Fields(read, lambda x, n: x >> n)
        return [fields(*FIELDS[name]) >> FIELDS[name][0] - FIELDS[name][1] for name in names]

    start = drawn({})
    changed = [0] * len(names)
    for number, bit in itertools.product(range(len(names)), range(32)):
        flips = [a ^ b for a, b in zip(start, drawn({number: word ^ 1 << bit}), strict=True)]
        assert sum(map(bool, flips)) <= 1
        changed = [a | b for a, b in zip(changed, flips, strict=True)]
    assert changed == [(1 << FIELDS[name][1]) - 1 for name in names]
