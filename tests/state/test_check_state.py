"""States and grads of another step or component are refused, and the message says what to do."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
from nightly import by_turns, in_turns

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

PARAMS = {"w": torch.ones(2)}


def step(optimizer: fz.GradientTransformation, fn: object = lambda p: p["w"].sum()) -> fz.Step:
    return fz.train_step(fn, optimizer)  # type: ignore[arg-type]


def test_a_state_of_another_optimizer_or_of_none() -> None:
    mine = step(fz.adamw(0.1))
    with pytest.raises(ValueError, match=r"moments of 'sgd', expected those of 'adamw'"):
        mine(step(fz.sgd(0.1, momentum=0.9)).init(PARAMS))
    with pytest.raises(TypeError, match="expected"):
        mine(PARAMS)  # type: ignore[arg-type]


def test_a_state_of_the_same_optimizer_in_another_chain() -> None:
    adamw, clip = fz.adamw(0.1), fz.clip_by_global_norm(1.0)
    alone, clipped, twice = [
        step(optimizer) for optimizer in (adamw, fz.chain(clip, adamw), fz.chain(clip, clip, adamw))
    ]
    what_to_do = r"\. Make the state with this step's init, or use the optimizer that it was made with"
    with pytest.raises(
        ValueError, match=r"moments of an optimizer by itself, expected those of a chain of 2" + what_to_do
    ):
        clipped(alone.init(PARAMS))
    with pytest.raises(ValueError, match=r"moments of a chain of 2, expected those of 'adamw' by itself"):
        alone(clipped.init(PARAMS))
    with pytest.raises(ValueError, match=r"moments of a chain of 3, expected those of a chain of 2"):
        clipped(twice.init(PARAMS))
    own, other = [step(fz.partition({"*": optimizer})) for optimizer in (adamw, fz.chain(clip, adamw))]
    with pytest.raises(ValueError, match=r"moments of an optimizer by itself, expected those of a chain of 2"):
        other(own.init(PARAMS))


def big(policy: fz.Policy | None = None) -> tuple[Any, Any]:
    step = fz.train_step(lambda p: (p["w"] ** 2).mean(), fz.adamw(0.1), policy)
    return step, step.init({"w": torch.linspace(-1, 1, 300 * 300).reshape(300, 300)})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("policy", [None, fz.Policy.bf16_states()])
def test_a_state_whose_buffers_were_mapped_to_another_dtype(policy: Any, dtype: torch.dtype) -> None:
    """It goes on in that dtype: what is stored is told by the buffers."""
    step, state = big(policy)
    want, _ = step(state)
    got, _ = step(optree.tree_map(lambda x: x.to(dtype), state))
    rtol = 2e-2 if torch.bfloat16 in (dtype, state.params.local(state.params.groups[0]).dtype) else 1e-6
    torch.testing.assert_close(
        fz.gather(got.params)["w"].float(), fz.gather(want.params)["w"].float(), rtol=rtol, atol=1e-3
    )
    assert got.params.local(got.params.groups[0]).dtype == dtype


@pytest.mark.parametrize("change", ["narrowed", "moments of others", "params of others"])
def test_buffers_that_are_not_of_the_states_leaves_are_refused(change: str) -> None:
    step, state = big()
    other = step.init({"w": torch.ones(3, 3)})
    narrow: Any = functools.partial(optree.tree_map, lambda x: x[:64])
    said = r"others in \S+ are of another state.s leaves"
    if change == "narrowed":
        said = r"its group in state.\w+: got .* expected \d+ elements"
        state = narrow(state)
    with pytest.raises(ValueError, match=rf"leaf .w. and {said}"):
        if change == "moments of others":
            state = state.replace(moments=other.moments)
        elif change == "params of others":
            state = state.replace(params=other.params)
        step(state)


MAPS = {
    "longer": lambda x: torch.cat([x, x]),
    "shorter": lambda x: x[:64],
    "two dimensions": lambda x: x.reshape(2, -1),
    "integers": lambda x: x.long(),
    "no tensors": lambda x: 1.0,
}


@pytest.mark.parametrize("change", MAPS)
@pytest.mark.parametrize("kind", ["params", "moments"])
def test_what_is_mapped_into_something_else_goes_nowhere(tmp_path: Path, change: str, kind: str) -> None:
    step, state = big()
    mapped = optree.tree_map(MAPS[change], getattr(state, kind))
    words = r"leaf .w. and its group in .*: got .*, expected .*shapes"
    with pytest.raises(ValueError, match=words):
        state.replace(**{kind: mapped})
    other = state.changed(**{kind: mapped})  # as a tree_map of the state makes it
    verbs = [fz.save, fz.compat.save_dcp, *([fz.save_safetensors] if kind == "params" else [])]
    for verb in (
        lambda: step(other),
        lambda: fz.gather(mapped),
        lambda: fz.convert(other, step),
        *(functools.partial(save, tmp_path / "it", other) for save in verbs),
    ):
        with pytest.raises((ValueError, OSError), match=words):
            verb()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "saving"]


@in_turns(3)
@pytest.mark.parametrize(
    ("remat", "policy"),
    by_turns([False, True], [fz.Policy(compute=torch.bfloat16), fz.Policy.compact24(), fz.Policy.exact()]),
)
def test_what_is_mapped_is_the_same_at_every_stage_and_from_every_file(
    tmp_path: Path, remat: bool, policy: fz.Policy
) -> None:
    """Also where ranks keep slices, and beside them full copies that a function is mapped over, too."""

    def value(step: fz.Step, state: fz.TrainState) -> list[float]:
        after, _ = step(state, x)
        return [step.forward(state, x).item(), step.forward(after, x).item(), *fz.gather(after.params)["w"].tolist()]

    def rank_main(rank: int) -> None:
        plain = fz.train_step(lambda p, x: (p["w"] * x.to(p["w"].dtype)).sum().float(), fz.adamw(0.1), policy)
        plain = fz.remat(plain) if remat else plain
        expected = None
        for stage in (fz.shard_zero3, fz.shard_zero2, fz.shard_zero1):
            step = stage(plain)
            state = step.init({"w": torch.linspace(0.0, 1.0, 200)})
            change = (
                (lambda t: t.flip(0)) if state.params.format(state.params.groups[0]).plain else (lambda t: t.roll(1))
            )
            for mapped in (state, mapped_by(change, state.params), mapped_by(torch.clone, state.params)):
                mapped = state if mapped is state else state.replace(params=mapped)
                fz.save(tmp_path / "it", mapped)
                own = value(step, mapped)
                assert value(step, fz.load(tmp_path / "it", step)) == own
                assert value(step, fz.convert(mapped, step)) == own
            expected = expected or own
            assert own == expected  # of the values as they began

    mapped_by: Any = optree.tree_map
    x = torch.linspace(1.0, 3.0, 200)
    run_ranks(rank_main, 2)


@pytest.mark.parametrize("stage", [fz.shard_zero1, fz.shard_zero2])
@pytest.mark.parametrize("fused", [False, True])
def test_what_is_mapped_beside_its_slices_accumulates(stage: Any, fused: bool) -> None:
    """Microbatches' gradients are summed unreduced where the full params are at hand, which they are no more."""

    def rank_main(rank: int) -> None:
        policy = fz.Policy(param=torch.float32, compute=torch.bfloat16)
        step = fz.accumulate(stage(fz.train_step(lambda p, x: (p["w"] * x).sum().float(), fz.adamw(0.1), policy)), 2)
        step = fz.fuse_update(step) if fused else step
        state = step.init({"w": torch.linspace(0.0, 1.0, 200)})
        mapped: Any = optree.tree_map(torch.clone, state)
        x = torch.full((2, 200), rank + 1.0, dtype=torch.bfloat16)
        assert mapped.params.stale and not state.params.stale
        (new, metrics), (want, expected) = step(mapped, x), step(state, x)
        assert_trees_equal((new, metrics), (want, expected))
        assert not new.params.stale

    run_ranks(rank_main, 2)
