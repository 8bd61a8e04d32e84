"""An image encoder that only some ranks' batches use, in one model with the text that all have, under ZeRO-3.

huggingface/transformers#37186 and pytorch/torchtitan#4777 report that training hangs once a rank has no image: it does
not call the encoder whose params the others gather. Here, too, all ranks call what is cut over them: a rank without
images gives an empty batch of them. One that leaves the call out gets an error that names the unit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor, nn

import fzero as fz

UPDATES, EXAMPLES, WIDTH = 4, 12, 8


def batch(update: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Texts and targets of all examples; images of the first ones of even updates, and whose they are."""
    text, target = normal(3 * update, EXAMPLES, 4), normal(3 * update + 1, EXAMPLES, 2)
    count = 4 if update % 2 == 0 else 0
    return text, target, normal(3 * update + 2, count, 6), torch.arange(count)


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": mlp(0, 6, 16, WIDTH), "text": mlp(20, 4, WIDTH), "head": mlp(40, WIDTH, 16, 2)})


def loss(call: Callable[[str, Tensor], Tensor], text: Tensor, target: Tensor, images: Tensor, of: Tensor) -> Tensor:
    seen = call("text", text).index_add(0, of, call("encoder", images))
    return F.mse_loss(call("head", seen), target)


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    parts = {name: fz.functional(module) for name, module in model().items()}
    params = {name: params for name, (_, params) in parts.items()}
    fn = lambda params, *batch: loss(lambda name, x: parts[name][0](params[name], x), *batch)
    step = fz.shard_zero3(fz.train_step(fn, fz.adamw(1e-2)))
    state = step.init(params)
    for update in range(UPDATES):
        text, target, images, of = batch(update)
        begin, end = [edge * EXAMPLES // ranks for edge in (rank, rank + 1)]
        mine = (begin <= of) & (of < end)  # on two ranks none of the second one's
        state, _ = step(state, text[begin:end], target[begin:end], images[mine], of[mine] - begin)
    return {f"{name}.{path}": leaf for name, part in fz.gather(state.params).items() for path, leaf in part.items()}


def plain() -> Mapping[str, Tensor]:
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for update in range(UPDATES):
        optimizer.zero_grad(set_to_none=False)
        loss(lambda name, x: network[name](x), *batch(update)).backward()
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
