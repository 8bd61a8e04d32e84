"""Places of a pipeline with other numbers of ranks that have the same examples: these must have the same values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nightly import in_turns
from torch.distributed.device_mesh import DeviceMesh

import fzero as fz
from fzero.components.line import need_alike
from fzero.components.remote.digests import digest_of
from fzero.components.routes import Seat
from fzero.testing import run_ranks

OPTIMIZER = fz.adamw(1e-2)
GENERATOR = torch.Generator().manual_seed(0)
UP, DOWN, X = (torch.randn(*size, generator=GENERATOR, dtype=torch.float64) for size in ((3, 4), (4, 3), (4, 3)))


def up(p: Any, h: torch.Tensor, ax: Any = None, copied: bool = True, whole: bool = True) -> torch.Tensor:
    """A layer that is cut by columns over an axis; its slices are put together, or not."""
    h = fz.parallel.copy(h, ax) if ax is not None and copied else h
    out = torch.tanh(h @ p["up"])
    return fz.parallel.gather(out, ax, 1) if ax is not None and whole else out


def loss(p: Any, h: torch.Tensor) -> torch.Tensor:
    return (h @ p["down"][: h.shape[1]]).square().mean()


def first(p: Any, h: torch.Tensor) -> torch.Tensor:
    return h * p["gain"]


def behind(p: Any, h: torch.Tensor, ax: Any = None, copied: bool = True) -> torch.Tensor:
    return up(p, h, ax, copied).square().mean()


def on_three_ranks(rank: int, cut: Callable[..., Any], other: Callable[..., Any], cut_place: int, want: str) -> None:
    """One place of two ranks, over which a layer is cut, and one of one."""
    ranks = [[0, 1], [2]] if cut_place == 0 else [[2], [0, 1]]
    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2])]
    one: Any = {"down": DOWN, "gain": torch.tensor([2.0], dtype=torch.float64)}

    def step(fn: Any, mesh: Any = None) -> Any:
        if mesh is None:
            return fz.train_step(fn, OPTIMIZER)
        own = fz.train_step(functools.partial(fn, ax=fz.parallel.axis(mesh, "tp")), OPTIMIZER)
        return fz.shard_tensor(own, {"up": 1}, mesh, axis="tp")

    mesh = DeviceMesh.from_group(groups[0], "cpu", [0, 1], mesh_dim_names=("tp",)) if rank < 2 else None
    steps, params = [step(cut, mesh), step(other)], [{"up": UP}, {k: one[k] for k in one}]
    if cut_place == 1:
        steps, params = steps[::-1], params[::-1]
    pipe = fz.pipeline(steps, fz.schedules.gpipe(2, 2), ranks)
    if want:
        state = pipe.init(params)
        for _ in range(2):
            with pytest.raises(ValueError, match=want):
                out, pullback = pipe.vjp(state, X)
                pullback(torch.ones_like(out))
        return
    state = pipe.init(params)
    local = fz.pipeline([step(fn) for fn in ((cut, other) if cut_place == 0 else (other, cut))], pipe.schedule)
    whole = local.init(params)
    for _ in range(2):
        state, metrics = pipe(state, X)
        whole, expected = local(whole, X)
        fz.testing.assert_trees_close(metrics["loss"], expected["loss"], rtol=1e-12)
        fz.testing.assert_trees_close(metrics["grad_norm"], expected["grad_norm"], rtol=1e-12)


@in_turns(2)
@pytest.mark.parametrize(
    ("cut", "other", "place", "want"),
    [
        (up, loss, 0, ""),
        (functools.partial(up, whole=False), loss, 0, "what stage 0 gives to stage 1 in microbatch 0 differs"),
        (behind, first, 1, ""),
        (functools.partial(behind, copied=False), first, 1, "(?s)copies.py.*fz.parallel.copy or split of .*In stage 1"),
    ],
    ids=["whole", "slices", "copied", "parts of a cotangent"],
)
def test_slices_do_not_go_to_a_place_with_fewer_ranks(cut: Any, other: Any, place: int, want: str) -> None:
    job = functools.partial(on_three_ranks, cut=cut, other=other, cut_place=place, want=want)
    run_ranks(job, 3, backend="processes", timeout=30)


def test_what_is_compared_of_values() -> None:
    seats = [Seat(0, 0, 1, copy, 2) for copy in range(2)]
    x = torch.tensor([1.0, -2.0, 3.0])
    noted = lambda *xs: [("what", [(x.shape, digest_of(x)) for x in xs])]
    need_alike(seats, [noted(x), noted(x * (1 + 1e-7))])
    for other in ([-x], [x[:2]], [x[:, None]], [x, x]):
        with pytest.raises(ValueError, match="what differs between ranks 0 and 1"):
            need_alike(seats, [noted(x), noted(*other)])
    need_alike([Seat(place, 0, 1, 0, 1) for place in range(2)], [noted(x), []])
