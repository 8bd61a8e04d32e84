"""fz.scatter is the inverse of fz.gather; a state takes full trees as well as sharded ones."""

# pyright: reportArgumentType=false

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sliced_states as sliced
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from nightly import in_turns
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import fzero as fz
from fzero.formats.bits import Counters
from fzero.formats.formats import Companded, Corrected, Exact, Format, Stored, decode, zeros
from fzero.kernels.onepass import write
from fzero.state.sliced import codes_of
from fzero.testing import assert_no_alias, assert_trees_close, assert_trees_equal, run_ranks

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fz.adamw(1e-2),
    "sgd": lambda: fz.sgd(0.1, momentum=0.9),
    "chain": lambda: fz.chain(fz.clip_by_global_norm(1.0), fz.lion(1e-2)),
    "partition": lambda: fz.partition({"*0": fz.adamw(1e-2), "*": fz.adam(1e-3)}),
    "whole": lambda: fz.whole(fz.lamb(1e-2)),
    "adafactor": lambda: fz.adafactor(1e-2),
}
WIDE = ("float64", "float32", "exact", "bf16")  # whose moments any optimizer can carry


def there_and_back(rank: int, leaves: sliced.Shapes, over: sliced.Over, policy: str, optimizer: str) -> None:
    dtype = torch.float64 if policy == "float64" else torch.float32
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy], OPTIMIZERS[optimizer]())
    state = sliced.trained(step, sliced.params(leaves, dtype), keeps_grads=True)
    fields = ("params", "moments", "grads")
    full = {name: fz.gather(getattr(state, name)) for name in fields}
    extra = fz.gather(state.extra)
    whole = {**{name: fz.scatter(full[name], like=getattr(state, name)) for name in fields}, "extra": extra}
    for tree in (whole, {**full, "extra": extra}):
        other = state.replace(**tree)
        sliced.same_bits(other, state)
        sliced.same_bits(sliced.whole(other), sliced.whole(state))
        assert_no_alias({name: getattr(other, name) for name in fields}, full)
        after, metrics = step(other, torch.ones(2))
        expected, known = step(state, torch.ones(2))
        sliced.same_bits((after, metrics), (expected, known))


@pytest.mark.usefixtures("hazards")
@example(  # a group without the value that its scale was for
    drawn=(((5, 7), (3,)), sliced.Over(3, 1, 3, (sliced.Cut(None), sliced.Cut(None)))),
    policy="4-bit",
    optimizer="adamw",
)
@given(
    drawn=sliced.shapes().flatmap(lambda leaves: st.tuples(st.just(leaves), sliced.overs(leaves))),
    policy=st.sampled_from([*sliced.POLICIES]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
)
def test_what_is_gathered_is_scattered_to_the_same_bits(drawn: Any, policy: str, optimizer: str) -> None:
    leaves, over = drawn
    optimizer = optimizer if policy in WIDE or optimizer in ("adamw", "sgd", "chain", "partition") else "adamw"
    if optimizer == "partition" and len(leaves) == 1:
        optimizer = "adamw"
    run_ranks(
        functools.partial(there_and_back, leaves=leaves, over=over, policy=policy, optimizer=optimizer), over.ranks
    )


def moved(leaves: sliced.Shapes, policy: str) -> None:
    """Into a state that begins, which has other codes."""
    loss = lambda p, x: torch.stack([sliced.squares({"w": leaf}, 1) for leaf in p.values()]).sum() * x
    step = fz.ema(fz.train_step(loss, fz.adamw(1e-2), sliced.POLICIES[policy]), 0.9)
    state = step.init(sliced.params(leaves, torch.float32))
    for _ in range(3):
        state, _ = step(state, torch.ones(()))
    of = lambda state: [fz.gather(tree) for tree in (state.params, state.moments, state.extra)]
    params, moments, extra = of(state)
    got = step.init(params).replace(moments=moments, extra=extra, step=state.step)
    sliced.same_bits(of(got), [params, moments, extra])


@given(leaves=sliced.shapes(most=70), policy=st.sampled_from([*sliced.POLICIES][1:]))
def test_values_of_few_bits_are_the_same_among_other_codes(leaves: sliced.Shapes, policy: str) -> None:
    moved(leaves, policy)


FORMATS = [Companded(True, 8), Companded(False, 8), Companded(True, 4), Corrected(), Exact()]


@given(form=st.sampled_from(FORMATS), seed=st.integers(0, 999), spread=st.integers(0, 8), empty=st.booleans())
def test_decoded_values_have_their_codes_again(form: Format, seed: int, spread: int, empty: bool) -> None:
    """Also where the largest of 32 was rounded to a value that alone would have another scale."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(640, generator=generator) * torch.exp(spread * torch.randn(640, generator=generator))
    if empty:
        x[::3] = 0
    stored = Stored(form, zeros(form, 640, x.device))
    write(stored, x if form != Companded(False, 8) else x.abs(), Counters(((0, seed, 7),), 10).keys(x.device))
    values = stored.to(torch.float32)
    assert torch.equal(decode(form, codes_of(form, values), torch.float32), values)


# ---- a vocabulary that grows in the middle of a run


@fz.unit
def _linear(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ p["w"]


def _lm_loss(p: Any, tokens: torch.Tensor) -> torch.Tensor:
    h = _linear(p["blocks"][0], F.embedding(tokens[:, :-1], p["embed"]))
    return F.cross_entropy((h.tanh() @ p["head"].T).flatten(0, 1), tokens[:, 1:].flatten())


def _lm(vocabulary: int, width: int) -> dict[str, Any]:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    return {
        "embed": draw(vocabulary, width),
        "blocks": [{"w": draw(width, width)}],
        "head": draw(vocabulary, width) / 2,
    }


def _tokens(world: int, vocabulary: int, step: int) -> torch.Tensor:
    return torch.randint(vocabulary, (world * 2, 6), generator=torch.Generator().manual_seed(step))


def grown_by_torch(world: int, sizes: tuple[int, int, int], steps: int) -> dict[str, Any]:
    """torch.optim.AdamW, whose exp_avg and exp_avg_sq are padded."""
    old, more, width = sizes
    params = _lm(old, width)
    leaves = {"embed": params["embed"], "w": params["blocks"][0]["w"], "head": params["head"]}
    leaves = {name: x.requires_grad_() for name, x in leaves.items()}
    optimizer = torch.optim.AdamW(leaves.values(), lr=1e-2)
    for step in range(2 * steps):
        if step == steps:
            padded = {n: F.pad(x.detach(), (0, 0, 0, more)).requires_grad_() for n, x in leaves.items() if n != "w"}
            grown = {**leaves, **padded}
            other = torch.optim.AdamW(grown.values(), lr=1e-2)
            for name, x in leaves.items():
                own = optimizer.state[x]
                pad = (lambda t: t) if name == "w" else lambda t: F.pad(t, (0, 0, 0, more))
                other.state[grown[name]] = {"step": own["step"], **{k: pad(own[k]) for k in ("exp_avg", "exp_avg_sq")}}
            leaves, optimizer = grown, other
        optimizer.zero_grad()
        p = {"embed": leaves["embed"], "blocks": [{"w": leaves["w"]}], "head": leaves["head"]}
        _lm_loss(p, _tokens(world, old if step < steps else old + more, step)).backward()
        optimizer.step()
    return {name: x.detach() for name, x in leaves.items()}


def grown_by_fzero(rank: int, world: int, stage: int, sizes: tuple[int, int, int], steps: int) -> dict[str, Any]:
    old, more, width = sizes
    step = sliced.SHARDS[stage](fz.train_step(_lm_loss, fz.adamw(1e-2)), mesh=None)
    state = step.init(_lm(old, width))
    for number in range(steps):
        state, _ = step(state, _tokens(world, old, number).chunk(world)[rank])
    params, moments = fz.gather(state.params), fz.gather(state.moments)
    for tree in (params, moments.mu, moments.nu):
        tree |= {name: F.pad(tree[name], (0, 0, 0, more)) for name in ("embed", "head")}
    state = step.init(params).replace(moments=moments, step=state.step)
    for number in range(steps, 2 * steps):
        state, _ = step(state, _tokens(world, old + more, number).chunk(world)[rank])
    full = fz.gather(state.params, "*")
    return {"embed": full["embed"], "w": full["blocks.0.w"], "head": full["head"]}


@given(
    stage=st.integers(0, 3),
    world=st.integers(1, 4),
    sizes=st.tuples(st.integers(2, 9), st.integers(1, 5), st.integers(1, 9)),
    steps=st.integers(1, 3),
)
def test_a_vocabulary_grows_as_in_torch(stage: int, world: int, sizes: tuple[int, int, int], steps: int) -> None:
    world = world if stage else 1
    run = functools.partial(grown_by_fzero, world=world, stage=stage, sizes=sizes, steps=steps)
    for found in run_ranks(run, world):
        assert_trees_close(found, grown_by_torch(world, sizes, steps), rtol=1e-10, atol=1e-10)


# ---- full gradients


def _frozen_loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (_linear(p["blocks"][0], (x @ p["base"]["w"]).tanh()) + p["bias"]).square().mean()


def full_grads(rank: int, stage: int, world: int, frozen: str, scale: bool, kept: bool) -> Any:
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    params = {"base": {"w": draw(4, 5)}, "blocks": [{"w": draw(5, 3)}], "bias": draw(3)}
    xs = draw(world, 6, 4)
    step = fz.freeze(fz.train_step(_frozen_loss, fz.chain(fz.clip_by_global_norm(0.1), fz.adamw(1e-2))), "base.*")
    step = fz.loss_scale(step, 64.0) if scale else step
    step = sliced.SHARDS[stage](step, mesh=None)
    state = step.init(params)
    out, pullback = step.vjp(state, xs[rank])
    grads, _ = pullback(torch.ones_like(out))
    want, metrics = step.update(state, grads)
    # what plain torch computes of all ranks' batches
    mean = lambda p: torch.stack([_frozen_loss(p, x) for x in xs]).mean()
    full = torch.func.grad(mean)(params)
    if frozen == "left out":
        del full["base"]
    elif frozen == "None":
        full["base"]["w"] = None
    elif frozen == "by path":
        full = {"blocks.0.w": full["blocks"][0]["w"], "bias": full["bias"]}
    if kept:
        half = tree_map(lambda x: x if x is None else x / 2, full)
        got, found = step.update(step.add_grads(state, half), half)
    else:
        got, found = step.update(state, full)
    assert_trees_close(fz.gather(got.params), fz.gather(want.params), rtol=1e-10, atol=1e-10)
    assert_trees_close(found["grad_norm"], metrics["grad_norm"], rtol=1e-10, atol=0)
    assert not found["skipped"]
    # what the state keeps of a pullback, with its loss scale, there and back; and other params are computed with
    there = step.add_grads(state, grads)
    back = there.replace(grads=fz.gather(there.grads), params=tree_map(lambda x: 2 * x, params))
    assert_trees_close(step.forward(back, xs[rank]), _frozen_loss(tree_map(lambda x: 2 * x, params), xs[rank]))
    zeros = {path: torch.zeros_like(x) for path, x in fz.gather(grads, "*").items()}
    got, _ = step.update(back.replace(params=state.params), zeros)
    assert_trees_close(fz.gather(got.params), fz.gather(want.params), rtol=1e-10, atol=1e-10)


@given(
    stage=st.integers(0, 3),
    world=st.integers(1, 4),
    frozen=st.sampled_from(["there", "left out", "None", "by path"]),
    scale=st.booleans(),
    kept=st.booleans(),
)
def test_full_grads_are_the_mean_already(stage: int, world: int, frozen: str, scale: bool, kept: bool) -> None:
    world = world if stage else 1
    own = functools.partial(full_grads, stage=stage, world=world, frozen=frozen, scale=scale, kept=kept)
    run_ranks(own, world)


# ---- a part, and one rank alone


def parts_of(rank: int, leaves: sliced.Shapes, over: sliced.Over, policy: str, to: int, pattern: str) -> None:
    dtype = torch.float64 if policy == "float64" else torch.float32
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy])
    state = sliced.trained(step, sliced.params(leaves, dtype), steps=1, keeps_grads=True)
    for tree in (state.params, state.moments, state.grads):
        full = fz.gather(tree)
        flat = lambda own: {k: v for k, v in own.items() if torch.distributed.get_rank() >= 0 and _matches(pattern, k)}
        part = full._replace(mu=flat(full.mu), nu=flat(full.nu)) if tree is state.moments else flat(full)
        sliced.same_bits(fz.gather(tree, pattern), part)
        for want, chosen in ((full, None), (part, pattern)):
            got = fz.gather(tree, chosen, to=to)
            if rank == to:
                sliced.same_bits(got, want)
            else:
                assert got is None


def _matches(pattern: str, path: str) -> bool:
    return pattern == "*" or path.startswith("blocks.0.") or path.endswith("w2")


@pytest.mark.usefixtures("hazards")
@given(
    drawn=sliced.shapes().flatmap(lambda leaves: st.tuples(st.just(leaves), sliced.overs(leaves))),
    policy=st.sampled_from(["float64", "exact", "bf16"]),
    to=st.integers(0, 3),
    pattern=st.sampled_from(["*", "blocks.0.*|*w2"]),
)
def test_a_part_is_gathered_and_on_one_rank_alone(drawn: Any, policy: str, to: int, pattern: str) -> None:
    leaves, over = drawn
    own = functools.partial(parts_of, leaves=leaves, over=over, policy=policy, to=to % over.ranks, pattern=pattern)
    run_ranks(own, over.ranks)


def everything(rank: int) -> None:
    """On processes, where transfers take time."""
    two = sliced.Cut(None)
    leaves = ((5, 7), (3,), (2, 70))
    for over, policy in (
        (sliced.Over(2, 1, 3, (two,) * 3), "4-bit"),
        (sliced.Over(1, 2, 0, (sliced.Cut(0), two, two)), "exact"),
    ):
        there_and_back(rank, leaves, over, policy, "adamw")
        parts_of(rank, leaves, over, policy, 1, "blocks.0.*|*w2")
    full_grads(rank, 3, 2, "left out", True, True)


@in_turns(8, "on processes, as on threads")
def test_on_processes() -> None:
    run_ranks(everything, 2, backend="processes")


# ---- what does not fit


def _state(stage: int = 3, optimizer: Any = None) -> tuple[fz.Step, fz.TrainState]:
    step = fz.freeze(fz.train_step(_frozen_loss, optimizer or fz.adamw(1e-2)), "base.*")
    params = {"base": {"w": torch.ones(4, 5)}, "blocks": [{"w": torch.ones(5, 3)}], "bias": torch.ones(3)}
    step = sliced.SHARDS[stage](step, mesh=None)
    return step, step.init(params)


def _changed(tree: Any, path: str, value: object) -> Any:
    """A natural tree with another leaf, or without it."""
    tree = tree_map(lambda x: x, tree)
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    node = functools.reduce(operator.getitem, keys, tree)
    if value is _changed:
        del node[last]
    else:
        node[last] = value
    return tree


WRONG: dict[str, tuple[str, object, str]] = {
    "another shape": ("blocks.0.w", torch.ones(5, 4), r"\['blocks.0.w'\]: got .*\(5, 4\).*, expected shape \(5, 3\)"),
    "no tensor": ("blocks.0.w", "text", r"\['blocks.0.w'\]: got .*, expected a floating tensor of shape \(5, 3\)"),
    "integers": ("bias", torch.ones(3, dtype=torch.int64), r"\['bias'\]: got .*int64.*, expected a floating tensor"),
    "sparse": ("blocks.0.w", torch.ones(5, 3).to_sparse(), r"shape \(5, 3\), dense and whole on this rank"),
    "without values": ("bias", torch.ones(3, device="meta"), r"shape \(3,\), dense and whole on this rank"),
    "a leaf less": ("bias", _changed, r"\['bias'\] is missing, expected a tensor of shape \(3,\)"),
    "None": ("bias", None, r"\['bias'\] is missing, expected a tensor of shape \(3,\)"),
    "a leaf more": ("more", torch.ones(3), r"got a leaf 'more' in .*, expected those of the state: base.w, bias"),
}


@in_turns(2)
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("field", ["params", "grads", "moments", "extra"])
def test_a_leaf_that_does_not_fit_is_named_on_every_rank(wrong: str, field: str) -> None:
    path, value, words = WRONG[wrong]

    def rank_main(rank: int) -> None:
        step, state = _state()
        step = fz.ema(step, 0.9)
        state = step.init(fz.gather(state.params))
        full = _changed(fz.gather(state.params), "base", _changed)
        full = _changed(full, path, value)
        if field == "moments":
            full = fz.gather(state.moments)._replace(nu=full)
        calls = [lambda: state.replace(**{field: {"ema": full} if field == "extra" else full})]
        if field == "grads":
            calls += [lambda: step.update(state, full), lambda: step.add_grads(state, full)]
        elif field != "extra":
            calls += [lambda: fz.scatter(full, like=getattr(state, field))]
        for call in calls:
            with pytest.raises((TypeError, ValueError), match=words):
                call()

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(("kind", "value"), [("mu", float("nan")), ("mu", float("inf")), ("nu", -1.0)])
def test_what_codes_cannot_hold_is_refused(kind: str, value: float) -> None:
    """One such value would change those that share its scale."""

    def rank_main(rank: int) -> None:
        step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1), policy=fz.Policy.compact16())
        state = fz.shard_zero3(step).init({"w": torch.ones(40)})
        full = fz.gather(state.moments)
        full = full._replace(**{kind: {"w": torch.tensor([*[0.5] * 39, value])}})
        with pytest.raises(ValueError, match=r"leaf 'w'.*codes cannot hold"):
            state.replace(moments=full)

    run_ranks(rank_main, 2)


def test_moments_of_a_frozen_leaf_are_refused_and_its_params_stay() -> None:
    _, state = _state(0)
    moments = fz.gather(state.moments)
    with pytest.raises(ValueError, match=r"mu\['base.w'\]: got .*, expected None: there is none of this leaf"):
        state.replace(moments=moments._replace(mu=_changed(moments.mu, "base.w", torch.ones(4, 5))))
    got = state.replace(params={"blocks.0.w": torch.zeros(5, 3), "bias": torch.zeros(3)})
    assert_trees_equal(fz.gather(got.params, "base*"), {"base.w": torch.ones(4, 5)})


@pytest.mark.parametrize("policy", [None, fz.Policy.exact(torch.float32)])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_params_of_trained_leaves_alone(stage: int, policy: Any) -> None:
    """What they lack stays as it is stored."""

    def rank_main(rank: int) -> None:
        step = fz.freeze(fz.train_step(lambda p: (p["a"].sum() * p["b"].sum()).float(), fz.sgd(0.1), policy), "b")
        step = sliced.SHARDS[stage](step, mesh=None)
        state = step.init({"a": torch.linspace(0, 1, 3), "b": torch.linspace(1, 2, 5)})
        trained = state.params.only(state.layout.trainable)
        for other in (state.replace(params=trained), state.replace(params=fz.scatter(trained, like=state.params))):
            sliced.same_bits(fz.gather(other.params), fz.gather(state.params))
            assert torch.equal(step.forward(other), step.forward(state))

    run_ranks(rank_main, 2 if stage else 1)


@pytest.mark.parametrize("field", ["params", "grads", "moments"])
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_differ_are_refused_on_every_rank(field: str, stage: int) -> None:
    def rank_main(rank: int) -> None:
        step, state = _state(stage)
        full = fz.gather(state.params)
        full["bias"] = full["bias"] + rank
        if field == "moments":
            moments = fz.gather(state.moments)
            full = moments._replace(mu=_changed(moments.mu, "bias", torch.full((3,), float(rank))))
        with pytest.raises(ValueError, match=r"full leaves given to .* differ.*bias"):
            step.update(state, full) if field == "grads" else state.replace(**{field: full})
        with pytest.raises(ValueError, match=r"full leaves given to .* differ.*'bias'\] is missing"):
            full = fz.gather(state.params)
            state.replace(params=full if rank else {**full, "bias": None})  # nobody waits for a rank that refuses it
        with pytest.raises(ValueError, match=r"full leaves given to .* differ"):
            moments = fz.gather(state.moments)
            state.replace(moments=moments._replace(count=type(moments.count)(rank)))
        with pytest.raises(ValueError, match=r"full leaves given to .* differ.*got grads=a tensor"):
            full = fz.gather(state.params)
            step.update(state, torch.ones(3) if rank else full)
        with pytest.raises(ValueError, match=r"full leaves given to .* differ.*dense and whole on this rank"):
            meta = torch.ones(3, device="meta" if rank else "cpu")
            state.replace(params={**fz.gather(state.params), "bias": meta})

    run_ranks(rank_main, 2)


def test_numbers_of_a_transform_are_held_to_the_states_and_to_those_of_other_ranks() -> None:
    def rank_main(rank: int) -> None:
        step = fz.loss_scale(_state()[0])
        state = step.init({"base": {"w": torch.ones(4, 5)}, "blocks": [{"w": torch.ones(5, 3)}], "bias": torch.ones(3)})
        own = state.extra["loss_scale"]
        assert state.replace(extra={"loss_scale": own._replace(scale=2.0)}).extra["loss_scale"].scale == 2.0
        with pytest.raises(ValueError, match=r"got extra\['loss_scale'\]=2.0, expected the structure of the state's"):
            state.replace(extra={"loss_scale": 2.0})
        with pytest.raises(ValueError, match=r"differ between the ranks.*\['loss_scale'\].scale with 2.0"):
            state.replace(extra={"loss_scale": own._replace(scale=2.0 + rank)})

    run_ranks(rank_main, 2)


def test_counts_of_a_state_whose_other_leaves_are_frozen_are_refused() -> None:
    """They would stand still for a leaf that is trained here."""
    thawed = fz.train_step(lambda p: (p["a"] * p["b"]).sum(), fz.adamw(0.1))
    frozen = fz.freeze(thawed, "b", keep_moments=True)
    params = {"a": torch.ones(3), "b": torch.ones(3)}
    for step, other in ((thawed, frozen), (frozen, thawed)):
        state, _ = step(step.init(params))
        with pytest.raises(ValueError, match=r"got moments.count=Count\(1.*call fz.convert\(state, step\)"):
            other.init(params).replace(moments=fz.gather(state.moments))


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_params_that_are_one_tensor(stage: int) -> None:
    def rank_main(rank: int) -> None:
        step = sliced.SHARDS[stage](fz.train_step(lambda p, x: (p * x).sum(), fz.adamw(0.1)), mesh=None)
        state, _ = step(step.init(torch.ones(5)), torch.ones(5))
        params, moments = fz.gather(state.params), fz.gather(state.moments)
        sliced.same_bits(state.replace(params=params, moments=moments), state)
        sliced.same_bits(step.update(state, params), step.update(state, fz.scatter(params, like=state.moments.mu)))

    run_ranks(rank_main, 2 if stage else 1)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_full_leaves_for_a_stacked_state_are_refused(stage: int) -> None:
    def rank_main(rank: int) -> None:
        _, state = _state(stage)
        states = fz.stack([state, state])
        with pytest.raises(ValueError, match="full leaves for params of a stacked state"):
            states.replace(params=fz.gather(state.params))

    run_ranks(rank_main, 2 if stage else 1)


def test_other_kinds_of_trees_are_refused() -> None:
    step, state = _state(0)
    other = step.init({"base": {"w": torch.ones(4, 5)}, "blocks": [{"w": torch.ones(5, 2)}], "bias": torch.ones(2)})
    for call, words in {
        lambda: fz.scatter({}, like={"w": torch.ones(1)}): "in which no tree is sharded",
        lambda: fz.scatter(fz.gather(state.params), like=state.moments): "expected the structure of the state's",
        lambda: fz.scatter(3, like=state.params): "expected full leaves, or a tree sharded like it",
        lambda: fz.scatter({"w": state.params}, like=state.params): "expected full leaves, or a tree sharded like it",
        lambda: state.replace(moments=fz.gather(state.params)): "expected the structure of the state's",
        lambda: state.replace(params=other.params): "of another state's leaves",
        lambda: state.replace(moments=other.moments): "of another state's leaves",
        lambda: state.replace(params=state.moments.mu): None,  # values of the trained leaves
        lambda: state.replace(
            grads=state.params.only(state.params.groups[:1])
        ): "grads lacks leaf .*, which is trained",
        lambda: step.update(state, torch.ones(3)): "expected full leaves, or a tree sharded like it",
        lambda: step.update(state, fz.gather(state.moments)): "step.update: got .*grads",
    }.items():
        if words is None:
            call()
            continue
        with pytest.raises((TypeError, ValueError), match=words):
            call()


@pytest.mark.parametrize("cut", [False, True])
def test_a_full_tree_goes_to_a_rank_that_takes_part(cut: bool) -> None:
    """Of the axis, or of the tensor groups of its ranks: four of eight."""

    def rank_main(rank: int) -> None:
        mesh = torch.distributed.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
        step = fz.train_step(lambda p: (p["w"] ** 2).sum(), fz.sgd(0.1))
        step = fz.shard_tensor(step, {"w": 0}, mesh, axis="tp") if cut else step
        state = fz.shard_zero3(step, mesh=mesh, axis="dp").init({"w": torch.arange(4.0)})
        for to in range(8):
            if to // 4 == rank // 4 and (cut or to % 2 == rank % 2):
                assert (fz.gather(state.params, to=to) is None) == (rank != to)
            else:
                with pytest.raises(ValueError, match=rf"got to={to}, expected one of the ranks of ranks \[.* of axis"):
                    fz.gather(state.params, to=to)

    run_ranks(rank_main, 8)


def test_what_gather_is_asked_for_that_is_not_there() -> None:
    def rank_main(rank: int) -> None:
        _, state = _state()
        with pytest.raises(
            ValueError, match=r"got pattern='block', expected one that matches some of the leaves base.w, bias"
        ):
            fz.gather(state.params, "block")
        for to in (2, -1):
            with pytest.raises(ValueError, match=rf"got to={to}, expected one of the ranks of this run, 0 to 1"):
                fz.gather(state.params, to=to)
        for wrong in (True, "0"):
            with pytest.raises(TypeError, match="to="):
                fz.gather(state.params, to=wrong)
        assert_trees_equal(fz.gather(state.params), fz.gather(state.params))  # nobody waits

    run_ranks(rank_main, 2)


@pytest.mark.parametrize("memory", [None, "host", "disk"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_derivative_goes_through_a_scatter(stage: int, memory: str | None, tmp_path: Path) -> None:
    """A step's loss at full params that a transform differentiates, wherever the state's own lie."""
    x = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def rank_main(rank: int) -> None:
        step, state = _state(stage)
        double = tree_map(torch.Tensor.double, fz.gather(state.params))
        if memory is not None:
            step = fz.offload(step, params=fz.Disk(tmp_path) if memory == "disk" else memory)
        state = step.init(double)
        at = lambda w: step.forward(state.replace(params={"blocks.0.w": w, "bias": double["bias"]}), x)
        plain = lambda w: _frozen_loss({**double, "blocks": [{"w": w}]}, x)
        w = double["blocks"][0]["w"]
        if memory == "disk":
            with pytest.raises(TypeError, match=r"lie on a disk \(fz\.offload\), which has no derivative"):
                torch.func.grad(at)(w)
        else:
            assert_trees_close(torch.func.grad(at)(w), torch.func.grad(plain)(w), rtol=1e-10, atol=1e-12)

    run_ranks(rank_main, 2 if stage else 1)
