"""Moments: zeros in the formats of their leaves, and trees whose memory is their own."""

from __future__ import annotations

import torch

import fzero as fz
from fzero.state.moments import zeros_like


def test_zeros_take_the_bytes_of_their_format() -> None:
    sizes = {}
    for policy in (fz.Policy(), fz.Policy(moment=torch.bfloat16), fz.Policy.compact16("4-bit")):
        tree = fz.train_step(lambda p: p, fz.sgd(0.1), policy).init({"w": torch.ones(128)}).params
        moments = zeros_like(tree, nonnegative=True)
        assert not fz.gather(moments)["w"].any()
        sizes[str(policy)] = sum(x.nbytes for x in moments.buffers.values())
    assert len(set(sizes.values())) == 3
    assert not zeros_like({"w": torch.ones(2)})["w"].any()


def test_only_what_shares_memory_with_params_is_copied() -> None:
    """An entry of the state that begins with the params, and with what is apart from them."""
    own, step = torch.ones(4), fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
    begun = lambda params: {"params": params, "own": own, "n": 3}
    step = fz.donate(step.with_state(fz.Extra("mine", "mine", begun)))
    state = step.init({"w": torch.ones(4)})
    assert state.extra["mine"]["own"] is own
    state, _ = step(state, torch.ones(4))
    assert fz.gather(state.extra["mine"]["params"])["w"].equal(torch.ones(4)) and state.extra["mine"]["n"] == 3
