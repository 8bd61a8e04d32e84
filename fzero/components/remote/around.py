"""What holds around a call in the caller's thread or process alone, and would change what functions compute."""

from __future__ import annotations

import torch

from fzero.components.remote.link import Settings


def need_alike(settings: Settings, who: str) -> None:
    """Refuses what a rank does not see, and the same function in this process would.

    Raises:
        ValueError: autocast is on, or the default dtype is another one than when the component was started.
    """
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ValueError(
                f"{who}: got a call of component {settings.component!r} inside torch.autocast({device!r}), expected "
                "one outside: it holds for this thread alone, and the function runs on others. Let build return "
                "fz.autocast(step, dtype), or open torch.autocast in the function."
            )
    if torch.get_default_dtype() != settings.dtype:
        raise ValueError(
            f"{who}: got a call of component {settings.component!r} with the default dtype "
            f"{torch.get_default_dtype()}, expected {settings.dtype}, that of its start, which its ranks have. Call "
            "torch.set_default_dtype before fz.remote, or say dtype= where the function makes tensors."
        )
