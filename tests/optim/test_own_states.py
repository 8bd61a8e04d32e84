"""States that an optimizer of the user's own, declared elementwise, begins with: what is kept, and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import optree
import pytest
import torch

import fzero as fz
from fzero.testing import run_ranks

PARAMS = {"a": torch.ones(4, 4), "b": torch.ones(3)}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x * (p["a"].sum() + p["b"].sum())


def same(grads: Any, state: Any, params: Any) -> Any:
    return grads.map(lambda g: -0.1 * g), state


def beginning(init: Callable[[Any], Any], update: Callable[..., Any] = same) -> fz.GradientTransformation:
    return fz.GradientTransformation(init, update, elementwise=True)


def full(dtype: torch.dtype, p: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(p, dtype=dtype)


def of(dtype: torch.dtype) -> fz.GradientTransformation:
    return beginning(functools.partial(optree.tree_map, functools.partial(full, dtype)))  # type: ignore[arg-type]


@pytest.mark.parametrize("joined", [lambda own: own, lambda own: fz.chain(own, fz.sgd(-1.0))])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float64])
def test_moments_of_other_dtypes_are_refused(dtype: torch.dtype, joined: Any) -> None:
    tell = r"fz.Policy\(moment=torch.float64\)" if dtype == torch.float64 else r"fz.whole\(optimizer\)"
    with pytest.raises(TypeError, match=rf"params\['a'\]: .* begins with moments of dtype {dtype}, expected .*{tell}"):
        fz.train_step(loss, joined(of(dtype))).init(PARAMS)


def test_what_the_policy_or_whole_leaves_hold_is_taken() -> None:
    def summed(grads: Any, state: Any, params: Any) -> Any:
        state = optree.tree_map(lambda s, g: s + g, state, grads)
        return optree.tree_map(lambda s, g: ((s - 1e8) * -0.1).to(g.dtype), state, grads), state

    own = beginning(lambda p: optree.tree_map(lambda x: torch.full_like(x, 1e8, dtype=torch.float64), p), summed)
    step = fz.train_step(loss, own, fz.Policy(moment=torch.float64))
    state, _ = step(step.init(PARAMS), torch.ones(()))
    state, _ = step(state, torch.ones(()))
    torch.testing.assert_close(fz.gather(state.params)["a"], torch.full((4, 4), 0.7))

    def counted(grads: Any, state: Any, params: Any) -> Any:
        return {k: -g * (state[k] % 2) for k, g in grads.items()}, {k: s + 1 for k, s in state.items()}

    counts = fz.GradientTransformation(
        lambda p: {k: torch.full_like(x, 123456789, dtype=torch.int64) for k, x in p.items()}, counted
    )
    step = fz.train_step(loss, counts)
    state, _ = step(step.init(PARAMS), torch.ones(()))
    state, _ = step(state, torch.ones(()))
    assert torch.equal(fz.gather(state.params)["a"], torch.zeros(4, 4))


def test_a_next_state_of_another_dtype_is_refused() -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return grads, state.map(lambda s: s > 0)

    step = fz.train_step(loss, beginning(lambda p: p.map(torch.zeros_like), update))
    with pytest.raises(TypeError, match=r"step.update: params\['a'\]: the optimizer's next state is of dtype"):
        step(step.init(PARAMS), torch.ones(()))


LISTS: dict[str, Callable[[Any], Any]] = {
    "list": lambda p: [torch.zeros_like(x) for x in optree.tree_leaves(p)],
    "dict": lambda p: {"m": {path: torch.zeros_like(x) for path, x in p.items()}},
    "flat": lambda p: torch.cat([torch.zeros_like(x) for x in optree.tree_leaves(p)]),
    "a number of each": lambda p: torch.zeros(len(optree.tree_leaves(p))),
}


@pytest.mark.parametrize("joined", ["alone", "chain", "partition"])
@pytest.mark.parametrize("kind", sorted(LISTS))
def test_tensors_that_are_in_no_tree_like_the_params_are_refused(kind: str, joined: str) -> None:
    own = beginning(LISTS[kind])
    optimizer = {
        "alone": own,
        "chain": fz.chain(fz.clip_by_value(1.0), own),
        "partition": fz.partition({"a": own, "*": fz.sgd(0.1)}),
    }[joined]

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(loss, optimizer))
        with pytest.raises(TypeError, match=r"the state of an optimizer of your own .* expected trees like the params"):
            step.init(PARAMS)

    run_ranks(rank_main, 2)


def test_numbers_and_trees_in_any_container_are_kept() -> None:
    def init(p: Any) -> Any:
        zeros = p.map(torch.zeros_like)
        return {"history": [zeros, zeros], "norms": [torch.zeros(()) for _ in range(4)], "count": 0, "none": None}

    step = fz.train_step(loss, fz.chain(beginning(init), beginning(lambda p: fz.whole(fz.sgd(0.1)).init(p))))
    step(step.init(PARAMS), torch.ones(()))
