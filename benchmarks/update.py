"""Time of an update in every scheme, over that of a plain copy of the bytes that it reads: one pass over memory or not.

    OMP_NUM_THREADS=1 python benchmarks/update.py
    OMP_NUM_THREADS=2 python benchmarks/update.py
    OMP_NUM_THREADS=1 CXX="g++ -mno-avx512f" python benchmarks/update.py  # as on a machine with AVX2 only
    OMP_NUM_THREADS=1 python benchmarks/update.py --eager --log2 22       # as on one without a C++ compiler

2^27 params, with 4-bit codes 2^28, so that buffers are of 134 to 537 MB (scales of 4 or 8), gradients in bfloat16
(float32 in the first line), AdamW, donated. A copy of the same bytes reads and writes each once: params, moments and
gradients.
"""

from __future__ import annotations

import os
import shlex
import statistics
import time
from collections.abc import Callable, Sequence

import results
import torch

import fzero as fz
from fzero.kernels import build

BF16, F32 = torch.bfloat16, torch.float32
SCHEMES = {
    "fp32, gradients too": fz.Policy(param=F32, grad=F32, moment=F32),
    "exact, fp32 moments": fz.Policy.exact(F32),
    "bf16, nearest": fz.Policy.bf16_states(),
    "compact16, bf16 moments": fz.Policy.compact16(BF16),
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "compact16, 4-bit": fz.Policy.compact16("4-bit"),
}


def seconds(fns: Sequence[Callable[[], object]], rounds: int = 11) -> list[list[float]]:
    """Times of functions that take turns."""
    out: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds):
        for fn, times in zip(fns, out, strict=True):
            begin = time.perf_counter()
            fn()
            times.append(time.perf_counter() - begin)
    return out


def main() -> None:
    parser = results.parser(__doc__)
    parser.add_argument("--eager", action="store_true", help="update as where there is no C++ compiler")
    parser.add_argument("--log2", type=int, default=27, help="the logarithm of the number of params")
    parser.add_argument("--only", nargs="+", choices=SCHEMES, default=[*SCHEMES], metavar="SCHEME")
    args = parser.parse_args()
    if args.eager:
        os.environ["CXX"] = "/nonexistent"
    command = build.compiler()
    how = "eager, in chunks: no C++ compiler" if command is None else f"compiled by {shlex.join(command)}"
    print(f"{torch.get_num_threads()} threads; {how}")
    table = results.Table("update ms", "copy ms", "of a copy", "ns/param")
    for name in args.only:
        policy, numel = SCHEMES[name], 1 << args.log2 + ("4-bit" in name)
        step = fz.donate(fz.train_step(lambda p: p, fz.adamw(1e-3), policy))
        state = step.init({"w": torch.zeros(numel)})
        assert policy.grad
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(policy.grad) * 1e-3
        trees = [state.params, state.moments.mu, state.moments.nu]
        sources = [part for tree in trees for part in tree.buffers.values()] + [grad]
        source = [part.clone() for part in sources]
        target = [torch.empty_like(part) for part in source]
        del trees, sources
        optimizer = step.optimizer
        assert optimizer.fused

        def update() -> None:
            own = state.params.only(state.layout.trainable)
            grads = own.with_buffers({key: grad for key in own.groups})
            optimizer.fused(own, grads, state.moments)  # type: ignore[misc]

        def copy() -> None:
            for a, b in zip(target, source, strict=True):
                a.copy_(b)

        update()
        copy()
        updates, copies = seconds([update, copy])
        ours, theirs = statistics.median(updates), statistics.median(copies)
        ratio = statistics.median(a / b for a, b in zip(updates, copies, strict=True))
        table.row(name, ours * 1e3, theirs * 1e3, ratio, ours / numel * 1e9)
    results.save(args, table)


if __name__ == "__main__":
    main()
