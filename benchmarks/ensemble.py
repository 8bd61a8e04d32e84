"""An ensemble of small models trained by torch.vmap of a step, beside as many steps one after the other.

    OMP_NUM_THREADS=1 python benchmarks/ensemble.py
    OMP_NUM_THREADS=1 python benchmarks/ensemble.py --members 64 --width 16

Each member is a network of `--layers` tanh layers of `--width`, with params, data and, in the last comparison, a
learning rate of its own; AdamW, float32. One line per contender:

    runs, fzero      one step(state, x, y) after the other
    runs, torch      the same by hand: functional_call, torch.func.grad and torch.optim.AdamW (fused) for each member
    vmap, fzero      torch.vmap(step)(stacked, x, y)
    vmap, rates      the step made of the member's rate inside of what is mapped
    vmap, jit        fz.jit(torch.vmap(step))(stacked, x, y)
    vmap, by hand    torch.vmap of torch.func.grad_and_value, and AdamW on stacked tensors
    vmap, compiled   the same, its gradients under torch.compile

with milliseconds of one update of all members, the median of the rounds, and that over "runs, fzero" and over "vmap, by
hand", the medians of the ratios within each round. In every round each contender takes `--steps` steps, in an order
drawn anew. All must end with the same params, or the run fails.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from torch import nn

import fzero as fz

RATE = 1e-3
Run = Callable[[torch.Tensor, torch.Tensor], object]  # one update of all members: x, y of [members, batch, width]
Params = dict[str, torch.Tensor]


def module(width: int, layers: int, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.Tanh())])


def squared(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((out - y) ** 2).mean()


class Fzero:
    """The members' states, apart or stacked."""

    def __init__(self, modules: list[nn.Module], how: str) -> None:
        apply, _ = fz.functional(modules[0])
        self.loss = lambda p, x, y: squared(apply(p, x), y)
        self.step = fz.train_step(self.loss, fz.adamw(RATE))
        self.states = [self.step.init(fz.functional(each)[1]) for each in modules]
        self.fast = fz.jit(torch.vmap(self.step))
        self.run = {"runs": self.one_by_one, "vmap": self.mapped, "jit": self.jitted, "rates": self.with_rates}[how]
        self.stacked: Any = None if how == "runs" else fz.stack(self.states)
        self.rates = torch.full((len(modules),), RATE)

    def one_by_one(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.states = [self.step(*each)[0] for each in zip(self.states, x, y, strict=True)]

    def mapped(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.stacked, _ = torch.vmap(self.step)(self.stacked, x, y)

    def jitted(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.stacked, _ = self.fast(self.stacked, x, y)

    def with_rates(self, x: torch.Tensor, y: torch.Tensor) -> None:
        def one(rate: torch.Tensor, *given: Any) -> Any:
            return fz.train_step(self.loss, fz.adamw(rate))(*given)

        self.stacked, _ = torch.vmap(one)(self.rates, self.stacked, x, y)

    def params(self) -> list[Params]:
        states = self.states if self.stacked is None else fz.unstack(self.stacked)
        return [dict(fz.gather(state.params)) for state in states]


class ByHand:
    """The same with torch alone; stacked, as one would write an ensemble by hand."""

    def __init__(self, modules: list[nn.Module], how: str) -> None:
        self.module, self.how = modules[0], how
        own = [{name: p.detach().clone() for name, p in each.named_parameters()} for each in modules]
        self.own = own if how == "runs" else [{name: torch.stack([p[name] for p in own]) for name in own[0]}]
        self.grad: Any = torch.func.grad_and_value(self.loss)
        if how != "runs":
            self.grad = torch.vmap(self.grad)
        if how == "compiled":
            self.grad = torch.compile(self.grad)
        self.optimizers = [torch.optim.AdamW(p.values(), lr=RATE, fused=True) for p in self.own]

    def loss(self, p: Params, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return squared(torch.func.functional_call(self.module, p, (x,)), y)

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        grad = self.grad
        given = zip(self.own, x, y, strict=True) if self.how == "runs" else [(self.own[0], x, y)]
        for optimizer, each in zip(self.optimizers, given, strict=True):
            grads, _ = grad(*each)
            # the norm of each member, which a step reports and tests
            flat = [g.flatten(0 if self.how == "runs" else 1) for g in grads.values()]
            norm = torch.stack([torch.linalg.vector_norm(g, dim=-1) for g in flat]).square().sum(0).sqrt()
            assert bool(norm.isfinite().all())
            for name, p in each[0].items():
                p.grad = grads[name]
            optimizer.step()

    def params(self) -> list[Params]:
        if self.how == "runs":
            return self.own
        (stacked,) = self.own
        count = len(next(iter(stacked.values())))
        return [{name: p[i] for name, p in stacked.items()} for i in range(count)]


CONTENDERS = {
    "runs, fzero": lambda modules: Fzero(modules, "runs"),
    "runs, torch": lambda modules: ByHand(modules, "runs"),
    "vmap, fzero": lambda modules: Fzero(modules, "vmap"),
    "vmap, rates": lambda modules: Fzero(modules, "rates"),
    "vmap, jit": lambda modules: Fzero(modules, "jit"),
    "vmap, by hand": lambda modules: ByHand(modules, "vmap"),
    "vmap, compiled": lambda modules: ByHand(modules, "compiled"),
}


def check_params(runs: dict[str, Fzero | ByHand]) -> None:
    first, *others = [(name, run.params()) for name, run in runs.items()]
    for name, params in others:
        for own, want in zip(params, first[1], strict=True):
            for path in want:
                if not torch.allclose(own[path], want[path], rtol=1e-3, atol=1e-4):
                    raise SystemExit(f"{name} computes something else than {first[0]}: {path} differs")
    print(f"all end with the same params, within 1e-4: {', '.join(runs)}")


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"members": 16, "width": 32, "layers": 4, "batch": 16, "warmup": 2, "rounds": 15, "steps": 5}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(" ".join(f"{key}={value}" for key, value in vars(args).items() if key != "save"))
    print(f"CPU: {torch.backends.cpu.get_cpu_capability()}, one thread", flush=True)
    runs = {
        name: make([module(args.width, args.layers, seed) for seed in range(args.members)])
        for name, make in CONTENDERS.items()
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    generator, order, shuffle = torch.Generator().manual_seed(0), list(runs), random.Random(0)
    for count in range(args.warmup + args.rounds):
        data = torch.randn(args.steps, 2, args.members, args.batch, args.width, generator=generator)
        shuffle.shuffle(order)
        for name in order:
            begin = time.perf_counter()
            for x, y in data:
                runs[name].run(x, y)
            if count >= args.warmup:
                times[name].append((time.perf_counter() - begin) / args.steps)
    check_params(runs)
    table = results.Table("median ms", "of runs", "of by hand")
    for name, found in times.items():
        ratios = [
            statistics.median(a / b for a, b in zip(found, times[other], strict=True))
            for other in ("runs, fzero", "vmap, by hand")
        ]
        table.row(name, 1e3 * statistics.median(found), *ratios)
    results.save(args, table)


if __name__ == "__main__":
    main()
