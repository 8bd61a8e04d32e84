"""Others' files of leaves that are cut over a tensor axis: whole tensors, written and read slice by slice."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest
import sliced_states as sliced
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import fzero as fz
from fzero.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group


@st.composite
def moves(draw: st.DrawFn) -> tuple[sliced.Shapes, sliced.Over, sliced.Over | None]:
    leaves = draw(sliced.shapes())
    return leaves, draw(sliced.overs(leaves)), draw(st.one_of(st.none(), sliced.overs(leaves)))


def start(leaves: sliced.Shapes, policy: str) -> Any:
    return sliced.params(leaves, torch.float64 if policy == "float64" else torch.float32)


def exported(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over, policy: str) -> Any:
    state = sliced.trained(sliced.step_over(over, leaves, sliced.POLICIES[policy]), start(leaves, policy))
    fz.save_safetensors(folder, state, shard_bytes=300)
    return fz.gather(state.params)


def imported(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over | None, policy: str) -> Any:
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy])
    return fz.gather(fz.load_safetensors(step, folder, lossy=True).params)  # a file has no 24 bits: it has float32


@pytest.mark.usefixtures("hazards")
@given(move=moves(), policy=st.sampled_from(sliced.ELEMENTWISE))
def test_safetensors(move: Any, policy: str) -> None:
    leaves, first, second = move
    with tempfile.TemporaryDirectory() as folder:
        save = functools.partial(exported, folder=folder, leaves=leaves, over=first, policy=policy)
        want = run_ranks(save, first.ranks)[0]
        found = {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}
        sliced.same_bits({name: found[name] for name in want}, want)
        load = functools.partial(imported, folder=folder, leaves=leaves, over=second, policy=policy)
        for got in run_ranks(load, second.ranks if second is not None else 1):
            sliced.same_bits(got, want)


def to_dcp(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over, policy: str) -> Any:
    state = sliced.trained(sliced.step_over(over, leaves, sliced.POLICIES[policy]), start(leaves, policy))
    fz.compat.save_dcp(folder, state)
    return sliced.whole(state)[:2]


def from_dcp(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over | None, policy: str) -> Any:
    step = sliced.step_over(over, leaves, sliced.POLICIES[policy])
    return sliced.whole(fz.compat.load_dcp(folder, step, lossy=True))[:2]


@pytest.mark.usefixtures("hazards")
@given(move=moves(), policy=st.sampled_from(sliced.ELEMENTWISE))
def test_dcp(move: Any, policy: str) -> None:
    leaves, first, second = move
    with tempfile.TemporaryDirectory() as folder:
        save = functools.partial(to_dcp, folder=folder, leaves=leaves, over=first, policy=policy)
        want = run_ranks(save, first.ranks)[0]
        params, moments = want
        names = {f"model.{path}": leaf for path, leaf in params.items()}
        names |= {f"optim.state.{path}.exp_avg": leaf for path, leaf in moments.mu.items()}
        got = {name: torch.empty_like(leaf) for name, leaf in names.items()}
        dcp.load(got, checkpoint_id=folder, no_dist=True)
        sliced.same_bits(got, names)
        load = functools.partial(from_dcp, folder=folder, leaves=leaves, over=second, policy=policy)
        for own in run_ranks(load, second.ranks if second is not None else 1):
            sliced.same_bits(own, want)
