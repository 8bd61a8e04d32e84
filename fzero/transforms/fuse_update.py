"""The update inside the pullback (LOMO, Lv et al. 2023, 2306.09782), with clipping, accumulation and loss scaling."""

from __future__ import annotations

from fzero.base.arguments import named
from fzero.table.spec import S, need_step


def fuse_update(step: S, norm: str = "auto") -> S:
    """Updates each unit inside the pullback, as soon as its reduced gradients exist: they never all live at once.

    The numbers are those of the step without it. What differs is how the norm of all gradients becomes known, where
    clipping, a loss scale or another member of the optimizer needs it:

    ========================  ================================  =================  =====================
    norm                      gradients that live               time               numbers
    ========================  ================================  =================  =====================
    "auto", no norm needed    one unit's                        as without         the same (see below)
    "auto", norm needed       one unit's                        one more pullback  the same
    "twice"                   one unit's                        one more pullback  the same
    "held"                    the reduced shards, their dtype   as without         the same
    "8-bit"                   the reduced shards, 1.03 bytes    as without         exact norm; see below
    "auto", norm of a member  as "held"                         as without         the same
    ========================  ================================  =================  =====================

    Where the optimizer needs a norm that is not that of the gradients (of what another member of a chain returned, or
    of a part of a partition), the update waits until all gradients are held, and is applied to all leaves at once.

    In 8 bits an element is off by at most a 64th of itself and 0.2 % of the largest of its 32 neighbours. Where nothing
    needs the norm, a loss that is not finite skips the update, and of a gradient that is not finite only those elements
    are left out; in the other ways the update is skipped, as without.

    Where the pullback runs twice, so do hooks of a backward (`tensor.register_hook`): take "held" where they count.

    A pullback that fails once units have been updated leaves a donated state between two updates; a note on its error
    says so. Without `fz.donate` the state passed in stays as it was.

    `step.vjp` of such a step returns ordinary grads, and `step.update` takes them. With `accumulate` the reduced shards
    of the microbatches are kept, and the last one updates.

    Args:
        step: any step whose optimizer treats every element or leaf by itself: fz.adamw, adam, lion, sgd, muon,
            adafactor, whole, alone or in fz.chain (with fz.clip_by_global_norm, fz.clip_by_value) and fz.partition.
        norm: see above.

    Raises:
        ValueError: an optimizer that wants whole trees; "twice" for a norm that is not that of the gradients; a word
            that is not in the table.

    Example:
        >>> step = fz.fuse_update(fz.train_step(lambda p, x: (p["w"] * x).sum(), fz.sgd(0.1)))
        >>> state, metrics = step(step.init({"w": torch.ones(2)}), torch.ones(2))
        >>> fz.gather(state.params)["w"]
        tensor([0.9000, 0.9000])
    """
    need_step(step, "fuse_update")
    norms = ("auto", "twice", "held", "8-bit")
    if not isinstance(norm, str) or norm not in norms:
        raise ValueError(f"fuse_update(norm=...): got {named(norm)}, expected one of {', '.join(map(repr, norms))}.")
    if step.optimizer.fused is None or not step.optimizer.by_leaf:
        raise ValueError(
            "fuse_update: the optimizer wants whole trees of gradients, or does not say otherwise (by_leaf=True with a "
            "fused form). Use fz.adamw, fz.adam, fz.lion or fz.sgd, alone or in fz.chain and fz.partition; or, of one "
            "that treats each leaf by itself, fz.whole(optimizer), as in "
            "fz.whole(fz.from_torch(torch.optim.NAdam, 1e-3)). Or leave fuse_update out."
        )
    if norm == "twice" and step.optimizer.needs == "all":
        raise ValueError(
            "fuse_update(norm='twice'): pulling back twice gives the norm of the gradients, and the optimizer wants "
            "another one: a clip_by_global_norm comes behind another member of its chain, or within a partition. Say "
            "norm='held', or clip first: fz.chain(fz.clip_by_global_norm(c), ...)."
        )
    return step.with_header("fusion", norm, f"fuse_update(norm={norm!r})")
