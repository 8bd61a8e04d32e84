"""How one buffer is used: a rank alone uses what is stored, others gather, in 8 bits where that is said."""

from __future__ import annotations

import pytest
import torch

from fzero.comm.axis import Axis
from fzero.engine.use import Use
from fzero.formats.formats import Exact, Plain, encode
from fzero.stores.away import Placed
from fzero.testing import run_ranks

BF16, F32 = torch.bfloat16, torch.float32


def use_of(shard: Placed, axis: Axis, compute: torch.dtype = F32, gather8: bool = False) -> Use:
    plain = shard.format == Plain(F32)
    return Use("a", axis, compute, F32, F32, shard, torch.device("cpu"), F32, not plain, gather8)


def test_a_rank_alone_uses_what_is_stored() -> None:
    stored = torch.randn(64)
    use = use_of(Placed(Plain(F32), (stored,)), Axis())
    assert use.apply(stored) is stored and not use.gathers and use.value().data_ptr() == stored.data_ptr()
    cast = use_of(use.shard, Axis(), BF16).value()
    assert cast.dtype == BF16 and torch.equal(cast, stored.to(BF16))


def test_what_is_encoded_is_used_decoded() -> None:
    x = torch.randn(64)
    use = use_of(Placed(Exact(), encode(Exact(), x)), Axis())
    assert torch.equal(use.value(), x) and torch.equal(use.apply(torch.zeros(()).expand(64)), x)


@pytest.mark.parametrize("gather8", [False, True])
def test_slices_of_two_ranks_make_the_full_buffer(gather8: bool) -> None:
    def rank_main(rank: int) -> None:
        whole = torch.linspace(-1, 1, 128)
        mine = whole.chunk(2)[rank].clone()
        use = use_of(Placed(Plain(F32), (mine,)), Axis.of(None, "dp", None, "test"), gather8=gather8)
        full = use.value()
        assert use.gathers and torch.equal(use.apply(mine), full)
        assert torch.equal(full, whole) if not gather8 else 0 < (full - whole).abs().max() < 1 / 64

    run_ranks(rank_main, 2)
