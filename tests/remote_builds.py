"""What components on ranks of their own are built of in tests, and the same in one process with torch alone."""

from __future__ import annotations

import functools
import os
import signal
import time
from typing import Any, NamedTuple

import torch

import fzero as fz

ONES = torch.ones(3, dtype=torch.float64)
SHARDS: dict[int, Any] = {0: lambda step, *mesh, **axis: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
need_close = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)


class Pair(NamedTuple):
    first: Any
    second: Any


def weights(seed: int = 0, width: int = 4) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return {"in": draw(3, width), "blocks": [{"w": draw(width, width) / 2}, {"w": draw(width, width) / 2}]}


@fz.unit
def block(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def program(p: dict[str, Any], tree: Any, ops: tuple[str, ...], scale: Any = None) -> Any:
    """A function of the batch, drawn: which outputs in which containers."""
    x = tree["x"] if isinstance(tree, dict) else tree
    x = x @ p["in"]
    for own in p["blocks"]:
        x = block(own, x)
    if isinstance(tree, dict) and "y" in tree:
        x = x * tree["y"].unsqueeze(1)
    if scale is not None:
        x = x * scale
    made: dict[str, Any] = {
        "rows": x,
        "narrow": x[:, :1] * 2.0,
        "loss": x.square().sum(1).mean(),
        "other": {"a": x.mean(), "text": "constant", "pair": Pair(x.sum(1), None)},
        "flag": torch.tensor(True),
        "signs": (x > 0).long(),
    }
    out = [made[op] for op in ops]
    return out[0] if len(out) == 1 else tuple(out)


def built(rank: int, stage: int = 3, seed: int = 0, optimizer: str = "sgd") -> tuple[fz.Step, dict[str, Any]]:
    chosen = fz.sgd(0.1, momentum=0.9) if optimizer == "sgd" else fz.adamw(0.01)
    return SHARDS[stage](fz.train_step(program, fz.chain(fz.clip_by_global_norm(1.0), chosen))), weights(seed)


@fz.unit
def projected(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"]


def head(p: dict[str, Any], tokens: torch.Tensor, emb: torch.Tensor, what: str = "") -> torch.Tensor:
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    logits = projected(p["blocks"][1], block(p["blocks"][0], emb))
    return torch.nn.functional.cross_entropy(logits, tokens)


def built_head(rank: int, stage: int = 2) -> tuple[fz.Step, dict[str, Any]]:
    return SHARDS[stage](fz.train_step(head, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(0.01)))), weights(1)


def both_updated(vision: Any, text: Any, states: Any, images: Any, tokens: Any, meanwhile: Any = lambda: None) -> Any:
    """DESIGN's multimodal step: the new states, and the loss."""
    v_state, t_state = states
    emb, pull_v = vision.vjp(v_state, images, ("rows",))
    meanwhile()
    loss, pull_t = text.vjp(t_state, tokens, emb)
    g_t, (_, ct) = pull_t(torch.ones_like(loss))
    g_v, _ = pull_v(ct)
    norm = fz.global_norm(g_v, g_t)
    return (vision.update(v_state, g_v, grad_norm=norm)[0], text.update(t_state, g_t, grad_norm=norm)[0]), loss


def cut_over_tokens(p: dict[str, Any], x: torch.Tensor, gain: torch.Tensor, ax: Any = None) -> Any:
    """Of [examples, tokens, features]: every rank of an axis computes its tokens, and has all of them in the end."""
    own = x if ax is None else fz.parallel.split(x, ax, 1)
    own = torch.tanh(own @ p["w"]) * gain
    loss = own.square().mean() if ax is None else own.square().mean(2).sum() * ax.size / x[..., 0].numel()
    return (own if ax is None else fz.parallel.gather(own, ax, 1)), loss


def built_tokens(rank: int, tokens: int = 2) -> tuple[fz.Step, dict[str, Any], Any]:
    """Sequences are cut over the second axis of a mesh, batches over the first; means go over both."""
    ranks = torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh("cpu", (ranks // tokens, tokens), mesh_dim_names=("dp", "sp"))
    fn = functools.partial(cut_over_tokens, ax=fz.parallel.axis(mesh, "sp"))
    step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)), mesh, axis=("dp", "sp"))
    return step, {"w": weights()["in"]}, fz.parallel.axis(mesh, "dp")


def mapped(p: dict[str, Any], x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Linear in x: each example becomes some rows, another number of them for each."""
    return torch.repeat_interleave(x @ p["w"], counts, 0)


def built_mapped(rank: int, seed: int) -> tuple[fz.Step, dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    w = torch.randint(-3, 4, (3, 3), generator=generator, dtype=torch.float64)
    return fz.shard_zero2(fz.train_step(mapped, fz.sgd(0.1))), {"w": w}


def built_tensor(rank: int) -> tuple[fz.Step, dict[str, Any], Any]:
    """Two tensor ranks; batches are split over the others."""
    ranks = torch.distributed.get_world_size()
    mesh = torch.distributed.init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    with torch.no_grad():
        for own in module.parameters():
            own.copy_(torch.linspace(-1, 1, own.numel(), dtype=torch.float64).view_as(own))
    apply, params = fz.functional(module)
    step = fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1))
    step = fz.shard_tensor(step, {"0": "column", "2": "row"}, mesh, axis="tp")
    return fz.shard_zero3(step, mesh, axis="dp"), params, fz.parallel.axis(mesh, "dp")


@fz.unit
def scaled(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x * p["w"]


def trouble(p: dict[str, Any], x: torch.Tensor, what: str, rank: int = -1) -> torch.Tensor:
    """Fails as it is told, on one rank or on all."""
    out = x * p["w"]
    if rank in (-1, torch.distributed.get_rank()):
        if what == "value":
            raise ValueError("the user's own words")
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "exit":
            raise SystemExit(7)
        if what == "words":
            os.write(2, b"farewell\n")
            os.abort()
        if what == "sleep":
            time.sleep(0.3)
        if what == "sleepy":
            time.sleep(8)
        if what == "hang":
            time.sleep(1000)
    return scaled(p["blocks"][0], out)  # which the others communicate for


def built_trouble(rank: int, stage: int = 3) -> tuple[fz.Step, dict[str, Any]]:
    step = fz.train_step(trouble, fz.sgd(0.1))
    return (fz.shard_zero3(step) if stage else step), {"w": ONES, "blocks": [{"w": ONES}]}


def alone(p: dict[str, Any], x: torch.Tensor, bad: torch.Tensor, waits: bool, ax: Any) -> torch.Tensor:
    """The first rank's sum of each row, which it waits for the others to have, or only sends; fails where bad."""
    if bad.any():
        raise ValueError("the user's own words")
    own = x.sum()[None] if ax.rank == 0 or waits else x.new_zeros(0)
    total = fz.parallel.gather(own, ax, 0, [1, *[int(waits)] * (ax.size - 1)])[0]
    return x * 0 + total


def built_alone(rank: int, waits: bool) -> tuple[fz.Step, dict[str, Any]]:
    fn = functools.partial(alone, waits=waits, ax=fz.parallel.axis(None, "dp"))
    return fz.shard_zero1(fz.train_step(fn, fz.sgd(0.1))), {"w": ONES}


def fails_to_build(rank: int) -> Any:
    raise KeyError(f"no such thing on rank {rank}")


def elementwise(p: dict[str, Any], x: torch.Tensor, y: torch.Tensor, order: tuple[int, ...], kind: str) -> Any:
    """Of any piece of x that of the output, its dims in another order; of y, which may be cut otherwise, its own."""
    own, other = x * p["w"], {"y": y * p["v"]}
    if kind == "linear":
        return own.permute(order), other
    out = torch.tanh(own).permute(order), other
    return (*out, own.square().mean()) if kind == "loss" else out


def built_on_mesh(rank: int, sizes: tuple[int, ...], stage: int = 2) -> tuple[Any, ...]:
    """A function whose pieces any rank can compute, over the axes a and b."""
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("a", "b"))
    params = {"w": torch.tensor([2.0], dtype=torch.float64), "v": torch.tensor([-3.0], dtype=torch.float64)}
    return SHARDS[stage](fz.train_step(elementwise, fz.sgd(0.1)), mesh, axis=("a", "b")), params, mesh


def over_tokens(p: dict[str, Any], x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor, ax: Any = None) -> Any:
    """Of [examples, tokens, features], y [examples] and bias [features]: what ranks of an axis of tokens make of it."""
    hidden = torch.tanh(x @ p["w"] + bias) * y[:, None, None]
    total = hidden.sum(1) if ax is None else fz.parallel.sum(hidden.sum(1), ax)
    every = hidden if ax is None else fz.parallel.gather(hidden, ax, 1)
    return {"own": hidden, "total": total, "turned": hidden.transpose(0, 1), "every": every, "loss": hidden.mean()}


def built_over_tokens(rank: int, sizes: tuple[int, int], stage: int = 3) -> tuple[Any, ...]:
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp"))
    fn = functools.partial(over_tokens, ax=fz.parallel.axis(mesh, "sp"))
    return SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)), mesh, axis=("dp", "sp")), {"w": weights()["in"]}, mesh


def ragged(p: dict[str, Any], x: fz.Ragged, scale: torch.Tensor, tanh: bool = True, ax: Any = None) -> Any:
    """Of each row the same, of each example the sum of its rows, and the mean over all rows."""
    rows = x.values @ p["w"] * torch.repeat_interleave(scale, x.lengths)[:, None]
    rows = torch.tanh(rows) if tanh else rows
    example = torch.repeat_interleave(torch.arange(len(x.lengths)), x.lengths)
    sums = rows.new_zeros(len(x.lengths), rows.shape[1]).index_add(0, example, rows)
    out = {"rows": fz.Ragged(rows, x.lengths), "sums": sums}
    if not tanh:
        return out
    weights = torch.ones(len(rows), dtype=rows.dtype)
    mean = rows.sum(1).mean() if ax is None else fz.parallel.weighted_mean(rows.sum(1), weights, ax)
    return {**out, "mean": mean}


def built_ragged(rank: int, stage: int = 2) -> tuple[Any, ...]:
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
    fn = functools.partial(ragged, ax=fz.parallel.axis(mesh, "dp"))
    generator = torch.Generator().manual_seed(stage)
    w = torch.randint(-2, 3, (3, 3), generator=generator, dtype=torch.float64)
    return SHARDS[stage](fz.train_step(fn, fz.sgd(0.1)), mesh), {"w": w}, mesh


def columns(p: dict[str, Any], x: torch.Tensor, ax: Any = None) -> torch.Tensor:
    """A layer that is cut by columns: each rank of the axis has its own features, which nobody puts together."""
    x = x * p["gain"]
    return torch.tanh((x if ax is None else fz.parallel.copy(x, ax)) @ p["up"])


def rows(p: dict[str, Any], x: torch.Tensor, ax: Any = None) -> torch.Tensor:
    """One that is cut by rows, of such features."""
    out = x @ p["down"]
    return (out if ax is None else fz.parallel.sum(out, ax)) * p["gain"]


def built_layer(rank: int, fn: Any, plan: dict[str, int], sizes: tuple[int, int]) -> tuple[Any, ...]:
    mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    params = {"gain": draw(1), **({"up": draw(3, 5)} if "up" in plan else {"down": draw(5, 2)})}
    own = functools.partial(fn, ax=fz.parallel.axis(mesh, "tp"))
    step = fz.shard_tensor(fz.train_step(own, fz.sgd(0.1)), plan, mesh=mesh, axis="tp")
    return fz.shard_zero3(step, mesh, axis="dp"), params, mesh
