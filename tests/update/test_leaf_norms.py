"""metrics=("leaf_norms",): the norms of what a step has, does and leaves, by leaf, and the same numbers besides."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.base import pytree
from fzero.state.squares import moments_by_name
from fzero.testing import assert_trees_equal, run_ranks, strategies

F32, F64 = torch.float32, torch.float64
OPTIMIZERS = {
    "adamw": fz.adamw(1e-2),
    "adam": fz.chain(fz.clip_by_value(0.1), fz.adam(1e-2, amsgrad=True)),
    "clipped": fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2)),
    "sgd": fz.sgd(0.1),
    "lion": fz.lion(1e-2),
    "lamb": fz.lamb(1e-2),
    "partition": fz.partition({"*b": fz.sgd(0.1, momentum=0.9), "*": fz.adamw(1e-2)}),
    "muon": fz.partition({"*w": fz.muon(1e-2), "*": fz.adamw(1e-2)}),
}
POLICIES = {
    "none": None,
    "exact": dataclasses.replace(fz.Policy.exact(F32), compute=F32),
    "compact16": dataclasses.replace(fz.Policy.compact16(), compute=F32),
}


def block(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ p["w"] + p["b"])


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for own in p["blocks"]:
        x = fz.unit(block)(own, x)
    return (x.square().mean() + p["large"].to(x.dtype).square().mean()) * 10


def params_of(dtype: torch.dtype, large: int) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / 2).to(dtype)

    return {"blocks": [{"w": draw(9, 9), "b": draw(9)} for _ in range(2)], "large": draw(large)}


def values(*trees: fz.Sharded) -> dict[str, torch.Tensor]:
    """Path -> a leaf in full."""
    out = {}
    for tree in trees:
        names, leaves, _ = pytree.named_leaves(fz.gather(tree))
        out |= {name: x.double() for name, x in zip(names, leaves, strict=True) if x is not None}
    return out


def check(got: Any, want: dict[str, torch.Tensor], tolerance: float, of: dict[str, torch.Tensor] | None = None) -> None:
    assert list(got) == list(want)
    for path, norm in got.items():
        size = (of or want)[path].norm().item()
        assert norm.dtype == F64 and abs(norm.item() - want[path].norm().item()) <= tolerance * size + 1e-12, path


def compare(step: fz.Step, params: Any, x: torch.Tensor, rounding: float) -> None:
    """Two updates of a step with the metric and without it."""
    measured = dataclasses.replace(step, metrics=("leaf_norms",))
    states = [own.init(params) for own in (step, measured)]
    for _ in range(2):
        old = values(states[1].params)
        (plain, others), (new, metrics) = (own(state, x) for own, state in zip((step, measured), states, strict=True))
        states = [plain, new]
        norms = metrics["leaf_norms"]
        del metrics["leaf_norms"]
        assert_trees_equal(metrics, others)
        assert_trees_equal(fz.gather(new.params), fz.gather(plain.params))
        assert_trees_equal(fz.gather(new.moments), fz.gather(plain.moments))
        now = values(new.params)
        trained = {path for row in new.layout.rows if not row.frozen for path in [row.path]}
        now, old = ({path: own[path] for path in own if path in trained} for own in (now, old))
        check(norms["params"], now, 1e-6 + rounding)
        check(norms["updates"], {path: now[path] - old[path] for path in now}, 1e-6 + rounding, now)
        total = torch.stack([*norms["grads"].values()]).norm()
        assert abs(total - metrics["grad_norm"]) <= 1e-9 * total and list(norms["grads"]) == list(now)
        moments = moments_by_name(new.moments)
        assert list(norms["moments"]) == [*moments] or set(norms["moments"]) == set(moments)
        for name, trees in moments.items():
            want = values(*trees)
            check({path: norms["moments"][name][path] for path in want}, want, 1e-6 + 5 * rounding)


@pytest.mark.usefixtures("hazards")
@by_day(8)
@given(
    chosen=strategies.transforms(stages=(0, 1, 2, 3)),
    world=st.integers(1, 3),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    policy=st.sampled_from([*POLICIES]),
    wide=st.booleans(),
    large=st.sampled_from([70, 70_001]),
)
def test_are_those_of_the_gathered_trees(
    chosen: Any, world: int, optimizer: str, policy: str, wide: bool, large: int
) -> None:
    dtype = F64 if wide and policy == "none" else F32
    policy = "none" if optimizer in ("lamb", "muon") else policy
    chosen = [pair for pair in chosen if pair[0] != "autocast"]
    world = world if any(name.startswith("shard") for name, _ in chosen) else 1

    def on_rank(rank: int) -> None:
        step = strategies.apply(fz.train_step(loss, OPTIMIZERS[optimizer], POLICIES[policy]), chosen)
        g = torch.Generator().manual_seed(rank)
        compare(step, params_of(dtype, large), torch.randn(4, 9, generator=g).to(dtype), 0.01 * (policy == "compact16"))

    run_ranks(on_rank, world)


def on_processes(rank: int) -> None:
    for transform in (fz.shard_zero1, fz.shard_zero3):
        g = torch.Generator().manual_seed(rank)
        for name in ("clipped", "muon"):
            step = fz.accumulate(transform(fz.train_step(loss, OPTIMIZERS[name])), 2)
            compare(step, params_of(F32, 70_001), torch.randn(4, 9, generator=g), 0.0)
        compare(
            fz.fuse_update(transform(fz.train_step(loss, fz.adamw(1e-2)))), params_of(F32, 70), torch.ones(4, 9), 0.0
        )


@in_turns(8, "on processes, as on threads")
def test_on_real_processes() -> None:
    run_ranks(on_processes, 2, backend="processes")


def test_differences_of_params_in_bfloat16_are_not_rounded() -> None:
    step = fz.train_step(loss, fz.adafactor(1e-2), POLICIES["compact16"], metrics=("leaf_norms",))
    state = step.init(params_of(F32, 70))
    new, metrics = step(state, torch.ones(4, 9))
    old, now = values(state.params), values(new.params)
    check(metrics["leaf_norms"]["updates"], {path: now[path] - old[path] for path in now}, 1e-6)


@pytest.mark.parametrize("size", [0.0, 1e-25, 1e15])
def test_squares_beyond_single_precision(size: float) -> None:
    """Those that the update of a large buffer adds up: of moments of tiny grads, and of many values in some pieces."""
    policy = fz.Policy(param=F32, grad=torch.bfloat16, moment=F32)  # which torch's own kernels do not take
    fn, optimizer = (lambda p: sum(x.sum() for x in p.values())), fz.sgd(0.0, momentum=0.9)
    step = fz.donate(fz.train_step(fn, optimizer, policy, metrics=("leaf_norms",)))
    sizes = [100_003, 64, 5, 70_000]
    params = {str(i): torch.full((n,), size * (1 + i)) for i, n in enumerate(sizes)}
    norms = step(step.init(params))[1]["leaf_norms"]
    for i, n in enumerate(sizes):
        torch.testing.assert_close(norms["params"][str(i)], params[str(i)].double().norm(), rtol=1e-6, atol=0)
        torch.testing.assert_close(norms["moments"]["momentum"][str(i)], torch.tensor(n, dtype=F64).sqrt())


@pytest.mark.parametrize("fused", [False, True])
def test_of_an_update_that_is_skipped(fused: bool) -> None:
    step = fz.train_step(loss, fz.adamw(1e-2), metrics=("leaf_norms",))
    step = fz.fuse_update(step) if fused else step
    state = step.init(params_of(F32, 70))
    _, metrics = step(state, torch.full((4, 9), float("nan")))
    norms = metrics["leaf_norms"]
    check(norms["params"], values(state.params), 1e-6)
    assert metrics["skipped"] and all(x == 0 for x in norms["updates"].values())
    assert norms["grads"]["blocks.0.w"].isnan() and norms["moments"]["mu"]["large"] == 0


def test_of_frozen_leaves_there_are_none() -> None:
    step = fz.freeze(fz.train_step(loss, fz.adamw(1e-2), metrics=("leaf_norms",)), "blocks.0.*")
    _, metrics = step(step.init(params_of(F32, 70)), torch.ones(4, 9))
    assert list(metrics["leaf_norms"]["params"]) == ["blocks.1.b", "blocks.1.w", "large"]
    step = fz.freeze(fz.train_step(loss, fz.sgd(0.1), metrics=("leaf_norms",)), "*")
    assert "metrics: leaf_norms" in str(step)


def test_in_transforms_scans_and_pipelines() -> None:
    step = fz.train_step(loss, fz.adamw(1e-2), metrics=("leaf_norms",))
    params, x = params_of(F64, 70), torch.ones(4, 9, dtype=F64)
    state = step.init(params)
    one = step(state, x)[1]["leaf_norms"]

    def total(large: torch.Tensor) -> torch.Tensor:
        norms = step(step.init({**params, "large": large}), x)[1]["leaf_norms"]
        return sum(norms[kind]["large"] for kind in ("params", "grads", "updates")) + norms["moments"]["nu"]["large"]

    slope, moved = torch.func.grad(total)(params["large"]), torch.zeros(70, dtype=F64)
    moved[3] = 1e-6
    near = (total(params["large"] + moved) - total(params["large"] - moved)) / 2e-6
    assert slope[3].item() == pytest.approx(near.item(), rel=1e-6)
    mapped = torch.vmap(step, in_dims=(0, None))(fz.stack([state, state]), x)[1]["leaf_norms"]
    scanned = fz.scan(step, state, x[None])[1]["leaf_norms"]
    for kind in ("params", "grads", "updates"):
        for path, norm in one[kind].items():
            assert mapped[kind][path][1].item() == pytest.approx(norm.item(), rel=1e-6)
            assert scanned[kind][path][0].item() == pytest.approx(norm.item(), rel=1e-6)
    first = fz.train_step(lambda p, x: block(p, x), fz.sgd(0.1), metrics=("leaf_norms",))
    last = fz.train_step(lambda p, x: block(p, x).mean(), fz.sgd(0.1), metrics=("leaf_norms",))
    pipe = fz.pipeline([first, last], fz.schedules.gpipe(stages=2, microbatches=2))
    _, metrics = cast(Any, pipe)(pipe.init(params["blocks"]), x)
    grads = [norm for stage in (0, 1) for norm in metrics[f"leaf_norms.{stage}"]["grads"].values()]
    assert torch.stack(grads).norm().item() == pytest.approx(metrics["grad_norm"].item())


@pytest.mark.parametrize("world", [1, 2])
def test_of_a_member_of_a_map_that_is_skipped(world: int) -> None:
    """Its gradients are what they are, those of leaves that are finite too."""

    def rank_main(rank: int) -> None:
        step = fz.train_step(
            lambda p, x: (p["a"] * x).sum() + (p["b"] ** 2).sum(), fz.adamw(1e-2), metrics=("leaf_norms",)
        )
        step = fz.shard_zero2(step) if world > 1 else step
        state = step.init({"a": torch.ones(3, dtype=F64), "b": torch.ones(2, dtype=F64)})
        inputs = torch.ones(2, 3, dtype=F64)
        inputs[1, 0] = float("nan")
        new, mapped = torch.vmap(step)(fz.stack([state, state]), inputs)
        assert mapped["skipped"].tolist() == [False, True]
        for number, member in enumerate(fz.unstack(new)):
            alone, metrics = step(state, inputs[number])
            assert_trees_equal(fz.gather(member.params), fz.gather(alone.params))
            for kind in ("params", "grads", "updates"):
                for path, norm in metrics["leaf_norms"][kind].items():
                    got = mapped["leaf_norms"][kind][path][number]
                    assert got.item() == pytest.approx(norm.item(), rel=1e-9, abs=1e-12, nan_ok=True), (kind, path)
        assert mapped["leaf_norms"]["grads"]["a"].isnan().tolist() == [False, True]

    run_ranks(rank_main, world)


def test_other_names_are_refused() -> None:
    with pytest.raises(TypeError, match="train_step: got metrics='leaf_norms', expected a tuple of names"):
        fz.train_step(loss, fz.sgd(0.1), metrics="leaf_norms")
    with pytest.raises(ValueError, match=r"train_step: got metrics=\('norms',\), expected none or \('leaf_norms',\)"):
        fz.train_step(loss, fz.sgd(0.1), metrics=("norms",))
