"""Learns to learn sinusoids from a few points: MAML (arXiv 1703.03400) with second-order gradients, under ZeRO-3.

A step is a function: `torch.func.grad` differentiates the loss after five of them by the params before the first, and
`torch.vmap` maps that over tasks. Ranks have slices of the params and of each task's points. Two ranks, about a
minute and a half on two cores, most of it to compile an update once:

    python examples/maml.py
    python examples/maml.py --ranks 1 --stage 0 --inner-steps 10 --no-jit
    torchrun --nproc-per-node 5 examples/maml.py

Beside it the same is trained by plain torch in one process; both are printed, and by how much they differ. Losses are
mean squared errors, in float64. Ctrl-C stops the run; a second one kills it.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from launch import add_numbers, default_ranks, device_of, launch, parser_of
from torch import Tensor, nn
from train_lm import SHARD

import fzero as fz

Params = dict[str, Tensor]


class Tasks(NamedTuple):
    """Sinusoids of some amplitude and phase: points to adapt to, and others to be judged by, [tasks, points, 1]."""

    x: Tensor
    y: Tensor
    query_x: Tensor
    query_y: Tensor

    def share(self, rank: int, ranks: int) -> Tasks:
        """Every task, with a rank's share of its points."""
        return Tasks(*[points.chunk(ranks, dim=1)[rank] for points in self])


def random_tasks(count: int, shots: int, generator: torch.Generator, device: torch.device) -> Tasks:
    def uniform(low: float, high: float, points: int) -> Tensor:
        shape = count, points, 1
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    amplitude, phase, x = uniform(0.1, 5.0, 1), uniform(0.0, math.pi, 1), uniform(-5.0, 5.0, 2 * shots)
    x, y = x.to(device), (amplitude * torch.sin(x - phase)).to(device)
    return Tasks(x[:, :shots], y[:, :shots], x[:, shots:], y[:, shots:])


def regressor(width: int, generator: torch.Generator) -> nn.Module:
    with torch.device("meta"):  # the layers would draw from the global generator
        hidden = nn.Linear(1, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        module = nn.Sequential(*hidden, nn.Linear(width, 1)).double()
    module.to_empty(device="cpu")
    for param in module.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5, generator=generator)
    return module


# ---- MAML over steps


class Maml:
    """Gradients and updates of what adaptation begins with, as functions of a state of `outer`.

    Attributes:
        inner: the step that adapts.
        outer: the step over the same params whose optimizer updates them; its function is never run.
        params: that both begin with.
    """

    def __init__(self, module: nn.Module, args: argparse.Namespace) -> None:
        self.apply, self.params = fz.functional(module)
        shard = SHARD[args.stage]
        self.inner = shard(fz.train_step(self.loss, fz.sgd(args.inner_lr)))
        self.outer = shard(fz.train_step(self.loss, fz.adamw(args.lr, weight_decay=0.0)))
        self.start, self.inner_steps = self.inner.init(self.params), args.inner_steps

    def loss(self, params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (self.apply(params, x) - y).square().mean()

    def query_loss(self, params: fz.Sharded, steps: int, x: Tensor, y: Tensor, *query: Tensor) -> Tensor:
        """Of one task, after some steps on its points: this rank's share of it."""
        # the values of the outer step's params, in the layout of the inner step's
        state = self.start.replace(params=self.start.params.map(lambda _, values: values, params))
        for _ in range(steps):
            state, _ = self.inner(state, x, y)
        return self.inner.forward(state, *query)

    def meta_loss(self, params: fz.Sharded, tasks: Tasks, steps: int) -> Tensor:
        return torch.vmap(functools.partial(self.query_loss, params, steps))(*tasks).mean()

    def grads(self, state: fz.TrainState, tasks: Tasks) -> tuple[fz.Sharded, Tensor]:
        """Those of the mean loss over ranks, cut as the params are; this rank's loss."""
        return torch.func.grad_and_value(self.meta_loss)(state.params, tasks, self.inner_steps)

    def update(self, state: fz.TrainState, tasks: Tasks) -> tuple[fz.TrainState, Tensor]:
        grads, loss = self.grads(state, tasks)
        return self.outer.update(state, grads)[0], loss


# ---- the same by plain torch in one process


class PlainMaml:
    """What the other is held against: `torch.func.functional_call`, `torch.func.grad` and torch's own AdamW."""

    def __init__(self, module: nn.Module, args: argparse.Namespace) -> None:
        self.module, self.lr, self.inner_steps = module, args.inner_lr, args.inner_steps
        self.params = {name: param.detach().clone() for name, param in module.named_parameters()}
        self.optimizer = torch.optim.AdamW(self.params.values(), lr=args.lr, weight_decay=0.0)

    def loss(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        return (torch.func.functional_call(self.module, params, (x,)) - y).square().mean()

    def query_loss(self, params: Params, steps: int, x: Tensor, y: Tensor, *query: Tensor) -> Tensor:
        for _ in range(steps):
            grads = torch.func.grad(self.loss)(params, x, y)
            params = {name: param - self.lr * grads[name] for name, param in params.items()}
        return self.loss(params, *query)

    def meta_loss(self, params: Params, tasks: Tasks, steps: int) -> Tensor:
        return torch.vmap(functools.partial(self.query_loss, params, steps))(*tasks).mean()

    def grads(self, tasks: Tasks) -> tuple[Params, Tensor]:
        return torch.func.grad_and_value(self.meta_loss)(self.params, tasks, self.inner_steps)

    def update(self, tasks: Tasks) -> Tensor:
        grads, loss = self.grads(tasks)
        for name, param in self.params.items():
            param.grad = grads[name]
        self.optimizer.step()
        return loss


# ---- the run of one rank


def train(rank: int, ranks: int, args: argparse.Namespace, stop: Callable[[], bool]) -> None:
    device = device_of(rank, ranks)
    say: Callable[..., None] = print if rank == 0 else lambda *_: None
    module = regressor(args.width, torch.Generator().manual_seed(args.seed)).to(device)
    maml, plain = Maml(module, args), PlainMaml(module, args)
    state = maml.outer.init(maml.params)
    held_out = random_tasks(args.eval_tasks, args.shots, torch.Generator().manual_seed(args.seed + 1), device)

    def tasks_of(update: int) -> Tasks:
        generator = torch.Generator().manual_seed((args.seed << 16) + update + 2)  # the same for both, on all ranks
        return random_tasks(args.tasks, args.shots, generator, device)

    def mean(loss: Tensor) -> float:
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / ranks

    def look(what: str, state: fz.TrainState) -> None:
        """Prints query losses on held-out tasks, before and after adaptation, and those of plain torch."""
        own = held_out.share(rank, ranks)
        ours = [mean(maml.meta_loss(state.params, own, steps)) for steps in (0, args.inner_steps)]
        theirs = [plain.meta_loss(plain.params, held_out, steps).item() for steps in (0, args.inner_steps)]
        for who, (before, after) in ((f"fzero, {ranks} rank{'s' * (ranks > 1)}", ours), ("plain torch", theirs)):
            say(f"{what:<14} {who:<14} {before:>18.12f} {after:>18.12f}")

    say(f"query loss of {args.eval_tasks} held-out tasks, before and after {args.inner_steps} steps of SGD:\n")
    look("random weights", state)
    tasks = tasks_of(0)
    ours, theirs = fz.gather(maml.grads(state, tasks.share(rank, ranks))[0]), plain.grads(tasks)[0]
    size = max(grad.abs().max().item() for grad in theirs.values())
    apart = max((ours[name] - grad).abs().max().item() for name, grad in theirs.items())

    def updated(state: fz.TrainState, tasks: Tasks) -> tuple[fz.TrainState, dict[str, Tensor]]:
        state, loss = update(state, tasks)
        return state, {"loss": loss}

    update = fz.jit(maml.update) if args.jit else maml.update
    began = time.perf_counter()
    update(state, tasks.share(rank, ranks))  # what torch does once, it has done; and a graph is compiled
    say(f"the first update, with all that is compiled for it: {time.perf_counter() - began:.0f} s\n")
    began = time.perf_counter()
    batch = lambda number: [tasks_of(number).share(rank, ranks)]
    run = fz.loop(updated, state, batch, total=args.steps, progress="MAML", every=1, stop=stop)
    for _ in run:
        pass
    state, done, seconds = run.state, run.done, time.perf_counter() - began
    for number in range(done):
        plain.update(tasks_of(number))
    look("meta-trained", state)
    trained = fz.gather(state.params)
    say(f"\nmeta-gradients: the largest difference from plain torch's is {apart:.1e}, the largest entry {size:.1e}")
    apart = max((trained[name] - param).abs().max().item() for name, param in plain.params.items())
    say(f"params: after {done} of {args.steps} updates the largest difference is {apart:.1e}")
    say(f"{1e3 * seconds / max(done, 1):.0f} ms an update of {args.tasks} tasks")


# ---- options


def options(argv: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_numbers(
        parser,
        ("ranks", default_ranks(), "processes, each with its own share of every task's points and of the state"),
        ("width", 40, "features of the two hidden layers"),
        ("tasks", 25, "sinusoids of an update"),
        ("shots", 10, "points of a sinusoid to adapt to, and as many to be judged by"),
        ("inner-steps", 5, "steps of adaptation, all of them differentiated"),
        ("steps", 40, "updates of what adaptation begins with"),
        ("eval-tasks", 100, "held-out sinusoids"),
        ("inner-lr", 0.01, "learning rate of adaptation"),
        ("lr", 2e-2, "learning rate of the updates"),
    )
    parser.add_argument("--stage", type=int, default=3, choices=sorted(SHARD), help="ZeRO stage; 0 shards nothing")
    parser.add_argument(
        "--jit",
        action=argparse.BooleanOptionalAction,
        default=shutil.which("g++") is not None,
        help="run an update as one compiled graph; by default if there is a compiler",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and tasks")
    args = parser.parse_args(argv)
    world = int(os.environ.get("WORLD_SIZE", 0))
    if args.seed < 0:
        parser.error("--seed must not be negative")
    if args.stage == 0 and args.ranks > 1:
        parser.error(f"stage 0 shards and averages nothing, so it needs --ranks 1; got {args.ranks} ranks")
    if world and args.ranks != world:
        parser.error(f"--ranks {args.ranks}, but torchrun started {world}; leave --ranks out")
    if args.shots % args.ranks:
        parser.error(f"--shots must be a multiple of --ranks, so that shares are equal; got {args.shots}, {args.ranks}")
    return args


if __name__ == "__main__":
    sys.exit(launch(train, options()))
