"""Random bits of an update: a number for each leaf, of seed, update and path."""

from __future__ import annotations

from fzero.state.draw import Draw


def test_every_leaf_seed_and_update_has_a_number_of_its_own() -> None:
    draws = [Draw(seed, count).of_leaf(path) for seed in (0, 1) for count in (0, 1) for path in ("a", "b")]
    assert len(set(draws)) == 8 and all(-(2**31) <= number < 2**31 for number in draws)
    assert Draw(3, 5, frozenset({"blocks.0"})).of_leaf("a") == Draw(3, 5).of_leaf("a")
