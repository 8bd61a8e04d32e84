"""Leaves in flat buffers: cut and joined without a loss, by views, and every rank's pieces are all there is."""

from __future__ import annotations

import torch

import fzero as fz

PARAMS = {"a": torch.empty(7, 3, device="meta"), "b": torch.empty(5, device="meta")}


def layout(ranks: int) -> fz.Layout:
    step = fz.train_step(lambda p: p, fz.sgd(0.1))
    return fz.plan(fz.shard_zero3(step) if ranks > 1 else step, PARAMS, world_size=ranks).layout


def test_joining_what_was_cut_gives_the_buffer_with_zeros_between() -> None:
    for group in layout(2).groups.values():
        full = torch.full((group.numel,), float("nan"))
        leaves = {
            leaf: torch.randn(view.shape, generator=torch.Generator().manual_seed(leaf))
            for leaf, view in group.cut(full).items()
        }
        joined = group.join_into(full, list(leaves.values()))
        assert joined.isfinite().all()
        torch.testing.assert_close(joined.sum(), torch.stack([x.sum() for x in leaves.values()]).sum())
        for views in (group.cut(joined), group.views(joined)):
            assert all(torch.equal(views[leaf], value) for leaf, value in leaves.items())
        every: list[torch.Tensor | None] = list(leaves.values())
        assert torch.equal(group.full_of(every, full.dtype, full.device), joined)
        without = [None, *every[1:]]
        for given, dtype in ((without, full.dtype), (every, torch.float64), (without, torch.bfloat16)):
            want = group.join_into(torch.full((group.numel,), float("nan"), dtype=dtype), given)
            got = group.full_of(given, dtype, full.device)
            assert got.dtype == dtype and torch.equal(got, want)
        own = full.untyped_storage().data_ptr()
        assert all(view.untyped_storage().data_ptr() == own for view in group.cut(full).values())


def test_a_full_buffer_has_memory_of_its_own() -> None:
    """Also where one leaf is all of it."""
    step = fz.train_step(lambda p: p, fz.sgd(0.1))
    ((_, group),) = fz.plan(step, {"w": torch.zeros(16, 16)}).layout.groups.items()
    leaf = torch.ones(16, 16)
    full = group.full_of([leaf], leaf.dtype, leaf.device)
    assert full.numel() == leaf.numel()
    full.zero_()
    assert leaf.all()


def test_an_offset_leads_to_its_leaf() -> None:
    ((key, group),) = layout(1).groups.items()
    assert str(key) == "unit '(root)'"
    assert [group.leaf_at(slot.offset) for slot in group.slots] == ["a", "b"]
