"""What `accumulate` puts together: losses and aux of every kind, in which dtype, and their cotangents."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def values(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 1, generator=torch.Generator().manual_seed(seed), dtype=F64) + 0.5


def narrow_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (p["w"] * x).sum().to(BF16)


@in_turns(3)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("count", [3, 5, 7])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_bf16_loss_is_averaged_in_float32(stage: int, count: int, fused: bool) -> None:
    """Neither the mean nor a third of one, which bfloat16 has only within 0.2 %, is rounded to bfloat16."""
    world = 2 if stage else 1
    x = values(world * count)
    want_loss = x.to(BF16).double().mean()

    def rank_main(rank: int) -> None:
        step = fz.accumulate(SHARDS[stage](fz.train_step(narrow_loss, fz.sgd(1.0))), count)
        step = fz.fuse_update(step) if fused else step
        state = step.init({"w": torch.ones(1, dtype=F64)})
        own = x.chunk(world)[rank]
        new, metrics = step(state, own)
        assert metrics["loss"].dtype == F32
        assert_trees_close(metrics["loss"].double(), want_loss, rtol=1e-6)
        assert_trees_close(fz.gather(new.params)["w"], 1.0 - x.mean(0), rtol=1e-6)
        out, pullback = step.vjp(state, own)
        assert out.dtype == F32 == step.forward(state, own).dtype
        grads, (by_x,) = pullback(torch.ones((), dtype=F32))
        assert_trees_close(fz.gather(grads)["w"], x.mean(0), rtol=1e-6)
        assert_trees_close(by_x, torch.full_like(own, 1 / count), rtol=1e-6)
        new, _ = step(state, own, cotangent=torch.full((), 2.0))
        assert_trees_close(fz.gather(new.params)["w"], 1.0 - 2 * x.mean(0), rtol=1e-6)

    run_ranks(rank_main, world)


def test_a_bf16_loss_beside_an_output_with_dims() -> None:
    step = fz.accumulate(
        fz.train_step(lambda p, x: {"loss": (p["w"] * x).mean().to(BF16), "y": p["w"] * x}, fz.sgd(1.0)), 3
    )
    x = values(6)
    out, pullback = step.vjp(step.init({"w": torch.ones(1, dtype=F64)}), x)
    assert out["loss"].dtype == F32 and out["y"].shape == (6, 1)
    grads, _ = pullback({"loss": torch.ones(()), "y": torch.ones(6, 1, dtype=F64)})
    assert_trees_close(fz.gather(grads)["w"], x.mean(0) + x.sum(0), rtol=1e-3)
    grads, _ = step.vjp(step.init({"w": torch.ones(1, dtype=F64)}), x)[1]({"loss": None, "y": torch.ones_like(x)})
    assert_trees_close(fz.gather(grads)["w"], x.sum(0), rtol=1e-12)


@pytest.mark.parametrize(("dtype", "merged"), [(BF16, F32), (F16, F32), (F32, F32), (F64, F64)])
def test_the_dtype_of_a_loss_and_of_its_cotangent(dtype: torch.dtype, merged: torch.dtype) -> None:
    plain = fz.train_step(lambda p, x: (p["w"] * x).mean().to(dtype), fz.sgd(1.0))
    step = fz.accumulate(plain, 3)
    state, x = step.init({"w": torch.ones(1, dtype=F64)}), values(3)
    out, pullback = step.vjp(state, x)
    assert out.dtype == merged == step(state, x)[1]["loss"].dtype
    if dtype != merged:
        with pytest.raises(ValueError, match=rf"cotangent of the output: got .*{dtype}, expected .*{merged}"):
            pullback(torch.ones((), dtype=dtype))
    pullback(torch.ones_like(out))
    with pytest.raises(ValueError, match=r"cotangent of the output: got shape \(2,\).*expected \(\)"):
        pullback(torch.ones(2, dtype=merged))
    out, pullback = plain.vjp(state, x)  # one microbatch: nothing changes
    assert out.dtype == dtype
    pullback(torch.ones((), dtype=dtype))


@pytest.mark.parametrize("fused", [False, True])
def test_aux_of_every_kind(fused: bool) -> None:
    calls: list[int] = []

    def fn(p: Any, x: torch.Tensor) -> Any:
        calls.append(1)
        n = len(calls) - 1
        aux = {
            "bf16": torch.tensor(0.1, dtype=BF16) * (n + 1),
            "f64": torch.tensor(0.1, dtype=F64) * (n + 1),
            "float": 0.1 * (n + 1),
            "now a float": 1.0 if n else torch.tensor(2.0),
            "int": n,
            "bool": n == 1,
            "count": torch.tensor(10 * n),
            "hit": torch.tensor(n == 2),
            "x": x,
            "rows": torch.ones(n, 2),
            "name": "same",
            "none": None,
            "dtype": torch.float32,
        }
        return (p["w"] * x).mean(), aux

    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0), has_aux=True), 3)
    step = fz.fuse_update(step) if fused else step
    state, x = step.init({"w": torch.ones(1, dtype=F64)}), values(6)

    def check(aux: Any) -> None:
        calls.clear()
        tenths = sum(torch.tensor(0.1, dtype=BF16).mul(n).double().item() for n in (1, 2, 3)) / 3
        assert aux["bf16"].dtype == F32 and aux["bf16"].item() == pytest.approx(tenths, rel=1e-6)
        assert aux["f64"].dtype == F64 and aux["f64"].item() == pytest.approx(0.2, rel=1e-14)
        assert aux["float"].dtype == F32 and aux["float"].item() == pytest.approx(0.2, rel=1e-6)
        assert aux["now a float"].item() == pytest.approx(4 / 3, rel=1e-6)
        assert_trees_equal(
            {name: aux[name] for name in ("int", "bool", "count", "hit", "x")},
            {
                "int": torch.tensor([0, 1, 2]),
                "bool": torch.tensor([False, True, False]),
                "count": torch.tensor([0, 10, 20]),
                "hit": torch.tensor([False, False, True]),
                "x": x,
            },
        )
        assert aux["rows"].shape == (3, 2)
        assert (aux["name"], aux["none"], aux["dtype"]) == ("same", None, torch.float32)

    check(step.vjp(state, x)[2])
    check(step.forward(state, x)[1])
    check(step(state, x)[1]["aux"])
    one = fz.train_step(fn, fz.sgd(1.0), has_aux=True)
    aux = one(state, x)[1]["aux"]
    assert aux["float"] == 0.1 and aux["int"] == 0 and aux["bf16"].dtype == BF16  # as the function returned it


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        (lambda n: {"name": str(n)}, r"accumulate: aux name of .*'0' and '1', expected tensors, numbers, or"),
        (lambda n: {"at": None if n else torch.ones(1)}, r"accumulate: aux at .*a tensor of shape \(1,\) and None"),
        (lambda n: {"a": 1} if n else {"b": 1}, r"accumulate: the function returned aux .* for microbatch 0 and"),
        (lambda n: {"m": torch.ones(1, n + 1)}, r"accumulate: aux m .*of the shapes \[\(1, 1\), \(1, 2\)\]"),
        (lambda n: {"m": torch.ones(1) if n else torch.ones(())}, r"accumulate: aux m .*\(\) and .*\(1,\)"),
    ],
)
def test_aux_that_cannot_be_put_together(aux: Any, message: str) -> None:
    calls: list[int] = []

    def fn(p: Any, x: torch.Tensor) -> Any:
        calls.append(1)
        return (p["w"] * x).mean(), aux(len(calls) - 1)

    step = fz.accumulate(fz.train_step(fn, fz.sgd(1.0), has_aux=True), 2)
    state = step.init({"w": torch.ones(1, dtype=F64)})
    for call in (step, step.vjp, step.forward):
        calls.clear()
        with pytest.raises(ValueError, match=message):
            call(state, values(2))


def test_integer_outputs_beside_a_loss_have_no_cotangent() -> None:
    step = fz.accumulate(
        fz.train_step(lambda p, x: ((p["w"] * x).mean(), torch.tensor(len(x)), (x > 1).sum()), fz.sgd(1.0)), 2
    )
    x = values(4)
    out, pullback = step.vjp(step.init({"w": torch.ones(1, dtype=F64)}), x)
    assert out[1].tolist() == [2, 2] and out[2].shape == (2,)
    grads, _ = pullback((torch.ones((), dtype=F64), None, torch.zeros_like(out[2])))
    assert_trees_close(fz.gather(grads)["w"], x.mean(0), rtol=1e-12)


@pytest.mark.parametrize("dim", [2, -3, (5,)])
def test_a_dim_that_an_input_does_not_have_is_refused(dim: Any) -> None:
    step = fz.accumulate(fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.sgd(1.0)), 2, in_dims=dim)
    with pytest.raises(ValueError, match=r"input 0 has shape \(4, 1\), expected a dim -?\d to split into 2"):
        step(step.init({"w": torch.ones(1)}), torch.ones(4, 1))


class Batch(collections.UserDict):  # type: ignore[type-arg]
    """As a tokenizer of transformers returns one; no pytree."""


@pytest.mark.parametrize("count", [1, 2])
def test_a_mapping_that_is_no_pytree_is_not_given_whole_to_every_microbatch(count: int) -> None:
    x = torch.arange(4.0, dtype=F64)
    step = fz.train_step(lambda p, batch, _: (p["w"] * batch["x"]).sum(), fz.sgd(0.1))
    params, whole = {"w": torch.ones((), dtype=F64)}, fz.accumulate(step, count, in_dims=(None, 0))
    step = fz.accumulate(step, count)
    assert whole.vjp(whole.init(params), Batch(x=x), x)[0] == 6.0
    if count == 1:
        assert step.forward(step.init(params), Batch(x=x), x) == 6.0
        return
    for call in (step.forward, step.vjp, step):
        with pytest.raises(TypeError, match=r"accumulate: an input holds a Batch of tensors.*Pass dict\(batch\)"):
            call(step.init(params), Batch(x=x), x)
    assert step.forward(step.init(params), dict(Batch(x=x)), x) == 3.0


@dataclasses.dataclass
class Held:
    x: Any
    note: str = ""


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Any) -> None:
        self.x = x


@pytest.mark.parametrize("make", [Held, Slotted, lambda x: Held([{"of": Slotted(x)}]), torch.distributions.Exponential])
def test_an_object_of_tensors_that_is_no_pytree_is_not_given_whole_to_every_microbatch(make: Any) -> None:
    """A function, a module and an object of no rows are: nobody would split them."""
    y = torch.arange(4.0, dtype=F64)
    plain = fz.train_step(lambda p, batch, y: (p["w"] * y).mean(), fz.sgd(0.1))
    step, whole = fz.accumulate(plain, 2), fz.accumulate(plain, 2, in_dims=(None, 0))
    state, held = plain.init({"w": torch.ones((), dtype=F64)}), make(torch.ones(4, 1, dtype=F64))
    for call in (step.forward, step.vjp, step):
        with pytest.raises(
            TypeError, match=r"accumulate: an input holds a \w+ of tensors, .*register_pytree_node.*None"
        ):
            call(state, held, y)
    assert whole.forward(state, held, y) == plain.forward(state, held, y) == 1.5
    assert str(fz.explain(plain, state, held, y)) == str(fz.explain(plain, state, None, y))
    for other in (lambda: y, torch.nn.Linear(4, 2), Held(3, "a"), Held(torch.tensor(2.0)), Held(lambda: y)):
        assert step.forward(state, other, y) == 1.5
