"""Asserts on pytrees; each names the path of the leaf that differs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fzero.base import pytree


def _pairs(first: object, second: object) -> list[tuple[str, Any, Any]]:
    names, leaves, spec = pytree.named_leaves(first)
    others, other_spec = pytree.flatten(second)
    if len(leaves) != len(others) or spec != other_spec:
        raise AssertionError(f"the trees differ in structure: {spec} and {other_spec}")
    return list(zip(names, leaves, others, strict=True))


def assert_trees_close(first: object, *rest: Any, rtol: float = 1e-10, atol: float = 0.0) -> None:
    """Every leaf within rtol of the largest value of that leaf (or atol).

    Example:
        >>> fz.testing.assert_trees_close({"w": torch.ones(2)}, {"w": torch.ones(2)})
    """
    for other in rest:
        for name, a, b in _pairs(first, other):
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                if a is not b and a != b:
                    raise AssertionError(f"leaf {name!r}: {a!r} and {b!r} differ")
                continue
            if a.shape != b.shape:
                raise AssertionError(f"leaf {name!r}: shapes {tuple(a.shape)} and {tuple(b.shape)} differ")
            x, y = a.detach().double(), b.detach().double()
            scale = max(x.abs().max().item(), y.abs().max().item()) if x.numel() else 0.0
            gap = (x - y).abs().max().item() if x.numel() else 0.0
            if not gap <= max(atol, rtol * scale):
                raise AssertionError(
                    f"leaf {name!r}: largest difference {gap:.3e}, expected at most {max(atol, rtol * scale):.3e} "
                    f"(rtol {rtol:g} of {scale:.3e})"
                )


def assert_trees_equal(first: object, *rest: Any) -> None:
    """Every leaf has the same dtype and the same bits; NaNs of the same bits are equal.

    Example:
        >>> fz.testing.assert_trees_equal([torch.ones(2)], [torch.ones(2)])
    """
    for other in rest:
        for name, a, b in _pairs(first, other):
            if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
                if a is not b and a != b:
                    raise AssertionError(f"leaf {name!r}: {a!r} and {b!r} differ")
            elif a.dtype != b.dtype or a.shape != b.shape:
                raise AssertionError(f"leaf {name!r}: {a.dtype}{tuple(a.shape)} and {b.dtype}{tuple(b.shape)} differ")
            elif _bits(a) != _bits(b):
                raise AssertionError(f"leaf {name!r}: the bits differ")


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes()


def assert_same_spec(first: object, *rest: Any) -> None:
    """Same structure, shapes, dtypes and devices.

    Example:
        >>> fz.testing.assert_same_spec({"w": torch.ones(2)}, {"w": torch.zeros(2)})
    """
    for other in rest:
        for name, a, b in _pairs(first, other):
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
                one, two = ((t.dtype, tuple(t.shape), t.device) for t in (a, b))
                if one != two:
                    raise AssertionError(f"leaf {name!r}: {one} and {two} differ")


def assert_all_finite(tree: object) -> None:
    """No leaf has an infinity or a NaN.

    Example:
        >>> fz.testing.assert_all_finite({"w": torch.ones(2)})
    """
    for name, leaf in zip(*pytree.named_leaves(tree)[:2], strict=True):
        if isinstance(leaf, torch.Tensor) and not torch.isfinite(leaf).all():
            raise AssertionError(f"leaf {name!r}: {int((~torch.isfinite(leaf)).sum())} values are not finite")


def assert_not_mutated(fn: Callable[..., object], *args: object) -> Any:
    """Calls `fn(*args)`, checks that no tensor among the arguments changed its bits, and returns the result.

    Example:
        >>> fz.testing.assert_not_mutated(torch.add, torch.ones(1), torch.ones(1))
        tensor([2.])
    """
    before = pytree.map(lambda t: t.detach().clone() if isinstance(t, torch.Tensor) else t, args)
    out = fn(*args)
    assert_trees_equal(before, args)
    return out


def assert_no_alias(first: object, second: object) -> None:
    """No leaf of one tree shares memory with a leaf of the other.

    Example:
        >>> fz.testing.assert_no_alias(torch.ones(1), torch.ones(1))
    """
    seen = {
        leaf.untyped_storage().data_ptr(): name
        for name, leaf in zip(*pytree.named_leaves(first)[:2], strict=True)
        if isinstance(leaf, torch.Tensor)
    }
    for name, leaf in zip(*pytree.named_leaves(second)[:2], strict=True):
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in seen:
            raise AssertionError(f"leaf {name!r} shares its memory with {seen[leaf.untyped_storage().data_ptr()]!r}")
