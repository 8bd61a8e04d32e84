"""Attention functions with exact derivatives of any order: values and pullbacks tile by tile, the rest from a formula.

The first derivative backwards keeps what is computed anyway: inputs, output, and one number for each row. Derivatives
of it, and tangents, are those of the plain formula (softmax of all scores), written with the maps of `fz.parallel`.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from fzero.base import private
from fzero.base.ambient import Ambient
from fzero.base.arguments import wrong
from fzero.base.node import Op, Tensors, active, apply, final
from fzero.comm import pieces
from fzero.comm.axis import Axis
from fzero.comm.linear import quick
from fzero.engine.compiled import leave_out
from fzero.parallel import watched
from fzero.parallel.axis import need_axis
from fzero.parallel.forms import need_cut
from fzero.parallel.types import running
from fzero.parallel.visible import Options, options_of, torchs

Shapes = Sequence[Sequence[int]]  # of q, k and v
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Plan(Protocol):
    """How one call is computed. Tensors are q [b, heads, t, d], k and v [b, kv_heads, t, d] of this rank's tokens."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output."""
        ...

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, and logarithms for `pull`, of plain tensors."""
        ...

    def pull(self, of: Three, out: torch.Tensor, logarithms: torch.Tensor, cotangent: torch.Tensor) -> Three:
        """The cotangents of q, k and v, on plain tensors."""
        ...

    def formula(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """The output by operations that every derivative goes through."""
        ...


class Attention:
    """An attention function of tensors [b, heads, t, d]; `fixed` are options that calls need not repeat."""

    name = "attention"

    def __init__(self, **fixed: object) -> None:
        options_of(f"parallel.{self.name}", **fixed)
        self.fixed = torchs(f"parallel.{self.name}", fixed)

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool | None = None,
        **more: object,
    ) -> torch.Tensor:
        """The attention of this rank's tokens.

        Args:
            q: [b, heads, t, d].
            k, v: [b, kv_heads, t, d]; `kv_heads` divides `heads`, whose neighbours share one.
            attn_mask, dropout_p: None and 0.0, where torch's attention has them.
            is_causal: True hides later tokens.
            more: `scale`, `enable_gqa`, `window`, `documents`: see `fz.parallel.attention`.

        Returns:
            [b, heads, t, d].
        """
        return _called(self, q, k, v, {**more, "attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal})

    def places(self, count: int) -> torch.Tensor:
        """Where so many tokens of this rank lie in the whole sequence; all ranks ask."""
        raise NotImplementedError

    def planned(self, shapes: Shapes, dtype: str, given: dict[str, object]) -> Plan:
        """How a call with such tensors is computed, on which the ranks agree."""
        raise NotImplementedError


def floats(who: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Three:
    """The tensors of a call as torch's own attention would take them, of one floating dtype."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor) or not x.is_floating_point():
            raise wrong(who, name, x, "a tensor of floats [b, heads, t, d]")
    q, k, v = _autocast(q), _autocast(k), _autocast(v)
    if len({x.dtype for x in (q, k, v)}) > 1:
        raise TypeError(f"{who}: got dtypes {q.dtype}, {k.dtype} and {v.dtype}, expected one.")
    return q, k, v


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """A tensor as torch's own attention would take it."""
    kind = x.device.type
    if x.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _called(
    attention: Attention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, more: dict[str, object]
) -> torch.Tensor:
    who = f"parallel.{attention.name}"
    with told_if_wrong(getattr(attention, "ax", None), who):
        q, k, v = floats(who, q, k, v)
        more = torchs(who, more)
    plan = attention.planned((q.shape, k.shape, v.shape), str(q.dtype), {**attention.fixed, **more})
    if running.get() is not None:  # a dry run, which looks at the maps
        need_cut(getattr(attention, "ax", None), attention.name, dict.fromkeys((q, k, v), 2))
        return plan.formula(q, k, v)
    return watched.attended(plan.attend, (q, k, v))


leave_out(__name__, "_called")


@contextlib.contextmanager
def told_if_wrong(ax: Axis | None, who: str) -> Iterator[None]:
    """What goes wrong inside on one rank makes the others' `agreed` raise, which would wait for it."""
    try:
        yield
    except (TypeError, ValueError):
        if ax is not None and running.get() is None:
            pieces.told(ax, [0] * _COUNT, f"{who} shapes")
        raise


_COUNT = 20  # numbers that say what a call is


def agreed(
    ax: Axis | None, who: str, shapes: Shapes, dtype: str, given: dict[str, object]
) -> tuple[list[int], Options]:
    """Compares what ranks call an attention function with; the lengths of their pieces, and the options."""
    if ax is not None:
        need_axis(ax, who.removeprefix("parallel."))
    options, failed = None, None
    try:
        options = options_of(who, **given)
    except (TypeError, ValueError) as error:
        failed = error
    told, run = [_numbers(shapes, dtype, options)], running.get()
    if ax is not None and run is None:
        told = pieces.told(ax, told[0], f"{who} shapes")
    if failed is not None:
        raise failed
    every = [tuple(tuple(own[i + 1 : i + 1 + own[i]]) for i in (1, 7, 13)) for own in told]
    for rank, (own, of_rank) in enumerate(zip(told, every, strict=True)):
        by = f"{who}: rank {rank} of axis {ax.name!r} got" if ax is not None and ax.size > 1 else f"{who}: got"
        if not own[0]:
            raise ValueError(f"{by} options that it refuses; its own error says why.")
        need_shapes(of_rank, by, options)
    others = [[(*shape[:2], *shape[3:]) for shape in of_rank] for of_rank in every]  # but for the number of tokens
    for rank, own in enumerate(told):
        if (others[rank], own[-1]) != (others[0], told[0][-1]):
            what = (
                "dtypes or options (is_causal, window, documents, scale, order, chunks) that differ"
                if others[rank] == others[0]
                else f"tensors of shapes {every}"
            )
            raise ValueError(
                f"{who}: got {what} from the ranks of axis {ax.name if ax else ''!r}, expected the same but for the "
                f"number of tokens, dim 2 (rank {rank} differs from rank 0)."
            )
    assert options is not None
    if ax is not None and run is not None:
        return run.sizes(ax, shapes[0][2]), options
    return [q[2] for q, _, _ in every], options


def _numbers(shapes: Shapes, dtype: str, options: Options | None) -> list[int]:
    """A call in numbers: whether options are valid, three shapes of six numbers, and what else must be the same."""
    padded = [[len(shape), *(list(shape) + [0] * 5)[:5]] for shape in shapes]
    return [options is not None, *padded[0], *padded[1], *padded[2], zlib.crc32(f"{dtype} {options}".encode())]


def need_shapes(shapes: Shapes, by: str, options: Options | None) -> None:
    """Refuses shapes that no attention has, or none with such options."""
    for name, shape in zip("qkv", shapes, strict=True):
        if len(shape) != 4:
            raise ValueError(f"{by} {name} of shape {tuple(shape)}, expected [b, heads, t, d].")
    q, k, v = [tuple(shape) for shape in shapes]
    if not (q[0] == k[0] == v[0] and q[2] == k[2] == v[2] and k[1] == v[1] and q[3] == k[3]):
        raise ValueError(
            f"{by} q, k and v of shapes {q}, {k} and {v}, expected the same tokens in all of them, k and v with the "
            "same heads, and q and k with the same d (there is no cache of earlier keys)."
        )
    if q[3] < 1:
        raise ValueError(f"{by} q of shape {q}, expected heads of at least one feature.")
    if q[1] < 1 or k[1] < 1 or q[1] % k[1]:
        raise ValueError(f"{by} {q[1]} heads and {k[1]} KV heads, expected heads that are a multiple of KV heads.")
    if options is not None and options.enable_gqa is False and q[1] != k[1]:
        raise ValueError(
            f"{by} {q[1]} heads, {k[1]} KV heads and enable_gqa=False, expected as many. Say enable_gqa=True."
        )


def attended(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The output by `run`, whose pullback is `pull`, and other derivatives those of `formula`."""
    return _attend(plan, q, k, v)[0]


class _Folding(torch.autograd.Function):
    """`apply(plan, *tensors) -> tensors`; what is mapped over becomes part of the first dim."""

    @classmethod
    def vmap(cls, info: private.Context, in_dims: Sequence[int | None], plan: object, *tensors: torch.Tensor) -> object:  # type: ignore[override]
        size = info.batch_size
        moved = [
            x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            for dim, x in zip(in_dims[1:], tensors, strict=True)
        ]
        outs: Sequence[torch.Tensor] = cls.apply(plan, *[x.flatten(0, 1) for x in moved])  # type: ignore[assignment]
        return tuple(out.unflatten(0, (size, -1)) for out in outs), (0,) * len(outs)


class _Attend(_Folding):
    """`apply(plan, q, k, v)`: the output and the logarithms."""

    @staticmethod
    def forward(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        with private.without_autocast():
            return plan.run(q, k, v)

    @staticmethod
    def setup_context(ctx: private.Context, inputs: Sequence[torch.Tensor], output: Sequence[torch.Tensor]) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: private.Context, cotangent: torch.Tensor, _: object) -> object:  # type: ignore[override]
        q, k, v, out, logarithms = ctx.saved_tensors
        tensors = q, k, v, cotangent, out.detach(), logarithms
        if final():
            return None, *_Pull.forward(ctx.plan, *map(private.unwrapped, tensors))
        return None, *_Pull.apply(ctx.plan, *tensors)

    @staticmethod
    def jvp(ctx: private.Context, _: object, *tangents: torch.Tensor | None) -> object:  # type: ignore[override]
        (out,) = _pushed(functools.partial(_formula, ctx.plan), ctx.saved_tensors, tangents)
        return out, None


_attend = quick(_Attend)


class _Pull(_Folding):
    """`apply(plan, q, k, v, cotangent, out, logarithms)`: the cotangents of q, k and v.

    The last two are functions of the first three, and help to compute; derivatives do not go through them.
    """

    @staticmethod
    def forward(plan: Plan, *tensors: torch.Tensor) -> Three:  # type: ignore[override]
        *of, cotangent, out, logarithms = tensors
        with private.without_autocast():
            return plan.pull((*of,), out, logarithms, cotangent)  # type: ignore[arg-type]

    @staticmethod
    def setup_context(ctx: private.Context, inputs: Sequence[torch.Tensor], output: object) -> None:
        ctx.plan, *tensors = inputs
        ctx.save_for_backward(*tensors[:4])
        ctx.save_for_forward(*tensors[:4])

    @staticmethod
    def backward(ctx: private.Context, *cotangents: torch.Tensor) -> object:  # type: ignore[override]
        _, pull = torch.func.vjp(functools.partial(_pullback, ctx.plan), *ctx.saved_tensors)  # type: ignore[misc]
        return None, *pull(cotangents), None, None

    @staticmethod
    def jvp(ctx: private.Context, _: object, *tangents: torch.Tensor | None) -> object:  # type: ignore[override]
        return _pushed(functools.partial(_pullback, ctx.plan), ctx.saved_tensors, tangents[:4])


def _pushed(
    fn: Callable[..., Tensors], tensors: Sequence[torch.Tensor], tangents: Sequence[torch.Tensor | None]
) -> Tensors:
    """The tangents of a function's outputs, which have derivatives themselves: of torch.func.jvp here none would."""
    op = Op(fn, None, Ambient(tensors[0].device.type)).pushed(len(tensors), range(len(tensors)))
    zeros = [torch.zeros_like(x) if t is None else t for t, x in zip(tangents, tensors, strict=True)]
    arguments = (*tensors, *zeros)
    return apply(op, active(arguments), *arguments)


def _formula(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
    """The output by the formula."""
    return (plan.formula(q, k, v),)


def _pullback(plan: Plan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cotangent: torch.Tensor) -> Three:
    """The cotangents of q, k and v as a function of these and of that of the output, by the formula."""
    return torch.func.vjp(plan.formula, q, k, v)[1](cotangent)
