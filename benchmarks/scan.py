"""What derivatives of whole runs cost: of `fz.scan` over many steps, and of inner steps beside those written by hand.

    OMP_NUM_THREADS=1 python benchmarks/scan.py                    # a minute or two
    OMP_NUM_THREADS=1 python benchmarks/scan.py --steps 100 --widths 64

The first table: the gradient by the learning rate through a run of AdamW steps of a small network, its time as a
multiple of the run without a derivative, and the memory that it takes at most, in states (params and moments).
The second one: a meta-gradient through five inner steps of SGD (MAML), second order, and the same by
torch.func.functional_call and torch.func.grad; by width of the network. "alike" is by hand what a step does: the norm
of the gradient in float64, and no update where it is not finite. Medians of the ratios within each round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import results
import torch
from torch import nn

import fzero as fz
from fzero.testing import LiveBytes

INNER, LR = 5, 0.1


def network(width: int) -> nn.Module:
    module = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
    made = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=made) / param.shape[-1] ** 0.5)
    return module


def data(*sizes: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(*sizes, 16, generator=made), torch.randn(*sizes, 1, generator=made)


def seconds(fn: Callable[[], object]) -> float:
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def scanned(width: int, batch: int, steps: int, rounds: int) -> tuple[float, float, float, float]:
    """Seconds of a run; those of its derivative as a multiple; bytes that it takes at most, and one step's graph, in
    states."""
    apply, params = fz.functional(network(width))
    batches = data(steps, batch)

    def run(lr: torch.Tensor, count: int = steps) -> torch.Tensor:
        step = fz.train_step(lambda p, x, y: (apply(p, x) - y).square().mean(), fz.adamw(lr))
        state, _ = fz.scan(step, step.init(params), (batches[0][:count], batches[1][:count]))
        return step.forward(state, batches[0][0], batches[1][0])

    lr = torch.tensor(1e-3)
    state = 3 * sum(4 * x.numel() for x in params.values())
    peaks = []
    for count in (1, steps):
        with LiveBytes() as live:
            torch.func.grad(run)(lr, count)
        peaks.append(live.peak / state)
    pairs = [(seconds(lambda: run(lr)), seconds(lambda: torch.func.grad(run)(lr))) for _ in range(rounds)]
    return (
        statistics.median(plain for plain, _ in pairs),
        statistics.median(own / plain for plain, own in pairs),
        peaks[1],
        peaks[0],
    )


def inner(width: int, batch: int, rounds: int) -> tuple[float, float, float]:
    """Seconds of a meta-gradient by hand, and that of fzero as a multiple of it, and of the one that does alike."""
    module = network(width)
    apply, params = fz.functional(module)
    x, y = data(batch)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (apply(p, x) - y).square().mean()

    def by_hand(p: Any, alike: bool = False) -> torch.Tensor:
        def own(p: Any) -> torch.Tensor:
            return (torch.func.functional_call(module, p, (x,)) - y).square().mean()

        for _ in range(INNER):
            grads = torch.func.grad(own)(p)
            new = {name: value - LR * grads[name] for name, value in p.items()}
            if alike:
                norm = torch.stack([g.double().square().sum() for g in grads.values()]).sum().sqrt()
                new = {name: torch.where(norm.isfinite(), new[name], value) for name, value in p.items()}
            p = new
        return own(p)

    step = fz.train_step(loss, fz.sgd(LR))
    start = step.init(params)

    def by_steps(p: Any) -> torch.Tensor:
        state = start.replace(params=p)
        for _ in range(INNER):
            state, _ = step(state, x, y)
        return step.forward(state, x, y)

    plain = {name: value.detach() for name, value in module.named_parameters()}
    hand = lambda: torch.func.grad(by_hand)(plain)
    as_much = lambda: torch.func.grad(lambda p: by_hand(p, True))(plain)
    own = lambda: torch.func.grad(by_steps)(start.params)
    want, got = hand(), fz.gather(own())
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5)
    times = [(seconds(hand), seconds(own), seconds(as_much)) for _ in range(rounds)]
    return (
        statistics.median(each for each, _, _ in times),
        statistics.median(mine / each for each, mine, _ in times),
        statistics.median(mine / other for _, mine, other in times),
    )


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000, help="of a run, default 1000")
    parser.add_argument("--rounds", type=int, default=5, help="default 5")
    parser.add_argument("--widths", type=int, nargs="*", default=[64, 256, 512, 1024], help="of inner steps")
    args = parser.parse_args()
    print(f"CPU: {torch.backends.cpu.get_cpu_capability()}")
    took, times, most, one = scanned(64, 32, args.steps, max(args.rounds // 2, 1))
    through = results.Table("ms a step", "derivative / run", "states at most", "states of one step", title="fz.scan")
    through.row(f"{args.steps:,} AdamW steps", took * 1e3 / args.steps, times, most, one)
    title = f"meta-gradient through {INNER} inner steps"
    meta = results.Table("by hand, ms", "fzero / by hand", "fzero / alike", title=title)
    for width in args.widths:
        hand, *ratios = inner(width, max(width // 2, 32), args.rounds)
        meta.row(f"width {width:,}, batch {max(width // 2, 32)}", hand * 1e3, *ratios)
    results.save(args, through, meta)


if __name__ == "__main__":
    main()
