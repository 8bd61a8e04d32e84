"""Held-out loss of every low-precision scheme beside float32 masters: the same start, the same data, the same order.

    python benchmarks/precision.py                   # hours on two cores; goes on where it was stopped
    python benchmarks/precision.py --seeds 1 --only compact16 nearest

A byte language model of 3.3 million params (4 blocks of width 256) is trained for 1,000 updates with AdamW, on the
source of Python's standard library from nothing (lr 3e-4, warm-up and cosine to 0), and from there on torch's source at
a small learning rate (lr 1e-5, constant). All schemes compute and keep gradients in bfloat16, as the masters do. Losses
are in nats a byte, of files that are trained on nowhere.

"nudged" are float32 masters again, whose start is changed in its last bits: what their gap shows is the noise of the
set-up, and no scheme's gap can be told from 0 below it. It grows with the learning rate: with `--lr 1e-3` two such runs
end several times as far apart as with 3e-4, and higher.

Prints, for each task, the mean over seeds of (scheme - masters), with its standard error, and draws it. Results are
kept in `--out`, a JSON file, so that a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
import contenders
import results as files
from transformer import Transformer

import fzero as fz

MASTERS, NUDGED = "fp32 masters", "fp32 masters, nudged"
SCHEMES = {
    MASTERS: contenders.MASTERS,
    NUDGED: contenders.MASTERS,
    "exact, fp32 moments": fz.Policy.exact(torch.float32),
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "compact16, 4-bit": fz.Policy.compact16("4-bit"),
    "nearest": fz.Policy.bf16_states(),
    "8-bit gathers": dataclasses.replace(contenders.MASTERS, gather="8-bit"),
}
TASKS = ("pretraining", "fine-tuning")
CONTEXT = 64


def bytes_of(scheme: str) -> float:
    """Bytes per param of params and moments."""
    leaf = torch.empty(1 << 20, device="meta")
    plan = fz.plan(fz.train_step(lambda p: p, fz.adamw(1e-3), SCHEMES[scheme]), {"w": leaf})
    return (plan.params + plan.moments) / leaf.numel()


def corpus(task: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes to train on, bytes held out): every tenth file is held out."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = stdlib.glob("*.py") if task == "pretraining" else Path(torch.__file__).parent.glob("nn/**/*.py")
    texts = [path.read_bytes() for path in sorted(files)]
    train = b"\n".join(text for i, text in enumerate(texts) if i % 10)
    held_out = b"\n".join(text for i, text in enumerate(texts) if not i % 10)
    return tuple(torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in (train, held_out))  # type: ignore[return-value]


def windows(data: torch.Tensor, starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.stack([data[start : start + CONTEXT + 1] for start in starts.tolist()])
    return rows[:, :-1], rows[:, 1:]


def trained(task: str, seed: int, scheme: str, start: Any, args: argparse.Namespace) -> tuple[float, Any]:
    """Held-out loss after training, and the params (as they are computed with)."""
    train, held_out = corpus(task)
    apply, params = fz.functional(Transformer(256, 4, 4, torch.Generator().manual_seed(seed)))
    if start is not None:
        params = {name: start[name] for name in params}
    if scheme == NUDGED:
        noise = torch.Generator().manual_seed(seed)
        params = {name: p * (1 + 1e-7 * torch.randn(p.shape, generator=noise)) for name, p in params.items()}

    def loss_fn(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply(p, x).flatten(0, 1).float(), y.flatten())

    if task == "pretraining":
        lr: Any = fz.warmup_cosine(args.lr, warmup=args.steps // 10, total=args.steps)
    else:
        lr = lambda count: 1e-5 * min(1.0, (count + 1) / (args.steps / 20))
    optimizer = fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(lr, b2=0.999, weight_decay=0.01))
    step = fz.donate(fz.train_step(loss_fn, optimizer, SCHEMES[scheme]))
    state = step.init(params, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    for _ in range(args.steps):
        starts = torch.randint(0, len(train) - CONTEXT - 1, (args.batch,), generator=generator)
        state, _ = step(state, *windows(train, starts))
    starts = torch.linspace(0, len(held_out) - CONTEXT - 2, 1024).long()
    batches = [windows(held_out, part) for part in starts.chunk(16)]
    losses = [step.forward(state, *batch).item() for batch in batches]
    return statistics.fmean(losses), fz.gather(state.params)


def work(job: tuple[str, int, str], args: argparse.Namespace) -> tuple[tuple[str, int, str], float]:
    task, seed, scheme = job
    start = None if task == "pretraining" else torch.load(args.base, weights_only=True)
    loss, params = trained(task, seed, scheme, start, args)
    if job == ("pretraining", 0, MASTERS):
        scratch = args.base.with_suffix(".part")
        torch.save(params, scratch)
        scratch.rename(args.base)
    return job, loss


def start_worker() -> None:
    torch.set_num_threads(1)
    os.nice(10)


def table(results: dict[str, float], args: argparse.Namespace) -> dict[str, dict[str, tuple[float, float]]]:
    """Prints, saves and returns (mean, standard error) of the gaps, by task and scheme."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    shown = files.Table("bytes/param", *TASKS, title=f"Held-out loss over that of {MASTERS}, nats a byte")
    for scheme in SCHEMES:
        cells = []
        for task in TASKS:
            both = [
                (results.get(f"{task}/{s}/{scheme}"), results.get(f"{task}/{s}/{MASTERS}")) for s in range(args.seeds)
            ]
            gaps = [a - b for a, b in both if a is not None and b is not None]
            cells.append(None)
            if gaps:
                error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
                found.setdefault(task, {})[scheme] = (statistics.fmean(gaps), error)
                cells[-1] = f"{statistics.fmean(gaps):+.4f} ± {error:.4f}"
        if any(cells):
            shown.row(scheme, bytes_of(scheme), *cells)
    files.save(args, shown)
    return found


def draw(found: dict[str, dict[str, tuple[float, float]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(found), figsize=(11, 3.6), layout="constrained", squeeze=False)
    for panel, (task, gaps) in zip(panels[0], found.items(), strict=True):
        names = [name for name in gaps if name != MASTERS]
        means, errors = [gaps[n][0] for n in names], [gaps[n][1] for n in names]
        panel.errorbar(means, range(len(names)), xerr=errors, fmt="o", capsize=3)
        panel.axvline(0.0, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(names)), [f"{name} ({bytes_of(name):.1f} B)" for name in names])
        panel.invert_yaxis()
        panel.set_xscale("symlog", linthresh=1e-3)
        panel.set_xlim(-3e-3, 1)
        panel.set_xlabel("held-out loss over fp32 masters, nats a byte")
        panel.set_title(task)
        panel.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    print(f"\nwrote {path}")


def main() -> None:
    parser = files.parser(__doc__)
    for name, default in {"seeds": 3, "steps": 1000, "batch": 4, "workers": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--lr", type=float, default=3e-4, help="of pretraining, at its highest; default 3e-4")
    parser.add_argument("--only", nargs="*", default=list(SCHEMES), choices=SCHEMES, help="besides the masters")
    parser.add_argument("--out", type=Path, default=Path("out/precision.json"))
    parser.add_argument("--table", action="store_true", help="print and draw what there is already")
    parser.add_argument("--figure", type=Path, default=Path("out/precision.png"))
    args = parser.parse_args()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.figure.parent.mkdir(parents=True, exist_ok=True)
    args.base = args.out.with_name(f"{args.out.stem}-base-{args.steps}-{args.batch}-{args.lr:g}.pt")
    results: dict[str, float] = json.loads(args.out.read_text()) if args.out.exists() else {}
    for name in ("steps", "batch", "lr"):
        said = results.setdefault(f"settings/{name}", getattr(args, name))
        if said != getattr(args, name):
            raise SystemExit(
                f"{args.out} holds results of --{name} {said:g}, got {getattr(args, name):g}: give another --out"
            )
    if args.table:
        draw(table(results, args), args.figure)
        return
    chosen = [name for name in SCHEMES if name in (MASTERS, *args.only)]
    jobs = [(task, seed, scheme) for seed in range(args.seeds) for task in TASKS for scheme in chosen]
    jobs = [job for job in jobs if "/".join(map(str, job)) not in results]
    first = ("pretraining", 0, MASTERS)  # what fine-tuning starts from
    if first not in jobs and not args.base.exists():
        jobs.append(first)
    jobs.sort(key=lambda job: job != first)
    with multiprocessing.get_context("spawn").Pool(args.workers, start_worker) as pool:
        if first in jobs:
            jobs.remove(first)
            job, loss = pool.apply(work, (first, args))
            keep(results, job, loss, args)
        for job, loss in pool.imap_unordered(functools.partial(work, args=args), jobs):
            keep(results, job, loss, args)
    draw(table(results, args), args.figure)


def keep(results: dict[str, float], job: tuple[str, int, str], loss: float, args: argparse.Namespace) -> None:
    results["/".join(map(str, job))] = loss
    args.out.write_text(json.dumps(results, indent=1))
    print(f"{'/'.join(map(str, job))}: {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
