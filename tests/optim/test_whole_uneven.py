"""Whole leaves that a tensor axis cuts unevenly: its ranks have slices of other sizes, and the same owners."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nightly import in_turns
from torch.distributed.device_mesh import init_device_mesh

import fzero as fz
from fzero.testing import run_ranks

F64 = torch.float64
MADE = torch.Generator().manual_seed(0)
PARAMS = {
    "a": 0.3 * torch.randn(13, 49, generator=MADE, dtype=F64),
    "b": 0.3 * torch.randn(13, 7, 7, generator=MADE, dtype=F64),
}
X, Z = torch.randn(8, 49, generator=MADE, dtype=F64), torch.randn(8, 7, generator=MADE, dtype=F64)


def by_norm(grads: dict[str, torch.Tensor], state: object, params: object) -> tuple[dict[str, torch.Tensor], object]:
    return {path: -0.1 * g / (g.norm() + 1e-3) for path, g in grads.items()}, state


OPTIMIZERS: dict[str, Callable[[], fz.GradientTransformation]] = {
    "muon": lambda: fz.muon(0.1),
    "whole": lambda: fz.whole(fz.GradientTransformation(lambda params: (), by_norm)),
    "adafactor": lambda: fz.adafactor(0.1),
}


def loss(p: Any, x: torch.Tensor, z: torch.Tensor, axis: Any = None) -> torch.Tensor:
    if axis is not None:
        x, z = fz.parallel.copy(x, axis), fz.parallel.copy(z, axis)
    h, e = torch.tanh(x @ p["a"].T), torch.einsum("nd,oed->noe", z, p["b"])
    out = (h[..., None] * torch.sin(e)).sum(1)
    return (fz.parallel.sum(out, axis) if axis is not None else out).square().mean()


def trained(name: str, fuses: bool, mesh: Any = None, place: int = 0) -> dict[str, torch.Tensor]:
    axis = None if mesh is None else fz.parallel.axis(mesh, "tp")
    step = fz.train_step(lambda p, x, z: loss(p, x, z, axis), OPTIMIZERS[name]())
    if mesh is not None:
        step = fz.shard_zero3(fz.shard_tensor(step, {"a": 0, "b": 0}, mesh=mesh, axis="tp"), mesh=mesh, axis="dp")
    step = fz.fuse_update(step) if fuses else step
    state = step.init(PARAMS)
    batch = (X, Z) if mesh is None else (X.chunk(2)[place], Z.chunk(2)[place])
    for _ in range(2):
        state, _ = step(state, *batch)
    return fz.gather(state.params)  # type: ignore[return-value]


def is_as_in_one_process(rank: int, name: str, fuses: bool, expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found = trained(name, fuses, mesh, rank // 2)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)


@in_turns(3)
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_on_threads(name: str, fuses: bool) -> None:
    run_ranks(functools.partial(is_as_in_one_process, name=name, fuses=fuses, expected=trained(name, False)), 4)


@in_turns(8, "on processes, as on threads")
def test_on_processes() -> None:
    """Where nobody compares what ranks exchange: they would wait for each other."""
    call = functools.partial(is_as_in_one_process, name="whole", fuses=False, expected=trained("whole", False))
    run_ranks(call, 4, backend="processes", checked=False, timeout=60)
