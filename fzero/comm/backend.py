"""The one place that calls torch.distributed: what a group is, and moving bytes in it by the quickest way it has.

On gloo, point to point beats its collectives twice over, and a message has a tag, which carries the unit's identity;
NCCL's own collectives are right as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

# Its default arguments are the default group as of its import, which torch.func does in its first pullback: the group
# then outlives destroy_process_group, and its threads now and then abort the process as it ends.
import torch.distributed.nn.functional

from fzero.comm.hazards import in_flight

Group = dist.ProcessGroup


def initialized() -> bool:
    return dist.is_available() and dist.is_initialized()


def world() -> Group | None:
    return dist.group.WORLD


def size_of(group: Group | None) -> int:
    return group.size() if group is not None else 1


def rank_in(group: Group | None) -> int:
    return group.rank() if group is not None else 0


def global_rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def members(group: Group) -> list[int]:
    """The global ranks of a group, in group order."""
    return dist.get_process_group_ranks(group)


def name_of(group: Group) -> str:
    """What tells this group from others on all of its ranks."""
    return f"{group.group_name}:{','.join(map(str, members(group)))}"


def store() -> Any:
    """The key-value store of the default process group, which every rank can reach."""
    return dist.distributed_c10d._get_default_store()


def timeout_of(group: Group) -> float:
    """Seconds that a collective of this group may take."""
    try:
        return group._get_backend(_device_of(group)).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # the threaded group has no options
        return dist.default_pg_timeout.total_seconds()


def _device_of(group: Group) -> torch.device:
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


Wait = Callable[[], None]
CHUNK = 1 << 16  # elements that stay in a core's cache while they are added up


def start_all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group, number: int) -> Wait:
    """Fills `full` with the shards of all ranks, in rank order. The shard may lie in its place already."""
    return in_flight(full, shard, lambda full, shard: _gather(full, shard, group, number), _by_number(group))


def _by_number(group: Group) -> bool:
    """Whether messages find each other by their numbers, in whatever order they leave."""
    return dist.get_backend(group) == "gloo"


def _gather(full: torch.Tensor, shard: torch.Tensor, group: Group, number: int) -> Wait:
    backend = dist.get_backend(group)
    if backend == "gloo":
        parts = list(full.chunk(size_of(group)))
        shard = shard.contiguous()
        wait = _start_exchange([shard] * len(parts), parts, group, number)
        own = parts[rank_in(group)]
        if own.data_ptr() != shard.data_ptr():
            own.copy_(shard)  # while the others' come
        return wait
    if backend == "threaded":
        _all_gather(full, shard, group)
        _settle(group)
        return done
    work = _all_gather(full, shard, group, async_op=True)

    def wait() -> None:
        _ = shard  # the input lives until then
        work.wait()

    return wait


def start_reduce_scatter(full: torch.Tensor, out: torch.Tensor, group: Group, number: int, divisor: int) -> Wait:
    """Fills `out` with this rank's slice of the sum over `divisor`, added up in rank order where that is left to us.

    `full` travels in its own dtype and is summed in that of `out`: what a backend sums itself, it sums as it travels.
    """
    return in_flight(out, full, lambda out, full: _scatter(full, out, group, number, divisor), _by_number(group))


def _scatter(full: torch.Tensor, out: torch.Tensor, group: Group, number: int, divisor: int) -> Wait:
    backend, size, rank = dist.get_backend(group), size_of(group), rank_in(group)
    alike = full.dtype == out.dtype
    if backend not in ("gloo", "threaded") and alike:
        work = _reduce_scatter(out, full, group, async_op=True)

        def divide() -> None:
            _ = full  # the input lives until then
            work.wait()
            out.div_(divisor)

        return divide
    parts = list(full.chunk(size))
    # the sum is in rank order, and its first term that comes from elsewhere is received where the sum is to be
    first = (1 if rank == 0 else 0) if alike else -1
    received = [parts[rank] if r == rank else torch.empty_like(parts[r]) if r != first else out for r in range(size)]
    arrived = done
    if backend == "gloo":
        arrived = _start_exchange(parts, received, group, number)
    elif backend == "threaded":
        received[rank] = torch.empty_like(parts[rank])
        dist.all_to_all(received, [part.contiguous() for part in parts], group=group)
        _settle(group)
    else:
        everyone = torch.empty_like(full)
        received = list(everyone.chunk(size))
        arrived = dist.all_to_all_single(everyone, full, group=group, async_op=True).wait  # type: ignore[union-attr]

    exact = divisor & (divisor - 1) == 0  # the same as a division, and quicker

    def add() -> None:
        arrived()
        for total, *terms in zip(*[part.view(-1).split(CHUNK) for part in (out, *received)], strict=True):
            if alike:
                torch.add(terms[0], terms[1], out=total)
            else:
                total.copy_(terms[0]).add_(terms[1])
            for term in terms[2:]:
                total.add_(term)
            total.mul_(1 / divisor) if exact else total.div_(divisor)
        received.clear()

    return add


def done() -> None:
    pass


def all_reduce(tensor: torch.Tensor, group: Group) -> None:
    dist.all_reduce(tensor, group=group)
    _settle(group)


def _settle(group: Group) -> None:
    """On threads, whoever leaves a collective last still holds all ranks' tensors, which donation would see."""
    if dist.get_backend(group) == "threaded":
        dist.barrier(group=group)


def broadcast(tensor: torch.Tensor, group: Group) -> None:
    """The first rank's tensor, written into this one."""
    dist.broadcast(tensor, group=group, group_src=0)


def _start_exchange(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: Group, number: int) -> Wait:
    """send[r] goes to rank r, receive[r] comes from it; only messages of the same number meet."""
    own = rank_in(group)
    peers = [rank for rank in range(len(send)) if rank != own]
    # what dist.irecv and dist.isend come down to, which look the group up ten times a message
    works = [group.recv([receive[rank]], rank, number) for rank in peers]
    works += [group.send([send[rank]], rank, number) for rank in peers]

    def wait() -> None:
        for work in works:
            work.wait()
        works.clear()

    return wait


def gather_strings(said: str, group: Group) -> list[str]:
    """What every rank of the group says, in rank order."""
    if dist.get_backend(group) == "fake":  # one rank that stands for all
        return [said] * size_of(group)
    device = _device_of(group)
    data = torch.frombuffer(bytearray(said.encode() or b" "), dtype=torch.uint8)
    size = size_of(group)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    _all_gather(lengths, torch.tensor([data.numel()], dtype=torch.int64, device=device), group)
    width = int(lengths.max())
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: data.numel()] = data.to(device)
    everyone = torch.empty(size * width, dtype=torch.uint8, device=device)
    _all_gather(everyone, mine, group)
    rows = everyone.view(size, width).cpu()
    return [bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths.tolist(), strict=True)]


def _all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool = False) -> Any:
    # torch >= 2.13 deprecates the older names
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(full, shard, group=group, async_op=async_op)


def _reduce_scatter(shard: torch.Tensor, full: torch.Tensor, group: Group, async_op: bool) -> Any:
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(shard, full, group=group, async_op=async_op)
