"""Documents with needles: bytes of Python's standard library with a letter and a digit in many places, such as "Q7".

At the end of a document the letters come again, and the digits have to be known.
"""

from __future__ import annotations

import torch
from torch import Tensor
from train_lm import standard_library

LETTERS, DIGITS, END = 26, 10, ord("\n")  # a needle is a letter, a digit and END
Batch = dict[str, Tensor]


def haystacks() -> tuple[Tensor, Tensor]:
    """Bytes to train on and held-out ones, among which there are no capital letters and no digits."""
    found = [text.numpy().tobytes().lower().translate(None, b"0123456789") for text in standard_library()]
    train, held_out = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in found]
    return train, held_out


def documents(text: Tensor, count: int, length: int, text_weight: float, generator: torch.Generator) -> Batch:
    """Whole documents, all tensors [count, length].

    Returns:
        "tokens"; "before", the bytes before them; "labels"; "weights" of the losses of the next bytes; and "needle":
        where a letter is asked for, the place of its digit, elsewhere -1.
    """
    needles = needles_in(length)
    room = length - 3 * needles  # the rest are questions
    starts = torch.randint(len(text) - room, (count, 1), generator=generator)
    letters = torch.rand(count, LETTERS, generator=generator).argsort(1)[:, :needles] + ord("A")
    digits = torch.randint(DIGITS, (count, needles), generator=generator) + ord("0")
    said = torch.stack([letters, digits, torch.full_like(digits, END)], 2).flatten(1)
    places = 3 * torch.rand(count, room // 3, generator=generator).argsort(1)[:, :needles]
    haystack = text[starts + torch.arange(room)].long()
    haystack.scatter_(1, (places[..., None] + torch.arange(3)).flatten(1), said)
    tokens = torch.cat([haystack, said], 1)
    needle = torch.full_like(tokens, -1)
    needle[:, room::3] = places + 1
    weights = torch.where(needle >= 0, 1.0, text_weight)
    weights[:, -1] = 0  # there is no next byte
    before = tokens.roll(1, 1)  # of the first one the last one: END
    return {"tokens": tokens, "before": before, "labels": tokens, "weights": weights, "needle": needle}


def needles_in(length: int) -> int:
    return min(LETTERS, length // 12)
