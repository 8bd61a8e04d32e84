"""Offload: state that is not in use lies on the host or a disk (ZeRO-Offload, Ren et al. 2021, arXiv 2101.06840)."""

from __future__ import annotations

from fzero.base.patterns import also
from fzero.stores.memories import Memory, need_memory
from fzero.table.spec import S, need_step


def offload(
    step: S,
    params: Memory | None = None,
    grads: Memory | None = None,
    moments: Memory | None = None,
    activations: Memory | None = None,
    pattern: str = "*",
) -> S:
    """Keeps state in the host's memory or on a disk, and brings it unit by unit when it is needed. No number changes.

    If both params and moments of a leaf are offloaded, its update runs on the host's CPU. Otherwise they pass through
    the device.

    Args:
        step: any step.
        params: where params lie between uses: `"host"`, `fz.Disk(path)`, or None for the device that computes.
        grads: the same for gradients that a pullback returns and that `add_grads` keeps.
        moments: the same for the optimizer's state.
        activations: the same for what the pullback of a unit needs.
        pattern: fnmatch over dotted paths, alternatives separated by `|`: the leaves to offload so. Patterns do not
            override each other. To keep a unit on the device, use patterns that leave it out.

    Returns:
        A new step. You may apply `offload` again, for another pattern or another kind of state.

    Raises:
        ValueError: none of the four is given, or one of them is another word than `"host"`.

    Source:
        Ren et al. 2021, ZeRO-Offload, arXiv 2101.06840.

    Example:
        >>> step = fz.offload(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.adamw(0.1)), moments="host")
        >>> step.rows([("w", (4,), torch.float32)])[0].moments.memory
        'host'
    """
    need_step(step, "offload", pattern)
    given = {"params": params, "grads": grads, "moments": moments, "activations": activations}
    said = {kind: need_memory(memory, "offload", kind) for kind, memory in given.items() if memory is not None}
    if not said:
        raise ValueError("offload: got nothing to offload, expected params=, grads=, moments= or activations=.")
    words = ", ".join(f"{kind}={memory!r}" for kind, memory in said.items())
    for kind, memory in said.items():
        step = step.with_rule(f"{kind} in", memory, f"offload({words}{also(pattern)})", pattern)
    return step
