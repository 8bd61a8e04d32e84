"""Optimizers on whole leaves in float64, written with torch alone, beside the ones of fzero that they stand for."""

from __future__ import annotations

from typing import Any

import torch

LR, MOMENTUM, CLIP, EPS, DECAY = 0.05, 0.9, 0.3, 1e-2, 0.01


def norm(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([g.abs().square().sum() for g in grads]).sum().sqrt()


def update(
    name: str, params: list[torch.Tensor], grads: list[torch.Tensor], moments: Any, count: int
) -> tuple[list[torch.Tensor], Any]:
    """(new params, new moments) after update `count`, which begins with 1."""
    if name == "sgd":
        return [p - LR * g for p, g in zip(params, grads, strict=True)], None
    if name == "clipped":
        factor = min(1.0, CLIP / float(norm(grads)))
        old = moments or [torch.zeros_like(p) for p in params]
        new = [MOMENTUM * m + factor * g for m, g in zip(old, grads, strict=True)]
        return [p - LR * m for p, m in zip(params, new, strict=True)], new
    mu, nu = moments or ([torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params])
    mu = [0.9 * m + 0.1 * g for m, g in zip(mu, grads, strict=True)]
    nu = [0.999 * v + 0.001 * g * g for v, g in zip(nu, grads, strict=True)]
    out = []
    for p, m, v in zip(params, mu, nu, strict=True):
        step = (m / (1 - 0.9**count)) / ((v / (1 - 0.999**count)).sqrt() + EPS)
        out.append(p - LR * (step + DECAY * p))
    return out, (mu, nu)


def of_fzero(name: str) -> Any:
    import fzero as fz

    if name == "sgd":
        return fz.sgd(LR)
    if name == "clipped":
        return fz.chain(fz.clip_by_global_norm(CLIP), fz.sgd(LR, momentum=MOMENTUM))
    return fz.adamw(LR, b1=0.9, b2=0.999, eps=EPS, weight_decay=DECAY)
