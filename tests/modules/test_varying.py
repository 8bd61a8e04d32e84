"""What code between a column and a row does with slices: one process's values and gradients, or a refusal."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import einops
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nightly import NIGHTLY, by_turns, in_turns
from torch import nn
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.testing import RankError, assert_trees_close, run_ranks

F64, WIDTH, INNER = torch.float64, 8, 12
AXIS: dict[str, Any] = {"axis": -1}  # as numpy calls a dim


class Between(nn.Module):
    """A norm, a column, any code, a row."""

    def __init__(self, code: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.code = nn.LayerNorm(WIDTH), code
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(self.norm(x))))  # with sequence=True each rank has a piece of it
        x = self.norm(x)
        return self.head(self.down(self.code(self.up(x), x)))


def heads(h: torch.Tensor, number: int = -1, dim: int = 2) -> torch.Tensor:
    q = h.view(h.shape[0], h.shape[1], number, dim).transpose(1, 2)
    return (torch.softmax(q @ q.mT, -1) @ q).transpose(1, 2).flatten(-2)


def by_einsum(h: torch.Tensor) -> torch.Tensor:
    q = h.unflatten(-1, (-1, 2))
    weights = torch.einsum("bthd,bshd->bhts", q, q).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weights, q).flatten(-2)


def out_of_heads(h: torch.Tensor) -> torch.Tensor:
    b, t = h.shape[:2]
    q = h.view(b, t, -1, 2).permute(0, 2, 1, 3).reshape(-1, t, 2)
    return torch.bmm(torch.softmax(torch.bmm(q, q.mT), -1), q).view(b, -1, t, 2).transpose(1, 2).reshape(b, t, -1)


def biased(h: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    q = h.unflatten(-1, (-1, 6)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, mask).sum(1)


def moved(h: torch.Tensor) -> torch.Tensor:
    return h.movedim(destination=0, source=2).softmax(0).movedim(destination=2, source=0)


def summed(h: torch.Tensor, number: Any = 0) -> torch.Tensor:
    """Of all features, and a number that is added to each rank's part."""
    if torch.distributed.is_initialized():
        return fz.parallel.sum(h.sum(-1, keepdim=True) + number, fz.parallel.axis(None, "tp"))
    return h.sum(-1, keepdim=True) + number


# what `between.py` draws no line of
EQUAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mask": lambda h, x: h * (x[..., :1] > 0),
    "gate": lambda h, x: h * torch.sigmoid(x.mean(-1, keepdim=True)),
    "add": lambda h, x: h + x.sum(-1, keepdim=True),
    "no grad": lambda h, x: torch.where(x.detach()[..., :1] > 0, h, -h),
    "heads": lambda h, x: heads(torch.tanh(h)),
    "heads in the batch": lambda h, x: out_of_heads(h),
    "in place": lambda h, x: (h * 1).mul_(2).add_(x[..., :1]),
    "einsum": lambda h, x: torch.einsum("bts,bsf->btf", torch.softmax(x @ x.mT, -1), h),
    "einsum of heads": lambda h, x: by_einsum(h),
    "heads by sizes": lambda h, x: h.view(*h.shape[:2], h.shape[-1] // 2, 2).cos().flatten(-2),
    "heads in the batch by sizes": lambda h, x: in_the_batch(h),
    "as large": lambda h, x: h * torch.ones_like(h) + x[..., :1].expand_as(h),
    "as another": lambda h, x: (h.to(x) + h.view_as(h).type(torch.float64).cpu()).data + h,
    "masked": lambda h, x: h.masked_fill(h < 0, 0.0) * (x.new_ones(2, 6, 1) > 0).to(h),
    "tokens by a mask": lambda h, x: h[x[..., 0] > x[..., 0].median()].unsqueeze(0),
    "places by tensors": lambda h, x: h[[1, 0]][:, torch.tensor([5, 4, 3, 2, 1, 0])],
    "last tokens": lambda h, x: h * h[torch.arange(2), torch.tensor([0, 3])][:, None],
    "causal by hand": lambda h, x: causal(h),
    "rotary by complex numbers": lambda h, x: rotated(h),
    "a cache that begins empty": lambda h, x: torch.cat([torch.tensor([], dtype=h.dtype), h], -2),
    "of no tokens, by sizes": lambda h, x: torch.cat([of_no_tokens(h[:, :0]), h], 1),
    "one slope": lambda h, x: F.prelu(h, x.mean().view(1)),
    "einsum with dots": lambda h, x: torch.einsum("...f,...f->...f", h, h.sin()),
    "one by one": lambda h, x: torch.stack([row * 2 for row in h]),
    "a shape like another": lambda h, x: h if h.shape == h.sin().shape else -h,
    "tokens are padded": lambda h, x: F.pad(h, (0, 0, 1, 0))[:, :-1].flip(1).roll(1, 1).narrow(1, 0, h.shape[1]),
    "a linear map of one's own": lambda h, x: h + F.linear(x.mean(-1, keepdim=True), torch.ones(1, 1, dtype=h.dtype)),
    "parts by keywords": lambda h, x: torch.unflatten(h, sizes=(-1, 2), dim=2).cos().flatten(-2) * summed(h),
    "parts before it": lambda h, x: h.unflatten(1, (3, -1)).tanh().flatten(1, 2),
    "parts before it, by -1": lambda h, x: h.unflatten(1, (-1, 2)).cumsum(1).flatten(1, 2),
    "parts behind it": lambda h, x: h.permute(2, 0, 1).unflatten(2, (2, -1)).tanh().flatten(2, 3).permute(1, 2, 0),
    "keywords": lambda h, x: torch.matmul(torch.softmax(x @ x.mT, -1), other=h),
}


def causal(h: torch.Tensor) -> torch.Tensor:
    q = h.unflatten(-1, (-1, 2)).transpose(1, 2)
    return ((q @ q.mT).tril() @ q).transpose(1, 2).flatten(2)


def rotated(h: torch.Tensor) -> torch.Tensor:
    turns = torch.polar(torch.ones(6, 1, dtype=h.dtype), torch.arange(6, dtype=h.dtype)[:, None])
    return torch.view_as_real(torch.view_as_complex(h.unflatten(-1, (-1, 2)).contiguous()) * turns[:, :1]).flatten(2)


def hooked(h: torch.Tensor, hook: Any) -> torch.Tensor:
    h = h * 1
    if h.requires_grad:
        h.register_hook(hook)
    return h


def in_the_batch(h: torch.Tensor) -> torch.Tensor:
    b, t, heads = h.shape[0], h.shape[1], h.shape[2] // 2
    q = h.view(b, t, heads, 2).permute(0, 2, 1, 3).reshape(b * heads, t, 2)
    return (torch.softmax(q @ q.mT, -1) @ q).view(b, heads, t, 2).transpose(1, 2).reshape(b, t, heads * 2)


def of_no_tokens(h: torch.Tensor) -> torch.Tensor:
    heads = h.shape[2] // 2
    q = h.reshape(2, 0, heads, 2).transpose(1, 2).sin()
    return q.reshape(1, 2, heads, 0, 2)[0].transpose(1, 2).reshape(2, 0, heads * 2)


def written(b: torch.Tensor, h: torch.Tensor | float) -> torch.Tensor:
    b = b * 1
    b[:, 1:] = h
    return b


# as above: there every line is equal or refused
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "softmax": lambda h, x: h.softmax(-1),
    "a hook": lambda h, x: hooked(h, lambda g: g / (g.norm() + 1)),
    "if it is as wide": lambda h, x: h if h.shape == x.shape else -h,
    "if it can be divided": lambda h, x: h * (1 if h.shape[-1] % 12 == 0 else 2),
    "what a map of functions gives": lambda h, x: torch.vmap(lambda row: row * 2)(h).softmax(-1),
    "a slice that a map of functions reads": lambda h, x: torch.vmap(lambda a: h * a)(torch.ones(1))[0].softmax(-1),
    "autograd": lambda h, x: torch.autograd.grad(h.square().sum(1).sum(), h)[0],
    "by an index of slices": lambda h, x: h.index_select(1, (h > 0).long().sum((0, 1)).clamp(max=2)).mean(1, True) + h,
    "its norm": lambda h, x: h / (h.norm() + 1),
    "the first of all heads": lambda h, x: h * h.unflatten(-1, (-1, 2))[..., :1, :1].flatten(-2),
    "heads of what is no size": lambda h, x: h * h.view(h.shape[0], -1, 3, 2).mean(1).flatten(-2)[:, None],
    "by the size": lambda h, x: h * h.shape[-1] ** -0.5,
    "a number by the size": lambda h, x: h * x.mean() / h.shape[2],
    "by the stride": lambda h, x: h / h.stride(1),
    "by its bytes": lambda h, x: h / h.nbytes,
    "by its length": lambda h, x: h / len(h[0, 0]),
    "if it is large": lambda h, x: h if h.shape[-1] > 8 else -h,
    "in two batches": lambda h, x: h.mT.reshape(-1, 6).softmax(0).view(h.mT.shape).mT,
    "flattened": lambda h, x: h.repeat_interleave(2).view(2, 6, -1)[..., ::2],
    "written": lambda h, x: written(h, 0.0),
    "written into a constant": lambda h, x: written(torch.zeros_like(h), h[:, 1:]),
    "expanded as large": lambda h, x: h + x[..., :1].expand(h.shape),
    "sum of all": lambda h, x: h / h.sum(),
    "argmax": lambda h, x: h * h.argmax(-1, keepdim=True),
    "norm": lambda h, x: h / torch.linalg.vector_norm(h, dim=-1, keepdim=True),
    "var_mean": lambda h, x: h - torch.var_mean(h, -1, keepdim=True)[1],
    "groups": lambda h, x: F.group_norm(h.mT, 1).mT,
    "pool": lambda h, x: F.avg_pool1d(h, 3, 1, 1),
    "index": lambda h, x: h[..., torch.arange(h.shape[-1] - 1, -1, -1)],
    "repeat": lambda h, x: h.repeat(1, 1, 2)[..., : h.shape[-1]],
    "attention over features": lambda h, x: F.scaled_dot_product_attention(query=h, key=h, value=h),
    "tokens into features": lambda h, x: h.reshape(h.shape[0], 1, -1)[..., : h.shape[-1]].expand(h.shape),
    "a head as the inner part": lambda h, x: h.view(*h.shape[:2], -1, 6).transpose(2, 3).flatten(2),
    "heads as the inner part": lambda h, x: h.view(*h.shape[:2], -1, 3).transpose(2, 3).flatten(2),
    "every second feature": lambda h, x: torch.cat([h[..., ::2]] * 2, -1),
    "a number of heads": lambda h, x: heads(h, 6, -1),
    "tokens as heads": lambda h, x: h.view(h.shape[0], -1, 6, 2).transpose(1, 2).reshape(h.shape),
    "roll by name": lambda h, x: h.roll(1, dims=-1),
    "roll of all": lambda h, x: h.roll(1),
    "flips": lambda h, x: h.flip(0, -1),
    "axis": lambda h, x: torch.cat(h.chunk(2, **AXIS)[:1] * 2, **AXIS),
    "a vector": lambda h, x: (x[..., 0].unsqueeze(1) @ h).softmax(-1) * h,
    "places": lambda h, x: h * torch.where(h > 0)[0].sum(),
    "tiled": lambda h, x: fz.parallel.tiled(lambda own: own.softmax(-1), h, tiles=2, dim=1),
    "vmap": lambda h, x: torch.func.vmap(lambda row: row.softmax(-1))(h),
    "vmap of tokens": lambda h, x: torch.func.vmap(lambda a, b: a - b.mean() * a, in_dims=1, out_dims=1)(h, h),
    "grad": lambda h, x: torch.func.grad(lambda a: a.logsumexp(-1).sum())(h),
    "moved by keywords": lambda h, x: moved(torch.cat([h] * 3))[:2],
    "a mask of all heads": lambda h, x: h * summed(biased(h, torch.ones(1, 2, 6, 6, dtype=h.dtype))),
    "a number of numpy to a part": lambda h, x: h * summed(h, np.float32(3)),
    "by how many go into one": lambda h, x: h * (h.shape[-1] // h.sin().shape[-1]),
    "its numerator": lambda h, x: h / h.shape[-1].numerator,
    "parts before it, then over it": lambda h, x: h.unflatten(1, (3, 1, -1)).softmax(-1).flatten(1, 3),
    "writes to what is whole": lambda h, x: x.repeat(1, 1, 2)[..., : h.shape[-1]].add_(h),
}


def tensor_vjps(
    loss: Any, params: Any, plan: Any, *inputs: Any, ranks: int = 2, runs: int = 1, zero3: bool = False, **options: Any
) -> list[Any]:
    """(output, whole gradients) of each rank and run, cut over a tensor axis; `wrap` is a transform of the step."""
    wrap = options.pop("wrap", lambda step: step)

    def rank_main(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), plan, mesh=mesh, **options)
        step = wrap(fz.shard_zero3(step, mesh=mesh, axis="dp") if zero3 else step)
        state = step.init(params)
        found = [step.vjp(state, *inputs) for _ in range(runs)]
        return [(out, dict(fz.gather(pullback(torch.ones_like(out))[0]))) for out, pullback in found]

    return [each for own in run_ranks(rank_main, ranks, timeout=200) for each in own]


def need_equal(loss: Any, params: Any, found: list[Any]) -> None:
    """Every rank and run has the values and the gradients of one process."""
    want, value = torch.func.grad_and_value(loss)(dict(params))
    for out, own in found:
        assert_trees_close((out, own), (value, want), rtol=1e-10, atol=1e-12)


def squares(module: nn.Module, x: torch.Tensor) -> Any:
    """The mean square of a module's output as a function of its params, and these."""
    apply, params = fz.functional(module.to(F64))
    return (lambda p: apply(p, x).square().mean()), params


PLAN = {"*up": "column", "*down": "row"}


@in_turns(14)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", sorted(EQUAL))
def test_equal(name: str, sequence: bool) -> None:
    torch.manual_seed(0)
    loss, params = squares(Between(EQUAL[name]), torch.randn(2, 6, WIDTH, dtype=F64))
    for ranks in (2, 3) if NIGHTLY else (2 + (len(name) + sequence) % 2,):  # in a second run nothing is followed
        need_equal(loss, params, tensor_vjps(loss, params, PLAN, ranks=ranks, runs=2, sequence=sequence))


@in_turns(5)
@pytest.mark.parametrize(("name", "sequence"), by_turns(sorted(REFUSED), [False, True]))
def test_refused(name: str, sequence: bool) -> None:
    refused = r"a size that was|outputs (of module 'up' )?are cut|whose \w+puts are cut over axis|'up' gives|is partial"
    loss, params = squares(Between(REFUSED[name]), torch.randn(2, 6, WIDTH, dtype=F64))
    with pytest.raises(RankError, match=refused):
        tensor_vjps(loss, params, PLAN, sequence=sequence)


class First(nn.Module):
    """A column that runs first without a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = x + self.down(torch.tanh(self.up(x)))
        with torch.no_grad():
            gate, scale = self.up(x).sigmoid(), x.amax((0, 1))
        return self.down(self.up(x) * gate) * scale + x.cumsum(1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.linspace(0.5, 2, INNER))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.gamma


class Scaled(nn.Module):
    """A module of one's own, whose leaf is cut as what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(WIDTH, INNER), Scale(), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.scale(self.up(x)))


@in_turns(4)
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("made", [First, Scaled])
@pytest.mark.parametrize("remat", [False, True])
def test_modules(made: Any, sequence: bool, remat: bool) -> None:
    torch.manual_seed(0)
    loss, params = squares(made(), torch.randn(2, 6, WIDTH, dtype=F64))
    plan: dict[str, Any] = PLAN | ({"scale.gamma": 0} if made is Scaled else {})
    wrap = fz.remat if remat else lambda step: step
    need_equal(loss, params, tensor_vjps(loss, params, plan, runs=2, sequence=sequence, wrap=wrap))


@in_turns(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_between_units(stage: int) -> None:
    """Each element of a Sequential is a unit: what varies goes from one to the next."""
    for between in (nn.Softmax(-1), nn.LogSoftmax(-1), nn.GELU()):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, INNER), between, nn.Linear(INNER, WIDTH))
        loss, params = squares(model, torch.randn(2, 6, WIDTH, dtype=F64))
        run = functools.partial(tensor_vjps, loss, params, {"0": "column", "2": "row"}, zero3=stage == 3)
        if isinstance(between, nn.GELU):
            need_equal(loss, params, run())
            continue
        with pytest.raises(RankError, match="outputs of module '0' are cut"):
            run()


class ByHand(nn.Module):
    """A module of one's own, which says itself where ranks exchange values."""

    def __init__(self, code: Any, ax: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(WIDTH, INNER)), nn.Parameter(torch.randn(INNER, WIDTH))
        self.bias, self.last, self.code = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3), code
        self.copy: Any = functools.partial(fz.parallel.copy, ax=ax) if ax else lambda x: x
        self.sum: Any = functools.partial(fz.parallel.sum, ax=ax) if ax else lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.code(self, torch.tanh(self.copy(x) @ self.up)))


BY_HAND: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "product": lambda m, h: m.sum(h @ m.down) + m.bias,
    "linear": lambda m, h: m.sum(F.linear(h, m.down.t())) + m.bias,
    "einsum": lambda m, h: m.sum(torch.einsum("btf,fo->bto", h, m.down)) + m.bias,
    "linear of parts": lambda m, h: m.sum((h @ m.down / 3 * m.bias).flatten(0, 1)).unflatten(0, h.shape[:2]),
    "regularised": lambda m, h: m.sum(h @ m.down) * m.sum((m.down**2).sum()),
    "norm": lambda m, h: m.sum((h / (1 + m.sum(h.square().sum(-1, keepdim=True))).sqrt()) @ m.down),
}
NOT_SUMMED: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bias": lambda m, h: m.sum(h @ m.down + m.bias),
    "number": lambda m, h: m.sum(h @ m.down + 1),
    "not linear": lambda m, h: m.sum(torch.relu(h @ m.down)),
    "not at all": lambda m, h: h @ m.down,
    "squared": lambda m, h: m.sum((p := h @ m.down) * p),
    "slices": lambda m, h: m.sum(h)[..., :WIDTH],
    "mean": lambda m, h: m.sum(h.mean(-1, keepdim=True)) * m.bias,
}


@in_turns(5)
@pytest.mark.parametrize("name", [*BY_HAND, *NOT_SUMMED])
def test_maps_by_hand(name: str) -> None:
    x = torch.randn(2, 3, WIDTH, dtype=F64)

    def made(ax: Any) -> Any:
        apply, params = fz.functional(ByHand((BY_HAND | NOT_SUMMED)[name], ax).to(F64))
        return (lambda p: apply(p, x).square().mean()), params

    def rank_main(rank: int) -> Any:
        loss, _ = made(fz.parallel.axis(None, "tp"))
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"up": 1, "down": 0})
        return dict(fz.gather(step.vjp(step.init(params))[1](torch.ones((), dtype=F64))[0]))

    whole, params = made(None)
    if name in NOT_SUMMED:
        with pytest.raises(RankError, match=r"needs fz\.parallel\.sum before anything else|fz\.parallel\.sum, or"):
            run_ranks(rank_main, 2)
        return
    want = torch.func.grad(whole)(dict(params))
    for ranks in (2, 3):
        for found in run_ranks(rank_main, ranks):
            assert_trees_close(found, want, rtol=1e-10, atol=1e-12)


@in_turns(5)
@pytest.mark.parametrize(("heads", "keys", "ranks"), [(8, 2, 4), (12, 3, 2), (8, 4, 2), (6, 3, 3), (4, 4, 2)])
@pytest.mark.parametrize("grouped", [False, True])
def test_heads_of_keys_by_rank(heads: int, keys: int, ranks: int, grouped: bool) -> None:
    """Heads of keys go with heads of queries: those of the rank, or it is refused."""
    x = torch.randn(2, 3, WIDTH, dtype=F64)

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o = nn.Linear(WIDTH, 2 * heads), nn.Linear(2 * heads, WIDTH)
            self.k, self.v = nn.Linear(WIDTH, 2 * keys), nn.Linear(WIDTH, 2 * keys)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = [layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
            if not grouped:
                k, v = [each.repeat_interleave(heads // keys, 1) for each in (k, v)]
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=grouped)
            return self.o(out.transpose(1, 2).flatten(2))

    loss, params = squares(Grouped(), x)
    plan = {f"{name}.*": fz.parallel.cut("column", multiple=2) for name in "qkv"}
    plan["o.*"] = fz.parallel.cut("row", multiple=2)
    if keys % ranks:
        with pytest.raises(RankError, match=r"attention' goes over the dim|this rank's slices of what 'q' gives"):
            tensor_vjps(loss, params, plan, ranks=ranks)
    else:
        need_equal(loss, params, tensor_vjps(loss, params, plan, ranks=ranks))


class InUnits(nn.Module):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Between(code)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that the compiler itself looks at
@pytest.mark.parametrize(("remat", "name"), by_turns([False, True], ["heads", "gate", "softmax", "by the size"]))
def test_compiled_units(name: str, remat: bool) -> None:
    """Compiled code is not watched: it runs once the same code was, if nothing had to be done for slices."""
    torch.manual_seed(0)
    loss, params = squares(InUnits((EQUAL | REFUSED)[name]), torch.randn(2, 6, WIDTH, dtype=F64))
    wrap = lambda step: fz.remat(fz.compile(step)) if remat else fz.compile(step)
    run = functools.partial(tensor_vjps, loss, params, PLAN, runs=3, zero3=True, wrap=wrap)
    if name in REFUSED:
        with pytest.raises(RankError, match=r"module 'blocks\.0\.up'"):
            run()
        return
    need_equal(loss, params, run())


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, mixes: bool) -> torch.Tensor:
        h = self.up(x)
        return self.down(h.softmax(-1) if mixes else h.tanh())


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that the compiler itself looks at
def test_another_branch_of_a_compiled_unit() -> None:
    apply, params = fz.functional(nn.Sequential(Chooses()).to(F64)[0])

    def rank_main(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        step = fz.train_step(lambda p, x, mixes: apply(p, x, mixes).square().mean(), fz.sgd(0.1), units=["*"])
        step = fz.shard_tensor(step, {"up": "column", "down": "row"}, mesh=mesh)
        step = fz.compile(fz.shard_zero3(step, mesh=mesh, axis="dp"))
        state, x = step.init(params, sync=True), torch.ones(2, 3, WIDTH, dtype=F64)
        for _ in range(2):
            step.vjp(state, x, False)
        with pytest.raises(ValueError, match="'softmax' goes over the dim"):
            step.vjp(state, x, True)

    run_ranks(rank_main, 2, timeout=200)


def test_random_numbers_within_a_checkpoint() -> None:
    """Which would draw others when it runs again: for slices each rank draws its own."""
    code = lambda h, x: checkpoint(lambda y: F.dropout(y, 0.5), h, use_reentrant=False)
    loss, params = squares(InUnits(code), torch.ones(2, 6, WIDTH, dtype=F64))
    with pytest.raises(RankError, match=r"inside torch\.utils\.checkpoint, which would draw others"):
        tensor_vjps(loss, params, PLAN, zero3=True)


def test_a_checkpoint_in_a_unit_does_not_end_the_check_around() -> None:
    """The proof of the unit gave tensors without types, and nobody saw that a sum is missing."""
    code = lambda h, x: checkpoint(torch.tanh, h, use_reentrant=False)
    apply, params = fz.functional(InUnits(code).to(F64))

    def rank_main(rank: int) -> None:
        loss = lambda p, x: apply(p["module"], x).square().mean() + p["w"].sum()
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"*.up": "column", "*.down": "row", "w": 0})
        state = step.init({"module": params, "w": torch.ones(4, dtype=F64)})
        step.vjp(state, torch.ones(2, 6, WIDTH, dtype=F64), argnums=())

    with pytest.raises(RankError, match=r"of 'p\.w'.*A conversion is missing"):
        run_ranks(rank_main, 2)


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = lambda x: self.down(self.up(x).tanh())
        return checkpoint(inner, self.norm(x), use_reentrant=True)  # type: ignore[return-value]


def test_a_piece_that_a_function_returns() -> None:
    """Its graph is the Function's, of which a piece knows nothing: all gradients inside were zero."""
    apply, params = fz.functional(nn.Sequential(Reentrant()).to(F64))

    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
        step = fz.shard_tensor(step, {"*.up": "column", "*.down": "row"}, sequence=True)
        step(step.init(params, sync=True), torch.ones(2, 6, WIDTH, dtype=F64))

    with pytest.raises(RankError, match=r"a torch\.autograd\.Function that returned it"):
        run_ranks(rank_main, 2)


CONTAINERS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list": (lambda h: [h], lambda held: held[0]),
    "dict": (lambda h: {"h": [h]}, lambda held: held["h"][0]),
}


class Through(nn.Module):
    """A unit that is given a value in a container, and gives one back."""

    def __init__(self, layer: nn.Module, name: str, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.code, (self.into, self.out) = layer, code, CONTAINERS[name]

    def forward(self, held: Any) -> Any:
        return self.into(self.layer(self.code(self.out(held))))


class InContainers(nn.Module):
    """Three units, whose values go from one to the next in containers."""

    def __init__(self, name: str, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, INNER), Scale(), nn.Linear(INNER, WIDTH)]
        codes = [torch.Tensor.contiguous, code, torch.Tensor.contiguous]
        self.units = nn.ModuleList([Through(*each) for each in zip(layers, [name] * 3, codes, strict=True)])
        self.into, self.out = CONTAINERS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = self.into(x)
        for unit in self.units:
            held = unit(held)
        return self.out(held)


@in_turns(3)
@pytest.mark.parametrize("name", CONTAINERS)
@pytest.mark.parametrize("remat", [False, True])
def test_containers_between_units(name: str, remat: bool) -> None:
    torch.manual_seed(0)
    plan: dict[str, Any] = {"units.0.layer": "column", "units.2.layer": "row", "*gamma": 0}
    wrap = fz.remat if remat else lambda step: step

    def run(code: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        loss, params = squares(InContainers(name, code), torch.randn(2, 6, WIDTH, dtype=F64))
        return loss, params, tensor_vjps(loss, params, plan, zero3=True, wrap=wrap)

    need_equal(*run(torch.tanh))
    with pytest.raises(RankError, match=r"outputs of module .units.0.layer. are cut"):
        run(lambda h: h.softmax(-1))


def test_a_copy_that_is_used_as_a_whole() -> None:
    """Values and gradients are alike on all ranks, and wrong."""
    x = torch.randn(2, WIDTH, dtype=F64)

    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, INNER)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return fz.parallel.copy(self.first(x), fz.parallel.axis(None, "tp"))

    apply, params = fz.functional(Copies().to(F64))

    def rank_main(rank: int, loss: Any) -> Any:
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"up": "column"})
        return step.vjp(step.init(params))[0]

    for loss in (lambda p: apply(p, x), lambda p: apply(p, x).square().mean()):
        with pytest.raises(RankError, match="each rank's own copy and varies between the ranks of axis 'tp'"):
            run_ranks(lambda rank, loss=loss: rank_main(rank, loss), 2)


def test_slices_whose_sums_are_alike() -> None:
    """Zeros: each rank's value is that of the whole, and its gradient not."""
    params = {"w": torch.zeros(4, dtype=F64), "v": torch.ones((), dtype=F64)}

    def rank_main(rank: int, own: bool) -> Any:
        ax = fz.parallel.axis(None, "tp")
        total = lambda x: x if own else fz.parallel.sum(x, ax)
        step = fz.train_step(lambda p: total(p["w"].exp().mul(p["w"]).sum()) * p["v"], fz.sgd(0.1))
        step = fz.shard_tensor(step, {"w": 0})
        return dict(fz.gather(step.vjp(step.init(params))[1](torch.ones((), dtype=F64))[0]))

    for grads in run_ranks(lambda rank: rank_main(rank, False), 2):
        assert_trees_close(grads, {"w": torch.ones(4, dtype=F64), "v": torch.zeros((), dtype=F64)})
    with pytest.raises(RankError, match="A conversion is missing"):
        run_ranks(lambda rank: rank_main(rank, True), 2)


def test_one_axis_for_slices_and_data() -> None:
    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        fz.shard_zero3(fz.shard_tensor(step, {"w": 0})).init({"w": torch.ones(4)})

    with pytest.raises(RankError, match="some of the same ranks"):
        run_ranks(rank_main, 2)


class Fused(nn.Module):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self.both, self.down, self.code = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH), code

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.code(self.both(x)))


FUSED: dict[str, Any] = {
    "chunk": lambda h: torch.sigmoid(h.chunk(2, -1)[0]) * h.chunk(2, -1)[1],
    "glu": F.glu,
    "dims": lambda h: h.reshape(*h.shape[:2], 2, -1)[:, :, 0] * h.reshape(*h.shape[:2], 2, -1).unbind(2)[1],
}


@pytest.mark.parametrize("name", sorted(FUSED))
def test_parts(name: str) -> None:
    torch.manual_seed(0)
    apply, params = fz.functional(Fused(FUSED[name]).to(F64))
    x = torch.randn(2, 3, WIDTH, dtype=F64)

    def rank_main(rank: int, parts: Any) -> torch.Tensor:
        plan = {"both": fz.parallel.cut("column", parts=parts), "down": "row"}
        step = fz.shard_tensor(fz.train_step(lambda p, x: apply(p, x), fz.sgd(0.1)), plan)
        return step.forward(step.init(params), x)

    for out in run_ranks(lambda rank: rank_main(rank, (INNER, INNER)), 2):
        assert_trees_close(out, apply(dict(params), x), rtol=1e-10)
    with pytest.raises(RankError, match="takes them apart"):
        run_ranks(lambda rank: rank_main(rank, (2 * INNER,)), 2)


# ---- what units do to pieces


class Unit(nn.Module):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self.norm, self.code = nn.LayerNorm(WIDTH), code
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor, kept: dict[str, Any]) -> Any:
        x = self.code(x, kept)
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Units(nn.Module):
    def __init__(self, code: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Unit(code) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: dict[str, Any] = {}
        for block in self.blocks:
            kept["x"] = x * 1
            x = block(x, kept) * kept["x"].tanh()
        return x


def returns_it(x: Any, kept: Any) -> Any:
    return kept["x"]


def writes(x: Any, kept: Any) -> Any:
    x.mul_(2)
    return x * 1


def sets(x: Any, kept: Any) -> Any:
    x.scale = 2
    return x


@in_turns(4)
@pytest.mark.parametrize("code", [returns_it, writes, sets])
def test_what_units_do_to_their_arguments(code: Any) -> None:
    torch.manual_seed(0)
    apply, params = fz.functional(Units(code).to(F64))
    x = torch.randn(2, 5, WIDTH, dtype=F64)
    loss = lambda p: apply(p, x * 1).square().mean()
    run = functools.partial(tensor_vjps, loss, params, PLAN, zero3=True, sequence=True)
    refused = {writes: "writes to an input in place", sets: "sets an attribute on a tensor|with an attribute 'scale'"}
    if code in refused:
        with pytest.raises(RankError, match=refused[code]):
            run()
    else:
        need_equal(loss, params, run())


class Heads(nn.Module):
    """Attention by any function, whose output is scaled head by head by what is whole."""

    def __init__(self, attend: Any, keys: int) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 2 * keys), nn.Linear(WIDTH, 2 * keys)
        self.out, self.scale, self.attend = nn.Linear(8, WIDTH), nn.Parameter(torch.tensor([0.5, 2.0])), attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = [layer(x).unflatten(-1, (-1, 2)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return self.out((self.attend(q, k, v) * self.scale).transpose(1, 2).flatten(2))


class OneHeadEach(nn.Module):
    """Heads as einops takes them apart, which keeps what it computed of a shape: one head is each rank's."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = einops.rearrange(self.q(x), "n (h d) -> h n d", d=4)
        return self.out(einops.rearrange(heads.softmax(1), "h n d -> n (h d)"))


def test_einops_knows_the_shape_of_a_slice_already() -> None:
    torch.manual_seed(0)
    einops.rearrange(torch.zeros(5, 4), "n (h d) -> h n d", d=4)  # as large as a rank's slice
    einops.rearrange(torch.zeros(1, 5, 4), "h n d -> n (h d)")
    apply, params = fz.functional(OneHeadEach().to(F64))
    x = torch.randn(5, WIDTH, dtype=F64)
    loss = lambda p: apply(p, x).square().mean()
    need_equal(loss, params, tensor_vjps(loss, params, {"q": "column", "out": "row"}))


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


ATTENTIONS: dict[str, Callable[[Any], Any]] = {
    "torch": lambda ax: torchs,
    "attention": lambda ax: fz.parallel.attention,
    "ring": fz.parallel.ring,
    "ulysses": lambda ax: fz.parallel.ulysses(None, ax),
    "composed": lambda ax: fz.parallel.ulysses(torchs, ax),
}


@in_turns(13)
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("cut", [False, True])
def test_attention_of_slices_of_heads(name: str, keys: int, cut: bool) -> None:
    """Equal where keys are cut as queries are, or all go with the one head, but by a function of one's own."""
    torch.manual_seed(0)
    x, plain = torch.randn(1, 5, WIDTH, dtype=F64), Heads(torchs, keys).to(F64)
    apply, params = fz.functional(plain)
    want = torch.func.grad(lambda p: apply(p, x).square().mean())(dict(params))
    plan = {each: "column" for each in ("qkv" if cut else "q")} | {"out": "row"}

    def rank_main(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("sp", "tp"))
        own, _ = fz.functional(Heads(ATTENTIONS[name](fz.parallel.axis(mesh, "sp")), keys).to(F64))
        step = fz.shard_tensor(fz.train_step(lambda p: own(p, x).square().mean(), fz.sgd(0.1)), plan, mesh=mesh)
        state = step.init(params)
        runs = [step.vjp(state) for _ in range(2)]
        return [dict(fz.gather(pullback(torch.ones((), dtype=F64))[0])) for _, pullback in runs]

    if keys == 1 and cut:
        return  # less than a head for each rank
    if (keys > 1 and not cut) or name == "composed":  # any function's heads are not known to stay apart
        with pytest.raises(RankError, match=r"outputs of module 'q' are cut|4 (KV )?heads|[Nn]umber of heads"):
            run_ranks(rank_main, 2)
        return
    for found in itertools.chain.from_iterable(run_ranks(rank_main, 2)):
        assert_trees_close(found, want, rtol=1e-10, atol=1e-12)
