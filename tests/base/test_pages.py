"""Flat buffers in large pages: the system is asked for them, and values are those of any tensor."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fzero as fz
from fzero.base import pages

SMAPS = Path("/proc/self/smaps")


def is_asked_for(x: torch.Tensor) -> bool:
    """Whether the system was asked for large pages in the middle of a tensor's memory."""
    middle, inside = x.data_ptr() + x.nbytes // 2, False
    for line in SMAPS.read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
            inside = begin <= middle < end
        elif inside and line.startswith("VmFlags:"):
            return "hg" in line.split()
    return False


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not SMAPS.exists(), reason="no large pages here"
)
def test_large_buffers_of_a_run_ask_for_large_pages() -> None:
    step = fz.train_step(lambda p, x: (x @ p["w"]).square().sum(), fz.adam(0.1))
    state = step.init({"w": torch.randn(2048, 1024)})
    (_, pullback), x = step.vjp(state, torch.randn(2, 2048)), torch.tensor(1.0)
    grads, _ = pullback(x)
    new, _ = step.update(state, grads)
    trees = (state.params, grads, new.params, *new.moments[1:])
    assert len(trees) == 5
    for tree in trees:
        for buffer in tree.entries.values():
            assert isinstance(buffer, torch.Tensor) and is_asked_for(buffer)


@pytest.mark.parametrize("numel", [0, 7, pages.LEAST // 4 - 1, pages.LEAST // 4, pages.LEAST + 5])
def test_values_are_those_of_any_tensor(numel: int) -> None:
    x = torch.randn(numel)
    for own in (pages.copied(x), pages.empty(numel, torch.float32, "cpu").copy_(x)):
        assert (torch.equal(own, x) and own.data_ptr() != x.data_ptr()) or not numel
    assert torch.equal(pages.cast(x, torch.bfloat16), x.to(torch.bfloat16)) and pages.cast(x, x.dtype) is x
    assert torch.equal(pages.zeros(numel, torch.float64, "cpu"), torch.zeros(numel, dtype=torch.float64))


def test_tensors_without_memory_are_left_alone() -> None:
    assert pages.empty(pages.LEAST, torch.float32, "meta").is_meta
    with FakeTensorMode():
        assert pages.copied(torch.zeros(pages.LEAST)).shape == (pages.LEAST,)


def test_memory_that_cannot_be_mapped_is_out_of_memory() -> None:
    with pytest.raises(MemoryError, match=f"could not map {1 << 60} bytes"):
        pages.empty(1 << 60, torch.uint8, "cpu", mapped=True)
