"""Pipelines beside torch.distributed.pipelining: time of whole training steps, by schedule, in three regimes.

    OMP_NUM_THREADS=1 python benchmarks/pipeline.py                   # some minutes
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --ranks 4
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --regimes bf16 --schedules 1F1B
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --alone           # and what no pipeline can be faster than
    OMP_NUM_THREADS=1 python benchmarks/pipeline.py --sleeps          # idle time as simulated and as measured

A small transformer, cut into stages of equal numbers of blocks, on gloo ranks that are places of a pipeline; AdamW, the
same weights, batches and microbatches for both, the same schedule on both sides, in three regimes: float32, one
sequence a microbatch, and bfloat16 autocast over float32 params. Contenders take turns as in step.py, but each has
processes of its own, as what one asks of malloc decides how the other one's memory lies (with fzero's buffers beside it
torch's step takes up to a tenth less). With --keep-memory both call `fz.keep_memory()` first, and malloc gives nothing
back. A contender whose losses are others has no place in it. One line per schedule: the medians of a step in
milliseconds, and the median of the ratios within each round.

--alone: a third contender, the step without communication: plain PyTorch on each rank, its own stages' forwards and
backwards in the schedule's order, on activations and cotangents that are at hand, and the same optimizer. Nobody waits
for anybody but at the end of the step, so that its ratio to torch's step is what a pipeline without any cost of its own
and without idle time would reach.

--sleeps: stages that do nothing but sleep for known times, on ranks that are places: the whole step, simulated by
`fz.schedules.simulate` and measured.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

sys.path.insert(0, str(Path(__file__).parent))
import results
from contenders import ADAMW, DECAY, LR, Run, Training, loss_of
from step import Series, batches, in_turns, quiet, ratio, spawned, spawned_apart
from transformer import Block, Transformer, rotary_angles

import fzero as fz
from fzero.schedules import Kind, Schedule
from fzero.schedules.task import COTANGENT

REGIMES: dict[str, dict[str, Any]] = {
    "float32": {},
    "batch 1": {"rows": 1, "context": 64},
    "bf16": {"dtype": "bfloat16"},
}


class Stage(nn.Module):
    """Some blocks of a transformer, with its embedding before the first and its head behind the last."""

    def __init__(self, whole: Transformer, number: int, stages: int) -> None:
        super().__init__()
        size = len(whole.blocks) // stages
        self.rotated = whole.rotated
        self.embed = whole.embed if number == 0 else None
        self.blocks = nn.ModuleList(whole.blocks[number * size : (number + 1) * size])
        self.norm, self.head = (whole.norm, whole.head) if number == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) if self.embed is not None else x
        angles = rotary_angles(x.shape[1], self.rotated, x.device)
        for block in self.blocks:
            assert isinstance(block, Block)
            x = block(x, angles)
        return self.head(self.norm(x)) if self.head is not None and self.norm is not None else x


@dataclass(frozen=True)
class Case:
    """What both contenders share."""

    args: argparse.Namespace
    schedule: Schedule
    peer: Callable[[Sequence[Any], int], Any]  # torch's schedule of its stages

    @property
    def own(self) -> list[int]:
        """The stages of this rank."""
        return [stage for stage in range(self.schedule.stages) if self.schedule.place_of(stage) == dist.get_rank()]

    def stages(self) -> list[Stage]:
        args = self.args
        whole = Transformer(args.width, args.blocks, args.heads, torch.Generator().manual_seed(0))
        return [Stage(whole, number, self.schedule.stages) for number in range(self.schedule.stages)]

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.args.dtype == "bfloat16" else contextlib.nullcontext()


def fzero(case: Case) -> Run:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    steps, params = [], []
    for number, stage in enumerate(case.stages()):
        apply, own = fz.functional(stage)
        last = number == case.schedule.stages - 1
        fn = (lambda p, h, y, apply=apply: loss_of(apply(p, h), y)) if last else apply
        step = fz.donate(fz.train_step(fn, ADAMW))
        steps.append(fz.autocast(step, torch.bfloat16) if case.args.dtype == "bfloat16" else step)
        params.append(own)
    pipe = fz.pipeline(steps, case.schedule, groups=mesh["pp"])
    return Training(pipe, pipe.init(params))  # type: ignore[arg-type]


def torchs(case: Case) -> Run:
    stages = case.stages()
    own = [pipelining.PipelineStage(stages[s], s, len(stages), torch.device("cpu")) for s in case.own]
    schedule = case.peer(own, case.schedule.microbatches)
    optimizer = torch.optim.AdamW(
        [param for s in case.own for param in stages[s].parameters()], LR, weight_decay=DECAY, fused=True
    )
    has_last = len(stages) - 1 in case.own

    def run(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        with case.autocast():
            given = (x,) if 0 in case.own else ()
            schedule.step(*given, **({"target": y, "losses": losses} if has_last else {}), return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if has_last else torch.zeros(())
        dist.broadcast(loss, dist.get_world_size() - 1 if case.schedule.place_of(len(stages) - 1) else 0)
        return loss

    return run


def alone(case: Case) -> Run:
    """The work of a rank's stages, and nothing else."""
    stages = case.stages()
    own = [stages[stage] for stage in case.own]
    params = [param for stage in own for param in stage.parameters()]
    optimizer = torch.optim.AdamW(params, LR, weight_decay=DECAY, fused=True)
    tasks = [task for task in case.schedule.places[dist.get_rank()] if task.kind in (Kind.FORWARD, *COTANGENT)]
    given = torch.randn(case.args.rows, case.args.context, case.args.width, generator=torch.Generator().manual_seed(1))

    def run(x: Tensor, y: Tensor) -> Tensor:
        split, targets = x.chunk(case.schedule.microbatches), y.chunk(case.schedule.microbatches)
        outputs: dict[tuple[int, int], Tensor] = {}
        for kind, stage, microbatch, _ in tasks:
            if kind is Kind.FORWARD:
                first, last = stage == 0, stage == len(stages) - 1
                with case.autocast():
                    out = stages[stage](split[microbatch] if first else given.clone().requires_grad_())
                    outputs[stage, microbatch] = loss_of(out, targets[microbatch]) if last else out
            else:
                out = outputs.pop((stage, microbatch))
                out.backward(torch.ones_like(out) / case.schedule.microbatches if out.dim() == 0 else given)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        return torch.zeros(())

    return run


def of_one(kind: Any) -> Callable[[Sequence[Any], int], Any]:
    return lambda stages, count: kind(stages[0], count, loss_fn=loss_of)


def of_several(kind: Any) -> Callable[[Sequence[Any], int], Any]:
    return lambda stages, count: kind(list(stages), count, loss_fn=loss_of)


def cases(args: argparse.Namespace) -> dict[str, Case]:
    ranks, count, own = args.ranks, args.microbatches, fz.schedules
    several = 2 * ranks
    every = {
        "GPipe": (own.gpipe(ranks, count), of_one(pipelining.ScheduleGPipe)),
        "1F1B": (own.one_f_one_b(ranks, count), of_one(pipelining.Schedule1F1B)),
        "interleaved": (own.interleaved(several, count, ranks), of_several(pipelining.ScheduleInterleaved1F1B)),
        "zero bubble": (own.zero_bubble(ranks, count), of_several(pipelining.ScheduleInterleavedZeroBubble)),
        "DualPipeV": (own.dual_pipe_v(several, count), of_several(pipelining.ScheduleDualPipeV)),
    }
    return {name: Case(args, *case) for name, case in every.items() if name in args.schedules}


CONTENDERS: dict[str, Callable[[Case], Run]] = {"fzero": fzero, "torch": torchs, "alone": alone}


def measured(rank: int, args: argparse.Namespace, what: tuple[str, str, Any]) -> tuple[Series, Series, str]:
    """The seconds of a contender's steps in each round, its losses, and why it did not run."""
    name, contender, turns = what
    data, own, run = batches(args, 0), "", None
    try:
        with quiet():
            run = CONTENDERS[contender](cases(args)[name])
            for _ in range(2):
                run(*next(data))
    except Exception as error:  # whatever a peer raises where it does not run
        own = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    said: list[str] = [""] * args.ranks
    dist.all_gather_object(said, own)
    problem = next(filter(None, said), "")
    if problem or run is None:
        turns.abort()
        return {}, {}, problem
    with contextlib.suppress(threading.BrokenBarrierError):  # the other one did not run
        return *in_turns({contender: run}, data, args, args.contenders, turns.wait), ""
    return {}, {}, ""


def compared(args: argparse.Namespace, name: str) -> tuple[Series, str]:
    """All contenders' seconds; and what is wrong."""
    found = spawned_apart(measured, args, name, args.contenders, keeps=args.keep_memory)
    for contender, (_, _, problem) in found.items():
        if problem:
            return {}, f"{contender} {problem}"
    own, other = [found[contender][1][contender] for contender in ("fzero", "torch")]
    gap = max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True))
    if gap > (1e-4 if args.dtype == "float32" else 2e-2):
        return {}, f"they compute something else: losses differ by {gap:.1e}"
    return {contender: found[contender][0][contender] for contender in args.contenders}, ""


# ---- stages that sleep


class Sleeping(torch.autograd.Function):
    """Sleeps for known times, forward and back."""

    @staticmethod
    def forward(x: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        time.sleep(forward)
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.seconds = inputs[2]

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return cotangent.clone(), None, None


def slept(rank: int, args: argparse.Namespace, name: str) -> tuple[float, float]:
    """The seconds of a step, simulated and measured."""
    schedule = cases(args)[name].schedule
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",))
    forward = [args.sleep * (1 + 0.5 * (stage % 2)) for stage in range(schedule.stages)]
    last = schedule.stages - 1

    def stage(number: int) -> Callable[..., Tensor]:
        def fn(params: dict[str, Tensor], x: Tensor) -> Tensor:
            out = Sleeping.apply(x * params["w"], forward[number], 2 * forward[number])
            return out.mean() if number == last else out

        return fn

    steps = [fz.train_step(stage(number), fz.sgd(0.1)) for number in range(schedule.stages)]
    pipe = fz.pipeline(steps, schedule, groups=mesh["pp"])
    state = pipe.init([{"w": torch.ones(())}] * schedule.stages)
    x = torch.ones(schedule.microbatches, 4)
    totals = []
    for _ in range(args.rounds + 1):
        dist.barrier()
        totals.append(pipe.timeline(state, x).total)
    times = fz.schedules.Times(forward, [2 * each for each in forward], [0.0] * schedule.stages)
    return fz.schedules.simulate(schedule, times).total, statistics.median(totals[1:])


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"ranks": 2, "width": 512, "blocks": 8, "heads": 8, "rows": 2, "context": 128, "microbatches": 8}
    sizes |= {"warmup": 1, "rounds": 7, "steps": 3}
    names = ["GPipe", "1F1B", "interleaved", "zero bubble", "DualPipeV"]
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--regimes", nargs="*", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--schedules", nargs="*", choices=names, default=names, metavar="NAME")
    parser.add_argument("--keep-memory", action="store_true", help="malloc keeps its memory")
    parser.add_argument("--alone", action="store_true", help="also the step without communication")
    parser.add_argument("--sleeps", action="store_true", help="stages that sleep, simulated and measured")
    parser.add_argument("--sleep", type=float, default=0.02, help="seconds of a forward, default 0.02")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu", dtype="float32"))
    args.contenders = list(CONTENDERS)[: 3 if args.alone else 2]
    print(" ".join(f"{name}={getattr(args, name)}" for name in sizes))
    print(f"CPU: {torch.backends.cpu.get_cpu_capability()}", flush=True)
    if args.sleeps:
        table = results.Table("simulated ms", "measured ms", "measured / simulated")
        for name in args.schedules:
            said, found = spawned(slept, args, name)
            table.row(name, said * 1e3, found * 1e3, found / said)
        results.save(args, table)
        return
    table = results.Table("fzero ms", "torch ms", "fzero / torch", "alone / torch")
    ratios: dict[str, list[float | None]] = {name: [] for name in args.schedules}
    for regime in args.regimes:
        for name in args.schedules:
            own = argparse.Namespace(**{**vars(args), **REGIMES[regime]})
            own.batch = own.rows * own.microbatches
            times, problem = compared(own, name)
            ratios[name].append(None if problem else ratio(times, "fzero", "torch"))
            if problem:
                table.row(f"{regime}, {name}", f"did not run: {problem}")
                continue
            medians = [statistics.median(times[contender]) * 1e3 for contender in ("fzero", "torch")]
            alone = [ratio(times, "alone", "torch")] if args.alone else []
            table.row(f"{regime}, {name}", *medians, ratios[name][-1], *alone)
    summary = results.Table(*args.regimes, title="fzero / torch")
    for name in args.schedules:
        summary.row(name, *ratios[name])
    results.save(args, summary, table)


if __name__ == "__main__":
    main()
