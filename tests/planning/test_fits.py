"""fz.fits: the cheapest placement that fits, which then does."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from memories import DISK
from nightly import in_turns

import fzero as fz
from fzero.testing import LiveBytes

UNIT = 512 * 512 * 4  # bytes
BLOCKS = 6


def wide() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    params = {"blocks": [{"w": torch.randn(512, 512, generator=generator) / 20} for _ in range(BLOCKS)]}
    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"]))
    return lambda p, x: functools.reduce(lambda x, q: block(q, x), p["blocks"], x).square().mean(), params


LOSS, PARAMS = wide()
STEP = fz.donate(fz.train_step(LOSS, fz.adamw(1e-3)))
MUCH = 1 << 40


def placed(device: int, host: int = 0, disk: int | None = None, step: fz.Step = STEP, **said: Any) -> str:
    """The first letters of the memories of params, grads and moments."""
    placement = fz.fits(step, PARAMS, device=device, host=host, disk=disk, **said).placement
    assert list(placement) == ["params", "grads", "moments"]
    return "".join({"device": ".", "host": "h", "disk": "d"}[memory] for memory in placement.values())


def test_it_takes_what_costs_the_least() -> None:
    resident = fz.plan(STEP, PARAMS).peak["device"]
    assert placed(resident, MUCH, MUCH) == "..."
    assert placed(resident - 1, MUCH, MUCH) == "h.h"  # grads down and weights up are less than moments both ways
    assert placed(resident - 1, disk=MUCH) == ".d."  # fewer bytes each way than moments, and half as many as params
    assert placed(resident // 2, disk=MUCH) != "..."
    assert placed(resident - 1, 19 * UNIT, MUCH) == "h.h"  # with the grads of one unit
    assert placed(resident - 1, 19 * UNIT - 1, MUCH) == ".h."


def test_the_slower_disk_is_left_out_where_the_host_has_room() -> None:
    little = 11 * UNIT
    assert "d" not in placed(little, MUCH, MUCH)
    assert "h" not in placed(little, 0, MUCH)
    slow_host = fz.Bandwidth(1e3, 1e3, 1e12, 1e12)
    assert "h" not in placed(little, MUCH, MUCH, bandwidth=slow_host)[:2]  # moments are updated where they lie


def test_a_step_that_keeps_the_last_state_needs_room_for_it() -> None:
    kept = fz.train_step(LOSS, fz.adamw(1e-3))
    resident = fz.plan(STEP, PARAMS).peak["device"]
    assert placed(resident, MUCH) == "..." and placed(resident, MUCH, step=kept) != "..."
    # the next state is made once the cotangent of a unit is gone, which the other has at its peak
    assert fz.plan(kept, PARAMS).peak["device"] == pytest.approx(resident + 17 * UNIT, abs=64)


def test_what_does_not_fit_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"got device=1000, host=0, disk=None, where no placement fits: \d+ by") as e:
        fz.fits(STEP, PARAMS, 1000)
    least = fz.plan(STEP, PARAMS).peak["device"]
    assert f"{least - 1000} bytes on the device are missing" in str(e.value) and "fz.donate" not in str(e.value)
    with pytest.raises(ValueError, match=r"fz\.donate\(step\) overwrites the last state"):
        fz.fits(fz.train_step(LOSS, fz.adamw(1e-3)), PARAMS, 1000, 1000, 1000)


def test_a_step_that_is_offloaded_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got a step with offload\(moments='host'\), which says where its state lies"):
        fz.fits(fz.offload(STEP, moments="host"), PARAMS, MUCH)
    assert placed(MUCH, step=fz.offload(STEP, activations="host")) == "..."


def test_a_bandwidth_without_a_disk() -> None:
    with pytest.raises(ValueError, match=r"got disk=5 and a bandwidth without disk_read or disk_write"):
        fz.fits(STEP, PARAMS, MUCH, disk=5, bandwidth=fz.Bandwidth(1e9, 1e9))


def test_a_proposal_for_a_disk_wants_one() -> None:
    proposal = fz.fits(STEP, PARAMS, 12 * UNIT, disk=MUCH)
    with pytest.raises(ValueError, match=r"Proposal.apply: got no disk, and .*apply\(step, fz.Disk\(path\)\)"):
        proposal.apply(STEP)
    assert "on the disk" in str(proposal) and str(proposal.plan) in str(proposal)


@in_turns(8)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("donates", [False, True])
@pytest.mark.parametrize("room", [11, 16, 20])
def test_what_is_proposed_fits(room: int, donates: bool, fused: bool) -> None:
    step = fz.train_step(LOSS, fz.adamw(1e-3))
    step = fz.fuse_update(step) if fused else step
    step = fz.donate(step) if donates else step
    proposal, disk = fz.fits(step, PARAMS, room * UNIT, disk=MUCH), fz.Disk(DISK.path, in_flight=1)
    offloaded = proposal.apply(step, disk)
    planned = fz.plan(offloaded, PARAMS)
    assert (planned.peak, planned.moved) == (proposal.plan.peak, proposal.plan.moved)
    x = torch.ones(1, 512)
    with LiveBytes() as live:
        state = offloaded.init(PARAMS)
        for _ in range(3):
            live.reset_peak()
            state, _ = offloaded(state, x)
    # one buffer may be on its way to a file, and activations are not counted
    assert live.peak <= (room + 1) * UNIT + UNIT // 16


def test_no_folder_is_made_or_needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", Path("/proc/nowhere")):
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        for disk in (None, 1 << 40):
            fz.fits(STEP, PARAMS, device=1 << 40, disk=disk)
        assert not folder.exists()
