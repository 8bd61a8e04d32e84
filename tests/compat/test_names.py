"""Which tensor of others' files is whose: by name, by kind, by shape; one that only looks alike is refused."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from nightly import in_turns
from safetensors.torch import save_file

import fzero as fz
from fzero.testing import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group
STEP = fz.train_step(lambda p, x: sum((leaf * x).sum() for leaf in p.values()), fz.adamw(0.1))
KEPT = -1.0  # what leaves have in like


def by_safetensors(folder: str, there: dict[str, torch.Tensor], **how: Any) -> Any:
    save_file(there, f"{folder}/model.safetensors")
    return fz.load_safetensors(STEP, folder, **how)


def by_deepspeed(folder: str, there: dict[str, torch.Tensor], **how: Any) -> Any:
    model = {"module": there, "buffer_names": [], "param_shapes": None, "optimizer": None}
    torch.save({**model, "global_steps": 0, "skipped_steps": 0}, f"{folder}/mp_rank_00_model_states.pt")
    return fz.compat.load_deepspeed(folder, STEP, tag=".", optim=False, **how)


@in_turns(2)
@pytest.mark.parametrize("load", [by_safetensors, by_deepspeed])
@settings(max_examples=max(60, settings().max_examples))
@given(
    there=st.sets(st.sampled_from("abcd"), min_size=1),
    called=st.dictionaries(st.sampled_from("abcz"), st.sampled_from("abcdx"), min_size=1),
    lenient=st.booleans(),
)
def test_a_leaf_has_the_value_of_its_name(load: Any, there: set[str], called: dict[str, str], lenient: bool) -> None:
    like = {path: torch.full((2,), KEPT) for path in sorted(called)}
    tensors = {name: torch.full((2,), float(ord(name))) for name in sorted(there)}
    one_each = len({*called.values()}) == len(called)
    alike = one_each and {*called.values()} == there
    with tempfile.TemporaryDirectory() as folder:
        read = lambda: load(folder, tensors, like=like, names=called.__getitem__, lenient=lenient)
        if not one_each or not (alike or lenient):
            with pytest.raises(ValueError, match="one name" if not one_each else "got a like= whose leaves differ"):
                read()
            return
        found = fz.gather(read().params)
    expected = {path: float(ord(name)) if name in there else KEPT for path, name in called.items()}
    assert {path: leaf.tolist() for path, leaf in found.items()} == {path: [x] * 2 for path, x in expected.items()}


# ---- checkpoints of torch


def written(folder: Path, moments: Any = None, model: str = "model", **others: torch.Tensor) -> Path:
    """A checkpoint of two leaves; `moments` gives what one leaf has besides, or instead."""
    params = {"v": torch.ones(2), "w": torch.ones(2, 3)}
    state = {
        path: {
            **{"exp_avg": torch.full_like(x, 0.5), "exp_avg_sq": torch.full_like(x, 0.25), "step": torch.tensor(5.0)},
            **(moments(path) if moments else {}),
        }
        for path, x in params.items()
    }
    own = {path: {word: x for word, x in each.items() if x is not None} for path, each in state.items()}
    tree = {model: {**params, **others}} if model else {**params, **others}
    dcp.save({**tree, "optim": {"state": own}}, checkpoint_id=folder)
    return folder


@pytest.mark.parametrize("step", [5, 5.0, torch.tensor([5.0]), torch.tensor(5), torch.tensor(5.0, dtype=torch.float64)])
def test_steps_that_say_how_many(tmp_path: Path, step: Any) -> None:
    folder = written(tmp_path / "it", lambda path: {"step": torch.as_tensor(step)})
    state = fz.compat.load_dcp(folder, STEP)
    assert state.step == 5 and state.moments.count.value == 5


@pytest.mark.parametrize(
    ("step", "match"),
    [
        (7, r"got no tensor optim.state.[vw].step"),
        (None, r"got no tensor optim.state.[vw].step"),
        *(
            (torch.tensor(x), r"'optim.state.w.step' of torch.float32 has")
            for x in (5.5, -1.0, float("nan"), torch.inf)
        ),
        (torch.tensor([5.0, 5.0]), r"'optim.state.w.step' of torch.float32 has 2 elements"),
        (torch.tensor(4.0), r"leaf 'w' has seen 4 updates, leaf 'v' 5"),
    ],
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_steps_that_do_not(tmp_path: Path, step: Any, match: str, ranks: int) -> None:
    folder = written(tmp_path / "it", lambda path: {"step": step} if path == "w" else {})

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=match):
            fz.compat.load_dcp(folder, fz.shard_zero3(STEP) if ranks > 1 else STEP)

    run_ranks(rank_main, ranks)


@pytest.mark.parametrize("shape", [(3, 2), (6,), (2, 2), (4, 3)])
def test_moments_of_another_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = written(tmp_path / "it", lambda path: {"exp_avg": torch.ones(shape)} if path == "w" else {})
    with pytest.raises(ValueError, match=rf"'optim.state.w.exp_avg' has shape \({shape[0]},.*expected \(2, 3\)"):
        fz.compat.load_dcp(folder, STEP)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_params_that_are_no_floats(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = written(tmp_path / "it", q=torch.ones(4).to(dtype))
    with pytest.raises(ValueError, match=rf"'model.q' is of {dtype}"):
        fz.compat.load_dcp(folder, STEP)
    like = {"v": torch.zeros(2), "w": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="leaf 'q' of shape"):
        assert [*fz.compat.load_dcp(folder, STEP, like=like, lenient=True).params] == ["v", "w"]
    with pytest.raises(ValueError, match=rf"'model.q' is of {dtype}"):
        fz.compat.load_dcp(folder, STEP, like={**like, "q": torch.zeros(4)})


def test_names_without_a_prefix(tmp_path: Path) -> None:
    """Moments are taken as such where their prefix is said, and are no params where it is not."""
    folder = written(tmp_path / "it", model="")
    state = fz.compat.load_dcp(folder, STEP, model="")
    assert [*state.params] == ["v", "w"] and fz.gather(state.moments.mu)["v"].tolist() == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"'optim.state.[vw].\w+' may be a moment of another leaf"):
        fz.compat.load_dcp(folder, STEP, model="", optim=None)
    like = {"v": torch.zeros(2), "w": torch.zeros(2, 3)}
    with pytest.warns(UserWarning, match="is there, and not in like"):
        state = fz.compat.load_dcp(folder, STEP, model="", optim=None, like=like, lenient=True)
    assert state.step == 0 and fz.gather(state.params)["v"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("prefix", ["", "m"])
def test_one_prefix_for_both(tmp_path: Path, prefix: str) -> None:
    state, _ = STEP(STEP.init({"w": torch.ones(3), "exp_avg": torch.ones(2)}), torch.ones(()))
    fz.compat.save_dcp(tmp_path / "it", state, model=prefix, optim=prefix)
    again = fz.compat.load_dcp(tmp_path / "it", STEP, model=prefix, optim=prefix)
    assert [*again.params] == [*state.params] and again.step == 1
    for path, leaf in fz.gather(state.moments.mu).items():
        assert torch.equal(leaf, fz.gather(again.moments.mu)[path])


def test_an_optimizer_that_counts_nothing(tmp_path: Path) -> None:
    update = lambda u, s, params=None, **k: ({path: -0.1 * g for path, g in u.items()}, s)
    plain = fz.GradientTransformation(lambda p: (), update, elementwise=True)
    step = fz.train_step(lambda p, x: (p["w"] * x).sum(), plain)
    state = step.init({"w": torch.ones(3)})
    for _ in range(3):
        state, _ = step(state, torch.ones(()))
    fz.compat.save_dcp(tmp_path / "it", state)
    assert fz.compat.load_dcp(tmp_path / "it", step).step == 3


@pytest.mark.parametrize("save", [fz.save_safetensors, fz.compat.save_dcp])
def test_ranks_that_have_different_states(tmp_path: Path, save: Any) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(STEP)
        states = [step.init({"w": torch.ones(3)})]
        states += [step(states[0], torch.ones(()))[0]]
        with pytest.raises(ValueError, match="update 1"):
            save(tmp_path / "it", states[rank])

    run_ranks(rank_main, 2)
    assert not (tmp_path / "it").exists()


def test_ranks_that_have_different_trees(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        state = fz.shard_zero3(STEP).init({"w": torch.ones(3)})
        with pytest.raises(ValueError, match="tree of"):
            fz.save_safetensors(tmp_path / "it", [state.params, state.moments.mu][rank])

    run_ranks(rank_main, 2)
