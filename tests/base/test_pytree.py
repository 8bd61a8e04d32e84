"""One flattening for all: paths, order, None, and nodes that optree and torch both know."""

from __future__ import annotations

from typing import Any, NamedTuple

import optree
import torch
import torch.utils._pytree as torch_pytree

from fzero.base import pytree


class Pair(NamedTuple):
    first: object
    second: object


def test_paths_name_fields_keys_and_indices() -> None:
    paths, leaves, spec = pytree.named_leaves({"b": Pair(1, [2, None]), "a": 3})
    assert paths == ["a", "b.first", "b.second.0", "b.second.1"] and leaves == [3, 1, 2, None]
    assert pytree.unflatten(spec, [0, 1, 2, 3]) == {"a": 0, "b": Pair(1, [2, 3])}
    assert pytree.leaves([1, None]) == [1] and pytree.map(lambda x: -x, [1, None]) == [-1, None]


def test_a_tree_that_nothing_changes_is_itself() -> None:
    tree = {"a": [1, None]}
    assert pytree.map_leaves(lambda x: x, tree) is tree
    assert pytree.map_leaves(lambda x: 0 if x is None else x, tree) == {"a": [1, 0]}


def test_a_split_tree_is_joined_from_other_leaves() -> None:
    x, y = torch.ones(1), torch.zeros(2)
    split = pytree.Split({"a": x, "b": "kept", "c": [y, 7]}, pytree.is_tensor, lambda leaf: isinstance(leaf, int))
    assert split.places == [[0, 2], [3]] and split.leaves[1] == [7]
    assert split.join([1, 2], iter([3])) == {"a": 1, "b": "kept", "c": [2, 3]}


def test_a_count_is_no_leaf_and_takes_no_part_in_comparisons_of_structures() -> None:
    one: Any = {"n": pytree.Count(1), "x": 5}
    two: Any = {"n": pytree.Count(2), "x": 6}
    assert pytree.leaves(one) == torch_pytree.tree_leaves(one) == [5]
    assert optree.tree_structure(one) == optree.tree_structure(two)
    moved = torch_pytree.tree_map(lambda x: x + 1, two)
    assert moved["x"] == 7 and moved["n"].value == 2 and repr(moved["n"]) == "Count(2)"
