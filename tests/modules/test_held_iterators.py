"""Generators and iterators that a module holds: the private copy has its own, of which nobody else draws."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fzero as fz

X = torch.ones(2, 3)
KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.Generator": (lambda: torch.Generator().manual_seed(0), lambda g: torch.rand((), generator=g)),
    "random.Random": (lambda: random.Random(0), random.Random.random),
    "numpy": (lambda: np.random.default_rng(0), np.random.Generator.random),
    "range": (lambda: iter(range(1, 9)), next),
    "list": (lambda: iter([0.5, 2.0, 3.0, 5.0, 7.0]), next),
}
if sys.version_info < (3, 12):  # later ones warn of a copy, and 3.14 knows none
    KINDS |= {"count": (lambda: itertools.count(1), next), "cycle": (lambda: itertools.cycle([1.0, 3.0]), next)}


class Drawing(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        make, self.draw = KINDS[kind]
        self.drawn = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.gain * self.draw(self.drawn)).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_goes_on_by_itself(kind: str) -> None:
    torch.manual_seed(0)
    module, plain = Drawing(kind), Drawing(kind)
    plain(X)
    module(X)
    expected = [plain(X).item() for _ in range(3)]
    apply, params = fz.functional(module)
    other, _ = fz.functional(module)
    found = []
    for _ in range(3):
        found.append(apply(params, X).item())
        module(X)
        other(params, X)
    assert found == expected


def test_shared_generators_stay_what_they_are() -> None:
    shared = [torch.default_generator, random.random.__self__, np.random.random.__self__]  # type: ignore[attr-defined]

    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared = list(shared)

        def forward(self) -> list[object]:
            return self.shared

    apply, params = fz.functional(Holding())
    assert all(found is one for found, one in zip(apply(params), shared, strict=True))


class Counted:
    """Its class reads what its state holds, as a copy of it is made."""

    def __init__(self) -> None:
        self.parts = [1, 2]

    def __getstate__(self) -> dict[str, Any]:
        return {"parts": [self.parts]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.parts = state["parts"][0]
        self.total = sum(self.parts)


def test_a_state_is_whole_when_its_class_reads_it() -> None:
    class Holding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.counted = Counted()

        def forward(self) -> int:
            return self.counted.total

    apply, params = fz.functional(Holding())
    assert apply(params) == 3
