"""Every mistake gets an error that names the leaf, what was got and expected, and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fzero as fz
from fzero.testing import assert_trees_equal, run_ranks


def linear_step(**kwargs: Any) -> fz.Step:
    return fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.sgd(0.1), **kwargs)


PARAMS = {"w": torch.ones(3, 2)}


def test_a_unit_that_the_module_does_not_know() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    apply, params = fz.functional(module)
    renamed = {"layers": {"first": params}}
    step = fz.remat(fz.train_step(lambda p, x: apply(p["layers"]["first"], x).mean(), fz.sgd(0.1), units="layers"))
    assert step.init(renamed)
    with pytest.raises(
        ValueError, match=r"the params do not have the module's names: missing \['0\.weight', '0\.bias'\]"
    ):
        apply({"weight": torch.ones(2)}, torch.ones(1, 2))
    flat = {"stack.0.0.weight": params["0.weight"], "stack.0.0.bias": params["0.bias"]}
    other = fz.remat(
        fz.train_step(
            lambda p, x: apply({"0.weight": p["stack.0.0.weight"], "0.bias": p["stack.0.0.bias"]}, x).mean(),
            fz.sgd(0.1),
            units="stack.0.0.*",
        )
    )
    with pytest.raises(
        ValueError, match=r"belongs to unit 'stack\.0\.0\.(weight|bias)', but the module has no submodule"
    ):
        other(other.init(flat), torch.ones(1, 2))


def test_the_params_of_a_state_given_to_a_module() -> None:
    apply, params = fz.functional(torch.nn.Linear(3, 2))
    state = fz.train_step(lambda p, x: apply(p, x).sum(), fz.sgd(0.1)).init(params)
    with pytest.raises(TypeError, match=r"Write step.forward\(state, ...\), or apply\(fz.gather\(state.params\)"):
        apply(state.params, torch.ones(1, 3))
    apply(fz.gather(state.params), torch.ones(1, 3))


def test_a_mesh_without_the_named_axis() -> None:
    def rank_main(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
        for shard in (fz.shard_zero1, fz.shard_zero2, fz.shard_zero3):
            with pytest.raises(ValueError, match=r"the mesh has no axis 'dp'; its axes are data"):
                shard(linear_step(), mesh)
        step = fz.shard_zero3(linear_step(), mesh, axis="data")
        state, metrics = step(step.init(PARAMS), torch.ones(1, 3))
        assert metrics["loss"] == 3.0 and state.step == 1

    run_ranks(rank_main, 2)


def test_a_batch_that_does_not_divide() -> None:
    step = fz.accumulate(linear_step(), 2)
    state = step.init(PARAMS)
    for call in (step, step.vjp, step.forward):
        with pytest.raises(ValueError, match=r"accumulate: got 3 in input 0, 6 in input 1 along the dims that are sp"):
            call(state, torch.ones(3, 3), torch.ones(6))
    with pytest.raises(ValueError, match=r"got 2 dims, expected one per input, 1"):
        fz.accumulate(linear_step(), 2, in_dims=(0, None))(state, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"accumulate: got count=0, expected at least 1"):
        fz.accumulate(linear_step(), 0)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"a": {"n": torch.ones(2, dtype=torch.int64)}}, TypeError, r"params\['a\.n'\]: got dtype torch\.int64"),
        ({"a": {"n": torch.ones(2).to(torch.float8_e4m3fn)}}, TypeError, r"params\['a\.n'\]: got dtype .*float8"),
        ({"a": torch.ones(0, 3)}, ValueError, r"params\['a'\]: got shape \(0, 3\), which has no elements"),
        ({"a": 1.0}, TypeError, r"params\['a'\]: got float, expected a floating tensor"),
        ({"a": None}, TypeError, r"params\['a'\]: got NoneType"),
        ({}, ValueError, r"got an empty tree"),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, ValueError, r"two leaves have the path 'a\.b'"),
    ],
)
def test_params_that_cannot_be_trained(params: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        linear_step().init(params)
    with pytest.raises(error, match=message):
        fz.plan(linear_step(), params)


def test_a_narrower_leaf_is_held_in_what_a_policy_says_and_refused_where_it_says_nothing() -> None:
    w = torch.tensor([1.5, -2.0]).to(torch.float8_e5m2)
    step = fz.freeze(fz.train_step(lambda p, x: (p["a"] * p["f"] * x).sum(), fz.sgd(0.1)), "f")
    params = {"a": torch.ones(2), "f": w}
    with pytest.raises(TypeError, match=r"params\['f'\]: got dtype torch\.float8_e5m2, expected .*Policy"):
        step.init(params)
    full = fz.Policy(param=torch.float32, grad=torch.float32, moment=torch.float32)
    step = fz.freeze(fz.train_step(lambda p, x: (p["a"] * p["f"] * x).sum(), fz.sgd(0.1), policy=full), "f")
    torch.testing.assert_close(fz.gather(step.init(params).params)["f"], w.float(), rtol=0, atol=0)


def test_a_loss_that_is_not_a_scalar() -> None:
    step = fz.train_step(lambda p, x: x @ p["w"], fz.sgd(0.1))
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"returned a tensor of shape \(1, 2\).*expected a scalar loss.*cotangent="):
        step(state, torch.ones(1, 3))
    new, metrics = step(state, torch.ones(1, 3), cotangent=torch.ones(1, 2))
    assert new.step == 1 and "loss" not in metrics


@pytest.mark.parametrize(
    ("cotangent", "message"),
    [
        (torch.ones(1, 2), r"cotangent: got the structure .* expected that of the outputs"),
        ({"y": torch.ones(2, 1), "n": None}, r"cotangent of y: got \(\(2, 1\).*expected \(\(1, 2\)"),
        ({"y": torch.ones(1, 2, dtype=torch.float64), "n": None}, r"cotangent of y: got .*float64.*expected.*float32"),
        ({"y": torch.ones(1, 2, device="meta"), "n": None}, r"cotangent of y: got .*'meta'.*expected .*'cpu'"),
        ({"y": 1.0, "n": None}, r"cotangent of y: got float"),
    ],
)
def test_cotangents_that_do_not_fit(cotangent: Any, message: str) -> None:
    step = fz.train_step(lambda p, x: {"y": x @ p["w"], "n": torch.tensor(3)}, fz.sgd(0.1))
    _, pullback = step.vjp(step.init(PARAMS), torch.ones(1, 3))
    with pytest.raises(ValueError, match=message):
        pullback(cotangent)
    pullback({"y": torch.ones(1, 2), "n": None})  # and nothing was lost


def test_a_state_of_another_step() -> None:
    def rank_main(rank: int) -> Any:
        state = fz.shard_zero3(linear_step()).init(PARAMS)
        with pytest.raises(ValueError, match=r"state of another step, made with .*shard_zero3.*expected.*shard_zero2"):
            fz.shard_zero2(linear_step())(state, torch.ones(1, 3))
        with pytest.raises(TypeError, match=r"got a state of type dict"):
            linear_step()(PARAMS, torch.ones(1, 3))  # type: ignore[arg-type]
        return state

    state = run_ranks(rank_main, 2)[0]

    def other_world(rank: int) -> None:
        with pytest.raises(ValueError, match=r"cut into 2 shards \(leaf 'w' and others\), expected 3"):
            fz.shard_zero3(linear_step())(state, torch.ones(1, 3))

    run_ranks(other_world, 3)


def test_grads_of_another_state() -> None:
    """Twins of equal shapes: nothing but the init that they descend from tells their grads apart."""
    step = linear_step()
    state, twin = step.init(PARAMS), step.init(PARAMS)
    later, _ = step(state, torch.ones(1, 3))
    grads, _ = step.vjp(state, torch.ones(1, 3))[1](torch.ones(()))
    for call in (step.update, step.add_grads):
        call(later, grads)
        call(state.replace(params=later.params), grads)
        with pytest.raises(
            ValueError, match=r"pullback over another state, of '<lambda>' \[\w{4}\]; expected .*same init"
        ):
            call(twin, grads)


def test_grads_of_another_step() -> None:
    step, other = linear_step(), fz.train_step(lambda p, x: (x * p["v"]).mean(), fz.sgd(0.1))
    state, theirs = step.init(PARAMS), other.init({"v": torch.ones(3)})
    _, pullback = other.vjp(theirs, torch.ones(1, 3))
    grads, _ = pullback(torch.ones(()))
    for call in (step.update, step.add_grads):
        with pytest.raises(ValueError, match=r"grads of another step \(leaf 'v' differs\)"):
            call(state, grads)
        with pytest.raises(ValueError, match=r"grads\['w'\]: got a tensor of shape \(2, 2\).*, expected shape \(3, 2"):
            call(state, {"w": torch.ones(2, 2)})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: linear_step(policy=fz.Policy.by_path({"norm*": fz.Policy()})),
            r"Policy\.by_path: the pattern 'norm\*' matches no leaf",
        ),
        (
            lambda: fz.freeze(linear_step(), "base.*"),
            r"freeze\('base\.\*'\): the pattern 'base\.\*' matches no leaf\. The leaves are w",
        ),
        (  # a typo beside an alternative that matches
            lambda: fz.freeze(linear_step(), "w|bse.*"),
            r"freeze\('w\|bse\.\*'\): the pattern 'bse\.\*' matches no leaf",
        ),
        (
            lambda: linear_step(units=["blocks.*"]),
            r"train_step\(units=\.\.\.\): the pattern 'blocks\.\*' matches no leaf",
        ),
    ],
)
def test_a_pattern_that_matches_no_leaf(build: Any, message: str) -> None:
    for use in (lambda step: step.init(PARAMS), lambda step: fz.plan(step, PARAMS)):
        with pytest.raises(ValueError, match=message):
            use(build())


def test_ranks_with_different_tables() -> None:
    def tables_differ(rank: int) -> None:
        step = fz.train_step(lambda p, x: (x @ p["w"]).mean(), fz.sgd(0.1))
        step = fz.autocast(step) if rank else step
        with pytest.raises(ValueError, match=r"The tables.*differ.*rank 0 has .w .*rank 1 has .w .*bfloat16"):
            fz.shard_zero2(step).init(PARAMS)
        with pytest.raises(ValueError, match=r"seed 0.*seed 1"):
            fz.shard_zero2(fz.train_step(lambda p: p, fz.sgd(0.1))).init(PARAMS, seed=rank)

    run_ranks(tables_differ, 2)


def test_steps_over_other_ranks_are_refused_on_every_rank() -> None:
    def rank_main(rank: int) -> None:
        sharded = fz.shard_zero3(linear_step())
        state = sharded.init(PARAMS)
        with pytest.raises(ValueError, match=r"step: rank 0 got one over ranks \[0, 1\] .*, rank 1 one over one"):
            fz.convert(state, sharded if rank == 0 else linear_step())
        assert_trees_equal(fz.gather(fz.convert(state, linear_step()).params), PARAMS)  # each of them alone

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("verb", ["__call__", "vjp", "forward"])
def test_a_function_that_takes_from_an_empty_iterator_is_named(verb: str) -> None:
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (p["w"] * next(iter([]))).sum()

    step = fz.train_step(loss, fz.sgd(0.1))
    said = r"step: the function raised StopIteration \(in 'loss', test_bad_input"
    with pytest.raises(RuntimeError, match=said) as caught:
        getattr(step, verb)(step.init(PARAMS), torch.ones(2))
    assert isinstance(caught.value.__cause__, StopIteration)


def test_dtypes_that_are_none() -> None:
    with pytest.raises(ValueError, match=r"Policy\(param=\.\.\.\): got torch\.int8"):
        fz.Policy(param=torch.int8)
    with pytest.raises(ValueError, match=r"autocast: got torch\.float32"):
        fz.autocast(linear_step(), torch.float32)


def noted(fn: Any) -> str:
    """What an error and its notes say."""
    with pytest.raises(Exception) as caught:
        fn()
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize("verb", ["__call__", "forward", "vjp"])
def test_inputs_that_do_not_meet_the_params(verb: str) -> None:
    """The error is torch's, and a note says what to write."""
    x = torch.ones(4, 3)
    half = linear_step(policy=fz.Policy(compute=torch.bfloat16))
    for step, given, words in [
        (half, x, ("Input 0 is torch.float32", "x.to(torch.bfloat16)", "fz.autocast(step, torch.bfloat16)")),
        (linear_step(), x.double(), ("Input 0 is torch.float64", "x.to(torch.float32)")),
        (linear_step(), x.numpy(), ("Input 0 is a numpy array", "torch.as_tensor(x)")),
    ]:
        state = step.init(PARAMS)
        said = noted(lambda step=step, state=state, given=given: getattr(step, verb)(state, given))
        assert all(each in said for each in words), said

    def as_on_a_gpu(p: Any, batch: Any) -> torch.Tensor:
        raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")

    away = fz.train_step(as_on_a_gpu, fz.sgd(0.1))
    said = noted(lambda: getattr(away, verb)(away.init(PARAMS), {"x": x.to("meta")}))
    assert "Input 0.x is on meta, and the params are on cpu. Pass x.to('cpu')" in said

    def fails(p: Any, x: torch.Tensor, error: Exception, more: Any) -> torch.Tensor:
        raise error

    other = fz.with_fn(half, fails)
    for own in (RuntimeError("of the user's own"), KeyError("dtype"), TypeError("object of type 'int' has no len()")):
        assert noted(lambda own=own: getattr(other, verb)(half.init(PARAMS), x, own, x.numpy())) == str(own)


def test_what_is_given_in_the_place_of_something_else() -> None:
    step, x = linear_step(), torch.ones(4, 3)
    state = step.init(PARAMS)
    with pytest.raises(TypeError, match=r"type tuple.*write state, metrics = step\(state, \.\.\.\)"):
        step(step(state, x), x)  # type: ignore[arg-type]
    kept = fz.ema(step, 0.5)
    with pytest.raises(TypeError, match=r"step\.forward\(state\.replace\(params=state\.extra\['ema'\]\)"):
        kept.forward(kept.init(PARAMS).extra["ema"], x)
    for several in ([fz.sgd(0.1)], (fz.sgd(0.1), fz.sgd(0.2)), {"*": fz.sgd(0.1)}):
        with pytest.raises(TypeError, match=r"got optimizer=(list|tuple|dict), expected one.*fz\.chain.*fz\.partition"):
            fz.train_step(lambda p: p["w"], several)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"take them apart: apply, params = fz\.functional\(module\)"):
        step.init(fz.functional(torch.nn.Linear(2, 2)))
    for make in (fz.adamw, fz.adam, fz.lion, fz.lamb):
        with pytest.raises(TypeError, match=rf"{make.__name__}: got betas=, expected b1= and b2="):
            make(0.1, betas=(0.9, 0.99))  # type: ignore[call-arg]
    for leaf in (torch.ones(3, 2, device="meta"), lambda: torch.ones(3, 2, device="meta")):
        with pytest.raises(ValueError, match=r"params\['w'\]: got a tensor on the meta device"):
            step.init({"w": leaf})
    stages = [step, fz.train_step(lambda p, x: x, fz.sgd(0.1))]
    said = noted(lambda: fz.pipeline(stages, fz.schedules.gpipe(2, 2)).init([PARAMS, {}]))
    assert "got an empty tree" in said and "params[1] of pipeline.init" in said


@pytest.mark.parametrize(
    "make", [fz.adamw, fz.adam, fz.sgd, fz.lion, fz.lamb, fz.muon, fz.adafactor, lambda lr: fz.from_torch(NADAM, lr)]
)
def test_rates_that_are_none(make: Any) -> None:
    for lr in (float("nan"),) if make is fz.sgd else (-1.0, float("nan"), torch.tensor(-1.0)):
        with pytest.raises(ValueError, match=r"got lr=(-1\.0|nan), expected a number of at least 0"):
            make(lr)
    make(0.0)
    make(lambda count: -1e-20 * count)


NADAM = torch.optim.NAdam
