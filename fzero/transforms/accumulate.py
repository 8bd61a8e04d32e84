"""Gradient accumulation: a batch in several microbatches, with the same numbers."""

from __future__ import annotations

from fzero.base.arguments import need_int
from fzero.table.microbatch import Microbatches, need_in_dims
from fzero.table.spec import S, need_step


def accumulate(step: S, count: int, in_dims: int | tuple[int | None, ...] | None = 0) -> S:
    """Splits every input into `count` microbatches; a scalar loss is their mean, other outputs are concatenated.

    Outputs and aux are put together leaf by leaf. 0-d floating tensors and Python floats are averaged in float32
    (float64 where they are float64): the result, and what a pullback takes as its cotangent, has that dtype. Other 0-d
    tensors, Python ints and bools are stacked as [microbatches]; tensors with dims are concatenated along dim 0. What
    is no tensor and no number stays if it is the same in all microbatches, and is an error otherwise.

    Args:
        step: any step.
        count: microbatches; must divide the split dim of every input.
        in_dims: the dim to split, as in torch.func.vmap: one for all inputs, or a tuple with one per input; None
            passes an input whole.

    Example:
        >>> step = fz.accumulate(fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.sgd(0.1)), 2)
        >>> state = step.init({"w": torch.ones(1)})
        >>> step(state, torch.tensor([[1.0], [3.0]]))[1]["loss"]
        tensor(2.)
    """
    need_step(step, "accumulate")
    need_int(count, "accumulate", "count", "a number of microbatches")
    need_in_dims(in_dims, "accumulate")
    if count < 1:
        raise ValueError(f"accumulate: got count={count}, expected a number of microbatches of at least 1.")
    return step.with_header("microbatches", Microbatches(count, in_dims), f"accumulate({count})")
