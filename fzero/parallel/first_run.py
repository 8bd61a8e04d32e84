"""What `fz.parallel.check` finds, by itself, before a step's function runs for the first time under a signature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from fzero.base import collecting, private, pytree, thread_state
from fzero.base.context import during, own_copies
from fzero.base.random import seeded
from fzero.comm import divergence
from fzero.comm.axis import Axis
from fzero.engine.alike import varies
from fzero.parallel.check import pull_back
from fzero.parallel.declared import Inputs
from fzero.parallel.dry import DryRun
from fzero.parallel.forms import REPLICATED, Forms, form_of, is_replicated
from fzero.parallel.planned import Planned
from fzero.parallel.types import AxisTypeError, Watch, running, tensors_in, type_of
from fzero.state.sharded import Sharded
from fzero.table.placements import checks
from fzero.table.spec import Spec


def check_first_run(step: Spec, params: Sharded, inputs: Sequence[object]) -> bool | None:
    """Refuses a step's function whose maps over the tensor axis are not right, before ranks communicate.

    It is run on shapes alone, but for inputs that are not differentiated: masks may be read.

    Args:
        inputs: of one microbatch.

    Returns:
        Whether it reads a tensor's value, on which may depend what it does. None if it cannot be checked, as it reads
        what is computed of params, communicates by itself, or is refused for another reason: it is to be followed in
        its run, which also shows what is wrong with it.

    Raises:
        AxisTypeError: a map is missing or needless. The error names the leaf and the line.
    """
    flat = pytree.flatten(tuple(inputs))[0]
    differentiated = {i for i, x in enumerate(flat) if isinstance(x, torch.Tensor) and private.is_differentiated(x)}
    fakes = thread_state.without_values()
    with (
        private.below_transforms(),
        thread_state.without_dispatch_modes(),
        private.under_function_modes(()),
        torch.enable_grad(),
        seeded(0),
        during(own_copies, {}),
    ):
        try:
            with fakes:
                whole = [torch.empty(row.shape, dtype=row.dtype, device=params.device) for row in params.layout.rows]
            tree = pytree.unflatten(params.structure, whole)
            planned = Planned(step, tree, params.axis)
            over = planned.over
            assert over is not None
            run = DryRun(frozenset(), check_first_run.__code__, over)
            leaves = Inputs(step.fn, (tree, *inputs), {}, "", False, planned, differentiated)
            for i, dim in getattr(step.fn, "cut_inputs", _none)(inputs).items():
                i += len(planned.given)
                leaves.leaves[i] = replace(leaves.leaves[i], dims={over.name: dim})
            with fakes:
                given = leaves.typed()
            forms = Forms(run.where, run.ignored)
            with Watch(run.where, run.ignored, is_replicated), during(running, run), divergence.silent():
                with planned.running(given[0]), collecting.run(), forms:
                    outputs = planned.outputs(step.fn(*given))
                _need_invariant(outputs, over)
                pull_back(outputs, leaves, run)
            return forms.reads
        except AxisTypeError:
            raise
        except Exception:
            return None


def _none(inputs: object) -> dict[int, int]:
    """The inputs of most functions are the same on all ranks of the tensor axis."""
    return {}


def _need_invariant(outputs: object, over: Axis) -> None:
    """Refuses scalars that vary between the ranks of the tensor axis, and copies: derivatives would be added up."""
    for x in tensors_in(outputs):
        own = type_of(x)
        copied = form_of(x, over.name) == REPLICATED
        if not own.varying or not x.requires_grad or (x.ndim and not copied):
            continue
        source = "" if copied else own.leaf or str(own.source)
        raise AxisTypeError(varies(x, source, over.name, f" (from {own.source})"))


checks.append(check_first_run)
