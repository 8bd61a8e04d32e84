"""Asserts on pytrees, each of which names the path of the leaf that differs, on communication, and on memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from fzero.base import pytree
from fzero.comm.divergence import recorded_collectives
from fzero.planning.live import LiveBytes

Out = TypeVar("Out")


def _compare(
    first: object, rest: Sequence[object], difference: Callable[[torch.Tensor, torch.Tensor], str], others: bool = True
) -> None:
    """Raises where leaves differ: tensors as `difference` says, others where they are not equal."""
    names, leaves, spec = pytree.named_leaves(first)
    for other in rest:
        theirs, other_spec = pytree.flatten(other)
        if len(leaves) != len(theirs) or spec != other_spec:
            raise AssertionError(f"the trees differ in structure: {spec} and {other_spec}")
        for name, a, b in zip(names, leaves, theirs, strict=True):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                said = difference(a, b)
            else:
                said = f"{a!r} and {b!r} differ" if others and a is not b and a != b else ""
            if said:
                raise AssertionError(f"leaf {name!r}: {said}")


def _tensors(tree: object) -> list[tuple[str, torch.Tensor]]:
    names, leaves, _ = pytree.named_leaves(tree)
    return [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if isinstance(leaf, torch.Tensor)]


def assert_trees_close(first: object, *rest: object, rtol: float = 1e-10, atol: float = 0.0) -> None:
    """Asserts that trees are equal up to rounding: the error names the leaf.

    Args:
        first: a pytree of tensors.
        rest: trees to compare with it.
        rtol: largest difference, as a share of the largest absolute value of that leaf.
        atol: largest difference that is always allowed.

    Example:
        >>> fz.testing.assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2)})
    """

    def difference(a: torch.Tensor, b: torch.Tensor) -> str:
        if a.shape != b.shape:
            return f"shapes {tuple(a.shape)} and {tuple(b.shape)} differ"
        if not a.numel():
            return ""
        x, y = a.detach().double(), b.detach().double()
        scale, gap = max(x.abs().max().item(), y.abs().max().item()), (x - y).abs().max().item()
        most = max(atol, rtol * scale)
        said = f"largest difference {gap:.3e}, expected at most {most:.3e} (rtol {rtol:g} of {scale:.3e})"
        return "" if gap <= most else said

    _compare(first, rest, difference)


def assert_trees_equal(first: object, *rest: object) -> None:
    """Asserts that all leaves of trees have the same dtypes and bits. NaNs with the same bits are equal.

    Example:
        >>> fz.testing.assert_trees_equal([torch.ones(2)], [torch.ones(2)])
    """

    def difference(a: torch.Tensor, b: torch.Tensor) -> str:
        if a.dtype != b.dtype or a.shape != b.shape:
            return f"{a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)} differ"
        return "" if _bits(a) == _bits(b) else "the bits differ"

    _compare(first, rest, difference)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()


def assert_same_spec(first: object, *rest: object) -> None:
    """Asserts that trees have the same structure, shapes, dtypes and devices.

    Example:
        >>> fz.testing.assert_same_spec({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    """

    def difference(a: torch.Tensor, b: torch.Tensor) -> str:
        one, two = ((t.dtype, tuple(t.shape), t.device) for t in (a, b))
        return "" if one == two else f"{one} and {two} differ"

    _compare(first, rest, difference, others=False)


def assert_all_finite(tree: object) -> None:
    """Asserts that no leaf of a tree has an infinity or a NaN.

    Example:
        >>> fz.testing.assert_all_finite({"w": torch.ones(2)})
    """
    for name, leaf in _tensors(tree):
        if not torch.isfinite(leaf).all():
            raise AssertionError(f"leaf {name!r}: {int((~torch.isfinite(leaf)).sum())} values are not finite")


def assert_not_mutated(fn: Callable[..., Out], *args: object) -> Out:
    """Calls `fn(*args)`, asserts that no tensor in the arguments has changed, and returns the result.

    Example:
        >>> fz.testing.assert_not_mutated(torch.add, torch.ones(1), torch.ones(1))
        tensor([2.])
    """
    before = pytree.map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, args)
    out = fn(*args)
    assert_trees_equal(before, args)
    return out


def assert_no_alias(first: object, second: object) -> None:
    """Asserts that no leaf of one tree shares memory with a leaf of the other.

    Example:
        >>> fz.testing.assert_no_alias(torch.ones(1), torch.ones(1))
    """
    leaves = list(_tensors(first))  # held: what was read into memory for this must not lend its place to the next
    seen = {leaf.untyped_storage().data_ptr(): name for name, leaf in leaves}
    for name, leaf in _tensors(second):
        if leaf.untyped_storage().data_ptr() in seen:
            raise AssertionError(f"leaf {name!r} shares its memory with {seen[leaf.untyped_storage().data_ptr()]!r}")


def assert_collectives(fn: Callable[[], Out], expected: Mapping[str, int]) -> Out:
    """Calls `fn()`, asserts how many collectives ran on this rank, and returns the result.

    Args:
        fn: a function without arguments.
        expected: "all_gather", "reduce_scatter" or "all_reduce" -> number. Kinds that are not named are not checked.

    Example:
        >>> fz.testing.assert_collectives(lambda: 1, {"all_gather": 0})
        1
    """
    with recorded_collectives() as record:
        out = fn()
    counts = Counter(operation for operation, _, _ in record)
    wrong = {name: (counts[name], number) for name, number in expected.items() if counts[name] != number}
    if wrong:
        listing = ", ".join(f"{name}: {got}, expected {want}" for name, (got, want) in wrong.items())
        raise AssertionError(f"{listing}. In order: {[(operation, tag) for operation, tag, _ in record]}")
    return out


def assert_peak_bytes(fn: Callable[[], Out], limit: int) -> Out:
    """Calls `fn()`, asserts that it never allocates more than `limit` bytes at once, and returns the result.

    Example:
        >>> fz.testing.assert_peak_bytes(lambda: torch.zeros(10), 40).shape
        torch.Size([10])
    """
    with LiveBytes() as live:
        out = fn()
    if live.peak > limit:
        raise AssertionError(f"peak of {live.peak:,} bytes, expected at most {limit:,}")
    return out
