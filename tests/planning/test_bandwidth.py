"""fz.measure_bandwidth and the estimates made of it."""

from __future__ import annotations

import pytest
import torch
from memories import DISK

import fzero as fz

STEP = fz.train_step(lambda p, x: (x @ p["w"]).sum(), fz.adamw(1e-3))
PARAMS = {"w": torch.empty(1000, 1000, device="meta")}


def test_it_measures_what_there_is() -> None:
    alone, both = fz.measure_bandwidth(nbytes=1 << 20), fz.measure_bandwidth(DISK, nbytes=1 << 20)
    assert alone.host_read > 0 and alone.host_write > 0 and alone.disk_read is alone.disk_write is None
    assert both.disk_read and both.disk_write and both.disk_read > 0 and both.disk_write > 0
    assert "GB/s" in str(both) and "disk" not in str(alone)


@pytest.mark.parametrize("device", ["nowhere", "meta"])
def test_a_device_that_there_is_not(device: str) -> None:
    with pytest.raises(
        ValueError, match=rf"measure_bandwidth: got device='{device}', expected one with room for 1 bytes"
    ):
        fz.measure_bandwidth(device=device, nbytes=8)


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_speeds_are_positive(value: float) -> None:
    with pytest.raises(ValueError, match=r"Bandwidth: got disk_read=.*expected a positive number of bytes per second"):
        fz.Bandwidth(1e9, 1e9, disk_read=value)


def test_the_longest_way_counts() -> None:
    plan = fz.plan(fz.offload(STEP, params="host", moments=DISK, grads="host"), PARAMS)
    assert plan.moved == {"host": (8_000_000, 4_000_000), "disk": (8_000_000, 8_000_000)}
    assert plan.seconds(fz.Bandwidth(8e6, 4e6, 4e6, 8e6)) == 2.0 + 1.0
    assert plan.seconds(fz.Bandwidth(8e6, 1e6, 4e6, 8e6)) == 4.0
    assert plan.seconds(fz.Bandwidth(8e6, 4e6, 4e6, 8e6), compute=5) == 5.0
    with pytest.raises(ValueError, match=r"without disk_read, and 8000000 bytes go that way in a step"):
        plan.seconds(fz.Bandwidth(1e9, 1e9))
    with pytest.raises(ValueError, match=r"got compute=-1, expected at least 0 seconds"):
        plan.seconds(fz.Bandwidth(1e9, 1e9, 1e9, 1e9), compute=-1)


def test_on_the_device_nothing_moves() -> None:
    assert fz.plan(STEP, PARAMS).seconds(fz.Bandwidth(1.0, 1.0)) == 0.0


def test_the_plan_says_it_where_something_is_offloaded() -> None:
    assert "moved" not in str(fz.plan(STEP, PARAMS))
    said = str(fz.plan(fz.offload(STEP, moments=DISK), PARAMS))
    assert "between steps: device 7.63 MiB, host 0 B, disk 7.63 MiB; at most in a step: device" in said
    assert "disk read 7.63 MiB, written 7.63 MiB" in said


def test_more_bytes_than_there_can_be() -> None:
    with pytest.raises(ValueError, match="measure_bandwidth"):
        fz.measure_bandwidth(nbytes=10**25)
    plan = fz.plan(fz.train_step(lambda p: p, fz.sgd(0.1)), {"w": torch.empty(2)})
    for compute in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=rf"compute={compute}"):
            plan.seconds(fz.Bandwidth(1.0, 1.0), compute)
