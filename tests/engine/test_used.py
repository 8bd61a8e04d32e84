"""A first update names the leaves that no rank and no microbatch uses, and is refused if that is all of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import fzero as fz
from fzero.comm.divergence import recorded_collectives
from fzero.testing import run_ranks

RANKS, PARTS, BLOCKS = 2, 2, 3
STAGES: dict[str, Callable[[fz.Step], fz.Step]] = {
    "": lambda step: step,
    "1": fz.shard_zero1,
    "2": fz.shard_zero2,
    "3": fz.shard_zero3,
}
Bools = Sequence[Sequence[bool]]  # by rank and microbatch


def params_of() -> dict[str, object]:
    blocks = [{"b": torch.zeros(2), "w": torch.ones(2, 2)} for _ in range(BLOCKS)]
    return {"blocks": blocks, "gain": torch.ones(2), "other": torch.ones(1)}


block = fz.unit(lambda p, x, biased: x @ p["w"] + (p["b"] if biased else 0.0))


def step_of(
    blocks: Sequence[int], biased: Bools, gained: Bools, stage: str, fused: bool, zero: bool, dead: bool
) -> fz.Step:
    def fn(p, x: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        rank, part = divmod(int(place[0]), PARTS)
        if dead:
            return x.square().mean()
        x = x * p["other"]  # on all ranks, which must come by the same groups
        for i in blocks:
            x = block(p["blocks"][i], x, biased[rank][part])
        if gained[rank][part]:
            x = x * p["gain"]
        return x.square().mean() * (0.0 if zero else 1.0)

    step = fz.accumulate(STAGES[stage](fz.train_step(fn, fz.sgd(0.1))), PARTS)
    return fz.fuse_update(step) if fused else step


def used(blocks: Sequence[int], biased: Bools, gained: Bools, fused: bool) -> set[str]:
    """The leaves that are used; a fused update asks for groups of leaves in the last microbatch."""
    found = {f"blocks.{i}.w" for i in blocks}
    if any(map(any, biased)) or fused:
        found |= {f"blocks.{i}.b" for i in blocks}
    return found | ({"gain", "other"} if any(map(any, gained)) or fused else {"other"})


BOOLS = st.just([[False] * PARTS] * RANKS) | st.lists(
    st.lists(st.booleans(), min_size=PARTS, max_size=PARTS), min_size=RANKS, max_size=RANKS
)


@hypothesis.settings(max_examples=30)
@hypothesis.given(
    st.lists(st.integers(0, BLOCKS - 1), max_size=2, unique=True),
    BOOLS,
    BOOLS,
    st.sampled_from([*STAGES]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.integers(0, 4).map(lambda number: number == 0),
)
def test_unused_leaves_are_named_once(
    blocks: list[int], biased: Bools, gained: Bools, stage: str, fused: bool, zero: bool, frozen: bool, dead: bool
) -> None:
    ranks = RANKS if stage else 1
    trained = {f"blocks.{i}.{name}" for i in range(BLOCKS) for name in "bw"} | {"gain", "other"}
    trained -= {"blocks.0.b", "blocks.0.w"} if frozen else set()
    unused = trained - (set() if dead else used(blocks, biased[:ranks], gained[:ranks], fused))

    def rank_main(rank: int) -> tuple[str, list[str]]:
        step = step_of(blocks, biased, gained, stage, fused, zero, dead)
        step = fz.freeze(step, "blocks.0.*") if frozen else step
        state = step.init(params_of())
        batch = torch.ones(PARTS, 2), rank * PARTS + torch.arange(PARTS)
        said = ""
        try:
            step(state, *batch)
        except (ValueError, UserWarning) as error:  # the filter below
            said = str(error)
            if isinstance(error, ValueError):
                return said, []
        with recorded_collectives() as later:
            step(state, *batch)
        return said, [str(tag) for _, tag, _ in later if "unused" in str(tag)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run_ranks(rank_main, ranks) if stage else [rank_main(0)]
    for said, later in found:
        assert later == []
        if unused == trained:
            assert f"uses none of the {len(trained)} leaves" in said and "Did you mean apply(params, x)?" in said
        elif unused:
            shown = [path for path in trained if repr(path) in said]
            assert f"does not use {len(unused)} of the {len(trained)} leaves" in said
            assert {*shown} <= unused and len(shown) == min(3, len(unused))
        else:
            assert said == ""


def test_a_module_that_is_called_itself_loses_nothing() -> None:
    net = torch.nn.Linear(2, 1)
    apply, params = fz.functional(net)
    step = fz.donate(fz.train_step(lambda p, x: net(x).square().mean(), fz.sgd(0.1)))
    state = step.init(params)
    for _ in range(2):  # refused again, with the same state
        with pytest.raises(ValueError, match=r"'bias', 'weight'.*Did you mean apply\(params, x\)\?"):
            step(state, torch.ones(3, 2))
    fz.with_fn(step, lambda p, x: apply(p, x).square().mean())(state, torch.ones(3, 2))


def test_a_step_around_which_a_transform_goes_is_not_looked_at() -> None:
    step = fz.train_step(lambda p, x: x.sum(), fz.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    torch.func.grad(lambda x: step(state, x)[1]["loss"])(torch.ones(2))
    with pytest.raises(ValueError, match="uses none of the 1 leaves"):
        step(state, torch.ones(2))


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_a_leaf_that_a_checkpoint_uses_is_used(factor: float) -> None:
    def fn(p, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda x: x * p["w"], x, use_reentrant=False)
        return x.square().sum() * factor

    step = fz.train_step(fn, fz.sgd(0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(step.init({"w": torch.ones(2)}), torch.ones(2))


@dataclasses.dataclass
class Loss:
    """A function that is equal to others, and that cannot be hashed if it is called itself."""

    leaf: str

    def __call__(self, p, x: torch.Tensor) -> torch.Tensor:
        return (x * p[self.leaf]).square().sum()


LOSSES = {leaf: Loss(leaf) for leaf in "ab"}
MADE: dict[str, Callable[[str], Callable[..., torch.Tensor]]] = {
    "kept": lambda leaf: LOSSES[leaf].__call__,
    "new": Loss,
    "a lambda": lambda leaf: lambda p, x: (x * p[leaf]).square().sum(),
}


@hypothesis.settings(max_examples=8)
@hypothesis.given(
    st.lists(st.lists(st.tuples(st.sampled_from([*MADE]), st.sampled_from("ab")), min_size=3, max_size=3), min_size=2)
)
def test_each_rank_may_call_other_functions_made_in_other_ways(calls: list[list[tuple[str, str]]]) -> None:
    def rank_main(rank: int) -> list[int]:
        step = fz.shard_zero1(fz.train_step(LOSSES["a"], fz.sgd(0.1)))
        state, kept, counts = step.init({"a": torch.ones(2), "b": torch.ones(2)}), [], []
        for made, leaf in calls[rank]:
            own = fz.with_fn(step, MADE[made](leaf))
            kept += [own] if rank else []  # the other rank forgets it
            with recorded_collectives() as records:
                state, _ = own(state, torch.ones(2))
            counts.append(sum("unused" in str(tag) for _, tag, _ in records))
            del own
        return counts

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert run_ranks(rank_main, 2) == [[1, 0, 0]] * 2
    first = {own[0][1] for own in calls[:2]}
    assert len(warned) == (2 if len(first) == 1 else 0)
    assert all("does not use 1 of the 2 leaves that are trained, in its first update" in str(w.message) for w in warned)


def test_ranks_beside_which_only_one_uses_leaves_get_one_error() -> None:
    def rank_main(rank: int) -> str:
        mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
        ax = fz.parallel.axis(mesh, "sp")
        fn = lambda p, x: fz.parallel.sum(x * p["w"] if rank else x, ax).square().sum()
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)), mesh=mesh, axis="dp")
        with pytest.raises(ValueError) as caught:
            step(step.init({"w": torch.ones(2)}), torch.ones(2))
        return str(caught.value)

    assert all(
        "The grads of leaf 'w' differ between the ranks of axis 'sp'" in said for said in run_ranks(rank_main, 2)
    )


def test_a_leaf_whose_gradient_the_state_keeps_is_used() -> None:
    step = fz.train_step(LOSSES["a"], fz.sgd(0.1))
    state = step.init({"a": torch.ones(2), "b": torch.ones(2)})
    state = step.add_grads(state, {"a": torch.zeros(2), "b": torch.ones(2)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(state, torch.ones(2))
