"""Sums over a dim that is cut, of which each rank has its part; what is linear leaves them so."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.base import pytree
from fzero.capture.handle import Function, Operands
from fzero.capture.notes import Cut
from fzero.parallel.cut_shapes import Given, Mixed
from fzero.parallel.elementwise import BOTH, named

PARTIAL = Cut(0)  # in the place of how a tensor is cut: it is as large as the whole
# of one tensor, or of several that are all parts of sums
_SUMS = frozenset(named("add sub subtract __add__ __radd__ __sub__ __rsub__", *BOTH))
_ADDED = frozenset(
    {
        *(*_SUMS, torch.Tensor.__getitem__, torch.Tensor.mT.__get__, torch.Tensor.T.__get__),  # type: ignore[attr-defined]
        *named("neg __neg__ clone contiguous detach sum mean to float double half bfloat16 view reshape", *BOTH),
        *named("flatten unflatten transpose permute movedim unsqueeze squeeze expand chunk split unbind", *BOTH),
        *named("cat concat stack t swapaxes", *BOTH),
    }
)
_SCALED = frozenset(named("mul multiply __mul__ __rmul__", *BOTH))
_DIVIDED = frozenset(named("div divide true_divide __truediv__", *BOTH))


def behind_partial(func: Function, args: Operands, kwargs: Given, cut_of: Callable[[object], Cut | None]) -> Cut:
    """What comes of parts of sums.

    Raises:
        Mixed: of the parts comes something else than of the sums.
    """
    tensors = [x for x in pytree.leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    cuts = [cut_of(x) for x in tensors]
    others = [cut for cut in cuts if cut is not None and cut != PARTIAL]
    if func in _ADDED:
        numbers = func in _SUMS and any(isinstance(x, (int, float, complex)) and x for x in args[1:2])
        fits = all(cut == PARTIAL for cut in cuts) and not numbers
    elif func in _SCALED:
        fits = cuts.count(PARTIAL) == 1
    else:
        fits = func in _DIVIDED and cut_of(args[0]) == PARTIAL and cuts.count(PARTIAL) == 1
    if others or not fits:
        raise Mixed
    return PARTIAL
