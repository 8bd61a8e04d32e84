"""What to write instead, for errors of torch's own that come of an input: looked for once an error is on its way."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch

from fzero.base import pytree
from fzero.state.sharded import Sharded

_DTYPES = re.compile(r"dtype|scalar type|data type|type .*should be the same", re.IGNORECASE)
_HALF = (torch.bfloat16, torch.float16)


def add_hint(error: Exception, params: Sharded, inputs: Sequence[object]) -> None:
    """Adds a note to an error of a step's function if an input is a numpy array, or of another device or dtype."""
    names, leaves, _ = pytree.named_leaves(tuple(inputs))
    arrays = [name for name, x in zip(names, leaves, strict=True) if isinstance(x, np.ndarray)]
    if arrays and isinstance(error, TypeError):
        error.add_note(f"Input {arrays[0]} is a numpy array, and params are tensors. Pass torch.as_tensor(x).")
        return
    text = str(error)
    for name, x in zip(names, leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        if x.device != params.device and "device" in text:
            error.add_note(
                f"Input {name} is on {x.device}, and the params are on {params.device}. Pass x.to({str(params.device)!r})."
            )
            return
        computed = dict.fromkeys(group.row.policy.compute for group in params.layout.groups.values())
        if x.is_floating_point() and x.dtype not in computed and _DTYPES.search(text):
            dtype = next(iter(computed))
            cast = f", or replace compute= by fz.autocast(step, {dtype}), which casts as it goes"
            error.add_note(
                f"Input {name} is {x.dtype}, and the step computes with params in {dtype}. "
                f"Cast the input: x.to({dtype}){cast if dtype in _HALF else ''}."
            )
            return
