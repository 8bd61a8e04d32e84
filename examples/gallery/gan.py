"""A generator and a discriminator, updated in turn, each cut by ZeRO-3 with an optimizer of its own.

deepspeedai/DeepSpeed#4923 reports that a GAN of two engines fails from ZeRO-2 on, where one's loss goes through the
other's model. Here gradients are values: the generator's are pulled back from the cotangent of what the discriminator
was given, and the discriminator's params get none in that pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

STEPS, EXAMPLES, NOISE, DIMS = 5, 12, 4, 3


def batch(update: int) -> tuple[Tensor, Tensor]:
    return normal(2 * update, EXAMPLES, DIMS).tanh(), normal(2 * update + 1, EXAMPLES, NOISE)


def is_real(score: Tensor) -> Tensor:
    return F.softplus(-score).mean()


def is_fake(score: Tensor) -> Tensor:
    return F.softplus(score).mean()


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    make, made_of = fz.functional(mlp(0, NOISE, 16, DIMS))
    score, judged_by = fz.functional(mlp(50, DIMS, 16, 1))
    generator = fz.shard_zero3(fz.train_step(make, fz.adamw(1e-2)))
    judge = lambda p, real, fake: is_real(score(p, real)) + is_fake(score(p, fake))
    critic = fz.shard_zero3(fz.train_step(judge, fz.adamw(2e-2)))
    fooled = fz.with_fn(critic, lambda p, fake: is_real(score(p, fake)))  # another loss over the same state
    maker, taker = generator.init(made_of), critic.init(judged_by)
    for update in range(STEPS):
        real, noise = [x.chunk(ranks)[rank] for x in batch(update)]
        taker, _ = critic(taker, real, generator.forward(maker, noise))
        fake, pull_back = generator.vjp(maker, noise)
        value, pull_critic = fooled.vjp(taker, fake)
        (cotangent,) = pull_critic.inputs(torch.ones_like(value))  # of `fake` alone
        maker, _ = generator.update(maker, pull_back(cotangent)[0])
    return {f"maker.{name}": leaf for name, leaf in fz.gather(maker.params).items()} | {
        f"taker.{name}": leaf for name, leaf in fz.gather(taker.params).items()
    }


def plain() -> Mapping[str, Tensor]:
    maker, taker = mlp(0, NOISE, 16, DIMS), mlp(50, DIMS, 16, 1)
    of_maker = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    of_taker = torch.optim.AdamW(taker.parameters(), lr=2e-2)
    for update in range(STEPS):
        real, noise = batch(update)
        of_taker.zero_grad()
        (is_real(taker(real)) + is_fake(taker(maker(noise).detach()))).backward()
        of_taker.step()
        of_maker.zero_grad()
        is_real(taker(maker(noise))).backward()
        of_maker.step()
    both = torch.nn.ModuleDict({"maker": maker, "taker": taker})
    return {name: param.detach() for name, param in both.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
