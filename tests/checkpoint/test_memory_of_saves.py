"""What a save in the background takes of memory while a donating step goes on: what is not yet written, and no more."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import in_turns

import fzero as fz
from fzero.checkpoint import files
from fzero.state.sharded import trees_of
from fzero.testing import LiveBytes, assert_trees_equal
from fzero.update import update

BLOCK = fz.unit(lambda p, x: torch.tanh(x.to(p["w"].dtype) @ p["w"]))
X = torch.ones(2, 64)


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    for block in p["blocks"]:
        x = BLOCK(block, x)
    return x.float().square().mean()


def begun(step: fz.Step) -> fz.TrainState:
    generator = torch.Generator().manual_seed(0)
    state = step.init({"blocks": [{"w": torch.randn(64, 64, generator=generator) / 8} for _ in range(4)]})
    return step(state, X)[0]


def buffers(state: fz.TrainState) -> dict[int, int]:
    """The bytes of each buffer of a state, by its address."""
    parts = (part for tree in trees_of((state.params, state.moments)) for buffer in buffers_of(tree) for part in buffer)
    return {part.data_ptr(): part.untyped_storage().nbytes() for part in parts}


def buffers_of(tree: Any) -> Iterator[list[torch.Tensor]]:
    for key in tree.groups:
        yield list(tree.placed(key).parts)


class Paused:
    """Writes of a rank's own file go on one at a time, as they are told; all others at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, through: int) -> None:
        """Lets so many through, of the header and of slices after it."""
        self.written, self.held, self.go = list[int](), threading.Event(), threading.Event()
        real = files.write

        def write(descriptor: int, data: memoryview, offset: int) -> None:
            if Path(f"/proc/self/fd/{descriptor}").resolve().suffix == ".safetensors":
                if len(self.written) >= through:
                    self.held.set()
                    assert self.go.wait(30)
                self.written.append(len(data))
            real(descriptor, data, offset)

        monkeypatch.setattr(files, "write", write)


@in_turns(2)
@pytest.mark.parametrize(("policy", "every"), [(None, 3), (fz.Policy.compact24(), 6)])
def test_a_donating_step_takes_what_is_written_and_leaves_the_rest_to_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: fz.Policy | None, every: int
) -> None:
    step = fz.donate(fz.train_step(loss, fz.adamw(1e-2), policy))

    def after_a_step(live: LiveBytes, state: fz.TrainState) -> tuple[fz.TrainState, int]:
        live.reset_peak()
        state, _ = step(state, X)
        return state, live.peak

    with LiveBytes() as live:
        _, alone = after_a_step(live, begun(step))
    count = len(buffers(begun(step)))
    assert count >= 4 * 3
    grown = []
    for through in range(0, count + 1, every):
        with monkeypatch.context() as patch, LiveBytes() as live:
            state = begun(step)
            expected = fz.gather({"params": state.params, "moments": state.moments})
            given = live.now() - sum(buffers(state).values())  # what was gathered, to compare with
            before = buffers(state)
            paused = Paused(patch, 1 + through)
            saving = fz.save_async(tmp_path / str(through), state)
            if through < count:
                assert paused.held.wait(30)
            else:
                saving.wait()
            left = sum(before.values()) - sum(paused.written[1:])
            state, peak = after_a_step(live, state)
            grown.append(peak - given - alone)
            assert grown[-1] <= left, f"{through} of {count} buffers were written"
            same = set(buffers(state)) & set(before)
            assert sum(before[address] for address in same) == sum(paused.written[1:])
            paused.go.set()
            saving.wait()
        again = fz.load(tmp_path / str(through), step)
        assert_trees_equal(fz.gather({"params": again.params, "moments": again.moments}), expected)
    assert grown[0] > sum(before.values()) / 2, "the save holds nothing?"
    assert grown == sorted(grown, reverse=True) and grown[-1] == 0


def test_a_save_that_ends_during_an_update_is_no_view_that_the_caller_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning would be an error here."""
    step = fz.donate(fz.train_step(loss, fz.adamw(1e-2)))
    state = begun(step)
    paused, real = Paused(monkeypatch, 0), update.Writing
    saving = fz.save_async(tmp_path, state)
    assert paused.held.wait(30)

    def ends_it(*args: Any) -> Any:
        out = real(*args)
        paused.go.set()
        saving.wait()
        return out

    monkeypatch.setattr(update, "Writing", ends_it)
    step(state, X)
