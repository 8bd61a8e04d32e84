"""fz.jit: a step, or a function of states and tensors, as one graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

from fzero.base.arguments import need_bool
from fzero.graph.function import Function
from fzero.graph.jit import Jit
from fzero.step import Step


def jit(step: Any, backend: str | None = None, fallback: bool = False, static_argnums: Collection[int] = ()) -> Any:
    """Runs a step as one graph."""
    need_bool(fallback, "jit", "fallback")
    if isinstance(step, Step):
        return dataclasses.replace(step, graphs=Jit(backend or "inductor", static_argnums))
    return Function(step, backend or "inductor", fallback, static_argnums)
