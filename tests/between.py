"""Programs of what a module does between a column and a row, drawn: one process's values and gradients, or a refusal.

python tests/between.py --programs 2000 --seed 0
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import math
import random
import sys
import time
from typing import Any

import torch
import torch.nn.functional as F
from backwards import with_backward
from torch import nn

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

F64, WIDTH, INNER = torch.float64, 4, 12
SHAPE = (2, 3)
# those that may leave the features alone, in some order at least
MILD = """
h = h.tanh()
h = h * 2 + 1
h = F.gelu(h)
h = h.cumsum(1)
h = h.softmax(1)
h = h.flip(1)
h = h.roll(1, 1)
h = h - h.mean(1, keepdim=True)
h = h.amax(1, keepdim=True) + h
h = h.unflatten(-1, (-1, {k}))
h = h.unflatten(-1, (h.shape[-1] // {k}, {k}))
h = h.transpose(1, 2)
h = h.transpose({d}, {e})
h = h.mT
h = h.flatten(-2)
h = h.flatten(0, 1)
h = h.reshape(h.shape[0], -1, h.shape[-1])
h = h.reshape(-1, h.shape[-1])
h = h.reshape(*h.shape[:2], -1)
h = h.reshape(h.shape[0] * h.shape[1], *h.shape[2:])
h = h.reshape(2, 3, -1)
h = h.reshape(2, -1, 3, 2)
h = h.reshape(-1, 3, 2)
h = h[:, 1:]
h = h[:, None]
h = h[torch.tensor([1, 0])]
h = h.unsqueeze({d})
h = h.squeeze({d})
h = h * p
h = h + p
h = torch.where(p > 0, h, 0.0)
h = h * x[..., :1]
h = h * x.mean()
h = (x @ x.mT).softmax(-1) @ h
h = (h @ h.mT).softmax(-1) @ h
h = F.scaled_dot_product_attention(h, h, h)
h = F.pad(h, (0, 0, 1, 0))
h = h + torch.zeros(h.shape, dtype=h.dtype)
h = h * h.new_ones(h.shape)
h = torch.cat([h, h.sin()], 1)
h = torch.stack([h, h.cos()], 1)
h = h.chunk(2, -1)[0]
h = h.split(h.shape[-1] // 2, -1)[-1]
h = h[..., : h.shape[-1] // 2]
p = h
p = torch.ones_like(h)
h = kept(h)
h = h * total(h.square().sum(-1, keepdim=True))
h = h * total(torch.einsum("btf,btf->bt", h, h))[..., None]
h = h / (1 + total(h.square().sum())).sqrt()
h = torch.softmax(total(h @ h.mT), -1) @ h
h = einops.rearrange(h, "b t (n d) -> b n t d", d={k})
h = einops.rearrange(h, "b n t d -> b t (n d)")
h = einops.rearrange(h, "b t (n d) -> (b n) t d", d={k})
h = einops.rearrange(h, "(b n) t d -> b t (n d)", b=2)
""".strip().splitlines()
LINES = [*MILD, *"""
h = total(h.sum({d}, keepdim=True)) * h
h = total(h.sum({d}, keepdim=True) / 3 + p) * h
h = total(h) * p
h = h - total(h.sum({d}, keepdim=True).tanh())
h = total((h @ p.mT).transpose(-1, -2)) @ p
h = total(h.mean({d}, keepdim=True)) * h
p = total(p.sum(-1, keepdim=True))
p = p.sum(-1, keepdim=True)
h = -h
h = h.softmax({d})
h = h.cumsum({d})
h = h.flip({d})
h = h.roll(1, {d})
h = h - h.mean({d}, keepdim=True)
h = h.sum({d}, keepdim=True) * h
h = h.mean({d})
h = h.amax({d}, keepdim=True) + h
h = h.logsumexp({d})
h = h / (1 + h.std())
h = h.max({d})[0]
h = h.sort({d})[0]
h = h.movedim({d}, {e})
h = h.unflatten({d}, (-1, {k}))
h = h.unflatten({d}, ({k}, -1))
h = h.unflatten({d}, (h.shape[{d}] // {k}, {k}))
h = h.unflatten({d}, ({k}, h.shape[{d}] // {k}))
h = h.flatten({d}, {e})
h = h.flatten({d})
h = h.reshape(h.shape[0], -1)
h = h.reshape(*h.shape[:-1], -1, {k})
h = h.reshape(-1, {k})
h = h.reshape(h.shape[-1], -1)
h = h.reshape(*h.shape[:-2], -1)
h = h.reshape(2, -1, 3)
h = h.reshape(-1, 2, 3)
h = h.view(h.shape)
h = h[..., 0]
h = h[..., :{k}]
h = h[..., h.shape[-1] // 2 :]
h = h[0]
h = h[..., None, :]
h = h.narrow({d}, 0, 1)
h = h.index_select({d}, torch.tensor([0]))
h = h.chunk(2, {d})[0]
h = h.chunk(2, {d})[0] * h.chunk(2, {d})[1]
h = h.split({k}, {d})[0]
h = h.split(h.shape[{d}] // 2, {d})[-1]
h = sum(h.split({k}, {d}))
h = torch.cat(h.split({k}, {d})[::-1], {d})
h = torch.stack(h.unbind({d}), {e})
h = h.unbind({d})[-1]
h = h.squeeze()
h = h.repeat_interleave(2, {d})
h = h.repeat_interleave(2)
h = h.expand(2, *h.shape)
h = h.expand_as(h)
h = h.mean({d}, keepdim=True).expand(h.shape)
h = torch.cat([h, h.sin()], {d})
h = torch.cat([h, p], {d})
h = torch.stack([h, h.cos()], {d})
h = torch.stack([h, p], {d})
h = h + x.mean(-1, keepdim=True)
h = h * x.sum((0, 1))[0]
h = h @ h.mT
h = h.mT @ h
h = F.scaled_dot_product_attention(h, p, p)
h = F.layer_norm(h, h.shape[-1:])
h = F.normalize(h, dim={d})
h = F.pad(h, (1, 0))
h = F.glu(h, {d})
h = h / h.shape[{d}]
h = h * h.shape[{d}] ** -0.5
h = h * math.sqrt(h.shape[{d}])
h = h / h.numel()
h = h + torch.ones(h.shape[{d}], dtype=h.dtype).mean()
h = h * torch.arange(h.shape[{d}])
h = h * torch.ones(h.shape[-1], dtype=h.dtype)
h = torch.einsum("...i,...i->...", h, h)
h = torch.einsum("bt...,bs...->bts", h, p)
h = h * torch.einsum("btf->f", h)
h = torch.einsum("b...f,b...f->b...f", h, h)
b = torch.zeros(h.shape, dtype=h.dtype); b[:, 1:] = h[:, 1:]; h = b
b = h * 1; b[..., 0] = 0; h = b
b = h * 1; b[:, 0] = p[:, 0]; h = b
b = h * 1; b += p; h = b
b = h.clone().mul_(x[..., :1]); h = b
p = h.detach()
p = x
p = x[..., :1]
h, p = p, h
h = h.contiguous()
h = h.masked_fill(h > 1, 0.0)
h = einops.rearrange(h, "b t (d n) -> b n t d", d={k})
h = doubled(h)
h = torch.utils._pytree.tree_map(torch.tanh, [h])[0]
""".strip().splitlines()]

ENDS = (
    *("", "h = h.transpose(1, 2).flatten(2)", "h = h.flatten(2)", "h = h.mT", "h = h.squeeze()", "h = h.squeeze(1)"),
    *("h = h.unflatten(0, (2, -1)).flatten(2)", "h = h.unflatten(0, (2, -1)).transpose(1, 2).flatten(2)"),
    *("h = h.sum(1)", "h = h.movedim(1, -1).flatten(-2)", "h = h.sum(0)", "h = h.view(2, 3, -1)"),
)


def drawn(rng: random.Random, least: int = 1, most: int = 6) -> list[str]:
    """The lines of a program that plain torch runs."""
    while True:
        h, x = torch.randn(*SHAPE, INNER, dtype=F64), torch.randn(*SHAPE, WIDTH, dtype=F64)
        space, lines = space_of(h, x), list[str]()
        mild = rng.random() < 0.6
        for _ in range(rng.randint(least, most)):
            for _attempt in range(8):
                d, e, k = rng.randint(-3, -1), rng.randint(-3, -1), rng.choice([2, 3, 4, 6])
                line = rng.choice(MILD if mild or rng.random() < 0.5 else LINES).format(d=d, e=e, k=k)
                before = dict(space)
                try:
                    exec(line, space)
                    if space["h"].numel() > 2000 or not space["h"].is_floating_point():
                        raise ValueError
                except Exception:
                    space.clear()
                    space.update(before)
                    continue
                lines.append(line)
                break
        if not any("h =" in line for line in lines) or not space["h"].isfinite().all():
            continue
        for line in ENDS:
            own = dict(space)
            with contextlib.suppress(Exception):
                exec(line, own)
                if own["h"].shape == (*SHAPE, INNER):
                    return [*lines, line] if line else lines
        if rng.random() < 0.1:  # the module returns what is there
            return lines


doubled = with_backward(lambda x: x * 2, lambda cotangent: cotangent * 2)
here: contextvars.ContextVar[Any] = contextvars.ContextVar("axis", default=None)  # that the program runs over


def total(x: torch.Tensor) -> torch.Tensor:
    return x if here.get() is None else fz.parallel.sum(x, here.get())


def space_of(h: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    import einops

    box: list[torch.Tensor] = []

    def kept(y: torch.Tensor) -> torch.Tensor:
        box.append(y)
        return box[-1]

    names: dict[str, Any] = {
        "total": total,
        "F": F,
        "torch": torch,
        "math": math,
        "einops": einops,
        "kept": kept,
        "doubled": doubled,
    }
    return {"h": h, "x": x, "p": h, **names}


class Unit(nn.Module):
    """A part of a program: a unit of its own where it has a leaf, whose values go in a list and come in a dict."""

    def __init__(self, lines: list[str], size: int) -> None:
        super().__init__()
        self.lines = lines
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.size = size

    def forward(self, given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        h, x, p = given
        space = {**space_of(h, x), "p": p}
        for line in self.lines:
            exec(line, space)
        return {"h": space["h"] * self.scale, "p": space["p"]}


class Between(nn.Module):
    def __init__(self, lines: list[str], cut: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2)
        self.parts = nn.ModuleList([Unit(lines[:cut], INNER), Unit(lines[cut:], INNER)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        h = p = self.up(x)
        for part in self.parts:
            found = part([h, x, p])
            h, p = found["h"], found["p"]
        if h.ndim == 3 and h.shape[:2] == x.shape[:2]:
            h = self.down(h)
            return self.head(h + x)
        return h


def compared(lines: list[str], seed: int, ranks: int, plan: dict[str, Any], units: bool, sequence: bool) -> str:
    """ "equal", "refused", or what is wrong."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    module = Between(lines, rng.randint(0, len(lines))).to(F64)
    apply, params = fz.functional(module)
    x = torch.randn(*SHAPE, WIDTH, dtype=F64)
    loss = lambda p, x: apply(p, x).square().mean()
    try:
        want, value = torch.func.grad_and_value(loss)(dict(params), x)
    except Exception:
        return "invalid"
    if not value.isfinite() or value.abs() > 1e8:
        return "invalid"

    def rank_main(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
        here.set(fz.parallel.axis(mesh, "tp"))
        step = fz.train_step(loss, fz.sgd(0.1), units=["parts.*"] if units else [])
        step = fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence)
        step = fz.shard_zero3(step, mesh=mesh, axis="dp") if units else step
        step = fz.remat(step) if units and seed % 2 else step
        state = step.init(params)
        runs = [step.vjp(state, x) for _ in range(2)]  # nothing is followed in the second one
        return [(out, dict(fz.gather(pullback(torch.ones_like(out))[0]))) for out, pullback in runs]

    try:
        found = [each for own in run_ranks(rank_main, ranks) for each in own]
    except RankError as error:
        words = str(error)
        if any(each in words for each in REFUSALS):
            return "refused"
        return f"failed: {words.strip().splitlines()[-1][:300]}"
    for out, own in found:
        try:
            assert_trees_close((out, own), (value, want), rtol=1e-8, atol=1e-10)
        except AssertionError as error:
            return f"WRONG: {str(error)[:200]}"
    return "equal"


REFUSALS = (
    "goes over the dim along which",
    "uses a size that was read",
    "inputs are cut over axis",
    "outputs are cut over axis",
    "between the ranks of axis",
    "each rank's own of axis",
    "into a tensor that all ranks have",
)


def arrangement(rng: random.Random) -> tuple[int, dict[str, Any], bool, bool]:
    ranks = rng.choice([2, 2, 3])
    parts = rng.choice([None, None, (6, 6), (6, 3, 3)])
    up: Any = "column" if parts is None else fz.parallel.cut("column", parts=parts)
    return ranks, {"up": up, "down": "row"}, rng.random() < 0.5, rng.random() < 0.3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after that long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--failed", action="store_true", help="also print those that failed with another error")
    args = parser.parse_args()
    start, found = time.monotonic(), collections.Counter[str]()
    for seed in range(args.seed, args.seed + args.programs):
        if time.monotonic() - start > 60 * args.minutes:
            break
        rng = random.Random(seed)
        lines, how = drawn(rng), arrangement(rng)
        says = compared(lines, seed, *how)
        kind = says.partition(":")[0]
        found[kind] += 1
        if kind == "WRONG" or (args.failed and kind == "failed"):
            print(seed, how, lines, says, sep="\n  ", flush=True)
    print(f"between a column and a row: {dict(found)} in {time.monotonic() - start:.0f} s")
    return int(found["WRONG"] > 0)


if __name__ == "__main__":
    sys.exit(main())
