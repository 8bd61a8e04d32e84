"""Whether a tensor has a tangent is known above autograd and below it."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from fzero.base.tangents import has_tangent


class _Asks(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.cat.default:
            self.said += [has_tangent(x) for x in args[0]]
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_is_told_of_tangents() -> None:
    with forward_ad.dual_level():
        dual, plain = forward_ad.make_dual(torch.ones(2), torch.ones(2)), torch.ones(2)
        whole = torch.ones(2, dtype=torch.int64)
        assert has_tangent(dual) and not has_tangent(plain) and not has_tangent(whole)
        with _Asks() as asks:
            torch.cat([dual, plain])
        assert asks.said[:2] == [True, False]  # and then of the tangents
