"""The bits that updates leave, for every optimizer and scheme: `python tests/updates.py adamw` prints their digests."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
from nightly import by_turns

import fzero as fz
from fzero.formats.formats import CHUNK
from fzero.kernels import onepass

BF16, F32 = torch.bfloat16, torch.float32
POLICIES = {
    "float32": fz.Policy(),
    "float32, bf16 grads": fz.Policy(compute=BF16, grad=BF16),
    "bf16 params, float32 moments": fz.Policy(param=BF16, grad=F32, moment=F32),
    "float16 params, float32 moments": fz.Policy(param=torch.float16, grad=F32, moment=F32),
    "bf16": fz.Policy.bf16_states(),
    "exact, float32 grads": fz.Policy(param=BF16, rounding="compensated", grad=F32, moment=F32),
    "exact, float32 moments": fz.Policy.exact(F32),
    "exact": fz.Policy.exact(),
    "compact24": fz.Policy.compact24(),
    "compact16": fz.Policy.compact16(),
    "compact16, bf16 moments": fz.Policy.compact16(BF16),
    "compact16, 4-bit": fz.Policy.compact16("4-bit"),
}
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda: fz.adamw(1e-2, weight_decay=0.1),
    "adamw, no decay": lambda: fz.adamw(1e-2, weight_decay=0.0),
    "adam": lambda: fz.adam(1e-2, weight_decay=0.1),
    "adam, no decay": lambda: fz.adam(1e-2),
    "lion": lambda: fz.lion(1e-3, weight_decay=0.1),
    "sgd": lambda: fz.sgd(1e-2, weight_decay=0.1),
    "sgd, momentum": lambda: fz.sgd(1e-2, momentum=0.9),
    "sgd, nesterov": lambda: fz.sgd(1e-2, momentum=0.9, nesterov=True),
    "adamw, amsgrad": lambda: fz.adamw(1e-2, weight_decay=0.1, amsgrad=True),
    "clipped": lambda: fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)),
}
NUMEL = CHUNK + 64 * 37 - 5  # two chunks, and no whole block


def drawn(seed: int, numel: int, spread: float) -> torch.Tensor:
    """Of all magnitudes, with zeros, subnormal and huge numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator) * 10.0 ** (spread * torch.randn(numel, generator=generator))
    x[:8] = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.2e-38, 1e17, -1e17, 1.00390625])
    return x


def updated(optimizer: str, policy: fz.Policy, numel: int, scaled: bool) -> list[torch.Tensor]:
    """All buffers after two updates; `scaled` where grads carry a scale."""
    step = fz.train_step(lambda p: p, OPTIMIZERS[optimizer](), policy)
    step = fz.loss_scale(step, 8.0) if scaled else step
    x = drawn(0, numel, 1.0)
    state = step.init({"a": x[:1275], "b": x[1275:]}, seed=3)
    for count in range(2):
        grads = {}
        for key in state.params.groups:
            g = drawn(1 + count, state.params.local(key).numel(), 3.0) * (0.1 if scaled else 0.01)
            grads[key] = g.to(policy.grad or F32)
        state, metrics = step.update(state, state.params.with_buffers(grads, 8.0 if scaled else 1.0))
        assert not metrics["skipped"]
    found = [*state.params.buffers.values()]
    moments = state.moments[-1] if isinstance(state.moments[0], tuple) else state.moments
    for name in ("mu", "nu", "largest", "momentum"):
        tree = getattr(moments, name, None)
        found += [] if tree is None else tree.buffers.values()
    return found


def digests(optimizer: str) -> dict[str, str]:
    """SHA-256 of all buffers, for every policy; where there is a compiler, all are updated by kernels."""
    out = {}
    for (name, policy), scaled in by_turns(POLICIES.items(), (False, True)):
        digest = hashlib.sha256()
        for buffer in updated(optimizer, policy, NUMEL, scaled):
            digest.update(buffer.view(torch.uint8).numpy().tobytes())
        out[f"{name}{'; scaled' if scaled else ''}"] = digest.hexdigest()
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    onepass.LARGE = CHUNK
    print(json.dumps({optimizer: digests(optimizer) for optimizer in sys.argv[1:]}))
