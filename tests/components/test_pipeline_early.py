"""Between places cotangents leave before the gradients of weights are computed, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.components.line import Messages
from fzero.engine.halves import Product
from fzero.testing import run_ranks


def hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"]) @ p["v"]


def last(p: Any, x: torch.Tensor) -> torch.Tensor:
    return hidden(p, x).square().mean()


def params(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in "wv"}


def pipe_of(fns: Any, schedule: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = fz.pipeline([fz.train_step(fn, fz.sgd(0.1)) for fn in fns], schedule, groups=mesh["pp"])
    return pipe, pipe.init([params(0), params(1)])


def order(rank: int, name: str) -> list[str]:
    """What the second place does in a step: messages that leave it, and products that are computed."""
    schedule = {"1F1B": fz.schedules.one_f_one_b, "GPipe": fz.schedules.gpipe}[name](2, 3)
    pipe, state = pipe_of((hidden, last), schedule)
    done: list[str] = []
    send, compute = Messages.send, Product.value
    noted = lambda word, fn: lambda *a, **k: (done.append(word), fn(*a, **k))[1]
    sends = mock.patch.object(Messages, "send", noted("send", send))
    with sends, mock.patch.object(Product, "value", noted("compute", compute)):
        pipe(state, torch.ones(6, 8, dtype=torch.float64))
    return done


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_cotangents_leave_first(name: str) -> None:
    first, second = run_ranks(functools.partial(order, name=name), 2, backend="processes")
    both = ["compute", "compute"]
    assert second[:9] == ["send", "send", *both, "send", *both, *both], second  # one microbatch's wait behind
    assert "compute" not in (*first, *second[9:])
