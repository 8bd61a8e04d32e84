"""Whether a tensor has a tangent, asked of torch also where a dispatch mode runs."""

from __future__ import annotations

import torch


def has_tangent(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor has a tangent at the level of forward-mode AD.

    A dispatch mode runs below autograd, and there torch cannot take a dual tensor apart. Autograd's own kernels refuse
    a second tangent before they do anything else, so they are asked for one.
    """
    key = torch._C.DispatchKey
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(key.ADInplaceOrView):
        return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return False
    above = torch._C._dispatch_tls_local_exclude_set().remove(key.AutogradCPU).remove(key.ADInplaceOrView)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), above):
        try:
            torch._VF._make_dual(tensor, tensor, level=0)  # type: ignore[attr-defined]
        except RuntimeError as error:  # without one what follows may fail: a wrapper below its level has no memory
            return "already has a forward gradient" in str(error)
    return False
