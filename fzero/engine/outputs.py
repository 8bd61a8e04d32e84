"""What a step's function returned: outputs, aux, a loss."""

from __future__ import annotations

import torch

from fzero.base import pytree
from fzero.base.arguments import named
from fzero.table.spec import Spec


def nothing_to_pull(outputs: object) -> ValueError:
    """The error for a function that returned nothing that has a cotangent."""
    return ValueError(
        f"step: the function returned {_returned(outputs)}, expected a floating tensor to pull back from: a scalar "
        "loss (0-d), or outputs with a cotangent of their own. Leave .item() and float(...) out of the function."
    )


def split_result(step: Spec, result: object) -> tuple[object, object]:
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


def scalar_loss(outputs: object, who: str = "step(state, *inputs)") -> torch.Tensor:
    if isinstance(outputs, torch.Tensor) and outputs.ndim == 0 and outputs.is_floating_point():
        return outputs
    raise ValueError(
        f"{who}: the function returned {_returned(outputs)}, expected a scalar loss (a 0-d floating tensor). "
        "Reduce it (.mean()) and leave .item() out, or pass cotangent= for outputs that are not a scalar; has_aux=True "
        "for (loss, aux)."
    )


def _returned(outputs: object) -> str:
    tensors = [leaf for leaf in pytree.leaves(outputs) if isinstance(leaf, torch.Tensor)]
    return named(outputs) + (f" with {named(tensors[0])}" if tensors and tensors[0] is not outputs else "")
