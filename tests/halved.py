"""Functions in which params take part in every way, and their pullbacks in two halves against those as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.testing import assert_trees_equal

F64 = torch.float64
SHARDS: dict[str, Any] = {
    "unsharded": lambda step: step,
    "remat": fz.remat,
    "ZeRO-1": fz.shard_zero1,
    "ZeRO-2": fz.shard_zero2,
    "ZeRO-3": fz.shard_zero3,
    "ZeRO-3, remat": lambda step: fz.remat(fz.shard_zero3(step)),
    "ZeRO-3, offload": lambda step: fz.offload(fz.shard_zero3(step), params="host", grads="host", activations="host"),
}


# ---- functions of (params, x of [4, 5]): every way in which a param can take part


def params_of(dtype: torch.dtype = F64) -> Any:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return (0.5 * torch.randn(shape, generator=generator, dtype=F64)).to(dtype)

    def other(*shape: int) -> torch.Tensor:
        """A leaf of another dtype is in another group of its unit."""
        return draw(*shape).to(torch.float32 if dtype == F64 else F64)

    return {
        "blocks": [{"w": draw(5, 5), "v": draw(5, 5), "b": draw(5), "g": draw(5), "o": other(5, 5)} for _ in range(3)],
        "w": draw(5, 5),
        "s": draw(5),
        "a": draw(5, 2),
        "c": draw(2, 5),
        "k": draw(5, 1, 3),
    }


def over_blocks(body: Any) -> Any:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        unit = fz.unit(body)
        for q in p["blocks"]:
            x = unit(q, x)
        return x

    return fn


class Twice(torch.autograd.Function):
    """A product with a weight, of a user's, whose backward computes everything."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2 * x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: object) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return 2 * grad @ w.T, 2 * x.T @ grad


def head_tied(p: Any, x: torch.Tensor) -> Any:
    """A param used at both ends, another in every unit."""
    unit = fz.unit(lambda q, x, s: torch.tanh(F.linear(x, q["w"], q["b"])) * s)
    x = x @ p["w"]
    for q in p["blocks"]:
        x = unit(q, x, p["s"])
    return x @ p["w"].T


def recurrent(p: Any, x: torch.Tensor) -> Any:
    """A weight whose gradient is a sum of many products."""
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"] @ q["w"] + x @ q["v"].T @ q["w"].T @ q["w"].T + q["b"] * x))
    for _ in range(2):
        for q in p["blocks"]:
            x = unit(q, x)
        x = F.linear(x, p["w"], p["s"]) * p["s"]
    return x


def unrolled(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            x = torch.tanh(F.linear(x, q["w"], q["b"]) + x @ q["v"])
        return x

    return over_blocks(body)(p, x)


def sandwiched(p: Any, x: torch.Tensor) -> Any:
    return over_blocks(lambda q, x: F.linear(F.linear(x, q["w"]) @ q["w"], q["w"]))(p, x)


def of_two_dtypes(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"] + (x.to(q["o"].dtype) @ q["o"]).to(x.dtype))

    return over_blocks(body)(p, x)


def squared(p: Any, x: torch.Tensor) -> Any:
    """One operation that takes a param twice, and that twice over."""

    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ torch.addmm(x.T @ x, q["w"], q["w"], alpha=0.3)) @ q["v"]
        return x

    return over_blocks(body)(p, x)


def adapted(p: Any, x: torch.Tensor) -> Any:
    """Weights that are computed from params; outputs that depend on params alone, or on the input alone."""
    unit = fz.unit(lambda q, x: x @ (q["w"] + q["v"] @ q["w"]) + torch.softmax(q["b"], 0))
    for q in p["blocks"]:
        x = unit(q, x)
    return {"y": x @ (p["w"] + p["a"] @ p["c"]), "norm": p["w"].square().sum(), "own": p["s"] * 2, "x": x.sum(0)}


def convolved(p: Any, x: torch.Tensor) -> Any:
    h = F.conv1d(x[:, None].expand(len(x), 5, 5), p["k"], p["s"], padding=1, groups=5)
    return over_blocks(lambda q, h: h + torch.bmm(h, q["w"].expand(len(h), 5, 5)) + torch.baddbmm(q["b"], h, h))(p, h)


def normed(p: Any, x: torch.Tensor) -> Any:
    body = over_blocks(lambda q, x: x + F.gelu(F.layer_norm(x, [5], q["g"], q["b"]) @ q["w"]) @ q["v"])
    return F.layer_norm(body(p, x), [5], p["s"], p["s"])


def with_functions(p: Any, x: torch.Tensor) -> Any:
    """Functions of the user's that differentiate themselves, in units and outside."""
    return Twice.apply(over_blocks(lambda q, x: torch.tanh(Twice.apply(x, q["w"]) @ q["v"]))(p, x), p["w"])


def checkpointed(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.sin(torch.tanh(x @ (q["w"] @ q["v"])) @ q["v"])

        def both(x: torch.Tensor, g: torch.Tensor) -> Any:
            return inner(x), torch.tanh(g)[:, None] @ g[None]

        x, weight = checkpoint(both, x, q["g"], use_reentrant=False)
        return x @ weight + q["b"]

    return over_blocks(body)(p, x) @ p["w"]


def inner_derivative(p: Any, x: torch.Tensor) -> Any:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]) @ q["v"])

    def energy(x: torch.Tensor) -> torch.Tensor:
        return unit(p["blocks"][0], x).square().sum() + (x @ p["w"]).sum()

    return unit(p["blocks"][1], torch.func.grad(energy)(x) + x)


def smooth(p: Any, x: torch.Tensor) -> Any:
    """A penalty of a gradient through the units that the loss goes through, too."""
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]) @ q["v"])

    def scores(x: torch.Tensor) -> torch.Tensor:
        for q in p["blocks"]:
            x = unit(q, x)
        return (x @ p["w"]).square().sum()

    return scores(x) + 0.1 * torch.func.grad(scores)(x).square().sum()


def not_used(p: Any, x: torch.Tensor) -> Any:
    """Units without inputs that are differentiated, outputs that nothing uses."""
    unit = fz.unit(lambda q, x: (x @ q["w"], x * q["b"], q["g"] * 2))
    y, _, g = unit(p["blocks"][0], x)
    z, _, _ = unit(p["blocks"][1], torch.ones(len(x), 5, dtype=x.dtype))
    return y + z @ p["w"] + g, torch.zeros(3, dtype=torch.int64)


def in_place(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        h = x @ q["w"]
        h += q["b"]
        h[:, 1:3] *= 2
        return h.relu_() @ q["v"]

    return over_blocks(body)(p, x)


def attended(p: Any, x: torch.Tensor) -> Any:
    def body(q: Any, x: torch.Tensor) -> torch.Tensor:
        h = F.linear(x, torch.cat([q["w"], q["v"], q["w"]]), torch.cat([q["b"], q["g"], q["b"]]))
        a, b, c = (part[None, None] for part in h.chunk(3, -1))
        return F.scaled_dot_product_attention(a, b, c, is_causal=True)[0, 0] + torch.einsum("ij,kj->ik", x, q["v"])

    return over_blocks(body)(p, x)


FUNCTIONS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(head_tied, recurrent, unrolled, adapted, convolved, normed, with_functions, checkpointed, inner_derivative),
        *(smooth, not_used, in_place, attended, sandwiched, of_two_dtypes, squared),
    )
}


def cotangents_of(outputs: Any) -> Any:
    real = isinstance
    return pytree.tree_map(
        lambda x: torch.cos(3 * x + 1) if real(x, torch.Tensor) and x.is_floating_point() else None, outputs
    )


def compare(step: fz.Step, params: Any, inputs: Sequence[Any], **options: Any) -> None:
    """Both halves, of a forward that was pulled back before and of one that was not, against a whole pullback."""
    state = step.init(params)
    out, pullback = step.vjp(state, *inputs, **options)
    cotangent = cotangents_of(out)
    want = pullback(cotangent, retain_graph=True)
    wanted = fz.gather(want[0]), want[1]
    for again in (True, True, False):
        found = pullback.inputs(cotangent, retain_graph=again)
        grads = pullback.params()
        assert_trees_equal((fz.gather(grads), found), wanted)
        assert {k: x.dtype for k, x in grads.locals().items()} == {k: x.dtype for k, x in want[0].locals().items()}
    _, pullback = step.vjp(state, *inputs, **options)
    found = pullback.inputs(cotangent)
    assert_trees_equal((fz.gather(pullback.params()), found), wanted)


class Layers(nn.Module):
    def __init__(self, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), act(), nn.Linear(32, 16)) for _ in range(2)
        )
        self.head = nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)
