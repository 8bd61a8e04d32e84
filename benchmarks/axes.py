"""Tensor and sequence parallelism beside torch's and DeepSpeed's: time, memory and bytes sent of whole training steps.

    OMP_NUM_THREADS=1 python benchmarks/axes.py                       # some minutes
    OMP_NUM_THREADS=1 python benchmarks/axes.py --ranks 4
    OMP_NUM_THREADS=1 python benchmarks/axes.py --regimes bf16 --only "torch TP" "fzero TP"
    OMP_NUM_THREADS=1 python benchmarks/axes.py --lengths             # activations over lengths instead, as a picture

A small Llama on gloo ranks that are one axis, AdamW, the same weights and the same batches for all, in three regimes:
float32, one sequence at a time, and bfloat16 over float32 masters (DeepSpeed keeps its params in bfloat16, too, and
torch casts them in each step). Contenders take turns as in step.py.

Tensor parallel: `fz.shard_tensor` of the module and of a pure function with the maps of `fz.parallel`, beside torch's
`parallelize_module`; "sequence" has norms and residuals cut along the tokens. Vocabularies are cut, in all of them.

Sequence parallel: `fz.parallel.ulysses` under ZeRO over the same axis, beside DeepSpeed's `DistributedAttention`, under
DeepSpeed's ZeRO and under DDP, and torch's `context_parallel` under DDP.

One line per contender, of rank 0:

    median    milliseconds of a step, the median of the rounds
    at rest   MB of tensors between steps (2^20 bytes)
    at peak   MB of tensors at most within a step
    sent      MB that the rank writes to others in a step, counted by the system

Memory is what torch's CPU allocator gives out and takes back. (DeepSpeed makes its buckets of 5e8 elements beforehand,
which count; what is not touched of them is not resident.) The last table has the ratios of times, the medians of those
within each round. A contender that fails or whose losses are others does not take part, and why is printed: a faster
step that computes something else is none.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
import results
from allocated import Allocated
from attention import deepspeeds, torchs
from contenders import ADAMW, DECAY, LR, Run, Training, deepspeed_engine, loss_of, mean_of
from lengths import draw
from llama import Attend, Llama, Sizes, pure, rotary
from step import MB, Batch, Series, batches, check_losses, environment, in_turns, quiet, ratio, spawned

import fzero as fz

REGIMES: dict[str, dict[str, Any]] = {"float32": {}, "batch 1": {"batch": 1}, "bf16": {"dtype": "bfloat16"}}
TRIAL = 3  # steps of each contender before those that are timed: losses show the gradients before, and memory settles
SILENT = {"KINETO_LOG_LEVEL": "9", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler that counts memory logs a lot
Bytes = tuple[int, int, int]  # at rest, at peak, sent in a step
CAUSAL = functools.partial(torchs, causal=True)


@dataclass(frozen=True)
class Case:
    """What all contenders of one run share."""

    sizes: Sizes
    context: int
    mixed: bool
    tp: dist.DeviceMesh  # of one axis, "tp"
    sp: dist.DeviceMesh  # of the same ranks, "sp"

    @property
    def ranks(self) -> int:
        return dist.get_world_size()

    def starts(self, count: int) -> list[int]:
        """Where each rank's piece begins of what divides."""
        return [rank * count // self.ranks for rank in range(self.ranks + 1)]

    def angles(self) -> torch.Tensor:
        return rotary(self.sizes, torch.arange(self.context))

    def piece(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """This rank's tokens."""
        return x.chunk(self.ranks, dim)[dist.get_rank()].contiguous()

    def autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.mixed else contextlib.nullcontext()


def stepping(case: Case, step: fz.Step, params: object) -> Run:
    step = fz.donate(step)
    step = fz.autocast(step, torch.bfloat16) if case.mixed else step
    return Training(step, step.init(params))


# ---- tensor parallel

COLUMNS, ROWS = ("q", "k", "v", "gate", "up"), ("o", "down")


def fzero_tp(case: Case, **more: Any) -> Run:
    """The module, by a plan."""
    plan = {"embed": "vocabulary", "head": "column"}
    plan |= {f"*.{name}": "column" for name in COLUMNS} | {f"*.{name}": "row" for name in ROWS}
    apply, params = fz.functional(Llama(case.sizes, CAUSAL))
    return fzero_tensor(case, apply, params, plan, **more)


def fzero_pure(case: Case) -> Run:
    """The pure function, of a tree of params whose leaves are cut along dims."""
    plan: dict[str, int] = {"embed.*": 0, "head.*": 0}
    plan |= {f"*.{name}.*": 0 for name in COLUMNS} | {f"*.{name}.*": 1 for name in ROWS}
    ax = fz.parallel.axis(case.tp, "tp")
    apply = pure(case.sizes, CAUSAL, ax, case.starts(case.sizes.vocabulary))
    return fzero_tensor(case, apply, tree_of(Llama(case.sizes, CAUSAL)), plan)


def fzero_tensor(case: Case, apply: Any, params: object, plan: Any, **more: Any) -> Run:
    ax, angles, starts = fz.parallel.axis(case.tp, "tp"), case.angles(), case.starts(case.sizes.vocabulary)
    slices = [stop - start for start, stop in itertools.pairwise(starts)]

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return fz.parallel.cross_entropy(apply(p, x, angles), y, ax, sizes=slices)

    return stepping(case, fz.shard_tensor(fz.train_step(loss, ADAMW), plan, case.tp, **more), params)


def tree_of(module: nn.Module) -> Any:
    """The params of a module as dicts and lists, detached."""
    if isinstance(module, nn.ModuleList):
        return [tree_of(each) for each in module]
    own = {name: param.detach() for name, param in module.named_parameters(recurse=False)}
    return own | {name: tree_of(each) for name, each in module.named_children()}


def torch_tp(case: Case, sequence: bool = False) -> Run:
    """torch's parallelize_module, with its loss over slices of the vocabulary; styles as in torchtitan."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    model = Llama(case.sizes, CAUSAL)
    between = Shard(1) if sequence else Replicate()
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    plan |= {f"blocks.*.{path}": ColwiseParallel() for path in ("attention.[qkv]", "mlp.gate", "mlp.up")}
    plan |= {f"blocks.*.{path}": RowwiseParallel(output_layouts=between) for path in ("attention.o", "mlp.down")}
    if sequence:
        plan |= {path: SequenceParallel() for path in ("norm", "blocks.*.attention_norm", "blocks.*.mlp_norm")}
        whole = {"input_layouts": (Shard(1), None), "desired_input_layouts": (Replicate(), None)}
        plan["blocks.*.attention"] = PrepareModuleInput(**whole)
        plan["blocks.*.mlp"] = PrepareModuleInput(**{name: layouts[:1] for name, layouts in whole.items()})
    parallelize_module(model, case.tp, plan)
    # a fused update takes DTensors or tensors, not both at once
    kinds = [[p for p in model.parameters() if isinstance(p, DTensor) == cut] for cut in (True, False)]
    groups = [{"params": params} for params in kinds if params]
    optimizer = torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY, fused=True)
    angles = case.angles()

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with loss_parallel():
            with case.autocast():
                logits = model(x, angles)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), y.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return run


# ---- sequence parallel


def fzero_sp(case: Case, shard: Callable[..., fz.Step], attention: Attend | None = None) -> Run:
    ax = fz.parallel.axis(case.sp, "sp")
    attend = fz.parallel.ulysses(attention, ax, **({} if attention else {"causal": True}))
    apply, params = fz.functional(Llama(case.sizes, attend))
    angles = case.piece(case.angles(), 0)
    step = fz.train_step(lambda p, x, y: loss_of(apply(p, case.piece(x), angles), case.piece(y)), ADAMW)
    return stepping(case, shard(step, mesh=case.sp, axis=("sp",)), params)


def deepspeed_sp(case: Case, stage: int) -> Run:
    engine = deepspeed_engine(Llama(case.sizes, deepspeeds(causal=True)), stage, case.mixed)
    angles = case.piece(case.angles(), 0)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(engine(case.piece(x), angles), case.piece(y))
        engine.backward(loss)
        engine.step()
        return mean_of(loss)

    return run


def ddp_deepspeed(case: Case) -> Run:
    angles = case.piece(case.angles(), 0)
    return ddp(case, deepspeeds(causal=True), lambda x, y: contextlib.nullcontext((*map(case.piece, (x, y)), angles)))


def ddp_context_parallel(case: Case) -> Run:
    from torch.distributed.tensor.experimental import context_parallel

    angles = case.angles()

    @contextlib.contextmanager
    def cut(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
        own = (x.clone(), y.clone(), angles.clone())  # which it cuts in place
        with context_parallel(case.sp, buffers=[*own], buffer_seq_dims=[1, 1, 0], no_restore_buffers={*own}):
            yield own

    return ddp(case, CAUSAL, cut)


def ddp(case: Case, attend: Attend, cut: Callable[..., Any]) -> Run:
    """torch's DDP over the ranks of a sequence, whose pieces `cut(x, y)` gives with their angles."""
    model = nn.parallel.DistributedDataParallel(Llama(case.sizes, attend))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY, fused=True)

    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with cut(x, y) as (own_x, own_y, angles):
            with case.autocast():
                loss = loss_of(model(own_x, angles), own_y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return mean_of(loss)

    return run


CONTENDERS: dict[str, Callable[[Case], Run]] = {
    "torch TP": torch_tp,
    "torch TP, sequence": functools.partial(torch_tp, sequence=True),
    "fzero TP": fzero_tp,
    "fzero TP, pure": fzero_pure,
    "fzero TP, sequence": functools.partial(fzero_tp, sequence=True),
    "DDP, DeepSpeed's attention": ddp_deepspeed,
    "DDP, context_parallel": ddp_context_parallel,
    **{f"DeepSpeed ZeRO-{stage}": functools.partial(deepspeed_sp, stage=stage) for stage in (1, 2, 3)},
    "fzero ZeRO-1": functools.partial(fzero_sp, shard=fz.shard_zero1),
    "fzero ZeRO-2": functools.partial(fzero_sp, shard=fz.shard_zero2),
    "fzero ZeRO-3": functools.partial(fzero_sp, shard=fz.shard_zero3),
    "fzero ZeRO-3, torch's attention": functools.partial(fzero_sp, shard=fz.shard_zero3, attention=CAUSAL),
}
PEERS: dict[str, tuple[str, ...]] = {  # whom each is beside
    "fzero TP": ("torch TP",),
    "fzero TP, pure": ("torch TP",),
    "fzero TP, sequence": ("torch TP, sequence",),
    "fzero ZeRO-1": ("DeepSpeed ZeRO-1", "DDP, DeepSpeed's attention", "DDP, context_parallel"),
    "fzero ZeRO-2": ("DeepSpeed ZeRO-2", "DDP, DeepSpeed's attention", "DDP, context_parallel"),
    "fzero ZeRO-3": ("DeepSpeed ZeRO-3",),
    "fzero ZeRO-3, torch's attention": ("DeepSpeed ZeRO-3",),
}


# ---- what is measured


def written() -> int:
    """Bytes that this process has written so far, to sockets and files; zero where the system does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("wchar"))
    return 0


@dataclass
class Found:
    """What one regime has shown: of those that take part, and why others do not."""

    times: Series
    losses: Series
    bytes: dict[str, Bytes]
    refused: dict[str, str]


def measured(rank: int, args: argparse.Namespace, names: list[str]) -> Found:
    sizes = Sizes(args.width, args.blocks, args.heads, args.kv_heads, args.vocabulary)
    meshes = [dist.init_device_mesh("cpu", (args.ranks,), mesh_dim_names=(name,)) for name in ("tp", "sp")]
    case = Case(sizes, args.context, args.dtype == "bfloat16", *meshes)
    data = batches(args, 0, args.vocabulary)
    first = [next(data) for _ in range(TRIAL)]
    runs: dict[str, Run] = {}
    sizes, refused, expected = {}, {}, []
    for name in names:
        run, losses, problem, sizes[name] = tried(case, name, first)
        if not problem and expected and (gap := apart(losses, expected)) > tolerance(args):
            problem = f"computes something else: its losses differ by {gap:.1e}, relative, within {TRIAL} steps"
        problems: list[str] = [""] * args.ranks
        dist.all_gather_object(problems, problem)
        if problem := next(filter(None, problems), ""):
            refused[name] = problem
            continue
        assert run is not None
        runs[name], expected = run, expected or losses
    return Found(*in_turns(runs, data, args), sizes, refused)


def tried(case: Case, name: str, data: list[Batch]) -> tuple[Run | None, list[float], str, Bytes]:
    """A contender and its first losses, or why there are none; bytes at rest, at peak and sent in the last step."""
    run, losses, problem, before = None, [], "", 0
    with Allocated() as allocated, quiet():
        try:
            run = CONTENDERS[name](case)
            for number, (x, y) in enumerate(data, 1):
                if number == len(data):
                    settle(run)
                    dist.barrier()
                    allocated.at_rest()
                    before = written()
                losses.append(run(x, y).item())
            settle(run)
        except Exception as error:  # whatever a peer raises where it does not run
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            problem = f"{type(error).__name__}: {lines[0] if lines else ''}"
        sent = written() - before
    return run, losses, problem, (allocated.rest, allocated.peak, sent)


def settle(run: Run) -> None:
    if isinstance(run, Training):
        run.settle()


def apart(losses: list[float], expected: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def tolerance(args: argparse.Namespace) -> float:
    return 1e-4 if args.dtype == "float32" else 2e-2


def table_of(regime: str, found: Found, names: list[str]) -> results.Table:
    table = results.Table("median ms", "MB at rest", "MB at peak", "MB sent", title=regime)
    for name in names:
        if name in found.refused:
            table.row(name, "would not run")
            continue
        sizes = [size / MB if size else None for size in found.bytes[name]]
        table.row(name, statistics.median(found.times[name]) * 1e3, *sizes)
    return table


def compared(by_regime: dict[str, Found]) -> results.Table:
    """Ratios of times, and why some are missing."""
    table = results.Table(*by_regime, title="fzero / peer")
    for name, peers in PEERS.items():
        for peer in peers:
            both = [found.times if {name, peer} <= {*found.times} else None for found in by_regime.values()]
            if any(both):
                table.row(f"{name} / {peer}", *[None if times is None else ratio(times, name, peer) for times in both])
    reasons = {(name, why): [] for found in by_regime.values() for name, why in found.refused.items()}
    for (name, why), regimes in reasons.items():
        regimes += [regime for regime, found in by_regime.items() if found.refused.get(name) == why]
        print(f"{name} would not run ({', '.join(regimes)}): {why}")
    return table


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"ranks": 2, "width": 512, "blocks": 3, "heads": 8, "kv-heads": 4, "vocabulary": 4096}
    sizes |= {"batch": 4, "context": 256, "warmup": 0, "rounds": 5, "steps": 2}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--regimes", nargs="*", choices=REGIMES, default=list(REGIMES))
    parser.add_argument("--only", nargs="*", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--keep-memory", action="store_true", help="malloc keeps its memory, as in step.py")
    parser.add_argument("--lengths", action="store_true", help="draw activations over lengths, for 1, 2 and 4 ranks")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2, 4], help="of --lengths, default 1 2 4")
    parser.add_argument("--longest", type=int, default=16384, help="of --lengths, in tokens, default 16384")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("activations.png"), help="of --lengths")
    args = parser.parse_args(namespace=argparse.Namespace(device="cpu", dtype="float32"))
    if args.lengths:
        results.save(args, *draw(args.out, args.longest, args.degrees))
        return
    for name in ("context", "heads", "kv_heads", "vocabulary"):
        if getattr(args, name) % args.ranks:
            parser.error(f"--{name} {getattr(args, name)} is no multiple of the {args.ranks} ranks, as peers want it")
    print(" ".join(f"{name.replace('-', '_')}={getattr(args, name.replace('-', '_'))}" for name in sizes))
    print(f"CPU: {torch.backends.cpu.get_cpu_capability()}, bf16 is quick with AVX512_BF16 or AMX only", flush=True)
    by_regime: dict[str, Found] = {}
    tables = []
    for regime in args.regimes:
        own = argparse.Namespace(**(vars(args) | REGIMES[regime]))
        with environment(SILENT):
            by_regime[regime] = spawned(measured, own, args.only, keeps=args.keep_memory)
        check_losses(by_regime[regime].losses, tolerance(own))
        tables.append(table_of(regime, by_regime[regime], args.only))
    results.save(args, compared(by_regime), *tables)


if __name__ == "__main__":
    main()
