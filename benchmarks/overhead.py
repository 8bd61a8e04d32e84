"""What a unit costs in Python: many tiny transformer blocks, where nothing but overhead takes time.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --model linear --width 24      # blocks of a norm and a linear layer
    OMP_NUM_THREADS=1 python benchmarks/overhead.py --optimizer adamw              # torch's fused kernel, by hand

One rank, float32, SGD, so that the update weighs little. Four comparisons, all interleaved in one run:

- an unsharded step beside the same written by hand with functional_call and torch.func.vjp (loss and gradient norm
  reported, a gradient that is not finite refused);
- ZeRO-3 on a world of one, whose unit nodes run, beside the step by hand: what each unit adds;
- FSDP2 on a world of one beside the plain module: what each of its units adds;
- both of ours as graphs (`fz.jit`), which are compiled once, in the time that is printed.

It also prints how many Python frames a steady unit's call and pullback enter, and in how many files, and how many a
step of ZeRO-3 enters more for one more unit: its handles, its gradient's norm and its update too.
"""

from __future__ import annotations

import collections
import copy
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import results
from transformer import Transformer

import fzero as fz


class Linears(torch.nn.Module):
    """Blocks of a norm and one linear layer: the smallest units that somebody would write."""

    def __init__(self, width: int, blocks: int, generator: torch.Generator) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, width)
        shape = [torch.nn.LayerNorm(width), torch.nn.Linear(width, width)]
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(*copy.deepcopy(shape)) for _ in range(blocks))
        self.head = torch.nn.Linear(width, 256)
        for param in self.parameters():
            torch.nn.init.normal_(param, std=0.1, generator=generator)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def written(optimizer: str, params: Mapping[str, torch.Tensor]) -> Callable[[Mapping[str, torch.Tensor]], object]:
    """An update in place, by hand."""
    if optimizer == "sgd":
        return lambda grads: [p.sub_(grads[name], alpha=1e-3) for name, p in params.items()]
    own, zeros = list(params.values()), lambda: [torch.zeros_like(p) for p in params.values()]
    mu, nu, counts = zeros(), zeros(), [torch.zeros(()) for _ in own]

    def update(grads: Mapping[str, torch.Tensor]) -> None:
        torch._foreach_add_(counts, 1)
        torch._fused_adamw_(
            own, [grads[name] for name in params], mu, nu, [], counts, lr=1e-3, beta1=0.9, beta2=0.999,
            weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return update


def by_hand(module: Any, optimizer: str) -> Callable[..., float]:
    params = {name: p.detach().clone() for name, p in module.named_parameters()}
    update = written(optimizer, params)

    def run(x: torch.Tensor, y: torch.Tensor) -> float:
        with torch.no_grad():
            pair: Any = torch.func.vjp(lambda p: loss_of(torch.func.functional_call(module, p, (x,)), y), params)
            loss, pullback = pair
            (grads,) = pullback(torch.ones_like(loss), retain_graph=False, create_graph=False)
            norm = torch.nn.utils.get_total_norm(grads.values())
            update(grads)
            assert norm.isfinite()
        return loss.item()

    return run


def fzero(module: Any, transform: Callable[[fz.Step], fz.Step], optimizer: str) -> Callable[..., float]:
    apply, params = fz.functional(module)
    own = fz.sgd(1e-3) if optimizer == "sgd" else fz.adamw(1e-3, weight_decay=0.01)
    step = fz.donate(transform(fz.train_step(lambda p, x, y: loss_of(apply(p, x), y), own)))
    state = step.init(params)

    def run(x: torch.Tensor, y: torch.Tensor) -> float:
        nonlocal state
        state, metrics = step(state, x, y)
        return metrics["loss"].item()

    return run


def autograd(module: Any, sharded: bool, optimizer: str) -> Callable[..., float]:
    if sharded:
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (1,))
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(module, mesh=mesh)
    of, sgd = module.parameters(), optimizer == "sgd"
    own = torch.optim.SGD(of, lr=1e-3) if sgd else torch.optim.AdamW(of, lr=1e-3, fused=True)

    def run(x: torch.Tensor, y: torch.Tensor) -> float:
        loss = loss_of(module(x), y)
        loss.backward()
        own.step()
        own.zero_grad()
        return loss.item()

    return run


def frames(run: Callable[..., float], *data: torch.Tensor) -> tuple[int, int, int, int]:
    """Python frames that a steady step enters: in all, in units' calls and pullbacks, in how many files, and calls."""
    every, depth, calls = 0, 0, 0
    inside: collections.Counter[str] = collections.Counter()
    begins = {("forward", "fzero/functional.py"), ("_enter", "engine/straight.py"), ("backward", "engine/straight.py")}

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal every, depth, calls
        if event == "return" and depth:
            depth -= 1
        elif event == "call":
            code = frame.f_code
            every += 1
            if depth:
                depth += 1
            elif any(code.co_name == name and code.co_filename.endswith(file) for name, file in begins):
                depth = 1
                calls += code.co_name == "forward"
            inside[code.co_filename] += bool(depth)

    sys.setprofile(look)
    try:
        run(*data)
    finally:
        sys.setprofile(None)
    return every, inside.total(), sum(map(bool, inside.values())), calls


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"blocks": 48, "width": 32, "heads": 2, "batch": 2, "context": 16, "warmup": 3, "steps": 21}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", choices=("transformer", "linear"), default="transformer")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)

        def module(blocks: int = args.blocks) -> Any:
            generator = torch.Generator().manual_seed(0)
            if args.model == "linear":
                return Linears(args.width, blocks, generator)
            return Transformer(args.width, blocks, args.heads, generator)

        def made(transform: Callable[[fz.Step], fz.Step], blocks: int = args.blocks) -> Callable[..., float]:
            return fzero(module(blocks), transform, args.optimizer)

        contenders = {
            "by hand": by_hand(module(), args.optimizer),
            "fzero, unsharded": made(lambda step: step),
            "fzero, ZeRO-2": made(fz.shard_zero2),
            "fzero, ZeRO-3": made(fz.shard_zero3),
            "fzero, ZeRO-3, remat": made(lambda step: fz.remat(fz.shard_zero3(step))),
            "fzero, ZeRO-3, fused": made(lambda step: fz.fuse_update(fz.shard_zero3(step))),
            "fzero, unsharded, jit": made(fz.jit),
            "fzero, ZeRO-3, jit": made(lambda step: fz.jit(fz.shard_zero3(step))),
            "module": autograd(module(), False, args.optimizer),
            "FSDP2": autograd(module(), True, args.optimizer),
        }
        generator = torch.Generator().manual_seed(0)
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for count in range(args.warmup + args.steps):
            data = torch.randint(0, 256, (args.batch, args.context + 1), generator=generator)
            losses = []
            for name, run in contenders.items():
                start = time.perf_counter()
                losses.append(run(data[:, :-1], data[:, 1:]))
                if not count and name.endswith("jit"):
                    print(f"{name}: first call, with its compilation, {time.perf_counter() - start:.1f} s", flush=True)
                if count >= args.warmup:
                    times[name].append(time.perf_counter() - start)
            assert max(losses) - min(losses) < 1e-4 * losses[0], dict(zip(contenders, losses, strict=True))
        counted = frames(contenders["fzero, ZeRO-3"], data[:, :-1], data[:, 1:])
        half = made(fz.shard_zero3, args.blocks // 2)
        for _ in range(4):
            half(data[:, :-1], data[:, 1:])
        fewer = frames(half, data[:, :-1], data[:, 1:])[0]
        dist.destroy_process_group()
    every, inside, files, calls = counted
    print(
        f"a steady unit's call and pullback enter {inside / calls:.0f} Python frames in {files} files (the unit's own "
        f"counted); a unit more in the model enters {(every - fewer) / (args.blocks - args.blocks // 2):.0f} in a step"
    )

    def median_ms(name: str, other: str | None = None) -> float:
        pairs = zip(times[name], times[other] if other else [0.0] * args.steps, strict=True)
        return 1e3 * statistics.median(a - b for a, b in pairs)

    def of_hand(name: str) -> float:
        return statistics.median(a / b for a, b in zip(times[name], times["by hand"], strict=True))

    ours = median_ms("fzero, ZeRO-3", "by hand") / args.blocks
    theirs = median_ms("FSDP2", "module") / args.blocks
    adds: dict[str, tuple[float | None, ...]] = {name: (of_hand(name),) for name in times if name.startswith("fzero")}
    adds |= {"fzero, ZeRO-3": (of_hand("fzero, ZeRO-3"), ours), "FSDP2": (None, theirs)}
    table = results.Table("median ms", "of by hand", "a unit adds, ms")
    for name in contenders:
        table.row(name, median_ms(name), *adds.get(name, ()))
    results.save(args, table)


if __name__ == "__main__":
    main()
