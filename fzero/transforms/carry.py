"""A carry of the function: running statistics, counters, hidden states, kept in the step's state."""

from __future__ import annotations

import functools

import torch

from fzero.base import pytree
from fzero.base.arguments import wrong
from fzero.base.follow import follows
from fzero.comm.linear import on_data
from fzero.state.items import CARRY
from fzero.state.sharded import Sharded
from fzero.state.train_state import TrainState
from fzero.table.spec import Extra, S, need_step

_WHOLE = (
    *(torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
)


def carry(step: S, value: object) -> S:
    """Gives the function a carry: values that it reads and returns anew, such as running statistics.

    The function becomes `fn(params, carry, *inputs) -> (outputs, new_carry)`. With `has_aux` it returns `((outputs,
    aux), new_carry)`. The carry lies in `state.extra["carry"]`.

    - `step(...)` passes it from microbatch to microbatch, in their order, and keeps the last one. If the update is
      skipped, the old one stays.
    - `step.vjp` returns the new one as aux (`(aux, new_carry)` with `has_aux`). Keep it with
      `state.replace(extra={**state.extra, "carry": new})`.
    - `step.forward` drops the new one.
    - No gradient flows into it.
    - Each rank has its own. `fz.save` and `fz.convert` keep rank 0's, and a save warns if ranks differ. Buffers of
      `fz.functional(..., sync_batch_norm=True)` are the same on all ranks.

    Args:
        step: a step of such a function.
        value: the first carry, which is copied: a pytree of tensors, such as the buffers of `fz.functional(module,
            buffers=True)`.

    Returns:
        A new step.

    Raises:
        TypeError: a leaf of `value` is no tensor of numbers.
        ValueError: the step has a carry already. Put all values into one.

    Example:
        >>> apply, params, buffers = fz.functional(torch.nn.BatchNorm1d(1, momentum=0.5), buffers=True)
        >>> def loss(params, buffers, x):
        ...     out, buffers = apply(params, buffers, x)
        ...     return out.square().mean(), buffers
        >>> step = fz.carry(fz.train_step(loss, fz.sgd(0.1)), buffers)
        >>> state, _ = step(step.init(params), torch.tensor([[1.0], [3.0]]))
        >>> state.extra["carry"]["running_mean"], state.extra["carry"]["num_batches_tracked"]
        (tensor([1.]), tensor(1))
    """
    need_step(step, "carry")
    if step.carries:
        raise ValueError("carry: this step already has a carry; expected it to be said once. Keep one, of all values.")
    for name, x in zip(*pytree.named_leaves(value, lambda x: isinstance(x, (Sharded, TrainState)))[:2], strict=True):
        if not isinstance(x, torch.Tensor):
            raise wrong("carry", f"value {name}" if name else "value", x, "a tensor")
        if not (pytree.is_real(x) or x.dtype in _WHOLE):
            raise wrong(
                "carry", f"value {name}" if name else "value", x, "one of numbers (view its bytes as torch.uint8)"
            )
    own = pytree.map(lambda x: x.clone() if follows(x) else x.detach().clone(), value)
    extra = Extra(CARRY, "carry", functools.partial(_begun, own), kind="a carry")
    return step.with_header("carries", True, "carry").with_state(extra)


def _begun(value: object, params: Sharded) -> object:
    # what all ranks are given alike has the derivatives of the mean over them
    return pytree.map(lambda x: on_data(params.axis, x) if follows(x) else x.clone(), value)
