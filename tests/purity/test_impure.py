"""What a step refuses in its first run on every rank, beside the functions of `impure`: calls, arguments, outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from units import F64, X, forms, params_of

import fzero as fz
from fzero.purity.observer import looking_at
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

FORMS = forms("plain", "ZeRO-3", "ZeRO-3, remat", "fused")
LINE = r".*test_impure\.py"


def is_refused(make: Callable[[], Any], params: Any, match: str, form: str) -> None:
    def rank_main(rank: int) -> None:
        step = FORMS[form](fz.train_step(make(), fz.sgd(0.1)))
        state, before = step.init(params), step.init(params)
        for _ in range(2):  # nor does it begin to be right
            with pytest.raises((ValueError, TypeError), match=match):
                step(state, X.clone())
        assert_trees_equal(fz.gather(state.params), fz.gather(before.params))

    run_ranks(rank_main, 1 if form == "plain" else 2)


def careless(p: Any, x: torch.Tensor) -> torch.Tensor:
    """It would go on with something else, and nobody would know."""
    try:
        penalty = (p["blocks"][0]["w"] ** 2).sum()
    except Exception:
        penalty = torch.zeros(())
    return x.square().mean() * p["s"] + penalty


@pytest.mark.parametrize("form", ["ZeRO-3", "ZeRO-3, remat"])
def test_a_leaf_outside_its_unit_though_it_is_caught(form: str) -> None:
    is_refused(lambda: careless, params_of(), "leaf 'blocks.0.w' belongs to unit 'blocks.0'", form)


SHARING: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a whole and its part": lambda q, x: (h := x @ q["w"], h[0]),
    "a part before its whole": lambda q, x: ((h := x @ q["w"])[1:], h),
    "a view of the input": lambda q, x: (x.flatten(), x @ q["w"]),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("of", SHARING)
def test_a_write_to_outputs_of_a_unit_that_share_memory(of: str, form: str) -> None:
    def make() -> Any:
        unit = fz.unit(SHARING[of])

        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            a, b = unit(p["blocks"][0], x * p["s"])
            a.mul_(2)
            return a.sin().sum() + b.cos().sum()

        return fn

    match = "writes to an output of unit 'blocks.0' that shares memory .* in place, by mul_" + LINE
    is_refused(make, params_of(), match, form)


def test_a_write_to_what_is_saved_counts_in_a_first_run() -> None:
    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        e = (x @ p["blocks"][0]["w"]).exp()
        torch._foreach_mul_([e], 2.0)
        return e.sin().sum()

    step = fz.train_step(fn, fz.sgd(0.1))
    state = step.init(params_of())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(state, X.clone())


def test_memory_that_comes_again_is_no_output_that_shared_it() -> None:
    unit = fz.unit(lambda q, x: (x @ q["w"]).chunk(2, 1))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            a, b = unit(p["blocks"][0], x)
            x = torch.cat([a + 1, b], 1)
            del a, b
            y = torch.zeros_like(x)
            y.add_(x)
            x = y + x
        return x.sum()

    for _ in range(5):
        step = fz.remat(fz.train_step(fn, fz.sgd(0.1)))
        step.forward(step.init(params_of()), X.clone())


class Child(nn.Module):
    def __init__(self, parent: Any) -> None:
        super().__init__()
        self.lin, self.parent = nn.Linear(4, 4), [parent]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.lin(x) * self.parent[0].scale)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.7))
        self.blocks = nn.ModuleList([Child(self) for _ in range(2)])
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().sum()


@pytest.mark.parametrize("form", FORMS)
def test_a_leaf_of_the_parents_that_a_child_is_not_given(form: str) -> None:
    apply, params = fz.functional(Parent())
    match = r"'blocks.0' closes over a tensor of shape \(4,\) that is differentiated" + LINE
    is_refused(lambda: apply, params, match, form)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_a_unit(reentrant: bool) -> None:
    unit = fz.unit(lambda q, x: torch.tanh(x @ q["w"]))

    def rank_main(rank: int) -> None:
        def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
            for q in p["blocks"]:
                x = torch.utils.checkpoint.checkpoint(unit, q, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return x.sum()

        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init(params_of())
        match = "A unit is called by torch.utils.checkpoint.*fz.remat"
        with fz.tape(step, state) as model, pytest.raises(TypeError, match=match):
            model(X.clone().requires_grad_()).backward()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("what", ["an iterator", "a generator"])
def test_an_argument_that_can_be_read_once(what: str) -> None:
    unit = fz.unit(lambda q, rows: torch.stack([row @ q["w"] for row in rows]).sum(0))

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        rows: Any = iter([x, x]) if what == "an iterator" else (x * i for i in (1, 2))
        return unit(p["blocks"][0], rows).sum()

    for form in FORMS:
        is_refused(lambda: fn, params_of(), f"(?i)unit .*{what.split()[-1]}", form)


def noted(q: Any, x: torch.Tensor) -> torch.Tensor:
    out = torch.tanh(x @ q["w"])
    out.note = [out.square().mean()]  # type: ignore[attr-defined]
    return out


class Record(NamedTuple("_Record", [("h", torch.Tensor), ("note", Any)])):
    def __new__(cls, h: torch.Tensor) -> Record:
        return super().__new__(cls, h, None)


RETURNED = r"Unit 'blocks\.0' (returns a tensor .* on which it has set another one|keeps a tensor)"
MADE = r"Unit 'blocks\.0' is given or returns a container that cannot be made again"


@pytest.mark.parametrize("way", ["step", "forward", "tape"])
@pytest.mark.parametrize("form", ["plain", "ZeRO-3, remat"])
@pytest.mark.parametrize(("body", "match"), [(noted, RETURNED), (lambda q, x: Record(x @ q["w"]), MADE)])
def test_what_a_unit_returns_is_refused_however_it_is_called(form: str, way: str, body: Any, match: str) -> None:
    step = FORMS[form](fz.train_step(lambda p, x: fz.unit(body)(p["blocks"][0], x)[0].sum(), fz.sgd(0.1)))
    if (body, form, way) == (noted, "plain", "forward"):
        return  # nothing is differentiated: the tensor is as good as any

    def rank_main(rank: int) -> None:
        state = step.init(params_of())
        with pytest.raises(ValueError, match=match):
            if way == "tape":
                with fz.tape(step, state) as model:
                    model(X)
            else:
                (step if way == "step" else step.forward)(state, X)

    run_ranks(rank_main, 2 if form != "plain" else 1)


def test_what_comes_to_lie_where_a_constant_lay_is_the_functions_own() -> None:
    """Such as a leaf outside of its unit, which is gathered for what reads it and then let go of."""
    given = torch.ones(4, dtype=F64)
    constants = [torch.ones(4, dtype=F64) for _ in range(30)]
    with looking_at("step: the function", {}):
        while constants:
            total = given + constants.pop()
            own = [total.clone() for _ in range(2)]
            for t in own:
                t.mul_(0.5)
            del own, t


class Casting(nn.Linear):
    """It casts itself in each call, as routers of mixtures of experts do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.to(F64)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # at which module.to looks
@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_param_that_is_set_to_itself_is_not_written_to(form: str) -> None:
    apply, params = fz.functional(nn.Sequential(*[Casting(X.shape[1], X.shape[1], dtype=F64) for _ in range(2)]))
    leaves = [x.requires_grad_() for x in params.values()]
    plain = dict(zip(params, torch.autograd.grad(apply(params, X).square().sum(), leaves), strict=True))

    def rank_main(rank: int) -> None:
        step = FORMS[form](fz.train_step(lambda p, x: apply(p, x).square().sum(), fz.sgd(0.0)))
        state = step.init({name: x.detach() for name, x in params.items()})
        for _ in range(3):
            out, pullback = step.vjp(state, X)
            assert_trees_close(fz.gather(pullback(torch.ones_like(out))[0]), plain, rtol=1e-12)
            state, _ = step(state, X)

    run_ranks(rank_main, 1 if form == "plain" else 2)
