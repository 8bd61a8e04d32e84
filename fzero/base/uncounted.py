"""Operators that write to what they are given, and tell no version counter: somebody is told before they do.

Such are batch norms with their running statistics, fused optimizers, quantisers that follow ranges, and operators of
users' own whose schemas say so. As in `fzero.base.intercept`, of which this is a second dispatch key, only they are
met, and only by threads that are within `told`: every other operator passes at no cost.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch

from fzero.base.intercept import stash
from fzero.base.interrupts import noted_by

Operator: TypeAlias = torch._ops.OpOverload
Tell = Callable[[str, torch.Tensor], object]
_C = torch._C
_NAME = "TESTING_ONLY_GenericWrapper"
_found = _C._parse_dispatch_key(_NAME)
assert _found is not None
_KEY = _found
_BELOW = _C._dispatch_keyset_full_after(_KEY)
_REGION = "fzero.told"  # autograd's threads inherit it from whoever calls a backward
# those that write to the running statistics of a batch norm; the schemas of most do not say so
STATISTICS = tuple(
    f"aten::{name}"
    for name in "native_batch_norm cudnn_batch_norm miopen_batch_norm batch_norm_update_stats batch_norm_gather_stats "
    "batch_norm_gather_stats_with_counts instance_norm _native_batch_norm_legit _batch_norm_with_update".split()
)
_UNSAID: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(STATISTICS, ("running_mean", "running_var")),
    "aten::embedding_renorm_": ("self",),  # which counts it, too late
}
_SWITCHES = ("training", "use_input_stats")  # arguments without which an operator writes to no statistics
_libraries: dict[str, torch.library.Library] = {}  # what is registered lasts as long as these
_known: set[str] = set()
_once = threading.Lock()


class told:
    """Inside, `tell(operator, tensor)` is called before an operator of this kind writes to a tensor, and may raise.

    So are those of the regions around it. `look_for_more` must have been called before.
    """

    __slots__ = ("_outer", "_tell")

    def __init__(self, tell: Tell) -> None:
        self._tell = tell

    def __enter__(self) -> None:
        self._outer = _swap(self)

    def __exit__(self, *_: object) -> None:
        _swap(self._outer)

    def of(self, operator: str, tensor: torch.Tensor) -> None:
        self._tell(operator, tensor)
        if self._outer is not None:
            self._outer.of(operator, tensor)


def _current() -> told | None:
    return _C._get_obj_in_tls(_REGION) if _C._is_key_in_tls(_REGION) else None


def _swap(region: told | None) -> told | None:
    before = _current()
    stash(_REGION, region)
    _C._dispatch_tls_set_dispatch_key_included(_KEY, region is not None)
    return before


@noted_by
def _note_region() -> tuple[Callable[[], bool], Callable[[], object]]:
    region = _current()
    return lambda: _current() is not region, lambda: _swap(region)


def look_for_more() -> None:
    """Finds operators of this kind that there are by now; those of users' own may be defined at any time."""
    with _once:
        if not _libraries:
            # operators written in Python have no fallback: the key is declared one that they pass
            torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
            for operator in torch._ops._higher_order_ops.values():
                operator.fallthrough(_KEY)
            _libraries["_"] = torch.library.Library("_", "IMPL")
            _libraries["_"].fallback(torch.library.fallthrough_kernel, _NAME)
        for name in _C._dispatch_get_all_op_names():
            if name not in _known:
                _known.add(name)
                _register(name)


def _register(name: str) -> None:
    base, _, overload = name.partition(".")
    namespace, _, packet = base.partition("::")
    if packet.startswith("_foreach_") or _C._get_operation_overload(base, overload) is None:
        return  # the former count, each tensor
    op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    written = [i for i, x in enumerate(op._schema.arguments) if x.name in _UNSAID.get(name, ())]
    if not written and not _counts(name):
        written = [i for i, x in enumerate(op._schema.arguments) if x.is_write and "Tensor" in str(x.type)]
    if not written:
        return
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "IMPL")
    _libraries[namespace].impl(op, _kernel(op, written), _NAME, with_keyset=True)


def _counts(name: str) -> bool:
    """Tells whether an operator counts what it writes, or calls others that do."""
    has = _C._dispatch_has_kernel_for_dispatch_key
    return has(name, "ADInplaceOrView") or has(name, "CompositeImplicitAutograd")


def _kernel(op: Operator, written: Sequence[int]) -> Callable[..., object]:
    names = [argument.name for argument in op._schema.arguments]

    def kernel(keyset: _C.DispatchKeySet, *args: object, **kwargs: object) -> object:
        given, region = dict(zip(names, args, strict=False), **kwargs), _current()
        if region is not None and not any(given.get(switch) is False for switch in _SWITCHES):
            for own in [given.get(names[i]) for i in written]:
                for x in own if isinstance(own, (list, tuple)) else (own,):
                    if isinstance(x, torch.Tensor):
                        region.of(op.name(), x)
        return op.redispatch(keyset & _BELOW, *args, **kwargs)

    # called in a part of compiled code that runs as it is written, it would be compiled, and what it calls
    return torch.compiler.disable(kernel)  # type: ignore[no-any-return]
