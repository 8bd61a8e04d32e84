"""Collectives along one mesh axis, and the maps of a buffer that are differentiable through them.

The one place that calls torch.distributed. Gathering a shard and reduce-scattering a cotangent are maps of the
*mean* inner product over ranks, so that each is the other's transpose (ZeRO, Rajbhandari et al. 2020, section 5).
"""

from __future__ import annotations

import contextlib
import contextvars
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

_checked: contextvars.ContextVar[bool] = contextvars.ContextVar("fzero_checked_collectives", default=False)
_listeners: contextvars.ContextVar[tuple[list[Any], ...]] = contextvars.ContextVar("fzero_listeners", default=())


@contextlib.contextmanager
def checked_collectives(enabled: bool = True) -> Iterator[None]:
    """Sends what is about to be communicated ahead of every collective, so that ranks that diverge get an error.

    Costs one small message a collective. Inside, every rank raises `RuntimeError` where ranks call different units.

    Example:
        >>> with fz.testing.checked_collectives():
        ...     pass
    """
    token = _checked.set(enabled)
    try:
        yield
    finally:
        _checked.reset(token)


@contextlib.contextmanager
def recorded_collectives() -> Iterator[list[tuple[str, str, int]]]:
    """Collects (operation, tag, bytes) of every collective that this thread issues inside."""
    record: list[tuple[str, str, int]] = []
    token = _listeners.set((*_listeners.get(), record))
    try:
        yield record
    finally:
        _listeners.reset(token)


def group_needed(who: str) -> str:
    return (
        f"{who}: there is no process group, and this step is sharded. Start one with "
        "torch.distributed.init_process_group('gloo') under torchrun, run on ranks with fz.testing.run_ranks, "
        "or take the sharding transform out."
    )


class Axis:
    """One mesh axis seen from one rank, and an optional second one over which everything is replicated.

    Opaque to pytrees. `size` 1 communicates nothing.
    """

    def __init__(self, group: Any = None, replicas: Any = None, name: str = "") -> None:
        self.group, self.replicas, self.name = group, replicas, name
        self.size = dist.get_world_size(group) if group is not None else 1
        self.rank = dist.get_rank(group) if group is not None else 0
        self.copies = dist.get_world_size(replicas) if replicas is not None else 1
        self.copy = dist.get_rank(replicas) if replicas is not None else 0

    @staticmethod
    def of(mesh: Any, axis: str, replicate: str | None, who: str) -> Axis:
        """The axis of a mesh, or of the default process group where there is no mesh."""
        if not (dist.is_available() and dist.is_initialized()):
            raise RuntimeError(group_needed(who))
        if mesh is None:
            return Axis(dist.group.WORLD, name=axis)
        return Axis(mesh.get_group(axis), mesh.get_group(replicate) if replicate else None, axis)

    @property
    def ranks(self) -> int:
        """How many ranks hold different data: the size of the mean."""
        return self.size * self.copies

    @property
    def data_rank(self) -> int:
        return self.copy * self.size + self.rank

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and (self.name, self.size, self.copies) == (other.name, other.size, other.copies)

    def __hash__(self) -> int:
        return hash((self.name, self.size, self.copies))

    def __repr__(self) -> str:
        return f"Axis({self.name!r}, rank {self.rank} of {self.size}, copy {self.copy} of {self.copies})"

    def _announce(self, group: Any, operation: str, tag: str, tensor: torch.Tensor) -> None:
        for record in _listeners.get():
            record.append((operation, tag, tensor.numel() * tensor.element_size()))
        if not _checked.get():
            return
        said = f"{operation} of {tag or 'the step'} ({tuple(tensor.shape)}, {tensor.dtype})"
        said_by_all = gather_strings(said, group)
        if len(set(said_by_all)) > 1:
            listing = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(said_by_all))
            raise RuntimeError(
                f"The ranks of axis {self.name!r} have diverged: {listing}. Every rank must call the same units in the "
                "same order; look for a branch that depends on the data or on the rank."
            )

    def gather_into(self, full: torch.Tensor, shard: torch.Tensor, tag: str = "") -> torch.Tensor:
        """`full[numel]` from the shards of all ranks, in rank order."""
        own = full.chunk(self.size)[self.rank] if self.size > 1 else full
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)
        if self.size > 1:
            self._announce(self.group, "all_gather", tag, shard)
            if dist.get_backend(self.group) == "gloo":
                parts = full.chunk(self.size)
                self._exchange([own] * self.size, list(parts), tag)
            else:
                _all_gather(full, own, self.group)
        return full

    def gather(self, shard: torch.Tensor, tag: str = "") -> torch.Tensor:
        """The full tensor whose slices along dim 0 are the ranks' shards: a new one, also on one rank."""
        return self.gather_into(shard.new_empty((shard.shape[0] * self.size, *shard.shape[1:])), shard, tag)

    def reduce_scatter(self, full: torch.Tensor, tag: str = "") -> torch.Tensor:
        """This rank's slice of the mean over all ranks, summed in rank order; consumes nothing."""
        full = full.contiguous()
        if self.size == 1:
            out = full
        else:
            self._announce(self.group, "reduce_scatter", tag, full)
            if dist.get_backend(self.group) in ("gloo", "threaded"):
                out = self._ordered_reduce_scatter(full, tag)
            else:
                out = full.new_empty((full.shape[0] // self.size, *full.shape[1:]))
                _reduce_scatter(out, full, self.group)
        if self.copies > 1:
            out = out.clone() if self.size == 1 else out
            self._announce(self.replicas, "all_reduce", tag, out)
            dist.all_reduce(out, group=self.replicas)
        return out.div_(self.ranks) if self.ranks > 1 else out

    def _ordered_reduce_scatter(self, full: torch.Tensor, tag: str) -> torch.Tensor:
        parts = list(full.chunk(self.size))
        received = [
            parts[self.rank] if r == self.rank else torch.empty_like(parts[self.rank]) for r in range(self.size)
        ]
        if dist.get_backend(self.group) == "gloo":
            self._exchange(parts, received, tag)
        else:
            received[self.rank] = torch.empty_like(parts[self.rank])
            dist.all_to_all(received, [part.contiguous() for part in parts], group=self.group)
        out = received[0].clone()
        for part in received[1:]:
            out += part
        return out

    def _exchange(self, send: list[torch.Tensor], receive: list[torch.Tensor], tag: str) -> None:
        """send[r] goes to rank r, receive[r] comes from it; the unit's identity travels in the message tag."""
        number = zlib.crc32(tag.encode()) & 0x7FFFFFFF
        peers = [rank for rank in range(self.size) if rank != self.rank]
        try:
            works = [dist.irecv(receive[rank], group_src=rank, group=self.group, tag=number) for rank in peers]
            works += [dist.isend(send[rank], group_dst=rank, group=self.group, tag=number) for rank in peers]
            for work in works:
                assert work is not None
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"Communication of {tag or 'the step'} over axis {self.name!r} failed on rank {self.rank}: another "
                "rank has stopped, or has called other units than this one. Run the step inside "
                f"fz.testing.checked_collectives() to see which. ({error})"
            ) from error

    def sum(self, tensor: torch.Tensor, tag: str = "") -> torch.Tensor:
        """The sum over the sharded axis: replicas hold the same values."""
        if self.size == 1:
            return tensor
        out = tensor.clone()
        self._announce(self.group, "all_reduce", tag, out)
        dist.all_reduce(out, group=self.group)
        return out

    def mean(self, tensor: torch.Tensor, tag: str = "") -> torch.Tensor:
        """The mean over all ranks that hold different data."""
        if self.ranks == 1:
            return tensor
        out = tensor.clone()
        for group, size in ((self.group, self.size), (self.replicas, self.copies)):
            if size > 1:
                self._announce(group, "all_reduce", tag, out)
                dist.all_reduce(out, group=group)
        return out / self.ranks

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's tensor, written into this one."""
        for group, size in ((self.group, self.size), (self.replicas, self.copies)):
            if size > 1:
                dist.broadcast(tensor, group=group, group_src=0)
        return tensor

    def check_same(self, said: str, what: str, advice: str) -> None:
        """Raises on every rank where the ranks do not say the same."""
        for group, size in ((self.group, self.size), (self.replicas, self.copies)):
            if size > 1:
                said_by_all = gather_strings(said, group)
                if len(set(said_by_all)) > 1:
                    other = next(rank for rank, text in enumerate(said_by_all) if text != said_by_all[0])
                    raise ValueError(
                        f"{what} differ between the ranks of axis {self.name!r}: rank 0 has "
                        f"{_first_difference(said_by_all[0], said_by_all[other])}, rank {other} has "
                        f"{_first_difference(said_by_all[other], said_by_all[0])}. {advice}"
                    )


def _first_difference(text: str, other: str) -> str:
    lines, others = text.splitlines(), set(other.splitlines())
    return repr(next((line for line in lines if line not in others), "nothing more"))


def _device_of(group: Any) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def gather_strings(said: str, group: Any) -> list[str]:
    """What every rank of the group says, in rank order."""
    device = _device_of(group)
    data = torch.frombuffer(bytearray(said.encode() or b" "), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    _all_gather(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device), group)
    width = int(lengths.max())
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: data.numel()] = data.to(device)
    everyone = torch.empty(size * width, dtype=torch.uint8, device=device)
    _all_gather(everyone, mine, group)
    rows = everyone.view(size, width).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]


def _all_gather(full: torch.Tensor, shard: torch.Tensor, group: Any) -> None:
    if hasattr(dist, "all_gather_single"):  # torch >= 2.13 deprecates the older name
        dist.all_gather_single(full, shard, group=group)  # type: ignore[attr-defined]
    else:
        dist.all_gather_into_tensor(full, shard, group=group)


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: Any) -> None:
    if hasattr(dist, "reduce_scatter_single"):
        dist.reduce_scatter_single(shard, full, group=group)  # type: ignore[attr-defined]
    else:
        dist.reduce_scatter_tensor(shard, full, group=group)


@dataclass(frozen=True, eq=False)
class Use:
    """How one buffer is used: its dtypes, its axis, and the value at hand where there is one. Opaque to pytrees.

    Attributes:
        local: this rank's shard, where the differentiated tensor only stands for it (grads of another dtype).
        held: the full buffer in compute dtype, where it is at hand (ZeRO-1 and 2).
    """

    tag: str
    axis: Axis
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    local: torch.Tensor | None = None
    held: torch.Tensor | None = None

    def value(self, primal: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The full buffer in compute dtype, and whether it is a new one (that may be freed)."""
        if self.held is not None:
            return self.held, False
        shard = self.local if self.local is not None else primal
        if self.axis.size == 1:
            full = shard.to(self.compute)
            return full, full is not shard
        return self.spread(shard), True

    def spread(self, shard: torch.Tensor) -> torch.Tensor:
        return self.axis.gather(shard.to(self.compute), self.tag)

    def collect(self, full: torch.Tensor) -> torch.Tensor:
        return self.axis.reduce_scatter(full.to(self.reduce), self.tag).to(self.grad)

    def apply(self, primal: torch.Tensor) -> torch.Tensor:
        """The full buffer as a differentiable function of the shard."""
        trivial = self.held is None and self.local is None and self.axis.ranks == 1
        if trivial and self.compute == self.grad == primal.dtype:
            return primal
        return _Value.apply(self, primal)  # type: ignore[return-value]


def _linear(name: str, forward: Any, transposed: Any) -> Any:
    """A Function for a linear map of a buffer along dim 0, which any functorch level may transform."""

    class Map(torch.autograd.Function):
        @staticmethod
        def forward(use: Use, tensor: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            out = forward(use, tensor)
            return out.clone() if out is tensor else out

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.use = inputs[0]

        @staticmethod
        def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
            return None, transposed().apply(ctx.use, cotangent)

        @staticmethod
        def jvp(ctx: Any, _: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(ctx.use, tangent)

        @staticmethod
        def vmap(info: Any, in_dims: Any, use: Use, tensor: torch.Tensor) -> Any:  # type: ignore[override]
            return Map.apply(use, tensor.movedim(in_dims[1], -1).contiguous()), -1

    Map.__name__ = Map.__qualname__ = name
    return Map


_Spread = _linear("Spread", lambda use, shard: use.spread(shard), lambda: _Collect)
_Collect = _linear("Collect", lambda use, full: use.collect(full), lambda: _Spread)


class _Value(torch.autograd.Function):
    """The buffer in use: its value may be at hand, its derivative is that of spreading the shard."""

    @staticmethod
    def forward(use: Use, primal: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        full, _ = use.value(primal)
        return full.view(full.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.use = inputs[0]

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> Any:  # type: ignore[override]
        return None, _Collect.apply(ctx.use, cotangent)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: torch.Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(ctx.use, tangent)

    @staticmethod
    def vmap(info: Any, in_dims: Any, use: Use, primal: torch.Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(use, primal.movedim(in_dims[1], -1).contiguous()), -1
