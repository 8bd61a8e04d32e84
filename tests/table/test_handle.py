"""A leaf of a unit outside that unit: what of it can be read, and how the rest is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from units import X, block_of, params_of

import fzero as fz
from fzero.table.handle import Handle, name_of, writes
from fzero.testing import run_ranks


def seen_by(look: Any) -> None:
    """`look(handle)` in a step's function, beside a unit that uses the leaf."""
    inner = block_of(lambda q, x: torch.tanh(x @ q["w"]))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        look(p["blocks"][0]["w"])
        return inner(p, x)

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        step(step.init(params_of()), X)

    run_ranks(rank_main, 2)


def test_shape_dtype_and_device_can_be_read() -> None:
    def look(w: Any) -> None:
        assert isinstance(w, Handle) and w.shape == (4, 4) and w.dtype == torch.float64 and w.numel() == 16
        assert w.requires_grad and w.device.type == "cpu" and not hasattr(w, "numpy") and "blocks.0.w" in repr(w)

    seen_by(look)


@pytest.mark.parametrize("use", [lambda w: w + 1, lambda w: w.sum(), lambda w: w.mul_(2), torch.linalg.norm, float])
def test_values_are_refused_by_name(use: Any) -> None:
    def look(w: Any) -> None:
        with pytest.raises(fz.HandleError, match=r"leaf 'blocks.0.w' belongs to unit 'blocks.0' and is gathered"):
            use(w)
        raise KeyError("seen")

    with pytest.raises(Exception, match=r"blocks.0.w"):  # also where the function has swallowed it
        seen_by(look)


def test_what_writes_is_told_by_its_name() -> None:
    assert writes(torch.Tensor.mul_, None) and writes(torch.Tensor.__setitem__, None)
    assert writes(torch.add, {"out": X}) and not writes(torch.add, {}) and not writes(torch.Tensor.requires_grad_, {})
    assert name_of(torch.Tensor.shape.__get__) == "shape"  # type: ignore[attr-defined]
