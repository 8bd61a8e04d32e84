"""The protocol of optimizers: optax's pair (init, update), on any pytree; and what fzero adds to it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fzero.base import pytree
from fzero.formats.bits import Counters
from fzero.formats.formats import Plain, chunks
from fzero.formats.ops import TorchOps
from fzero.formats.stored import Stored
from fzero.kernels.onepass import CHUNK, ON_CUDA, Formula, by_formula, run, write
from fzero.state.sharded import Draw, is_sharded
from fzero.table.needs import need_rate
from fzero.table.optimizer import GradientTransformation, Schedule


def rate(lr: float | Schedule, count: int) -> float:
    """The learning rate of the update after `count` applied ones."""
    now = lr(count) if callable(lr) else lr
    if isinstance(now, torch.Tensor):
        need_rate(now, "the optimizer")  # a schedule may make one too
    return float(now)


def math_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype that an update computes in: float64 where any state is, otherwise float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def values(tree: Any) -> Any:
    """A tree of values to compute with: a step's own decoded, without its scale, in float32 or float64."""
    if not is_sharded(tree):
        return tree

    def one(x: torch.Tensor) -> torch.Tensor:
        x = x.to(math_dtype(x.dtype))
        return x / tree.scale if tree.scale != 1.0 else x

    return tree.with_buffers({key: one(x) for key, x in tree.locals().items()}, 1.0)


def elementwise(
    formula: Formula,
    hyper: Sequence[float],
    params: Any,
    grads: Any,
    *moments: object,
    kernel: Callable[..., None] | None = None,
    generated: bool = False,
) -> None:
    """Writes an optimizer's update of every buffer, in one pass, in float32 or float64.

    Args:
        formula: `formula(o, h, p, g, *moments) -> (p, *moments)` over the operations of `fzero/formats/ops.py`; h[0]
            multiplies the gradient.
        hyper: the numbers h from h[1] on.
        params, grads, moments: trees of a step, or of tensors.
        kernel: `kernel(p, g, *moments)`, the same in place, where all moments are in the dtype that is computed in.
        generated: whether the formula is preferred to it where a kernel can be generated, also without a compiler.
    """
    for unit in _units(params, grads, moments):
        dtype = math_dtype(unit.params.dtype, unit.grads.dtype, *(m.dtype for m in unit.moments))
        # torch's own kernel, and what must have its bits: params that are float32 in two halves
        simple = unit.grads.dtype == dtype and all(m.plain and m.dtype == dtype for m in unit.moments)
        ours = generated and unit.counters is not None and by_formula(unit.grads.device, dtype)
        if kernel is not None and simple and unit.factor == 1.0 and not ours:
            _in_chunks(kernel, unit, dtype)
        elif unit.counters is None:
            own = [unit.params.parts[0], *[m.parts[0] for m in unit.moments]]
            h = [torch.tensor(x, dtype=dtype) for x in (unit.factor, *hyper)]
            value, *rest = [x.to(dtype) for x in own]
            new = formula(TorchOps, h, value, unit.grads.to(dtype), *[m.__mul__ for m in rest])
            for target, value in zip(own, new, strict=True):
                target.copy_(value)
        else:
            own = (unit.params, unit.grads, unit.moments)
            run(formula, (unit.factor, *hyper), *own, unit.counters, dtype, unit.compiles)


class _Unit(NamedTuple):
    """One buffer's part in an update; a tensor of no step has no counters."""

    params: Stored
    grads: torch.Tensor
    moments: list[Stored]
    factor: float
    counters: Counters | None
    compiles: bool = False


def _units(params: Any, grads: Any, moments: Sequence[Any]) -> Iterator[_Unit]:
    if not is_sharded(params):
        columns = [pytree.leaves(tree) for tree in (params, grads, *moments)]
        for p, g, *rest in zip(*columns, strict=True):
            yield _Unit(_as_stored(p), g, [_as_stored(m) for m in rest], 1.0, None)
        return
    for key in params.keys:
        own = [params.stored(key), *[tree.stored(key) for tree in moments]]
        draw = params.draw or Draw(0, 0)
        rounds = any(stored.format.rounds for stored in own)
        counters = draw.counters(params.layout, key, params.rank_of(key)) if rounds else Counters()
        yield _Unit(own[0], grads.local(key), own[1:], 1.0 / grads.scale, counters, key.unit in draw.compiled)


def _as_stored(tensor: torch.Tensor) -> Stored:
    return Stored(Plain(tensor.dtype), (tensor,))


def _in_chunks(kernel: Callable[..., None], unit: _Unit, dtype: torch.dtype) -> None:
    """The kernel on whole buffers where they are as it wants them, otherwise on what stays in the cache."""
    p, g, moments = unit.params, unit.grads, [m.parts[0] for m in unit.moments]
    if p.plain and p.dtype == dtype:
        kernel(p.parts[0], g, *moments)
        return
    if unit.counters is None:
        p, g, moments = _as_stored(p.parts[0].view(-1)), g.reshape(-1), [m.view(-1) for m in moments]
    chunk = CHUNK if g.device.type == "cpu" else ON_CUDA
    for start, stop in chunks(g, chunk):
        stored = p.cut(start, stop)
        # what is written in place here must not be the stored tensor, unless it is that
        value = stored.to(dtype)
        kernel(value, g[start:stop], *[m[start:stop] for m in moments])
        if value is not stored.parts[0]:
            write(stored, value, (unit.counters or Counters()).blocks(value.device, start, stop))


def call_update(
    member: GradientTransformation, updates: object, state: Any, params: Any, extra: Mapping[str, Any]
) -> Any:
    """`member.update` with those keywords that it takes; optax-shaped members of the user take none."""
    if not member.scales:
        updates, params = values(updates), values(params)
        state = pytree.map(values, state, is_leaf=is_sharded)
    known, takes_all = _keywords(member.update)
    taken = extra if takes_all else {name: value for name, value in extra.items() if name in known}
    return member.update(updates, state, params, **taken)


@functools.lru_cache(maxsize=256)
def _keywords(fn: Callable[..., object]) -> tuple[tuple[str, ...], bool]:
    """The names of a function's parameters, and whether it takes any keyword; a fused update asks for every group."""
    known = inspect.signature(fn).parameters
    return tuple(known), any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())


def call_fused(member: GradientTransformation, params: Any, grads: Any, state: Any, extra: Mapping[str, Any]) -> Any:
    """`member.fused`, with keywords where it takes them."""
    assert member.fused is not None
    if _keywords(member.fused)[1]:
        return member.fused(params, grads, state, **extra)  # type: ignore[call-arg]
    return member.fused(params, grads, state)
