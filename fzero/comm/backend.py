"""The one place that calls torch.distributed: what a group is, and moving bytes in it by the quickest way it has.

On gloo, point to point beats its collectives twice over, and a message has a tag, which carries the unit's identity;
where all ranks are processes of one machine, they share memory instead. NCCL's own collectives are right as they are.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

# Its default arguments are the default group as of its import, which torch.func does in its first pullback: the group
# then outlives destroy_process_group, and its threads now and then abort the process as it ends.
import torch.distributed.nn.functional

from fzero.comm import same_host
from fzero.comm.hazards import in_flight

Group = dist.ProcessGroup
Mesh = dist.DeviceMesh
Store = dist.Store
# the namespaces of torch's operators that communicate, and the module of its functions
COLLECTIVES = frozenset({"c10d", "_c10d_functional", "_c10d_functional_autograd", "torch.distributed.distributed_c10d"})


def initialized() -> bool:
    return dist.is_initialized()


def world() -> Group | None:
    return dist.group.WORLD


def kind_of(group: Group) -> str:
    """The backend that moves a group's tensors: of a group for several kinds of devices, that of the one in use."""
    kind = _kinds.get(group)
    if kind is None:
        kind = dist.get_backend(group)
        if kind not in ("gloo", "nccl", "threaded", "fake"):
            by_device = dist.get_backend_config(group)
            own = "nccl" if "nccl" in by_device and torch.cuda.is_available() else "gloo"
            kind = own if own in by_device else kind
        _kinds[group] = kind
    return kind


_kinds: weakref.WeakKeyDictionary[Group, str] = weakref.WeakKeyDictionary()


def size_of(group: Group | None) -> int:
    return group.size() if group is not None else 1


def rank_in(group: Group | None) -> int:
    return group.rank() if group is not None else 0


def global_rank() -> int:
    return dist.get_rank()


def members(group: Group | None) -> tuple[int, ...]:
    """The global ranks of a group, in group order."""
    return tuple(dist.get_process_group_ranks(group)) if group is not None else ()


def name_of(group: Group) -> str:
    """A name that tells this group from others on all of its ranks."""
    return f"{group.group_name}:{','.join(map(str, members(group)))}"


def groups_of(mesh: Mesh) -> list[Group]:
    """The process groups that this rank is in, one for each axis of a mesh."""
    return mesh.get_all_groups()


def ranks_around(mesh: Mesh) -> int:
    """How many ranks the mesh has that a mesh was taken from; its own, where it was made as it is."""
    root = getattr(mesh, "_get_root_mesh", None)
    return root().size() if root is not None else mesh.size()


def group_over(mesh: Mesh, axes: Sequence[str]) -> Group:
    """The process group of this rank along one axis of a mesh; along several, which every rank makes, once."""
    if len(axes) == 1:
        return mesh.get_group(axes[0])
    return mesh[tuple(axes)]._flatten().get_group()


def axes_in(axis: str | Sequence[str] | None) -> tuple[str, ...]:
    """The names of one mesh axis or of several."""
    return () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)


def need_axes(mesh: Mesh, wanted: Sequence[str], who: str, argument: str = "axis") -> None:
    """Refuses axes that a mesh does not have, or that come in another order than the mesh's."""
    known = mesh.mesh_dim_names or ()
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"{who}: the mesh has no axis {name!r}; its axes are {', '.join(known) or 'unnamed'}. Pass "
                f"{argument}=, or name it in init_device_mesh(..., mesh_dim_names=...)."
            )
    if [*wanted] != sorted(wanted, key=known.index):
        raise ValueError(
            f"{who}: got {argument}={tuple(wanted)}, expected the axes in the mesh's order, {tuple(known)}: the first "
            "is the slowest."
        )


def mesh_of(
    groups: Sequence[Group], device: str, ranks: Sequence[int], shape: Sequence[int], axes: Sequence[str]
) -> Mesh:
    """A mesh of process groups that there are already."""
    tensor = torch.tensor(ranks, device="cpu", dtype=torch.int).reshape(*shape)
    return Mesh.from_group([*groups], device, tensor, mesh_dim_names=tuple(axes))


def store() -> Store:
    """The key-value store of the default process group, which every rank can reach."""
    return dist.distributed_c10d._get_default_store()


def run_id() -> str:
    """What tells this run from others: the same on all ranks of the default process group, where there is one."""
    own = uuid.uuid4().hex
    if not initialized():
        return own
    if store().add("fzero/run/asked", 1) == 1:
        store().set("fzero/run", own)
    return store().get("fzero/run").decode()


def timeout_of(group: Group) -> float:
    """Seconds that a collective of this group may take."""
    device = torch.device("cuda" if kind_of(group) == "nccl" else "cpu")
    try:
        return group._get_backend(device).options._timeout.total_seconds()
    except (AttributeError, RuntimeError):  # the threaded group has no options
        return dist.default_pg_timeout.total_seconds()


# torch >= 2.13 deprecates the older names
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Wait = Callable[[], None]
CHUNK = 1 << 16  # elements that stay in a core's cache while they are added up
_IN_ORDER = 1 << 31  # above the numbers of messages: of what all ranks call in one order


def start_all_gather(full: torch.Tensor, shard: torch.Tensor, group: Group, number: int) -> Wait:
    """Fills `full` with the shards of all ranks, in rank order. The shard may lie in its place already."""
    late = kind_of(group) == "gloo"  # messages find each other by their numbers
    return in_flight(full, shard, lambda full, shard: _gather(full, shard, group, number), late)


def _gather(full: torch.Tensor, shard: torch.Tensor, group: Group, number: int) -> Wait:
    if kind_of(group) == "gloo":
        parts = list(full.chunk(size_of(group)))
        return _start_exchange([shard.contiguous()] * len(parts), parts, group, number)
    work = _all_gather(full, shard, group=group, async_op=True)
    _settle(group)
    return functools.partial(_finish, work, shard)


def _finish(work: dist.Work | None, *sources: torch.Tensor) -> None:
    """Waits for a backend's own collective, whose sources live until then."""
    assert work is not None
    work.wait()


def start_reduce_scatter(full: torch.Tensor, out: torch.Tensor, group: Group, number: int, divisor: int) -> Wait:
    """Fills `out` with this rank's slice of the sum over `divisor`, added up in rank order where that is left to us.

    `full` travels in its own dtype and is summed in that of `out`: what a backend sums itself, it sums as it travels.
    """
    late = kind_of(group) == "gloo"
    return in_flight(out, full, lambda out, full: _scatter(full, out, group, number, divisor), late)


def _scatter(full: torch.Tensor, out: torch.Tensor, group: Group, number: int, divisor: int) -> Wait:
    backend, size, rank = kind_of(group), size_of(group), rank_in(group)
    alike = full.dtype == out.dtype
    if backend not in ("gloo", "threaded") and alike:
        finish = functools.partial(_finish, _reduce_scatter(out, full, group=group, async_op=True), full)

        def divide() -> None:
            finish()
            out.div_(divisor)

        return divide
    parts, arrived = list(full.chunk(size)), done
    # the sum is in rank order, and its first term that comes from elsewhere is received where the sum is to be
    first = (1 if rank == 0 else 0) if alike else -1
    received = [parts[r] if r == rank else torch.empty_like(parts[r]) if r != first else out for r in range(size)]
    if backend == "gloo":
        arrived = _start_exchange(parts, received, group, number)
    elif backend == "threaded":
        received[rank] = torch.empty_like(parts[rank])
        dist.all_to_all(received, parts, group=group)
        _settle(group)
    else:
        everyone = torch.empty_like(full)
        received = list(everyone.chunk(size))
        arrived = functools.partial(_finish, dist.all_to_all_single(everyone, full, group=group, async_op=True), full)
    exact = divisor & (divisor - 1) == 0  # the same as a division, and quicker

    def add() -> None:
        arrived()
        count = CHUNK if out.device.type == "cpu" else max(1, out.numel())
        for total, *terms in zip(*[part.view(-1).split(count) for part in (out, *received)], strict=True):
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
    """Waits for nothing."""


def finish_all(waits: Sequence[Callable[[], object]]) -> None:
    """Calls all of them, also where one fails: what nobody waits for would meet a later message."""
    errors: list[BaseException] = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or the error and this frame would hold each other, and with them all that it went through


def all_reduce(tensor: torch.Tensor, group: Group, op: str = "sum") -> None:
    count = size_of(group)
    if (count == 2 or tensor.numel() < CHUNK) and _near(group, tensor) is not None:
        plain = tensor.resolve_conj().resolve_neg().contiguous()
        terms = [torch.empty_like(plain) for _ in range(count)]
        _start_exchange([plain] * count, terms, group, _IN_ORDER)()
        tensor.copy_(terms[0])
        for term in terms[1:]:
            torch.maximum(tensor, term, out=tensor) if op == "max" else tensor.add_(term)
        return
    dist.all_reduce(tensor, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=group)
    _settle(group)


def adds_here(group: Group) -> bool:
    """Tells whether sums are best added up here, in rank order, of what the ranks send one another."""
    return kind_of(group) in ("gloo", "threaded")


def start_exchange(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: Group, number: int) -> Wait:
    """send[r] goes to rank r, receive[r] comes from it, also this rank's own; the result waits for all of them.

    Args:
        send, receive: contiguous, of any sizes that both sides know.
        number: only messages of the same number meet, in order.
    """
    backend = kind_of(group)
    if backend == "gloo":
        return _start_exchange(send, receive, group, number)
    if backend == "fake":  # one rank that stands for all
        return done
    work = dist.all_to_all(list(receive), list(send), group=group, async_op=backend != "threaded")
    _settle(group)
    return functools.partial(_finish, work, *send) if work is not None else done


def _settle(group: Group) -> None:
    """On threads, whoever leaves a collective last still holds all ranks' tensors, which donation would see."""
    if kind_of(group) == "threaded":
        dist.barrier(group=group)


def broadcast(tensor: torch.Tensor, group: Group) -> None:
    """The first rank's tensor, written into this one; as bytes, as a backend does not know every dtype."""
    own = tensor.resolve_conj().resolve_neg().contiguous()
    dist.broadcast(own.reshape(-1).view(torch.uint8), group=group, group_src=0)
    if own is not tensor:
        tensor.copy_(own)


_neighbours: weakref.WeakKeyDictionary[Group, same_host.Neighbours | None] = weakref.WeakKeyDictionary()
_meeting: weakref.WeakKeyDictionary[Group, threading.Lock] = weakref.WeakKeyDictionary()


def _near(group: Group, tensor: torch.Tensor) -> same_host.Neighbours | None:
    """The other ranks, where all are of this machine, as the tensor is: they find out before their first exchange."""
    if kind_of(group) != "gloo" or tensor.device.type != "cpu":
        return None
    if group not in _neighbours:
        with _meeting.setdefault(group, threading.Lock()):
            if group not in _neighbours:
                tell = functools.partial(_told_by_all, group)
                own = same_host.meet(rank_in(group), size_of(group), tell, timeout_of(group))
                if own is not None:
                    weakref.finalize(group, own.close)
                _neighbours[group] = own
    return _neighbours[group]


def _told_by_all(group: Group, text: str) -> list[str]:
    """The texts of all ranks, through the store: messages of the group may be under way in any order."""
    name, rank = f"fzero/told/{name_of(group)}", rank_in(group)
    number = store().add(f"{name}/{rank}", 1)  # a later group may have the same name
    keys = [f"{name}/{other}/{number}" for other in range(size_of(group))]
    store().set(keys[rank], text)
    until = time.monotonic() + timeout_of(group)
    while not store().check(keys):  # to wait in it would keep other threads of this process from it
        if time.monotonic() > until:
            raise RuntimeError("Timed out waiting for the other ranks of the group.")
        time.sleep(1e-3)
    return [store().get(key).decode() for key in keys]


def _start_exchange(send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], group: Group, number: int) -> Wait:
    """send[r] goes to rank r, receive[r] comes from it; only messages of the same number meet."""
    own = rank_in(group)
    if (near := _near(group, send[own])) is not None:
        wait = near.exchange([x.resolve_conj().resolve_neg() for x in send], receive, number)
    else:
        wait = _started(send, receive, own, group, number)
    if receive[own].data_ptr() != send[own].data_ptr():
        receive[own].copy_(send[own])  # while the others' come
    return wait


def _started(
    send: Sequence[torch.Tensor], receive: Sequence[torch.Tensor], own: int, group: Group, number: int
) -> Wait:
    peers = [rank for rank in range(len(send)) if rank != own]
    # what dist.irecv and dist.isend come down to, which look the group up ten times a message; sent first, as who
    # comes last finds the others ready to receive, and their bytes go out before it asks for its own
    works = [group.send([send[rank]], rank, number) for rank in peers if send[rank].numel()]
    works += [group.recv([receive[rank]], rank, number) for rank in peers if receive[rank].numel()]

    def wait() -> None:
        for work in works:
            work.wait()
        works.clear()

    return wait


def is_fake(group: Group | None) -> bool:
    """Tells whether one rank stands for all of a group, and nothing is sent."""
    return group is not None and kind_of(group) == "fake"


def standing_for_all(group: Group) -> Group:
    """Notes that nothing is sent in a group, of which one rank stands for all."""
    _kinds[group] = "fake"
    return group


def stands_for_all(group: Group) -> bool:
    """Tells whether a group was noted so, also where torch does not know it."""
    return _kinds.get(group) == "fake"


def device_of(group: Group | None, host: bool = False) -> torch.device:
    """The device whose tensors a group sends; the host's CPU if it can, where nothing waits for an accelerator."""
    if group is None or kind_of(group) != "nccl" or (host and "cpu" in dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_strings(text: str, group: Group) -> list[str]:
    """The texts of all ranks of the group, in rank order."""
    texts = [text] * size_of(group)
    if kind_of(group) != "fake":  # one rank that stands for all
        dist.all_gather_object(texts, text, group=group)
    return texts
