"""Pure functions of slices, as a user writes them: loss and gradients of one process, or refused by file and line."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns

import fzero as fz
from fzero.comm.axis import Axis
from fzero.parallel import AxisTypeError
from fzero.testing import assert_trees_close, run_ranks

P = fz.parallel
Params = dict[str, torch.Tensor]
Fn = Callable[[Params, torch.Tensor, Axis], torch.Tensor]
SHAPES = {"up": (4, 6), "down": (6, 4), "bias": (4,), "table": (6, 4), "fused": (4, 12)}
PLAN = {"up": 1, "down": 0, "table": 0, "fused": P.cut(1, parts=(6, 6))}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


PARAMS, X = {name: drawn(*shape, seed=i) for i, (name, shape) in enumerate(SHAPES.items())}, drawn(3, 4, seed=9)


def on_rank(rank: int, fn: Fn, params: Params) -> tuple[torch.Tensor, Params]:
    ax = P.axis(None, "tp")
    step = fz.shard_tensor(fz.train_step(lambda p, x: fn(p, x, ax), fz.sgd(0.1)), PLAN)
    loss, pullback = step.vjp(step.init(params), X, argnums=())
    return loss, dict(fz.gather(pullback(torch.ones_like(loss))[0]))


def is_equal(fn: Fn, ranks: int = 2, rtol: float = 1e-10, params: Params = PARAMS) -> bool:
    """Whether ranks have what one has; the other way is that they are refused."""
    (want,) = run_ranks(functools.partial(on_rank, fn=fn, params=params), 1)
    try:
        found = run_ranks(functools.partial(on_rank, fn=fn, params=params), ranks)
    except fz.testing.RankError as error:
        assert isinstance(error.__cause__, AxisTypeError) and "test_pure_functions.py:" in str(error.__cause__)
        return False
    for own in found:
        assert_trees_close(own, want, rtol=rtol, atol=1e-12)
    return True


# ---- what no rule knows


def up(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    return torch.tanh(P.copy(x, ax) @ p["up"])


def total(x: torch.Tensor, ax: Axis) -> torch.Tensor:
    return P.sum(x, ax).square().sum()


def to_row(h: torch.Tensor, p: Params, ax: Axis) -> torch.Tensor:
    return total(h @ p["down"], ax)


def written(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    out = P.copy(x, ax).clone()
    out[0] = (up(p, x, ax) @ p["down"])[0]
    return total(out, ax)


def embedded(p: Params, x: torch.Tensor, ax: Axis, masks: bool = True) -> torch.Tensor:
    count = p["table"].shape[0]
    place = torch.tensor([0, 5, 3]) - count * ax.rank
    outside = (place < 0) | (place >= count)
    rows = F.embedding(place.masked_fill(outside, 0), p["table"])
    return (P.sum(rows.masked_fill(outside[:, None], 0.0) if masks else rows, ax) + x).square().mean()


def experts(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    gates = P.split((x @ p["bias"][:, None]).expand(3, 6).softmax(-1), ax, 1)
    own = [gates[:, i, None] * (P.copy(x, ax) * p["table"][i]) for i in range(p["table"].shape[0])]
    return total(torch.stack(own).sum(0), ax)


def probabilities(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    h = up(p, x, ax)
    top = P.gather(h.detach().amax(-1, keepdim=True), ax, -1).amax(-1, keepdim=True)
    e = (h - P.copy(top, ax)).exp()
    return to_row(e / P.copy(P.sum(e.sum(-1, keepdim=True), ax), ax), p, ax)


def on_first_rank(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    return total(up(p, x, ax) @ p["down"] + P.copy(p["bias"], ax) * (ax.rank == 0), ax)


def gated(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    gate, value = (P.copy(x, ax) @ p["fused"]).chunk(2, -1)
    return to_row(gate.sigmoid() * value, p, ax)


def balanced(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
    """Experts, whose balance loss leaves by a name."""
    fz.collect((x @ p["bias"]).square().mean(), "balance")
    return experts(p, x, ax) + sum(fz.collected("balance"))


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 3


class Normed(Scaled):
    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / grads[0].norm()


def hooked(x: torch.Tensor) -> torch.Tensor:
    if x.requires_grad:
        x.register_hook(lambda grad: grad / grad.norm())
    return x


EQUAL: dict[str, Fn] = {f.__name__: f for f in (embedded, experts, balanced, probabilities, on_first_rank, gated)} | {
    "first of fused": lambda p, x, ax: to_row((P.copy(x, ax) @ p["fused"])[:, : len(p["down"])], p, ax),
    "added by one": lambda p, x, ax: (P.sum(torch.addmm(x.new_zeros(4), up(p, x, ax), p["down"]), ax) + x).sin().sum(),
    "turned round": lambda p, x, ax: to_row(P.ring_shift(P.ring_shift(up(p, x, ax), ax), ax), p, ax),
    "of ones": lambda p, x, ax: P.sum((h := up(p, x, ax)).sum(), ax) / P.sum(torch.ones_like(h).sum(), ax),
    "where zeros": lambda p, x, ax: to_row(torch.where((h := up(p, x, ax)) > 0, h, torch.zeros_like(h)), p, ax),
    "ones of a sum": lambda p, x, ax: total((y := up(p, x, ax) @ p["down"]), ax) / torch.ones_like(y).sum(),
    "own backward": lambda p, x, ax: to_row(Scaled.apply(up(p, x, ax)), p, ax),  # type: ignore[no-untyped-call]
    "mean of copies": lambda p, x, ax: to_row(up(p, P.sum(P.copy(x, ax) / ax.size, ax), ax), p, ax),
    "in another order": lambda p, x, ax: P.sum(up(p, x, ax).sort(0)[0].square().sum(), ax),
}
REFUSED: dict[str, Fn] = {
    "written": written,
    "unmasked": functools.partial(embedded, masks=False),
    "addmm": lambda p, x, ax: total(torch.addmm(P.copy(p["bias"], ax), up(p, x, ax), p["down"]), ax),
    "addmv": lambda p, x, ax: total(torch.addmv(P.copy(p["bias"], ax), p["down"].t(), up(p, x, ax)[0]), ax),
    "baddbmm": lambda p, x, ax: total(torch.baddbmm(P.copy(x, ax)[None], up(p, x, ax)[None], p["down"][None]), ax),
    "index_put": lambda p, x, ax: total(
        P.copy(x, ax).index_put((torch.tensor([0]),), (up(p, x, ax) @ p["down"])[:1]), ax
    ),
    "scatter": lambda p, x, ax: total(
        P.copy(x, ax).scatter(0, torch.zeros(3, 4, dtype=torch.int64), up(p, x, ax) @ p["down"]), ax
    ),
    "gather": lambda p, x, ax: P.sum(up(p, x, ax).gather(1, torch.zeros(3, 1, dtype=torch.int64)).sum(), ax),
    "index_select": lambda p, x, ax: P.sum(up(p, x, ax).index_select(1, torch.tensor([0, 1])).sum(), ax),
    "along a dim": lambda p, x, ax: P.sum(torch.take_along_dim(h := up(p, x, ax), h.argsort(1)[:, :1], 1).sum(), ax),
    "joined along another": lambda p, x, ax: P.gather(up(p, x, ax), ax, 0)[:, :2].square().sum(),
    "sum of pieces": lambda p, x, ax: total(up(p, x, ax), ax),
    "scattered pieces": lambda p, x, ax: P.sum(P.reduce_scatter(up(p, x, ax), ax, 1).square().sum(), ax),
    "exchanged": lambda p, x, ax: P.sum(P.all_to_all(up(p, x, ax), ax, 1, 0)[:2].square().sum(), ax),
    "shifted": lambda p, x, ax: to_row(P.ring_shift(up(p, x, ax), ax), p, ax),
    "softmax": lambda p, x, ax: to_row(up(p, x, ax).softmax(-1), p, ax),
    "mapped": lambda p, x, ax: to_row(torch.vmap(lambda row: row.softmax(0))(up(p, x, ax)), p, ax),
    "size": lambda p, x, ax: P.sum((h := up(p, x, ax)).sum() / h.shape[-1], ax),
    "power of a size": lambda p, x, ax: to_row((h := up(p, x, ax)) * h.shape[-1] ** -0.5, p, ax),
    "length": lambda p, x, ax: to_row(up(p, x, ax) / len(p["down"]), p, ax),
    "rank": lambda p, x, ax: to_row(up(p, x, ax) * (1 + ax.rank), p, ax),
    "copies by a number": lambda p, x, ax: total(P.copy(x, ax) * 0.5, ax),
    "loss of another dim": lambda p, x, ax: P.cross_entropy(
        up(p, x, ax).t(), torch.zeros(p["up"].shape[1], dtype=torch.int64), ax
    ),
    "by ones": lambda p, x, ax: P.sum((h := up(p, x, ax)).sum(), ax) / torch.ones_like(h).sum(),
    "by whole numbers": lambda p, x, ax: to_row((h := up(p, x, ax)) / torch.ones_like(h[0]).long().sum(), p, ax),
    "by a norm": lambda p, x, ax: to_row((h := up(p, x, ax)) / torch.full_like(h, 2.0).norm(), p, ax),
    "by zeros and one": lambda p, x, ax: to_row((h := up(p, x, ax)) / torch.zeros_like(h).add_(1).sum(), p, ax),
    "size as a key": lambda p, x, ax: to_row((h := up(p, x, ax)) * {3: 2.0}.get(h.shape[-1], 1.0), p, ax),
    "backward over features": lambda p, x, ax: to_row(Normed.apply(up(p, x, ax)), p, ax),  # type: ignore
    "hook": lambda p, x, ax: to_row(hooked(up(p, x, ax)), p, ax),
    "a small term": lambda p, x, ax: (
        to_row(up(p, x, ax), p, ax) + 1e-5 * P.sum(up(p, x, ax).softmax(-1)[:, 0].sum(), ax)
    ),
    "a small term in float32": lambda p, x, ax: (
        to_row(up(p, x, ax), p, ax) + 1e-5 * P.sum(up(p, x, ax).float().softmax(-1)[:, 0].sum(), ax)
    ),
    "a term beside constants of few bits": lambda p, x, ax: (
        to_row(up(p, x, ax) * x.new_ones(1, dtype=torch.bfloat16), p, ax) + 1e-5 * P.sum(p["up"].square().mean(), ax)
    ),
    "a norm that counts where it is large": lambda p, x, ax: to_row(
        up(p, x, ax) * (10 / p["up"].norm().clamp(min=10)), p, ax
    ),
    "a bias in its own part": lambda p, x, ax: up(p, x, ax) @ p["down"] + P.copy(p["bias"], ax),
    "its own part, bent": lambda p, x, ax: torch.tanh(up(p, x, ax) @ p["down"]),
    "its own slice by a sum of copies": lambda p, x, ax: up(p, x, ax) * P.copy(P.sum(P.copy(x, ax), ax).sum(), ax),
    "sum of copies": lambda p, x, ax: P.sum(P.copy(x, ax), ax).sum() + to_row(up(p, x, ax), p, ax),
    "merged dims": lambda p, x, ax: P.gather(up(p, x, ax).reshape(-1), ax, 0)[:6].square().sum(),
}


@in_turns(2)
@pytest.mark.parametrize("name", EQUAL)
def test_equal(name: str) -> None:
    assert is_equal(EQUAL[name])


def test_a_function_that_takes_positive_params() -> None:
    positive = {name: x.abs() + 0.1 for name, x in PARAMS.items()}
    assert is_equal(lambda p, x, ax: P.sum(p["up"].sqrt().sum(), ax), params=positive)
    assert not is_equal(lambda p, x, ax: P.sum(p["up"].sqrt().mean(), ax), params=positive)


def test_a_function_that_takes_no_float64() -> None:
    table = torch.ones(3, 1)  # a product of it and of float64 is an error
    assert is_equal(lambda p, x, ax: P.sum((up(p, x, ax).float().t() @ table).square().sum(), ax), rtol=1e-6)


@in_turns(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    assert not is_equal(REFUSED[name])


def test_what_is_too_large_to_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fzero.parallel.check_first_run"], "LARGEST", 1)
    assert is_equal(lambda p, x, ax: to_row(up(p, x, ax), p, ax)) and not is_equal(embedded)

    def main(rank: int, checks: bool) -> torch.Tensor:
        ax = P.axis(None, "tp")
        step = fz.shard_tensor(fz.train_step(lambda p, x: embedded(p, x, ax), fz.sgd(0.1)), PLAN)
        if checks:
            P.check(step, PARAMS, X, values=True)
        return step.vjp(step.init(PARAMS), X)[0]

    with pytest.raises(fz.testing.RankError, match="too many to compare values"):
        run_ranks(functools.partial(main, checks=False), 2)
    assert torch.equal(*run_ranks(functools.partial(main, checks=True), 2))


def test_one_function_proves_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["fzero.parallel.check_first_run"], "LARGEST", 1)

    def made(counts: bool, ax: Axis) -> Callable[[Params, torch.Tensor], torch.Tensor]:
        return lambda p, x: to_row((h := up(p, x, ax).flip(0)) * (h.shape[-1] if counts else 1), p, ax)

    def main(rank: int) -> None:
        ax = P.axis(None, "tp")
        steps = [fz.shard_tensor(fz.train_step(made(counts, ax), fz.sgd(0.1)), PLAN) for counts in (False, True)]
        P.check(steps[0], PARAMS, X, values=True)
        steps[0].vjp(steps[0].init(PARAMS), X)
        with pytest.raises(AxisTypeError, match="too many to compare values"):
            steps[1].vjp(steps[1].init(PARAMS), X)

    run_ranks(main, 2)


NOTHING = {"tensor": (torch.tensor(0.0), torch.tensor(1.0)), "mask": (torch.zeros(3, 1) > 0, torch.ones(3, 1) > 0)}


@pytest.mark.parametrize("kind", ["float", *NOTHING])
def test_what_counts_for_nothing_in_the_first_batch(kind: str) -> None:
    zero, one = NOTHING.get(kind, (0.0, 1.0))

    def loss(p: Params, x: torch.Tensor, weight: torch.Tensor, right: bool, ax: Axis) -> torch.Tensor:
        h = up(p, x, ax)
        term = P.sum(h.flip(0).sum(-1) if right else h.std(-1), ax)[:, None]
        return to_row(h, p, ax) + (term * weight).sum()

    def main(rank: int, right: bool) -> list[torch.Tensor]:
        ax = P.axis(None, "tp")
        step = fz.shard_tensor(fz.train_step(lambda p, x, w: loss(p, x, w, right, ax), fz.sgd(0.1)), PLAN)
        state = step.init(PARAMS)
        return [step(state, X, w)[1]["loss"] for w in (zero, one)]

    found, want = [run_ranks(functools.partial(main, right=True), ranks)[0] for ranks in (2, 1)]
    assert_trees_close(found, want)
    with pytest.raises(fz.testing.RankError, match="no rule says that 'std'"):
        run_ranks(functools.partial(main, right=False), 2)


# ---- drawn ones

SIX = torch.tensor([2, 0, 1])
# name -> what it does to the slice h [3, own]
STEPS: dict[str, Callable[[torch.Tensor, Axis], torch.Tensor]] = {
    "gelu": lambda h, ax: F.gelu(h),
    "half": lambda h, ax: h * 0.5,
    "norm": lambda h, ax: F.normalize(h, dim=-1),
    "norms of columns": lambda h, ax: F.normalize(h, dim=0),
    "centred": lambda h, ax: h - h.mean(-1, keepdim=True),
    "softmax of columns": lambda h, ax: h.softmax(0),
    "sorted": lambda h, ax: h.sort(-1)[0],
    "flipped": lambda h, ax: h.flip(-1),
    "rows": lambda h, ax: h.index_select(0, SIX),
    "chosen": lambda h, ax: h.gather(0, h.argsort(0)),
    "rolled": lambda h, ax: torch.roll(h, 1, 1),
    "summed up": lambda h, ax: h.cumsum(0),
    "along": lambda h, ax: h.cumsum(1),
    "outer": lambda h, ax: torch.baddbmm(h[None], h[None, :, :1], h[None, :1])[0],
    "there and back": lambda h, ax: P.split(P.gather(h, ax, 1), ax, 1),
    "viewed": lambda h, ax: h.view(3, 1, -1).transpose(0, 1)[0],
    "turned": lambda h, ax: P.ring_shift(h, ax),
    "scaled": lambda h, ax: h * (2 + ax.rank),
    "filled": lambda h, ax: h.index_fill(1, torch.tensor([0]), 0.0),
    "mean of all": lambda h, ax: h * P.copy(P.sum(h.sum(), ax), ax),
}
ENDS: dict[str, Callable[[torch.Tensor, Params, Axis], torch.Tensor]] = {
    "row": to_row,
    "sum": lambda h, p, ax: P.sum(h.square().sum(), ax),
    "mean": lambda h, p, ax: P.sum(h.mean(), ax),
    "gather": lambda h, p, ax: (P.gather(h, ax, 1) @ torch.arange(6.0, dtype=h.dtype)).square().sum(),
    "largest": lambda h, p, ax: P.gather(h.amax(1, keepdim=True), ax, 1).amax(1).sum(),
    "bias": lambda h, p, ax: total(F.linear(h, p["down"].t(), P.copy(p["bias"], ax)), ax),
}


@settings(max_examples=60)
@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), max_size=3),
    end=st.sampled_from(sorted(ENDS)),
    ranks=st.integers(2, 3),
)
def test_drawn(names: Sequence[str], end: str, ranks: int) -> None:
    def fn(p: Params, x: torch.Tensor, ax: Axis) -> torch.Tensor:
        h = up(p, x, ax)
        for name in names:
            h = STEPS[name](h, ax)
        return ENDS[end](h, p, ax)

    is_equal(fn, ranks)
