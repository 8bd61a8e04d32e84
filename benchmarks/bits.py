"""Digests of small trainings, to see that a change which should change no number changes none.

    python benchmarks/bits.py > before.txt      # and again after the change
    diff before.txt after.txt

One line for each of 74 trainings (stage, policy, optimizer, transform; dropout is on): the last loss and norm in
hexadecimal, and a digest of the params' bytes. Another machine may have other bits.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator

import torch

import fzero as fz
from fzero.testing import run_ranks

STAGES: dict[int, Callable[[fz.Step], fz.Step]] = {
    0: lambda step: step,
    1: fz.shard_zero1,
    2: fz.shard_zero2,
    3: fz.shard_zero3,
}
POLICIES: dict[str, fz.Policy | None] = {
    "none": None,
    "bf16_states": fz.Policy.bf16_states(),
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "compact16, 4-bit": fz.Policy.compact16("4-bit"),
    "exact, float32": fz.Policy.exact(torch.float32),
    "gather in 8 bits": fz.Policy(gather="8-bit"),
}
OPTIMIZERS: dict[str, Callable[[], fz.GradientTransformation]] = {
    "adamw": lambda: fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2)),
    "sgd": lambda: fz.sgd(1e-2, momentum=0.9, weight_decay=0.01),
    "lion": lambda: fz.lion(1e-3),
    "adam": lambda: fz.adam(1e-2, weight_decay=0.1),
}
TRANSFORMS: dict[str, Callable[[fz.Step], fz.Step]] = {
    "": lambda step: step,
    "remat": fz.remat,
    "autocast": fz.autocast,
    "accumulate": lambda step: fz.accumulate(step, 2),
    "fuse_update": fz.fuse_update,
    "loss_scale": lambda step: fz.loss_scale(step, 256.0),
    "donate": fz.donate,
}


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(64, 96)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                *(torch.nn.LayerNorm(96), torch.nn.Linear(96, 384), torch.nn.GELU()),
                *(torch.nn.Dropout(0.1), torch.nn.Linear(384, 96)),
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(96, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(net: Net, rank: int, stage: int, policy: str, optimizer: str, transform: str) -> str:
    """Four steps."""
    apply, params = fz.functional(net)

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(apply(params, x).flatten(0, 1), y.flatten())

    step = TRANSFORMS[transform](STAGES[stage](fz.train_step(loss, OPTIMIZERS[optimizer](), POLICIES[policy])))
    state, metrics = step.init(params), {}
    generator = torch.Generator().manual_seed(5 + rank)
    for _ in range(4):
        x = torch.randint(0, 64, (4, 8), generator=generator)
        state, metrics = step(state, x, x.roll(1, 1))
    full = fz.gather(state.params).values()
    digest = hashlib.sha256(b"".join(v.detach().contiguous().view(torch.uint8).numpy().tobytes() for v in full))
    return f"{float(metrics['loss']).hex()} {float(metrics['grad_norm']).hex()} {digest.hexdigest()[:16]}"


def cases() -> Iterator[tuple[int, str, str, str]]:
    for stage in STAGES:
        yield from ((stage, policy, "adamw", "") for policy in POLICIES)
    for stage in (0, 3):
        yield from ((stage, "none", optimizer, "") for optimizer in OPTIMIZERS)
    for stage in (1, 2, 3):
        yield from ((stage, policy, "adamw", t) for t in TRANSFORMS for policy in ("none", "compact16"))


def main() -> None:
    warnings.simplefilter("ignore")  # compact states do without a compiler
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = Net()
    for case in dict.fromkeys(cases()):
        found = run_ranks(lambda rank, case=case: train(net, rank, *case), 2 if case[0] else 1)
        print(*case, *found, sep="  ")


if __name__ == "__main__":
    main()
