"""What acts on one derivative alone is refused in a unit that several go through."""

from __future__ import annotations

import sys
from typing import Self

import torch

from fzero.base import as_written
from fzero.base.refusals import is_library, noted, place_of
from fzero.table.handle import Function, Named, Operands, name_of

_HOOKS = {torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.register_post_accumulate_grad_hook}


class OneLevel(torch.overrides.TorchFunctionMode):
    """Refuses, in a unit that more than one derivative goes through, what acts on the one alone that sees it.

    A hook of a tensor, or what `x.data` leaves out, belongs to the derivative that is the innermost as the unit runs.
    A unit runs again for each of them by itself, and would have it in all, or in others.
    """

    def __init__(self, unit: str) -> None:
        super().__init__()
        self.unit = unit

    def __enter__(self) -> Self:
        as_written.begin(self)  # nothing compiled runs: Dynamo takes wrong steps under modes
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        as_written.end(self)

    def __torch_function__(self, func: Function, types: object, args: Operands = (), kwargs: Named = None) -> object:
        differentiated = func in _OF_ONE_LEVEL and isinstance(args[0], torch.Tensor) and args[0].requires_grad
        # what only reads may be a library, such as a step within the unit
        if differentiated and (func in _HOOKS or not is_library(sys._getframe(1).f_code.co_filename)):
            raise noted(
                ValueError(
                    f"Unit {self.unit!r} takes {name_of(func)!r} of a tensor that is differentiated{place_of()}, where "
                    "more than one derivative goes through it (torch.func.grad around it, fz.hvp, create_graph=True). "
                    "That acts on one of them alone, and a unit runs again for each. Compute the same by operations "
                    "(detach() for .data, an autograd.Function for a hook), or do it outside of units."
                )
            )
        return func(*args, **(kwargs or {}))


_OF_ONE_LEVEL = {
    *_HOOKS,
    *(torch.Tensor.data.__get__, torch.Tensor.data.__set__),  # type: ignore[attr-defined]
    *(torch.Tensor.detach_, torch.detach_),
    torch.Tensor.grad_fn.__get__,  # type: ignore[attr-defined] # whose hooks are no operations
}


OneLevel.__torch_function__._torchdynamo_disable = True  # type: ignore[attr-defined]
