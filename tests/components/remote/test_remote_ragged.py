"""Examples of different lengths: rows go where their examples go."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import remote_builds as builds
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from test_remote_dims import P, need_close, pulled_back

import fzero as fz

PLACES = [("threads", 1), ("threads", 2), ("threads", 3), ("processes", 2)]


@pytest.fixture(scope="module")
def components() -> Iterator[list[Any]]:
    own = [
        fz.remote(functools.partial(builds.built_ragged, stage=1 + number % 3), ranks, on, name=f"ragged {number}")
        for number, (on, ranks) in enumerate(PLACES)
    ]
    yield own
    for each in own:
        each.close()


def drawn_batch(data: st.DataObject, generator: torch.Generator) -> tuple[fz.Ragged, torch.Tensor]:
    lengths = torch.tensor(data.draw(st.lists(st.integers(0, 4), min_size=3, max_size=6)))
    lengths[0] += lengths.sum() == 0
    drawn = functools.partial(torch.randint, -3, 4, generator=generator, dtype=torch.float64)
    return fz.Ragged(drawn((int(lengths.sum()), 3)), lengths), drawn((len(lengths),))


@settings(max_examples=15)
@given(data=st.data())
def test_rows_go_where_their_examples_go(components: list[Any], data: st.DataObject) -> None:
    """Outputs, grads and input cotangents of two components in a row are those of one process."""
    first, second = (data.draw(st.sampled_from(components)) for _ in range(2))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, scale = drawn_batch(data, generator)
    states = first.init(), second.init()
    params: Any = [fz.gather(state.params) for state in states]

    def both(p1: Any, p2: Any, x: Any, scale: Any) -> Any:
        out = builds.ragged(p1, x, scale)
        return builds.ragged(p2, out["rows"], scale), out["mean"], out["sums"]

    out, pull = first.vjp(states[0], x, scale)
    rows = out["rows"]
    given_on = data.draw(st.sampled_from(["handles", "plain values", "plain lengths"]))
    if given_on == "plain values":
        rows = rows._replace(values=fz.fetch(rows.values))
    elif given_on == "plain lengths":
        rows = rows._replace(lengths=x.lengths)
    more, pull_more = second.vjp(states[1], rows, scale)
    expected = both(params[0], params[1], x, scale)
    ct: Any = torch_pytree.tree_map(
        lambda t: torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else None, expected
    )
    g2, (ct_x, ct_scale) = pull_more(ct[0])
    assert ct_x.lengths is None
    g1, (ct_x, more_scale) = pull({"rows": fz.Ragged(ct_x.values, None), "sums": ct[2], "mean": ct[1]})
    real = lambda out: [t for t in torch_pytree.tree_leaves(out) if t is not None and t.is_floating_point()]
    _, cts = pulled_back(lambda *a: real(both(*a)), real(ct), *params, x, scale)
    by_1, by_2, by_x, by_scale = cts
    need_close(real(fz.fetch((more, out["mean"], out["sums"]))), real(expected))
    assert fz.fetch(more["rows"].lengths).equal(x.lengths)
    need_close(fz.fetch(ct_x.values), by_x.values)
    need_close(fz.fetch(ct_scale) + fz.fetch(more_scale), by_scale)
    need_close((fz.gather(g1), fz.gather(g2)), (by_1, by_2))


@settings(max_examples=10)
@given(data=st.data())
def test_the_way_back_is_the_transpose_to_the_last_bit(components: list[Any], data: st.DataObject) -> None:
    """<Ax, y> == <x, A'y> for whole numbers."""
    chain = data.draw(st.lists(st.sampled_from(components), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, scale = drawn_batch(data, generator)
    rows, pulls = x, list[Any]()
    for each in chain:
        out, pull = each.vjp(each.init(), rows, scale, False, argnums=0)
        rows = out["rows"]
        pulls.append(pull)
    got = fz.fetch(rows.values)
    y = torch.randint(-3, 4, got.shape, generator=generator, dtype=torch.float64)
    ct: Any = y
    for pull in reversed(pulls):
        _, (ct, *_) = pull({"rows": fz.Ragged(ct, None), "sums": None})
        ct = ct.values
    assert (got * y).sum() == (x.values * fz.fetch(ct)).sum()


@in_turns(3)
@pytest.mark.parametrize("sizes", [(2, 2), (1, 3), (3, 1)])
def test_rows_of_a_ranks_examples_over_a_further_axis(sizes: tuple[int, int], components: list[Any]) -> None:
    """Examples over dp, and the rows of each rank's over sp, several tensors of them; and on to ranks of other cuts."""

    def fn(p: Any, x: fz.Ragged) -> Any:
        rows, factors = x.values["rows"], x.values["factors"]
        return fz.Ragged({"out": torch.tanh(rows @ p["w"]) * factors[:, None], "factors": factors}, x.lengths)

    def build(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "sp"))
        step = fz.shard_zero2(fz.train_step(fn, fz.sgd(0.1)), mesh, axis=("dp", "sp"))
        return step, {"w": builds.weights()["in"][:, :3]}, mesh

    def both(p1: Any, p2: Any, rows: torch.Tensor) -> Any:
        out = fn(p1, fz.Ragged({"rows": rows, "factors": factors}, lengths)).values["out"]
        return builds.ragged(p2, fz.Ragged(out, lengths), scale)["rows"].values

    specs, other = fz.Ragged(P(("dp", "sp")), P("dp")), components[2]
    drawn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with fz.remote(build, sizes[0] * sizes[1], "threads", in_specs=(specs,), out_specs=specs) as own:
        params: Any = [fz.gather(each.init().params) for each in (own, other)]
        for sizes_of in ([5, 0, 3, 1, 4], [2, 2, 1], [0, 0, 7]):
            lengths, count, scale = torch.tensor(sizes_of), sum(sizes_of), drawn(len(sizes_of))
            factors = torch.arange(count)
            x = fz.Ragged({"rows": drawn(count, 3), "factors": factors}, lengths)
            out, pullback = own.vjp(own.init(), x)
            more, pull_more = other.vjp(other.init(), fz.Ragged(out.values["out"], out.lengths), scale)
            ct = drawn(count, 3)
            g2, (ct_out, _) = pull_more({"rows": fz.Ragged(ct, None), "sums": None, "mean": None})
            g1, (ct_x,) = pullback(fz.Ragged({"out": ct_out.values, "factors": None}, None))
            expected, by_inputs = pulled_back(both, ct, *params, x.values["rows"])
            need_close(fz.fetch(more["rows"].values), expected)
            assert fz.fetch(out.lengths).equal(lengths) and fz.fetch(out.values["factors"]).equal(factors)
            need_close((fz.gather(g1), fz.gather(g2), fz.fetch(ct_x.values["rows"])), by_inputs)
            assert ct_x.values["factors"] is None and ct_x.lengths is None


def test_rows_of_rows_are_refused(components: list[Any]) -> None:
    own, ones = components[1], torch.ones(2, dtype=torch.int64)
    nested = fz.Ragged({"x": fz.Ragged(torch.ones(2, 3, dtype=torch.float64), ones)}, ones)
    with pytest.raises(ValueError, match="values that hold another"):
        own.forward(own.init(), nested, torch.ones(2, dtype=torch.float64))


def test_what_is_no_ragged_batch_is_refused(components: list[Any]) -> None:
    two = components[1]
    state, scale = two.init(), torch.ones(3, dtype=torch.float64)
    rows = torch.ones(6, 3, dtype=torch.float64)
    bad = [[1, 2, 2], [4, 4, -2], [1.0, 2.0, 3.0], [True, True, True], 6, [[1, 2, 3]]]
    words = ["add up to 5", "at least 0", "expected ints", "expected ints", "expected ints", "expected ints"]
    held = two.vjp(state, fz.Ragged(rows, torch.tensor([1, 2, 3])), scale)[0]["rows"]
    for lengths, word in zip(bad, words, strict=True):
        for own in (rows, held.values):
            with pytest.raises(ValueError, match=word):
                two.forward(state, fz.Ragged(own, torch.tensor(lengths)), scale)
    with pytest.raises(ValueError, match=r"both lie over 'dp'; expected the same size"):
        two.forward(state, fz.Ragged(rows, torch.tensor([1, 5])), scale)
    with pytest.raises(ValueError, match=r"both lie over 'dp'; expected the same size"):
        two.forward(state, fz.Ragged(held.values, torch.tensor([1, 5])), scale)


def test_rows_that_lie_otherwise_than_their_examples_are_refused() -> None:
    def build(rank: int) -> Any:
        mesh = torch.distributed.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "sp"))
        step = fz.shard_zero2(fz.train_step(lambda p, x: x.values * p["w"], fz.sgd(0.1)), mesh, axis=("dp", "sp"))
        return step, {"w": builds.ONES}, mesh

    x = fz.Ragged(torch.ones(3, 3, dtype=torch.float64), torch.tensor([1, 2]))
    for rows in (P("sp"), P(("sp", "dp")), P()):
        with fz.remote(build, 2, "threads", in_specs=(fz.Ragged(rows, P("dp")),), out_specs=rows) as own:
            state = fz.fetch(own.init())
            with pytest.raises(ValueError, match="the same axes first"):
                own.forward(state, x)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_microbatches_have_the_rows_of_their_examples(components: list[Any], count: int) -> None:
    """In one process, and on ranks each of which splits its own examples."""
    generator = torch.Generator().manual_seed(count)
    lengths = torch.tensor([2, 0, 1, 3, 1, 5])
    x = fz.Ragged(torch.randn(12, 3, generator=generator, dtype=torch.float64), lengths)
    scale = torch.randn(6, generator=generator, dtype=torch.float64)
    params = {"w": torch.randn(3, 3, generator=generator, dtype=torch.float64)}
    both = fz.Ragged({"x": x.values, "factors": torch.arange(12), "note": None}, lengths)

    def fn(p: Any, x: fz.Ragged, scale: torch.Tensor) -> Any:
        assert len(x.values["factors"]) == len(x.values["x"]) == x.lengths.sum() and x.values["note"] is None
        rows = fz.Ragged(x.values["x"] * x.values["factors"][:, None], x.lengths)
        return {k: v for k, v in builds.ragged(p, rows, scale).items() if k != "mean"}

    step = fz.accumulate(fz.train_step(fn, fz.sgd(0.1)), count)
    out, pullback = step.vjp(step.init(params), both, scale)
    ct = {"rows": fz.Ragged(torch.randn(12, 3, generator=generator, dtype=torch.float64), None), "sums": None}
    grads, (ct_x, ct_scale) = pullback(ct)
    rows = lambda p, x, scale: fn(p, fz.Ragged({**both.values, "x": x}, lengths), scale)["rows"].values
    expected, (by_params, by_x, by_scale) = pulled_back(rows, ct["rows"].values, params, x.values, scale)
    need_close(out["rows"].values, expected)
    assert out["rows"].lengths.equal(lengths) and ct_x.lengths is None
    need_close((ct_x.values["x"], ct_scale), (by_x, by_scale))
    need_close(fz.gather(grads), by_params)
    with pytest.raises(ValueError, match=r"lengths of its examples add up to 12"):
        fz.accumulate(fz.train_step(fn, fz.sgd(0.1)), 2).vjp(
            step.init(params), x._replace(values={"x": x.values[1:]}), scale
        )
