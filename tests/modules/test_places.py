"""fz.functional and fz.unit on what users bring: attention, ties, outputs of any kind, checkpointing."""

from __future__ import annotations

import collections
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from drawn.prelude import Cube
from huggingface_models import llama
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.modules.places import Absent
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def check(fn: Any, params: Any, x: torch.Tensor, forms: tuple[bool, ...] = (False, True)) -> None:
    """Three pullbacks of one graph at every stage, in both forms, on two ranks, against torch.func.grad."""
    want = torch.func.grad(fn)(params, x)

    def rank_main(rank: int) -> None:
        for shard in SHARDS.values():
            for remat in forms:
                step = shard(fz.train_step(fn, fz.sgd(0.1)))
                step = fz.remat(step) if remat else step
                out, pullback = step.vjp(step.init(params), x)
                for _ in range(3):
                    grads, _ = pullback(torch.ones_like(out), retain_graph=True)
                assert_trees_close(fz.gather(grads), want, rtol=1e-9)

    run_ranks(rank_main, 2)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            out = block(x)
            x = out[0] if isinstance(out, tuple) else out
        return x.square().mean()


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


def tied() -> list[nn.Module]:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    return [first, second]


BLOCKS: dict[str, Any] = {
    "attention": lambda: [SelfAttention() for _ in range(2)],
    "encoder layer": lambda: [nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for _ in range(2)],
    "tied across units": tied,
}


@in_turns(7)
@pytest.mark.parametrize("name", sorted(BLOCKS))
def test_modules(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Stack(BLOCKS[name]()).double()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    apply, params = fz.functional(module)
    check(lambda p, x: apply(p, x), params, draw(2, 4, 8))
    assert_trees_close(dict(module.state_dict()), before, rtol=0.0)


PARAMS = {"blocks": [{"w": draw(3, 3, seed=i), "s": draw(seed=9 + i)} for i in range(3)]}
inner = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))


BODIES: dict[str, Any] = {
    "a unit in a unit": lambda q, x: inner(q, x) * q["s"],
    "the input itself": lambda q, x: x,
    "an expanded view": lambda q, x: q["s"].expand(4, 4),
    "detach": lambda q, x: (x @ q["w"]) * (x @ q["w"]).detach(),
    "not contiguous": lambda q, x: (x @ q["w"]).t(),
}


@in_turns(5)
@pytest.mark.parametrize("name", sorted(BODIES))
def test_bodies(name: str) -> None:
    unit, last = fz.unit(BODIES[name]), fz.unit(lambda q: q["s"] * 2)
    check(lambda p, x: (unit(p["blocks"][0], x) * last(p["blocks"][1])).sum(), PARAMS, draw(2, 3))


def test_a_unit_with_the_params_of_two() -> None:
    unit = fz.unit(lambda q, r, x: x @ q["w"] @ r["w"])
    check(lambda p, x: unit(p["blocks"][0], p["blocks"][1], x).sum(), PARAMS, draw(2, 3))


def test_named_tuples_have_their_fields_as_paths() -> None:
    pair = collections.namedtuple("pair", "a b")
    params = pair(draw(3, 3), {"z": draw(seed=1)})
    check(lambda p, x: (x @ p.a * p.b["z"]).sum(), params, draw(2, 3))
    step = fz.train_step(lambda p, x: x, fz.sgd(0.1))
    assert [row.path for row in fz.plan(step, params).rows] == ["a", "b.z"]


class OldStyle(torch.autograd.Function):
    """Without setup_context, which functorch refuses."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return cotangent * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("inside", ["checkpoint", "an old-style Function"])
def test_what_functorch_refuses_works_inside_a_unit(inside: str) -> None:
    """At every stage and in both forms, with the same dropout as without it."""

    def make(special: bool) -> Any:
        def body(q: Any, x: torch.Tensor) -> torch.Tensor:
            h = torch.dropout(x @ q["w"], 0.5, True)
            if not special:
                return h.sin()
            if inside == "checkpoint":
                return torch.utils.checkpoint.checkpoint(torch.sin, h, use_reentrant=False)  # type: ignore[return-value]
            return OldStyle.apply(h)  # type: ignore[return-value]

        unit = fz.unit(body)

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            for q in p["blocks"]:
                x = unit(q, x)
            return x.sum()

        return fn

    def rank_main(rank: int) -> Any:
        def grads(special: bool, stage: int, remat: bool) -> Any:
            step = SHARDS[stage](fz.train_step(make(special), fz.sgd(0.1)))
            step = fz.remat(step) if remat else step
            out, pullback = step.vjp(step.init(PARAMS), draw(4, 3))
            return fz.gather(pullback(torch.ones_like(out))[0])

        want = grads(False, 3, False)
        for stage in SHARDS:
            for remat in (False, True):
                assert_trees_close(grads(True, stage, remat), want, rtol=1e-10)

    run_ranks(rank_main, 1)  # on threads, ranks would share the generator that dropout draws from


# ---- Hugging Face


@in_turns(2, "a model's cache")
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_go_through_a_models_cache(remat: bool) -> None:
    """What the units write to the cache that they are given leaves them with their outputs, once also under remat."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        apply, params = fz.functional(llama(2, False).double())
    tokens = torch.arange(12).reshape(2, 6)

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        out = apply(p, input_ids=x, labels=x)
        cache = out.past_key_values
        assert cache.get_seq_length() == 6
        return out.loss + sum(layer.keys.square().mean() for layer in cache.layers)

    check(fn, params, tokens, (remat,))


class Reading(nn.Module):
    """The parent reads a weight of its block inside a custom Function, or where no gradient is recorded."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks, self.how = nn.ModuleList([nn.Linear(2, 2)]), how

    def forward(self, x: torch.Tensor) -> Any:
        weight: Any = self.blocks[0].weight
        x = self.blocks[0](x)
        if self.how == "constant":
            weight = weight.detach()
            with torch.no_grad():
                norm = weight.norm()
            return x.sum() * norm
        return (x @ Cube.apply(weight * 1 if self.how == "times one" else weight)).sum()  # type: ignore[operator]


@pytest.mark.parametrize("verb", ["vjp", "tape"])
@pytest.mark.parametrize("how", ["directly", "times one", "constant"])
def test_a_weight_inside_a_custom_function(how: str, verb: str) -> None:
    apply, params = fz.functional(Reading(how))
    step = fz.remat(fz.train_step(apply, fz.sgd(0.1)))
    state, x = step.init(params), torch.ones(1, 2)

    def grads() -> Any:
        if verb == "vjp":
            return step.vjp(state, x)[1](torch.ones(()))[0]
        with fz.tape(step, state) as model:
            model(x).backward()
            return model.grads()

    if how == "directly":  # plain autograd does not say what a Function is given
        with pytest.raises(fz.HandleError, match=r"read inside a torch\.autograd\.Function.*leaf 'blocks\.0\.weight'"):
            grads()
    else:
        want = torch.func.grad(lambda p: torch.func.functional_call(Reading(how), p, (x,)))(dict(params))
        assert_trees_close(dict(fz.gather(grads())), want, rtol=1e-5)


def test_what_stands_for_a_param_is_pickled() -> None:
    absent = Absent.like(draw(2, 3), path="blocks.0.weight")
    again = pickle.loads(pickle.dumps([absent, absent]))
    assert again[0] is again[1] and type(again[0]) is Absent and repr(again[0]) == repr(absent)
    with pytest.raises(RuntimeError, match=r"Leaf 'blocks.0.weight' of a module is read, by 'sin'"):
        again[0].sin()
