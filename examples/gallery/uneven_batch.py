"""The last batch of an epoch is small: ranks have different numbers of its examples, or none, under ZeRO-3.

pytorch/torchtitan#1842 and huggingface/transformers#34242 report that the mean over ranks of their means is not that
over examples; `Join`, which lets ranks run out of data, is for DDP alone (huggingface/accelerate#820). Here a step is
told what each rank's part counts, and a part of no examples counts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

SIZES, EXAMPLES, BATCH, EPOCHS = (3, 16, 2), 17, 8, 2


def batches() -> list[tuple[Tensor, ...]]:
    """Of 8, 8 and 1 examples in each epoch."""
    return list(zip(normal(0, EXAMPLES, 3).split(BATCH), normal(1, EXAMPLES, 2).split(BATCH), strict=True)) * EPOCHS


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(2, *SIZES))
    step = fz.train_step(lambda p, x, y: F.mse_loss(apply(p, x), y), fz.adamw(1e-2))
    step = fz.shard_zero3(fz.accumulate(step, 1, weights=lambda x, y: len(x)))
    state = step.init(params)
    for whole in batches():
        state, _ = step(state, *[x.tensor_split(ranks)[rank] for x in whole])  # `chunk` may give fewer parts
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(2, *SIZES)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for x, y in batches():
        optimizer.zero_grad()
        F.mse_loss(network(x), y).backward()
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
