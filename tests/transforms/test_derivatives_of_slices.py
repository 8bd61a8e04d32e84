"""Derivatives by leaves that are cut over a tensor axis: pullbacks, halves, products, single examples, tapes, runs."""

from __future__ import annotations

import functools
from typing import Any

import exactness
import pytest
import test_shard_tensor as functions
import torch
import whole_runs
import zoo
from halved import compare
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day, in_turns

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

F64 = torch.float64
Blocks = tuple[tuple[str, int, bool], ...]


def plain(loss: Any, params: Any, batches: list[Any], alone: bool) -> dict[str, Any]:
    """By torch.func, in one process."""

    def mean(params: Any) -> torch.Tensor:
        return torch.stack([loss(params, *batch) for batch in batches]).mean()

    grad = torch.func.grad(mean)
    grads = grad(params)
    pulled: Any = torch.func.vjp(grad, params)
    out = {"grads": grads, "hvp": pulled[1](grads)[0]}  # of a gradient that leaves out padding, another one than jvp's
    if alone:
        each: Any = functools.partial(torch.func.vmap, in_dims=(None, *[0] * len(batches[0])))
        one = torch.func.grad(lambda p, *x: loss(p, *[y[None] for y in x]))
        out["examples"] = [each(one)(params, *batch) for batch in batches]
    return out


def cut(rank: int, make: Any, sizes: tuple[int, int], transform: Any, alone: bool) -> dict[str, Any]:
    mesh = functions.meshed(sizes)
    loss, params, batches = make(mesh)
    batch = batches[rank // sizes[1]]
    step = transform(fz.train_step(loss, fz.sgd(0.1)), mesh)
    compare(step, params, batch)
    state = step.init(params)
    with fz.tape(step, state) as model:
        model(*batch).backward()
        taped = model.grads()
    pulled = step.vjp(state, *batch)
    grads = pulled[1](torch.ones_like(pulled[0]))[0]
    out = {"grads": fz.gather(grads), "taped": fz.gather(taped), "hvp": fz.gather(fz.hvp(step, state, grads, *batch))}
    if alone:
        out["examples"] = fz.per_example_grads(step, state, *batch)
    return out


def check(make: Any, sizes: tuple[int, int], transform: Any, alone: bool, **run: Any) -> None:
    loss, params, batches = make(None)
    wanted = plain(loss, dict(params), batches, alone)
    found = run_ranks(
        functools.partial(cut, make=make, sizes=sizes, transform=transform, alone=alone), sizes[0] * sizes[1], **run
    )
    for rank, got in enumerate(found):
        for name in ("grads", "taped", "hvp"):
            want = wanted["grads" if name == "taped" else name]
            assert_trees_close(dict(got[name]), dict(want), rtol=1e-10, atol=1e-12)
        if alone:
            assert_trees_close(
                dict(got["examples"]), dict(wanted["examples"][rank // sizes[1]]), rtol=1e-10, atol=1e-12
            )


def transformed(step: fz.Step, mesh: Any, plan: Any, stage: int, sequence: bool, others: tuple[str, ...]) -> fz.Step:
    step = fz.shard_tensor(step, plan, mesh=mesh, sequence=sequence)
    step = exactness.SHARDS[stage](step, **({"mesh": mesh} if stage else {}))
    step = fz.remat(step) if "remat" in others else step
    return fz.offload(step, params="host") if "offload" in others else step


def function_of(mesh: Any, layers: Any, count: int) -> Any:
    loss, params = functions.model(layers)
    ax = None if mesh is None else fz.parallel.axis(mesh, "tp")
    return (lambda p, x: loss(p, x, ax)), params, functions.batches(count)


class Fed(zoo.Model):
    """With an input that has a cotangent."""

    def forward(self, tokens: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = self.embedding(tokens) + more
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def module_of(mesh: Any, blocks: Blocks, tied: bool, count: int) -> Any:
    fed = Fed(blocks, tied).double()
    fed.load_state_dict(zoo.made(blocks, tied).state_dict())
    apply, params = fz.functional(fed)

    def loss(p: Any, tokens: torch.Tensor, targets: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(apply(p, tokens, more).flatten(0, 1), targets.flatten())

    more = torch.randn(2, 5, zoo.WIDTH, dtype=F64, generator=torch.Generator().manual_seed(2))
    return loss, params, [(*batch, more) for batch in zoo.batches(count)]


common = {
    "sizes": st.sampled_from(functions.MESHES),
    "stage": st.integers(0, 3),
    "others": st.sets(st.sampled_from(["remat", "offload"])).map(lambda names: tuple(sorted(names))),
}


@in_turns(3, "derivatives of slices")
@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(layers=functions.drawn_layers, **common)
def test_functions(layers: Any, sizes: tuple[int, int], stage: int, others: tuple[str, ...]) -> None:
    layers = layers if functions.plan_of(layers) else (*layers, ("mlp", 5))
    sizes = sizes if stage else (1, sizes[1])
    transform = functools.partial(
        transformed, plan=functions.plan_of(layers), stage=stage, sequence=False, others=others
    )
    check(functools.partial(function_of, layers=layers, count=sizes[0]), sizes, transform, True)


@in_turns(3, "derivatives of slices")
@pytest.mark.usefixtures("hazards")
@by_day(5)
@given(blocks=zoo.drawn_blocks, tied=st.booleans(), sequence=st.booleans(), **common)
def test_modules(
    blocks: Blocks, tied: bool, sequence: bool, sizes: tuple[int, int], stage: int, others: tuple[str, ...]
) -> None:
    sizes = sizes if stage else (1, sizes[1])
    plan = {**zoo.made(blocks, tied).plan([True] * len(blocks)), "embedding": "vocabulary"}
    transform = functools.partial(transformed, plan=plan, stage=stage, sequence=sequence, others=others)
    check(functools.partial(module_of, blocks=blocks, tied=tied, count=sizes[0]), sizes, transform, True)


@in_turns(8, "on processes, as on threads")
def test_on_real_processes() -> None:
    blocks = (("Attention", 1, True), ("Fused", 3, False))
    plan = {**zoo.made(blocks, True).plan([True] * 2), "embedding": "vocabulary"}
    transform = functools.partial(transformed, plan=plan, stage=3, sequence=True, others=("remat",))
    make = functools.partial(module_of, blocks=blocks, tied=True, count=2)
    check(make, (2, 2), transform, True, backend="processes")


@pytest.mark.parametrize("which", ["b1", "b2", "eps", "weight_decay"])
def test_by_an_optimizers_numbers_where_some_leaves_of_a_unit_are_cut(which: str) -> None:
    """What is behind the leaves in a buffer is computed with too, and must be of the numbers that others have."""
    made = torch.Generator().manual_seed(0)
    params = {"up": torch.randn(6, 10, generator=made, dtype=F64), "b": torch.ones(6, dtype=F64)}

    def trained(lr: torch.Tensor, number: torch.Tensor, sizes: tuple[int, int] | None) -> Any:
        optimizer = fz.adamw(lr, **{which: number})  # type: ignore[arg-type]
        if sizes is None:
            step = fz.train_step(lambda p: ((p["up"] ** 4).sum() * p["b"]).mean(), optimizer)
        else:
            mesh = functions.meshed(sizes)
            ax = fz.parallel.axis(mesh, "tp")
            loss = lambda p: (fz.parallel.sum((p["up"] ** 4).sum(), ax) * p["b"]).mean()
            step = fz.shard_tensor(fz.train_step(loss, optimizer), {"up": 1}, mesh=mesh)
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state)
        return step.forward(state)

    at = torch.tensor(0.05, dtype=F64), torch.tensor(0.3, dtype=F64)
    want = torch.func.grad(functools.partial(trained, sizes=None), (0, 1))(*at)
    for got in run_ranks(lambda rank: torch.func.grad(functools.partial(trained, sizes=(1, 2)), (0, 1))(*at), 2):
        assert_trees_close(got, want, rtol=1e-10)


# ---- of whole runs, by whole leaves and an optimizer's numbers: as in one process

KINDS = (("mlp", 4), ("fused", 3)), (("gathered", 5), ("split", 1)), (("whole", 2), ("mlp", 3))


def whole_run(
    rank: int, layers: Any, sizes: tuple[int, int], stage: int, others: Any, optimizer: str, how: str, name: str
) -> Any:
    loss, params = functions.model(layers)
    mesh = functions.meshed(sizes)
    ax = fz.parallel.axis(mesh, "tp")
    chosen = functions.chosen_of(stage, others, functions.plan_of(layers), mesh)
    batch = functions.batches(sizes[0])[rank // sizes[1]]
    run = whole_runs.by_steps(
        lambda p, x: loss(p, x, ax), optimizer, 2, batch, batch, functools.partial(strategies.apply, chosen=chosen), how
    )
    return whole_runs.TRANSFORMS[name](run, (params, *whole_runs.NUMBERS))


@in_turns(3, "derivatives of slices")
@pytest.mark.usefixtures("hazards")
@by_day(6)
@given(
    layers=st.sampled_from(KINDS),
    sizes=st.sampled_from(functions.MESHES[:3]),
    stage=st.integers(0, 3),
    others=st.sampled_from([("shard", "tensor"), ("tensor", "remat", "shard"), ("accumulate", "tensor", "shard")]),
    optimizer=st.sampled_from(["sgd", "adamw", "clipped", "lamb", "block clipped"]),
    how=st.sampled_from(["step", "vjp", "scan"]),
    name=st.sampled_from(["grad", "grad_of_grad", "pushed_grad", "over_rates", "grads_over_rates"]),
)
def test_whole_runs_of_slices(
    layers: Any, sizes: tuple[int, int], stage: int, others: Any, optimizer: str, how: str, name: str
) -> None:
    loss, params = functions.model(layers)
    sizes = sizes if stage else (1, sizes[1])
    data: Any = functions.batches(sizes[0])
    plain = whole_runs.in_one_process(loss, optimizer, 2, data, data)
    want = whole_runs.TRANSFORMS[name](plain, (params, *whole_runs.NUMBERS))
    case = functools.partial(
        whole_run,
        layers=layers, sizes=sizes, stage=stage, others=others, optimizer=optimizer, how=how, name=name,
    )  # fmt: skip
    whole_runs.assert_found(run_ranks(case, sizes[0] * sizes[1]), want, name)
