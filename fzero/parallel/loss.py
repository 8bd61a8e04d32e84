"""Losses over the ranks of an axis: cross-entropy whose vocabulary is cut, and means whose weights differ by rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fzero.base import private
from fzero.base.ambient import Ambient
from fzero.base.arguments import need_int, need_number, wrong
from fzero.base.context import averaged, means
from fzero.base.node import Op, Tensors, active, apply, first_order
from fzero.base.pytree import is_real
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.parallel import maps
from fzero.parallel.axis import is_averaged, need_axis
from fzero.parallel.forms import need_cut

CHUNK = 1 << 20  # logits that are computed with at once
REDUCTIONS = ("none", "sum", "mean")


def cross_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    ax: Axis | None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cross-entropy of logits whose vocabulary is cut over an axis. The logits are never gathered.

    Ranks send each other three or four numbers per token, in one message, and in the pullback what `fz.parallel.gather`
    does: nothing in a step. 16-bit logits are computed in float32, which is also the dtype of the loss.

    Args:
        logits: [..., this rank's slice of the vocabulary]. Slices are in rank order.
        targets: [...], indices into the whole vocabulary, the same on all ranks.
        ax: an axis, from `fz.parallel.axis`; None if logits are whole.
        ignore_index: targets with this value have a loss of zero, and do not count in the mean.
        label_smoothing: share of each target that is spread over the vocabulary, from 0 to 1.
        reduction: "none" for losses [...], "sum", or "mean" over the targets that are not ignored (NaN if all are).
        sizes: slice sizes of all ranks, if you know them. Otherwise one more message finds them out.

    Returns:
        The loss, the same on all ranks.

    Raises:
        TypeError: an argument of a wrong kind.
        ValueError: shapes do not fit, or a target is outside of the vocabulary. Outside of the CPU such a target gives
            NaN instead.

    Example:
        >>> def rank_main(rank):
        ...     ax = fz.parallel.axis(None, "tp")
        ...     logits = fz.parallel.split(torch.tensor([[1.0, 2.0, 3.0]]), ax, 1)
        ...     return round(fz.parallel.cross_entropy(logits, torch.tensor([2]), ax).item(), 4)
        >>> fz.testing.run_ranks(rank_main, 2)
        [0.4076, 0.4076]
    """
    who = "cross_entropy"
    if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or not logits.ndim:
        raise wrong(f"parallel.{who}", "logits", logits, "a floating tensor [..., this rank's slice of the vocabulary]")
    need_options(ax, ignore_index, label_smoothing, reduction, who)
    need_targets(targets, logits.shape[:-1], who)
    first, vocabulary = slice_of(logits, logits.ndim - 1, ax, sizes, who)
    need_known(targets, vocabulary, ignore_index, who)
    need_cut(ax, who, {logits: logits.ndim - 1})
    parts = statistics(logits, places_of(targets, first, logits.shape[-1]), label_smoothing > 0)
    return joined_loss(parts, targets, ax, vocabulary, ignore_index, label_smoothing, reduction)


def weighted_mean(values: torch.Tensor, weights: torch.Tensor, ax: Axis | None) -> torch.Tensor:
    """The weighted mean over all ranks of an axis: `sum(values * weights) / sum(weights)`.

    Use it for a mean over tokens if ranks have different numbers of tokens; a mean of their means is another number.
    With several axes (`fz.shard_zero3(step, mesh=mesh, axis=("dp", "sp"))`) give all of them as one:
    `fz.parallel.axis(mesh, ("dp", "sp"))`.

    A mean of such means is wrong again. So it is refused in a step with microbatches (`fz.accumulate`, `fz.pipeline`).
    Use `fz.accumulate(step, n, weights=...)` there, with the sum of the weights as a microbatch's weight.

    Args:
        values: floating, such as losses of this rank's tokens. 16-bit values are added in float32.
        weights: of the same shape. Zero leaves a value out, unless that value is not finite.
        ax: an axis, from `fz.parallel.axis`; None takes the mean on this rank.

    Returns:
        The mean, a 0-d tensor, the same on all ranks. NaN if all weights are zero.

    Raises:
        TypeError, ValueError: arguments of a wrong kind, or the step would average several such means.

    Example:
        >>> def rank_main(rank):
        ...     values = torch.tensor([3.0, 2.0, 4.0])[rank:]
        ...     return fz.parallel.weighted_mean(values, torch.ones_like(values), fz.parallel.axis(None, "sp")).item()
        >>> fz.testing.run_ranks(rank_main, 2)
        [3.0, 3.0]
    """
    who = "weighted_mean"
    if not isinstance(values, torch.Tensor) or not values.is_floating_point():
        raise wrong(f"parallel.{who}", "values", values, "a floating tensor")
    if not isinstance(weights, torch.Tensor) or weights.is_complex():
        raise wrong(f"parallel.{who}", "weights", weights, "a tensor of real numbers, True or False")
    if values.shape != weights.shape:
        raise ValueError(
            f"parallel.{who}: got values of shape {tuple(values.shape)} and weights of shape {tuple(weights.shape)}, "
            "expected the same shape. Expand the weights, e.g. weights.expand_as(values)."
        )
    if ax is not None:
        need_axis(ax, who)
    _need_one_mean(ax)
    need_cut(ax, who, {values: None, weights: None})
    values, weights = values.to(wide(values.dtype)), weights.to(wide(values.dtype))
    sums = torch.stack([(values * weights).sum(), weights.sum()])
    total, count = maps.sum(sums, ax) if ax is not None else sums
    if means.get()[0]:
        return total / count
    nothing = count == 0  # which has no weight in the step's mean: it is NaN, but its derivative is zero
    return (total / count.masked_fill(nothing, 1.0)).masked_fill(nothing, float("nan"))


def _need_one_mean(ax: Axis | None) -> None:
    """Refuses a mean of which the running step takes a mean: over microbatches, or over ranks that it is not over."""
    several, over_ranks = means.get()
    given = () if ax is None else ax.members
    ranks = next((each.members for each in averaged.get() if not {*given}.issuperset(each.members)), None)
    if several > 1:
        what = f"in a step of {several} microbatches, over whose means it takes a mean"
    elif over_ranks and ranks is not None:
        over = "no axis" if ax is None else f"axis {ax.name!r} of ranks {list(given)}"
        what = f"over {over} in a step that takes means over ranks {list(ranks)}"
    else:
        return
    wider = several < 2 and (ax is None or is_averaged(ax))  # an axis is over ranks of means or over others, not both
    raise ValueError(
        f"parallel.weighted_mean: got a call {what}. A mean of such means is not the mean over the batch, if weights "
        "differ. Give the weight of a microbatch, fz.accumulate(step, n, weights=...) or fz.pipeline(..., "
        "weights=...), such as lambda x, y: (y >= 0).sum()"
        + (", or give all axes that the step averages over: fz.parallel.axis(mesh, (...))." if wider else ".")
    )


# ---- the parts that ranks send each other


def statistics(logits: torch.Tensor, places: torch.Tensor, smooth: bool) -> torch.Tensor:
    """What a rank's slice of the vocabulary contributes: [3 or 4, ...], in float32 at least.

    The largest logit; the sum of the exponentials, of what they lie below that; the logit at `places`; and with
    `smooth` the sum of the logits. The largest is a constant to derivatives, as it cancels.

    Args:
        places: [...], within this slice; -1 where the target is elsewhere.
    """
    op = _Statistics(smooth, logits.device.type)
    return apply(op, active((logits, places)), logits, places)[0]


def joined_loss(
    parts: torch.Tensor,
    targets: torch.Tensor,
    ax: Axis | None,
    vocabulary: int,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> torch.Tensor:
    """The loss of what all ranks contribute."""
    ranks = maps.gather(parts[None], ax, 0, [1] * ax.size) if ax is not None else parts[None]
    tops = ranks[:, 0].detach()
    top = tops.amax(0)
    normalizer = top + (ranks[:, 1] * (tops - top).exp()).sum(0).log()
    kept = targets != ignore_index
    known = (targets >= 0) & (targets < vocabulary)
    loss = normalizer - (1 - label_smoothing) * ranks[:, 2].sum(0)
    if label_smoothing > 0:
        loss = loss - label_smoothing / vocabulary * ranks[:, 3].sum(0)
    loss = loss.masked_fill(~known, float("nan")).masked_fill(~kept, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def places_of(targets: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """The places of targets within a slice of `count` that begins at `first`; -1 elsewhere."""
    places = targets - first
    return places.masked_fill((places < 0) | (places >= count), -1)


class _Statistics(Op):
    """The contributions, some rows at a time, forward and back: of the logits' size only their cotangent is made."""

    name = "parallel.cross_entropy"

    def __init__(self, smooth: bool, device: str) -> None:
        super().__init__(lambda logits, places: (_contributions(logits, places, smooth),), None, Ambient(device))
        self._smooth = smooth

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        logits, places = tensors
        rows, at = _as_rows(logits), places.reshape(-1)
        parts = torch.cat([_contributions(rows[chunk], at[chunk], self._smooth) for chunk in _chunks(rows)], 1)
        return (parts.view(len(parts), *places.shape),)

    def transposed(self, count: int, wanted: Sequence[int], real: Sequence[int]) -> Op:
        general = super().transposed(count, wanted, real)

        def fn(*args: torch.Tensor) -> Tensors:
            if not first_order():
                return general.fn(*args)
            logits, places, cotangents = args
            rows, at = _as_rows(logits), places.reshape(-1)
            by = cotangents.reshape(len(cotangents), len(at))
            out = torch.empty_like(rows, memory_format=torch.contiguous_format)
            for chunk in _chunks(rows):
                out[chunk] = _pulled(rows[chunk], at[chunk], by[:, chunk])
            return (out.view(logits.shape),)

        return self.derived(fn)


def _as_rows(logits: torch.Tensor) -> torch.Tensor:
    return logits.reshape(logits.shape[:-1].numel(), logits.shape[-1])


def _chunks(rows: torch.Tensor) -> list[slice]:
    """Pieces of the rows, of at most CHUNK elements or of one row."""
    count, columns = rows.shape
    step = max(1, CHUNK // max(1, columns))
    return [slice(begin, begin + step) for begin in range(0, max(1, count), step)]


def _contributions(logits: torch.Tensor, places: torch.Tensor, smooth: bool) -> torch.Tensor:
    logits = logits.to(wide(logits.dtype))
    if not logits.shape[-1]:  # a rank may have nothing of a small vocabulary
        nothing = logits.sum(-1)
        return torch.stack([nothing.detach() - torch.inf, *[nothing] * (3 if smooth else 2)])
    top = logits.detach().amax(-1)
    found = logits.gather(-1, places.clamp(min=0)[..., None])[..., 0]
    parts = [top, (logits - _finite(top)[..., None]).exp().sum(-1), found.masked_fill(places < 0, 0.0)]
    return torch.stack([*parts, logits.sum(-1)] if smooth else parts)


def _pulled(logits: torch.Tensor, places: torch.Tensor, cotangents: torch.Tensor) -> torch.Tensor:
    """The cotangent of some rows of logits, from those of their contributions."""
    if not logits.shape[-1]:
        return logits
    logits, (_, of_sum, of_found, *of_smooth) = logits.to(wide(logits.dtype)), cotangents
    out = (logits - _finite(logits.amax(-1))[:, None]).exp_().mul_(of_sum[:, None])
    out.scatter_add_(1, places.clamp(min=0)[:, None], of_found.masked_fill(places < 0, 0.0)[:, None])
    for cotangent in of_smooth:
        out.add_(cotangent[:, None])
    return out


def _finite(top: torch.Tensor) -> torch.Tensor:
    """The largest logits, zero where all are minus infinity: what is taken off before the exponential."""
    return top.masked_fill(top == -torch.inf, 0.0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of another one are added up."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


# ---- arguments


def slice_of(x: torch.Tensor, dim: int, ax: Axis | None, sizes: Sequence[int] | None, who: str) -> tuple[int, int]:
    """The number of the vocabulary that this rank's slice begins with, and the size of all slices together."""
    if ax is None:
        return 0, x.shape[dim]
    starts = pieces.starts(maps._own_sizes(x, ax, dim, sizes, who))
    return starts[ax.rank], starts[-1]


def need_options(ax: object, ignore_index: object, label_smoothing: object, reduction: object, who: str) -> None:
    if ax is not None:
        need_axis(ax, who)
    need_int(ignore_index, f"parallel.{who}", "ignore_index", "the number of a target that is left out")
    smoothing = need_number(label_smoothing, f"parallel.{who}", "label_smoothing", "a number from 0 to 1")
    if not 0 <= float(smoothing) <= 1:
        raise ValueError(f"parallel.{who}: got label_smoothing={smoothing}, expected a number from 0 to 1.")
    if reduction not in REDUCTIONS:
        raise ValueError(
            f"parallel.{who}: got reduction={reduction!r}, expected one of {', '.join(map(repr, REDUCTIONS))}."
        )


def need_targets(targets: object, shape: Sequence[int], who: str) -> None:
    if not isinstance(targets, torch.Tensor) or targets.dtype == torch.bool or is_real(targets):
        raise wrong(f"parallel.{who}", "targets", targets, "a tensor of integers, numbers within the vocabulary")
    if targets.shape != torch.Size(shape):
        raise ValueError(
            f"parallel.{who}: got targets of shape {tuple(targets.shape)}, expected {tuple(shape)}: one for each token."
        )


def need_known(targets: torch.Tensor, vocabulary: int, ignore_index: int, who: str) -> None:
    """Refuses targets that are not in the vocabulary, where their values are here to be looked at."""
    with private.below_transforms():
        plain = private.unwrapped(targets)
        if plain.device.type != "cpu" or private.is_fake(plain) or private.dispatch_modes():
            return
        wrong_ones = plain[((plain < 0) | (plain >= vocabulary)) & (plain != ignore_index)]
        if wrong_ones.numel():
            raise ValueError(
                f"parallel.{who}: got target {int(wrong_ones[0])}, expected numbers from 0 to {vocabulary - 1}, the "
                f"whole vocabulary, or ignore_index={ignore_index}."
            )
