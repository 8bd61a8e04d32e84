"""Messages as bytes that something else than a connection carries, such as the calls of another library.

What a connection sends, in the same frames and with the same checks, without sockets and segments: large tensors lie
beside the bytes, as bytes of their own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import private
from fzero.channels import frames, tensors, vocabulary
from fzero.channels.errors import BadMessage
from fzero.channels.segments import SHARED_FROM


def pack(message: object) -> tuple[bytes, list[torch.Tensor]]:
    """The bytes of a message, and those of its large tensors: [bytes] uint8 each, in memory of the message's tensors.

    Raises:
        TypeError: the message holds what cannot be sent, or a tensor that is more than its values.
        ValueError: it is too deep or too large.

    Example:
        >>> from fzero.channels.carried import pack, unpack
        >>> unpack(*pack({"step": 3, "loss": torch.tensor(0.5)}))
        {'step': 3, 'loss': tensor(0.5000)}
    """
    tree, values = vocabulary.encode(message)
    rows: list[tensors.Row] = []
    within: list[bytes] = []
    beside: list[torch.Tensor] = []
    with private.below_transforms(), torch.no_grad():
        for value in values:
            row = tensors.Row(value.dtype, tuple(value.shape))
            value = tensors.as_contiguous(value, row)
            if row.nbytes < SHARED_FROM:
                within.append(bytes(tensors.memory(value)))
            else:
                row = row._replace(place=tensors.SEGMENT, segment=len(beside))
                beside.append(value.view(-1).view(torch.uint8))
            rows.append(row)
    table, inline = tensors.pack(rows), sum(map(len, within))
    frames.check(tree, table, inline)
    return b"".join([frames.head(frames.MESSAGE, 0, table, tree, inline), table, tree, *within]), beside


def unpack(data: bytes, beside: Sequence[torch.Tensor]) -> object:
    """The message of these bytes; its tensors lie in memory of their own.

    Raises:
        BadMessage: they are none.
    """
    if len(data) < frames.SIZE:
        raise BadMessage(f"a message of {len(data)} bytes, of which the header alone has {frames.SIZE}")
    header = frames.parse(data[: frames.SIZE])
    at, view = frames.SIZE, memoryview(data)
    if len(data) != at + header.table + header.tree + header.inline:
        raise BadMessage(f"a message of {len(data)} bytes, of which the header says something else")
    table, tree = data[at : at + header.table], data[at + header.table : len(data) - header.inline]
    frames.need_intact(header, table, tree)
    rows, at = tensors.unpack(memoryview(table), header.inline), len(data) - header.inline
    if [row.segment for row in rows if row.place != tensors.INLINE] != [*range(len(beside))]:
        raise BadMessage(f"{len(beside)} tensors beside a message that has others")
    values = []
    for row in rows:
        if row.place != tensors.INLINE and row.nbytes != beside[row.segment].numel():
            raise BadMessage(f"a tensor of {row.nbytes} bytes in {beside[row.segment].numel()} beside a message")
        values.append(tensors.empty(row))
        if row.place == tensors.INLINE:
            tensors.memory(values[-1])[:] = view[at : at + row.nbytes]
            at += row.nbytes
        else:
            values[-1].view(-1).view(torch.uint8).copy_(beside[row.segment])
    return vocabulary.decode(memoryview(tree), values)
