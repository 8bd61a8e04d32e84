"""Functions as people write them: kinds of tuples, holders of params, and modes, which are easily taken for others.

Cases as in `written`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from written import F64, Block, Case, Net, filled, named, pure
from written_unseen import module

import fzero as fz


class Projection(Block):
    def forward(self, packed: Any) -> Any:
        return packed._replace(data=super().forward(packed.data))


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers: Any = filled(nn.ModuleList(Projection() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = PackedSequence(torch.cat([x, 0.5 * x]), torch.tensor([2, 2, 2]))
        for layer in self.layers:
            h = layer(h)
        return h.data.square().mean()


def packed_sequences() -> Case:
    return module(Sequences())


class Adapted(nn.Module):
    """As adapters of low rank are put in: two params in one function's closure, in a tuple, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = filled(nn.ModuleList(Block() for _ in range(3)))
        self.a, self.b = nn.Parameter(torch.ones(4, 2, dtype=F64)), nn.Parameter(torch.ones(2, 4, dtype=F64) / 8)
        self.pair, self.low = (self.a, self.b), [self.a, self.b]
        a, b = self.pair

        def hook(block: Any, given: Any, out: torch.Tensor) -> torch.Tensor:
            return out + given[0] @ a @ b

        self.blocks[1].register_forward_hook(hook)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x @ self.pair[0] @ self.pair[1] + x @ torch.linalg.multi_dot(self.low)).square().mean()


def two_params_in_one_place() -> Case:
    apply, params = fz.functional(Adapted())

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        low = p["a"] @ p["b"]
        for i in range(3):
            given, (w, b) = x, [p[f"blocks.{i}.lin.{name}"] for name in ("weight", "bias")]
            x = torch.tanh(x @ w.T + b) + (given @ low if i == 1 else 0.0)
        return (2 * x @ low).square().mean()

    return apply, dict(params), plain


class Regularised(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trained = sum(p.square().sum() for p in self.parameters() if p.requires_grad)
        return super().forward(x).square().mean() + 0.1 * trained


def params_that_require_a_gradient() -> Case:
    made = filled(Regularised())
    apply, params = fz.functional(made)

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        weights = sum(w.square().sum() for w in p.values())
        return torch.func.functional_call(super_net, p, (x,)).square().mean() + 0.1 * weights

    super_net = Net()
    return apply, dict(params), plain


def one_module_for_all_blocks() -> Case:
    block = filled(Block())
    apply, _ = fz.functional(block)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = apply(q, x)
        return x.square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = torch.func.functional_call(block, q, (x,))
        return x.square().mean()

    values = {name: x.detach() for name, x in block.named_parameters()}
    params = {"blocks": [{name: x * (1 + 0.1 * i) for name, x in values.items()} for i in range(3)]}
    return fn, params, plain


def modes_of_a_call() -> Case:
    """Whether gradients are recorded inside is what it is around; and a score of what is not differentiated."""

    @fz.unit
    def unit(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"]) * (1.0 if torch.is_grad_enabled() else 3.0)

    @fz.unit
    def seen(q: Any, x: torch.Tensor) -> torch.Tensor:
        return unit(q, x) + q["w"].detach().numpy().sum()

    def fn(p: Any, x: torch.Tensor, recording: bool | None = None) -> torch.Tensor:
        with torch.no_grad():
            target = unit(p["blocks"][0], x)
        with torch.inference_mode():
            other = unit(p["blocks"][1], x)
        for q in p["blocks"]:
            x = seen(q, x)
        return (x - target - other.clone()).square().mean()

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        first, second, _ = p["blocks"]
        target = 3.0 * torch.tanh(x @ first["w"]).detach() + 3.0 * torch.tanh(x @ second["w"]).detach()
        factor = 1.0 if torch.is_grad_enabled() else 3.0
        for q in p["blocks"]:
            x = factor * torch.tanh(x @ q["w"]) + q["w"].detach().sum()
        return (x - target).square().mean()

    return fn, pure(fn)[1], plain


CASES = named(
    packed_sequences,
    two_params_in_one_place,
    params_that_require_a_gradient,
    one_module_for_all_blocks,
    modes_of_a_call,
)
