"""Saves from the far device, and loads onto it. Prints what differs, and how many ran. `python -m far.saves FOLDER`."""

from __future__ import annotations

import functools
import itertools
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fzero as fz
from far.device import NAME, load
from far.steps import POLICIES, WIDTH, Case, model, step_of, told
from fzero.checkpoint import chunks
from fzero.testing import run_ranks


def values(state: fz.TrainState) -> dict[str, torch.Tensor]:
    assert state.params.device.type == NAME
    trees: Any = {"params": state.params, "mu": state.moments[1].mu, "nu": state.moments[1].nu}
    return {f"{name}.{path}": x.cpu() for name, tree in trees.items() for path, x in _leaves(fz.gather(tree))}


def _leaves(tree: Any) -> list[tuple[str, torch.Tensor]]:
    return [("head", tree["head"]), *((f"block {i}", own["w"]) for i, own in enumerate(tree["blocks"]))]


def difference(case: Case, memory: Any, folder: Path) -> str | None:
    """What is wrong; None if nothing is."""

    def rank_main(rank: int) -> str | None:
        step, x = step_of(case), torch.ones(16, WIDTH).to(NAME)
        step = fz.offload(step, moments=memory) if memory else step
        state, _ = step(step.init(model()[1]), x)
        before, expected = state, values(state)
        saving = fz.save_async(folder, before)
        del before
        for _ in range(3):
            state, _ = step(state, x)
        saving.wait()
        with torch.device(NAME):
            again = fz.load(folder, step)
        got = values(again)
        wrong = [name for name, x in expected.items() if not torch.equal(x, got[name])]
        after, _ = step(again, x)
        assert after.step == 2 and after.params.device.type == NAME
        return ", ".join(wrong) or None

    return run_ranks(rank_main, 1)[0]


def main() -> int:
    warnings.simplefilter("ignore")
    load()
    chunks.CHUNK = 1 << 9  # so that these small buffers take several, and several slices
    folder, jobs = Path(sys.argv[1]), dict[str, Callable[[], str | None]]()
    memories = (None, "host", fz.Disk(folder / "scratch"))
    for count, (policy, memory) in enumerate(itertools.product(POLICIES, memories)):
        case = Case(policy, "", bool(count % 2), 3 * (count % 3 // 2), False, 1, False, (), "")
        jobs[f"{case} {memory}"] = functools.partial(difference, case, memory, folder / str(count))
    return told(jobs)


if __name__ == "__main__":
    sys.exit(main())
