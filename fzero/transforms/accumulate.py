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
    """Gradient accumulation: splits each batch into microbatches, with the numbers of the whole batch.

    Microbatches run one after the other, and one update follows. Their outputs and aux are put together leaf by leaf:

    - 0-d floating tensors and Python floats (a scalar loss): their mean, in float32, or float64 if they are float64.
    - Tensors with dims: concatenated along dim 0.
    - Other 0-d tensors, ints and bools: stacked, as `[microbatches]`.
    - Anything else must be the same in all microbatches, and stays.

    If a batch does not divide, microbatches are as equal as they can be (`torch.tensor_split`), and the mean counts
    each by its examples. Ranks count the same.

    If your loss is a mean over something else than examples, such as tokens, give `weights`. A mean of such means is
    another number.

    With `weights`:

    - Loss and gradients are weighted means over the microbatches of all ranks. This takes one more all-reduce of
      `count` numbers in each call, so all ranks call `step.forward` too.
    - A scalar output of `step.vjp` and `step.forward` is this rank's part: the mean over ranks is the weighted mean.
    - Scalars in aux are weighted means over this rank's microbatches. Cotangents of outputs with dims are not weighted.
    - A microbatch of weight 0 runs and adds nothing, even if its loss is NaN. Only if the function exchanges values
      between ranks (`fz.parallel`) must its values be finite.
    - If all weights are 0, the update is skipped.

    Args:
        step: any step.
        count: the number of microbatches on each rank. 1 with `weights` weighs ranks only.
        in_dims: the dim to split, as in `torch.func.vmap`: one for all inputs, or a tuple with one for each input. None
            passes an input whole.
        weights: `weights(*inputs)` returns the weight of one microbatch, such as its number of tokens: a number or a
            0-d tensor, at least 0. It is called outside of the derivative, once for each microbatch, before any of them
            runs.

    Returns:
        A new step.

    Raises:
        TypeError, ValueError: a weight that is no such number, or that `torch.func` differentiates. Inputs of different
            sizes that do not divide. A scalar output in 16 bits, if microbatches count differently: return it in
            float32.

    Example:
        >>> step = fz.accumulate(fz.train_step(lambda p, x: (p["w"] * x).mean(), fz.sgd(0.1)), 2)
        >>> state = step.init({"w": torch.ones(1)})
        >>> step(state, torch.tensor([[1.0], [3.0]]))[1]["loss"]
        tensor(2.)

        The mean over tokens, if microbatches have different numbers of them (a target of -100 is no token):

        >>> def loss(p, x, y):
        ...     return torch.nn.functional.cross_entropy(x @ p["w"], y)
        >>> step = fz.train_step(loss, fz.sgd(0.1))
        >>> step = fz.accumulate(step, 2, weights=lambda x, y: (y != -100).sum())
        >>> state = step.init({"w": torch.zeros(1, 2)})
        >>> step(state, torch.ones(4, 1), torch.tensor([1, -100, -100, -100]))[1]["loss"]
        tensor(0.6931)
    """
    need_step(step, "accumulate")
    need_int(count, "accumulate", "count", "a number of microbatches", 1)
    need_in_dims(in_dims, "accumulate")
    need_weights(weights, "accumulate")
    return step.with_header("microbatches", Microbatches(count, in_dims, weights), f"accumulate({count})")
