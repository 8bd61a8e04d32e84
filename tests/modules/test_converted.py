"""Modules whose leaves fz.shard_tensor cuts, against one process: drawn models, plans, meshes and transforms."""

from __future__ import annotations

import functools
from typing import Any

import exactness
import pytest
import torch
import torch.nn.functional as F
import zoo
from hypothesis import given
from hypothesis import strategies as st
from reference import adamw_steps
from torch import nn

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
MESHES = ((1, 2), (2, 2), (1, 3), (1, 4), (1, 1))  # data, tensor
EPS = 1e-3  # of AdamW: a gradient that is zero but for rounding makes no step


def meshed(sizes: tuple[int, int]) -> Any:
    return torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))


def step_of(loss: Any, sizes: tuple[int, int], stage: int, plan: Any, remat: bool) -> fz.Step:
    mesh = meshed(sizes)
    step = fz.train_step(loss, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2, eps=EPS, weight_decay=0.01)))
    step = exactness.SHARDS[stage](step, **({"mesh": mesh} if stage else {}))
    step = fz.shard_tensor(step, plan, mesh=mesh)
    return fz.remat(step) if remat else step


def train(rank: int, functions: Any, batches: Any, sizes: tuple[int, int], stage: int, plan: Any, remat: bool) -> Any:
    loss, params = functions
    step = step_of(loss, sizes, stage, plan, remat)
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
    **run: Any,
) -> None:
    loss, params = functions
    want, losses, norms = adamw_steps(loss, dict(params), batches, 3, eps=EPS, max_norm=0.5)
    fn = functools.partial(
        train, functions=functions, batches=batches, sizes=sizes, stage=stage, plan=plan, remat=remat
    )
    for params, seen in run_ranks(fn, sizes[0] * sizes[1], **run):
        assert_trees_close(params, want, rtol=near, atol=near / 100)
        assert torch.allclose(torch.tensor(seen[::2]), torch.tensor(losses), rtol=near, atol=0)
        assert torch.allclose(torch.tensor(seen[1::2]), torch.tensor(norms), rtol=near, atol=0)


drawn_blocks = st.lists(
    st.tuples(st.sampled_from(sorted(zoo.KINDS)), st.integers(1, 7), st.booleans()), min_size=1, max_size=3
).map(tuple)


@pytest.mark.usefixtures("hazards")
@given(
    blocks=drawn_blocks,
    tied=st.booleans(),
    chosen=st.lists(st.booleans(), min_size=3, max_size=3),
    embedding=st.sampled_from(["vocabulary", "column", "column_gather", None]),
    sizes=st.sampled_from(MESHES),
    stage=st.integers(0, 3),
    remat=st.booleans(),
)
def test_drawn_models(
    blocks: Any,
    tied: bool,
    chosen: list[bool],
    embedding: str | None,
    sizes: tuple[int, int],
    stage: int,
    remat: bool,
) -> None:
    model = zoo.made(blocks, tied)
    plan = {**model.plan(chosen), **({"head": "column_gather"} if not tied else {})}
    if embedding == "column":
        embedding = "column_gather"
    if embedding is not None:
        plan["embedding"] = embedding
    if not plan:
        plan["head"] = "column_gather"
    apply, params = fz.functional(model)
    sizes = sizes if stage else (1, sizes[1])
    check((zoo.loss_of(apply), params), zoo.batches(sizes[0]), sizes, stage, plan, remat)


def test_drawn_models_on_real_processes() -> None:
    model = zoo.made((("Attention", 1, True), ("Mlp", 5, True), ("Fused", 3, False)), True)
    plan = {**model.plan([True] * 3), "embedding": "vocabulary"}
    apply, params = fz.functional(model)
    check((zoo.loss_of(apply), params), zoo.batches(2), (2, 2), 3, plan, True, backend="processes")


# ---- models of Hugging Face, by their own plans


def llama(keys: int, tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=11,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=keys,
        tie_word_embeddings=tied,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def mixtral() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=3,
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._experts_implementation = "eager"
    return transformers.MixtralForCausalLM(config)


def vit() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=10,
        image_size=8,
        patch_size=4,
        num_labels=5,
    )
    return transformers.ViTForImageClassification(config)


VIT = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.fc1": "column",
    "*.fc2": "row",
    "*.projection": "column_gather",
    "classifier": "column_gather",
}
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


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize(("sizes", "stage", "remat"), [((1, 3), 0, False), ((2, 2), 3, True), ((1, 4), 3, False)])
def test_models_of_hugging_face(name: str, sizes: tuple[int, int], stage: int, remat: bool) -> None:
    near = 1e-10 if name == "vit" else 1e-6  # the others' norms and routers compute in float32
    check(model_of(name), batches_of(name, sizes[0]), sizes, stage, MODELS[name][1], remat, near)
