"""What an operator of torch does with its operands: what it reads and writes, and its FLOPs by torch's formulas."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base import pytree
from fzero.base.as_written import uncompiled

Operator: TypeAlias = torch._ops.OpOverload
Function = Callable[..., object]
# which read of their operands no more than shapes
_SHAPES_ONLY = frozenset(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided new_zeros "
    "new_ones new_full".split()
)
# which write to statistics, and whose schemas do not say so
_STATISTICS = frozenset(
    "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts instance_norm _native_batch_norm_legit _batch_norm_with_update".split()
)
_SWITCHES = ("training", "use_input_stats")
_UNTRACKED = frozenset("set_ resize_ resize_as_ _resize_output_ set_data".split())  # give a tensor another memory


class Kind(NamedTuple):
    """One operator.

    Attributes:
        writes_unsaid: whether it may write to any operand.
        targets: positions and names of the operands that it writes to.
        switches: positions and names of arguments without which it writes nothing.
        shapes_only: whether it reads no values.
        seeded: whether it may draw random numbers.
        chances: positions and names of what it draws with; where one of them is 0 it draws nothing.
    """

    writes_unsaid: bool = False
    targets: tuple[tuple[int, str], ...] = ()
    switches: tuple[tuple[int, str], ...] = ()
    shapes_only: bool = False
    seeded: bool = False
    chances: tuple[tuple[int, str], ...] = ()

    def draws(self, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
        """Tells whether it draws random numbers, called with these."""
        chances = _given(self.chances, args, kwargs)  # each is 0 where it is not given
        return self.seeded and not any(x is None or (isinstance(x, (int, float)) and x == 0) for x in chances)

    def written(self, args: Sequence[object], kwargs: Mapping[str, object]) -> list[torch.Tensor]:
        """The tensors among the operands that it writes to."""
        if not self.targets or any(switch is False for switch in _given(self.switches, args, kwargs)):
            return []
        return pytree.tensors_in(*_given(self.targets, args, kwargs))


@functools.cache
def kind_of(func: Function) -> Kind:
    if not isinstance(func, torch._ops.OpOverload):
        return Kind()
    arguments = func._schema.arguments
    targets = [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]
    name = func._schema.name.rpartition("::")[2]
    if name in _STATISTICS:
        targets += [(i, a.name) for i, a in enumerate(arguments) if a.name in ("running_mean", "running_var")]
    return Kind(
        func.namespace in ("c10d", "_c10d_functional") or name in _UNTRACKED,
        tuple(targets),
        tuple([(i, a.name) for i, a in enumerate(arguments) if name in _STATISTICS and a.name in _SWITCHES]),
        name in _SHAPES_ONLY,
        torch.Tag.nondeterministic_seeded in func.tags and not name.endswith("_backward"),  # given its forward's seed
        tuple([(i, a.name) for i, a in enumerate(arguments) if a.name in ("dropout_p", "dropout")]),
    )


def _given(places: Iterable[tuple[int, str]], args: Sequence[object], kwargs: Mapping[str, object]) -> list[object]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in places]


def is_zero(x: torch.Tensor) -> bool:
    """Tells whether a tensor is zero and has no memory, as tangents of what does not depend on the input."""
    return bool(torch._is_zerotensor(x))  # type: ignore[attr-defined]


# ---- FLOPs of matrix products, convolutions and attention

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


@uncompiled
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


@uncompiled
class Wide(TorchDispatchMode):
    """Computes on in float64 where a function goes from there to fewer bits, as by x.float(), autocast or dtype=."""

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0  # of the coarsest dtype that it goes to all the same, as by a copy into a buffer

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        named = dict(kwargs or {})
        if not any(x.dtype in (torch.float64, torch.complex128) for x in pytree.tensors_in(*args)):
            return func(*args, **named)
        dtype = named.get("dtype")
        if isinstance(dtype, torch.dtype):
            named["dtype"] = wide_dtype(dtype)
        out = func(*args, **named)
        for x in pytree.tensors_in(out):
            if x.dtype != wide_dtype(x.dtype):
                self.eps = max(self.eps, torch.finfo(x.dtype).eps)
        return out


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of 64 bits for each real number that values of a dtype go to."""
    return torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
