"""Moments: zeros in the formats of their leaves, and trees whose memory is their own."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.state.moments import apart, zeros_like


def test_zeros_take_the_bytes_of_their_format() -> None:
    sizes = {}
    for policy in (fz.Policy(), fz.Policy(moment=torch.bfloat16), fz.Policy.compact16("4-bit")):
        tree = fz.train_step(lambda p: p, fz.sgd(0.1), policy).init({"w": torch.ones(128)}).params
        moments = zeros_like(tree, nonnegative=True)
        assert not fz.gather(moments)["w"].any()
        sizes[str(policy)] = sum(x.nbytes for x in moments.buffers.values())
    assert len(set(sizes.values())) == 3
    assert not zeros_like({"w": torch.ones(2)})["w"].any()


def test_only_what_shares_memory_is_copied() -> None:
    shared, own = torch.ones(4), torch.ones(4)
    out = apart([shared[1:], own, 3], {"w": shared})
    assert out[1] is own and out[2] == 3 and torch.equal(out[0], shared[1:])
    shared.zero_()
    assert out[0].all()
