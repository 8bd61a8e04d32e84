"""Pipelines of drawn stages: what flows between them, and the same as one function, written without fzero."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

import fzero as fz
from fzero.schedules import Schedule

WIDTH = 4
KINDS = ("linear", "norm", "residual", "twice", "cast")
FORMS = ("bare", "tuple", "dict")


class Copied(torch.autograd.Function):
    """A copy, for pullbacks of a test's own: `backward` is a subclass's."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Fails(Copied):
    """Fails in the pullback of a cotangent that is marked by its size."""

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        if bool((cotangent.abs() > 1e3).any()):
            raise ArithmeticError("a cotangent over a thousand")
        return cotangent


@dataclass(frozen=True)
class Stage:
    """One stage's function: how it computes, and in what form it gives and takes.

    Attributes:
        kind: what it computes.
        takes: the form of what the stage before gives; "x" of the pipeline's own input.
        gives: the form of what it returns; "loss", "rows" or "both" of the last one.
        skips: whether it returns, as item 1 or "skip", something for a later stage.
        others: the kinds of its further arguments, in order: "skip", "input" or "weight".
    """

    kind: str
    takes: str
    gives: str
    skips: bool
    others: tuple[str, ...]

    def __call__(self, params: Mapping[str, torch.Tensor], *arguments: Any) -> Any:
        first, *rest = arguments
        mask = None
        if self.takes == "tuple":
            first, mask = first
        elif self.takes == "dict":
            first, mask = first["h"], first["mask"]
        h = self.compute(params, first)
        for kind, value in zip(self.others, rest, strict=True):
            h = h @ value if kind == "weight" else h + torch.sin(value)
        if mask is not None:
            h = torch.where(mask > 0, h, 0.5 * h)
        return self.form(h)

    def compute(self, params: Mapping[str, torch.Tensor], h: torch.Tensor) -> torch.Tensor:
        w, b = params["w"], params["b"]
        if self.kind == "linear":
            return torch.tanh(h @ w + b)
        if self.kind == "norm":
            return torch.nn.functional.layer_norm(h @ w, (WIDTH,), b)
        if self.kind == "residual":
            return h + torch.nn.functional.gelu(h @ w)  # b has no gradient
        if self.kind == "twice":
            return torch.tanh(torch.tanh(h @ w) @ w.t() + b)
        return (h.to(torch.float64) @ w.to(torch.float64)).to(h.dtype) + b

    def form(self, h: torch.Tensor) -> Any:
        if self.gives == "loss":
            return (h * h).mean()
        if self.gives == "rows":
            return h
        if self.gives == "both":
            return {"rows": h, "norms": (h * h).sum(1), "loss": h.mean()}
        mask = (torch.arange(WIDTH, device=h.device) % 3).expand(h.shape)
        out: Any = {"bare": h, "tuple": (h, mask), "dict": {"h": h, "mask": mask}}[self.gives]
        if not self.skips:
            return out
        return {**out, "skip": torch.cos(h)} if self.gives == "dict" else (*_items(out), torch.cos(h))

    @property
    def item(self) -> Any:
        """Where what skips is in what it returns."""
        return "skip" if self.gives == "dict" else 2 if self.gives == "tuple" else 1


def _items(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def weight(params: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What a shared component gives."""
    return params["shared"]


@dataclass(frozen=True)
class Case:
    """A pipeline's stages and what flows between them.

    Attributes:
        skips: stage -> the stages that its skip goes to.
        inputs: stage -> numbers of inputs.
        shared: the stages that each shared component gives to.
    """

    stages: tuple[Stage, ...]
    skips: tuple[tuple[int, tuple[int, ...]], ...]
    inputs: tuple[tuple[int, tuple[int, ...]], ...]
    shared: tuple[tuple[int, ...], ...]

    @property
    def fns(self) -> list[Callable[..., Any]]:
        return [*self.stages, *[weight for _ in self.shared]]

    @property
    def wires(self) -> dict[str, Any]:
        """The arguments of fz.pipeline."""
        return {
            "inputs": dict(self.inputs),
            "skips": {(source, self.stages[source].item): targets for source, targets in self.skips},
            "shared": {len(self.stages) + i: users for i, users in enumerate(self.shared)},
        }

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs of stages beside neighbours that exchange values."""
        pairs = [(source, target) for source, targets in self.skips for target in targets]
        pairs += [(min(users), user) for users in self.shared for user in users if user != min(users)]
        return [(a, b) for a, b in pairs if b > a + 1]

    def whole(self, params: Sequence[Any], *inputs: torch.Tensor) -> Any:
        """All stages, one after the other."""
        given, own = dict(self.skips), dict(self.inputs)
        skipped: dict[int, torch.Tensor] = {}
        out: Any = None
        for number, stage in enumerate(self.stages):
            arguments = [out] if number else []
            arguments += [skipped[source] for source, targets in given.items() if number in targets]
            arguments += [inputs[i] for i in own.get(number, ())]
            arguments += [params[len(self.stages) + i]["shared"] for i, u in enumerate(self.shared) if number in u]
            out = fz.unit(stage)(params[number], *arguments)
            if stage.skips:
                skipped[number] = out["skip"] if isinstance(out, dict) else out[-1]
                rest = {k: v for k, v in out.items() if k != "skip"} if isinstance(out, dict) else out[:-1]
                out = rest if len(rest) > 1 else next(iter(rest.values() if isinstance(rest, dict) else rest))
        return out

    def params(self, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
        make = functools.partial(_random, generator=torch.Generator().manual_seed(0), dtype=dtype)
        own = [{"w": make(WIDTH, WIDTH) / 2, "b": make(WIDTH) / 2} for _ in self.stages]
        return [*own, *[{"shared": make(WIDTH, WIDTH) / 2} for _ in self.shared]]

    def batch(self, rows: int, dtype: torch.dtype, seed: int = 1) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count = 1 + max(i for _, numbers in self.inputs for i in numbers)
        return [_random(rows, WIDTH, generator=generator, dtype=dtype) for _ in range(count)]


def _random(*shape: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@st.composite
def cases(draw: st.DrawFn, stages: int) -> Case:
    """Stages with skips, inputs of their own and shared weights."""
    last = stages - 1
    skips: dict[int, tuple[int, ...]] = {}
    for source in range(stages - 1):
        targets = [t for t in range(source + 1, stages) if draw(st.booleans())] if draw(st.booleans()) else []
        if targets:
            skips[source] = tuple(targets)
    shared = [
        users
        for _ in range(draw(st.integers(0, 2)))
        if (users := tuple(s for s in range(stages) if draw(st.booleans())))
    ]
    count = draw(st.integers(1, 3))
    inputs: dict[int, list[int]] = {0: [0]}
    for number in range(1, count):
        for stage in {draw(st.integers(0, last)), draw(st.integers(0, last))}:
            inputs.setdefault(stage, []).append(number)
    made: list[Stage] = []
    form = "x"
    for stage in range(stages):
        others = ["skip" for targets in skips.values() if stage in targets]
        others += ["input" for number in inputs.get(stage, ()) if stage or number]
        others += ["weight" for users in shared if stage in users]
        gives = draw(st.sampled_from(FORMS if stage < last else ("loss", "rows", "both")))
        made.append(Stage(draw(st.sampled_from(KINDS)), form, gives, stage in skips, tuple(others)))
        form = gives
    # an item that is left alone is given as itself
    return Case(
        tuple(made), tuple(skips.items()), tuple((s, tuple(n)) for s, n in sorted(inputs.items())), tuple(shared)
    )


def piped(case: Case, schedule: Schedule, make: Callable[[Callable[..., Any]], fz.Step], **more: Any) -> Any:
    """The pipeline of a case, each step made by `make(fn)`."""
    return fz.pipeline([make(fn) for fn in case.fns], schedule, **case.wires, **more)
