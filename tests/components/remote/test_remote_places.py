"""Values go from the ranks where they are to those that need them, as these need them; their cotangents come home."""

from __future__ import annotations

import functools
import itertools
import math
import time
from typing import Any

import pytest
import remote_builds as builds
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from remote_builds import need_close

import fzero as fz
from fzero.components.remote.layout import joined, layout_of, reads_of, share
from fzero.components.remote.link import Place
from fzero.components.remote.pull import Table
from fzero.components.remote.values import Meta, cut_to

PLACES = [("threads", 1), ("threads", 2), ("threads", 3), ("processes", 2)]


@pytest.fixture(scope="module")
def maps() -> Any:
    """Components of one linear map each, on other ranks."""
    own = [
        fz.remote(functools.partial(builds.built_mapped, seed=seed), ranks, on, name=f"map{seed}")
        for seed, (on, ranks) in enumerate(PLACES)
    ]
    yield own
    for each in own:
        each.close()


@settings(max_examples=12)
@given(data=st.data())
def test_the_way_back_is_the_transpose(maps: Any, data: st.DataObject) -> None:
    """<Ax, y> == <x, A'y> for chains of components on any ranks, of whole numbers, to the last bit."""
    chain = data.draw(st.lists(st.sampled_from(range(len(maps))), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    rows = data.draw(st.sampled_from([0, 3, 4, 6]))  # none, or one for each rank
    x = torch.randint(-3, 4, (rows, 3), generator=generator, dtype=torch.float64)
    value: Any = x
    pullbacks = []
    for number in chain:
        counts = torch.randint(0, 3, (rows,), generator=generator)
        counts[:3].clamp_(min=1)
        value, pullback = maps[number].vjp(maps[number].init(), value, counts, argnums=0)
        pullbacks.append(pullback)
        rows = int(counts.sum())
    out = fz.fetch(value)
    expected = x
    y = torch.randint(-3, 4, out.shape, generator=generator, dtype=torch.float64)
    assert out.shape == (rows, 3) and out.dtype == expected.dtype
    cotangent: Any = y
    for pullback in reversed(pullbacks):
        _, (cotangent, nothing) = pullback(cotangent)
        assert nothing is None
    back = fz.fetch(cotangent)
    assert back.shape == x.shape and (out * y).sum() == (x * back).sum()


@pytest.mark.parametrize(("on", "ranks"), [("threads", 2), ("threads", 4)])
def test_tensor_ranks_are_copies(on: str, ranks: int) -> None:
    with fz.remote(builds.built_tensor, ranks, on) as own:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        state = own.init()
        params = fz.gather(state.params)
        out, pullback = own.vjp(state, x)
        ct = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads, (ct_x,) = pullback(ct)

        def plain(p: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ p["0.weight"].T + p["0.bias"]) @ p["2.weight"].T + p["2.bias"]

        own_vjp: Any = torch.func.vjp(plain, dict(params), x)
        expected, pull = own_vjp
        by_params, by_x = pull(ct)
        need_close(fz.fetch(out), expected)
        need_close(fz.fetch(ct_x), by_x)
        need_close(dict(fz.gather(grads)), by_params)
        need_close(fz.fetch(fz.global_norm(grads)), torch.cat([g.flatten() for g in by_params.values()]).norm())
        assert own.group.places[0].piece(("dp",))[1] == ranks // 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_share_a_sequence_are_of_one_mean(ranks: int) -> None:
    with fz.remote(builds.built_tokens, ranks, "threads") as own:
        x = torch.randn(3, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        gain = torch.tensor(1.5, dtype=torch.float64)
        params = {"w": builds.weights()["in"]}
        state = own.init()
        (out, loss), pullback = own.vjp(state, x, gain)
        ct = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        grads, (ct_x, ct_gain) = pullback((ct, torch.full_like(loss, 2.0)))
        own_vjp: Any = torch.func.vjp(builds.cut_over_tokens, params, x, gain)
        expected, pull = own_vjp
        by_params, by_x, by_gain = pull((ct, torch.tensor(2.0, dtype=torch.float64)))
        need_close(fz.fetch((out, loss)), expected)
        need_close(fz.fetch(ct_x), by_x)
        need_close(fz.fetch(ct_gain), by_gain)
        need_close(fz.gather(grads), by_params)


@given(data=st.data())
def test_blocks_are_cut_and_joined(data: st.DataObject) -> None:
    """All readers together have each element once, in order; what copies of a piece add up is added up."""
    sizes = {name: data.draw(st.integers(1, 3)) for name in "abc"}
    copies, readers = data.draw(st.integers(1, 2)), {name: data.draw(st.integers(1, 3)) for name in "xy"}
    ranks = [*itertools.product(*[range(size) for size in sizes.values()])]
    axes = [tuple(zip(sizes, where, sizes.values(), strict=True)) for where in ranks]
    means = len(ranks) * copies
    places = [Place(own, (*sizes,), (), number, means) for number, own in enumerate(axes * copies)]
    dims = data.draw(st.sampled_from([(), ("a",), ("c", "a")])), data.draw(st.sampled_from([(), ("b",)]))
    pieces = [Place(axes[0]).piece(names)[1] for names in dims]
    lengths = [data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)) for n in pieces]
    x = torch.arange(1.0 + sum(lengths[0]) * sum(lengths[1]))[1:].view(sum(lengths[0]), sum(lengths[1]))
    table = Table("x", places, [None] * means)
    for kind in ("block", "added"):
        metas = []
        for place in places:
            shape = tuple([own[place.piece(names)[0]] for own, names in zip(lengths, dims, strict=True)])
            metas.append(Meta(kind, shape, x.dtype, "cpu", dims, 1.0))
        layout = layout_of(metas, places, "x")
        assert layout.shape == x.shape and layout.lengths == tuple(map(tuple, lengths))
        boxes = [layout._replace(kind="block").box(place) for place in places]
        parts = [x if box is None else x[tuple([slice(*own) for own in box])] for box in boxes]
        same = means // math.prod(pieces) if kind == "added" else 1
        groups = table.groups(layout.axes)
        for reader in itertools.product(*[range(size) for size in readers.values()]):
            box = tuple([share(n, *own) for n, *own in zip(x.shape, reader, readers.values(), strict=True)])
            slices = tuple([slice(*own) for own in box])
            for wanted, expected in ((box, x[slices]), (None, x)):
                reads = reads_of(layout, groups, wanted, sum(reader))
                cut = lambda each: parts[each.rank] if each.box is None else cut_to(parts[each.rank], each.box)
                got = [[(each, cut(each)) for each in own] for own in reads]
                assert torch.equal(joined(layout, wanted, got), expected * same)
        assert [*share(len(x), 0, readers["x"])] == [0, len(x.tensor_split(readers["x"])[0])]


def test_operands_are_brought_while_earlier_calls_compute() -> None:
    """Two components overlap: a chain of calls of both takes hardly longer than those of one."""
    first = fz.remote(functools.partial(builds.built_trouble, stage=0), 1, "threads", name="first")
    with first, fz.remote(functools.partial(builds.built_trouble, stage=0), 1, "threads", name="second") as second:
        x = torch.ones(4, 3, dtype=torch.float64)
        states = first.init(), second.init()
        for own, state in zip((first, second), states, strict=True):
            fz.fetch(own.forward(state, own.forward(state, x, "sleep"), "sleep"))
        begun = time.monotonic()
        middle = [first.forward(states[0], x, "sleep") for _ in range(4)]
        out = [second.forward(states[1], each, "sleep") for each in middle]
        assert time.monotonic() - begun < 0.6, "calls wait"
        fz.fetch(out)
        assert time.monotonic() - begun < 0.3 * 7.5, "no overlap"


def test_one_value_is_used_by_many(maps: Any) -> None:
    """Also once its handle has died, by calls that were made before."""
    counts = torch.tensor([1, 2, 0, 1])
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    states = [each.init() for each in maps]
    for a, b in itertools.product(range(len(maps)), repeat=2):
        value = maps[a].forward(states[a], x, counts)
        outs = [maps[b].forward(states[b], value, counts) for _ in range(3)]
        expected = fz.fetch(value)
        del value
        need_close(fz.fetch(outs), [fz.fetch(maps[b].forward(states[b], expected, counts))] * 3)


def test_a_function_that_writes_to_what_it_is_given_is_refused() -> None:
    def build(rank: int) -> Any:
        return fz.train_step(lambda p, x: x.mul_(2.0) * p["w"], fz.sgd(0.1)), {"w": builds.ONES}

    x = torch.ones(4, 3, dtype=torch.float64)
    with (
        fz.remote(functools.partial(builds.built_trouble, stage=0), 1, "threads", name="first") as first,
        fz.remote(build, 1, "threads", name="second") as second,
    ):
        value = first.forward(first.init(), x, "none")
        with pytest.raises(ValueError, match=r"writes to an input in place, by mul_ \(.*test_remote_places.py:\d+"):
            fz.fetch(second.forward(second.init(), value))
        assert fz.fetch(value).equal(x)
