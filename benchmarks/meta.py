"""A gradient through some AdamW steps by the rate, jitted and not, beside the same written by hand.

    OMP_NUM_THREADS=1 python benchmarks/meta.py
    OMP_NUM_THREADS=1 python benchmarks/meta.py --width 512

A network of `--layers` residual tanh layers of `--width`, float32, `--inner` steps. "by hand" is torch.func.grad over
torch.func.grad and AdamW's formula in torch's operations. One line per contender: milliseconds of one gradient, the
median of the rounds, that over "by hand", the median of the ratios within each round, and the seconds of the first
call, which compiles. All must return the same, within 1e-3.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from torch.nn.functional import layer_norm
from torch.utils import _pytree as pytree

import fzero as fz

Run = Callable[[torch.Tensor], torch.Tensor]


@fz.unit
def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(layer_norm(x, x.shape[-1:]) @ p["a"]) @ p["b"]


def loss(params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    for p in params["blocks"]:
        x = block(p, x)
    return (x - y).square().mean()


def by_fzero(params: Any, inner: int, *data: torch.Tensor) -> Run:
    def after(lr: torch.Tensor) -> torch.Tensor:
        step = fz.train_step(loss, fz.adamw(lr))
        state = step.init(params)
        for _ in range(inner):
            state, _metrics = step(state, *data)
        return step.forward(state, *data)  # type: ignore[no-any-return]

    return torch.func.grad(after)


def by_hand(params: Any, inner: int, *data: torch.Tensor) -> Run:
    leaves, spec = pytree.tree_flatten(params)
    grad = torch.func.grad(lambda own: loss(pytree.tree_unflatten(own, spec), *data))

    def after(lr: torch.Tensor) -> torch.Tensor:
        own = leaves
        mu, nu = [torch.zeros_like(x) for x in own], [torch.zeros_like(x) for x in own]
        for count in range(1, inner + 1):
            grads = grad(own)
            mu = [0.9 * m + 0.1 * g for m, g in zip(mu, grads, strict=True)]
            nu = [0.999 * v + 0.001 * g * g for v, g in zip(nu, grads, strict=True)]
            hats = [(m / (1 - 0.9**count), v / (1 - 0.999**count)) for m, v in zip(mu, nu, strict=True)]
            # the root of zero has no derivative
            steps = [m / (torch.where(v > 0, v, 1.0).sqrt() * (v > 0) + 1e-8) for m, v in hats]
            own = [p - lr * (s + 0.01 * p) for p, s in zip(own, steps, strict=True)]
        return loss(pytree.tree_unflatten(own, spec), *data)

    return torch.func.grad(after)


def main() -> None:
    parser = results.parser(__doc__)
    sizes = {"width": 64, "layers": 2, "batch": 16, "inner": 5, "warmup": 1, "rounds": 11}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    w = args.width
    params = {"blocks": [{"a": drawn(w, w) * 0.1, "b": drawn(w, w) * 0.1} for _ in range(args.layers)]}
    data = drawn(args.batch, w), drawn(args.batch, w)
    runs: dict[str, Run] = {
        "by hand": by_hand(params, args.inner, *data),
        "fzero": by_fzero(params, args.inner, *data),
        "fzero, jit": fz.jit(by_fzero(params, args.inner, *data)),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    first: dict[str, float] = {}
    for count in range(1 + args.warmup + args.rounds):
        rate, found = torch.tensor(1e-3 * (1 + 0.1 * count)), []
        for name, run in runs.items():
            begin = time.perf_counter()
            found.append(run(rate).item())
            spent = time.perf_counter() - begin
            first.setdefault(name, spent)
            if count > args.warmup:
                times[name].append(spent)
        if max(found) - min(found) > 1e-3 * abs(found[0]):
            raise SystemExit(f"the gradients differ: {dict(zip(runs, found, strict=True))}")
    table = results.Table("median ms", "of by hand", "first call, s")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["by hand"], strict=True))
        table.row(name, 1e3 * statistics.median(own), ratio, first[name])
    results.save(args, table)


if __name__ == "__main__":
    main()
