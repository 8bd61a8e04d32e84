"""The check of a step's function over a tensor axis that runs by itself, before a signature's first run.

On shapes alone, where types and rules by operation tell (`types`, `forms`). What the caller's code does that they do
not know is compared by values, of params and inputs that are drawn (`played`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from fzero.base import private, pytree, thread_state
from fzero.base.context import during
from fzero.base.places import Place
from fzero.base.random import seeded
from fzero.base.rebound import rebound, tensors_held
from fzero.base.refusals import first_words
from fzero.comm import divergence
from fzero.comm.axis import Axis
from fzero.comm.playing import playing
from fzero.engine.alike import varies
from fzero.parallel.check import apart, pull_back, ran, reads, watched
from fzero.parallel.declared import Dims, Inputs, Planned
from fzero.parallel.forms import REPLICATED, form_of, set_forms
from fzero.parallel.played import NotFinite, is_proven, need_one_process
from fzero.parallel.types import WHO, AxisTypeError, DryRun, place_of, tensors_in, type_of
from fzero.state.sharded import Sharded
from fzero.table.module_params import hints_of
from fzero.table.placements import Unchecked, checks
from fzero.table.spec import Spec

LARGEST = 1 << 24  # elements of params, of which the computations of all ranks are played
DRAWS = 4  # of params and inputs: of one of which the largest element, say, may lie on the first rank


def check_first_run(step: Spec, params: Sharded, inputs: Sequence[object]) -> bool | Unchecked:
    """Refuses a step's function whose maps over the tensor axis are not right, before ranks communicate.

    It is run on shapes alone, but for inputs (of one microbatch) that are not differentiated: masks may be read.

    Returns:
        Whether it reads a tensor's value, on which may depend what it does; or why that is not known: it reads what
        is computed of params, communicates by itself, or is refused for another reason, which its run shows.
    """
    try:
        run = DryRun(frozenset(), check_first_run.__code__, params.axis.tensor)
        return _first_run(step, params, inputs, run)
    except AxisTypeError:
        raise
    except Exception as error:
        of_modules, rows = hints_of(params.structure), params.layout.rows
        cut = {i: row.path for i, row in enumerate(rows) if row.slices is not None and i not in of_modules}
        return Unchecked(cut, f"{place_of(error)} ({first_words(error)})")


def _first_run(step: Spec, params: Sharded, inputs: Sequence[object], run: DryRun) -> bool:
    """Tells whether the function reads a tensor's value."""
    flat = pytree.flatten(tuple(inputs))[0]
    differentiated = {i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and private.is_differentiated(x)}
    captured = {id(x) for x in tensors_held(step.fn) if private.is_wrapper(x) and private.is_differentiated(x)}
    with (
        private.below_transforms(),
        thread_state.without_dispatch_modes(),
        private.under_function_modes(()),
        torch.enable_grad(),
        seeded(0),
        apart(values=True),  # of some inputs
    ):
        # by which a gradient is taken
        fn = rebound(step.fn, lambda x: private.unwrapped(x).detach().requires_grad_() if id(x) in captured else x)
        with thread_state.without_values():
            whole = [torch.empty(row.shape, dtype=row.dtype, device=params.device) for row in params.layout.rows]
            tree = pytree.unflatten(params.structure, whole)
            planned = Planned(step, tree, params.axis)
            over = planned.over
            assert over is not None
            leaves = Inputs(step.fn, (tree, *inputs), {}, "", False, planned, differentiated)
            cut_inputs = getattr(step.fn, "cut_inputs", None)  # those of most are the same on all ranks
            for i, dim in cut_inputs(inputs).items() if cut_inputs else ():
                i += len(planned.rows)
                leaves.leaves[i] = replace(leaves.leaves[i], dims={over.name: dim})
            typed = leaves.typed()
            for row, leaf in zip(planned.rows, pytree.flatten(typed[0])[0], strict=True):
                if row.slices is not None:
                    run.note_sizes(over, row.slices.sizes(over.size))
                    if len(row.slices.parts) > 1:  # no piece, but one of each part
                        set_forms(leaf, {})
        out, outputs, learns = None, None, False
        with watched(run) as watch, divergence.silent():
            try:
                with during(playing, run):  # type: ignore[arg-type]
                    out, forms = ran(fn, leaves, typed, run)
                learns, outputs = forms.reads, planned.outputs(out)
                _need_invariant(outputs, over, run)
                pull_back(outputs, leaves, run)
            except (RuntimeError, ValueError, IndexError) as error:
                if isinstance(error, (AxisTypeError, NotImplementedError)) or reads(error) or not run.guessed:
                    raise
                run.doubts.insert(0, (place_of(error), "of a size that ranks tell each other"))
        if run.doubts:
            pairs = zip(*pytree.named_leaves(out)[:2], strict=True)
            own = [path or "*" for path, x in pairs if isinstance(x, torch.Tensor) and type_of(x).varying]
            if run.unlikely and any(x.requires_grad and type_of(x).varying for x in tensors_in(outputs)):
                raise run.unlikely[0]  # one process has no values like these
            outputs_of: dict[str, Dims] = {path: {over.name: None} for path in own}
            _need_one_process(fn, step, params, leaves, run.doubts[0], outputs_of, over, watch.draws)
        return learns


def _drawn(step: Spec, params: Sharded, seed: int, positive: bool) -> Planned:
    """A step's function on one rank, with params that are drawn; positive ones for a square root of them, say."""
    generator, drawn = torch.Generator("cpu").manual_seed(seed), []
    for row in params.layout.rows:
        x = torch.randn(row.shape, generator=generator, device="cpu") / max(1, *row.shape[-1:]) ** 0.5
        x = x * 8 if seed == 2 else x  # what is cut off above some norm, say, is so once
        drawn.append((x.abs() if positive else x).to(row.dtype))
    return Planned(step, pytree.unflatten(params.structure, drawn), params.axis)


def _other(x: object, seed: int) -> object:
    """Another input, in whose place a later batch may have another: what counts for nothing here may count there.

    That of the first draw is the batch's own, later ones have other floats, then other masks and numbers of Python.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    if isinstance(x, torch.Tensor) and seed and x.numel():
        if x.is_floating_point():
            most = x.abs().nan_to_num(0.0, 0.0, 0.0).max()
            drawn = torch.randn(x.shape, generator=generator, device="cpu") * torch.where(most > 0, most, 1.0)
            return x + drawn.to(x.dtype)
        if x.dtype == torch.bool:
            return torch.rand(x.shape, generator=generator, device="cpu") < 0.5 if seed > 1 else x
        return x + 1 if x.numel() == 1 and seed > 2 and not x.is_complex() else x
    return x * 1.25 + 0.125 if isinstance(x, float) and seed > 2 else x


def _need_one_process(
    fn: Callable[..., object],
    step: Spec,
    params: Sharded,
    inputs: Inputs,
    doubt: tuple[Place, str],
    outputs: Mapping[str, Dims],
    over: Axis,
    draws: bool,
) -> None:
    """Compares by values what types do not know to be that of one process, unless `check` has done so."""
    (place, what), sizes = doubt, {over.name: over.size}
    if sum([math.prod(row.shape) for row in params.layout.rows]) > LARGEST:
        if is_proven(step.fn, over.size):
            return
        raise AxisTypeError(
            f"{WHO}: {place}: no rule says that {what!r} gives there what one process has, and more than {LARGEST:,} "
            "elements of params are too many to compare values. Compare those of a smaller model, before you make the "
            "state: fz.parallel.check(step, small_params, *batch, values=True) proves the function for larger ones.",
            place,
        )
    begin = f"{WHO}: {place}: no rule says that {what!r} gives there what one process has"
    instead = "Put the pieces together first (fz.parallel.sum, gather, all_to_all), or write it as a module."

    def compare(seed: int) -> None:
        for positive in (False, True):
            inputs.planned = _drawn(step, params, seed, positive)
            try:
                return need_one_process(fn, inputs, outputs, sizes, draws)
            except NotFinite:
                if positive:
                    raise

    try:
        for i, each in enumerate(inputs.leaves):
            if isinstance(x := each.leaf, torch.Tensor):
                x = torch.ones(x.shape, dtype=x.dtype, device="cpu") if private.is_wrapper(x) else x.cpu()
                inputs.leaves[i] = replace(each, leaf=x)
        given = inputs.leaves
        for seed in range(DRAWS):
            inputs.leaves = [replace(each, leaf=_other(each.leaf, seed)) for each in given]
            try:
                compare(seed)
            except Exception as error:
                if not seed or isinstance(error, AxisTypeError):
                    raise  # else the function does not take what was drawn
    except AxisTypeError as error:
        raise AxisTypeError(f"{begin}, and it does not. {instead} {error}", place) from None
    except Exception as error:
        raise AxisTypeError(f"{begin}, and values cannot tell: {error} {instead}", place) from error


def _need_invariant(outputs: object, over: Axis, run: DryRun) -> None:
    """Refuses scalars that vary between the ranks of the tensor axis, and copies: derivatives would be added up."""
    for x in tensors_in(outputs):
        own = type_of(x)
        copied = form_of(x, over.name) == REPLICATED and not run.doubts  # a rank's number, say
        if not own.varying or not x.requires_grad or (x.ndim and not copied):
            continue
        source = "" if copied else own.leaf or str(own.source)
        raise AxisTypeError(varies(x, source, over.name, f" (from {own.source})"))


checks.append(check_first_run)
