"""Models of every kind under ZeRO-3, on two real processes, against their own forward and backward in float64."""

from __future__ import annotations

import copy
import functools
from typing import Any

import module_kinds as kinds
import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

RANKS, STEPS = 2, 3
close = functools.partial(assert_trees_close, rtol=1e-9, atol=1e-11)
AS_ONE = ("classifier",)  # unit


def by_torch(module: torch.nn.Module, batch: Any, drawn: Any, ct: torch.Tensor) -> Any:
    """Output, gradients of params and of floating inputs, of a copy whose masks are given, and that copy."""
    module = copy.deepcopy(module)
    kinds.replay(module, drawn)
    batch = [x.clone().requires_grad_(x.is_floating_point()) for x in batch]
    out = module(*batch)
    out.backward(ct)
    return out.detach(), {n: p.grad for n, p in module.named_parameters()}, [x.grad for x in batch], module


def on_a_rank(kind: str, wraps: Any, synchronised: bool, rank: int) -> list[Any]:
    return [_on_a_rank(kind, wrap, synchronised, rank) for wrap in wraps]


def _on_a_rank(kind: str, wrap: Any, synchronised: bool, rank: int) -> Any:
    apply, params, buffers = fz.functional(kinds.made(kind), buffers=True, sync_batch_norm=synchronised)
    batch, *rest = kinds.batches(kind, rank, STEPS + 1)
    fn = functools.partial(_called, apply)
    step = wrap(fz.carry(fz.train_step(fn, fz.sgd(0.1), units="net" if kind in AS_ONE else None), buffers))
    state = step.init({"net": params})
    out, pullback, new = step.vjp(state, *batch)
    grads, cotangents = pullback(_cotangent(out))
    found: list[tuple[Any, ...]] = [(out, dict(fz.gather(grads)["net"]), list(cotangents), new)]
    step = fz.with_fn(step, functools.partial(_loss, apply))
    for batch in rest:
        state, metrics = step(state, *batch)
        found.append((metrics["loss"], dict(fz.gather(state.params)["net"]), state.extra["carry"]))
    return found


def _called(apply: Any, p: Any, b: Any, *batch: torch.Tensor) -> Any:
    return apply(p["net"], b, *batch)


def _loss(apply: Any, p: Any, b: Any, *batch: torch.Tensor) -> Any:
    out, b = apply(p["net"], b, *batch)
    return out.square().mean(), b


def _cotangent(out: torch.Tensor) -> torch.Tensor:
    return torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)


def _remat(step: Any) -> Any:
    return fz.remat(fz.shard_zero3(step))


WRAPS = (fz.shard_zero3, _remat)


@in_turns(10)
@pytest.mark.parametrize("kind", sorted(kinds.KINDS))
def test_as_the_module_itself(kind: str) -> None:
    found = run_ranks(functools.partial(on_a_rank, kind, WRAPS, False), RANKS, backend="processes")
    for how in range(len(WRAPS)):
        _compare(kind, [each[how] for each in found])


@in_turns(8, "on processes, as on threads")
def test_with_statistics_of_all_ranks() -> None:
    """One process has the batches of both."""
    found = run_ranks(functools.partial(on_a_rank, "resnet", WRAPS, True), RANKS, backend="processes")
    both = zip(*[kinds.batches("resnet", rank, STEPS + 1) for rank in range(RANKS)], strict=True)
    batches = [[torch.cat(each) for each in zip(*own, strict=True)] for own in both]
    for how in range(len(WRAPS)):
        (out, grads, of_inputs, new), *steps = zip_ranks([each[how] for each in found])
        module = kinds.made("resnet")
        ct = torch.cat([_cotangent(each) for each in out])
        want, of_params, of_batch, after = by_torch(module, batches[0], {}, ct)
        close((torch.cat(out), torch.cat([x for (x,) in of_inputs])), (want, of_batch[0]))
        for rank in range(RANKS):
            close(grads[rank], {name: g / RANKS for name, g in of_params.items()})
            close(new[rank], dict(after.named_buffers()))
        for batch, each in zip(batches[1:], steps, strict=True):
            _compare_step([module], [batch], [each_rank for each_rank in zip(*each, strict=True)][:1])
            assert_trees_equal(each[1][0], each[1][1])
            assert_trees_equal(each[2][0], each[2][1])


def zip_ranks(found: list[Any]) -> list[Any]:
    """What was found in each step, of all ranks."""
    return [tuple(zip(*each, strict=True)) for each in zip(*found, strict=True)]


def _compare(kind: str, found: list[Any]) -> None:
    modules = [kinds.made(kind) for _ in range(RANKS)]
    batches = [[*kinds.batches(kind, rank, STEPS + 1)] for rank in range(RANKS)]
    total: dict[str, torch.Tensor] = {}
    for module, own, ((out, _, of_inputs, new), *_) in zip(modules, batches, found, strict=True):
        want, grads, of_batch, after = by_torch(module, own[0], new, _cotangent(out))
        close(out, want)
        close([g for g in of_inputs if g is not None], [g for g in of_batch if g is not None])
        close(new, dict(after.named_buffers()))
        for name, g in grads.items():
            total[name] = total.get(name, 0) + g / RANKS
    for each in found:
        close(each[0][1], total)
    for number in range(1, STEPS + 1):
        _compare_step(modules, [own[number] for own in batches], [each[number] for each in found])
    drawn = [x for each in found for _, _, new in each[1:] for name, x in new.items() if name.endswith(".mask")]
    assert not drawn or any((x == 0).any() for x in drawn)


def _compare_step(modules: Any, batches: Any, found: Any) -> None:
    losses = []
    for module, batch, (_, _, new) in zip(modules, batches, found, strict=True):
        kinds.replay(module, new)
        module.zero_grad()
        loss = module(*batch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    with torch.no_grad():
        for same in zip(*[module.parameters() for module in modules], strict=True):
            mean = torch.stack([p.grad for p in same]).mean(0)
            for p in same:
                p -= 0.1 * mean
    for module, (loss, params, new) in zip(modules, found, strict=True):
        close(loss, torch.stack(losses).mean())
        close(params, {name: p.detach() for name, p in module.named_parameters()})
        close(new, dict(module.named_buffers()))
