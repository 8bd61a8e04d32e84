"""A function of states and tensors as one graph: it is traced through the steps that it calls."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as torch_pytree

from fzero.base import private, pytree
from fzero.base.context import during, in_differentiated, jitting, proves
from fzero.graph import inductor, of_torch, program
from fzero.graph.alike import Identity
from fzero.graph.errors import naming, one_at_a_time
from fzero.graph.trace import Traced, draws, trace
from fzero.state.sharded import is_item
from fzero.state.train_state import TrainState
from fzero.table.handle import name_of


class Opened:
    """A tree of states, tensors and values, taken apart: what a graph takes, and what its signature is.

    Counts (a state's updates, an optimizer's) are 0-d tensors of the graph, as Python's numbers are.

    Args:
        numbers: whether Python's numbers become tensors, too.
    """

    def __init__(self, tree: object, numbers: bool) -> None:
        leaves, self.spec = pytree.flatten(tree, is_leaf=_is_state)
        self.tensors: list[torch.Tensor] = []
        self._makers: list[tuple[str, Any]] = []
        forms: list[object] = []
        for leaf in leaves:
            if isinstance(leaf, TrainState):
                own, spec = torch_pytree.tree_flatten(leaf)
                counts = [_as_count(x) for x in _counts_of(leaf)]
                self._makers.append(("state", (spec, len(own), len(counts), [type(x) for x in _counts_of(leaf)])))
                self.tensors += [*own, *counts]
                forms.append((spec, leaf.seed, leaf.signature, len(counts)))
            elif isinstance(leaf, torch.Tensor):
                self._makers.append(("tensor", None))
                self.tensors.append(leaf)
                forms.append("tensor")
            elif numbers and type(leaf) in (int, float):
                self._makers.append(("tensor", None))
                self.tensors.append(_as_number(leaf))
                forms.append(type(leaf))
            else:
                self._makers.append(("value", leaf))
                forms.append((type(leaf), leaf if _is_hashable(leaf) else Identity(leaf)))
        self.form = self.spec, tuple(forms)

    def made(self, tensors: Sequence[torch.Tensor], values: bool) -> Any:
        """The tree again, with other tensors.

        Args:
            values: whether counts become numbers.
        """
        rest = iter(tensors)
        return pytree.unflatten(self.spec, [self._one(*maker, rest, values) for maker in self._makers])

    def _one(self, kind: str, about: Any, rest: Iterator[torch.Tensor], values: bool) -> object:
        if kind == "value":
            return about
        if kind == "tensor":
            return next(rest)
        spec, own, counts, _ = about
        state: TrainState = torch_pytree.tree_unflatten([next(rest) for _ in range(own)], spec)
        every = [next(rest) for _ in range(counts)]
        return _with_counts(state, [int(x) for x in every] if values else every)


def _is_state(x: object) -> bool:
    return isinstance(x, TrainState)


def _is_hashable(x: object) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


def _as_number(x: float) -> torch.Tensor:
    return torch.tensor(x, dtype=torch.float64 if type(x) is float else torch.int64, device="cpu")


def _as_count(x: Any) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else torch.tensor(float(x), dtype=torch.float64, device="cpu")


def _counts_of(state: TrainState) -> list[Any]:
    nodes = pytree.flatten((state.moments, state.extra), is_leaf=is_item)[0]
    return [state.step, *[x.value for x in nodes if isinstance(x, pytree.Count)]]


def _with_counts(state: TrainState, counts: Sequence[Any]) -> TrainState:
    step, *others = counts
    rest = iter(others)

    def one(x: object) -> object:
        return pytree.Count(next(rest), x.missed, x.paused) if isinstance(x, pytree.Count) else x

    moments, extra = pytree.map(one, (state.moments, state.extra), is_leaf=is_item)
    return state.changed(moments=moments, extra=extra, step=step)


MANY = 10


class Function:
    """A function of states and tensors that runs as one graph for each signature.

    Attributes:
        traces: how many signatures were traced.
    """

    def __init__(self, fn: Callable[..., Any], backend: str, fallback: bool, static: Collection[int]) -> None:
        self.fn, self.backend, self.fallback, self.static = fn, backend, fallback, tuple(static)
        self._programs: dict[object, tuple[program.Run, Opened, Traced]] = {}
        self._plain = False  # after a trace that failed, where that may be
        functools.update_wrapper(self, fn, updated=())

    def __reduce__(self) -> tuple[object, ...]:
        return Function, (self.fn, self.backend, self.fallback, self.static)

    @property
    def traces(self) -> int:
        return len(self._programs)

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if self._plain or private.transforms() or in_differentiated() or private.dispatch_modes():
            return self.fn(*args, **kwargs)
        given, key = self._given(args, kwargs)
        known = self._programs.get(key)
        if known is None:
            out = self.fn(*args, **kwargs)
            try:
                self._add(key, given)
            except Exception as error:
                if not self.fallback:
                    raise
                self._plain = True
                warnings.warn(f"jit: {name_of(self.fn)} runs without a graph: {error}", stacklevel=2)
            return out
        run, result, _ = known
        with torch.no_grad():
            out = run([x.detach() for x in given.tensors])
        return result.made(out, values=True)

    def graph(self, *args: object, **kwargs: object) -> torch.fx.GraphModule:
        """The graph of a call with such arguments."""
        given, key = self._given(args, kwargs)
        return (self._programs.get(key) or self._add(key, given))[2].forward

    def lower(self, *args: object, **kwargs: object) -> Function:
        """Traces and compiles a call with such arguments ahead of time, and runs nothing."""
        given, key = self._given(args, kwargs)
        if key not in self._programs:
            self._add(key, given)
        return self

    def _given(self, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[Opened, object]:
        fixed = {i: args[i] for i in self.static if i < len(args)}
        rest = [None if i in fixed else x for i, x in enumerate(args)]
        given = Opened((rest, dict(kwargs)), numbers=True)
        given.fixed = fixed  # type: ignore[attr-defined]
        metas = tuple((tuple(x.shape), x.stride(), x.dtype, x.device) for x in given.tensors)
        ambient = torch.get_default_dtype(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        own = tuple((i, x if _is_hashable(x) else Identity(x)) for i, x in fixed.items())
        return given, (given.form, metas, own, ambient)

    def _add(self, key: object, given: Opened) -> tuple[program.Run, Opened, Traced]:
        for state in [x for x in pytree.flatten(given.made(given.tensors, values=True), _is_state)[0] if _is_state(x)]:
            row = next((row for row in state.layout.rows if row.policy.rounding == "stochastic"), None)
            if row is not None:
                raise ValueError(
                    f"jit: got a function of a state whose leaf {row.path!r} is rounded stochastically, expected one "
                    "without: a function's graph draws nothing yet. Take fz.jit(step), whose updates draw as ever."
                )
            if state.params.axis.ranks > 1:
                raise ValueError(
                    f"jit: got a function of a state over {state.params.axis.ranks} ranks, expected one of a single "
                    "rank: a function's graph has no messages yet. Take fz.jit(step), whose graphs have."
                )
        results: list[Opened] = []

        def flat(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            rest, kwargs = given.made(tensors, values=False)
            args = [given.fixed.get(i, x) for i, x in enumerate(rest)]  # type: ignore[attr-defined]
            results[:] = [Opened(self.fn(*args, **kwargs), numbers=False)]
            return tuple(results[0].tensors)

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            floats = [i for i, x in enumerate(tensors) if x.is_floating_point() or x.is_complex()]

            def moving(*own: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
                every = list(tensors)
                for i, x in zip(floats, own, strict=True):
                    every[i] = x
                return own[0].detach() if own else torch.zeros((), device="cpu"), flat(*every)

            # under a level, so that steps are functions of torch's operators alone
            result: Any = torch.func.vjp(moving, *[tensors[i] for i in floats], has_aux=True)
            return [x.clone() if any(x is y for y in tensors) else x for x in result[2]], (), ()

        table = inductor.table() if self.backend == "inductor" else {}
        with one_at_a_time, naming(), of_torch.without_pointers(), (mode := of_torch.fake_mode()):
            own = [mode.from_tensor(x.detach()) for x in given.tensors]
            with during(jitting, True), during(proves, False):
                traced = trace(run, own, (), table)
        drawing = next((node for node in traced.forward.graph.nodes if draws(node)), None)
        if drawing is not None:
            raise ValueError(
                f"jit: the function draws random numbers ({drawing.target}), which a function's graph does not have "
                "yet. Give the noise as an input, or take fz.jit(step), whose graphs draw what the step draws."
            )
        if self.backend == "inductor":
            program_of = inductor.compiled(traced.forward, traced.constants)
        else:
            program_of = program.compiled(traced.forward, constants=traced.constants)
        self._programs[key] = made = program_of, results[0], traced
        return made
