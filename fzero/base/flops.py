"""FLOPs of matrix products, convolutions and attention, by torch's own formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base.operators import Function

# those of the CPU have none of their own
_ALIKE = {
    "_scaled_dot_product_flash_attention_for_cpu": "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "_scaled_dot_product_flash_attention_backward",
}


def flops_of(function: Function, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> int:
    """The FLOPs of one call; 0 of what has no formula.

    Args:
        args, kwargs, out: operands and results, tensors or their shapes.
    """
    from torch.utils.flop_counter import flop_registry  # slow to import

    if not isinstance(function, torch._ops.OpOverload):
        return 0
    packet = function.overloadpacket
    packet = (
        getattr(torch.ops.aten, _ALIKE.get(packet.__name__, ""), packet) if function.namespace == "aten" else packet
    )
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0


class Flops(TorchDispatchMode):
    """Inside, counts the FLOPs of what runs.

    Attributes:
        total: so far.
    """

    supports_higher_order_operators = True
    total = 0

    def __torch_dispatch__(
        self, func: Function, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        self.total += flops_of(func, args, kwargs or {}, out)
        return out
