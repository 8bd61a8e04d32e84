"""Steps on the far device: state on it, and offloaded to the host and a disk. Prints what differs, and how many ran.

`python -m far.steps SEED COUNT FOLDER`
"""

from __future__ import annotations

import functools
import itertools
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

import fzero as fz
from far.device import NAME, load
from fzero.testing import run_ranks

KINDS = ("params", "grads", "moments", "activations")
OPTIMIZER = fz.chain(fz.clip_by_global_norm(0.5), fz.adamw(1e-2))
POLICIES = {"plain": None, "compact24": fz.Policy.compact24(), "compact16": fz.Policy.compact16()}
WIDTH, STEPS = 64, 3


class Case(NamedTuple):
    policy: str
    fused: str
    donates: bool
    stage: int
    remat: bool
    microbatches: int
    lookahead: bool
    kinds: tuple[str, ...]
    memory: str


def cases() -> list[Case]:
    kinds = [each for n in range(1, 5) for each in itertools.combinations(KINDS, n)]
    fused = ("", "auto", "held", "twice")
    return [
        Case(*each)
        for each in itertools.product(
            POLICIES, fused, (False, True), (0, 1, 3), (False, True), (1, 2), (False, True), kinds, ("host", "disk")
        )
    ]


def model() -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 5).to(NAME)

    block = fz.unit(lambda p, x: torch.tanh(x @ p["w"].to(x.dtype)))

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return (functools.reduce(lambda x, q: block(q, x), p["blocks"], x) @ p["head"].to(x.dtype)).square().mean()

    return loss, {"blocks": [{"w": draw(WIDTH, WIDTH)} for _ in range(3)], "head": draw(WIDTH, 2)}


def step_of(case: Case) -> fz.Step:
    """The step with all of its state on the device."""
    step = fz.train_step(model()[0], OPTIMIZER, POLICIES[case.policy])
    step = fz.fuse_update(step, norm=case.fused) if case.fused else step  # type: ignore[arg-type]
    step = fz.donate(step) if case.donates else step
    step = {0: lambda s: s, 1: fz.shard_zero1, 3: fz.shard_zero3}[case.stage](step)
    step = fz.remat(step) if case.remat else step
    step = fz.lookahead(step, STEPS, 0.3) if case.lookahead else step  # due in the last one, whose bytes are counted
    return fz.accumulate(step, 2) if case.microbatches > 1 else step


def trained(step: fz.Step, plan: fz.Plan | None) -> torch.Tensor:
    """The params after some steps; what is moved is what the plan says, where there is one."""
    library, x = load(), torch.ones(16, WIDTH).to(NAME)
    state, before = step.init(model()[1]), (0, 0)
    for _ in range(STEPS):
        before = library.far_up(), library.far_down()
        state, metrics = step(state, x)
    got = library.far_up() - before[0], library.far_down() - before[1]
    assert metrics["loss"].device.type == NAME and metrics["loss"].isfinite()
    if plan is not None:
        few = 256  # bytes of numbers: norms, rates
        assert all(0 <= mine - said <= few for mine, said in zip(got, plan.moved["host"], strict=True)), (
            f"moved {got} to and from the device, the plan says {plan.moved['host']}"
        )
    full: Any = fz.gather(state.params)
    return torch.cat([full["head"].cpu().flatten(), *[block["w"].cpu().flatten() for block in full["blocks"]]]).float()


def difference(case: Case, disk: fz.Disk) -> str | None:
    """What is wrong; None if nothing is."""
    plain = step_of(case)
    memory = "host" if case.memory == "host" else disk
    away: dict[str, Any] = dict.fromkeys(case.kinds, memory)
    step = fz.offload(plain, **away)
    counts = case.memory == "host" and "activations" not in case.kinds and case.microbatches == 1
    plan = fz.plan(step, model()[1]) if counts else None

    def rank_main(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        return trained(plain, None), trained(step, plan)

    want, got = run_ranks(rank_main, 1)[0]
    on_host = {"params", "moments"} <= set(case.kinds)  # by the host's kernel, which rounds in another order
    if on_host and case.policy == "plain":
        close = torch.allclose(got, want, rtol=STEPS * torch.finfo(torch.float32).eps, atol=1e-8)
        return None if close else f"by {(got - want).abs().max()}"
    if on_host:
        return None if torch.allclose(got, want, rtol=2e-2, atol=2e-3) else f"by {(got - want).abs().max()}"
    return None if torch.equal(got, want) else f"in {int((got != want).sum())} of {got.numel()} elements"


def told(jobs: Mapping[str, Callable[[], str | None]]) -> int:
    """Runs jobs that say what is wrong, by their names, and prints it; 1 where there is anything."""
    wrong = 0
    for name, job in jobs.items():
        try:
            said = job()
        except Exception:
            said = traceback.format_exc(limit=-6)
        if said:
            wrong += 1
            print(f"{name}: {said}", flush=True)
    print(f"{len(jobs) - wrong} of {len(jobs)} alike")
    return int(wrong > 0)


def main() -> int:
    seed, count, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    warnings.simplefilter("ignore")
    load()
    drawn = random.Random(seed).sample(cases(), count)
    return told({str(case): functools.partial(difference, case, fz.Disk(folder)) for case in drawn})


if __name__ == "__main__":
    sys.exit(main())
