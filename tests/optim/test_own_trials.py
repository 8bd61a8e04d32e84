"""Trials of optimizers of the user's own: what is refused, what is told where none was made, what it leaves behind."""

from __future__ import annotations

import argparse
import collections.abc
import functools
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optree
import pytest
import torch
import torch.distributed as dist

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks

GENERATOR = torch.Generator().manual_seed(0)
PARAMS = {
    "conv": torch.randn(4, 2, 2, 2, generator=GENERATOR),
    "fc.b": torch.zeros(8),
    "fc.w": torch.randn(12, 8, generator=GENERATOR),
}
ONE = torch.ones(())
REFUSED = r"step.init: got an optimizer of your own that "
NOT_TRIED = r"step.init: an optimizer of your own could not be tried on small leaves: "


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return x * sum(leaf.sum() for leaf in p.values())


def of(update: Callable[..., Any], init: Callable[[Any], Any] = lambda p: ()) -> fz.GradientTransformation:
    return fz.GradientTransformation(init, update)


def each(fn: Callable[..., torch.Tensor]) -> fz.GradientTransformation:
    return of(lambda g, s, p: (optree.tree_map(fn, g, p), s))


def by_norm(g: torch.Tensor, p: torch.Tensor | None = None) -> torch.Tensor:
    return -0.1 * g / g.norm()


def begun(optimizer: fz.GradientTransformation, params: Any = PARAMS) -> Any:
    return fz.train_step(loss, optimizer).init(params)


# ---- where none was made


def guarded(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if g.norm() > 1e3:
        raise RuntimeError("gradient exploded")
    return by_norm(g)


class Closed(collections.abc.Mapping[str, Any]):
    def __getitem__(self, key: str) -> Any:
        raise ValueError("closed")

    def __iter__(self) -> Iterator[str]:
        return iter("a")

    def __len__(self) -> int:
        return 1


class Holding:
    def __init__(self, held: Any) -> None:
        self.held = held

    def update(self, g: Any, s: Any, p: Any) -> Any:
        return optree.tree_map(by_norm, g), s


def sending(g: Any, s: Any, p: Any) -> Any:
    dist.all_reduce(torch.ones(()))
    return g, s


def flat_only(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    (_,) = g.shape
    return -g


WITHOUT: dict[str, tuple[fz.GradientTransformation, str]] = {
    "a guard": (each(guarded), "it raises RuntimeError: gradient exploded"),
    "in whole": (fz.whole(each(flat_only)), "it raises ValueError: too many values"),
    "in its shape": (each(flat_only), "of leaves in their shapes it raises ValueError: too many values"),
    "closed": (of(Holding(Closed()).update), "it raises ValueError: closed"),
    "sending": (of(sending), "it may send something"),
    "an array": (of(Holding(np.zeros(1 << 23, dtype=np.uint8)).update), "it comes to an array of shape"),
    "a dataset": (of(Holding([(str(i), i) for i in range(200_000)]).update), "it comes to more than 131,072 objects"),
}


@pytest.mark.parametrize("kind", sorted(WITHOUT))
def test_where_none_was_made_it_is_told_why(kind: str) -> None:
    own, why = WITHOUT[kind]
    before = time.monotonic()
    with pytest.warns(UserWarning, match=NOT_TRIED + why):
        begun(own)
    assert time.monotonic() - before < 5


def test_what_is_told_is_told_on_all_ranks() -> None:
    def rank_main(rank: int) -> None:
        bar = iter(range(100)) if rank == 0 else None

        def update(g: Any, s: Any, p: Any) -> Any:
            if bar is not None:
                next(bar)
            return optree.tree_map(lambda x: -0.1 * x, g), s

        with pytest.raises(UserWarning, match=NOT_TRIED + "it takes from an iterator"):
            fz.shard_zero3(fz.train_step(loss, of(update))).init(PARAMS)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(rank_main, 2)


def test_an_array_that_is_read_only_is_not_copied() -> None:
    class Uncopied(np.ndarray):
        def copy(self, *args: Any, **kwargs: Any) -> Any:
            raise AssertionError("copied")

    array = np.zeros(4).view(Uncopied)
    array.flags.writeable = False
    with pytest.raises(ValueError, match=REFUSED):
        begun(of(Holding(array).update))


# ---- what is refused


def logged(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if dist.is_initialized() and dist.get_rank() == 0 and dist.get_world_size() > 9:
        print(g.norm())
    return by_norm(g)


def rows(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    if g.ndim == 1:
        return -0.1 * g
    _, _ = g.shape
    return -0.1 * g / g.norm(dim=1, keepdim=True)


def decayed(rate: float, g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return -0.1 * (g + (rate * p if p.ndim > 1 else 0))


def clipped_and_decayed(g: Any, s: Any, p: Any) -> Any:
    g, _ = fz.clip_by_global_norm(1.0).update(g, (), p)
    return optree.tree_map(functools.partial(decayed, 0.1), g, p), s


def late(g: Any, m: Any, p: Any) -> Any:
    m = optree.tree_map(lambda m, g: 0.9 * m + 0.1 * g if m.any() else g, m, g)
    return optree.tree_map(lambda m: -m, m), m


def in_single(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return decayed(5e-5, g.float(), p.float())


TREATS: dict[str, Callable[[], fz.GradientTransformation]] = {
    "rank 0 tells": lambda: each(logged),
    "rows of a part": lambda: fz.partition({"fc.*": each(rows), "*": fz.sgd(0.1)}),
    "little decay": lambda: each(functools.partial(decayed, 1e-6)),
    "in float32": lambda: each(in_single),
    "behind what takes buffers": lambda: of(clipped_and_decayed),
    "zero": lambda: each(lambda g, p: -0.1 * (g + 0.1 * p) if g.any() else torch.zeros_like(g)),
    "begins with the first": lambda: of(late, lambda p: optree.tree_map(torch.zeros_like, p)),
    "noise": lambda: each(lambda g, p: torch.randn_like(g)),
    "dropout": lambda: each(lambda g, p: torch.nn.functional.dropout(-0.1 * g)),
    "drawn at first": lambda: of(lambda g, s, p: (g, s), lambda p: optree.tree_map(torch.rand_like, p)),
}


@pytest.mark.parametrize("kind", sorted(TREATS))
def test_one_that_treats_leaves_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        begun(TREATS[kind]())


def test_one_that_begins_late_in_slices_is_refused() -> None:
    def rank_main(rank: int) -> None:
        own = of(late, lambda p: optree.tree_map(torch.zeros_like, p))
        with pytest.raises(ValueError, match=REFUSED + "makes other updates of a leaf such as 'emb' in slices"):
            fz.shard_zero3(fz.train_step(loss, own)).init({"emb": torch.zeros(128, 8)})

    run_ranks(rank_main, 2)


def counting() -> fz.GradientTransformation:
    count = [0]

    def update(g: Any, s: Any, p: Any) -> Any:
        count[0] += 1
        return optree.tree_map(lambda x: -x / count[0], g), s

    return of(update)


@pytest.mark.parametrize("joined", [lambda own: fz.chain(own), lambda own: fz.chain(fz.clip_by_value(1.0), own)])
def test_a_member_of_a_chain_on_whole_leaves_is_tried(joined: Any) -> None:
    with pytest.raises(ValueError, match=r"step.init: got an optimizer of your own in fz.whole that"):
        begun(fz.whole(joined(counting())))


@pytest.mark.parametrize("stage", [lambda s: s, fz.shard_zero3])
def test_one_that_goes_on_with_anothers_state_is_tried(stage: Any) -> None:
    calls = []

    def counted(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return -0.1 * g

    def rank_main(rank: int) -> None:
        first, second = [stage(fz.train_step(loss, each(fn))) for fn in (lambda g, p: -0.1 * g, by_norm)]
        state = first.init(PARAMS)
        with pytest.raises(ValueError, match=r"step: got an optimizer of your own that makes other updates"):
            second(state, ONE)
        grads, _ = first.vjp(state, ONE)[1](ONE)
        with pytest.raises(ValueError, match=r"step.update: got an optimizer of your own that makes other updates"):
            second.update(state, grads)
        third = stage(fz.train_step(loss, each(counted)))
        state, _ = third(state, ONE)
        if stage is not fz.shard_zero3:
            calls.clear()  # what the trial has left in it was taken away
            state, _ = first(state, ONE)
            third(state, ONE)
            assert len(calls) == len(state.params.groups)

    run_ranks(rank_main, 2) if stage is fz.shard_zero3 else rank_main(0)


# ---- what is not


def masked(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    return torch.lerp(torch.zeros(g.shape), g, 0.1)  # of float32 alone


@pytest.mark.parametrize("fn", [lambda g, p: -(g.float() ** 2 / (g.float().abs().sqrt() + 1e-8)), masked])
def test_one_of_elements_in_its_own_dtype(fn: Any) -> None:
    begun(each(fn))


def test_a_member_of_a_partition_is_tried_with_its_leaves() -> None:
    own = each(functools.partial(decayed, 0.1))
    begun(fz.partition({"fc.b": own, "*": fz.sgd(0.1)}))

    def rank_main(rank: int) -> None:
        norm = of(lambda g, s, p: (g.map(lambda x: -x / torch.stack([y.norm() for y in g.buffers.values()]).norm()), s))
        optimizer = fz.partition({"fc.b": norm, "*": fz.sgd(0.1)})
        step = fz.shard_zero3(fz.train_step(loss, optimizer), pattern="conv|fc.w")
        state, _ = step(step.init(PARAMS), ONE)
        assert_trees_close(fz.gather(state.params)["fc.b"], torch.full((8,), -(8**-0.5)), rtol=1e-6)

    run_ranks(rank_main, 2)


def test_whole_leaves_may_draw() -> None:
    begun(fz.whole(of(lambda g, s, p: ({k: torch.randn_like(x) for k, x in g.items()}, s))))


# ---- what it leaves behind

SPACE, NAMESPACE = types.SimpleNamespace(seen=[], count=torch.zeros(())), argparse.Namespace(seen=[])
package = types.ModuleType("a_package_of_mine")
package.__dict__["inner"] = types.ModuleType("a_package_of_mine.inner")
package.inner.log, package.inner.count = [], torch.zeros(())


class Slots:
    __slots__ = ("first",)


class Key:
    def __init__(self) -> None:
        self.count = 0


SLOTS, KEYS = Slots(), {Key(): "a"}


def noting(g: Any, s: Any, p: Any) -> Any:
    SPACE.seen.append(1)
    SPACE.count += 1
    NAMESPACE.seen.append(1)
    package.inner.log.append(1)
    package.inner.count += 1
    if not hasattr(SLOTS, "first"):
        SLOTS.first = 1
    for key in KEYS:
        key.count += 1
    return optree.tree_map(lambda x: -0.1 * float(SPACE.count) * x, g), s


def test_a_trial_leaves_nothing_behind() -> None:
    begun(of(noting))
    assert SPACE.seen == NAMESPACE.seen == package.inner.log == []
    assert not SPACE.count and not package.inner.count and not hasattr(SLOTS, "first")
    assert [key.count for key in KEYS] == [0]


def test_what_is_compiled_is_compiled_for_steps() -> None:
    compiled = list[Any]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    one = torch.compile(lambda x: -0.1 * x, backend=backend)
    step = fz.train_step(loss, of(lambda g, s, p: (optree.tree_map(one, g), s)))
    state = step.init(PARAMS)
    assert not compiled
    step(state, ONE)
    assert compiled
    norm = torch.compile(by_norm, backend=backend)
    with pytest.raises(ValueError, match=REFUSED):
        begun(each(lambda g, p: norm(g)))
