"""Sums over a dim that is cut, of which each rank has its part; what is linear leaves them so."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fzero.base import pytree
from fzero.capture.handle import Function, Operands
from fzero.capture.notes import Cut
from fzero.parallel.cut_shapes import Given, Mixed, input_of
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


def behind_partial(
    func: Function, args: Operands, kwargs: Given, out: object, cut_of: Callable[[object], Cut | None]
) -> Cut:
    """What comes of parts of sums.

    Raises:
        Mixed: of the parts comes something else than of the sums.
    """
    given = pytree.leaves((args, kwargs))
    cuts = [cut_of(x) for x in given if isinstance(x, torch.Tensor)]
    if func in _ADDED:
        numbers = [x for name, x in (*enumerate(args), *kwargs.items()) if name != "alpha" and isinstance(x, _NUMBERS)]
        fits = all(cut == PARTIAL for cut in cuts) and not (func in _SUMS and any(numbers))
    elif func in _SCALED:
        fits = cuts.count(PARTIAL) == 1
    else:
        fits = func in _DIVIDED and cut_of(input_of(args, kwargs)) == PARTIAL and cuts.count(PARTIAL) == 1
        fits = fits and kwargs.get("rounding_mode") is None
    others = [cut for cut in cuts if cut is not None and cut != PARTIAL]
    rounded = [x for x in pytree.leaves(out) if isinstance(x, torch.Tensor) and not pytree.is_real(x)]
    if others or rounded or not fits:
        raise Mixed
    return PARTIAL


_NUMBERS = (int, float, complex)
