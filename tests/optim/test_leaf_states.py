"""What fz.whole keeps of a leaf: any entries, in their own dtypes; what changes form is named on every rank."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, hazards, run_ranks

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2)
SHAPES = {"w": (5, 7), "b": (7,), "s": (), "u": (2, 3, 4)}
WRAPS: dict[str, Any] = {
    "plain": lambda step: step,
    "zero1": fz.shard_zero1,
    "zero3": fz.shard_zero3,
    "fused": lambda step: fz.fuse_update(fz.shard_zero3(step)),
    "donated": lambda step: fz.donate(fz.shard_zero2(step)),
    "on the host": lambda step: fz.offload(fz.shard_zero3(step), moments="host"),
}


def params(dtype: torch.dtype, shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=made, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack(
        [(leaf.square() * (i + 1) * x).sum() + leaf.cos().sum() for i, leaf in enumerate(p.values())]
    ).sum()


def keeps(dtypes: tuple[torch.dtype, ...]) -> fz.GradientTransformation:
    """Keeps one average of gradients in each dtype, in which it is computed."""

    def begun(given: Any) -> Any:
        (p,) = given.values()
        return {"k": 0, "means": [torch.zeros_like(p, dtype=dtype) for dtype in dtypes]}

    def moved(grads: Any, old: Any, given: Any) -> Any:
        ((path, g),) = grads.items()
        assert [m.dtype for m in old["means"]] == list(dtypes)
        wide = [torch.promote_types(torch.float16, dtype) if dtype.itemsize > 1 else torch.float16 for dtype in dtypes]
        new = [(m.to(w) * 0.75 + g.to(w)).to(m.dtype) for m, w in zip(old["means"], wide, strict=True)]
        return {path: -0.01 * sum(m.to(g.dtype) for m in new)}, {"k": old["k"] + 1, "means": new}

    return fz.GradientTransformation(begun, moved)


def by_hand(optimizer: fz.GradientTransformation, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    own = params(dtype)
    states = {name: optimizer.init({name: p}) for name, p in own.items()}
    for i in range(3):
        grads = torch.func.grad(loss)(own, torch.tensor(i + 1.0, dtype=dtype))
        for name, g in grads.items():
            updates, states[name] = optimizer.update({name: g}, states[name], {name: own[name]})
            own[name] = own[name] + updates[name]
    return own


def on_rank(dtypes: tuple[torch.dtype, ...], dtype: torch.dtype, how: str, rank: int) -> dict[str, torch.Tensor]:
    step = WRAPS[how](fz.train_step(loss, fz.whole(keeps(dtypes))))
    state = step.init(params(dtype))
    for i in range(3):
        state, _ = step(state, torch.tensor(i + 1.0, dtype=dtype))
    return fz.gather(state.params)


@by_day(12)
@given(
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3).map(tuple),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    how=st.sampled_from(sorted(WRAPS)),
    ranks=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:fz.offload")
def test_states_are_handed_back_in_their_own_dtypes(dtypes: Any, dtype: Any, how: str, ranks: int, seed: int) -> None:
    """Those of float64 for params in float32 are refused where they would lie in slices."""
    run = functools.partial(on_rank, dtypes, dtype, how)
    if dtype == torch.float32 and torch.float64 in dtypes:
        said = r"leaf '[wu]' begins with a tensor of shape .* and dtype torch.float64, expected at most torch.float32"
        for caught in run_ranks(functools.partial(refused, run, said), ranks):
            assert caught
        return
    want = by_hand(keeps(dtypes), dtype)
    with hazards(seed):
        found = run_ranks(run, ranks)
    for got in found:
        assert_trees_close(got, want, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=1e-7)


def refused(run: Any, said: str, rank: int) -> bool:
    with pytest.raises((ValueError, RuntimeError), match=said):
        run(rank)
    return True


def test_on_real_processes() -> None:
    dtypes = (torch.bfloat16, torch.float32)
    want = by_hand(keeps(dtypes), torch.float64)
    for got in run_ranks(functools.partial(on_rank, dtypes, torch.float64, "fused"), 2, backend="processes"):
        assert_trees_close(got, want, rtol=1e-13)


def test_a_small_vectors_state_in_float64_is_kept_by_every_rank() -> None:
    optimizer = fz.whole(keeps((torch.float64,)))

    def on(rank: int) -> Any:
        step = fz.shard_zero3(fz.train_step(loss, optimizer))
        state, _ = step(step.init(params(torch.float32, {"b": (7,)})), torch.tensor(1.0))
        return state.moments.rest["b"]["means"][0].dtype

    assert run_ranks(on, 2) == [torch.float64] * 2


# ---- updates


def updated(update: Any, wrap: Any, rank: int) -> torch.Tensor:
    own = fz.GradientTransformation(lambda p: (), lambda g, s, p: ({k: update(p[k]) for k in p}, s))
    step = wrap(fz.train_step(loss, fz.whole(own)))
    state, _ = step(step.init(params(torch.float32, {"w": (5, 7)})), torch.tensor(1.0))
    return fz.gather(state.params)["w"]


@pytest.mark.parametrize("how", ["plain", "zero3", "fused"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.bfloat16])
def test_updates_of_other_real_dtypes_are_added_as_torch_does(how: str, dtype: torch.dtype) -> None:
    drawn = torch.randint(0, 2 if dtype == torch.bool else 200, (5, 7), generator=torch.Generator().manual_seed(0))
    drawn = drawn * (1 << 24) + drawn if dtype == torch.int64 else drawn  # which float32 does not hold
    p, u = params(torch.float32)["w"], drawn.to(dtype)
    for got in run_ranks(functools.partial(updated, lambda p: u, WRAPS[how]), 1 if how == "plain" else 2):
        assert_trees_close(got, p + u, rtol=0.0)


@pytest.mark.parametrize("how", ["plain", "zero3", "fused"])
def test_complex_updates_are_refused(how: str) -> None:
    run = functools.partial(updated, lambda p: p.to(torch.complex128), WRAPS[how])
    said = r"the update of leaf 'w' is a tensor of shape \(5, 7\) and dtype torch.complex128, expected .* real numbers"
    assert all(run_ranks(functools.partial(refused, run, said), 1 if how == "plain" else 2))


def test_complex_updates_are_refused_under_a_transform() -> None:
    own = fz.GradientTransformation(lambda p: (), lambda g, s, p: ({k: x.to(torch.complex64) for k, x in g.items()}, s))
    step = fz.train_step(loss, fz.whole(own))
    with pytest.raises(ValueError, match=r"the update of leaf 'w' .* real numbers"):
        torch.func.grad(lambda w: step(step.init({"w": w}), torch.tensor(1.0))[1]["loss"])(params(torch.float32)["w"])


# ---- what changes form


def begun(given: Any) -> Any:
    (p,) = given.values()
    return {"m": torch.zeros_like(p), "r": [torch.zeros(70_000), 0], "mode": "a", "rate": 1.0}


CHANGES: dict[str, tuple[Any, str]] = {
    "dtype in slices": (
        {"m": torch.zeros(300, 300, dtype=torch.bfloat16)},
        r"'m' is a tensor of shape \(300, 300\) and dtype torch.bfloat16, and was a tensor of shape \(300, 300\) and "
        "dtype torch.float32",
    ),
    "shape": (
        {"r": [torch.zeros(3), 0]},
        r"'r.0' is a tensor of shape \(3,\) and dtype torch.float32, and was a tensor of shape \(70000,\)",
    ),
    "number": ({"rate": 1}, "'rate' is of type int, and was of type float"),
    "tensor of a number": ({"rate": torch.ones(())}, r"'rate' is a tensor of shape \(\) .*, and was of type float"),
    "word": ({"mode": "b"}, "'mode' is 'b', and was 'a'"),
    "more": ({"x": torch.zeros(300, 300)}, "it has the entries .*'x'.*, and had"),
    "other": ({"r": [torch.zeros(70_000)]}, "it has the entries .*, and had .*'r.1'"),
    "containers": ({"r": (torch.zeros(70_000), 0)}, "it has the entries .* in its containers, and had"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_form_is_named_shortly_on_every_rank(case: str) -> None:
    change, said = CHANGES[case]
    own = fz.GradientTransformation(begun, lambda g, s, p: (g, {**s, **change}))

    def on(rank: int) -> str:
        step = fz.shard_zero3(fz.train_step(loss, fz.whole(own)))
        state = step.init(params(torch.float32, {"w": (300, 300)}))
        with pytest.raises((ValueError, RuntimeError), match=f"the state of leaf 'w' .*: {said}") as info:
            step(state, torch.tensor(1.0))
        return str(info.value)

    for text in run_ranks(on, 2):
        assert len(text) < 500 and "keeps the structure, the shapes and the dtypes" in text


def test_a_state_that_is_one_tensor_is_named_too() -> None:
    own = fz.GradientTransformation(lambda p: torch.zeros(3), lambda g, s, p: (g, s.double()))
    step = fz.train_step(loss, fz.whole(own))
    with pytest.raises(ValueError, match=r"leaf 'w' is .*: it is a tensor of shape \(3,\) and dtype torch.float64"):
        step(step.init(params(torch.float32, {"w": (2, 2)})), torch.tensor(1.0))


@pytest.mark.parametrize("kept", [set(), torch.relu, np.float32(0.5)], ids=["set", "function", "numpy"])
def test_what_no_checkpoint_keeps_is_refused(kept: Any) -> None:
    own = fz.whole(fz.GradientTransformation(lambda p: {"seen": kept}, lambda g, s, p: (g, s)))
    with pytest.raises(TypeError, match=r"state of leaf 'w' begins with .*, expected tensors, numbers, strs"):
        fz.train_step(loss, own).init(params(torch.float32, {"w": (2, 2)}))


def scaled_by(number: Any) -> fz.Step:
    def update(grads: Any, state: Any, given: Any) -> Any:
        return {k: -0.1 * float(state["scale"]) * x for k, x in grads.items()}, {"scale": state["scale"] * number}

    return fz.train_step(loss, fz.whole(fz.GradientTransformation(lambda p: {"scale": number}, update)))


def test_a_number_of_numpys_is_loaded_as_one_of_pythons(tmp_path: Path) -> None:
    step = scaled_by(np.float64(0.5))
    state, _ = step(step.init(params(torch.float32, {"w": (2, 2)})), torch.tensor(1.0))
    fz.save(tmp_path, state)
    loaded = fz.load(tmp_path, step)
    assert_trees_equal(step(loaded, torch.tensor(1.0))[0].params, step(state, torch.tensor(1.0))[0].params)
