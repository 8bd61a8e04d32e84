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
    if isinstance(error, KeyError):  # whose text is a key
        return
    names, leaves, _ = pytree.named_leaves(tuple(inputs))
    arrays = [name for name, x in zip(names, leaves, strict=True) if isinstance(x, np.ndarray)]
    text = str(error)
    if arrays and "ndarray" in text:
        error.add_note(f"Input {arrays[0]} is a numpy array, and params are tensors. Pass torch.as_tensor(x).")
        return
    here = params.device
    computed = [group.row.policy.compute for group in params.layout.groups.values()]
    for name, x in zip(names, leaves, strict=True):
        if not isinstance(x, torch.Tensor):
            continue
        if x.device != here and "device" in text:
            error.add_note(f"Input {name} is on {x.device}, and the params are on {here}. Pass x.to({str(here)!r}).")
            return
        if x.is_floating_point() and x.dtype not in computed and _DTYPES.search(text):
            dtype = computed[0]
            autocast = f", or replace compute= by fz.autocast(step, {dtype})" if dtype in _HALF else ""
            error.add_note(
                f"Input {name} is {x.dtype}, and the step computes with params in {dtype}. Cast the input: "
                f"x.to({dtype}){autocast}."
            )
            return
