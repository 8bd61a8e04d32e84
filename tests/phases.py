"""A training in phases, each of which trains some leaves and freezes others: by torch alone, and by a step of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import scenarios
import torch
import whole_runs
from torch.utils import _pytree as pytree

import fzero as fz

F64 = torch.float64
LEAVES = ("blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b", "head.w", "head.b")
EXAMPLES = 24  # which any number of ranks up to four shares, in two microbatches
CLIP = 0.05


class Phase(NamedTuple):
    """Some updates.

    Attributes:
        kept: the frozen leaves that keep their moments.
        forgotten: those that do not.
    """

    updates: int
    kept: frozenset[str] = frozenset()
    forgotten: frozenset[str] = frozenset()


def phase(updates: int, kept: Collection[str] = (), forgotten: Collection[str] = ()) -> Phase:
    return Phase(updates, frozenset(kept), frozenset(forgotten))


# layer by layer, and one is frozen again and thawed later
PROGRESSIVE = (
    phase(3, forgotten=("blocks.0.w", "blocks.0.b", "blocks.1.w", "blocks.1.b")),
    phase(2, forgotten=("blocks.0.w", "blocks.0.b")),
    phase(3),
    phase(2, kept=("blocks.1.w", "blocks.1.b")),
    phase(3, kept=("blocks.0.b",)),
)


def rate(count: int) -> float:
    return 0.05 * 0.9**count


class Plainly(torch.optim.Optimizer):
    """One of `whole_runs`, of each leaf by itself."""

    def __init__(self, params: Any, plain: whole_runs.Plain) -> None:
        super().__init__(params, {"lr": 1.0})
        self.plain = plain

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                own, lr = self.state[p], group["lr"]
                own["count"], moments = own.get("count", 0) + 1, own.get("moments", (torch.zeros_like(p),) * 2)
                new, own["moments"] = self.plain(p, p.grad, moments, own["count"], lr, 0.1, 1.0)
                p.copy_(new)


def muon_or_adamw(p: torch.Tensor, *rest: Any) -> Any:
    return (whole_runs.plain_muon if p.ndim == 2 else whole_runs.plain_adamw)(p, *rest)


def _decays(params: dict[str, torch.Tensor]) -> torch.optim.Optimizer:
    groups: list[Any] = [
        {"params": [p for path, p in params.items() if path.endswith("b")], "weight_decay": 0.0},
        {"params": [p for path, p in params.items() if path.endswith("w")], "weight_decay": 0.3},
    ]
    return torch.optim.AdamW(groups)


def _one(kind: Any, **options: Any) -> Callable[[dict[str, torch.Tensor]], torch.optim.Optimizer]:
    return lambda params: kind(params.values(), **options)


# name -> the optimizer, and torch's by the params
OPTIMIZERS: dict[str, tuple[fz.GradientTransformation, Callable[..., torch.optim.Optimizer]]] = {
    "adamw": (fz.adamw(rate, weight_decay=0.1), _one(torch.optim.AdamW, weight_decay=0.1)),
    "amsgrad": (fz.adam(rate, weight_decay=0.1, amsgrad=True), _one(torch.optim.Adam, weight_decay=0.1, amsgrad=True)),
    "partition": (
        fz.partition({"*.b": fz.adamw(rate, weight_decay=0.0), "*": fz.adamw(rate, weight_decay=0.3)}),
        _decays,
    ),
    "sgd": (fz.sgd(rate, 0.9, nesterov=True), _one(torch.optim.SGD, momentum=0.9, nesterov=True)),
    "lion": (fz.lion(rate, weight_decay=0.1), _one(Plainly, plain=whole_runs.plain_lion)),
    "lamb": (fz.lamb(rate, 0.9, 0.99, 1e-3, 0.1), _one(Plainly, plain=whole_runs.plain_lamb)),
    "adafactor": (fz.adafactor(rate, weight_decay=0.1), _one(torch.optim.Adafactor, weight_decay=0.1)),
    "muon": (
        fz.partition({"*.b": whole_runs.adamw(rate, 0.1), "*": fz.muon(rate, 0.8, 0.1, ns_steps=1, eps=0.1)}),
        _one(Plainly, plain=muon_or_adamw),
    ),
    "radam": (fz.from_torch(torch.optim.RAdam, rate), _one(torch.optim.RAdam)),
    "of whole leaves": (fz.whole(fz.adamw(rate, weight_decay=0.1)), _one(torch.optim.AdamW, weight_decay=0.1)),
    "nadam": (fz.from_torch(torch.optim.NAdam, rate), _one(torch.optim.NAdam)),
}


def loss_and_params(dtype: torch.dtype = F64) -> tuple[Any, Any]:
    stacked, params = scenarios.stack(blocks=2, dtype=dtype)

    def loss(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        like = p["head"]["w"].dtype
        return stacked(p, x.to(like), y.to(like)).to(dtype)

    return loss, params


def batch(update: int, dtype: torch.dtype = F64) -> tuple[torch.Tensor, torch.Tensor]:
    (own,) = scenarios.vector_batches(1, EXAMPLES, seed=update, dtype=dtype)
    return own


def by_torch(phases: Sequence[Phase], make: Callable[..., torch.optim.Optimizer], clips: bool) -> dict[str, Any]:
    """The params after all phases, of a torch optimizer whose leaves have `requires_grad` toggled."""
    loss, tree = loss_and_params()
    leaves, spec = pytree.tree_flatten(tree)
    params = {path: leaf.clone().requires_grad_() for path, leaf in zip(LEAVES, leaves, strict=True)}
    optimizer, done = make(params), 0
    for own in phases:
        for path, p in params.items():
            p.requires_grad_(path not in own.kept | own.forgotten)
            if path in own.forgotten:
                optimizer.state.pop(p, None)
        for _ in range(own.updates):
            for group in optimizer.param_groups:
                group["lr"] = rate(done)
            optimizer.zero_grad(set_to_none=True)
            loss(pytree.tree_unflatten(list(params.values()), spec), *batch(done)).backward()
            if clips:
                grads = [p.grad for p in params.values() if p.grad is not None]
                norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
                torch._foreach_mul_(grads, min(1.0, CLIP / norm.item()))
            optimizer.step()
            done += 1
    return {path: p.detach() for path, p in params.items()}


def freezing(step: fz.Step, own: Phase) -> fz.Step:
    """The step of a phase."""
    step = fz.freeze(step, "|".join(sorted(own.kept)), keep_moments=True) if own.kept else step
    return fz.freeze(step, "|".join(sorted(own.forgotten))) if own.forgotten else step


def go_on(
    step: fz.Step, own: Phase, state: fz.TrainState, rank: int, world: int, dtype: torch.dtype = F64
) -> fz.TrainState:
    """The state after a phase, each rank with its share of every batch."""
    begun = state.step
    for update in itertools.islice(itertools.count(begun), own.updates):
        state, metrics = step(state, *[x.chunk(world)[rank] for x in batch(update, dtype)])
        assert metrics["lr"].item() == rate(update) and not metrics["skipped"]
    assert state.step == begun + own.updates
    return state


def leaves_of(tree: Any) -> dict[str, torch.Tensor]:
    return dict(zip(LEAVES, pytree.tree_leaves(tree), strict=True))


def own_counts(phases: Sequence[Phase]) -> Iterator[dict[str, int]]:
    """After each phase, how many updates the moments of each leaf have seen."""
    counts = dict.fromkeys(LEAVES, 0)
    for own in phases:
        counts = {path: 0 if path in own.forgotten else n for path, n in counts.items()}
        stays = own.kept | own.forgotten
        counts = {path: n if path in stays else n + own.updates for path, n in counts.items()}
        yield counts
