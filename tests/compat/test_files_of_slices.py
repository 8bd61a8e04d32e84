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


def saved(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over, policy: str, save: Any) -> Any:
    state = sliced.trained(sliced.step_over(over, leaves, sliced.POLICIES[policy]), start(leaves, policy))
    save(folder, state)
    return sliced.whole(state)[:2]


def loaded(rank: int, folder: str, leaves: sliced.Shapes, over: sliced.Over | None, policy: str, load: Any) -> Any:
    return sliced.whole(load(sliced.step_over(over, leaves, sliced.POLICIES[policy]), folder))[:2]


def moved(move: Any, policy: str, folder: str, save: Any, load: Any) -> tuple[Any, list[Any]]:
    """Params and moments as they were saved, and what each rank of other cuts loads."""
    leaves, first, second = move
    common = {"folder": folder, "leaves": leaves, "policy": policy}
    want = run_ranks(functools.partial(saved, over=first, save=save, **common), first.ranks)[0]
    ranks = second.ranks if second is not None else 1
    return want, run_ranks(functools.partial(loaded, over=second, load=load, **common), ranks)


@pytest.mark.usefixtures("hazards")
@given(move=moves(), policy=st.sampled_from(sliced.ELEMENTWISE))
def test_safetensors(move: Any, policy: str) -> None:
    save = functools.partial(fz.save_safetensors, shard_bytes=300)
    load = functools.partial(fz.load_safetensors, lossy=True)  # a file has no 24 bits: it has float32
    with tempfile.TemporaryDirectory() as folder:
        (want, _), others = moved(move, policy, folder, save, load)
        found = {name: x for file in Path(folder).glob("*.safetensors") for name, x in load_file(file).items()}
        sliced.same_bits({name: found[name] for name in want}, want)
        for got, _ in others:
            sliced.same_bits(got, want)


@pytest.mark.usefixtures("hazards")
@given(move=moves(), policy=st.sampled_from(sliced.ELEMENTWISE))
def test_dcp(move: Any, policy: str) -> None:
    load = lambda step, folder: fz.compat.load_dcp(folder, step, lossy=True)
    with tempfile.TemporaryDirectory() as folder:
        (params, moments), others = moved(move, policy, folder, fz.compat.save_dcp, load)
        names = {f"model.{path}": leaf for path, leaf in params.items()}
        names |= {f"optim.state.{path}.exp_avg": leaf for path, leaf in moments.mu.items()}
        got = {name: torch.empty_like(leaf) for name, leaf in names.items()}
        dcp.load(got, checkpoint_id=folder, no_dist=True)
        sliced.same_bits(got, names)
        for own in others:
            sliced.same_bits(own, (params, moments))
