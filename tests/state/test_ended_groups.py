"""A state whose process group has ended: whatever would communicate says so, and what to do."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fzero as fz
from fzero.comm.worlds import has_ended
from fzero.testing import RankError, run_ranks

X = torch.ones(2, 4)


def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return (x @ params["w"]).square().mean()


PLAIN = fz.train_step(loss, fz.sgd(0.1))
STEP = fz.shard_zero3(PLAIN)
PARAMS = {"w": torch.ones(4, 4)}
USES: dict[str, Callable[[Any, Path], object]] = {
    "gather": lambda state, _: fz.gather(state.params),
    "stream": lambda state, _: fz.stream(state.params),
    "norm": lambda state, _: fz.global_norm(state.params),
    "save": lambda state, folder: fz.save(folder, state),
    "convert": lambda state, _: fz.convert(state, PLAIN),
    "pickle": lambda state, _: pickle.dumps(state),
}


@pytest.fixture(scope="module")
def states() -> list[Any]:
    return run_ranks(lambda _: STEP(STEP.init(PARAMS), X)[0], 2)


@pytest.mark.parametrize("use", USES)
def test_a_state_that_ranks_have_returned(states: list[Any], use: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"process group has ended.*run_ranks.*fz\.save"):
        USES[use](states[0], tmp_path)
    copy.deepcopy(states[0])
    assert "TrainState" in repr(states[0])


def test_a_state_of_an_earlier_run(states: list[Any]) -> None:
    for checked in (True, False):
        for use in (lambda state: STEP(state, X), lambda state: fz.gather(state.params)):
            with pytest.raises(RankError, match=r"'loss'.*process group has ended"):
                run_ranks(lambda rank, use=use: use(states[rank]), 2, checked=checked)


def ended(_: int, folder: str) -> list[str]:
    state, said = STEP.init(PARAMS), []
    torch.distributed.destroy_process_group()
    for use in USES.values():
        with pytest.raises(RuntimeError) as error:
            use(state, Path(folder))
        said.append(str(error.value))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    return said


def test_a_group_that_was_destroyed(tmp_path: Path) -> None:
    for said in run_ranks(functools.partial(ended, folder=str(tmp_path)), 2, backend="processes"):
        assert len(said) == len(USES) and all("process group has ended" in each for each in said)


def test_groups_that_live_on_other_threads_have_not_ended() -> None:
    (group,) = run_ranks(lambda _: torch.distributed.group.WORLD, 1)
    assert group is not None and has_ended(group)

    def rank(_: int) -> bool:
        found: list[bool] = []
        own = torch.distributed.group.WORLD
        assert own is not None
        thread = threading.Thread(target=lambda: found.append(has_ended(own)))
        thread.start()
        thread.join()
        return found[0]

    assert run_ranks(rank, 2) == [False, False]
