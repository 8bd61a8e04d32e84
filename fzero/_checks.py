"""What is checked of the values that a step receives, before anything is communicated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fzero import _tree
from fzero._arguments import named, need_step
from fzero._sharded import Sharded
from fzero._state import TrainState

if TYPE_CHECKING:
    from fzero._step import Step


def check_state(step: Step, state: TrainState) -> None:
    need_step(step, "step")
    if not isinstance(state, TrainState):
        raise TypeError(f"step: got a state of type {type(state).__name__}, expected what step.init returned.")
    layout = state.layout
    if state.signature != step.signature:
        theirs, ours = _describe(state.signature), _describe(step.signature)
        raise ValueError(
            f"step: got a state of another step, made with {theirs}; expected one made with {ours}. Use the state "
            "that this step's init returned, or convert it: fz.convert(state, step). (fz.with_fn gives another "
            "function over the same state.)"
        )
    axis, theirs = step.axis(), state.params.axis
    size = axis.size
    if layout.shards != size:
        raise ValueError(
            f"step: got a state cut into {layout.shards} shards (leaf {layout.rows[0].path!r} and others), "
            f"expected {size}, the size of the sharded axis. Make the state with this "
            "step's init on this process group."
        )
    if axis != theirs:
        raise ValueError(
            f"step: got a state (leaf {layout.rows[0].path!r} and others) that lies on {theirs.place}; expected one on "
            f"{axis.place}, the ranks of this step's mesh. Convert it: fz.convert(state, step); or build the step with "
            "the mesh that the state was made with."
        )


def check_optimizer(step: Step, state: TrainState) -> None:
    for group in state.layout.groups.values():
        row = group.row
        ours = step.optimizer.label(row.path) if step.optimizer.label else "optimizer"
        if not row.frozen and row.optimizer != ours:
            raise ValueError(
                f"step: leaf {row.path!r} of the state has moments of {row.optimizer!r}, expected those of "
                f"{ours!r}. Make the state with this step's init, or use the optimizer that it was made with."
            )


def check_grads(step: Step, state: TrainState, grads: Any, argument: str = "grads") -> None:
    expected = "expected the first value that a pullback of this step returned"
    if not isinstance(grads, Sharded):
        raise TypeError(f"{argument}: got {named(grads)}, {expected}.")
    own = {id(x) for x in _tree.leaves((state.params, state.moments))}
    if any(id(x) in own for x in _tree.leaves(grads)):
        raise TypeError(f"{argument}: got the {grads.kind} of the state itself, {expected}.")
    if grads.layout != state.layout or set(grads.keys) != set(state.layout.trainable):
        ours = {row.path: row for row in state.layout.rows}
        other = next((row.path for row in grads.layout.rows if ours.get(row.path) != row), grads.layout.rows[0].path)
        raise ValueError(
            f"{argument}: got grads of another step (leaf {other!r} differs), expected those of a pullback of this "
            f"step over {len(ours)} leaves. Give each component its own grads."
        )
    mine, theirs = state.params.axis, grads.axis
    if mine.identity != theirs.identity:
        raise ValueError(
            f"{argument}: got those of a pullback over another state, of {theirs.who}; expected those of a state that "
            f"descends from the same init as this one, of {mine.who}. Give each component its own grads. To put "
            "other params into this state, use state.replace(params=...)."
        )


def _describe(signature: tuple[Any, ...]) -> str:
    policy, units, scaler, *rules = signature
    sources: list[str] = sorted(rule.source for some in rules for rule in some)
    sources += [scaler] if scaler else []
    return f"[{policy}, units={units}, {', '.join(sources) or 'no rules'}]"


def nothing_to_pull(outputs: Any) -> ValueError:
    """The error for a function that returned nothing that has a cotangent."""
    return ValueError(
        f"step: the function returned {_returned(outputs)}, expected a floating tensor to pull back from: a scalar "
        "loss (0-d), or outputs with a cotangent of their own. Leave .item() and float(...) out of the function."
    )


def split_result(step: Step, result: Any) -> tuple[Any, Any]:
    """(outputs, aux) of what the function returned; aux is None where the step has none."""
    if not step.has_aux:
        return result, None
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, (tuple, list)) else named(result)
        raise TypeError(
            f"step: the function returned {got}: got no pair, expected (outputs, aux), as the step has has_aux=True. "
            "Return both, or leave has_aux out."
        )
    return result[0], result[1]


def scalar_loss(outputs: Any, who: str = "step(state, *inputs)") -> torch.Tensor:
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point():
        return outputs
    raise ValueError(
        f"{who}: the function returned {_returned(outputs)}, expected a scalar loss (a 0-d floating tensor). "
        "Reduce it (.mean()) and leave .item() out, or pass cotangent= for outputs that are not a scalar; has_aux=True "
        "for (loss, aux)."
    )


def _returned(outputs: Any) -> str:
    tensors = [leaf for leaf in _tree.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return named(outputs) + (f" with {named(tensors[0])}" if tensors and tensors[0] is not outputs else "")
