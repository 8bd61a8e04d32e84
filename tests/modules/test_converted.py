"""Modules whose leaves fz.shard_tensor cuts, against one process: drawn models, plans, meshes and transforms."""

from __future__ import annotations

import functools
from typing import Any

import exactness
import pytest
import torch
import torch.nn.functional as F
import zoo
from huggingface_models import VIT, llama, mixtral, small, vit
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY, by_turns, in_turns
from reference import adamw_steps
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
MESHES = ((1, 2), (2, 2), (1, 3), (1, 4), (1, 1))  # data, tensor
EPS = 1e-3  # of AdamW: a gradient that is zero but for rounding makes no step


def meshed(sizes: tuple[int, int]) -> Any:
    return torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def step_of(loss: Any, sizes: tuple[int, int], stage: int, plan: Any, remat: bool, sequence: bool) -> fz.Step:
    mesh = meshed(sizes)
    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2, eps=EPS, weight_decay=0.01)))
    step = exactness.SHARDS[stage](step, **({"mesh": mesh} if stage else {}))
    step = fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence)
    return fz.remat(step) if remat else step


def train(
    functions: Any, batches: Any, sizes: tuple[int, int], stage: int, plan: Any, remat: bool, sequence: bool, rank: int
) -> Any:
    loss, params = functions
    step = step_of(loss, sizes, stage, plan, remat, sequence)
    state, seen = step.init(params), []
    for _ in range(3):
        state, metrics = step(state, *batches[rank // sizes[1]])
        seen += [metrics["loss"].item(), metrics["grad_norm"].item()]
    return dict(fz.gather(state.params)), seen


def check(
    functions: Any,
    batches: Any,
    sizes: tuple[int, int],
    stage: int,
    plan: Any,
    remat: bool,
    near: float = 1e-10,
    sequence: bool = False,
    **run: Any,
) -> None:
    loss, params = functions
    want, losses, norms = adamw_steps(loss, dict(params), batches, 3, eps=EPS, max_norm=0.5)
    fn = functools.partial(train, functions, batches, sizes, stage, plan, remat, sequence)
    for params, seen in run_ranks(fn, sizes[0] * sizes[1], **run):
        assert_trees_close(params, want, rtol=near, atol=near / 100)
        assert torch.allclose(torch.tensor(seen[::2]), torch.tensor(losses), rtol=near, atol=0)
        assert torch.allclose(torch.tensor(seen[1::2]), torch.tensor(norms), rtol=near, atol=0)


@pytest.mark.usefixtures("hazards")
@given(
    planned=zoo.planned(),
    sizes=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    remat=st.booleans(),
    sequence=st.booleans(),
)
def test_drawn_models(planned: Any, sizes: tuple[int, int], stage: int, remat: bool, sequence: bool) -> None:
    model, plan = planned
    apply, params = fz.functional(model)
    sizes = sizes if stage else (1, sizes[1])
    check((zoo.loss_of(apply), params), zoo.batches(sizes[0]), sizes, stage, plan, remat, sequence=sequence)


@in_turns(4)
@pytest.mark.parametrize("units", [None, ["model"]])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("sequence", [False, True])
def test_a_unit_around_apply(units: list[str] | None, stage: int, sequence: bool) -> None:
    """Inside a unit leaves are full tensors, of which the module has to know how they are cut all the same."""
    model = zoo.made((("Mlp", 5, True), ("Norm", 1, True)), False)
    apply, params = fz.functional(model)
    call = fz.unit(apply)

    def loss(params: Any, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return zoo.loss_of(call)({**params["model"]}, tokens, targets)

    batch = zoo.batches(1)[0]
    want: Any = torch.func.grad_and_value(loss)({"model": dict(params)}, *batch)

    def rank_main(rank: int) -> Any:
        mesh = meshed((1, 2))
        plan = {f"model.{name}": how for name, how in model.plan([True] * 2).items()}
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1), units=units), plan, mesh=mesh, sequence=sequence)
        step = exactness.SHARDS[stage](step, **({"mesh": mesh} if stage else {}))
        out, pullback = step.vjp(step.init({"model": params}), *batch)
        return out, fz.gather(pullback(torch.ones_like(out))[0])

    for out, grads in run_ranks(rank_main, 2):
        assert_trees_close((dict(grads["model"]), out), (want[0]["model"], want[1]), rtol=1e-10, atol=1e-14)


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # that the compiler itself looks at
@pytest.mark.parametrize("sequence", [False, True] if NIGHTLY else [True])
def test_compiled(sequence: bool) -> None:
    """What ranks exchange is left out of compiled code."""
    model = zoo.made((("Mlp", 5, True), ("Attention", 1, True)), True)
    apply, params = fz.functional(model)
    loss, batch = zoo.loss_of(apply), zoo.batches(1)[0]
    want = torch.func.grad(loss)(dict(params), *batch)
    plan = {**model.plan([True] * 2), "embedding": "vocabulary"}

    def rank_main(rank: int) -> Any:
        mesh = meshed((1, 2))
        step = fz.compile(fz.train_step(loss, fz.sgd(0.1), units=["blocks.*"]))
        step = fz.shard_zero3(fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence), mesh=mesh)
        state, found = step.init(params), []
        for _ in range(2):  # the first one is watched, and shows what units do with slices
            out, pullback = step.vjp(state, *batch)
            found.append(fz.gather(pullback(torch.ones_like(out))[0]))
        return found

    for found in run_ranks(rank_main, 2, timeout=200):
        for grads in found:
            assert_trees_close(dict(grads), want, rtol=1e-10, atol=1e-14)


# ---- models of Hugging Face, by their own plans


MODELS: dict[str, Any] = {
    "llama": (functools.partial(llama, 2, False), "auto"),
    "llama, tied": (functools.partial(llama, 2, True), "auto"),
    "llama, one head of keys": (functools.partial(llama, 1, False), "auto"),
    "mixtral": (mixtral, "auto"),
    "vit": (vit, VIT),
}


@functools.cache
def model_of(name: str) -> Any:
    torch.manual_seed(0)
    apply, params = fz.functional(MODELS[name][0]().to(F64).eval())

    def loss(params: Any, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(apply(params, x).logits.flatten(0, -2), targets.flatten())

    return loss, params


def batches_of(name: str, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        images = [torch.randn(2, 3, 8, 8, dtype=F64, generator=generator) for _ in range(count)]
        return [(image, torch.randint(0, 5, (2,), generator=generator)) for image in images]
    return [tuple(torch.randint(0, 17, (2, 2, 6), generator=generator)) for _ in range(count)]


OVER = [((1, 3), 0, False, True), ((2, 2), 3, True, False), ((2, 2), 3, True, True), ((1, 4), 3, False, False)]


@in_turns(7)
@pytest.mark.parametrize(("over", "name"), by_turns(OVER, MODELS, of=3))
def test_models_of_hugging_face(over: tuple[tuple[int, int], int, bool, bool], name: str) -> None:
    sizes, stage, remat, sequence = over
    near = 1e-10 if name == "vit" else 1e-6  # the others' norms and routers compute in float32
    check(model_of(name), batches_of(name, sizes[0]), sizes, stage, MODELS[name][1], remat, near, sequence=sequence)


@in_turns(3)
@pytest.mark.parametrize("units", [None, ["model.layers.*"], ["model"]])
def test_what_a_model_returns_besides_is_whole(units: list[str] | None) -> None:
    """Pieces of tokens in a model's output object, which is no pytree."""
    model = llama(2, True).to(F64).eval()
    apply, params = fz.functional(model)
    tokens = torch.randint(0, 17, (2, 7))
    want = model(tokens, output_hidden_states=True)

    def rank_main(rank: int) -> None:
        def fn(params: Any, tokens: torch.Tensor) -> Any:
            out = apply(params, tokens, output_hidden_states=True)
            return out.logits, tuple(out.hidden_states)

        step = fz.shard_tensor(fz.train_step(fn, fz.sgd(0.1), units=units), "auto", sequence=True)
        logits, hidden = step.forward(step.init(params), tokens)
        assert all(type(x) is torch.Tensor for x in (logits, *hidden))
        assert_trees_close((logits, hidden), (want.logits, tuple(want.hidden_states)), rtol=1e-6, atol=1e-8)

    run_ranks(rank_main, 2)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=17, n_positions=8, n_embd=16, n_layer=1, n_head=2, use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0
    )
    return transformers.GPT2LMHeadModel(config)


def qwen3() -> nn.Module:
    """With norms of heads, whose weights all ranks use for other heads."""
    return small("Qwen3ForCausalLM", intermediate_size=11, head_dim=4)


MODELS["gpt2"] = (gpt2, {"*.mlp.c_fc": "column", "*.mlp.c_proj": "row", "*.wte": "vocabulary"})
MODELS["qwen3"] = (qwen3, "auto")


@in_turns(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_weights_that_are_transposed_or_shared_by_heads(name: str) -> None:
    near = 1e-10 if name == "gpt2" else 1e-6
    check(model_of(name), batches_of(name, 1), (1, 3), 3, MODELS[name][1], True, near, sequence=True)


# ---- what is refused


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class ReadsTheWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.own.weight)


class Pairs(nn.Module):
    """A column whose outputs the next layer takes for whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.own(x, x, x)[0]


class Positions(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[: input.shape[-1]]


class NoPadding(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(4, 4, padding_idx=0)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.embedding(input, self.weight)


WRONG: dict[str, tuple[Any, Any, str]] = {
    "derived": (
        lambda: Scaled(4, 4),
        {"weight": 0, "bias": 0},
        "no conversions for what a Scaled with a forward of its",
    ),
    "read": (
        ReadsTheWeight,
        {"own": "column"},
        "Leaf 'own.weight' of a module is cut over axis 'tp'.* and is read other",
    ),
    "column, column": (
        Pairs,
        {"first": "column", "second": "column"},
        "module 'second', whose outputs .*expected 4 elem",
    ),
    "attention": (SelfAttention, {"own.in_proj_*": 0}, "no conversions for what a MultiheadAttention does"),
    "attention's output": (
        SelfAttention,
        {"own.out_proj": "column"},
        "Leaf 'own.out_proj.weight' .* is read other than",
    ),
    "groups": (lambda: nn.Conv1d(4, 4, 1, groups=2), {"weight": 0, "bias": 0}, "its convolution has 2 groups"),
    "kernel": (lambda: nn.Conv1d(4, 4, 2), {"weight": 2}, "dim 2 of its weight is no channel"),
    "channels": (lambda: nn.Conv1d(4, 1, 1), {"*": "column"}, "its 1 channels are fewer than the 2 ranks"),
    "bias": (lambda: nn.Linear(4, 4), {"weight": 1, "bias": 0}, "its bias is cut otherwise than its outputs"),
    "one rank": (
        Pairs,
        {"first": fz.parallel.cut("column", multiple=4), "second": fz.parallel.cut("row", multiple=4)},
        "one rank has all of its inputs",
    ),
    "max_norm": (lambda: nn.Embedding(4, 4, max_norm=1.0), {"weight": 0}, r"its embedding has max_norm=1\.0"),
    "positions": (Positions, {"weight": 0}, "Leaf 'weight' .* is read other than"),
    "no padding": (NoPadding, {"weight": 0}, "calls F.embedding with other options"),
    "norm": (lambda: nn.LayerNorm(4), {"weight": 0}, "no conversions for what a LayerNorm does"),
}


@pytest.mark.parametrize("name", sorted(WRONG))
def test_what_has_no_conversion_is_refused(name: str) -> None:
    make, plan, match = WRONG[name]
    model = make().to(F64)
    apply, params = fz.functional(model)
    embeds = isinstance(model, nn.Embedding)
    x = torch.tensor([[1, 2]]) if embeds else torch.ones(2, 4, 4, dtype=F64)

    def rank_main(rank: int) -> None:
        step = fz.shard_tensor(fz.train_step(lambda p, x: apply(p, x).sum(), fz.sgd(0.1)), plan)
        state = step.init(params)
        with pytest.raises((ValueError, RuntimeError), match=match):
            step(state, x)

    run_ranks(rank_main, 2)


def test_params_that_are_computed_from_slices_are_refused() -> None:
    apply, params = fz.functional(nn.Linear(4, 4).to(F64))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return apply({name: leaf * 1 for name, leaf in p.items()}, x).sum()

    def rank_main(rank: int) -> None:
        step = fz.shard_tensor(fz.train_step(loss, fz.sgd(0.1)), {"*": "column"})
        with pytest.raises(ValueError, match=r"param 'weight' has shape \(2, 4\), and the module's \(4, 4\)"):
            step(step.init(params), torch.ones(2, 4, dtype=F64))

    run_ranks(rank_main, 2)


def test_fewer_heads_than_ranks_are_refused() -> None:
    model = zoo.made((("Attention", 2, False),), True)  # with 3 heads of keys

    def rank_main(rank: int) -> None:
        plan = model.plan([True])
        apply, params = fz.functional(model)
        step = fz.shard_tensor(fz.train_step(zoo.loss_of(apply), fz.sgd(0.1)), plan)
        step(step.init(params), *zoo.batches(1)[0])

    run_ranks(rank_main, 4)  # 6 of queries are enough
    few = zoo.Attention(2, False)
    few.q_proj, few.k_proj, few.v_proj = (nn.Linear(zoo.WIDTH, 2) for _ in range(3))
    few.out, few.num_key_value_groups = nn.Linear(2, zoo.WIDTH), 1
    apply, params = fz.functional(few)

    def refused(rank: int) -> None:
        plan = {"?_proj": "column", "out": "row"}
        step = fz.shard_tensor(fz.train_step(lambda p, x: apply(p, x).sum(), fz.sgd(0.1)), plan)
        with pytest.raises(ValueError, match="its 1 heads are fewer than the 2 ranks"):
            step(step.init(params), torch.ones(1, 3, zoo.WIDTH))

    run_ranks(refused, 2)
