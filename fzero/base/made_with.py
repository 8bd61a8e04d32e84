"""What functions of this library were made with, to compare it among ranks."""

from __future__ import annotations

import torch

from fzero.base import private
from fzero.base.rebound import is_others, parts_of


def made_with(value: object) -> list[object]:
    """The numbers and words that this library's functions among a value hold, in order; nothing of others' functions.

    Of tensors a single number.
    """
    found, seen, todo = list[object](), {id(value)}, [value]
    for each in todo:  # which grows
        for part in parts_of(each):
            if isinstance(part, (bool, int, float, str)):
                found.append(part)
            elif isinstance(part, torch.Tensor):
                if part.ndim == 0 and not (private.is_wrapper(part) or private.is_fake(part) or part.is_meta):
                    found.append(part.item())
            elif id(part) not in seen and not (callable(part) and is_others(part)):
                seen.add(id(part))
                todo.append(part)
    return found
