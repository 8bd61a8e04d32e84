"""fz.parallel.check: types on axes, inferred in a dry run that names the place where a conversion is wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base import collecting, pytree, texts, thread_state
from fzero.base.arguments import need_bool, need_str, wrong
from fzero.base.context import during, own_copies
from fzero.base.patterns import PATTERN, unmatched
from fzero.base.refusals import first_words, of_higher_order
from fzero.base.thread_state import RUN_BACKWARD
from fzero.comm.backend import axes_in
from fzero.comm.divergence import recorded_collectives
from fzero.engine.carry import refuse_carry
from fzero.engine.outcome import is_differentiable
from fzero.parallel.declared import Dims, Inputs, Patterns, Planned, dims_of, paths_of, patterns_of
from fzero.parallel.forms import Forms, is_replicated
from fzero.parallel.played import need_one_process, note_proven, playable
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Conversion,
    DryRun,
    Type,
    Watch,
    place_of,
    running,
    set_type,
    tensors_in,
    type_of,
)
from fzero.table.spec import Spec


class Report(NamedTuple):
    """What `fz.parallel.check` has found. `print` it for a table.

    Attributes:
        conversions: the maps in the order in which they run, those of the pullback last.
        outputs: path -> the axes on which the output differs between ranks.
        played: with `values=True`, axis -> the number of its ranks.
    """

    conversions: tuple[Conversion, ...]
    outputs: dict[str, tuple[str, ...]]
    played: dict[str, int]

    def sent(self, axis: str | None = None) -> int:
        """Bytes that a rank sends over an axis, or over all axes."""
        return sum([each.sent for each in self.conversions if axis in (None, each.axis)])

    def messages(self, axis: str | None = None) -> int:
        """Number of exchanges over an axis, or over all axes."""
        return sum([each.messages for each in self.conversions if axis in (None, each.axis)])

    def __str__(self) -> str:
        rows = [
            f"{each.name + ('^T' if each.transposed else ''):17}{each.axis:8}{each.shape!s:18}{each.messages:3} "
            f"messages {each.sent:12,} bytes  {each.place}"
            for each in self.conversions
        ]
        ends = [
            f"{path or 'the output'}: {'varies on ' + ', '.join(axes) if axes else 'invariant'}"
            for path, axes in self.outputs.items()
        ]
        same = [f"played on the {size} ranks of {axis}: one process's values" for axis, size in self.played.items()]
        return "\n".join([*rows, *ends, *same])


def check(
    fn: Callable[..., object] | Spec,
    *inputs: object,
    varying: Patterns | None = None,
    outputs: Patterns | None = None,
    constants: str = "",
    averaged: str | Sequence[str] = (),
    values: bool = False,
) -> Report:
    """Finds missing and needless maps of `fz.parallel` in a function, in a dry run without other ranks.

    A tensor is *invariant* on an axis (the same on all its ranks) or *varying* (each rank has its own). `copy` and
    `split` take invariant tensors and return varying ones. `sum` and `gather` do the opposite. The other maps take and
    return varying ones. If one is missing, values or gradients differ from those of one process. The check runs the
    function and its pullback once on shapes alone, and names the line.

    - A step is checked as it runs, on one microbatch: leaves that `fz.shard_tensor` cuts vary, other leaves and the
      batch do not. No state is made.
    - If it knows that a varying tensor is a partial sum, it refuses more: to add a bias to it, or to apply a function
      that is not known to be linear. For inputs, say the dim that is cut: `varying={"down": {"tp": 0}}`.
    - It cannot see what no tensor shows: `x * ax.rank` counts as `x`. It also does not see whose piece a rank has, or
      that ranks sum copies of one value. `values=True` compares the numbers, and so does a step's first run.
    - All ranks are taken to draw the same random numbers.

    Args:
        fn: a step, or a function that calls the maps, on a torch mesh or on `fz.testing.fake_mesh`.
        inputs: pytrees of tensors (real, fake or meta) as this rank has them; only shapes are read. For a step: whole
            params as for `init`, and a batch.
        varying: pattern -> axes on which inputs vary, or -> {axis: the dim that is cut}. Patterns are fnmatch over
            paths that begin with the argument's name, such as "params.w1". All other inputs are invariant.
        outputs: the same for outputs. By default all are invariant, as a loss is. With `values=True` dims are compared.
        constants: pattern of floating inputs without a gradient, such as masks. Integers and frozen leaves are so
            anyway.
        averaged: axes that the step averages over (`shard_zero3(step, axis=...)`). Nothing is checked there. A step
            knows its own.
        values: also read the values of inputs, which lie on the CPU then. First the dry run gets them, for functions
            that need them (`x.item()`). Then threads play all ranks, up to 64 an axis, and outputs and gradients are
            compared with those of one rank that has everything. This covers axes for which the cut dims of all inputs
            are known. Other ranks' pieces of inputs that are not params are made up from this rank's.

    Returns:
        The maps that were met, with what they send, and the axes on which outputs vary.

    Raises:
        AxisTypeError: a map is missing or needless. A ValueError that names the line.
        ValueError: a pattern matches nothing, or `init` would refuse the params.
        TypeError: the function reads values, and there are only shapes. Give values and `values=True`.
        RuntimeError: a step needs a process group, and there is none. Use `fz.testing.fake_mesh`.

    Example:
        >>> def mlp(x, up, down, ax):
        ...     hidden = torch.relu(fz.parallel.copy(x, ax) @ up)
        ...     return fz.parallel.sum(hidden @ down, ax)
        >>> with fz.testing.fake_mesh({"tp": 4}) as mesh:
        ...     ax = fz.parallel.axis(mesh, "tp")
        ...     inputs = torch.empty(8, 16), torch.empty(16, 8), torch.empty(8, 16), ax
        ...     report = fz.parallel.check(mlp, *inputs, varying={"up|down": "tp"})
        >>> [each.name for each in report.conversions], report.outputs
        (['copy', 'sum', 'sum', 'copy'], {'': ()})

        >>> apply, params = fz.functional(torch.nn.Linear(16, 8))
        >>> with fz.testing.fake_mesh({"dp": 64, "tp": 4}) as mesh:
        ...     step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
        ...     step = fz.shard_zero3(fz.shard_tensor(step, {"weight": "row"}, mesh=mesh), mesh=mesh)
        ...     report = fz.parallel.check(step, params, torch.empty(2, 16))
        >>> [each.name for each in report.conversions], report.sent("tp")
        (['split', 'sum', 'sum', 'split'], 288)
        >>> with fz.testing.fake_mesh({"tp": 4}) as mesh:
        ...     step = fz.train_step(lambda p, x: apply(p, x).square().mean(), fz.sgd(0.1))
        ...     step = fz.shard_tensor(step, {"weight": "row"}, mesh=mesh)
        ...     fz.parallel.check(step, params, torch.ones(2, 16), values=True).played
        {'tp': 4}
    """
    if not callable(fn):
        raise wrong(WHO, "fn", fn, "a function, or a step of fz.train_step")
    need_str(constants, WHO, "constants", PATTERN)
    need_bool(values, WHO, "values")
    planned, ignored = None, axes_in(averaged)
    if isinstance(fn, Spec):
        if not inputs:
            raise wrong(WHO, "a step and inputs", inputs, "the step, its params and a batch")
        refuse_carry(fn, WHO)
        planned = Planned(fn, inputs[0])
        fn, inputs, ignored = fn.fn, (inputs[0], *planned.inputs(inputs[1:])), (*ignored, *planned.unchecked)
    run = DryRun(frozenset(ignored), check.__code__)
    declared = patterns_of(outputs, "outputs")
    leaves = Inputs(fn, inputs, patterns_of(varying, "varying"), constants, values, planned)
    with torch.enable_grad(), apart(values), recorded_collectives() as unseen:
        try:
            with of_higher_order(f"{WHO}: the function"), watched(run) as watch:
                out, _ = ran(fn, leaves, leaves.typed(), run)
                found = _outputs(out, declared, run.ignored)
                pull_back(planned.outputs(out) if planned is not None else out, leaves, run)
        except RuntimeError as error:
            if reads(error):
                raise TypeError(_NO_VALUES.format(place_of(error))) from error
            if texts.says(error, *texts.FAKE_DEVICES):
                raise TypeError(_MISMATCH.format(first_words(error))) from error
            explained = any(note.startswith("fzero:") for note in getattr(error, "__notes__", ()))
            error.add_note(f"in the dry run of fz.{WHO}, at {place_of(error)}")
            if explained:  # torch's frames for shapes say nothing more
                raise error.with_traceback(None) from None
            raise
    if unseen:
        operation, tag, _ = unseen[0]
        raise TypeError(
            f"{WHO}: the function communicates by itself ({operation} of {tag}), and nothing is known of what "
            "arrives. Use only the maps of fz.parallel."
        )
    played = playable(leaves, run.axes, run.ignored) if values else {}
    if played:
        need_one_process(fn, leaves, declared, played, watch.draws)
        if planned is not None and planned.over is not None:
            note_proven(fn, played.get(planned.over.name, 1))
    return Report(tuple(run.conversions), found, played)


def sent_by(step: Spec, params: object, batch: Sequence[object]) -> Report:
    """The report of a step of which only params are differentiated by."""
    refuse_carry(step, "plan(inputs=...)")
    real = [path for path, leaf in paths_of(step.fn, (None, *batch)) if is_differentiable(leaf)]
    return check(step, params, *batch, constants="|".join(real))


_MISMATCH = (
    WHO + ": torch does not run the function on shapes alone ({}), as it does not with forward mode (jvp, hessian) "
    "under torch.vmap. If a step runs it, take fz.parallel.check(..., values=True), or leave inputs= of fz.plan out."
)
_NO_VALUES = (
    WHO + ": {}: the function reads a tensor's value (.item(), bool(x), x.numpy()), or makes a tensor whose shape "
    "depends on values, and a dry run on shapes alone has none. Take fz.parallel.check(..., values=True) and inputs "
    "with values of this rank, or an operator that needs none (torch.where, a mask in place of an index); or leave "
    "inputs= of fz.plan out, and what is sent and what units keep is not counted."
)


def reads(error: Exception) -> bool:
    """Tells whether a function has read a tensor's value where there are shapes alone."""
    reading = ("DataDependentOutputException", "DynamicOutputShapeException")
    return type(error).__name__ in reading or texts.says(error, texts.NO_NUMPY)


@contextlib.contextmanager
def apart(values: bool) -> Iterator[None]:
    """Inside, the run has copies of modules of its own, and tensors have values or not."""
    log = logging.getLogger("torch._subclasses.fake_tensor")  # which writes a traceback beside each error
    before, log.disabled = log.disabled, True
    try:
        with during(own_copies, {}), contextlib.nullcontext() if values else thread_state.without_values():
            yield
    finally:
        log.disabled = before


def _outputs(out: object, declared: Mapping[str, Dims], ignored: Axes) -> dict[str, tuple[str, ...]]:
    """Path -> axes of each output, which must be as declared."""
    paths, leaves, _ = pytree.named_leaves(out)
    pairs = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, torch.Tensor)]
    if unknown := [part for pattern in declared for part in unmatched(pattern, [path for path, _ in pairs])]:
        raise ValueError(
            f"{WHO}: got outputs with {unknown[0]!r}, which matches no output; there are "
            f"{', '.join(repr(path) for path, _ in pairs) or 'none'} ('' is a single tensor, which '*' matches)."
        )
    found = {}
    for path, leaf in pairs:
        own, name = type_of(leaf), f"output {path!r}" if path else "the output"
        said = frozenset(dims_of(path, leaf.ndim, declared, "outputs"))
        if more := own.varying - said - ignored:
            raise AxisTypeError(
                f"{WHO}: {name} varies on axis {min(more)!r} (from {own.source}), and was expected to be invariant: "
                f"fz.parallel.sum or gather is missing behind it. If each rank is to have its own, say "
                f"outputs={{{path or '*'!r}: {min(more)!r}}}."
            )
        if (less := said - own.varying - ignored) and not own.constant:
            raise AxisTypeError(
                f"{WHO}: {name} is invariant on axis {min(less)!r} (from {own.source}), and was expected to vary, as "
                "outputs= says: a conversion is one too many, or fz.parallel.split is missing."
            )
        found[path] = tuple(sorted(own.varying))
    return found


@contextlib.contextmanager
def watched(run: DryRun) -> Iterator[Watch]:
    """Inside, operators and maps are those of a dry run."""
    with Watch(run, is_replicated) as watch, during(running, run):
        yield watch


def ran(fn: Callable[..., object], leaves: Inputs, given: Sequence[object], run: DryRun) -> tuple[object, Forms]:
    """What a function returns of inputs with types, and what it ran under."""
    known = contextlib.nullcontext() if leaves.planned is None else leaves.planned.running(given[0])
    with known, collecting.run(), Forms(run) as forms:
        return fn(*given), forms


def pull_back(out: object, inputs: Inputs, run: DryRun) -> None:
    """The pullback, whose cotangents must have the types of the inputs."""
    given = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not given or not inputs.tracked:
        return
    cotangents = []
    for tensor in given:
        own = type_of(tensor)
        cotangents.append(set_type(torch.ones_like(tensor), Type(own.varying, False, "an output's cotangent")))
    run.pulls_back = True
    wanted = tuple(inputs.tracked.values())
    with Forms(run):  # which sees hooks and backward methods, and would be off in autograd.grad
        found = RUN_BACKWARD(tuple(given), tuple(cotangents), False, False, wanted, True, accumulate_grad=False)
    for (path, tensor), cotangent in zip(inputs.tracked.items(), found, strict=True):
        more = type_of(cotangent).varying - type_of(tensor).varying - run.ignored if cotangent is not None else None
        if more:
            raise AxisTypeError(
                f"{WHO}: {path!r} is invariant on axis {min(more)!r}, and its cotangent is partial there, a summand "
                "on each rank. Nothing sums it: fz.parallel.copy is missing before it is used."
            )
