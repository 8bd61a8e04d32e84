"""What a call of a component on ranks of its own costs, and how fast a value goes from one component to another.

    OMP_NUM_THREADS=1 python benchmarks/remote.py
    OMP_NUM_THREADS=1 python benchmarks/remote.py --on processes ray --mib 1 64
    OMP_NUM_THREADS=1 python benchmarks/remote.py --device cuda --mib 16 256 1024    # by CUDA IPC

First, for each kind of ranks, microseconds of calls of a trivial function on one rank: until `forward`, `vjp` and a
pullback return ("call"), and until `fz.fetch` has the result of a forward ("answer"); median and the 99th percentile.
Then, for those that are not threads, seconds that a tensor takes from a component of one process to another, as a share
of what copying it from one buffer to another takes: the answer of a call that is given it, less that of a call that is
given one element.
Everything takes turns, in one run; medians.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch

import fzero as fz


def scaled(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x * p["w"]


def made(p: dict[str, torch.Tensor], count: torch.Tensor) -> torch.Tensor:
    return torch.zeros(int(count), device=count.device) + p["w"][0]


def first(p: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return x[:1] * p["w"][0]


def build(rank: int, fn: Callable[..., Any], device: str) -> tuple[Any, dict[str, torch.Tensor]]:
    return fz.train_step(fn, fz.sgd(0.1)), {"w": torch.ones(4, device=device)}


def seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def calls(on: str, count: int, device: str) -> dict[str, list[float]]:
    """What is measured -> seconds of each call."""
    with fz.remote(functools.partial(build, fn=scaled, device=device), 1, on) as component:
        state, x = component.init(), torch.ones(8, 4)
        ct = torch.ones(8, 4)
        found: dict[str, list[float]] = {"forward": [], "vjp": [], "pullback": [], "answer": []}
        for turn in range(count + 20):
            times = {"forward": seconds(lambda: component.forward(state, x))}
            kept: list[Any] = []
            times["vjp"] = seconds(lambda kept=kept: kept.append(component.vjp(state, x)))
            times["pullback"] = seconds(lambda kept=kept: kept.append(kept[0][1](ct)))
            fz.fetch(kept[1][1])
            times["answer"] = seconds(lambda: fz.fetch(component.forward(state, x)))
            for name, own in times.items() if turn >= 20 else ():
                found[name].append(own)
        return found


def payload(on: str, mib: int, rounds: int, device: str) -> tuple[float, float]:
    """Seconds of a tensor's way between two components, and of a copy in memory."""
    count = mib << 18
    with (
        fz.remote(functools.partial(build, fn=made, device=device), 1, on, name="from") as one,
        fz.remote(functools.partial(build, fn=first, device=device), 1, on, name="to") as other,
    ):
        states = one.init(), other.init()
        large, small = (one.forward(states[0], torch.tensor(each)) for each in (count, 1))
        assert large.shape == (count,) and small.shape == (1,)
        source, target = torch.ones(count, device=device), torch.zeros(count, device=device)
        copied: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
        ways, copies = [], []
        for turn in range(rounds + 3):
            alone = seconds(lambda: fz.fetch(other.forward(states[1], small)))
            way = seconds(lambda: fz.fetch(other.forward(states[1], large))) - alone
            copy = seconds(lambda: (target.copy_(source), copied()))
            if turn >= 3:
                ways.append(way)
                copies.append(copy)
    return statistics.median(ways), statistics.median(copies)


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--on", nargs="+", default=["threads", "processes"], help="default threads processes")
    parser.add_argument("--mib", nargs="+", type=int, default=[1, 16, 64, 256], help="default 1 16 64 256")
    parser.add_argument("--calls", type=int, default=500, help="default 500")
    parser.add_argument("--rounds", type=int, default=15, help="default 15")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where components compute")
    args = parser.parse_args()
    kinds = ("forward", "vjp", "pullback", "answer")
    latency = results.Table(*[f"{kind} {what}" for kind in kinds for what in ("us", "p99")])
    for on in args.on:
        found = calls(on, args.calls, args.device)
        cells = []
        for times in found.values():
            times.sort()
            cells += [1e6 * times[len(times) // 2], 1e6 * times[int(0.99 * len(times))]]
        latency.row(on, *cells)
    rates = results.Table("GB/s", "copy GB/s", "share")
    for mib in args.mib:
        for on in [on for on in args.on if on != "threads"]:
            way, copy = payload(on, mib, args.rounds, args.device)
            rates.row(f"{mib} MiB, {on}", mib * 2**20 / way / 1e9, mib * 2**20 / copy / 1e9, copy / way)
    results.save(args, latency, rates)


if __name__ == "__main__":
    main()
