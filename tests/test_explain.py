"""fz.explain names the unit, operator, leaf and example of planted faults, and nothing where there is none."""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import weakref
from typing import Any

import planted
import pytest
import torch
from huggingface_models import llama
from nightly import NIGHTLY, by_turns, in_turns
from planted import BACKWARD, BLOCKS, CLEAN, FORWARD, Case, Loss, batch, drawn_params

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks

F32, F64 = torch.float32, torch.float64
NAN, INF = float("nan"), float("inf")


def drawn(count: int, seed: int) -> list[Case]:
    """Cases of every kind of fault, in steps of every stage, on one to three ranks."""
    draw, names = random.Random(seed), [*FORWARD, *BACKWARD, *CLEAN]
    out = []
    for number in range(count):
        stage = draw.randrange(4)
        world = draw.choice([1, 2, 3]) if stage else 1
        place = (draw.randrange(BLOCKS), draw.randrange(planted.BATCH), draw.randrange(world))
        how = (draw.random() < 0.4, draw.choice([1, 2]), draw.choice([F32, F64]), draw.random() < 0.4)
        out.append(Case(names[number % len(names)], *place, world, stage, *how))
    return out


CASES = drawn(55 if NIGHTLY else 33, 0)


@in_turns(11)
@pytest.mark.usefixtures("hazards")  # everything in flight is poisoned
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fault}-{case.stage}-{case.world}")
def test_finds_planted_faults(case: Case) -> None:
    case.check(run_ranks(case, case.world))


def on_processes(rank: int) -> list[Any]:
    return [case(rank) for case in ON_PROCESSES]


ON_PROCESSES = [
    Case("division", 0, 3, 1, 2, 3, False, 2, F32),
    Case("masked_root", 2, 1, 0, 2, 2, False, 1, F32),
    Case("own_backward", 1, 0, 1, 2, 3, True, 1, F32, True),
    Case("in_place", 1, 2, 1, 2, 1, True, 2, F64),
    Case("dropped", 1, 2, 1, 2, 3, False, 1, F32),
]


@in_turns(8, "on processes, as on threads")
def test_on_real_processes() -> None:
    by_rank = run_ranks(on_processes, 2, backend="processes")
    for case, reports in zip(ON_PROCESSES, zip(*by_rank, strict=True), strict=True):
        case.check(reports)


TRANSFORMS = {
    "fuse_update": fz.fuse_update,
    "compile": fz.compile,
    "donate": fz.donate,
    "offload": lambda step: fz.offload(step, "host", "host", "host"),
    "activations": lambda step: fz.offload(step, activations="host"),
    "ema": lambda step: fz.ema(step, 0.9),
    "freeze": lambda step: fz.freeze(step, "blocks.0.*"),
    "loss_scale": lambda step: fz.loss_scale(step, 4.0),
    "autocast": fz.autocast,
}


@in_turns(3)
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_with_every_transform(name: str) -> None:
    for fault in ("division", "masked_root", "dropped"):
        case = Case(fault, 1, 2, 0, 1, 0, False, 1, F32)
        step, params = case.made(TRANSFORMS[name])
        state = step.init(params)
        case.check([fz.explain(step, state, *batch(0, (0, 2, 1)))])
        assert state.params["blocks.1.w"].isfinite().all()


@pytest.mark.parametrize("policy", [fz.Policy.exact(), fz.Policy.compact16()], ids=["exact", "compact16"])
def test_of_states_in_few_bits(policy: fz.Policy) -> None:
    case = Case("division", 1, 2, 0, 1, 0, False, 1, F32)
    step = fz.train_step(Loss("division"), fz.adamw(1e-3), dataclasses.replace(policy, compute=F32))
    case.check([fz.explain(step, step.init(drawn_params()), *batch(0, (0, 2, 1)))])


# ---- what comes with the state, or with the inputs


def fault_of(step: Any, params: Any, *inputs: Any, **options: Any) -> Any:
    """Of a step, or of a function with SGD, in its first state."""
    step = step if isinstance(step, fz.Step) else fz.train_step(step, fz.sgd(0.1))
    return fz.explain(step, step.init(params), *inputs, **options).fault


def with_value(tree: fz.Sharded, path: str, value: float) -> fz.Sharded:
    """A tree, the first value of whose leaf is another one."""
    new = tree.replaced(buffers={name: x.clone() for name, x in tree.buffers.items()})
    new[path].view(-1)[0] = value
    return new


def of_state(kind: str, path: str, value: float) -> Any:
    """What is said of a state in which a value is another one."""
    step = fz.train_step(Loss("nothing"), fz.adamw(1e-3))
    state = step.init(drawn_params())
    if kind == "params":
        state = state.replace(params=with_value(state.params, path, value))
    else:
        moment = with_value(getattr(state.moments, kind), path, value)
        state = state.replace(moments=state.moments._replace(**{kind: moment}))
    return fz.explain(step, state, *batch(0)).fault


@pytest.mark.parametrize(("kind", "value"), [("params", NAN), ("params", INF), ("mu", NAN), ("nu", INF)])
def test_a_leaf_that_came_so(kind: str, value: float) -> None:
    fault = of_state(kind, "blocks.1.w", value)
    assert (fault.phase, fault.leaf, fault.unit) == ("state", "blocks.1.w", "blocks.1")
    assert fault.kind == ("nan" if value != value else "inf") and kind in fault.source
    assert str(fault).startswith("first not finite: ")


@in_turns(2)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("name", ["lookahead", "ema"])
def test_what_a_transform_keeps_in_the_state_that_came_so(name: str, value: float, world: int) -> None:
    """Also where this update does not come to it."""
    step = fz.ema(fz.lookahead(fz.train_step(Loss("nothing"), fz.adamw(1e-3)), 2), 0.9)
    step = fz.freeze(fz.shard_zero3(step) if world > 1 else step, "blocks.0.*")

    def rank_main(rank: int) -> None:
        state = step.init(drawn_params())
        old = {key: x.clone() for key, x in state.extra[name].buffers.items()}
        for x in old.values() if rank == 0 else ():
            x[0] = value
        state = state.replace(extra={**state.extra, name: state.extra[name].replaced(buffers=old)})
        fault = fz.explain(step, state, *batch(0)).fault
        assert fault is not None and (fault.phase, fault.kind) == ("state", "nan" if value != value else "inf")
        assert fault.leaf and fault.source == f"state.extra[{name!r}] of leaf {fault.leaf!r}"

    run_ranks(rank_main, world)


def test_other_entries_of_the_state_that_came_so() -> None:
    least = {"loss": torch.tensor(INF), "rates": [torch.ones(2), 1.0]}  # an infinity is meant
    extra = fz.Extra("own", "own()", lambda params: least, lambda value, params, applied: value)
    step = fz.train_step(Loss("nothing"), fz.adamw(1e-3)).with_state(extra)
    state = step.init(drawn_params())
    assert fz.explain(step, state, *batch(0)).fault is None
    for rates, path in (([torch.tensor([1.0, NAN]), 1.0], "rates.0"), ([torch.ones(2), NAN], "rates.1")):
        fault = fz.explain(step, state.replace(extra={"own": {**least, "rates": rates}}), *batch(0)).fault
        assert fault is not None and (fault.phase, fault.source) == ("state", f"state.extra['own'] ({path})")
        assert str(fault) == f"first not finite: NaN in state.extra['own'] ({path}), with which the state came"


def test_an_update_that_is_at_fault() -> None:
    fault = of_state("nu", "blocks.2.b", -1.0)  # of which there is no root
    assert (fault.phase, fault.leaf, fault.kind) == ("update", "blocks.2.b", "nan")


@pytest.mark.parametrize("value", [NAN, INF])
def test_an_input_that_came_so(value: float) -> None:
    x, y, marks = batch(0)
    y[3, 0, 0] = value
    fault = fault_of(Loss("nothing"), drawn_params(), x, y, marks)
    assert (fault.source, fault.examples, fault.op) == ("input 1", (3,), "")


def closed_over(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] * SCALE).mean()


SCALE = torch.tensor([1.0, NAN])


def test_an_input_or_a_constant_that_came_so_where_forward_mode_looks_at_it_first() -> None:
    """On rank threads, and in a level of forward mode, it is asked of every tensor whether it has a tangent."""
    step = fz.train_step(Loss("nothing"), fz.adamw(1e-3))
    alone = fz.train_step(closed_over, fz.sgd(0.1))
    x, y, marks = batch(0)
    x[3, 0, 0] = NAN

    def sources(rank: int, other: fz.Step) -> list[str]:
        reports = [
            fz.explain(step, step.init(drawn_params()), x.clone(), y, marks),
            fz.explain(other, other.init({"w": torch.ones(3, 2)}), torch.ones(4, 3)),
        ]
        return [report.fault.source for report in reports if report.fault is not None]

    want = ["input 0", "a tensor that the function closes over"]
    assert run_ranks(functools.partial(sources, other=fz.shard_zero1(alone)), 2) == [want, want]
    with torch.autograd.forward_ad.dual_level():
        assert sources(0, alone) == want


def test_values_of_another_part_of_memory_keep_where_they_begin() -> None:
    """A view of the infinities among some values says nothing of the NaN beside them."""

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([torch.sqrt(-x), torch.exp(x * 1e3)])  # NaN, infinities
        return (both[4:].clamp(max=1.0) * p["w"]).mean() + (both[:4] * p["w"]).mean()

    fault = fault_of(fn, {"w": torch.ones(2)}, torch.ones(4, 2))
    assert (fault.kind, fault.op) == ("nan", "aten.sqrt.default")


@pytest.mark.parametrize("count", [1, 2])
def test_a_carry_that_came_so(count: int) -> None:
    def fn(p: Any, carry: Any, x: torch.Tensor) -> Any:
        y = (x - carry["of"]["mean"]) * p["w"]
        return y.mean(), {"of": {"mean": carry["of"]["mean"] + x.mean()}, "runs": carry["runs"] + 1}

    begun = {"of": {"mean": torch.tensor(NAN)}, "runs": torch.zeros((), dtype=torch.int64)}
    step = fz.accumulate(fz.carry(fz.train_step(fn, fz.sgd(0.1)), begun), count)
    fault = fault_of(step, {"w": torch.ones(2)}, torch.ones(4, 2))
    assert (fault.phase, fault.source, fault.op) == ("forward", "carry of.mean", "")


def test_a_cotangent_that_came_so() -> None:
    fault = fault_of(Loss("nothing"), drawn_params(), *batch(0), cotangent=torch.tensor(NAN))
    assert (fault.source, fault.phase) == ("the cotangent", "backward")


def half_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for own in p["blocks"]:
        x = fz.unit(lambda q, h: torch.tanh(h @ q["w"]))(own, x)
    return (x.float() ** 2).sum()


def test_a_loss_scale_that_is_too_large() -> None:
    step = fz.autocast(fz.train_step(half_loss, fz.sgd(0.1)), torch.float16)
    params, x = {"blocks": [{"w": torch.eye(8)} for _ in range(2)]}, torch.ones(4, 8)
    fault = fault_of(fz.loss_scale(step, 2.0**16), params, x)
    assert fault.by_scale and fault.dtype == "float16" and "by the loss scale" in str(fault)
    assert fault_of(fz.loss_scale(step, 8.0), params, x) is None
    # what is wrong without it too is not the scale's
    step, params = Case("masked_root", 1, 2, 0, 1, 0, False, 1, F32).made(fz.loss_scale)
    assert not fault_of(step, params, *batch(0, (0, 2, 1))).by_scale


def masked_out(p: Any, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return torch.softmax((x @ p["w"]).masked_fill(mask, -torch.inf), -1)[:, 0].mean()


@pytest.mark.parametrize("as_input", [False, True])
def test_of_a_row_in_which_all_is_masked(as_input: bool) -> None:
    """The mask is as it should be; what is made of a row without any value is not."""
    fn = (lambda p, x, mask: torch.softmax(x @ p["w"] + mask, -1)[:, 0].mean()) if as_input else masked_out
    mask = torch.zeros(4, 3, dtype=torch.bool)
    mask[1, 2] = True

    def explained() -> Any:
        given = torch.zeros(4, 3).masked_fill(mask, -torch.inf) if as_input else mask
        return fault_of(fn, {"w": torch.ones(2, 3)}, torch.ones(4, 2), given)

    assert explained() is None
    mask[2] = True
    fault = explained()
    assert (fault.op, fault.examples) == ("aten._softmax.default", (2,))


def test_overflows_of_units() -> None:
    step = fz.train_step(
        lambda p, x: fz.unit(lambda q, h: h * q["w"] * 1e4)(p["blocks"][0], x).mean() / 1e4, fz.sgd(0.1)
    )
    state = step.init({"blocks": [{"w": torch.ones(2)}]})
    report = fz.explain(step, state, torch.full((3, 2), 9.0))
    found, of_mean = report.overflows
    assert of_mean.unit == "" and report.fault is None and (found.unit, found.phase) == ("blocks.0", "forward")
    assert found.largest == pytest.approx(9e4) and "test_explain.py" in found.place
    assert not fz.explain(step, state, torch.full((3, 2), 9.0), dtype=torch.bfloat16).overflows


def test_of_a_model_of_another_library() -> None:
    """Its masks hold the least number that there is, and an example begins with padding."""
    apply, params = fz.functional(llama(2, True))
    step = fz.shard_zero3(
        fz.train_step(lambda p, ids, mask: apply(p, ids, mask).logits.float().square().mean(), fz.sgd(0.1))
    )

    def on_rank(rank: int) -> Any:
        ids = torch.arange(24).view(3, 8) % 16
        mask = torch.ones(3, 8, dtype=torch.long)
        mask[1, :3] = 0
        report = fz.explain(step, step.init(params), ids, mask)
        assert report.fault is None and not [each for each in report.overflows if each.phase == "forward"], report

    run_ranks(on_rank, 1)


# ---- the report, and what an explanation leaves


def test_norms_are_those_of_the_trees() -> None:
    step = fz.train_step(Loss("nothing"), fz.adamw(1e-3))
    state, _ = step(step.init(drawn_params()), *batch(0))
    report = fz.explain(step, state, *batch(1))
    new, metrics = step(state, *batch(1))
    assert report.loss == pytest.approx(metrics["loss"].item()) and report.grad_norm == metrics["grad_norm"].item()
    assert list(report.norms) == ["params", "grads", "updates", "mu", "nu"]
    for path in state.params:
        assert report.norms["params"][path] == pytest.approx(state.params[path].norm().item(), rel=1e-5)
        assert report.norms["nu"][path] == pytest.approx(state.moments.nu[path].norm().item(), rel=1e-5)
        moved = (new.params[path] - state.params[path]).norm().item()
        assert report.norms["updates"][path] == pytest.approx(moved, rel=1e-4)
    assert "all values are finite" in str(report) and "blocks.1.w" in str(report)


FUSED = {
    "none": lambda p, x: (p["w"] * x).sum() + (p["b"] * x.mean()).sum(),
    "loss": lambda p, x: (p["w"] * x).sum() + p["b"].sum() + torch.log(-x.sum()),  # whose gradients are finite
    "gradient": lambda p, x: (p["w"] * x).sum() + (torch.sqrt((p["b"] - 1) * x.mean())).sum(),  # whose loss is finite
}


@pytest.mark.parametrize(("fault", "norm", "world"), by_turns(sorted(FUSED), ["auto", "held", "clipped"], [1, 2]))
def test_of_an_update_inside_the_pullback(fault: str, norm: str, world: int) -> None:
    """Without a norm a fused update leaves elements out that are not finite, and skips by the loss."""

    def rank_main(rank: int) -> None:
        clip = [fz.clip_by_global_norm(0.5)] if norm == "clipped" else []
        step = fz.train_step(FUSED[fault], fz.chain(*clip, fz.sgd(0.1, momentum=0.9)), metrics=("leaf_norms",))
        step = fz.fuse_update(step, "auto" if norm == "clipped" else norm)
        step = fz.ema(fz.shard_zero2(step) if world > 1 else step, 0.5)
        params = {"w": torch.linspace(1.0, 2.0, 70), "b": torch.tensor([3.0, 1.0, 2.0])}
        state, x = step.init(params), torch.linspace(1.0, 2.0, 70)
        report = fz.explain(step, state, x)
        new, metrics = step(state, x)
        assert report.skipped == bool(metrics["skipped"])
        assert report.loss == pytest.approx(metrics["loss"].item(), nan_ok=True)
        assert (report.fault is None) == (fault == "none")
        for kind in ("grads", "updates"):
            for path, got in metrics["leaf_norms"][kind].items():
                if not (kind == "grads" and bool(got.isnan()) and report.skipped):  # where nothing is pulled back
                    assert report.norms[kind][path] == pytest.approx(got.item(), rel=1e-5, nan_ok=True), (kind, path)
        assert fz.gather(new.params)["w"].isfinite().all()

    run_ranks(rank_main, world)


def test_of_an_update_inside_the_pullback_where_all_is_frozen() -> None:
    step = fz.freeze(fz.fuse_update(fz.train_step(FUSED["none"], fz.adamw(0.1)), "held"), "*")
    report = fz.explain(step, step.init({"w": torch.ones(2), "b": torch.ones(2)}), torch.ones(2))
    assert report.fault is None and report.loss == 4.0 and not report.skipped and report.norms["updates"] == {}


def test_leaves_nothing_behind() -> None:
    step, params = Case("division", 1, 2, 0, 1, 0, False, 1, F32).made(fz.donate)
    state, other = step.init(params), step.init(params)
    inputs = batch(0, (0, 2, 1))
    fz.explain(step, state, *inputs)
    held = weakref.ref(inputs[0])
    assert_trees_equal(dict(state.params), dict(other.params))
    assert (state.step, state.seed) == (other.step, other.seed)
    inputs = batch(0)
    gc.collect()
    assert held() is None
    new, metrics = step(state, *inputs)
    expected, others = step(other, *inputs)
    assert_trees_equal(dict(new.params), dict(expected.params))
    assert metrics["loss"] == others["loss"]


def dropped_out(p: Any, x: torch.Tensor) -> torch.Tensor:
    return fz.unit(lambda q, h: torch.nn.functional.dropout(h @ q["w"], 0.5))(p["blocks"][0], x).mean()


def test_draws_the_numbers_of_the_step() -> None:
    step = fz.accumulate(fz.train_step(dropped_out, fz.sgd(0.1)), 2)
    state = step.init({"blocks": [{"w": torch.eye(8)}]}, seed=3)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    for rng in (0, 1):
        report, (_, metrics) = fz.explain(step, state, x, rng=rng), step(state, x, rng=rng)
        assert report.loss == metrics["loss"].item() and report.grad_norm == metrics["grad_norm"].item()


def test_of_steps_with_aux_and_a_carry() -> None:
    def fn(p: Any, carry: Any, x: torch.Tensor) -> Any:
        y = x / p["w"]
        return (y.mean(), y.sum()), {"mean": carry["mean"] + y.mean().detach()}

    step = fz.carry(fz.train_step(fn, fz.sgd(0.1), has_aux=True), {"mean": torch.zeros(())})
    fault = fault_of(step, {"w": torch.tensor([1.0, 0.0])}, torch.ones(3, 2))
    assert (fault.op, fault.leaf, fault.unit) == ("aten.div.Tensor", "w", "")


def test_refusals() -> None:
    stages = [
        fz.train_step(lambda p, x: x * p["w"], fz.sgd(0.1)),
        fz.train_step(lambda p, x: (x * p["w"]).mean(), fz.sgd(0.1)),
    ]
    pipe = fz.pipeline(stages, fz.schedules.gpipe(stages=2, microbatches=2))
    with pytest.raises(TypeError, match=r"explain: got step=Pipeline, .*steps one by one"):
        fz.explain(pipe, None, torch.ones(2))  # type: ignore[arg-type]
    step = stages[1]
    state = step.init({"w": torch.ones(2)})
    with pytest.raises(TypeError, match="dtype='half', expected a floating dtype"):
        fz.explain(step, state, torch.ones(2, 2), dtype="half")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"fz.explain.*torch\.func\.grad"):
        torch.func.grad(lambda x: (fz.explain(step, state, x), x.sum())[1])(torch.ones(2, 2))


def test_a_unit_within_inference_mode() -> None:
    unit = fz.unit(lambda p, x: x * p["w"])

    def fn(p: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = unit(p["blocks"][0], x)
        return (unit(p["blocks"][0], x) * scale.clone()).sum()

    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1)))
        state = step.init({"blocks": [{"w": torch.ones(2)}]})
        assert "all values are finite" in str(fz.explain(step, state, torch.ones(2)))
        assert "NaN in input 0" in str(fz.explain(step, state, torch.tensor([1.0, torch.nan])))

    run_ranks(rank_main, 2)
