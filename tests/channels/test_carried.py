"""Messages without a connection: what is packed comes back in memory of its own, and other bytes are refused."""

from __future__ import annotations

import pytest
import torch
from channel_peers import messages, same
from hypothesis import given, settings
from hypothesis import strategies as st

from fzero.channels import BadMessage, carried, frames
from fzero.channels.segments import SHARED_FROM

LARGE = torch.arange(SHARED_FROM // 4 + 2, dtype=torch.float32)


@settings(max_examples=100)
@given(messages, st.integers(0, 2))
def test_messages_come_back(message: object, large: int) -> None:
    """With tensors of every dtype, within the bytes and beside them."""
    message = [message, *[LARGE + number for number in range(large)]]
    data, beside = carried.pack(message)
    assert len(beside) >= large and all(each.dtype == torch.uint8 and each.ndim == 1 for each in beside)
    assert same(carried.unpack(data, beside), message)


def test_what_arrives_is_memory_of_its_own() -> None:
    views = [LARGE.view(2, -1).T, torch.view_as_complex(LARGE.view(-1, 2)).conj(), LARGE[::2].expand(3, -1)]
    data, beside = carried.pack(views)
    out = carried.unpack(data, beside)
    for each in beside:
        each.zero_()
    assert same(out, views) and all(x.is_contiguous() for x in out)  # type: ignore[attr-defined]
    assert LARGE[1] == 1


@settings(max_examples=200)
@given(messages, st.data())
def test_changed_bytes(message: object, data: st.DataObject) -> None:
    """Of header, table and message each is noticed; of the bytes of tensors only their number."""
    whole, beside = carried.pack([message, LARGE])
    header = frames.parse(whole[: frames.SIZE])
    checked = frames.SIZE + header.table + header.tree
    at = data.draw(st.one_of(st.integers(0, len(whole) - 1), st.integers(0, checked - 1)))
    for other in (whole[:at], whole + b"\0", whole[1:], whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]):
        if len(other) != len(whole) or at < checked:
            with pytest.raises(BadMessage):
                carried.unpack(other, beside)
    for others in ([*beside, LARGE], beside[:-1], [*beside[:-1], beside[-1][1:]]):
        with pytest.raises(BadMessage):
            carried.unpack(whole, others)


def test_what_cannot_be_sent() -> None:
    for wrong in (object(), LARGE.clone().requires_grad_()):
        with pytest.raises(TypeError):
            carried.pack(wrong)
