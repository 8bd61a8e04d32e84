"""What acts on one derivative alone is refused in a unit that several go through."""

from __future__ import annotations

import functools
import sys

import torch

from fzero.base.as_written import Functions
from fzero.base.refusals import is_library, noted, place_of
from fzero.purity.look import HOOKS
from fzero.table.handle import Function, Named, Operands, name_of

_OF_ONE_LEVEL = {
    *HOOKS,
    *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.detach_, torch.detach_),
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined] # whose hooks are no operations
}


def one_level(unit: str) -> Functions:
    """Refuses, in a unit that more than one derivative goes through, what acts on the one alone that sees it.

    A hook of a tensor, or what `x.data` leaves out, belongs to the derivative that is the innermost as the unit runs.
    A unit runs again for each of them by itself, and would have it in all, or in others.
    """
    return Functions(functools.partial(_refuse, unit))


def _refuse(unit: str, func: Function, args: Operands, kwargs: Named) -> tuple[Operands, Named]:
    differentiated = func in _OF_ONE_LEVEL and isinstance(args[0], torch.Tensor) and args[0].requires_grad
    # what only reads may be a library, such as a step within the unit
    if differentiated and (func in HOOKS or not is_library(sys._getframe(2).f_code.co_filename)):
        raise noted(
            ValueError(
                f"Unit {unit!r} takes {name_of(func)!r} of a tensor that is differentiated{place_of()}, where more "
                "than one derivative goes through it (torch.func.grad around it, fz.hvp, create_graph=True). That acts "
                "on one of them alone, and a unit runs again for each. Compute the same by operations (detach() for "
                ".data, an autograd.Function for a hook), or do it outside of units."
            )
        )
    return args, kwargs
