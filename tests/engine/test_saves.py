"""What is written to between a forward and its pullback: the gradients of before, or a refusal wherever plain autograd
refuses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from drawn_pipelines import Copied
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import by_turns

import fzero as fz
from fzero.base import private
from fzero.engine import saves
from fzero.testing import run_ranks

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


W, X = draw(6, 6), draw(4, 6, seed=1)
Term = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# how another tensor meets h[4, 6]: what is saved of it, and what is not
TERMS: dict[str, tuple[torch.Tensor, Term]] = {
    "product": (draw(4, 6, seed=2), lambda h, a: h * a),
    "sum": (draw(4, 6, seed=3), lambda h, a: h + a),
    "matmul": (draw(6, 6, seed=4), lambda h, a: h @ a),
    "view": (draw(8, 6, seed=5)[2:6], lambda h, a: (h * a).tanh()),
    "mask": (draw(4, 6, seed=6) > 0, lambda h, a: torch.where(a, h, 0 * h)),
    "index": (torch.tensor([1, 3, 5]), lambda h, a: h.index_select(1, a)),
    "labels": (torch.tensor([1, 3, 5, 0]), torch.nn.functional.cross_entropy),
    "scalar": (torch.tensor(1.7, dtype=F64), lambda h, a: h * a),
    "sparse": ((draw(4, 4, seed=7).relu() - 0.3).relu().to_sparse().coalesce(), lambda h, a: torch.sparse.mm(a, h)),
    "lists": (draw(4, 6, seed=8), lambda h, a: torch.cat([h * a, a]).exp()),
    "shape": (draw(4, 6, seed=9), lambda h, a: h.view_as(a)),
    "into a view": (draw(4, 6, seed=10), lambda h, a: written(h, lambda own: own[:, 1:].mul_(a[:, 1:]))),
    "foreach": (draw(4, 6, seed=11), lambda h, a: torch._foreach_mul([h, h], [a, a])[1]),
}


def written(h: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    h = h.clone()
    write(h)
    return h


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "nothing": lambda a: None,
    "zero_": lambda a: a.zero_(),
    "to a view": lambda a: a.detach().zero_(),
    "set_": lambda a: a.set_(torch.zeros_like(a)) if a.layout == torch.strided else a.zero_(),  # type: ignore[arg-type]
}


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 2 * x * cotangent


def plain(term: Term, w: torch.Tensor, a: torch.Tensor, own: bool) -> tuple[torch.Tensor, torch.Tensor]:
    h = X @ w
    h = term(Squared.apply(h) if own else h, a)  # type: ignore[arg-type]
    return h.sum(), h.exp()


def by_autograd(term: Term, a: torch.Tensor, own: bool, write: Callable[..., object]) -> torch.Tensor | None:
    """The gradient; None where autograd refuses."""
    w = W.clone().requires_grad_()
    loss, _ = plain(term, w, a, own)
    write(a)
    try:
        return torch.autograd.grad(loss, w)[0]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        return None


def of_another(kind: str) -> tuple[torch.Tensor, Term]:
    a, term = TERMS[kind]
    if kind == "view":
        return a._base.clone()[2:6], term  # type: ignore[union-attr]
    return a.clone(), term


SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 3: fz.shard_zero3}


def follows(
    rank: int, kind: str, write: str, stage: int, given_as: str, in_unit: bool, own: bool, twice: bool, names: bool
) -> None:
    a, term = of_another(kind)
    expected = by_autograd(term, a.clone() if kind != "view" else of_another(kind)[0], own, WRITES[write])
    if in_unit:
        unit = fz.unit(lambda p, x, *b: plain(term, fz.name(p["w"] * 1.0, "w"), *(b or (a,)), own))  # type: ignore[misc]
        fn, params = lambda p, x, *b: unit(p["blocks"][0], x, *b), {"blocks": [{"w": W}]}
    else:
        fn, params = lambda p, x, *b: plain(term, p["w"], *(b or (a,)), own), {"w": W}  # type: ignore[misc]
    step = SHARDS[stage](fz.train_step(fn, fz.sgd(0.1), has_aux=True))
    step = fz.remat(step, save=("w",)) if names and in_unit else step
    state = step.init(params)
    for _ in range(2):
        now = of_another(kind)[0] if given_as == "input" else a
        before = a.clone()
        x = X.clone()  # not the global, which the ranks' threads share
        inputs = (x, now) if given_as == "input" else (x,)
        _, pullback, _ = step.vjp(state, *inputs, argnums=())
        if twice:
            pullback(torch.ones((), dtype=F64), retain_graph=True)
        WRITES[write](now)
        try:
            grads, _ = pullback(torch.ones((), dtype=F64))
        except (RuntimeError, ValueError) as error:
            assert expected is None or (names and in_unit), error  # of which more is made again than autograd needs
            assert "place" in str(error), error
        else:
            whole = fz.gather(grads)
            found = whole["blocks"][0]["w"] if in_unit else whole["w"]
            right = by_autograd(term, before, own, WRITES["nothing"])
            torch.testing.assert_close(found, right)
            assert expected is not None or in_unit  # units keep copies of some inputs, and are right all the same
        if given_as != "input":  # as it was
            a, _ = of_another(kind)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_is_refused_where_autograd_refuses(data: st.DataObject) -> None:
    draws = {
        "kind": st.sampled_from(sorted(TERMS)),
        "write": st.sampled_from(sorted(WRITES)),
        "stage": st.sampled_from(sorted(SHARDS)),
        "given_as": st.sampled_from(["input", "closed over"]),
        **dict.fromkeys(("in_unit", "own", "twice", "names"), st.booleans()),
    }
    call = {name: data.draw(of, name) for name, of in draws.items()}
    run_ranks(functools.partial(follows, **call), data.draw(st.sampled_from([1, 2])))


@pytest.mark.parametrize("which", ["output", "aux"])
def test_what_a_forward_gave_out_is_among_it(which: str) -> None:
    step = fz.train_step(lambda p, x: ((x @ p["w"]).exp(), (x @ p["w"]).tanh()), fz.sgd(0.1), has_aux=True)
    state = step.init({"w": W})
    output, pullback, aux = step.vjp(state, X)
    (output if which == "output" else aux).zero_()
    if which == "output":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pullback(torch.ones_like(output))
    else:  # to which nothing is pulled back
        pullback(torch.ones_like(output))


def test_a_second_half_looks_once_more() -> None:
    kept = draw(4, 6)
    step = fz.train_step(lambda p, x: ((x @ p["w"]) * kept).sum(), fz.sgd(0.1))
    state = step.init({"w": W})
    _, pullback = step.vjp(state, X)
    pullback(torch.ones((), dtype=F64), retain_graph=True)
    kept.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pullback(torch.ones((), dtype=F64))


# ---- by a pullback itself


class Writes(torch.autograd.Function):
    """x, whose backward writes to what it has saved, of it and of others."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x.mul_(2)
        return cotangent


def by_hook(k: torch.Tensor) -> torch.Tensor:
    z = k * 1
    if z.requires_grad:
        z.register_hook(lambda _: (k.mul_(2), None)[1])
    return z


def by_node(k: torch.Tensor) -> torch.Tensor:
    z = k * 1
    if z.grad_fn is not None:
        z.grad_fn.register_prehook(lambda _: (k.mul_(2), None)[1])
    return z


WRITERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Function": lambda k: Writes.apply(k),  # type: ignore[dict-item]
    "hook": by_hook,
    "hook of a node": by_node,
}
# how what is written to, or what it is computed of, meets others in the graph: writer, h, k = tanh(h)
MEETS: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "saved by one before": lambda writer, h, k: (h * k + writer(k)).sum(),
    "saved by one behind": lambda writer, h, k: (writer(k) * k.cos()).sum(),
    "only its own": lambda writer, h, k: (k + writer(3 * k)).sum(),
    "hidden": lambda writer, h, k: (written(h, lambda own: own[:, 1:].mul_(k[:, 1:])) + writer(k)).sum(),
    "no longer needed": lambda writer, h, k: writer(h * 1).square().sum() + k.sum(),
}


def pulled_back(writer: str, meets: str, unit: str, transform: str, verb: str) -> str:
    """The gradients that torch gives, or its refusal."""
    term, own = MEETS[meets], WRITERS[writer]
    units = {"none": lambda f: f, "before": fz.unit, "writes": fz.unit}[unit]
    matmul = units(lambda p, x: x @ p["w"])
    written = fz.unit(lambda p, x: own(x) + 0 * p["w"].sum())

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = matmul(p["blocks"][0], x)
        return term(own if unit != "writes" else lambda k: written(p["blocks"][1], k), h, torch.tanh(h))

    params = {"blocks": [{"w": W}, {"w": W}]}
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    h = x @ w
    try:
        expected = torch.autograd.grad(term(own, h, torch.tanh(h)), [w, x])
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        expected = None
    step = {"none": lambda s: s, "ZeRO-3": fz.shard_zero3, "remat": fz.remat}[transform](fz.train_step(fn, fz.sgd(0.1)))
    state = step.init(params)
    for first in (True, False):
        loss, pullback = step.vjp(state, X)
        one = torch.ones_like(loss)
        if first and unit == "writes":  # it is given a copy, to see what it writes to
            continue
        try:
            if verb == "halves":
                (by_x,), grads = pullback.inputs(one), pullback.params()
            else:
                grads, (by_x,) = pullback(one, retain_graph=verb == "retained")
        except RuntimeError as error:
            assert expected is None and "modified by an inplace operation" in str(error), error
        else:
            assert expected is not None
            torch.testing.assert_close((fz.gather(grads)["blocks"][0]["w"], by_x), expected)
    return "refused" if expected is None else "right"


@pytest.mark.parametrize(("writer", "meets"), by_turns(sorted(WRITERS), sorted(MEETS)))
def test_writes_within_a_pullback_are_refused_where_autograd_refuses(writer: str, meets: str) -> None:
    found = set[str]()
    for unit, transform in (("none", "none"), ("before", "ZeRO-3"), ("before", "remat"), ("writes", "ZeRO-3")):
        for verb in ("once", "retained", "halves"):
            call = functools.partial(pulled_back, writer, meets, unit, transform, verb)
            found.update(run_ranks(lambda rank, call=call: call(), 2 if transform == "ZeRO-3" else 1))
    assert found == {"refused" if meets.startswith(("saved", "hidden")) else "right"}


@pytest.mark.parametrize("kind", sorted(TERMS))
def test_a_write_between_halves_where_users_code_runs(kind: str) -> None:
    """The second half is right or refused, whatever the first one has gone through."""
    a, term = of_another(kind)
    right = by_autograd(term, a.clone() if kind != "view" else of_another(kind)[0], True, WRITES["nothing"])
    step = fz.train_step(lambda p, x: plain(term, p["w"], a, True)[0] + 0 * x.sum(), fz.sgd(0.1))
    state = step.init({"w": W})
    _, pullback = step.vjp(state, X)
    pullback.inputs(torch.ones((), dtype=F64))
    WRITES["zero_"](a)
    try:
        found = pullback.params()
    except (RuntimeError, ValueError) as error:
        assert "in place" in str(error) or "inplace" in str(error), error
    else:
        torch.testing.assert_close(fz.gather(found)["w"], right)


def test_a_graph_without_users_code_is_not_looked_at_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = list[object]()
    monkeypatch.setattr(saves, "_Look", lambda counters: looks.append(counters) or (lambda _: None))
    for fn, some in (
        (lambda p, x: (x @ p["w"]).tanh().sum(), False),
        (lambda p, x: Squared.apply(x @ p["w"]).sum(), 1),
    ):
        step = fz.train_step(fn, fz.sgd(0.1))
        _, pullback = step.vjp(step.init({"w": W}), X)
        pullback(torch.ones((), dtype=F64))
        assert bool(looks) == bool(some)


def test_what_is_looked_at_lives_no_longer() -> None:
    """Neither the graph, which Python's own objects lead to, nor what a node saved that has been pulled back."""
    alive = list[bool]()

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = Squared.apply(x @ p["w"])
        k = h.tanh()
        saved = weakref.ref(private.unwrapped(k))
        h.register_hook(lambda _: alive.append(saved() is not None))  # type: ignore[union-attr]
        return (k * 1).sum()

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init({"w": W})
    for _ in range(2):
        _, pullback = step.vjp(state, X)
        pullback(torch.ones((), dtype=F64))
    assert alive == [False, False]


def test_a_unit_that_runs_again_looks_at_all_that_it_was_given() -> None:
    def rank_main(rank: int) -> None:
        unit = fz.unit(lambda p, x, a: (x @ p["w"]).tanh() + a)
        step = fz.shard_zero3(fz.train_step(lambda p, x, a: unit(p["blocks"][0], x, a), fz.sgd(0.1)))
        state = step.init({"blocks": [{"w": W}]})
        step.vjp(state, X, draw(4, 6, seed=2), argnums=())  # the first call is given copies
        for _ in range(2):
            now = draw(4, 6, seed=2)
            out, pullback = step.vjp(state, X, now, argnums=())
            cotangent = torch.ones_like(out)
            now.detach().zero_()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.func.jvp(lambda ct: pullback(ct, retain_graph=True)[0].locals(), (cotangent,), (cotangent,))
            (expected,) = torch.autograd.grad((X @ (w := W.clone().requires_grad_())).tanh(), w, cotangent)
            grads, _ = pullback(cotangent)
            torch.testing.assert_close(fz.gather(grads)["blocks"][0]["w"], expected)

    run_ranks(rank_main, 1)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("given_as", ["input", "closed over"])
@pytest.mark.parametrize("kind", ["shape", "sum"])
def test_a_unit_refuses_no_write_to_what_its_pullback_does_not_need(kind: str, given_as: str, write: str) -> None:
    call = {"kind": kind, "write": write, "stage": 3, "given_as": given_as, "in_unit": True}
    run_ranks(functools.partial(follows, **call, own=False, twice=True, names=False), 1)


def test_what_a_hidden_node_may_have_kept_is_named_so() -> None:
    def fn(p: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return written(x @ p["w"], lambda own: own[:, 1:].zero_()).sum(), (x > 0).sum()

    step = fz.train_step(fn, fz.sgd(1.0), has_aux=True)
    out, pull, aux = step.vjp(step.init({"w": W}), X)
    aux.add_(1)
    with pytest.raises(RuntimeError, match=r"a write to a view \(x\[...\] = y\) or torch._foreach_\*"):
        pull(torch.ones_like(out))


class Fails(Copied):
    """Whose backward fails where it is told to."""

    fails = True

    @staticmethod
    def backward(ctx: object, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if Fails.fails:
            raise ValueError("told to")
        return g


@pytest.mark.parametrize("retains", [False, True])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("act", [lambda step: step, fz.remat])
def test_a_pullback_that_failed(act: Any, half: bool, retains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be tried again where it keeps its graph, and says so where not."""
    monkeypatch.setattr(Fails, "fails", True)
    unit = fz.unit(lambda p, x: Fails.apply(x @ p["w"]).tanh())
    step = act(fz.train_step(lambda p, x: unit(p["blocks"][0], x).square().sum(), fz.sgd(1.0)))
    state = step.init({"blocks": [{"w": W}]})
    out, pull = step.vjp(state, X)
    one = torch.ones_like(out)
    with pytest.raises(ValueError, match="told to"):
        (pull.inputs if half else pull)(one, retain_graph=retains)
    monkeypatch.setattr(Fails, "fails", False)
    if not retains:
        with pytest.raises(RuntimeError, match="was used up by an earlier call"):
            pull(one)
        out, pull = step.vjp(state, X)
    want = torch.func.grad(lambda w: (X @ w).tanh().square().sum())(W)
    torch.testing.assert_close(fz.gather(pull(one)[0])["blocks"][0]["w"], want)


@pytest.mark.parametrize("mistake", ["write", "cotangent"])
def test_others_are_told_of_a_pullback_that_one_rank_refuses(mistake: str) -> None:
    unit = fz.unit(lambda p, x: (x @ p["w"]).tanh())

    def rank_main(rank: int) -> str:
        step = fz.shard_zero3(fz.train_step(lambda p, x, y: (unit(p["blocks"][0], x) * y).sum(), fz.sgd(1.0)))
        y = X.clone()
        out, pull = step.vjp(step.init({"blocks": [{"w": W}]}), X, y)
        cotangent = torch.ones_like(out)
        if rank == 0 and mistake == "write":
            y.mul_(2)
        elif rank == 0:
            cotangent = torch.ones(3, dtype=F64)
        try:
            pull(cotangent)
        except (RuntimeError, ValueError, TypeError) as error:
            if rank:
                return str(error)
            with pytest.raises(RuntimeError):  # which the other one waits for
                fz.gather(step.init({"blocks": [{"w": W}]}).params)
        return ""

    assert "on rank 0 a pullback failed with" in run_ranks(rank_main, 2, timeout=20)[1]


@pytest.mark.parametrize("act", [lambda step: step, fz.remat, fz.shard_zero3])
@pytest.mark.parametrize("argnums", [(), (0,)])
def test_inputs_of_inference_mode(act: Any, argnums: tuple[int, ...]) -> None:
    """Features of a frozen encoder, say."""
    with torch.inference_mode():
        features = X * 1.0
    unit = fz.unit(lambda p, x: (x @ p["w"]).tanh())

    def rank_main(rank: int) -> Any:
        step = act(fz.train_step(lambda p, x: unit(p["blocks"][0], x).square().sum(), fz.sgd(1.0)))
        out, pull = step.vjp(step.init({"blocks": [{"w": W}]}), features, argnums=argnums)
        grads, cotangents = pull(torch.ones_like(out))
        return fz.gather(grads)["blocks"][0]["w"], cotangents[0]

    want = torch.func.grad(lambda w, x: (x @ w).tanh().square().sum(), (0, 1))(W, X)
    ((grad, cotangent),) = run_ranks(rank_main, 1)
    torch.testing.assert_close(grad, want[0])
    if argnums:
        torch.testing.assert_close(cotangent, want[1])
