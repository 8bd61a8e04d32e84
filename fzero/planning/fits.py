"""fz.fits: the cheapest memories for a step's state, such that it fits into those of a machine."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from fzero.base.arguments import need_int, wrong
from fzero.planning.bandwidth import Bandwidth, need_bandwidth
from fzero.planning.memories import DISK, MEMORIES
from fzero.planning.plan import Plan, planned, transfers
from fzero.planning.update import Taken
from fzero.stores.disk import Disk, stand_in
from fzero.stores.memories import DEVICE, HOST, Memory
from fzero.table.rows import KINDS
from fzero.table.spec import S, Spec, need_step
from fzero.transforms import offload

# an accelerator behind 16 lanes of PCIe 4, and an NVMe disk
TYPICAL = Bandwidth(host_read=20e9, host_write=20e9, disk_read=3e9, disk_write=2e9)
Placement = Mapping[str, str]


@dataclass(frozen=True)
class Proposal:
    """A placement of state that fits into memory; `fz.fits` returns it.

    Attributes:
        placement: "params", "grads" and "moments", each with "device", "host" or "disk".
        plan: the `fz.Plan` of the step with this placement. `plan.peak` is what fits.
        seconds: time of a step's transfers, at best.
    """

    placement: Placement = field(hash=False)
    plan: Plan
    seconds: float

    def apply(self, step: S, disk: Disk | None = None) -> S:
        """Returns the step with `fz.offload` for this placement.

        Args:
            step: the step that was given to `fz.fits`.
            disk: where state on the disk goes.

        Raises:
            ValueError: the placement uses a disk, and `disk` is None.
        """
        need_step(step, "Proposal.apply")
        if disk is not None and not isinstance(disk, Disk):
            raise wrong("Proposal.apply", "disk", disk, "an fz.Disk(path) or None")
        on_disk = [kind for kind, memory in self.placement.items() if memory == DISK]
        if on_disk and disk is None:
            raise ValueError(
                f"Proposal.apply: got no disk, and {' and '.join(on_disk)} are to lie on one. Give a folder: "
                "apply(step, fz.Disk(path))."
            )
        return _placed(step, self.placement, disk)

    def __str__(self) -> str:
        where = ", ".join(f"{kind} on the {memory}" for kind, memory in self.placement.items())
        return f"{where}; transfers take {self.seconds:.3g} s a step\n{self.plan}"


def fits(
    step: Spec,
    params: object,
    device: int,
    host: int = 0,
    disk: int | None = None,
    world_size: int | None = None,
    bandwidth: Bandwidth | None = None,
) -> Proposal:
    """Finds where params, grads and moments should lie so that a step fits into memory and moves few bytes.

    It plans all 27 placements of the three kinds on device, host and disk. Of those that fit, it takes the one with the
    fastest transfers. Nothing is run or allocated.

    Leave room for activations, which it does not count, and in the host's memory for `fz.Disk(in_flight=...)` bytes.

    Args:
        step: any step that offloads nothing but activations.
        params: the pytree for `init`. Its tensors may be on the meta device.
        device: bytes that each rank may use on the device that computes.
        host: bytes that each rank may use in the host's memory. Leave it at 0 if the device is the CPU.
        disk: bytes that each rank may use on a disk; None without a disk.
        world_size: number of ranks of the sharded axis. By default that of the process group, or 1.
        bandwidth: of `fz.measure_bandwidth`. By default 20 GB/s between device and host, and 3 GB/s from and 2 GB/s to
            the disk (PCIe 4 and NVMe).

    Returns:
        The placement, with its plan. `proposal.apply(step)` makes the step.

    Raises:
        ValueError: nothing fits, with the bytes that are missing; or the step already offloads state.

    Example:
        >>> step = fz.donate(fz.train_step(lambda p, x: sum((x @ w).sum() for w in p), fz.adamw(1e-3), units="*"))
        >>> params = [torch.empty(1000, 1000, device="meta")] * 4
        >>> fz.fits(step, params, device=60_000_000, host=60_000_000).placement
        {'params': 'host', 'grads': 'device', 'moments': 'host'}
    """
    need_step(step, "fits")
    room = {
        DEVICE: need_int(device, "fits", "device", "a number of bytes", least=0),
        HOST: need_int(host, "fits", "host", "a number of bytes", least=0),
        DISK: None if disk is None else need_int(disk, "fits", "disk", "a number of bytes or None", least=0),
    }
    if bandwidth is not None:
        need_bandwidth(bandwidth, "fits")
        if disk is not None and None in (bandwidth.disk_read, bandwidth.disk_write):
            raise ValueError(
                f"fits: got disk={disk} and a bandwidth without disk_read or disk_write; expected both. Measure it: "
                "fz.measure_bandwidth(fz.Disk(path)), or leave the disk out."
            )
    said = next((rule.source for rule in step.rules if rule.column in [f"{kind} in" for kind in KINDS]), None)
    if said is not None:
        raise ValueError(
            f"fits: got a step with {said}, which says where its state lies. Give the step without it."
        )
    speeds, nowhere = bandwidth or TYPICAL, stand_in()
    proposals, updates = list[Proposal](), dict[bool, Taken]()
    for memories in itertools.product(*[[name for name in MEMORIES if room[name] is not None]] * len(KINDS)):
        placement: Placement = dict(zip(KINDS, memories, strict=True))
        own = planned(_placed(step, placement, nowhere), params, world_size, None, 0, None, updates)
        proposals.append(Proposal(placement, own, own.seconds(speeds)))
    fitting = [each for each in proposals if not any(_missing(each.plan, room).values())]
    if not fitting:
        raise _does_not_fit(proposals, room, step.donates)
    costs = [(each.seconds, sum(transfers(each.plan, speeds)), each.plan.host + each.plan.disk) for each in fitting]
    return fitting[costs.index(min(costs))]


def _placed(step: S, placement: Placement, disk: Disk | None) -> S:
    away: dict[str, Memory | None] = {
        kind: disk if name == DISK else name for kind, name in placement.items() if name != DEVICE
    }
    return offload(step, away.get("params"), away.get("grads"), away.get("moments")) if away else step


def _missing(plan: Plan, room: Mapping[str, int | None]) -> dict[str, int]:
    """Memory -> the bytes that a plan takes there beyond its room."""
    return {memory: max(0, nbytes - (room[memory] or 0)) for memory, nbytes in plan.peak.items()}


def _does_not_fit(proposals: list[Proposal], room: Mapping[str, int | None], donates: bool) -> ValueError:
    """The error, with the placement that lacks the least."""
    nearest = min(proposals, key=lambda each: (sum(_missing(each.plan, room).values()), each.seconds))
    missing = [f"{count} bytes on the {name}" for name, count in _missing(nearest.plan, room).items() if count]
    where = ", ".join(f"{kind} on the {name}" for kind, name in nearest.placement.items())
    given = ", ".join(f"{name}={count}" for name, count in room.items())
    said = (
        f"fits: got {given}, where no placement fits: {' and '.join(missing)} are missing; expected as many more, for "
        f"the one that lacks the least ({where}). "
    )
    return ValueError(said + ("" if donates else "fz.donate(step) overwrites the last state. ") + _MORE)


_MORE = (
    "Smaller units, a policy such as fz.Policy.compact16(), more ranks with fz.shard_zero3, or fz.fuse_update "
    "take less; so does a disk, where none is given."
)
