"""Long sequences tile by tile: a function of each position, or the logits and the loss, of which one tile lives."""

from __future__ import annotations

import contextlib
import copy as copies
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.base import private, pytree, texts
from fzero.base.ambient import Ambient
from fzero.base.arguments import need_int, wrong
from fzero.base.node import Op, Tensors, active, apply, refuse_foreign_leaves
from fzero.base.random import current_stream, seeded
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.engine.dispatch import call_unit
from fzero.parallel import loss as losses
from fzero.parallel import watched
from fzero.parallel.axis import need_dim
from fzero.parallel.forms import need_cut
from fzero.parallel.maps import shared
from fzero.parallel.types import running

Fn = Callable[..., Any]
Region = Callable[[], contextlib.AbstractContextManager[object]]


def tiled(fn: Fn, x: Any, *args: Any, tiles: int, dim: int = 1) -> Any:
    """Runs `fn(x, *args)` tile by tile along a dim, so that intermediates of only one tile exist at a time.

    For functions of each position by itself, such as an MLP over a long sequence. The pullback computes each tile
    again, with the same random numbers (torch's default generators).

    Args:
        fn: returns a pytree of tensors that are as long in `dim` as x. Give it what you differentiate as an argument;
            it may not close over it. Give a module its params. A module of `fz.functional` may be part of a unit, not a
            unit itself.
        x: a tensor, or a pytree of tensors of one size in `dim`.
        args: params and anything else that every tile needs whole.
        tiles: number of tiles, as equal as possible.
        dim: of all tensors in x and in the result.

    Returns:
        The results of the tiles, concatenated along `dim`.

    Raises:
        TypeError: arguments, or what fn returns, are of a wrong kind.
        ValueError: sizes differ, or fn closes over a tensor that is differentiated.

    Example:
        >>> mlp = lambda x, p: torch.relu(x @ p["up"]) @ p["down"]
        >>> params = {"up": torch.ones(2, 8), "down": torch.ones(8, 2)}
        >>> fz.parallel.tiled(mlp, torch.ones(1, 3, 2), params, tiles=2, dim=1)
        tensor([[[16., 16.],
                 [16., 16.],
                 [16., 16.]]])
    """
    if isinstance(fn, torch.nn.Module):
        fn, args = functools.partial(_call_module, fn, len(args)), (*args, dict(fn.named_parameters()))
    if not callable(fn):
        raise wrong("parallel.tiled", "fn", fn, "a function fn(x, *args)")
    tiles = need_int(tiles, "parallel.tiled", "tiles", "a number of tiles", least=1)
    dim = need_int(dim, "parallel.tiled", "dim", "a dim of the tensors")
    watched.need_whole(tiled, x, *args)
    if running.get() is not None:  # a dry run, which looks at operations
        return fn(x, *args)
    return call_unit(_tiled, (fn, tiles, dim, x, *args), {})


def tiled_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    ax: Axis | None = None,
    *,
    tiles: int,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Cross-entropy of `hidden @ weight.T + bias`, tile by tile: the logits of only one tile exist at a time.

    The vocabulary may be cut over an axis; then it equals `fz.parallel.cross_entropy` of
    `copy(hidden) @ weight.T + bias`.

    Args:
        hidden: [..., width], the same on all ranks of the axis.
        weight: [this rank's slice of the vocabulary, width], of a head or an embedding.
        targets: [...], indices into the whole vocabulary, the same on all ranks.
        ax: an axis, from `fz.parallel.axis`, that cuts the vocabulary in rank order; None if the weight is whole.
        tiles: number of tiles of the tokens, as equal as possible.
        bias: [this rank's slice of the vocabulary].
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
        >>> hidden, weight = torch.eye(3), torch.eye(3)
        >>> fz.parallel.tiled_cross_entropy(hidden, weight, torch.arange(3), tiles=2)
        tensor(0.5514)
    """
    who = "tiled_cross_entropy"
    _need_linear(hidden, weight, bias, who)
    losses.need_options(ax, ignore_index, label_smoothing, reduction, who)
    losses.need_targets(targets, hidden.shape[:-1], who)
    first, vocabulary = losses.slice_of(weight, 0, ax, sizes, who)
    losses.need_known(targets, vocabulary, ignore_index, who)
    hidden = hidden if ax is None else shared(hidden, ax)
    need_cut(ax, who, {weight: 0} if bias is None else {weight: 0, bias: 0})
    rows = hidden.flatten(0, -2) if hidden.ndim > 1 else hidden[None]
    places = losses.places_of(targets, first, weight.shape[0]).reshape(-1)
    fn = functools.partial(_statistics, label_smoothing > 0)
    parts = tiled(fn, (rows, places), weight, bias, tiles=tiles, dim=0)
    parts = parts.t().unflatten(1, targets.shape) if targets.ndim else parts[0]
    return losses.joined_loss(parts, targets, ax, vocabulary, ignore_index, label_smoothing, reduction)


def _statistics(
    smooth: bool, own: tuple[torch.Tensor, torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    rows, places = own
    return losses.statistics(torch.nn.functional.linear(rows, weight, bias), places, smooth).t()


def _call_module(module: torch.nn.Module, count: int, x: object, *args: Any) -> object:
    return torch.func.functional_call(module, args[count], (x, *args[:count]))


def _tiled(fn: Fn, tiles: int, dim: int, x: object, *args: object) -> Any:
    leaves, spec = pytree.flatten((x, args))
    tensors = [place for place, leaf in enumerate(leaves) if pytree.is_tensor(leaf)]
    count = len(pytree.flatten(x)[0])
    cut = [place for place in tensors if place < count]
    sizes = _cut_sizes([leaves[place] for place in cut], tiles, dim)
    own = {place: leaves[place].split(sizes, dim) for place in cut}
    results: list[list[torch.Tensor]] = []
    form: dict[str, pytree.Spec] = {}

    def run(*given: torch.Tensor) -> Tensors:
        new = list(leaves)
        for place, tensor in zip(tensors, given, strict=True):
            new[place] = tensor
        first, others = pytree.unflatten(spec, new)
        out, form["of results"] = pytree.flatten(fn(first, *others))
        for leaf in out:
            if not isinstance(leaf, torch.Tensor):
                raise wrong("parallel.tiled", "a result of fn with", leaf, "a pytree of tensors")
        return tuple(out)

    for number, size in enumerate(sizes):
        given = [own[place][number] if place in own else leaves[place] for place in tensors]
        op = _Tile(run, given[0].device.type)
        results.append(list(apply(op, active(given), *given)))
        _need_sizes(results[-1], size, dim)
    return pytree.unflatten(form["of results"], [torch.cat(parts, dim) for parts in zip(*results, strict=True)])


class _Tile(Op):
    """One tile: it keeps its inputs alone and runs again to pull back, with the random numbers of its first run."""

    name = "parallel.tiled"

    def __init__(self, fn: Callable[..., Tensors], device: str) -> None:
        again, runs = _from_here(device), itertools.count()

        def drawing(*tensors: torch.Tensor) -> Tensors:
            with again() if next(runs) else contextlib.nullcontext():
                return fn(*tensors)

        super().__init__(drawing, None, Ambient(device))
        self._looks = torch.is_grad_enabled()

    def run(self, tensors: Tensors, wanted: Sequence[int]) -> Tensors:
        """The graph of the first run, which ends with it, shows what is differentiated and was not given."""
        looks, self._looks = self._looks, False  # so that what is derived of it then does not
        if not looks:
            return self.replay(*tensors)
        given = [x.detach().requires_grad_(place in wanted) for place, x in enumerate(tensors)]
        with torch.enable_grad(), private.without_dead_wrappers():
            try:
                out = self.replay(*given)
            except RuntimeError as error:
                if not texts.says(error, texts.NO_MEMORY, texts.NO_STORAGE):
                    raise
                raise ValueError(_closed_over("a tensor")) from error
        refuse_foreign_leaves(out, given, text=lambda leaf: _closed_over(f"a tensor of shape {tuple(leaf.shape)}"))
        return tuple([x.detach() for x in out])

    def derived(self, fn: Callable[..., Tensors]) -> Op:
        op = copies.copy(self)
        op.fn, op.node, op.unused = fn, None, ()
        return op


def _closed_over(what: str) -> str:
    return (
        f"parallel.tiled: fn closes over {what} that is being differentiated or mapped over; its derivative would be "
        "lost. Pass it to tiled behind x: fz.parallel.tiled(fn, x, params, tiles=...); or detach() it."
    )


def _from_here(device: str) -> Region:
    """Regions that draw the random numbers that are drawn from here on."""
    stream = current_stream()
    if stream is not None:
        return stream.here()
    default = {torch.device("cpu"): torch.default_generator}
    if device == "cuda":
        at = torch.cuda.current_device()
        default[torch.device("cuda", at)] = torch.cuda.default_generators[at]
    return functools.partial(seeded, 0, {where: generator.get_state() for where, generator in default.items()})


# ---- arguments and results


def _need_linear(hidden: object, weight: object, bias: object, who: str) -> None:
    shapes: list[torch.Size] = []
    for name, value in {"hidden": hidden, "weight": weight, **({"bias": bias} if bias is not None else {})}.items():
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            raise wrong(f"parallel.{who}", name, value, "a floating tensor")
        shapes.append(value.shape)
    (own, of_weight, *of_bias) = shapes
    if len(of_weight) != 2 or not own or own[-1] != of_weight[1] or of_bias not in ([], [of_weight[:1]]):
        raise ValueError(
            f"parallel.{who}: got hidden, weight{' and bias' if of_bias else ''} of shapes "
            f"{', '.join(str(tuple(shape)) for shape in shapes)}, expected [..., width], [vocabulary, width] and, if "
            "there is a bias, [vocabulary]."
        )


def _cut_sizes(tensors: Sequence[torch.Tensor], tiles: int, dim: int) -> list[int]:
    """The sizes of the tiles, of which none is empty where there is anything."""
    if not tensors:
        raise TypeError(
            "parallel.tiled: got x without tensors, expected a tensor or a pytree of tensors, which are cut."
        )
    sizes = [x.shape[need_dim(dim, x.ndim, "tiled")] for x in tensors]
    if len(set(sizes)) > 1:
        raise ValueError(
            f"parallel.tiled: got tensors of shapes {[tuple(x.shape) for x in tensors]} in x, expected one size in "
            f"dim {dim}. Give what every tile needs whole as an argument after x."
        )
    return [size for size in pieces.balanced(sizes[0], tiles) if size] or [0]


def _need_sizes(results: Sequence[torch.Tensor], size: int, dim: int) -> None:
    for x in results:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != size:
            raise ValueError(
                f"parallel.tiled: got a result of shape {tuple(x.shape)} from a tile of size {size}, expected that "
                f"size in dim {dim}, along which results are joined. Reduce what tiled returns, not within fn."
            )
