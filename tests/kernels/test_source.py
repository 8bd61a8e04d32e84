"""The C++ of a formula over formats depends on both, and on nothing else."""

from __future__ import annotations

import torch

from fzero.formats.formats import Exact, Plain
from fzero.kernels.source import source_of
from fzero.optim._lion import _formula


def test_a_source_is_the_same_each_time_and_another_for_other_formats() -> None:
    plain, bf16 = Plain(torch.float32), torch.bfloat16
    made = source_of(_formula, (plain, plain), torch.float32, 7)
    assert made == source_of(_formula, (plain, plain), torch.float32, 7) and "extern" in made
    others = [source_of(_formula, (Exact(), plain), torch.float32, 7), source_of(_formula, (plain, plain), bf16, 7)]
    assert len({made, *others}) == 3
