"""Between places cotangents leave before the gradients of weights are computed, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from drawn_pipelines import Copied
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.components.mail import Mail
from fzero.engine.weights import Waiting
from fzero.testing import run_ranks


class Writing(Copied):
    """A backward that writes to the cotangent that it is given, which is another node's, too."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent.mul_(2.0)


def hidden(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"]) @ p["v"]


def last(p: Any, x: torch.Tensor) -> torch.Tensor:
    return hidden(p, x).square().mean()


def writing(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (Writing.apply(x) + x @ p["w"]).square().mean()  # type: ignore[operator]


def params(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator, dtype=torch.float64) for name in "wv"}


def pipe_of(fns: Any, schedule: Any) -> Any:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipe = fz.pipeline([fz.train_step(fn, fz.sgd(0.1)) for fn in fns], schedule, groups=mesh["pp"])
    return pipe, pipe.init([params(0), params(1)])


def order(rank: int, name: str) -> list[str]:
    """What the second place does in a step: messages that leave it, and products that are added."""
    schedule = {"1F1B": fz.schedules.one_f_one_b, "GPipe": fz.schedules.gpipe}[name](2, 3)
    pipe, state = pipe_of((hidden, last), schedule)
    done: list[str] = []
    send, add = Mail.send, Waiting.add
    noted = lambda word, fn: lambda *a, **k: (done.append(word), fn(*a, **k))[1]
    with mock.patch.object(Mail, "send", noted("send", send)), mock.patch.object(Waiting, "add", noted("add", add)):
        pipe(state, torch.ones(6, 8, dtype=torch.float64))
    return done


@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_cotangents_leave_first(name: str) -> None:
    first, second = run_ranks(functools.partial(order, name=name), 2, backend="processes")
    both = ["add", "add"]
    assert second[:9] == ["send", "send", *both, "send", *both, *both], second  # one microbatch's wait behind
    assert "add" not in (*first, *second[9:])


def losses(rank: int, alone: bool) -> list[torch.Tensor]:
    fns, schedule = (hidden, writing), fz.schedules.one_f_one_b(2, 2)
    if alone:
        pipe = fz.pipeline([fz.train_step(fn, fz.sgd(0.1)) for fn in fns], schedule)
        state = pipe.init([params(0), params(1)])
    else:
        pipe, state = pipe_of(fns, schedule)
    out, x = [], torch.ones(4, 8, dtype=torch.float64)
    for _ in range(3):
        state, metrics = pipe(state, x)
        out.append(metrics["loss"])
    return out


def test_a_backward_that_writes_to_a_cotangent_is_plain_over_ranks_too() -> None:
    first, second = run_ranks(functools.partial(losses, alone=False), 2, backend="processes")
    fz.testing.assert_trees_equal(first, second)
    leaves = [{name: x.requires_grad_() for name, x in params(i).items()} for i in range(2)]
    own = []
    for _ in range(3):
        for part in torch.ones(4, 8, dtype=torch.float64).chunk(2):
            loss = writing(leaves[1], hidden(leaves[0], part)) / 2
            loss.backward()
        own.append(loss.detach() * 2)
        for x in (x for each in leaves for x in each.values()):
            if x.grad is not None:
                with torch.no_grad():
                    x -= 0.1 * x.grad
                x.grad = None
    fz.testing.assert_trees_close(first, own, rtol=1e-10)
    fz.testing.assert_trees_equal(first, losses(0, alone=True))
