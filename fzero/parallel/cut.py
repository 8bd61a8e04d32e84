"""fz.parallel.cut: what a plan of `fz.shard_tensor` says of a leaf that a style alone does not."""

from __future__ import annotations

from collections.abc import Sequence

from fzero.base.arguments import need_int, wrong
from fzero.table.slices import AUTO, STYLES, Cut


def cut(how: str | int, parts: Sequence[int] = (), multiple: int = 1) -> Cut:
    """Says how `fz.shard_tensor` cuts a leaf, if a style alone does not say it: fused weights, heads.

    Args:
        how: a style ("column", "column_gather", "row", "vocabulary", "whole"), or a dim.
        parts: sizes along the dim of what is fused into one leaf, such as query, key and value. Each part is cut by
            itself, and a rank has its pieces of all parts, one after the other.
        multiple: every piece is a multiple of this many elements along the dim, so that no head is cut in two.

    Returns:
        A value for a plan of `fz.shard_tensor`.

    Raises:
        TypeError, ValueError: not a style, a dim or sizes.

    Example:
        >>> plan = {"qkv": fz.parallel.cut(0, parts=(64, 16, 16), multiple=8)}
        >>> step = fz.shard_tensor(fz.train_step(lambda p, x: x, fz.sgd(0.1)), plan)
        >>> step.rows([("qkv", (96, 64), torch.float32)])[0].slices.sizes(4)
        [32, 32, 16, 16]
    """
    if isinstance(how, str) and how not in (*STYLES, AUTO):
        raise ValueError(f"parallel.cut: got how={how!r}, expected one of {', '.join(map(repr, STYLES))}, or a dim.")
    if not isinstance(how, str):
        how = need_int(how, "parallel.cut", "how", "a style or a dim")
    if not isinstance(parts, (tuple, list)):
        raise wrong("parallel.cut", "parts", parts, "sizes of parts along the dim")
    sizes = [need_int(part, "parallel.cut", "parts", "sizes of parts along the dim", least=0) for part in parts]
    return Cut(how, tuple(sizes), need_int(multiple, "parallel.cut", "multiple", "a number of elements", least=1))
