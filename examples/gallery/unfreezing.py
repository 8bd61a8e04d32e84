"""Progressive unfreezing: the head trains first, then one more layer in each phase, with moments that wait meanwhile.

deepspeedai/DeepSpeed#5639 reports that layers which are frozen when ZeRO-3 begins never train, whatever `requires_grad`
says later. Here a frozen leaf is a row of the step's table, and `fz.convert` takes the state from one step to the next.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

SIZES, UPDATES, EXAMPLES = (3, 16, 16, 2), 2, 12
PHASES = ["0.*|2.*", "0.*", "4.*", ""]  # what is frozen: in the third phase the head again, at last nothing


def batch(update: int) -> tuple[Tensor, Tensor]:
    return normal(2 * update, EXAMPLES, 3), normal(2 * update + 1, EXAMPLES, 2)


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, *SIZES))
    step = fz.shard_zero3(fz.train_step(lambda p, x, y: F.mse_loss(apply(p, x), y), fz.adamw(1e-2)))
    state = step.init(params)
    for phase, frozen in enumerate(PHASES):
        now = fz.freeze(step, frozen, keep_moments=True) if frozen else step
        state = fz.convert(state, now)
        for update in range(phase * UPDATES, (phase + 1) * UPDATES):
            state, _ = now(state, *[x.chunk(ranks)[rank] for x in batch(update)])
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, *SIZES)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for phase, frozen in enumerate(PHASES):
        for name, param in network.named_parameters():
            param.requires_grad_(f"{name.split('.')[0]}.*" not in frozen.split("|"))
        for update in range(phase * UPDATES, (phase + 1) * UPDATES):
            optimizer.zero_grad(set_to_none=True)
            x, y = batch(update)
            F.mse_loss(network(x), y).backward()
            optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
