"""fz.parallel.check: types on axes, inferred in a dry run that names the place where a conversion is wrong."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.base import pytree, texts, thread_state
from fzero.base.arguments import need_bool, need_str, wrong
from fzero.base.context import during, own_copies
from fzero.base.patterns import PATTERN, unmatched
from fzero.base.refusals import first_words, of_higher_order
from fzero.comm.axis import axes_in
from fzero.comm.divergence import recorded_collectives
from fzero.engine.carry import refuse_carry
from fzero.engine.outcome import is_differentiable
from fzero.parallel.declared import Dims, Inputs, Patterns, dims_of, paths_of, patterns_of
from fzero.parallel.dry import Conversion, DryRun
from fzero.parallel.forms import CONSTANT
from fzero.parallel.planned import Planned
from fzero.parallel.played import need_one_process, playable
from fzero.parallel.types import (
    WHO,
    Axes,
    AxisTypeError,
    Place,
    Type,
    Watch,
    form_of,
    place_of,
    running,
    set_type,
    tensors_in,
    type_of,
)
from fzero.table.spec import Spec


class Report(NamedTuple):
    """What `fz.parallel.check` has found.

    Attributes:
        conversions: in the order in which they run, those of the pullback behind the others.
        outputs: path -> the axes on which an output varies, in their order.
        played: axis -> its ranks, of those that were played with values.
    """

    conversions: tuple[Conversion, ...]
    outputs: dict[str, tuple[str, ...]]
    played: dict[str, int]

    def sent(self, axis: str | None = None) -> int:
        """Bytes that a rank sends over an axis, or over all."""
        return sum([each.sent for each in self.conversions if axis in (None, each.axis)])

    def messages(self, axis: str | None = None) -> int:
        """Exchanges over an axis, or over all."""
        return sum([each.messages for each in self.conversions if axis in (None, each.axis)])

    def __str__(self) -> str:
        rows = [
            f"{each.name + ('^T' if each.transposed else ''):17}{each.axis:8}{each.shape!s:18}{each.messages:3} "
            f"messages {each.sent:12,} bytes  {each.place}"
            for each in self.conversions
        ]
        ends = [f"{path or 'the output'}: {_words(axes)}" for path, axes in self.outputs.items()]
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
    """Runs a function once without values, messages or other ranks, and checks the types of all values on all axes.

    On an axis a value is invariant (the same on all ranks, and its cotangent too) or varying (each rank has its own,
    and its own cotangent). The maps of `fz.parallel` convert between the two: `copy` and `split` take what is invariant
    and give what varies, `sum` and `gather` the other way round, the others take and give what varies. A function with
    a conversion missing, or with one too many, has other values or gradients than one process; it is refused here. Its
    pullback runs too, and the cotangent of an input must have the type of that input.

    Of a step the function is checked as it runs there, on one microbatch: leaves that `fz.shard_tensor` cuts are this
    rank's slices, which vary on its axis, the others and the batch are invariant, and modules of `fz.functional` have
    the conversions that the plan gives them. No state is made. Other transforms change nothing of it, in any order.

    Where it can be told, a varying value is more: replicated (a copy), a piece along a dim, or partial, a summand on
    each rank (a matmul over a dim that is cut). To sum what is replicated, to add a bias or a piece to what is partial,
    or to take a function of that which is not linear, is refused too. Say the dims of inputs,
    `varying={"down": {"tp": 0}}`, for it to be known; a plan says those of leaves.

    Where ranks differ in what is no tensor, no type tells: `x * ax.rank` counts as `x` does. Whose piece comes (a local
    one in place of `ring_shift` or `all_to_all`) is a matter of values, too. With `values=True` those are looked at.
    Random numbers are those of one stream, which is the same on all ranks: what is dropped out of a value has its type.
    Sizes that ranks tell each other are taken to be those that a map has cut before, or else the same on all ranks.

    Args:
        fn: a step, on a mesh of torch's or of `fz.testing.fake_mesh`; or a function such as that of a step, which calls
            the maps over axes of a mesh.
        inputs: pytrees of tensors (real, fake or meta ones) as this rank has them; only shapes are read. Of a step its
            params, whole as for `init` (callables, too), and a batch.
        varying: pattern (fnmatch over dotted paths, which begin with the name of the argument: "params.w1") -> the
            axes on which these inputs vary: weights that are cut, this rank's tokens; or a dict of the axes to the
            dims that are cut over them. All others are invariant.
        outputs: the same for outputs; by default all are invariant, as a loss is.
        constants: a pattern of floating inputs that nothing is differentiated by, such as masks; integers are so
            anyway, and leaves that are frozen.
        averaged: axes that the step takes means over (`shard_zero3(step, axis=...)`): there all values are varying,
            and nothing is checked. A step says its own.
        values: looks at values, too, of inputs that have some: in the dry run, for a function that reads them
            (`x.item()`, a mask as an index), as if other ranks sent what this one has; and then on all ranks of the
            axes, up to 64, which threads of this process play. Outputs and gradients must be those of one rank that has
            everything, but for rounding. Played are axes of which the dims of all inputs are said (those of a step's
            params are); of other inputs than params the other ranks' pieces are made up of this rank's, in equal sizes.
            Inputs lie on the CPU for that.

    Returns:
        The conversions that were met, with what they send, and the types of the outputs.

    Raises:
        AxisTypeError: a conversion is missing or too much; a ValueError that names the line.
        ValueError: a pattern matches nothing; params that `init` refuses.
        TypeError: the function reads values, and there are none; inputs of `values=True` that have none.
        RuntimeError: a step goes over ranks, and there is no process group.

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
    watch = Watch(run.where, run.ignored)
    with torch.enable_grad(), _apart(values), watch, during(running, run), recorded_collectives() as unseen:
        given = leaves.typed()
        try:
            with of_higher_order(f"{WHO}: the function"):
                with planned.running(given[0]) if planned is not None else contextlib.nullcontext():
                    out = fn(*given)
                found = _outputs(out, declared, run.ignored)
                _pull_back(planned.outputs(out) if planned is not None else out, leaves, run)
        except RuntimeError as error:
            if type(error).__name__ in _READS or texts.says(error, texts.NO_NUMPY):
                raise ReadsValues(place_of(error)) from error
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
            f"{WHO}: the function communicates by itself ({operation} of {tag}), and no type is known of what comes; "
            "expected the maps of fz.parallel alone."
        )
    played = playable(leaves, run.axes, run.ignored) if values else {}
    if played:
        need_one_process(fn, leaves, declared, played, watch.draws)
    return Report(tuple(run.conversions), found, played)


def sent_by(step: Spec, params: object, batch: Sequence[object]) -> Report:
    """The report of a step of which only params are differentiated by."""
    refuse_carry(step, "plan(inputs=...)")
    real = [path for path, leaf in paths_of(step.fn, (None, *batch)) if is_differentiable(leaf)]
    try:
        return check(step, params, *batch, constants="|".join(real))
    except ReadsValues as error:
        raise TypeError(
            f"plan: {error.place}: with inputs=, the function is run on shapes alone, and it reads a tensor's value "
            "there (.item(), bool(x), x.numpy()), or makes a tensor whose shape depends on values. Let it take "
            f"{_INSTEAD}; or leave inputs= out, and what it sends and what its units keep is not counted."
        ) from error


_MISMATCH = (
    WHO + ": torch does not run the function on shapes alone ({}), as it does not with forward mode (jvp, hessian) "
    "under torch.vmap. If a step runs it, take fz.parallel.check(..., values=True), or leave inputs= of fz.plan out."
)
_READS = ("DataDependentOutputException", "DynamicOutputShapeException")
_INSTEAD = "an operator that needs none (torch.where, a mask in place of an index)"


class ReadsValues(TypeError):
    """A function reads a tensor's value, or makes a tensor whose shape depends on values, where there are shapes alone.

    Attributes:
        place: the line.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        super().__init__(
            f"{WHO}: {place}: the function reads a tensor's value, or makes a tensor whose shape depends on values, "
            "and a dry run has none. Take fz.parallel.check(..., values=True) and inputs with values of this rank, or "
            f"{_INSTEAD}."
        )


@contextlib.contextmanager
def _apart(values: bool) -> Iterator[None]:
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
        dims = dims_of(path, leaf.ndim, declared, "outputs")
        said = frozenset(dims)
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
        for axis, dim in dims.items():
            form = form_of(leaf, axis)
            if dim is not None and form not in (dim, None, CONSTANT):
                words = f"a piece along dim {form}" if isinstance(form, int) else form
                raise AxisTypeError(
                    f"{WHO}: {name} is {words} on axis {axis!r} (from {own.source}), and was expected to be a piece "
                    f"along dim {dim}, as outputs= says: a conversion is missing."
                )
        found[path] = tuple(sorted(own.varying))
    return found


def _words(axes: Sequence[str]) -> str:
    return f"varies on {', '.join(axes)}" if axes else "invariant"


def _pull_back(out: object, inputs: Inputs, run: DryRun) -> None:
    """The pullback, whose cotangents must have the types of the inputs."""
    given = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not given or not inputs.tracked:
        return
    cotangents = []
    for tensor in given:
        own = type_of(tensor)
        cotangents.append(set_type(torch.ones_like(tensor), Type(own.varying, False, "an output's cotangent")))
    run.pulls_back = True
    found = torch.autograd.grad(given, [*inputs.tracked.values()], cotangents, allow_unused=True)
    for (path, tensor), cotangent in zip(inputs.tracked.items(), found, strict=True):
        more = type_of(cotangent).varying - type_of(tensor).varying - run.ignored if cotangent is not None else None
        if more:
            raise AxisTypeError(
                f"{WHO}: {path!r} is invariant on axis {min(more)!r}, and its cotangent is partial there, a summand on "
                "each rank, which nothing sums: fz.parallel.copy is missing before it is used."
            )
