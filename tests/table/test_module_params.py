"""What is known of a module travels with its params: what has requires_grad=False is frozen, wherever they are used."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from nightly import in_turns
from torch import nn

import fzero as fz
from fzero.base import pytree
from fzero.table.module_params import ModuleParams
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


class Blocks(nn.Module):
    """Two blocks, the first of them frozen, and a frozen gain beside a trained one."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.gain, self.shift = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(4))
        self.double()
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator, dtype=F64))
        self.blocks[0].requires_grad_(False)
        self.gain.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.gain + self.shift).square().mean()


FROZEN = {"blocks.0.weight", "blocks.0.bias", "gain"}


def data(seed: int = 5) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed), dtype=F64)


def trained_by_torch(module: nn.Module, steps: int, lr: float) -> dict[str, torch.Tensor]:
    module = copy.deepcopy(module)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=lr, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        module(data()).backward()
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


@in_turns(3)
@pytest.mark.parametrize("transform", ["none", "fuse_update", "remat", "accumulate", "donate", "freeze"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_params_with_requires_grad_false_are_frozen(stage: int, transform: str) -> None:
    """They keep their bits, the others are those of plain torch, and neither grads nor moments of them exist."""
    module = Blocks()
    apply, params = fz.functional(module)
    transforms: dict[str, Callable[[fz.Step], fz.Step]] = {
        "none": lambda step: step,
        "fuse_update": fz.fuse_update,
        "remat": fz.remat,
        "accumulate": lambda step: fz.accumulate(step, 3),
        "donate": fz.donate,
        "freeze": lambda step: fz.freeze(step, "blocks.0.*"),  # said twice
    }
    want = trained_by_torch(module, 3, 0.1)

    def rank_main(rank: int) -> None:
        step = transforms[transform](SHARDS[stage](fz.train_step(apply, fz.adamw(0.1, weight_decay=0.1))))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, data())
        after = fz.gather(state.params)
        assert_trees_close(dict(after), want, rtol=1e-10)
        for name in FROZEN:
            assert torch.equal(after[name], params[name])
            with pytest.raises(KeyError, match="frozen"):
                state.moments.mu[name]
        assert after.frozen == tuple(sorted(FROZEN))

    run_ranks(rank_main, 2 if stage else 1)


def test_two_modules_in_one_tree() -> None:
    vision, text = Blocks(1), Blocks(2).requires_grad_(True)
    see, vision_params = fz.functional(vision)
    read, text_params = fz.functional(text)
    params = {"text": text_params, "vision": vision_params, "scale": torch.ones((), dtype=F64)}

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return see(p["vision"], x) * p["scale"] + read(p["text"], x)

    want = torch.func.grad(loss)(params, data())

    def rank_main(rank: int) -> None:
        for shard in SHARDS.values():
            step = shard(fz.train_step(loss, fz.sgd(0.1)))
            rows = fz.plan(step, params).rows
            assert {row.path for row in rows if row.frozen} == {f"vision.{name}" for name in FROZEN}
            out, pullback = step.vjp(step.init(params), data())
            grads = fz.gather(pullback(torch.ones_like(out))[0])
            for name in FROZEN:
                assert grads["vision"].pop(name) is None
                want["vision"].pop(name, None)
            assert_trees_close(grads, want, rtol=1e-10)

    run_ranks(rank_main, 2)


def test_the_plan_shows_them() -> None:
    apply, params = fz.functional(Blocks())
    text = str(fz.plan(fz.shard_zero3(fz.train_step(apply, fz.adamw(0.1))), params, world_size=4))
    assert "frozen, as their module has requires_grad=False: blocks.0.bias, blocks.0.weight, gain" in text
    assert sum(line.endswith("frozen") for line in text.splitlines()) == 3


def test_a_converted_state_keeps_them_frozen() -> None:
    apply, params = fz.functional(Blocks())
    plain = fz.train_step(apply, fz.adamw(0.1))

    def rank_main(rank: int) -> None:
        state, _ = plain(plain.init(params), data())
        for policy in (None, fz.Policy(moment=torch.float32)):
            step = fz.shard_zero3(fz.train_step(apply, fz.adamw(0.1), policy))
            moved = fz.convert(state, step, lossy=True)
            assert {row.path for row in moved.layout.rows if row.frozen} == FROZEN
            step(moved, data())

    run_ranks(rank_main, 2)


def test_with_fn_partition_and_per_example_grads() -> None:
    apply, params = fz.functional(Blocks())
    step = fz.train_step(apply, fz.partition({"blocks.0.*": fz.sgd(1.0), "gain|shift": fz.sgd(0.5), "*": fz.sgd(0.1)}))
    state = step.init(params)
    grads = fz.per_example_grads(step, state, data())
    assert {name for name, grad in grads.items() if grad is None} == FROZEN
    double = fz.with_fn(step, lambda p, x: 2 * apply(p, x))
    state, metrics = double(state, data())
    assert torch.equal(fz.gather(state.params)["gain"], params["gain"]) and metrics["grad_norm"] > 0


def test_a_module_that_trains_nothing_is_a_fixed_component() -> None:
    """As under fz.freeze(step, "*"): its input cotangents still flow, its update changes nothing."""
    apply, params = fz.functional(Blocks().requires_grad_(False))
    step = fz.train_step(apply, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(0.1)))
    state = step.init(params)
    after, metrics = step(state, data())
    assert metrics["grad_norm"] == 0 and fz.global_norm(step.vjp(state, data())[1](torch.ones((), dtype=F64))[1]) > 0
    assert_trees_equal(fz.gather(after.params), params)
    with pytest.raises(ValueError, match="every leaf is frozen"):
        fz.per_example_grads(step, state, data())


LOST: dict[str, Callable[[Any], Any]] = {
    "dict": lambda p: dict(p),
    "a comprehension": lambda p: {name: leaf.float() for name, leaf in p.items()},
    "unpacked": lambda p: {**p},
}
USED: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda apply: apply,
    "cast in the function": lambda apply: lambda p, x: apply({k: v * 1 for k, v in p.items()}, x),
    "in a unit": lambda apply: fz.unit(lambda p, x: apply(p, x)),
}


@pytest.mark.parametrize("used", sorted(USED))
@pytest.mark.parametrize("how", sorted(LOST))
def test_lost_on_the_way_is_refused(how: str, used: str) -> None:
    apply, params = fz.functional(Blocks())
    lost = LOST[how](params)
    x = data().to(lost["gain"].dtype)
    fn = USED[used](apply)

    def rank_main(rank: int) -> None:
        for shard, remat in [(SHARDS[0], False), (SHARDS[0], True), (SHARDS[1], False), (SHARDS[3], True)]:
            units = () if used != "as it is" else None
            step = shard(fz.train_step(fn, fz.sgd(0.1), units=units))
            step = fz.remat(step) if remat else step
            for run in (step.vjp, step, lambda state, x, step=step: fz.per_example_grads(step, state, x)):
                with pytest.raises(ValueError, match=r"the step trains leaf '.*', but '.*requires_grad=False.*freeze"):
                    run(step.init(lost), x)
            mended = fz.freeze(step, "|".join(FROZEN))
            mended(mended.init(lost), x)

    run_ranks(rank_main, 1)


def test_what_the_function_computes_for_a_frozen_name_is_trained() -> None:
    """Low-rank factors over a frozen weight: the sum stands where the weight stood."""
    apply, params = fz.functional(Blocks())

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return apply({**p["base"], "gain": p["base"]["gain"] + p["delta"]}, x)

    step = fz.train_step(loss, fz.sgd(0.1))
    tree = {"base": params, "delta": torch.zeros(4, dtype=F64)}
    out, pullback = step.vjp(step.init(tree), data())
    assert fz.gather(pullback(torch.ones_like(out))[0])["delta"].abs().sum() > 0


def test_outside_of_a_step_any_dict_will_do() -> None:
    apply, params = fz.functional(Blocks())
    grads = torch.func.grad(apply)(dict(params), data())
    assert grads["gain"].abs().sum() > 0


def test_it_is_a_dict() -> None:
    _, params = fz.functional(Blocks())
    plain = dict(params)
    assert isinstance(params, dict) and params.keys() == plain.keys() and list(params) == list(plain)
    assert sorted(params) == sorted(plain) and repr(params) == repr(plain) and type({**params}) is dict
    assert params == params.copy() and params["gain"] is plain["gain"]
    trees: list[Any] = [{"m": params}, [params]]
    for tree in trees:
        same = optree.tree_map(lambda node: dict(node), tree, is_leaf=lambda node: isinstance(node, ModuleParams))
        names, leaves, _ = pytree.named_leaves(tree)
        assert (names, list(map(id, leaves))) == (pytree.named_leaves(same)[0], list(map(id, pytree.leaves(same))))
        paths = [
            [(torch_pytree.keystr(path), id(leaf)) for path, leaf in torch_pytree.tree_flatten_with_path(t)[0]]
            for t in (tree, same)
        ]
        assert paths[0] == paths[1]


def through_torch_save(params: Any) -> Any:
    file = io.BytesIO()
    torch.save(params, file)
    file.seek(0)
    return torch.load(file)  # weights only


KEPT: dict[str, Callable[[Any], Any]] = {
    "copy.copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "torch.save": through_torch_save,
    "copy()": lambda p: p.copy(),
    "|": lambda p: p | {"blocks.1.bias": p["blocks.1.bias"]},
    "| of a dict": lambda p: {"blocks.1.bias": 0} | p,
    "optree": lambda p: optree.tree_map(lambda x: x + 0, p),
    "torch's pytree": lambda p: torch_pytree.tree_map(lambda x: x + 0, p),
    "torch.func.grad": lambda p: torch.func.grad(lambda p: sum(x.sum() for x in p.values()))(p),
}


@pytest.mark.parametrize("how", sorted(KEPT))
def test_what_keeps_it(how: str) -> None:
    _, params = fz.functional(Blocks())
    kept = KEPT[how](params)
    assert type(kept) is ModuleParams and kept.frozen == params.frozen and set(kept) == set(params)
    assert how.startswith("|") or list(kept) == list(params)
