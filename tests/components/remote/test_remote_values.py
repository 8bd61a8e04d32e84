"""Handles as values: their sums, what is compared with them, errors and constants, are plain torch's or refused."""

from __future__ import annotations

import copy
import functools
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz

D = torch.float64
X = torch.arange(12, dtype=D).view(4, 3)


def built(rank: int, fn: Any, shard: bool = True) -> Any:
    step = fz.train_step(fn, fz.sgd(0.1))
    return (fz.shard_zero1(step) if shard else step), {"w": torch.tensor([2.0], dtype=D)}


def remote(fn: Any, ranks: int = 2, shard: bool = True) -> Any:
    return fz.remote(functools.partial(built, fn=fn, shard=shard), ranks, "threads", timeout=10)


def two(p: Any, x: torch.Tensor) -> Any:
    return x * p["w"], (x * p["w"]).mean()


@pytest.fixture(scope="module")
def component() -> Iterator[Any]:
    with remote(two) as own:
        yield own


@pytest.mark.parametrize("rows", [2, 4])
def test_sums_are_those_of_the_tensors(component: Any, rows: int) -> None:
    """As inputs and as cotangents, of handles and tensors of any dtype."""
    state, x = component.init(), X[:rows]
    out, pullback = component.vjp(state, x)
    sums = [out[0] + x, x + out[0] + x, out[0] + out[0], out[0] + x.float(), out[0] + x.to(torch.complex128)]
    for total, times in zip(sums, (3, 4, 4, 3, 3), strict=True):
        plain = fz.fetch(total)
        assert (total.shape, total.dtype) == (plain.shape, plain.dtype) and plain.real.equal(times * x)
        if plain.dtype == D:
            assert fz.fetch(component.forward(state, total))[0].equal(2 * times * x)
    grads, _ = pullback((out[0] + x, out[1] + out[1]))
    torch.testing.assert_close(fz.gather(grads)["w"], (3 * x * x).sum()[None] + 4 * x.mean() * x.mean())
    for total in (out[0] + out[1], out[0] + x[0], x + out[0]):
        assert type(total) is torch.Tensor and total.shape == x.shape


def test_handles_are_not_compared_as_objects(component: Any) -> None:
    """Which would be False whatever they are; as keys, and in `is`, they are themselves."""
    loss = component.forward(component.init(), X)[1]
    other = component.forward(component.init(), X)[1]
    uses = [lambda: loss == 11.0, lambda: 11 != loss, lambda: loss == other, lambda: loss == torch.tensor(11.0)]
    for use in [*uses, lambda: torch.tensor(11.0) == loss, lambda: loss in [other]]:
        with pytest.raises(TypeError, match=r"fz.fetch\(handle\)"):
            use()
    assert {loss: 1, other: 2}[loss] == 1 and loss in [loss] and loss != "text" and float(loss) == 11.0
    assert loss is not None and loss != None and hash(loss) != hash(other)  # noqa: E711


class Mine(StopIteration):
    """One more that ends an iteration."""


def raising(p: Any, x: torch.Tensor, kinds: dict[str, Any]) -> torch.Tensor:
    if x.sum() > 20 and "name" in kinds:
        raise {"stop": StopIteration, "mine": Mine, "async": StopAsyncIteration, "attribute": AttributeError}[
            kinds["name"]
        ]("the user's words")
    return x * p["w"]


@pytest.mark.parametrize("name", ["stop", "mine", "async", "attribute"])
def test_errors_that_python_takes_for_something_else_are_named(name: str) -> None:
    """An iteration would end early, a property would seem to be missing."""
    with remote(raising, 1) as own:
        state = own.init()
        outs = [own.forward(state, x, {"name": name}) for x in (0 * X, X, 0 * X)]
        for use in (lambda: list(map(fz.fetch, outs)), lambda: fz.fetch(outs), lambda: hasattr(outs[1], "shape")):
            with pytest.raises(RuntimeError, match=r"(Stop.*Iteration|Mine|AttributeError): the user's words"):
                use()


def handed_on(p: Any, x: torch.Tensor, tree: Any) -> Any:
    return x * p["w"], tree


def test_constants_that_are_equal_are_not_the_same() -> None:
    same = [True, 1, 1.0, False, 0, 0.0, -0.0, float("nan"), {True: 1}, {1: 1}, {1: True}, [1], (1,)]
    with remote(handed_on, 1) as own:
        state = own.init()
        for tree in [*same, *same]:
            _, got = own.forward(state, X, tree)
            assert repr(got) == repr(tree)


def slow(p: Any, x: torch.Tensor, whole: torch.Tensor) -> Any:
    time.sleep(0.05)
    return x * p["w"] * whole, x.mean()


@pytest.mark.parametrize("write", ["torch", "numpy"])
def test_what_was_given_may_be_written_to(write: str) -> None:
    """While a call waits, while it runs, after it and before its pullback; a loader uses its buffers again."""

    def zero(*tensors: torch.Tensor) -> None:
        for x in tensors:
            x.zero_() if write == "torch" else x.numpy().fill(0)

    with remote(slow, 2) as own:
        state = own.init()
        expected = fz.fetch(own.forward(state, X, torch.tensor(3.0, dtype=D)))
        for wait in (0.0, 0.02, 0.2):
            x, whole = X.clone(), torch.tensor(3.0, dtype=D)
            out, pull = own.vjp(state, x, whole)
            time.sleep(wait)
            zero(x, whole)
            assert all(map(torch.equal, fz.fetch(out), expected))
            cts = torch.ones(4, 3, dtype=D), torch.tensor(4.0, dtype=D)
            grads, (by_x, by_whole) = pull(cts)
            time.sleep(wait)
            zero(*cts)
            assert fz.fetch(by_x).eq(6 + 4 / 12).all() and fz.fetch(by_whole).item() == 2 * X.sum()
            norm = torch.tensor(1.0, dtype=D)
            new, _ = own.update(state, grads, grad_norm=norm)
            zero(norm)
            fz.fetch(new)


def handing_back(p: Any, x: torch.Tensor, how: str) -> Any:
    if how == "writes":
        return x.mul_(2) * p["w"]
    return {"itself": x, "view": x.view(-1)[:1].expand(3), "turned": x.T}[how] if how != "whole" else x


def test_outputs_do_not_lie_in_the_callers_memory() -> None:
    with remote(handing_back, 1) as own, remote(handing_back, 2) as two:
        for each in (own, two):
            state = each.init()
            for how in ("itself", "view", "turned") if each is own else ("itself", "writes"):
                x = torch.ones(2, 3, dtype=D)
                out = each.forward(state, x, how)
                x.numpy()[:] = 7
                fz.fetch(out).fill_(3)  # nor what is fetched in the component's
                assert fz.fetch(out).eq(4 if how == "writes" else 1).all()


def test_copies_of_handles_are_the_handles(component: Any) -> None:
    """So that what they stand for lies there until the last of them dies."""
    state = component.init()
    handles = [copy.copy(component.forward(state, X)), copy.deepcopy(component.forward(state, X))]
    states = [copy.copy(component.init()), copy.deepcopy(component.init())]
    gc.collect()
    for rows, loss in handles:
        assert fz.fetch(rows).equal(2 * X) and loss.detach() is loss and loss.is_floating_point()
    for each in states:
        assert fz.gather(each.params)["w"].item() == 2.0


def test_errors_of_fzero_are_its_own(component: Any, tmp_path: Path) -> None:
    fz.save(tmp_path / "a", component.init())
    for file in (tmp_path / "a").rglob("*"):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(fz.DamagedCheckpoint):
        fz.load(tmp_path / "a", component)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), 1e12, float("nan")])
def test_timeouts_are_numbers_of_seconds(timeout: float) -> None:
    with pytest.raises(ValueError, match="expected a positive number of seconds"):
        fz.remote(functools.partial(built, fn=two), 1, "threads", timeout=timeout)
