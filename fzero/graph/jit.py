"""The graphs of a step: one for each signature of each verb, kept from its first call on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from fzero.base import private, pytree
from fzero.base.context import in_differentiated
from fzero.engine.outcome import _wanted
from fzero.engine.run import Run
from fzero.graph.errors import naming, one_at_a_time
from fzero.graph.run import GraphRun, Program, forward_only, made
from fzero.state.train_state import TrainState
from fzero.stores.put import DEVICE
from fzero.table.counting import Mask
from fzero.table.spec import Spec


class Jit:
    """The programs of a step and of what other transforms make of it.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, backend: str, static: Collection[int]) -> None:
        self.backend, self.static = backend, tuple(static)
        self._programs: dict[object, Program] = {}
        self._last: Program | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return Jit, (self.backend, self.static)

    def __repr__(self) -> str:
        return self.backend

    @property
    def traces(self) -> int:
        return len(self._programs)

    def _key(self, verb: str, step: Spec, state: TrainState, inputs: Sequence[Any], wanted: Sequence[int]) -> object:
        flat, spec = pytree.flatten(tuple(inputs))
        forms = tuple(
            (tuple(x.shape), x.stride(), x.dtype, x.device) if isinstance(x, torch.Tensor) else (type(x), x)
            for x in flat
        )
        device = state.params.device.type
        ambient = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.get_default_dtype()
        rows = step.rules, step.has_aux, step.carries, step.microbatches.means
        return verb, step.fn, state.layout, rows, spec, forms, tuple(wanted), ambient, state.params.axis.ranks

    def numbers(self, inputs: Sequence[object]) -> tuple[object, ...]:
        """Inputs with Python's numbers as tensors, but for static ones."""

        def traced(x: Any) -> Any:
            if type(x) is float:
                return torch.tensor(x, dtype=torch.float64)
            return torch.tensor(x) if type(x) is int else x

        return tuple(
            x if i in self.static else pytree.map_leaves(traced, x) for i, x in enumerate(inputs)
        )

    def run(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        argnums: Collection[int] | None,
        seed: tuple[int, ...],
        scale: float,
        unreduced: bool,
        partial: bool,
        mask: Mask,
        again: Callable[[], Run],
    ) -> Any:
        """A run of the function. The first one under a signature is one without a graph, which proves it."""
        if _surrounded():
            return own()
        given = self.numbers(inputs)
        wanted = _wanted(given, argnums)
        key = self._key("vjp", step, state, given, wanted)
        known = self._programs.get(key)
        if known is None:
            out = own()
            self._add(key, step, state, given, wanted, seed)
            return out
        return GraphRun(known, step, state, given, argnums, seed, scale, unreduced, partial, mask, again)

    def forward(
        self,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        own: Callable[[], Any],
        *,
        seed: tuple[int, ...],
        mask: Mask | None,
    ) -> tuple[object, object]:
        """Outputs and aux."""
        if _surrounded():
            return own()
        given = self.numbers(inputs)
        key = self._key("forward", step, state, given, ())
        known = self._programs.get(key)
        if known is None:
            out = own()
            self._add(key, step, state, given, None, seed)
            return out
        return forward_only(known, step, state, given, seed, mask)

    def _add(
        self,
        key: object,
        step: Spec,
        state: TrainState,
        inputs: Sequence[object],
        wanted: Sequence[int] | None,
        seed: tuple[int, ...],
    ) -> Program:
        need_traceable(step, state)
        with one_at_a_time, naming():
            self._programs[key] = self._last = made(step, state, inputs, wanted, seed, self.backend)
        return self._last

    def graph(self, step: Any, *args: object) -> torch.fx.GraphModule:
        """The graph of a call of the step."""
        state, *inputs = args
        assert isinstance(state, TrainState)
        given = self.numbers(inputs)
        wanted = _wanted(given, ())
        key = self._key("vjp", step, state, given, wanted)
        known = self._programs.get(key)
        if known is None:
            known = self._add(key, step, state, given, wanted, (0,))
        return known.joined()


def _surrounded() -> bool:
    return private.transforms() or in_differentiated() or private.dispatch_modes()


def need_traceable(step: Spec, state: TrainState) -> None:
    """Refuses what no graph takes."""
    table = step.table(state.layout)
    for row in table.rows:
        what = (
            "activations offloaded (fz.offload)"
            if row.activations != DEVICE
            else "params offloaded (fz.offload)"
            if row.fetched
            else "names to keep (fz.remat(save=...))"
            if row.names.all
            else "units compiled by fz.compile"
            if row.compile
            else ""
        )
        if what:
            raise ValueError(f"jit: got leaf {row.path!r} with {what}, which no graph has yet. Leave one of the two out.")
    if state.params.axis.tensor is not None or state.params.axis.further:
        raise ValueError("jit: got a step with fz.shard_tensor or a sequence axis, which no graph has yet; expected none.")
