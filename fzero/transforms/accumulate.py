"""Gradient accumulation: a batch in several microbatches, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable

from fzero.base.arguments import need_int
from fzero.table.microbatch import Microbatches, need_in_dims, need_weights
from fzero.table.spec import S, need_step


def accumulate(
    step: S,
    count: int,
    in_dims: int | tuple[int | None, ...] | None = 0,
    weights: Callable[..., object] | None = None,
) -> S:
    """Splits every input into `count` microbatches; a scalar loss is their mean, other outputs are concatenated.

    A batch that does not divide is split as equally as it can be (`torch.tensor_split`). The mean is then that over
    examples: a microbatch counts by how many it has; ranks count the same. A loss that is a mean over something else
    than examples, as over tokens, needs `weights`: a mean of such means is another number.

    Outputs and aux are put together leaf by leaf. 0-d floating tensors and Python floats are averaged in float32
    (float64 where they are float64): the result, and what a pullback takes as its cotangent, has that dtype. Other 0-d
    tensors, Python ints and bools are stacked as [microbatches]; tensors with dims are concatenated along dim 0. What
    is no tensor and no number stays if it is the same in all microbatches, and is an error otherwise.

    Args:
        step: any step.
        count: microbatches; 1 with `weights` takes means weighted over ranks alone.
        in_dims: the dim to split, as in torch.func.vmap: one for all inputs, or a tuple with one per input; None
            passes an input whole.
        weights: `weights(*inputs)` gives the weight of a microbatch, a number or 0-d tensor of at least 0: what its
            loss is the mean over, such as the number of its tokens. It is called once for each, before any of them
            runs, outside of any derivative: a weight is a constant, which pullbacks do not go through. Loss and
            gradients are then the weighted means over the microbatches of all ranks, for one more all-reduce of `count`
            numbers a call, so that all ranks call `step.forward`, too. A scalar output of `step.vjp` and `step.forward`
            is this rank's part, whose mean over ranks is the weighted mean. Scalars in aux are weighted means over this
            rank's microbatches. Outputs with dims have no weights: their cotangents count as they are. A microbatch of
            weight 0 runs, and its loss adds nothing, even if it is NaN (a mean over nothing); only where the function
            exchanges values between the ranks of the batch (`fz.parallel`) its values must be finite. If no microbatch
            of any rank has any weight, the update is skipped.

    Raises:
        TypeError, ValueError: a weight that is none, on every rank, or that `torch.func` differentiates. Inputs of
            different sizes that do not divide. A scalar output in 16 bits, where microbatches count differently.

    Example:
        >>> step = fz.accumulate(fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.sgd(0.1)), 2)
        >>> state = step.init({"w": torch.ones(1)})
        >>> step(state, torch.tensor([[1.0], [3.0]]))[1]["loss"]
        tensor(2.)

        The mean over tokens, of which microbatches have different numbers; targets of -100 are none:

        >>> def loss(p, x, y):
        ...     return torch.nn.functional.cross_entropy(x @ p["w"], y)
        >>> step = fz.train_step(loss, fz.sgd(0.1))
        >>> step = fz.accumulate(step, 2, weights=lambda x, y: (y != -100).sum())
        >>> state = step.init({"w": torch.zeros(1, 2)})
        >>> step(state, torch.ones(4, 1), torch.tensor([1, -100, -100, -100]))[1]["loss"]
        tensor(0.6931)
    """
    need_step(step, "accumulate")
    need_int(count, "accumulate", "count", "a number of microbatches")
    need_in_dims(in_dims, "accumulate")
    if count < 1:
        raise ValueError(f"accumulate: got count={count}, expected a number of microbatches of at least 1.")
    need_weights(weights, "accumulate")
    return step.with_header("microbatches", Microbatches(count, in_dims, weights), f"accumulate({count})")
