"""The update inside the pullback (LOMO, Lv et al. 2023, 2306.09782), with clipping, accumulation and loss scaling."""

from __future__ import annotations

from fzero.base.arguments import named
from fzero.table.spec import S, need_step


def fuse_update(step: S, norm: str = "auto") -> S:
    """Updates each unit inside the pullback, as soon as its gradient is reduced. Gradients never all live at once.

    Numbers are those of the step without it. Clipping, a loss scale and some optimizers need the norm of all gradients
    before the first update. `norm` says how it becomes known:

    ========================  ===========================  =================  =====================
    norm                      gradients alive at once      time               numbers
    ========================  ===========================  =================  =====================
    "auto", no norm needed    one unit's                   as without         the same, but see below
    "auto", norm needed       one unit's                   one more pullback  the same
    "twice"                   one unit's                   one more pullback  the same
    "held"                    this rank's reduced slices   as without         the same
    ========================  ===========================  =================  =====================

    - If the optimizer needs another norm than that of all gradients (behind another member of a chain, or of a part of
      a partition), or is your own and declared elementwise, `"auto"` holds all gradients, as `"held"` does.
    - If nothing needs a norm: a loss that is not finite skips the update. If only a gradient is not finite, just those
      elements are left out. In all other ways the whole update is skipped.
    - With one more pullback, backward hooks (`tensor.register_hook`) run twice. Use `"held"` if that matters.
    - With `fz.accumulate`, reduced slices of the microbatches are kept, and the last microbatch updates.
    - `step.vjp` returns ordinary grads, and `step.update` takes them.
    - With `fz.donate`, a pullback that fails after the first unit's update leaves a state between two updates. The
      error says so.

    Args:
        step: a step.
        norm: `"auto"`, `"twice"` or `"held"`, as above.

    Returns:
        A new step.

    Raises:
        ValueError: another word for `norm`; or `"twice"`, if the norm is not that of all gradients (use `"held"`, or
            clip first in the chain).

    Source:
        LOMO, Lv et al. 2023, arXiv 2306.09782.

    Example:
        >>> step = fz.fuse_update(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> fz.gather(state.params)["w"]
        tensor([0.9000, 0.9000])
    """
    need_step(step, "fuse_update")
    norms = ("auto", "twice", "held")
    if not isinstance(norm, str) or norm not in norms:
        raise ValueError(f"fuse_update(norm=...): got {named(norm)}, expected one of {', '.join(map(repr, norms))}.")
    if norm == "twice" and step.optimizer.needs == "all":
        raise ValueError(
            "fuse_update(norm='twice'): pulling back twice gives the norm of the gradients, and the optimizer wants "
            "another one: a clip_by_global_norm comes behind another member of its chain, or within a partition. Say "
            "norm='held', or clip first: fz.chain(fz.clip_by_global_norm(c), ...)."
        )
    return step.with_header("fusion", norm, f"fuse_update(norm={norm!r})")
