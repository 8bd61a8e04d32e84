"""What stages of a pipeline do to each other's memory: plain torch's result or a refusal, wherever they run."""

from __future__ import annotations

import functools
import io
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from channel_peers import pair
from drawn_pipelines import Copied
from nightly import in_turns

import fzero as fz
from fzero.components.line import _Pickler, _Unpickler
from fzero.testing import run_ranks

Stages = tuple[Callable[..., Any], ...]


def params(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(2, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


X = torch.arange(8.0, dtype=torch.float64).view(4, 2) / 8


def pipe_of(fns: Stages, groups: Any, schedule: Any = fz.schedules.gpipe, **wires: Any) -> tuple[Any, Any]:
    steps = [fz.train_step(fn, fz.sgd(1.0)) for fn in fns]
    pipe = fz.pipeline(steps, schedule(len(fns), 2), groups=groups, **wires)
    return pipe, pipe.init([params(i) for i in range(len(fns))])


def result(rank: int, fns: Stages, groups: Any, **wires: Any) -> Any:
    """The loss and this rank's gradients of one step."""
    pipe, state = pipe_of(fns, groups, **wires)
    new, metrics = pipe(state, X.clone())
    own = range(len(fns)) if groups is None else [rank]
    return float(metrics["loss"]), {i: params(i)["w"] - fz.gather(new.params[i])["w"] for i in own}


def everywhere(fns: Stages, **wires: Any) -> list[tuple[float, dict[int, torch.Tensor]]]:
    """In one process, and on a rank for each stage."""
    alone = result(0, fns, None, **wires)
    ranks = functools.partial(result, fns=fns, groups=[[i] for i in range(len(fns))], **wires)
    found = run_ranks(ranks, len(fns), backend="processes")
    return [alone, (found[0][0], {i: grad for _, own in found for i, grad in own.items()})]


def plain(fn: Callable[..., torch.Tensor], count: int) -> tuple[float, dict[int, torch.Tensor]]:
    leaves, losses = [{"w": params(i)["w"].requires_grad_()} for i in range(count)], []
    for part in X.clone().chunk(2):
        loss = fn(leaves, part) / 2
        loss.backward()
        losses.append(float(loss.detach()))
    zero = torch.zeros(2, 2, dtype=torch.float64)
    return sum(losses), {i: zero if p["w"].grad is None else p["w"].grad for i, p in enumerate(leaves)}


def hands_on(p: Any, z: torch.Tensor, h: torch.Tensor) -> Any:
    return torch.tanh(z @ p["w"]), h


def writes(p: Any, pair: Any) -> torch.Tensor:
    z, h = pair
    return z @ p["w"] + h.mul_(2)


def ends(p: Any, h: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    return (h @ p["w"] + sum(others)).square().mean()


def hands_on_its_input(p: Any, x: torch.Tensor) -> Any:
    return hands_on(p, x, x)


def gives_two(p: Any, x: torch.Tensor) -> Any:
    return x * 1, x @ p["w"]


def both(p: Any, x: torch.Tensor) -> Any:
    return x @ p["w"], x @ p["w"].t()


def writes_last(p: Any, pair: Any) -> torch.Tensor:
    return writes(p, pair).square().mean()


CASES: dict[str, tuple[Stages, dict[str, Any]]] = {
    "what came by a skip": ((gives_two, hands_on, writes, ends), {"skips": {(0, 0): (1, 3)}}),
    "the pipeline's input": ((hands_on_its_input, writes, ends), {"inputs": {0: 0, 2: 0}}),
    "what it alone takes": ((both, writes_last), {}),
}


def refused(rank: int, name: str, alone: bool) -> None:
    fns, wires = CASES[name]
    pipe, state = pipe_of(fns, None if alone else [[i] for i in range(len(fns))], **wires)
    x, held = X.clone(), [own for own in state if own is not None]
    before = [fz.gather(own.params)["w"].clone() for own in held]
    for call in (pipe, pipe.forward, functools.partial(pipe.vjp, argnums=())):
        with pytest.raises(ValueError, match=r"writes to an input in place, by mul_ \(.*test_pipeline_memory.py:\d+"):
            call(state, x)
    torch.testing.assert_close([x, *[fz.gather(own.params)["w"] for own in held]], [X, *before], rtol=0, atol=0)


@pytest.mark.parametrize("name", CASES)
def test_a_stage_may_not_write_to_what_it_is_given(name: str) -> None:
    refused(0, name, alone=True)
    run_ranks(functools.partial(refused, name=name, alone=False), len(CASES[name][0]), backend="processes")


def equal(fns: Stages, whole: Callable[..., torch.Tensor], schedule: Any = fz.schedules.gpipe) -> None:
    loss, grads = plain(whole, len(fns))
    for own, found in everywhere(fns, schedule=schedule):
        assert own == pytest.approx(loss, rel=1e-12)
        torch.testing.assert_close(found, grads, rtol=1e-12, atol=1e-14)


def diagonal(p: Any, pair: Any) -> torch.Tensor:
    z, h = pair
    return (h.as_strided((2,), (3,), 0) + (z @ p["w"]).sum()).square().mean()


def test_each_tensor_that_is_sent_begins_its_storage() -> None:
    equal((both, diagonal), lambda ps, x: diagonal(ps[1], both(ps[0], x)))


def test_tensors_of_a_message_have_storages_of_their_own() -> None:
    whole = torch.arange(12.0).view(3, 4)
    tree = {"a": whole[1:], "b": torch.ones(3, dtype=torch.bfloat16), "c": whole[:, 0], "d": whole[:0], "e": None}
    pickler = _Pickler(out := io.BytesIO())
    pickler.dump(tree)
    with pair("shared") as (here, there):
        here.send([out.getvalue(), pickler.tensors])
        got = _Unpickler(*there.receive(5.0)).load()  # type: ignore[misc]
    torch.testing.assert_close(got, tree)
    assert got["b"].untyped_storage().nbytes() == 6
    before = got["b"]._version
    got["a"].zero_()
    assert got["b"]._version == before and got["c"].tolist() == [0, 4, 8]


class Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def fails(rank: int) -> tuple[str, float]:
    def raises(p: Any, pair: Any) -> torch.Tensor:
        raise Wordless

    pipe, state = pipe_of((both, raises), [[0], [1]])
    begun = time.monotonic()
    with pytest.raises((Wordless, RuntimeError)) as caught:
        pipe(state, X.clone())
    words = "" if isinstance(caught.value, Wordless) else str(caught.value)
    return words, time.monotonic() - begun


def test_an_error_without_words_is_told() -> None:
    (words, seconds), _ = run_ranks(fails, 2, backend="processes", timeout=60)
    assert "Wordless, whose words failed with RuntimeError" in words and seconds < 30


WORK = torch.empty(2, 2, dtype=torch.float64)


class Doubled(Copied):
    """Its backward returns memory that the next microbatch's writes to."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.mul(cotangent, 2, out=WORK)


def begins(p: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ p["w"])


def doubles(p: Any, h: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(h @ p["w"])


def doubles_first(p: Any, h: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(h) @ p["w"]


def squares(p: Any, h: torch.Tensor) -> torch.Tensor:
    return (h @ p["w"]).square().mean()


@in_turns(2)
@pytest.mark.parametrize("middle", [doubles, doubles_first])
@pytest.mark.parametrize("schedule", [fz.schedules.gpipe, fz.schedules.one_f_one_b, fz.schedules.zero_bubble])
def test_a_backward_may_use_its_memory_again(schedule: Any, middle: Any) -> None:
    equal((begins, middle, squares), lambda ps, x: squares(ps[2], middle(ps[1], begins(ps[0], x))), schedule)
