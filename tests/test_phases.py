"""Leaves that are frozen and thawed in the middle of a run: torch's optimizers with `requires_grad` toggled."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from typing import Any

import phases
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import by_day
from phases import LEAVES, OPTIMIZERS, PROGRESSIVE, Phase, freezing, go_on, leaves_of

import fzero as fz
from fzero.testing import assert_trees_close, run_ranks, strategies

F32, F64 = torch.float32, torch.float64
UNITS = ("blocks.0.*", "blocks.1.*")


@st.composite
def drawn_phases(draw: st.DrawFn) -> tuple[Phase, ...]:
    """Five phases, in each of which some leaf trains."""
    out = []
    for _ in range(5):
        said = {path: draw(st.sampled_from(["trains", "trains", "kept", "forgotten"])) for path in LEAVES}
        said[draw(st.sampled_from(LEAVES))] = "trains"
        kept, forgotten = ([path for path, own in said.items() if own == word] for word in ("kept", "forgotten"))
        out.append(phases.phase(draw(st.integers(1, 3)), kept, forgotten))
    return tuple(out)


def chosen(stages: Sequence[int], optimizer: fz.GradientTransformation) -> st.SearchStrategy[Any]:
    """Transforms of a step, without those that keep a state, or that its optimizer does not take."""
    but = ("loss_scale",) if optimizer.by_group else ("loss_scale", "fuse_update")
    every = strategies.transforms(stages=stages, patterns=UNITS)
    return every.map(lambda own: [each for each in own if each[0] not in but])


def run_part(
    rank: int,
    world: int,
    optimizer: fz.GradientTransformation,
    part: Sequence[tuple[Phase, Any]],
    folder: str,
    first: bool,
    dtype: torch.dtype = F64,
    policy: Any = None,
) -> Any:
    """Some phases, each with its transforms; begins or goes on from the folder, and is saved there.

    Returns:
        The params, and how many updates the moments of each leaf have seen.
    """
    loss, params = phases.loss_and_params(dtype)
    state: Any = None
    for own, others in part:
        step = strategies.apply(freezing(fz.train_step(loss, optimizer, policy), own), others)
        if state is None:
            state = step.init(params) if first else fz.load(folder, step)
        else:
            state = fz.convert(state, step)
        state = go_on(step, own, state, rank, world, dtype)
    fz.save(folder, state)
    return fz.gather(state.params), fz.gather(state.moments)


def run_all(
    every: Sequence[tuple[Phase, Any]],
    optimizer: fz.GradientTransformation,
    worlds: tuple[int, int],
    at: int,
    **options: Any,
) -> list[Any]:
    """All phases, with a checkpoint before phase `at`, from which others ranks go on."""
    backend = {"backend": options.pop("backend")} if "backend" in options else {}
    with tempfile.TemporaryDirectory() as folder:
        for first, world in zip((True, False), worlds, strict=True):
            part = every[:at] if first else every[at:]
            fn = functools.partial(
                run_part, world=world, optimizer=optimizer, part=part, folder=folder, first=first, **options
            )
            found = run_ranks(fn, world, **backend)
    return found


@pytest.mark.usefixtures("hazards")
@by_day(40)
@given(
    data=st.data(),
    own=drawn_phases() | st.just(PROGRESSIVE),
    name=st.sampled_from([*OPTIMIZERS]),
    clips=st.booleans(),
    at=st.integers(1, 4),
)
def test_as_torch_with_requires_grad_toggled(data: Any, own: Any, name: str, clips: bool, at: int) -> None:
    optimizer, make = OPTIMIZERS[name]
    if clips:
        optimizer = fz.chain(fz.clip_by_global_norm(phases.CLIP), optimizer)
    worlds = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    every = []
    for place, each in enumerate(own):
        world = worlds[place >= at]
        every.append((each, data.draw(chosen((0,) if world == 1 else (1, 2, 3), optimizer))))
    want = phases.by_torch(own, make, clips)
    for params, _ in run_all(every, optimizer, worlds, at):
        assert_trees_close(leaves_of(params), want, rtol=1e-10, atol=1e-12)
