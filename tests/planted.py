"""A small model of three units with masked attention, in which a fault can be planted for one example in one unit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import fzero as fz

WIDTH, TOKENS, BATCH, BLOCKS = 8, 3, 4, 3


class Wrong(torch.autograd.Function):
    """The identity, whose backward makes NaN where it is marked."""

    @staticmethod
    def forward(x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        (mark,) = ctx.saved_tensors
        return cotangent / (1 - mark) * (1 - mark), None


def division(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return h / (1 - mark)


def logarithm(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return h + torch.log(1 - mark)


def exponential(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return h * torch.exp(1e5 * mark)


def in_place(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h.div_(1 - mark)
    return h


def difference(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """Of two infinities, which are nowhere else."""
    large = 1 / (1 - mark)
    return h + (large - large)


def dropped(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """Nothing is wrong: what is infinite is never taken."""
    return torch.where(mark == 1, h, h + torch.log(1 - mark.detach())) + 0 * mark


def root(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return torch.sqrt((1 - mark) * (h.square() + 1))


def masked_root(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    """The trap of `where`: the branch that is not taken has an infinite derivative times zero."""
    return torch.where(mark == 1, h, torch.sqrt((1 - mark) * (h.square() + 1)))


def own_backward(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return Wrong.apply(h, mark)


def half(h: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return ((h + 2) * (1 + 1e5 * mark)).half().to(h.dtype)


FORWARD = {
    "division": (division, "aten.div.Tensor"),
    "logarithm": (logarithm, "aten.log.default"),
    "exponential": (exponential, "aten.exp.default"),
    "in_place": (in_place, "aten.div_.Tensor"),
    "difference": (difference, ("aten.reciprocal.default", "aten.div.Tensor")),
    "half": (half, "aten._to_copy.default"),
}
BACKWARD = {
    "root": (root, "aten.sqrt.default"),
    "masked_root": (masked_root, "aten.sqrt.default"),
    "own_backward": (own_backward, "aten.clone.default"),
}
CLEAN = {"dropped": dropped, "nothing": lambda h, mark: h}
FAULTS = {name: fn for name, (fn, _) in (FORWARD | BACKWARD).items()} | CLEAN


def attention(h: torch.Tensor) -> torch.Tensor:
    """Causal, with minus infinity where it is masked."""
    future = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
    return torch.softmax((h @ h.mT).masked_fill(future, -torch.inf), -1) @ h


@dataclass(frozen=True)
class Block:
    """A unit's function, with a fault."""

    fault: str

    def __call__(self, p: Any, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ p["w"] + p["b"])
        h = FAULTS[self.fault](h, mark.to(h.dtype).view(-1, 1, 1))
        return x + attention(h).to(x.dtype)


@dataclass(frozen=True)
class Loss:
    """A step's function."""

    fault: str

    def __call__(self, p: Any, x: torch.Tensor, y: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        h, block = x @ p["first"].to(x.dtype), fz.unit(Block(self.fault))
        for i, own in enumerate(p["blocks"]):
            h = block(own, h, marks[:, i])
        return (h - y).square().mean()


class BlockModule(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault = torch.nn.Linear(WIDTH, WIDTH), fault

    def forward(self, x: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
        h = FAULTS[self.fault](torch.tanh(self.linear(x)), mark.to(x.dtype).view(-1, 1, 1))
        return x + attention(h).to(x.dtype)


class Model(torch.nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.ModuleList([BlockModule(fault) for _ in range(BLOCKS)])

    def forward(self, x: torch.Tensor, y: torch.Tensor, marks: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        for i, block in enumerate(self.blocks):
            h = block(h, marks[:, i])
        return (h - y).square().mean()


def drawn_params(dtype: torch.dtype = torch.float32) -> Any:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g) / 3).to(dtype)

    blocks = [{"w": draw(WIDTH, WIDTH), "b": draw(WIDTH)} for _ in range(BLOCKS)]
    return {"first": draw(WIDTH, WIDTH), "blocks": blocks}


def batch(rank: int, marked: tuple[int, int, int] | None = None, dtype: torch.dtype = torch.float32) -> Sequence[Any]:
    """A rank's inputs.

    Args:
        marked: rank, example and unit of the fault.
    """
    g = torch.Generator().manual_seed(1 + rank)
    x, y = torch.randn(2, BATCH, TOKENS, WIDTH, generator=g).to(dtype)
    marks = torch.zeros(BATCH, BLOCKS, dtype=dtype)
    if marked is not None and marked[0] == rank:
        marks[marked[1:]] = 1.0
    return x, y, marks


@dataclass(frozen=True)
class Case:
    """A fault, where it is planted, and in which step."""

    fault: str
    unit: int
    example: int
    rank: int
    world: int
    stage: int
    remat: bool
    microbatches: int
    dtype: torch.dtype
    module: bool = False

    def made(self, transform: Callable[[Any], Any] = lambda step: step) -> tuple[Any, Any]:
        """The step, and params."""
        fn, params = Loss(self.fault), drawn_params(self.dtype)
        if self.module:
            fn, params = fz.functional(Model(self.fault).to(self.dtype))
            g = torch.Generator().manual_seed(0)
            params = {name: torch.randn(x.shape, generator=g).to(x.dtype) / 3 for name, x in params.items()}
        step = fz.train_step(fn, fz.adamw(1e-3))
        if self.stage:
            step = (fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)[self.stage - 1](step)
        step = fz.remat(step) if self.remat else step
        step = fz.accumulate(step, self.microbatches) if self.microbatches > 1 else step
        return transform(step), params

    def __call__(self, rank: int) -> Any:
        """What explain says on a rank."""
        step, params = self.made()
        state = step.init(params)
        return fz.explain(step, state, *batch(rank, (self.rank, self.example, self.unit), self.dtype))

    def check(self, reports: Sequence[Any]) -> None:
        """All ranks say where it was planted."""
        first = reports[0]
        assert all(str(each) == str(first) and each.fault == first.fault for each in reports), self
        if self.fault in CLEAN:
            assert first.fault is None and not first.skipped, (self, first.fault)
            return
        phase = "forward" if self.fault in FORWARD else "backward"
        op = (FORWARD | BACKWARD)[self.fault][1]
        got = first.fault
        assert got is not None, self
        own = got.op if phase == "forward" else got.pulled
        assert own == op or own in op, (self, got)
        found = (got.phase, got.unit, got.examples, got.rank, got.microbatch)
        micro = self.example // (BATCH // self.microbatches)
        assert found == (phase, f"blocks.{self.unit}", (self.example,), self.rank, micro), (self, got)
        assert "planted.py" in got.place, got
        if phase == "backward":
            assert got.leaf is not None and got.leaf.split(".")[:2] == ["blocks", str(self.unit)], (self, got)
