"""Spec: the fields of a step, the rules of its table and the state that transforms add. Pure data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import torch

from fzero.base.arguments import need_int, need_str, wrong
from fzero.base.patterns import PATTERN
from fzero.comm.axis import Axis
from fzero.table.layout import Layout
from fzero.table.microbatch import Microbatches
from fzero.table.optimizer import GradientTransformation
from fzero.table.policy import ByPath, Policy
from fzero.table.rows import RUNNING, Leaf, Row, Rule, Sharding, Table, add_rule, resolve
from fzero.table.slices import Hint, TensorAxis

LEAF_NORMS = "leaf_norms"
METRICS = ("loss", "grad_norm", "lr", "skipped", "aux", LEAF_NORMS)


@dataclass(frozen=True)
class Extra:
    """Something that a transform keeps in the state, as `state.extra[name]`. Give it to `step.with_state(extra)`.

    Its functions are pure, and the same on every rank. The value is a tree of `Sharded`, tensors and plain Python
    values. It is sharded, saved and converted with the state.

    Attributes:
        name: the key in `state.extra`.
        source: a text that says where the entry comes from, with its arguments: `"ema(0.999)"`. Two entries of one name
            are an error if their texts differ.
        init: `init(params) -> value`. `params` is a `Sharded`. A value keeps the dtype that `init` gives it: over
            bfloat16 params begin with `params.map(lambda p: p.float())` for one in float32.
        update: `update(value, params, applied) -> value`, of the same structure. Called after every update, with the
            new params. `applied` is False if the update was skipped, as a gradient was not finite. None: the value
            stays as it is.
        changes: `changes(value, params) -> (value, params)`, to change the params. Called after every `every`-th
            applied update, before `update` of any entry. It works element by element on this rank's slices, and gets
            some groups at a time. The value must be one `Sharded` of the trained leaves.
        every: the number of applied updates from one call of `changes` to the next.
        fused: `fused(value, params)`, the same as an applied `update`, but it writes to the buffers of `value` in
            place. It works as `changes` does, on a `Sharded` of plain values. `update` is still needed for skipped
            updates and under `torch.func`.
        scale: `scale(value)`, a positive number that cotangents are multiplied by inside the pullback. Grads carry it.
            `update`, `add_grads` and `fz.gather` take it off.
        kind: what a state must have been made with to be one of this step. `source` by default.
        expendable: True lets `fz.convert` drop the entry, or begin it anew, without an error.

    Example:
        >>> def begun(params):
        ...     return {"updates": 0}
        >>> def counted(value, params, applied):
        ...     return {"updates": value["updates"] + applied}
        >>> step = fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1))
        >>> step = step.with_state(fz.Extra("counter", "counter()", begun, counted))
        >>> state, _ = step(step.init({"w": torch.ones(1)}), torch.ones(1))
        >>> state.extra["counter"]
        {'updates': 1}
    """

    name: str
    source: str
    init: Callable[..., object]
    update: Callable[..., object] | None = None
    scale: Callable[..., float] | None = None
    kind: str = ""
    expendable: bool = False
    changes: Callable[..., object] | None = None
    every: int = 1
    fused: Callable[..., None] | None = None

    def __post_init__(self) -> None:
        for argument, own in (("name", self.name), ("source", self.source), ("kind", self.kind)):
            need_str(own, "Extra", argument, "a str")
        for argument in ("init", "update", "scale", "changes", "fused"):
            own, optional = getattr(self, argument), argument != "init"
            if not callable(own) and not (optional and own is None):
                raise wrong("Extra", argument, own, "a function" + (" or None" if optional else ""))
        need_int(self.every, "Extra", "every", least=1)
        if self.changes is not None and self.fused is not None:
            raise ValueError(f"Extra: got both changes and fused ({self.source}); expected one of them.")
        if self.fused is not None and self.update is None:
            raise ValueError(f"Extra: got fused without update ({self.source}); expected both, which do the same.")
        object.__setattr__(self, "kind", self.kind or self.source)
        if not self.name:
            raise ValueError(f"Extra: got name='' ({self.source}), expected the name of an entry of state.extra.")
        if self.name in METRICS:
            raise ValueError(
                f"{self.source}: got the name {self.name!r} for an entry of state.extra, which is that of a metric; "
                f"expected another one than {', '.join(map(repr, METRICS))}."
            )

    def is_due(self, count: int) -> bool:
        """True if the entry changes the params after the `count`-th applied update."""
        return self.changes is not None and count % self.every == 0

    def factor(self, value: object) -> float:
        """The scale of a value. 1 if there is no `scale`.

        Raises:
            ValueError: it is not positive.
        """
        factor = float(self.scale(value)) if self.scale else 1.0
        if not 0.0 < factor < math.inf:
            raise ValueError(
                f"state.extra[{self.name!r}] ({self.source}): got a scale of {factor}, expected a positive number that "
                "is the same on every rank."
            )
        return factor


class Signature(NamedTuple):
    """All of a step that decides how its states lie in memory, but for the ranks."""

    policy: Policy | ByPath
    units: tuple[str, ...] | None
    extras: tuple[tuple[str, str, bool], ...]  # name, kind, whether it is expendable
    rules: tuple[Rule, ...]

    def __str__(self) -> str:
        sources = [*sorted(rule.source for rule in self.rules), *(kind for _, kind, _ in self.extras)]
        return f"[{self.policy}, units={self.units}, {', '.join(sources) or 'no rules'}]"


class Graphs(Protocol):
    """What runs a step's function as a graph; see `fzero.graph`."""

    traces: int  # how many signatures were traced

    def run(self, step: Spec, state: Any, inputs: Sequence[object], own: Callable[[], Any], **given: Any) -> Any:
        """A run of the function; `own()` is one without a graph."""

    def forward(
        self, step: Spec, state: Any, inputs: Sequence[object], own: Callable[[], Any], **given: Any
    ) -> tuple[object, object]:
        """Outputs and aux; `own()` are those without a graph."""
        ...

    def graph(self, step: Spec, state: Any, *inputs: object) -> torch.fx.GraphModule: ...
    def lower(self, step: Spec, state: Any, *inputs: object) -> None: ...


@dataclass(frozen=True)
class Spec:
    """The fields of a step, as data: transforms return one with one more rule, and the engine reads it.

    `fz.Step` adds the verbs.
    """

    fn: Callable[..., Any]
    optimizer: GradientTransformation
    policy: Policy | ByPath = Policy()  # noqa: RUF009 - frozen
    units: tuple[str, ...] | None = None
    has_aux: bool = False
    carries: bool = False  # whether fn is given state.extra["carry"] before its inputs, and returns the next one
    rules: tuple[Rule, ...] = ()
    extras: tuple[Extra, ...] = ()
    microbatches: Microbatches = Microbatches()  # noqa: RUF009 - frozen
    donates: bool = False
    metrics: tuple[str, ...] = ()  # those that are asked for besides
    fusion: str | None = None  # how a fused update is to know the norm of all gradients
    graphs: Graphs | None = None  # runs the function as a graph

    # ---- of a step that runs as graphs (`fz.jit`)

    def _graphs(self) -> Graphs:
        if self.graphs is None:
            raise AttributeError("This step has no graphs: traces, graph and lower are those of fz.jit(step).")
        return self.graphs

    @property
    def traces(self) -> int:
        """How many signatures (shapes, dtypes, static values, verbs) `fz.jit` has traced of this step so far."""
        return self._graphs().traces

    def graph(self, state: Any, *inputs: object) -> torch.fx.GraphModule:
        """The graph of a call with such inputs: its forward and its pullback, with gathers, reductions and regions.

        A region is a unit's call. `print(step.graph(state, *inputs).code)` shows all of it.
        """
        return self._graphs().graph(self, state, *inputs)

    def lower(self, state: Any, *inputs: object) -> Self:
        """Traces and compiles a call with such inputs ahead of time, and runs nothing."""
        self._graphs().lower(self, state, *inputs)
        return self

    # ---- what transforms use

    def with_rule(self, column: str, value: object, source: str, pattern: str = "*") -> Self:
        """A step with one more rule of its table. Transforms that say something of leaves are made so.

        Args:
            column: the column of the table, such as `"compute"`.
            value: what the column says.
            source: a text that says where the rule comes from, for errors and `print(step)`.
            pattern: fnmatch over dotted paths, alternatives separated by `|`.

        Raises:
            ValueError: another rule sets this column of these leaves to another value. The error names both.
        """
        return dataclasses.replace(self, rules=add_rule(self.rules, Rule(column, pattern, value, source)))

    def with_header(self, field: str, value: object, source: str) -> Self:
        """A step with one field set that holds for the step as a whole.

        Args:
            field: the name of the field, such as `"microbatches"`.
            value: its value.
            source: a text that says where it comes from.

        Raises:
            ValueError: the field is set already, to another value.
        """
        old = getattr(self, field)
        if old not in (type(self).__dataclass_fields__[field].default, value):
            raise ValueError(f"{source}: this step already has {field}={old}; expected it to be set once. Keep one.")
        return dataclasses.replace(self, **{field: value})

    def with_state(self, extra: Extra) -> Self:
        """A step that keeps one more entry in its state.

        Args:
            extra: the entry, which is found in `state.extra[extra.name]`.

        Raises:
            ValueError: the step keeps something else by this name.
        """
        if not isinstance(extra, Extra):
            raise wrong("with_state", "extra", extra, "an fz.Extra")
        other = next((other for other in self.extras if other.name == extra.name), None)
        if other is None:
            return dataclasses.replace(self, extras=tuple(sorted((*self.extras, extra), key=lambda extra: extra.name)))
        if other.source != extra.source:
            raise ValueError(
                f"{extra.source}: this step already keeps state.extra[{extra.name!r}], by {other.source}; expected it "
                "to be said once. Keep one."
            )
        return self

    @property
    def sharding(self) -> Sharding | None:
        """The first rule for the axis: all are over one mesh and axis."""
        return next((rule.value for rule in self.rules if isinstance(rule.value, Sharding)), None)

    @property
    def tensor_axis(self) -> TensorAxis | None:
        """The mesh axis that leaves are cut over."""
        return next((rule.value for rule in self.rules if isinstance(rule.value, TensorAxis)), None)

    @property
    def fused_norm(self) -> str:
        """How a fused update comes to know the norm of all gradients: "once" where nothing needs it."""
        if self.fusion not in (None, "auto"):
            return self.fusion
        needed = self.optimizer.needs or any(extra.scale for extra in self.extras)  # a scale skips what is not finite
        return "held" if self.optimizer.needs == "all" else "twice" if needed else "once"

    @property
    def signature(self) -> Signature:
        """The fields that a state's step must share; a mesh's name and sizes say nothing of the ranks."""
        rules = [
            dataclasses.replace(rule, value=rule.value.of_state())
            if isinstance(rule.value, (Sharding, TensorAxis))
            else rule
            for rule in self.rules
            if rule.column not in RUNNING
        ]
        extras = tuple((extra.name, extra.kind, extra.expendable) for extra in self.extras)
        return Signature(self.policy, self.units, extras, tuple(rules))

    @property
    def name(self) -> str:
        """The name of its function."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def __name__(self) -> str:
        """The same: torch.vmap asks for it once for every output, and else takes the time of a whole repr."""
        return self.name

    def axis(self) -> Axis:
        """The mesh axis, looked up now."""
        sharding, over = self.sharding, self.tensor_axis
        own = Axis()
        if sharding is not None:
            own = Axis.of(sharding.mesh, sharding.axes, sharding.replicate, f"shard_zero{sharding.stage}")
        if over is None:
            return own
        tensor = Axis.of(over.mesh, (over.axis,), None, "shard_tensor")
        if len({*tensor.members} & {*own.members, *own.others}) > 1:
            raise ValueError(
                f"shard_tensor: leaves are cut over {tensor.place}, and the state is sharded or replicated over "
                f"{own.place}: some of the same ranks, which cannot have slices of one leaf and different data at "
                "once. Give both a mesh with an axis for each, as init_device_mesh(device, (data, tensor), "
                "mesh_dim_names=('dp', 'tp'))."
            )
        return own.beside(tensor)

    def label(self, path: str) -> str:
        """The name of the optimizer that a leaf gets."""
        return self.optimizer.label(path) if self.optimizer.label else "optimizer"

    def rows(
        self, leaves: Sequence[Leaf], frozen: Container[int] = (), hints: Mapping[int, Hint] = MappingProxyType({})
    ) -> tuple[Row, ...]:
        """The rows of the table for leaves, of which `frozen` are the indices of those that no module trains.

        Args:
            hints: index -> what a leaf's module says of it.
        """
        return resolve(leaves, self.rules, self.policy, self.units, self.label, frozen, hints).rows

    def table(self, layout: Layout) -> Table:
        """The table for the leaves of a state, which another step may have made."""
        known = layout.tables.get(self.rules)
        if known is None:
            leaves = [(row.path, row.shape, row.dtype) for row in layout.rows]
            frozen = [index for index, row in enumerate(layout.rows) if row.frozen]
            hints = {index: row.hint for index, row in enumerate(layout.rows) if row.hint is not None}
            known = resolve(leaves, self.rules, self.policy, self.units, self.label, frozen, hints)
            layout.tables[self.rules] = known
        return known

    def header(self) -> tuple[str, ...]:
        """The words for what holds for the step as a whole, a line each."""
        micro, mode = self.microbatches, self.fused_norm
        by = "" if micro.weights is None else f", weights={getattr(micro.weights, '__name__', 'given')}"
        said = f"accumulate: {micro.count} microbatches, in_dims={micro.in_dims}{by}"
        lines = [said] if micro.count > 1 or by else []
        lines += [f"state.extra[{extra.name!r}]: {extra.source}" for extra in self.extras]
        if self.fusion:
            modes = {"once": "as soon as its grads are there", "twice": "in a second pullback, once the norm is known"}
            when = modes.get(mode, f"once the norm is known, grads held ({mode})")
            lines.append(f"fuse_update: each unit is updated {when}")
        lines += [f"metrics: {', '.join(self.metrics)}"] if self.metrics else []
        lines += [f"jit: {self.graphs}"] if self.graphs is not None else []
        return (*lines, "donate: the state passed in is overwritten") if self.donates else tuple(lines)

    def __str__(self) -> str:
        units = ", ".join(self.units) if self.units else "up to the first integer of a path"
        rules = (f"{'policy':<10} {'*':<16} {self.policy}", *self.rules, *self.header())
        return "\n".join([f"train_step({self.name}), units {units}", *(f"  {rule}" for rule in rules)])


S = TypeVar("S", bound=Spec)  # a transform returns a step of the kind that it is given


def need_step(step: object, who: str, pattern: object = "*") -> None:
    """A step, and a pattern over its leaves where a transform takes one."""
    if not isinstance(step, Spec):
        raise wrong(who, "step", step, "a step that fz.train_step made")
    need_str(pattern, who, "pattern", PATTERN)
