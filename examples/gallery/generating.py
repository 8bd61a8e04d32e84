"""The model generates between updates, and learns from its own text (REINFORCE, in the way of RLHF), under ZeRO-3.

huggingface/transformers#30228 and pytorch/pytorch#123962 report that `generate` finds no weights in a model that FSDP
has cut, or waits for ranks whose texts have ended. Here `fz.with_fn` is another function over the same state, and all
ranks generate equally long: a text that has ended stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from common import compare, mlp, normal
from torch import Tensor

import fzero as fz

UPDATES, PROMPTS, LENGTH, VOCABULARY, END = 4, 12, 6, 8, 0


def prompts(update: int) -> tuple[Tensor, Tensor]:
    """The first token of each text, and what chooses the later ones (Gumbel noise), [prompts, length, vocabulary]."""
    first = torch.randint(1, VOCABULARY, (PROMPTS, 1), generator=torch.Generator().manual_seed(update))
    return first, -torch.log(-torch.log(torch.sigmoid(normal(update, PROMPTS, LENGTH, VOCABULARY))))


def next_logits(network: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    """Of every token's next one: from the token and the mean of those before it."""
    tokens = F.one_hot(text, VOCABULARY).double()
    before = tokens.cumsum(1) / torch.arange(1, text.shape[1] + 1)[:, None]
    return network(torch.cat([tokens, before], dim=2))


def generated(logits_of: Callable[[Tensor], Tensor], text: Tensor, noise: Tensor) -> Tensor:
    for position in range(LENGTH):
        chosen = (logits_of(text)[:, -1] + noise[:, position]).argmax(1)
        chosen = chosen.where(text[:, -1] != END, END)  # after its end a text stays as it is
        text = torch.cat([text, chosen[:, None]], dim=1)
    return text


def loss(network: Callable[[Tensor], Tensor], text: Tensor) -> Tensor:
    """Texts are rewarded for being long."""
    reward = (text != END).sum(1) / LENGTH - 0.5
    said = -F.cross_entropy(next_logits(network, text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")
    return -(reward * (said * (text[:, :-1] != END)).sum(1)).mean()


def main(rank: int, ranks: int) -> Mapping[str, Tensor]:
    apply, params = fz.functional(mlp(0, 2 * VOCABULARY, 16, VOCABULARY))
    step = fz.shard_zero3(fz.train_step(lambda p, text: loss(lambda x: apply(p, x), text), fz.adamw(1e-2)))
    speaker = fz.with_fn(step, lambda p, text: next_logits(lambda x: apply(p, x), text))
    state = step.init(params)
    for update in range(UPDATES):
        first, noise = [x.chunk(ranks)[rank] for x in prompts(update)]
        state, _ = step(state, generated(lambda text, now=state: speaker.forward(now, text), first, noise))
    return fz.gather(state.params)


def plain() -> Mapping[str, Tensor]:
    network = mlp(0, 2 * VOCABULARY, 16, VOCABULARY)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    for update in range(UPDATES):
        with torch.no_grad():
            text = generated(lambda text: next_logits(network, text), *prompts(update))
        optimizer.zero_grad()
        loss(network, text).backward()
        optimizer.step()
    return {name: param.detach() for name, param in network.named_parameters()}


if __name__ == "__main__":
    compare(main, plain)
