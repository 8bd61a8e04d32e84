"""fz.scan: what it takes, what it gives, what it keeps; its derivatives are drawn in tests/test_transformed.py."""

from __future__ import annotations

from typing import Any

import pytest
import scenarios
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import NIGHTLY
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import fzero as fz
from fzero.testing import LiveBytes, assert_trees_close, assert_trees_equal, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}
MADE = torch.Generator().manual_seed(0)
X, Y = torch.randn(7, 4, 5, dtype=F64, generator=MADE), torch.randn(7, 4, 2, dtype=F64, generator=MADE)
LOSS, PARAMS = scenarios.stack(blocks=2)


def looped(step: Any, state: Any, batches: Any) -> Any:
    found = []
    for batch in batches:
        state, metrics = step(state, *batch)
        found.append(metrics)
    return state, {name: torch.stack([torch.as_tensor(each[name]) for each in found]) for name in found[0]}


@given(steps=st.integers(1, 7), every=st.one_of(st.none(), st.integers(1, 9)), stage=st.integers(0, 3))
def test_it_is_a_loop(steps: int, every: int | None, stage: int) -> None:
    """With or without a transform around it, to the bit."""

    def rank_main(rank: int) -> None:
        step = SHARDS[stage](fz.train_step(LOSS, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(0.01))))
        state = step.init(PARAMS)
        batches = [*zip(X[:steps], Y[:steps], strict=True)]
        want, metrics = looped(step, state, batches)
        for given_ in (batches, (X[:steps], Y[:steps])):
            got, found = fz.scan(step, state, given_, every)
            assert_trees_equal(got, want)
            assert_trees_equal(found, metrics)

        def inside(lr: torch.Tensor) -> Any:
            own = SHARDS[stage](fz.train_step(LOSS, fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(lr))))
            new, found = fz.scan(own, own.init(PARAMS), batches, every)
            return found["loss"].sum(), (fz.gather(new.params), found["grad_norm"])

        _, (params, norms) = torch.func.grad(inside, has_aux=True)(torch.tensor(0.01, dtype=F64))
        assert_trees_close(params, fz.gather(want.params), rtol=1e-12)
        assert_trees_close(norms, metrics["grad_norm"], rtol=1e-12)

    run_ranks(rank_main, 2 if stage else 1)


def test_a_state_goes_on_after_it() -> None:
    """What comes out of a transform trains on as if it had not been in one."""
    step = fz.train_step(LOSS, fz.adamw(0.01))
    want, _ = looped(step, step.init(PARAMS), zip(X, Y, strict=True))

    def first(params: Any) -> Any:
        state, metrics = fz.scan(step, step.init(params), (X[:4], Y[:4]))
        return metrics["loss"].sum(), state

    _, state = torch.func.grad(first, has_aux=True)(PARAMS)
    assert state.step == 4
    got, _ = fz.scan(step, state, (X[4:], Y[4:]))
    assert_trees_close(fz.gather(got.params), fz.gather(want.params), rtol=1e-12)


def test_one_input_aux_and_numbers() -> None:
    step = fz.train_step(lambda p, x: ((p["w"] * x).sum(), {"seen": x.sum(), "two": 2}), fz.sgd(0.1), has_aux=True)
    state, metrics = fz.scan(step, step.init({"w": torch.ones(3)}), [torch.ones(3)] * 5)
    assert state.step == 5
    assert_trees_equal(metrics["aux"], {"seen": torch.full((5,), 3.0), "two": torch.full((5,), 2)})
    told = fz.train_step(lambda p, x: ((p["w"] * x).sum(), "words"), fz.sgd(0.1), has_aux=True)
    with pytest.raises(TypeError, match="got a metric, or aux, of 'words', expected tensors or numbers"):
        fz.scan(told, told.init({"w": torch.ones(3)}), [torch.ones(3)] * 5)


def test_batches_that_are_none() -> None:
    step = fz.train_step(LOSS, fz.sgd(0.1))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"scan: got batches=\[\], expected at least one"):
        fz.scan(step, state, [])
    with pytest.raises(ValueError, match=r"scan: got inputs of .*7.*6.* steps, expected the same number"):
        fz.scan(step, state, (X, Y[:6]))
    with pytest.raises(TypeError, match="scan: got batches=tuple, expected a list of batches"):
        fz.scan(step, state, ((X[0], Y[0]), (X[1], Y[1])))
    donating = fz.donate(step)
    with pytest.raises(TypeError, match=r"scan: got .* that torch\.func\.grad transforms, and the step donates"):
        torch.func.grad(lambda x: fz.scan(donating, donating.init(PARAMS), (x, Y))[1]["loss"].sum())(X)


def kept(steps: int, every: int | None, width: int) -> float:
    """Bytes that a derivative through a run keeps at most, in states of params and moments."""
    made = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(width, width, generator=made) * 0.05}
    x = torch.randn(steps, 1, width, generator=made)

    def trained(lr: torch.Tensor) -> torch.Tensor:
        step = fz.train_step(lambda p, x: (x @ p["w"]).square().mean(), fz.adamw(lr))
        state, _ = fz.scan(step, step.init(params), (x,), every)
        return step.forward(state, x[0])

    with LiveBytes() as live:
        torch.func.grad(trained)(torch.tensor(0.01))
    return live.peak / (3 * 4 * width * width)


def test_memory_grows_with_the_square_root() -> None:
    """Two times the root of the steps, in states, and one step's graph of some states."""
    one = kept(1, None, 128)
    for steps in (16, 100) if NIGHTLY else (25,):
        most = 3 * steps**0.5 + one
        assert kept(steps, None, 128) < most < steps + one, (steps, most)
    assert kept(25, 1, 128) > 25  # without: a state for each step


def test_pytrees_of_inputs() -> None:
    step = fz.train_step(lambda p, batch: ((p["w"] * batch["x"]).sum() - batch["y"]) ** 2, fz.sgd(0.01))
    state = step.init({"w": torch.ones(3)})
    rows = {"x": torch.randn(4, 3, generator=MADE), "y": torch.randn(4, generator=MADE)}
    got, metrics = fz.scan(step, state, (rows,))
    want, losses = looped(step, state, [(pytree.tree_map(lambda x: x[i], rows),) for i in range(4)])
    assert_trees_equal(got, want)
    assert_trees_equal(metrics["loss"], losses["loss"])


ELSEWHERE = torch.nn.Parameter(torch.ones(3))


def test_what_torch_has_compiled_elsewhere_is_none_of_the_steps() -> None:
    """Functions of torch that fn names lead to all that was compiled in the process, Parameters among it."""
    torch.compile(lambda x: x * ELSEWHERE, backend="eager")(torch.ones(3))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            make_fx(loss)
        return (fz.unit(lambda q, x: q["w"] * x)(p["a"], x)).sum()

    step = fz.train_step(loss, fz.sgd(0.1))
    state = step.init({"a": {"w": torch.ones(3)}})

    def losses(x: torch.Tensor) -> torch.Tensor:
        return fz.scan(step, state, [x] * 3)[1]["loss"].sum()

    torch.testing.assert_close(torch.func.grad(losses)(torch.ones(3)), torch.full((3,), 2.4))


UNIT = fz.unit(lambda p, x: torch.tanh(x @ p["w"] + p["b"]))
LEAVES = {
    "a": torch.linspace(0.5, 1.5, 5, dtype=F64),  # small, of the root, and first
    "blocks": [{"b": torch.zeros(5, dtype=F64), "w": torch.eye(5, dtype=F64) + i} for i in range(2)],
    "unread": torch.ones(2, dtype=F64),
}


def optimizer(name: str, rate: torch.Tensor) -> Any:
    if name == "adamw":
        return fz.adamw(rate)

    def update(grads: Any, old: Any, params: Any) -> Any:
        new = pytree.tree_map(lambda b, g: 0.9 * b + g, old, grads)
        return pytree.tree_map(lambda b: -rate * b, new), new

    init = lambda p: pytree.tree_map(torch.zeros_like, p)
    return fz.GradientTransformation(init, update, elementwise=name == "own, by elements")


def keeping(step: Any, what: str) -> Any:
    """With leaves and other state that a step hands on as they are, or changes now and then."""
    if what == "lookahead":
        return fz.lookahead(step, 2)
    if what == "ema":
        return fz.ema(step, 0.9)
    return fz.freeze(step, what) if what else step


@given(
    name=st.sampled_from(["adamw", "own", "own, by elements"]),
    whats=st.lists(st.sampled_from(["lookahead", "ema", "unread", "blocks.0.*"]), max_size=2, unique=True),
    reads=st.integers(0, 2),
    steps=st.integers(1, 4),
    every=st.integers(1, 4),
    stage=st.integers(0, 3),
    order=st.integers(1, 2),
)
def test_drawn_derivatives(
    name: str, whats: list[str], reads: int, steps: int, every: int, stage: int, order: int
) -> None:
    """By the rate, and by the params where they are whole: those of a loop, whatever its steps hand on."""

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        for block in p["blocks"][:reads]:
            x = UNIT(block, x)
        return (x * p["a"]).square().mean()

    def after(rate: torch.Tensor, leaves: Any, scanned: bool) -> torch.Tensor:
        step = SHARDS[stage](fz.train_step(loss, optimizer(name, rate)))
        for what in whats:
            step = keeping(step, what)
        state = step.init(leaves)
        batches = [(x,) for x in X[:steps]]
        state = fz.scan(step, state, batches, every)[0] if scanned else looped(step, state, batches)[0]
        full = fz.gather(state.params)
        return step.forward(state, X[steps]) + full["unread"].sum() * full["a"].prod()  # type: ignore[no-any-return]

    def rank_main(rank: int) -> None:
        rate = torch.tensor(0.05, dtype=F64)
        argnums = 0 if stage else (0, 1)

        def derived(scanned: bool) -> Any:
            grad = torch.func.grad(lambda r, p: after(r, p, scanned), argnums)
            if order == 1:
                return grad(rate, LEAVES)
            squares = lambda r, p: sum(x.square().sum() for x in pytree.tree_leaves(grad(r, p)))
            return torch.func.grad(squares, argnums)(rate, LEAVES)

        assert_trees_close(derived(True), derived(False), rtol=1e-9)

    run_ranks(rank_main, 2 if stage else 1)
