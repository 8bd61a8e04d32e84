"""fz.compat.load_deepspeed: folders that DeepSpeed has written, against what it says that it held then."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nightly import in_turns
from write_deepspeed import DECAY, KEPT, LR, MOMENTUM, Net, unpacked

import fzero as fz
from fzero.compat.partitions import Spread
from fzero.compat.pickles import unpickled
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

FOLDERS = Path(__file__).parent / "deepspeed_folders"
SHARDS = (lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)
WORDS = {"exp_avg": "mu", "exp_avg_sq": "nu", "momentum_buffer": "momentum"}
TRAINED = [name for name in KEPT if KEPT[name].stage]


def held_of(name: str) -> dict[str, Any]:
    return unpacked(torch.load(FOLDERS / f"{name}.held.pt", weights_only=True))


def optimizer(name: str) -> fz.GradientTransformation:
    """The groups of `write_deepspeed.groups`."""
    make: Any = {
        "adamw": lambda decay: fz.adamw(LR, weight_decay=decay),
        "sgd": lambda decay: fz.sgd(LR, momentum=MOMENTUM, weight_decay=decay),
        "lion": lambda decay: fz.lion(LR, weight_decay=decay),
    }[KEPT[name].optimizer]
    matrices = [path for path, p in Net().named_parameters() if p.ndim > 1]
    return fz.partition({"|".join(matrices): make(DECAY), "*": make(0.0)})


def product(params: Any, grads: Any) -> torch.Tensor:
    """Whose gradients are those given."""
    return torch.stack([(params[path] * grad).sum() for path, grad in grads.items()]).sum()


def step_of(name: str, stage: int, policy: Any = None) -> fz.Step:
    step = fz.train_step(product, optimizer(name), policy or fz.Policy(), units=())
    return SHARDS[stage](fz.freeze(step, "base.*"))


def moments_of(state: fz.TrainState) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for part in fz.gather(state.moments).values():
        for word, own in WORDS.items():
            found = {path: leaf for path, leaf in (getattr(part, own, None) or {}).items() if leaf is not None}
            out.setdefault(word, {}).update(found)
    return {word: tree for word, tree in out.items() if tree}


def loaded(rank: int, name: str, stage: int) -> Any:
    state = fz.compat.load_deepspeed(FOLDERS / name, step_of(name, stage))
    after, _ = step_of(name, stage)(state, held_of(name)["grads"])
    return fz.gather(state.params), moments_of(state), state.step, fz.gather(after.params)


def check(found: Any, name: str) -> None:
    held, (params, moments, count, after) = held_of(name), found
    assert_trees_equal(dict(params), {**held["params"], **held["frozen"]})
    assert all(own.dtype == torch.float32 for own in map(params.get, held["trained"]))
    assert_trees_equal(moments, held["moments"])
    assert count == held["step"]
    # a sign is another where the gradient is about zero
    assert_trees_close({path: after[path] for path in held["trained"]}, held["next"], rtol=1e-6, atol=2e-7)
    assert all(after[path].equal(own) for path, own in held["frozen"].items())


@in_turns(5)
@pytest.mark.parametrize("name", TRAINED)
def test_what_deepspeed_held(name: str) -> None:
    """To the bit, and the next step is DeepSpeed's own: moments and counts mean the same."""
    drawn = random.Random(name).sample([*itertools.product((1, 2, 3, 4), (1, 2, 3))], 3)
    for ranks, stage in [*drawn, (1, 0)]:
        check(run_ranks(functools.partial(loaded, name=name, stage=stage), ranks)[0], name)


def test_on_processes() -> None:
    for own in run_ranks(functools.partial(loaded, name="zero3-bf16-3", stage=3), 2, backend="processes"):
        check(own, "zero3-bf16-3")


@pytest.mark.parametrize("ranks", [1, 3])
def test_policies(ranks: int) -> None:
    name = "zero2-bf16-3"
    held = held_of(name)
    params = {path: leaf.float() for path, leaf in {**held["params"], **held["frozen"]}.items()}

    def rank_main(rank: int) -> None:
        load = functools.partial(fz.compat.load_deepspeed, FOLDERS / name)
        exact = load(step_of(name, 3, fz.Policy.exact(torch.float32)))
        assert_trees_equal(dict(fz.gather(exact.params)), params)
        assert_trees_equal(moments_of(exact), held["moments"])
        with pytest.raises(ValueError, match=r"rounded to bf16.*Say fz.compat.load_deepspeed\(path, step, lossy=True"):
            load(step_of(name, 3, fz.Policy.bf16_states()))
        low = load(step_of(name, 3, fz.Policy.bf16_states()), lossy=True)
        assert_trees_equal(dict(fz.gather(low.params)), {path: p.bfloat16() for path, p in params.items()})

    run_ranks(rank_main, ranks)


@pytest.mark.parametrize("name", ["zero1-bf16-2", "zero2-bf16-3", "zero3-bf16-3", "zero0-fp32-1"])
def test_names_of_a_module(name: str) -> None:
    """Under whichever of its names a tied weight is asked for, or under both, or under others."""
    held = held_of(name)
    want = {path: leaf.float() for path, leaf in {**held["params"], **held["frozen"]}.items()}
    _, params = fz.functional(Net())
    step = fz.freeze(fz.train_step(product, fz.sgd(LR)), "*base*")
    load = functools.partial(fz.compat.load_deepspeed, FOLDERS / name, step, optim=False)
    assert_trees_equal(dict(fz.gather(load(like=params).params)), {path: want[path] for path in params})
    assert load(like=params, seed=3).step == 0
    other = {path.replace("embed", "head"): leaf.to("meta") for path, leaf in params.items()}
    assert_trees_equal(fz.gather(load(like=other).params)["head.weight"], want["embed.weight"])
    both = fz.gather(load(like={**other, "embed.weight": params["embed.weight"]}).params)
    assert both["embed.weight"].equal(want["embed.weight"]) and both["head.weight"].equal(want["embed.weight"])
    mine = {"net": {path.replace(".", "/"): leaf for path, leaf in params.items()}}
    named = load(like=mine, names=lambda path: path.removeprefix("net.").replace("/", "."), pattern="net.b*")
    assert named.params["net.body/1/bias"].equal(want["body.1.bias"])
    assert named.params["net.scale"].equal(params["scale"]) and not named.params["net.scale"].equal(want["scale"])
    with pytest.raises(ValueError, match=r"names gives leaf .* one name"):
        load(like=mine, names=lambda path: "x")
    larger = {**params, "scale": torch.ones(2), "more": torch.ones(1)}
    with pytest.raises(ValueError, match=r"leaf 'more': got none there, expected shape \(1,\) \(and 1 more\)"):
        load(like=larger)
    with pytest.warns(UserWarning, match=r"leaf 'scale': got shape \(1,\) there, expected shape \(2,\)"):
        assert load(like=larger, lenient=True).params["scale"].equal(torch.ones(2))


def test_what_stage_0_has() -> None:
    name = "zero0-fp32-1"
    held = held_of(name)
    step = fz.freeze(fz.train_step(product, fz.adamw(LR)), "base.*")
    with pytest.raises(ValueError, match=r"a checkpoint of ZeRO stage 0, where they have no names.*optim=False"):
        fz.compat.load_deepspeed(FOLDERS / name, step)
    params = fz.gather(fz.compat.load_deepspeed(FOLDERS / name, step, optim=False).params)
    assert_trees_equal(dict(params), {**held["params"], **held["frozen"]})


def test_other_optimizers() -> None:
    load = functools.partial(fz.compat.load_deepspeed, FOLDERS / "zero3-fp32-2")
    for other in (fz.sgd(LR), fz.sgd(LR, momentum=0.9), fz.lion(LR)):
        with pytest.raises(ValueError, match=r"moments of another optimizer.*optim=False"):
            load(fz.freeze(fz.train_step(product, other), "base.*"))
    with pytest.raises(ValueError, match=r"leaf 'base.bias' has no exp_avg.*freeze the leaf"):
        load(fz.train_step(product, fz.adam(LR)))
    with pytest.raises(ValueError, match="moments of another optimizer"):
        fz.compat.load_deepspeed(FOLDERS / "sgd-2", fz.freeze(fz.train_step(product, fz.adamw(LR)), "base.*"))


# ---- folders that are not as they should be


def plain(optimizer: Any = None) -> fz.Step:
    return fz.freeze(fz.train_step(product, optimizer or fz.adamw(LR)), "base.*")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One of three ranks, that may be changed."""
    shutil.copytree(FOLDERS / "zero3-bf16-3", tmp_path / "run")
    return tmp_path / "run" / "global_step3"


def states(rank: int, kind: str = "optim") -> str:
    return f"{'bf16_' if kind == 'optim' else ''}zero_pp_rank_{rank}_mp_rank_00_{kind}_states.pt"


def test_the_meta_device(folder: Path) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=r"the meta device as the default.*Call it outside"):
        fz.compat.load_deepspeed(folder.parent, plain(), tag="global_step3")


def test_the_folder_itself(folder: Path) -> None:
    load = functools.partial(fz.compat.load_deepspeed, step=plain())
    with pytest.raises(FileNotFoundError, match=r"latest: got no such file\. Give the folder that save_checkpoint"):
        load(folder)
    with pytest.raises(FileNotFoundError, match="latest: got no such file"):
        load(folder.parent / "none")
    with pytest.raises(FileNotFoundError, match="global_step4: got no such folder"):
        load(folder.parent, tag="global_step4")
    assert load(folder.parent, tag="global_step3").step == 3
    (folder.parent / "global_step4").mkdir()
    with pytest.raises(FileNotFoundError, match="global_step4: got no states of a model"):
        load(folder.parent, tag="global_step4")
    with pytest.raises(TypeError, match="got tag=3"):
        fz.compat.load_deepspeed(folder.parent, plain(), tag=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("mp_rank_01_model_states.pt", "tensor or pipeline parallelism"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism"),
        ("layer_00-model_00-model_states.pt", "pipeline parallelism"),
        ("layer_0_expert_3_mp_rank_00_model_states.pt", "a mixture of experts"),
        ("expp_rank_0_mp_rank_00_optim_states.pt", "a mixture of experts"),
        ("offloaded_tensors", "lies on NVMe"),
        ("zero", "a universal checkpoint"),
        ("mp_rank_00_model_states.pt", "expected one of them. Files of different saves"),
        ("zero_pp_rank_3_mp_rank_00_optim_states.pt", "expected one of them. Files of different saves"),
        (states(3), r"expected one of 3, as so many are there|cannot|no whole file"),
    ],
)
def test_other_kinds_of_folders(folder: Path, name: str, match: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises((ValueError, fz.DamagedCheckpoint), match=f"global_step3.*{match}"):
        fz.compat.load_deepspeed(folder.parent, plain())


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_files_that_are_missing(folder: Path, kind: str, ranks: int) -> None:
    def rank_main(rank: int) -> None:
        step = plain() if ranks == 1 else fz.shard_zero3(plain())
        with pytest.raises(fz.DamagedCheckpoint, match=f"rank_{lost}_mp_rank_00_{kind}_states.pt: got no such"):
            fz.compat.load_deepspeed(folder.parent, step)

    for lost in (0, 1, 2):
        (folder / states(lost, kind)).rename(folder / "away")
        run_ranks(rank_main, ranks)
        (folder / "away").rename(folder / states(lost, kind))
    for lost in (0, 1, 2):
        (folder / states(lost)).unlink()
    with pytest.raises(fz.DamagedCheckpoint, match="where ZeRO keeps the masters"):
        fz.compat.load_deepspeed(folder.parent, plain())


def test_files_of_different_saves(folder: Path) -> None:
    load = functools.partial(fz.compat.load_deepspeed, folder.parent, plain())
    shutil.copy(FOLDERS / "zero3-fp32-2" / "global_step3" / states(1).removeprefix("bf16_"), folder / states(1))
    with pytest.raises(ValueError, match=r"rank_1_.* is one of 2 ranks' files, expected one of 3"):
        load()
    rewritten(FOLDERS / "zero3-bf16-3" / "global_step3" / states(1), folder / states(1), lambda d: count(d, 5.0))
    with pytest.raises(ValueError, match=r"rank_1_.*group 0 .* 5 updates .*expected .* 3 .*different saves"):
        load()
    shorter = lambda d: d["optimizer_state_dict"]["fp32_flat_groups"].__setitem__(0, torch.zeros(1))
    rewritten(FOLDERS / "zero3-bf16-3" / "global_step3" / states(1), folder / states(1), shorter)
    with pytest.raises(ValueError, match=r"rank_1_.*group 0 of the params has 1 elements"):
        load()
    rewritten(FOLDERS / "zero3-bf16-3" / "global_step3" / states(1), folder / states(1), lambda d: d.clear())
    with pytest.raises(fz.DamagedCheckpoint, match=r"rank_1_.*got no states as DeepSpeed writes them: KeyError"):
        load()


def rewritten(old: Path, new: Path, change: Any) -> None:
    found = unpickled(str(old), ["deepspeed.runtime.fp16.loss_scaler.LossScaler"], [ENUM])
    found["optimizer_state_dict"].update(loss_scaler=None, zero_stage=3)
    change(found)
    torch.save(found, new)


def count(found: Any, number: float) -> None:
    for own in found["optimizer_state_dict"]["optimizer_state_dict"]["state"].values():
        own["step"] = torch.tensor(number)


ENUM = "deepspeed.runtime.zero.config.ZeroStageEnum"


@in_turns(2)
@pytest.mark.parametrize("kind", ["optim", "model"])
def test_every_byte(folder: Path, kind: str) -> None:
    """What is changed is found, or changes nothing; what is cut is found."""
    path = folder / states(1, kind)
    text, draw = path.read_bytes(), random.Random(kind)
    step, held = plain(), held_of("zero3-bf16-3")
    want = {**held["params"], **held["frozen"]}
    found = 0
    for at in sorted(draw.sample(range(len(text)), 60)):
        path.write_bytes(text[:at] + bytes([text[at] ^ draw.randint(1, 255)]) + text[at + 1 :])
        try:
            state = fz.compat.load_deepspeed(folder.parent, step)
        except (fz.DamagedCheckpoint, ValueError) as error:
            found += path.name in str(error)
        else:
            assert_trees_equal(dict(fz.gather(state.params)), want)
    assert found > 20  # the rest is of the zip file's own, or between its records
    for length in (0, 1, 100, len(text) // 2, len(text) - 1):
        path.write_bytes(text[:length])
        with pytest.raises(fz.DamagedCheckpoint, match=f"{path.name}: got {length} bytes that are no whole file"):
            fz.compat.load_deepspeed(folder.parent, step)
    torch.save({}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match="old format"):
        fz.compat.load_deepspeed(folder.parent, step)


def test_a_changed_value_is_told_to_every_rank(folder: Path) -> None:
    path = folder / states(2)
    value = held_of("zero3-bf16-3")["moments"]["exp_avg"]["head.bias"][-2:].numpy().tobytes()
    text = path.read_bytes()
    assert text.count(value) == 1
    path.write_bytes(text.replace(value, bytes(len(value))))

    def rank_main(rank: int) -> None:
        with pytest.raises(fz.DamagedCheckpoint, match=r"rank_2_.*optim_states.pt: got Bad CRC-32 .*have changed"):
            fz.compat.load_deepspeed(folder.parent, fz.shard_zero3(plain()))

    run_ranks(rank_main, 3)


def test_ranks_that_differ(folder: Path) -> None:
    def rank_main(rank: int) -> None:
        load = functools.partial(fz.compat.load_deepspeed, step=fz.shard_zero3(plain()))
        with pytest.raises(ValueError, match="The checkpoints differ"):
            load(FOLDERS / ("zero3-fp32-2" if rank else "zero3-bf16-3"))
        with pytest.raises(ValueError, match="The checkpoints differ"):
            load(folder.parent, seed=rank)
        with pytest.raises(FileNotFoundError, match="global_step4"):
            load(folder.parent, tag="global_step4" if rank else None)

    run_ranks(rank_main, 2)


# ---- pickles


class Evil:
    """Does something where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


class Own:
    """Of somebody's client_state."""


@pytest.mark.parametrize("kind", ["optim", "model"])
def test_nothing_is_run(folder: Path, tmp_path: Path, kind: str) -> None:
    for number, evil in enumerate((Evil(tmp_path / "was-here"), {"module": Own(), "x": Evil(tmp_path / "was-here")})):
        torch.save({"optimizer_state_dict": evil, "module": evil}, folder / states(1, kind))
        with pytest.raises(ValueError, match=rf"{states(1, kind)}: .*names \S+{('mkdir', 'Own')[number]}.*not run"):
            fz.compat.load_deepspeed(folder.parent, plain())
    assert not (tmp_path / "was-here").exists()


def test_a_users_own_class_may_be_allowed(folder: Path) -> None:
    path = folder / states(0, "model")
    found = torch.load(path, weights_only=True)
    torch.save({**found, "mine": Own()}, path)
    with pytest.raises(ValueError, match=r"names \S+Own.*safe_globals"):
        fz.compat.load_deepspeed(folder.parent, plain())
    with torch.serialization.safe_globals([Own]):
        assert fz.compat.load_deepspeed(folder.parent, plain()).step == 3


def test_nothing_stays_allowed() -> None:
    before = {*map(str, torch.serialization.get_safe_globals())}

    def rank_main(rank: int) -> None:
        for _ in range(5):
            fz.compat.load_deepspeed(FOLDERS / "zero3-bf16-3", fz.shard_zero3(plain()))

    run_ranks(rank_main, 4)
    assert {*map(str, torch.serialization.get_safe_globals())} == before


# ---- where elements lie


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 4), st.integers(0, 3), st.data())
def test_a_leaf_is_put_together(numels: list[int], ranks: int, padding: int, data: Any) -> None:
    leaves = [torch.arange(float(numel)) + 100 * number for number, numel in enumerate(numels)]
    which = data.draw(st.integers(0, len(numels) - 1))
    start = data.draw(st.integers(0, numels[which]))
    stop = data.draw(st.integers(start, numels[which]))
    # the vector of all, in equal parts
    flat = torch.cat([torch.cat([leaf, torch.full((padding,), -1.0)]) for leaf in leaves])
    size = max(-(-flat.numel() // ranks), 1)
    parts = [flat[rank * size : (rank + 1) * size] for rank in range(ranks)]
    first = sum(numels[:which]) + padding * which
    # each leaf in equal parts
    shares = [-(-numel // ranks) for numel in numels]
    both = list(zip(leaves, shares, strict=True))
    own = [
        torch.cat([torch.cat([leaf, torch.zeros(ranks)])[rank * n : (rank + 1) * n] for leaf, n in both])
        for rank in range(ranks)
    ]
    for spread in (Spread((), parts, first, size, 0), Spread((), own, 0, max(shares[which], 1), sum(shares[:which]))):
        out = torch.empty(stop - start)
        spread.read(start, stop, out)
        assert out.equal(leaves[which][start:stop])
