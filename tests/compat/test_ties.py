"""Tied leaves in torch's checkpoints and in safetensors: any of their names will do, two that disagree are refused."""

from __future__ import annotations

import functools
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group
TOKENS = torch.arange(12).view(2, 6) % 7
STAGES: Any = (lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)


class Tied(nn.Module):
    """An embedding that is the head, too, and a third weight of some modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[1].bias = self.blocks[2].bias = self.blocks[0].bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.tanh(block(h))
        return self.head(h)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "tied":
        return Tied().double()
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = {
        "gpt2": lambda: transformers.GPT2Config(vocab_size=7, n_embd=8, n_layer=2, n_head=2, n_positions=8),
        "llama": lambda: transformers.LlamaConfig(**sizes, intermediate_size=8, tie_word_embeddings=True),
    }[kind]()
    return transformers.AutoModelForCausalLM.from_config(config).eval().double()


def loss_of(out: Any) -> torch.Tensor:
    return getattr(out, "logits", out).square().mean()


def trained(kind: str, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    module = made(kind)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of(module(TOKENS)).backward()
        optimizer.step()
    return module, optimizer


def states(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))


def step_of(apply: Any, stage: int) -> Any:
    return STAGES[stage](fz.train_step(lambda p, x: loss_of(apply(p, x)), fz.adamw(1e-2)))


def one_more_step(rank: int, kind: str, stage: int, folder: str) -> dict[str, torch.Tensor]:
    """Loads what torch has saved, takes a step, and saves it for torch."""
    apply, params = fz.functional(made(kind))
    step = step_of(apply, stage)
    state, _ = step(fz.compat.load_dcp(f"{folder}/in", step, like=params), TOKENS)
    fz.compat.save_dcp(f"{folder}/out", state)
    for like in (params, None):  # with what is tied by the module's word, and by that of the checkpoint
        again = fz.compat.load_dcp(f"{folder}/out", step, like=like)
        assert_trees_equal(dict(fz.gather(again.params)), dict(fz.gather(state.params)))
        assert_trees_equal(dict(fz.gather(again.moments.nu)), dict(fz.gather(state.moments.nu)))
    return dict(fz.gather(state.params))


@in_turns(4)
@pytest.mark.parametrize(
    ("kind", "ranks", "stage", "backend"),
    [("tied", 1, 0, "threads"), ("tied", 2, 3, "processes"), ("gpt2", 3, 3, "threads"), ("llama", 4, 1, "threads")],
)
def test_from_torch_and_back(tmp_path: Path, kind: str, ranks: int, stage: int, backend: Any) -> None:
    dcp.save(states(*trained(kind, 3)), checkpoint_id=tmp_path / "in", no_dist=True)
    job = functools.partial(one_more_step, kind=kind, stage=stage, folder=str(tmp_path))
    params = run_ranks(job, ranks, backend=backend)[0]
    module = made(kind)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-2)
    into = states(module, optimizer)
    planner = DefaultLoadPlanner(allow_partial_load=True)  # as for `optim.param_groups`
    dcp.load(into, checkpoint_id=tmp_path / "out", planner=planner, no_dist=True)
    there = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {f"model.{name}" for name in into["model"]} <= there.keys()
    set_state_dict(module, optimizer, model_state_dict=into["model"], optim_state_dict=into["optim"])
    assert_trees_equal({name: p.detach() for name, p in module.named_parameters()}, params)
    optimizer.zero_grad()
    loss_of(module(TOKENS)).backward()
    optimizer.step()
    further, _ = trained(kind, 5)
    assert_trees_close(dict(module.state_dict()), dict(further.state_dict()), rtol=1e-10, atol=1e-10)


NAMES = (("embed.weight", "head.weight"), ("blocks.0.bias", "blocks.1.bias", "blocks.2.bias"))
KEPT = st.tuples(*[st.sets(st.sampled_from(names), min_size=1) for names in NAMES])


def write(form: str, folder: str, tensors: dict[str, torch.Tensor]) -> None:
    if form == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    else:
        save_file({name: x.clone() for name, x in tensors.items()}, f"{folder}/model.safetensors")


def read(form: str, folder: str, step: Any, **options: Any) -> fz.TrainState:
    if form == "dcp":
        return fz.compat.load_dcp(folder, step, optim=None, **options)
    return fz.load_safetensors(step, folder, **options)


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
@given(KEPT, st.integers(1, 4), st.sampled_from([0, 3]), st.data())
def test_any_names_will_do_and_those_that_disagree_are_refused(
    form: str, kept: tuple[set[str], ...], ranks: int, stage: int, data: Any
) -> None:
    module = made("tied")
    gone = {name for names, own in zip(NAMES, kept, strict=True) for name in names if name not in own}
    tensors = {name: x.detach() for name, x in module.state_dict().items() if name not in gone}
    wrong = data.draw(st.sampled_from([None, *(name for own in kept if len(own) > 1 for name in sorted(own))]))
    if wrong is not None:
        change = data.draw(st.sampled_from(["value", "dtype", "shape"]))
        own = tensors[wrong] = tensors[wrong].clone()
        if change == "value":
            own.view(-1)[data.draw(st.integers(0, own.numel() - 1))] += 1
        else:
            tensors[wrong] = own.float() if change == "dtype" else own.view(-1)[:-1].clone()
    apply, params = fz.functional(module)
    nested = data.draw(st.booleans())
    like = {"net": params} if nested else params
    if nested:
        tensors = {f"net.{name}": x for name, x in tensors.items()}
    lenient = data.draw(st.booleans())

    def rank_main(rank: int) -> Any:
        step = step_of(apply, stage)
        if wrong is None:
            return fz.gather(read(form, folder, step, like=like).params)
        leaf = next(names[0] for names in NAMES if wrong in names)
        with pytest.raises(ValueError, match=rf"leaf '(net\.)?{leaf}' is tied, and got .* by its names .*{wrong}"):
            read(form, folder, step, like=like, lenient=lenient)
        return None

    with TemporaryDirectory() as folder:
        write(form, folder, tensors)
        found = run_ranks(rank_main, ranks)[0]
        if wrong is None:
            assert_trees_equal(dict(found["net"] if nested else found), dict(params))


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
@pytest.mark.parametrize("element", [0, 17, 34])
def test_any_element_of_two_names_may_disagree(form: str, element: int, tmp_path: Path) -> None:
    """Each rank compares some of them, and all are told."""
    module = made("tied")
    tensors = {name: x.detach().clone() for name, x in module.state_dict().items()}
    tensors["head.weight"].view(-1)[element] += 1e-9
    write(form, str(tmp_path), tensors)
    apply, params = fz.functional(module)

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"'embed.weight' is tied, and got different values by its names"):
            read(form, str(tmp_path), fz.shard_zero3(step_of(apply, 0)), like=params, lenient=True)
        found = read(form, str(tmp_path), fz.shard_zero3(step_of(apply, 0)), like=params, pattern="blocks*")
        assert_trees_equal(dict(fz.gather(found.params)), dict(params))  # one that is not read is not compared

    run_ranks(rank_main, 3)


@pytest.mark.parametrize("form", ["dcp", "safetensors"])
def test_what_is_no_tie_is_as_strict_as_before(form: str, tmp_path: Path) -> None:
    module = made("tied")
    apply, params = fz.functional(module)
    tensors = {name: x.detach() for name, x in module.state_dict().items()}
    step = step_of(apply, 0)
    write(form, str(tmp_path), {**tensors, "more.weight": torch.ones(7, 5)})
    with pytest.raises(ValueError, match=r"leaf 'more.weight' .* is there, and not in like"):
        read(form, str(tmp_path), step, like=params)
    untied = params | {"head.weight": torch.zeros(7, 5).double()}  # a leaf of its own by a name that was a further one
    tensors["head.weight"] = torch.ones(7, 5).double()
    write(form, str(tmp_path), tensors)
    found = read(form, str(tmp_path), step, like=untied)
    assert_trees_equal(dict(fz.gather(found.params)), {**params, "head.weight": tensors["head.weight"]})
    if form == "dcp":
        fz.compat.save_dcp(tmp_path / "out", found, optim=None)
        again = read(form, str(tmp_path / "out"), step, like=untied)
        assert_trees_equal(dict(fz.gather(again.params)), dict(fz.gather(found.params)))


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, lambda params: torch.optim.SGD(params, 1e-2, momentum=0.9)])
def test_moments_of_one_name_ask_for_the_params_that_know_the_others(optimizer: Any, tmp_path: Path) -> None:
    module, _ = trained("tied", 0)
    own = optimizer(module.parameters())
    loss_of(module(TOKENS)).backward()
    own.step()
    dcp.save(states(module, own), checkpoint_id=tmp_path, no_dist=True)
    apply, params = fz.functional(module)
    rule = fz.sgd(1e-2, momentum=0.9) if isinstance(own, torch.optim.SGD) else fz.adamw(1e-2)
    step = fz.train_step(lambda p, x: loss_of(apply(p, x)), rule)
    with pytest.raises(ValueError, match="is tied to another leaf, give the model's params as like="):
        fz.compat.load_dcp(tmp_path, step)
    fz.compat.load_dcp(tmp_path, step, like=params)


def test_names_of_a_file_that_know_no_further_names(tmp_path: Path) -> None:
    apply, params = fz.functional(made("tied"))
    step, known = step_of(apply, 0), {name: f"m/{name}" for name in params}
    write("safetensors", str(tmp_path), {known[name]: x for name, x in params.items()})
    found = fz.load_safetensors(step, tmp_path, like=params, names=known.__getitem__)
    assert_trees_equal(dict(fz.gather(found.params)), dict(params))
    write("safetensors", str(tmp_path), {f"m/{name}": x.detach() for name, x in made("tied").state_dict().items()})
    found = fz.load_safetensors(step, tmp_path, like=params, names=lambda path: f"m/{path}")
    assert_trees_equal(dict(fz.gather(found.params)), dict(params))
