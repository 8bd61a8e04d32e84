"""fz.shard_tensor: functions of slices of leaves, in every composition, against the plain float64 step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import exactness
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from reference import adamw_steps

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

F64 = torch.float64
WIDTH = 6
MESHES = ((1, 2), (2, 2), (1, 3), (1, 4), (3, 1), (1, 1))  # data, tensor
Layer = tuple[str, int]  # its kind, its inner width


def mlp(p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
    """Megatron's: outputs are cut, then inputs."""
    x = x if ax is None else fz.parallel.copy(x, ax)
    out = torch.tanh(x @ p["up"] + p["bias"]) @ p["down"]
    return out if ax is None else fz.parallel.sum(out, ax)


def gathered(p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
    """Outputs are cut, then joined."""
    out = torch.tanh((x if ax is None else fz.parallel.copy(x, ax)) @ p["up"])
    return (out if ax is None else fz.parallel.gather(out, ax, -1)) @ p["whole"]


def fused(p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
    """Gate and up are one leaf, whose parts are cut each by itself."""
    x = x if ax is None else fz.parallel.copy(x, ax)
    gate, up = (x @ p["both"]).chunk(2, -1)
    out = (torch.sigmoid(gate) * up) @ p["down"]
    return out if ax is None else fz.parallel.sum(out, ax)


def split(p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
    """A leaf that is cut, of what is elementwise."""
    x = x if ax is None else fz.parallel.split(x, ax, -1)
    out = torch.sin(x * p["gain"])
    return out if ax is None else fz.parallel.gather(out, ax, -1)


def whole(p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
    return torch.tanh(x @ p["whole"])


def shapes_of(kind: str, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        "mlp": {"up": (WIDTH, inner), "bias": (inner,), "down": (inner, WIDTH)},
        "gathered": {"up": (WIDTH, inner), "whole": (inner, WIDTH)},
        "fused": {"both": (WIDTH, 2 * inner), "down": (inner, WIDTH)},
        "split": {"gain": (WIDTH,)},
        "whole": {"whole": (WIDTH, WIDTH)},
    }[kind]


KINDS = {"mlp": mlp, "gathered": gathered, "fused": fused, "split": split, "whole": whole}
DIMS = {"up": 1, "bias": 0, "down": 0, "gain": -1}


def plan_of(layers: tuple[Layer, ...]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    for number, (kind, inner) in enumerate(layers):
        for name in shapes_of(kind, inner):
            if name == "both":
                plan[f"{number}.both"] = fz.parallel.cut(1, parts=(inner, inner))
            elif name in DIMS:
                plan[f"{number}.{name}"] = DIMS[name]
    return plan


def model(layers: tuple[Layer, ...]) -> tuple[Callable[..., torch.Tensor], dict[str, Any]]:
    made = torch.Generator().manual_seed(len(layers))
    params = {
        str(number): {
            name: torch.randn(shape, dtype=F64, generator=made) * 0.5 for name, shape in shapes_of(*layer).items()
        }
        for number, layer in enumerate(layers)
    }

    def run(kind: str, p: dict[str, torch.Tensor], x: torch.Tensor, ax: Any) -> torch.Tensor:
        return x + KINDS[kind](p, x, ax)

    units = [fz.unit(functools.partial(run, kind)) for kind, _ in layers]

    def loss(p: Any, x: torch.Tensor, ax: Any = None) -> torch.Tensor:
        for number, call in enumerate(units):
            x = call(p[str(number)], x, ax)
        return x.square().mean()

    return loss, params


def batches(world: int) -> list[tuple[torch.Tensor]]:
    made = torch.Generator().manual_seed(7)
    return [(torch.randn(3, WIDTH, dtype=F64, generator=made),) for _ in range(world)]


def meshed(sizes: tuple[int, int]) -> Any:
    return torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def chosen_of(stage: int, others: tuple[str, ...], plan: Any, mesh: Any) -> list[tuple[str, Any]]:
    known: dict[str, Any] = {
        "shard": functools.partial(exactness.SHARDS[stage], **({"mesh": mesh} if stage else {})),
        "tensor": functools.partial(fz.shard_tensor, plan=plan, mesh=mesh),
        "remat": fz.remat,
        "fused": fz.fuse_update,
        "offload": functools.partial(fz.offload, params="host", grads="host", moments="host"),
        "accumulate": functools.partial(fz.accumulate, count=3),
    }
    return [(name, known[name]) for name in others]


def train(
    rank: int, layers: tuple[Layer, ...], sizes: tuple[int, int], stage: int, others: tuple[str, ...], steps: int = 3
) -> Any:
    loss, params = model(layers)
    mesh = meshed(sizes)
    ax = fz.parallel.axis(mesh, "tp")
    step = fz.train_step(
        lambda p, x: loss(p, x, ax), fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2, weight_decay=0.01))
    )
    step = strategies.apply(step, chosen_of(stage, others, plan_of(layers), mesh))
    state = step.init(params)
    batch = batches(sizes[0])[rank // sizes[1]]
    losses, norms = [], []
    for _ in range(steps):
        state, metrics = step(state, *batch)
        losses.append(metrics["loss"].item())
        norms.append(metrics["grad_norm"].item())
    return fz.gather(state.params), losses, norms


def check(layers: tuple[Layer, ...], sizes: tuple[int, int], stage: int, others: tuple[str, ...], **run: Any) -> None:
    loss, params = model(layers)
    want, losses, norms = adamw_steps(loss, params, batches(sizes[0]), 3, max_norm=0.5)
    fn = functools.partial(train, layers=layers, sizes=sizes, stage=stage, others=others)
    for got in run_ranks(fn, sizes[0] * sizes[1], **run):
        assert_trees_close(got[0], want, rtol=1e-10)
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(losses), rtol=1e-10, atol=0)
        assert torch.allclose(torch.tensor(got[2]), torch.tensor(norms), rtol=1e-10, atol=0)


drawn_layers = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 7)), min_size=1, max_size=3).map(tuple)


@pytest.mark.usefixtures("hazards")
@given(
    layers=drawn_layers,
    sizes=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    others=st.permutations(["shard", "tensor", "remat", "fused", "offload", "accumulate"]).flatmap(
        lambda names: st.integers(0, 6).map(
            lambda count: tuple(x for x in names if x in ("shard", "tensor") or x in names[:count])
        )
    ),
)
def test_drawn_functions_of_slices(
    layers: tuple[Layer, ...], sizes: tuple[int, int], stage: int, others: tuple[str, ...]
) -> None:
    if not plan_of(layers):
        layers = (*layers, ("mlp", 5))
    check(layers, sizes if stage else (1, sizes[1]), stage, others)


@in_turns(8, "on processes, as on threads")
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3)])
def test_functions_of_slices_on_real_processes(sizes: tuple[int, int]) -> None:
    layers = (("mlp", 5), ("fused", 3), ("split", 1), ("gathered", 2))
    check(layers, sizes, 3, ("shard", "tensor", "remat"), backend="processes")


def test_params_that_differ_on_one_rank_are_refused_on_all() -> None:
    def rank_main(rank: int) -> None:
        mesh = meshed((2, 2))
        step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        step = fz.shard_tensor(fz.shard_zero3(step, mesh=mesh), {"w": 0}, mesh=mesh)
        with pytest.raises(ValueError, match=r"The params differ between the ranks of axis '(dp|tp)'"):
            step.init({"w": torch.full((4,), float(rank == 3))})

    run_ranks(rank_main, 4, timeout=20)
