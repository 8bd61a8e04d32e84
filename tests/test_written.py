"""Functions as people write them are what plain torch makes of them, at every stage, in both forms, with hazards on."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import written
import written_around
import written_kinds
import written_unseen
from nightly import NIGHTLY

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

pytestmark = pytest.mark.usefixtures("hazards")

CASES = written.CASES | written_around.CASES | written_unseen.CASES | written_kinds.CASES
SHARED = written_around.SHARED  # by ranks that are threads
# what changes between a call and its second run
CHANGES = {
    "an input that is returned and changed": "An input of unit 'blocks.0' was changed in place after it was called",
    "training that the parent switches": r"calls sin\(\) in one run and tanh\(\) in the next.*written.py:\d+",
    "what is set around a call": r"calls .* in one run and .* in the next.*written_around.py:\d+",
}
REFUSED = written.REFUSED | written_around.REFUSED
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def as_dicts(tree: Any) -> Any:
    return dict(tree) if isinstance(tree, dict) else tree


def follows(rank: int, name: str, world: int, stages: tuple[int, ...], times: int = 3 if NIGHTLY else 2) -> None:
    fn, params, plain = CASES[name]()
    batches = [written.X * (1 + i) for i in range(world)]
    pulled = [torch.func.grad(plain, argnums=(0, 1))(as_dicts(params), x) for x in batches]
    mean = pytree.tree_map(lambda *g: torch.stack(g).mean(0), *[g for g, _ in pulled])
    forms: list[Any] = [("vjp", False), ("vjp", True), ("tape", False), ("fused", False)]
    if name == "a checkpoint over a modules own weights":  # plain autograd runs it again when its weights are gone
        forms = forms[:2]
    if name == "energy to forces":  # asks whether its input is differentiated, which a forward without gradient is not
        forms = forms[:2]
    forms = [(form, remat) for form, remat in forms if not (remat and name in CHANGES)]
    units = ("emb", "mid") if name == "an embedding tied to a head" else None
    by_turns = forms[len(name) % 2 :: 2] if world > 1 else forms
    for stage in stages:
        for form, remat in forms if NIGHTLY else by_turns if stage == 3 else forms[1:3] if stage == 0 else forms[::3]:
            step = SHARDS[stage](fz.train_step(fn, fz.sgd(0.1), units=units))
            step = fz.remat(step) if remat else step
            state, x = step.init(params), batches[rank]
            if form == "vjp":  # what these runs show of the function is not all that the others need
                step.forward(state, x.clone())
                if name != "energy to forces":
                    step.vjp(state, x.clone(), argnums=())[1](torch.ones((), dtype=written.F64))
            for _ in range(times):
                if form == "vjp":
                    out, pullback = step.vjp(state, x)
                    assert_trees_close(out, plain(as_dicts(params), x.clone().requires_grad_()).detach(), rtol=1e-10)
                    grads, (cotangent,) = pullback(torch.ones_like(out))
                    assert_trees_close(cotangent, pulled[rank][1], rtol=1e-9)
                elif form == "tape":
                    with fz.tape(step, state) as model:
                        model(x).backward()
                        grads = model.grads()
                else:
                    moved, _ = fz.fuse_update(step)(state, x)
                    difference = pytree.tree_map(
                        lambda a, b: (a - b) / 0.1, as_dicts(fz.gather(state.params)), as_dicts(fz.gather(moved.params))
                    )
                    assert_trees_close(difference, mean, rtol=1e-8)
                    continue
                assert_trees_close(as_dicts(fz.gather(grads)), mean, rtol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_is_what_plain_torch_makes_of_it(name: str) -> None:
    alone = (0, 3) if NIGHTLY or name in SHARED else (0,)
    run_ranks(functools.partial(follows, name=name, world=1, stages=alone), 1)
    if name not in SHARED:
        # 1 and 2 differ in how microbatches are summed
        stages = ((2, 3), (1, 3), (1, 3) if NIGHTLY else (3,))[len(name) % 3]
        run_ranks(functools.partial(follows, name=name, world=2, stages=stages), 2)


@pytest.mark.parametrize("form", ["plain", "zero3", "remat"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_pure_is_refused(name: str, form: str) -> None:
    """On all ranks, before anything has changed."""
    make, match = REFUSED[name]
    if (name, form) == ("a param of the root that blocks read", "plain"):
        pytest.skip("a full tensor that is given and read again is one tensor, and right")
    is_refused(make, match, form)


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_before_a_second_run_is_refused(name: str) -> None:
    is_refused(CASES[name], CHANGES[name], "remat", ranks=1)  # ranks that are threads share what is set


def is_refused(make: Any, match: str, form: str, ranks: int = 2) -> None:
    def rank_main(rank: int) -> None:
        fn, params, _ = make()
        step = fz.train_step(fn, fz.sgd(0.1))
        step = step if form == "plain" else fz.shard_zero3(step)
        state = fz.remat(step).init(params) if form == "remat" else step.init(params)
        step = fz.remat(step) if form == "remat" else step
        before = as_dicts(fz.gather(state.params))
        for _ in range(2):  # nor does it begin to be right
            with pytest.raises((ValueError, TypeError), match=match):
                step(state, written.X.clone())
        assert_trees_close(as_dicts(fz.gather(state.params)), before, rtol=0, atol=0)

    run_ranks(rank_main, 1 if form == "plain" else ranks)


def all_of(rank: int, names: list[str]) -> None:
    """Stage 1, which differs in its reductions only, for every sixth case; threads run all stages of each."""
    for number, name in enumerate(names):
        follows(rank, name, 2, (3,) if number % 6 else (1, 3))


def test_on_real_processes() -> None:
    """Every tenth case, nightly every third; `make soak` draws all that is in them, on processes too."""
    names = list(CASES)[:: 3 if NIGHTLY else 10]
    run_ranks(functools.partial(all_of, names=names), 2, backend="processes", timeout=200)
