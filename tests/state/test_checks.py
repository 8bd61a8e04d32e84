"""torch.func around a verb that cannot be transformed: refused by name, and constants inside it are constants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import scenarios
import torch
from nightly import by_turns, in_turns
from torch.autograd import forward_ad

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

F64 = torch.float64
SHARDS: dict[int, Any] = {0: lambda step: step, 1: fz.shard_zero1, 2: fz.shard_zero2, 3: fz.shard_zero3}


def _squared(p: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ p["w"]) ** 2).mean()


STEP = fz.train_step(_squared, fz.sgd(0.1, momentum=0.9))
PARAMS = {"w": torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=F64)}
STATE = STEP.init(PARAMS)
X = torch.randn(4, 3, generator=torch.Generator().manual_seed(1), dtype=F64)
CT = torch.ones((), dtype=F64)
GRADS = STEP.vjp(STATE, X)[1](CT)[0]
KEY = GRADS.groups[0]


def put(tree: Any, buffer: torch.Tensor) -> Any:
    """A sharded tree with another buffer."""
    return tree.replaced(buffers={KEY: buffer})


def summed(tree: Any) -> torch.Tensor:
    leaves = torch.utils._pytree.tree_leaves(tree)  # type: ignore[attr-defined]
    return sum((leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.zeros((), dtype=F64))


# verb: (the argument that the error names, the verb as a function of one tensor, that tensor)
VERBS: dict[str, tuple[str, str, Callable[[torch.Tensor], Any], torch.Tensor]] = {
    "step, inputs": ("step", "inputs", lambda x: summed(STEP(STATE, x)[1]["loss"]), X),
    "step, state": (
        "step",
        r"state \(leaf 'w'\)",
        lambda b: summed(STEP(STATE.replace(params=put(STATE.params, b)), X)[1]["loss"]),
        STATE.params.local(KEY),
    ),
    "step, moments": (
        "step",
        r"state \(leaf 'w'\)",
        lambda b: summed(
            STEP(STATE.replace(moments=STATE.moments._replace(momentum=put(STATE.moments.momentum, b))), X)[0].params
        ),
        torch.ones_like(STATE.params.local(KEY)),
    ),
    "step, cotangent": ("step", "cotangent", lambda ct: summed(STEP(STATE, X, cotangent=ct)[0].params), CT),
    "fused step": ("step", "inputs", lambda x: summed(fz.fuse_update(STEP)(STATE, x)[1]["loss"]), X),
    "forward, inputs": ("step.forward", "inputs", lambda x: STEP.forward(STATE, x), X),
    "forward, state": (
        "step.forward",
        r"state \(leaf 'w'\)",
        lambda b: STEP.forward(STATE.replace(params=put(STATE.params, b)), X),
        STATE.params.local(KEY),
    ),
    "update, grads": (
        "step.update",
        r"grads \(leaf 'w'\)",
        lambda b: summed(STEP.update(STATE, put(GRADS, b))[0].params),
        GRADS.local(KEY),
    ),
    "update, norm": (
        "step.update",
        "grad_norm",
        lambda norm: summed(STEP.update(STATE, GRADS, norm)[0].params),
        torch.ones((), dtype=F64),
    ),
    "add_grads": (
        "step.add_grads",
        r"grads \(leaf 'w'\)",
        lambda b: summed(STEP.add_grads(STATE, put(GRADS, b)).grads),
        GRADS.local(KEY),
    ),
    "init": ("step.init", r"params \(w\)", lambda w: summed(STEP.init({"w": w}).params), PARAMS["w"]),
    "convert": (
        "fz.convert",
        r"state \(leaf 'w'\)",
        lambda b: summed(fz.convert(STATE.replace(params=put(STATE.params, b)), STEP).params),
        STATE.params.local(KEY),
    ),
    "hvp": ("fz.hvp", "inputs", lambda x: summed(fz.hvp(STEP, STATE, GRADS, x)), X),
    "hvp, v": ("fz.hvp", "v", lambda b: summed(fz.hvp(STEP, STATE, put(GRADS, b), X)), GRADS.local(KEY)),
    "per_example_grads": ("fz.per_example_grads", "inputs", lambda x: summed(fz.per_example_grads(STEP, STATE, x)), X),
}


def forward_mode(fn: Callable[[torch.Tensor], Any], x: torch.Tensor) -> Any:
    with forward_ad.dual_level():
        value, tangent = forward_ad.unpack_dual(fn(forward_ad.make_dual(x, torch.ones_like(x))))
        return value, torch.zeros_like(value) if tangent is None else tangent


AROUND: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "torch.func.grad": lambda fn, x: torch.func.grad(fn)(x),
    "torch.func.jvp": lambda fn, x: torch.func.jvp(fn, (x,), (torch.ones_like(x),)),
    "torch.func.vmap": lambda fn, x: torch.func.vmap(fn)(torch.stack([x, x])),
    "torch.autograd.forward_ad": forward_mode,
}
NESTED: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    # the tensor belongs to the outer of two levels
    "torch.func.grad": lambda fn, x: torch.func.grad(
        lambda x: torch.func.vmap(lambda y: fn(x) * y)(torch.ones(2, dtype=F64) / 2).sum()
    )(x),
    "torch.func.jvp": lambda fn, x: torch.func.jvp(
        lambda x: torch.func.grad(lambda y: fn(x) * y)(torch.ones((), dtype=F64)), (x,), (torch.ones_like(x),)
    ),
    "torch.func.vmap": lambda fn, x: torch.func.vmap(
        lambda x: torch.func.grad(lambda y: fn(x) * y)(torch.ones((), dtype=F64))
    )(torch.stack([x, x])),
    "torch.autograd.forward_ad": lambda fn, x: forward_mode(
        lambda x: torch.func.grad(lambda y: fn(x) * y)(torch.ones((), dtype=F64)), x
    ),
}
REFUSE = ("convert", "hvp", "hvp, v", "per_example_grads")


@pytest.mark.parametrize("transform", sorted(AROUND))
@pytest.mark.parametrize("verb", REFUSE)
def test_a_transform_around_what_has_no_derivative(verb: str, transform: str) -> None:
    who, argument, fn, x = VERBS[verb]
    instead = r"fz\.per_example_grads" if transform == "torch.func.vmap" else r"step\.vjp.*fz\.hvp.*x\.detach\(\)"
    message = rf"^{who}: got {argument}.* that {transform} transforms.*expected.*cannot be transformed.*{instead}"
    for around in (AROUND, NESTED):
        with pytest.raises(TypeError, match=message):
            around[transform](fn, x)
    fn(x)  # and by itself it runs


@in_turns(2)
@pytest.mark.parametrize("transform", sorted(AROUND))
@pytest.mark.parametrize("verb", sorted(VERBS.keys() - {*REFUSE}))
def test_a_transform_around_a_verb(verb: str, transform: str) -> None:
    """Values and derivatives along ones, against differences of the verb itself."""
    fn, x = VERBS[verb][2:]
    value, step = torch.as_tensor(fn(x)), 1e-5
    slope = (fn(x + step) - fn(x - step)) / (2 * step)
    for around in (AROUND, NESTED):
        got = around[transform](fn, x)
        if transform == "torch.func.grad":
            assert_trees_close(got.sum(), slope, rtol=1e-7, atol=1e-8)
        elif transform == "torch.func.vmap":
            assert_trees_close(got, torch.stack([value, value]), rtol=1e-12)
        else:
            assert_trees_close(got[0], value, rtol=1e-12)
            assert_trees_close(got[1], slope, rtol=1e-7, atol=1e-8)

FEW_BITS = {
    "encoded": fz.Policy.exact(),
    "encoded moments": fz.Policy(moment="8-bit"),
    "rounded stochastically": fz.Policy.compact16(torch.bfloat16),
    "gathered in 8 bits": fz.Policy(gather="8-bit"),
}


@pytest.mark.parametrize("transform", ["torch.func.grad", "torch.func.vmap"])
@pytest.mark.parametrize("what", FEW_BITS)
def test_a_transform_around_a_step_in_few_bits(what: str, transform: str) -> None:
    """Is refused; of plain dtypes, also narrow ones, it goes through."""
    x = torch.ones(3)

    def trained(policy: fz.Policy, x: torch.Tensor) -> torch.Tensor:
        step = fz.train_step(lambda p, x: (p["w"].float() * x).square().sum(), fz.adamw(0.1), policy)
        state, _ = step(step.init({"w": torch.ones(3)}), x)
        return step.forward(state, x)

    with pytest.raises(TypeError, match=f"{what.split()[0]}.*no derivative.*(fz.convert|Leave gather)"):
        AROUND[transform](lambda x: trained(FEW_BITS[what], x), x)
    assert AROUND[transform](lambda x: trained(fz.Policy.bf16_states(), x), x).isfinite().all()


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_constants_inside_a_transform(verb: str) -> None:
    """A detached tensor is a constant, wrapped or not: the verb's value is as it is outside."""
    _, _, fn, x = VERBS[verb]
    want = torch.as_tensor(fn(x)).detach()

    def inside(y: torch.Tensor) -> torch.Tensor:
        once = torch.as_tensor(fn((x * y).detach())).detach()
        return y * once + y * torch.as_tensor(fn(x)).detach()

    one = torch.ones((), dtype=F64)
    assert_trees_close(torch.func.grad(inside)(one), 2 * want, rtol=1e-12)
    assert_trees_close(torch.func.jvp(inside, (one,), (one,))[1], 2 * want, rtol=1e-12)
    twice = torch.func.grad(lambda z: torch.func.grad(lambda y: inside(y) * z)(one))(one)
    assert_trees_close(twice, 2 * want, rtol=1e-12)


@in_turns(8)
@pytest.mark.parametrize(
    ("transform", "where", "stage", "world"),
    by_turns(
        [lambda step: step, fz.remat, lambda step: fz.accumulate(step, 2)],
        ["in fn", "in a unit", "under no_grad"],
        [0, 1, 2, 3],
        [1, 2],
    ),
)
def test_a_frozen_teacher(transform: Any, where: str, stage: int, world: int) -> None:
    """Another step's forward inside a step's fn, on detached activations."""
    world = world if stage else 1
    _, params = scenarios.stack(0)
    _, teaching = scenarios.stack(1)
    batches = scenarios.vector_batches(world)

    def run(p: Any, x: torch.Tensor, block: Any) -> torch.Tensor:
        for q in p["blocks"]:
            x = block(q, x)
        return x

    def plain_block(q: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ q["w"] + q["b"])

    def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
        h = plain_block(p["blocks"][0], x)
        return ((run(p, h, plain_block) - run(teaching, h.detach(), plain_block)) ** 2).mean()

    def mean(p: Any) -> torch.Tensor:
        return torch.stack([plain(p, x) for x, _ in batches]).mean()

    want = torch.func.grad(mean)(params)

    def rank_main(rank: int) -> None:
        teacher = SHARDS[stage](fz.train_step(lambda p, x: run(p, x, fz.unit(plain_block)), fz.sgd(0.1)))
        taught = teacher.init(teaching)

        def distance(q: Any, out: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
            if where == "under no_grad":
                with torch.no_grad():
                    aim = teacher.forward(taught, h)
                return ((out - aim) ** 2).mean()
            return ((out - teacher.forward(taught, h.detach())) ** 2).mean()

        def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
            h = fz.unit(plain_block)(p["blocks"][0], x)
            out = run(p, h, fz.unit(plain_block))
            return (fz.unit(distance) if where == "in a unit" else distance)(p["head"], out, h)

        step = transform(SHARDS[stage](fz.train_step(loss, fz.sgd(1.0))))
        state = step.init(params)
        new, metrics = step(state, batches[rank][0])
        assert_trees_close(metrics["loss"], mean(params), rtol=1e-10)
        got = torch.utils._pytree.tree_map(  # type: ignore[attr-defined]
            lambda old, new: old - new, params, fz.gather(new.params)
        )
        assert_trees_close(got, want, rtol=1e-9, atol=1e-14)
        grads, _ = step.vjp(state, batches[rank][0])[1](CT)
        assert_trees_close(fz.gather(grads), want, rtol=1e-9, atol=1e-14)

    run_ranks(rank_main, world)


def test_a_teacher_that_is_differentiated() -> None:
    teacher = fz.train_step(lambda p, x: x @ p["w"], fz.sgd(0.1))
    taught = teacher.init(PARAMS)
    step = fz.train_step(lambda p, x: (teacher.forward(taught, x @ p["v"]) ** 2).mean(), fz.sgd(0.1))
    params = {"v": torch.eye(3, dtype=F64)}
    state = step.init(params)
    want = torch.func.grad(lambda p: (((X @ p["v"]) @ PARAMS["w"]) ** 2).mean())(params)
    assert_trees_close(fz.gather(step.vjp(state, X)[1](CT)[0]), want, rtol=1e-12)
    new, _ = step(state, X)
    assert_trees_close(fz.gather(new.params)["v"], params["v"] - 0.1 * want["v"], rtol=1e-12)


def test_vjp_may_be_transformed_with_respect_to_its_inputs() -> None:
    def by_fzero(x: torch.Tensor) -> torch.Tensor:
        out, pullback = STEP.vjp(STATE, x)
        return pullback(torch.ones_like(out))[1][0].square().sum()

    def by_torch(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(_squared, argnums=1)(PARAMS, x).square().sum()

    assert_trees_close(torch.func.grad(by_fzero)(X), torch.func.grad(by_torch)(X), rtol=1e-10)


def test_plain_autograd_finds_constants_in_forward() -> None:
    x = X.clone().requires_grad_()
    assert not STEP.forward(STATE, x).requires_grad
    out, _ = STEP.vjp(STATE, x)
    assert out.requires_grad


def test_the_norm_of_full_tensors_is_a_function_like_any_other() -> None:
    def plain(tree: Any) -> torch.Tensor:
        return sum((x * x).sum() for x in tree.values()).sqrt()  # type: ignore[union-attr]

    tree = {"a": X, "b": PARAMS["w"]}
    assert_trees_close(torch.func.grad(fz.global_norm)(tree), torch.func.grad(plain)(tree), rtol=1e-12)
    pairs = [torch.func.jvp(fn, (tree,), (tree,)) for fn in (fz.global_norm, plain)]
    assert_trees_close(*pairs, rtol=1e-12)
    many = {name: torch.stack([x, 2 * x]) for name, x in tree.items()}
    assert_trees_close(torch.func.vmap(fz.global_norm)(many), torch.func.vmap(plain)(many), rtol=1e-12)


def test_a_learning_rate_that_plain_autograd_differentiates_is_refused() -> None:
    with pytest.raises(TypeError, match=r"sgd: got lr=a tensor that plain autograd differentiates.*lr\.detach\(\)"):
        fz.sgd(torch.tensor(0.1, dtype=F64, requires_grad=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_constants_inside_a_transform_on_several_ranks(stage: int) -> None:
    def rank_main(rank: int) -> None:
        step = SHARDS[stage](STEP)
        state = step.init(PARAMS)
        grads, _ = step.vjp(state, X)[1](CT)

        def inside(y: torch.Tensor) -> torch.Tensor:
            total = summed(fz.gather(state.params)) + fz.global_norm(grads) + step.forward(state, X * y.detach())
            total = total + summed(fz.gather(step.update(step.add_grads(state, grads), grads)[0].params))
            return y * (total + summed(fz.gather(step.init({"w": (PARAMS["w"] * y).detach()}).params)))

        # torch's forward mode, whose levels belong to the process, is not for ranks that are threads
        assert_trees_close(torch.func.grad(inside)(CT), inside(CT), rtol=1e-12)
        twice = torch.func.grad(lambda z: torch.func.grad(lambda y: inside(y) * z)(CT))(CT)
        assert_trees_close(twice, inside(CT), rtol=1e-12)

    run_ranks(rank_main, 2)
