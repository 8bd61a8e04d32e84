"""Patterns over dotted paths, and the units that paths belong to."""

from __future__ import annotations

from fzero.base.patterns import ROOT, also, matches, unit_of, unmatched


def test_alternatives_are_separated_by_bars() -> None:
    assert matches("*norm*|*bias", "head.bias") and matches("*norm*|*bias", "blocks.0.norm.weight")
    assert not matches("*norm*|*bias", "head.weight") and not matches("Head.*", "head.weight")
    assert unmatched("*bias|*biass", ["head.bias"]) == ["*biass"] and also("*") == "" and "blocks" in also("blocks.*")


def test_a_unit_is_the_shortest_prefix() -> None:
    assert unit_of("blocks.0.attn.weight", None) == "blocks.0" and unit_of("head.weight", None) == ROOT
    assert unit_of("blocks.0.attn.weight", ["blocks.*.attn", "blocks.*"]) == "blocks.0"
    assert unit_of("blocks.0.attn.weight", ["head"]) == ROOT
