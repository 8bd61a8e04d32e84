"""fz.compat.save_dcp and load_dcp: torch writes and we read, we write and torch reads."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import random
from pathlib import Path
from typing import Any

import optree
import pytest
import torch
import torch.distributed.checkpoint as dcp
from nightly import in_turns
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import fzero as fz
from fzero.testing import assert_trees_close, assert_trees_equal, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of dcp without a process group and of ShardedTensor
SHARDS = (lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)
POLICIES: dict[str, Any] = {"plain": None, "exact": fz.Policy.exact(), "compact24": fz.Policy.compact24()}
X = torch.linspace(-1.0, 1.0, 12).view(2, 6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7))
        self.head = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x))) * self.scale


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def optimizers(name: str, params: Any) -> tuple[Any, torch.optim.Optimizer]:
    return {
        "adamw": lambda: (fz.adamw(1e-2, weight_decay=0.1), torch.optim.AdamW(params, 1e-2, weight_decay=0.1)),
        "sgd": lambda: (fz.sgd(1e-2, momentum=0.9), torch.optim.SGD(params, 1e-2, momentum=0.9)),
        "plain sgd": lambda: (fz.sgd(1e-2), torch.optim.SGD(params, 1e-2)),
    }[name]()


def by_torch(rank: int, folder: str, name: str, sharded: bool, steps: int) -> Any:
    """Trained by torch, in one process or with FSDP2, and saved by DCP."""
    module = net()
    if sharded:
        fully_shard(module.head)
        fully_shard(module)
    _, optimizer = optimizers(name, module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        module(X).square().mean().backward()
        optimizer.step()
    model, optim = (dict[str, Any](own) for own in get_state_dict(module, optimizer))
    dcp.save({"model": model, "optim": optim}, checkpoint_id=folder, no_dist=not sharded)
    whole = lambda tree: {path: x.full_tensor() if hasattr(x, "full_tensor") else x.clone() for path, x in tree.items()}
    return whole(dict(model)), {path: whole(own) for path, own in optim["state"].items()}


def by_us(rank: int, folder: str, name: str, stage: int, scheme: str, out: str | None = None) -> Any:
    module = net()
    apply, params = fz.functional(module)
    optimizer, _ = optimizers(name, module.parameters())
    step = fz.train_step(lambda p, x: apply(p, x).square().mean(), optimizer, POLICIES[scheme])
    step = SHARDS[stage](step)
    state = fz.compat.load_dcp(folder, step, like=params)
    loaded = values(state)
    if out is not None:
        state, _ = step(state, X)
        fz.compat.save_dcp(out, state)
        assert_trees_equal(values(fz.compat.load_dcp(out, step, like=params)), values(state))
    return loaded


def values(state: fz.TrainState) -> Any:
    return fz.gather(state.params), fz.gather(state.moments), state.step


def moments(tree: Any) -> dict[str, Any]:
    words = {"mu": "exp_avg", "nu": "exp_avg_sq", "momentum": "momentum_buffer"}
    return {words[name]: own for name, own in tree._asdict().items() if name != "count" and own is not None}


@in_turns(3)
@pytest.mark.parametrize("name", ["adamw", "sgd", "plain sgd"])
def test_of_torch(tmp_path: Path, name: str) -> None:
    """In, on, and out again into torch, which goes on as it would have."""
    model, optim = by_torch(0, str(tmp_path / "in"), name, sharded=False, steps=3)
    draw = random.Random(name)
    for number, (ranks, stage) in enumerate(draw.sample([*itertools.product((1, 2, 3, 4), (1, 2, 3))], 3) + [(1, 0)]):
        job = functools.partial(by_us, folder=str(tmp_path / "in"), name=name, stage=stage, scheme="plain")
        params, own, count = run_ranks(functools.partial(job, out=str(tmp_path / f"out{number}")), ranks)[0]
        assert_trees_equal(dict(params), {path: leaf.detach() for path, leaf in model.items()})
        for word, tree in moments(own).items():
            assert_trees_equal(dict(tree), {path: optim[path][word] for path in params})
        assert count == (3 if name == "adamw" else 0)
        module = net()
        _, optimizer = optimizers(name, module.parameters())
        sd: dict[str, Any] = dict(zip(("model", "optim"), get_state_dict(module, optimizer), strict=True))
        planner = DefaultLoadPlanner(allow_partial_load=True)
        dcp.load(sd, checkpoint_id=tmp_path / f"out{number}", planner=planner, no_dist=True)
        set_state_dict(module, optimizer, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        further, _ = by_torch(0, str(tmp_path / f"further{number}"), name, sharded=False, steps=4)
        assert_trees_close(dict(module.state_dict()), further, rtol=1e-5, atol=1e-6)


def test_of_fsdp_on_processes(tmp_path: Path) -> None:
    save = functools.partial(by_torch, folder=str(tmp_path / "in"), name="adamw", sharded=True, steps=2)
    model, optim = run_ranks(save, 2, backend="processes")[0]
    load = functools.partial(by_us, folder=str(tmp_path / "in"), name="adamw", stage=3, scheme="plain")
    params, own, count = run_ranks(functools.partial(load, out=str(tmp_path / "out")), 3, backend="processes")[0]
    assert_trees_equal(dict(params), model)
    assert_trees_equal(dict(own.nu), {path: optim[path]["exp_avg_sq"] for path in params})
    assert count == 2


def leaf_step(policy: Any = None) -> fz.Step:
    loss = lambda p, x: torch.stack([(leaf * x).square().mean() for leaf in optree.tree_leaves(p)]).sum()
    return fz.train_step(loss, fz.chain(fz.clip_by_global_norm(1.0), fz.adamw(1e-2)), policy)


@in_turns(2)
@pytest.mark.parametrize("seed", range(8))
def test_there_and_back(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    shape = lambda: tuple(draw.choice((1, 2, 3, 9, 65)) for _ in range(draw.randint(0, 3)))
    params = {"a": {"x": torch.randn(shape(), generator=generator)}, "b": torch.randn(shape(), generator=generator)}
    first, second = (draw.choice(SHARDS[1:]) for _ in range(2))
    policy = POLICIES[draw.choice([*POLICIES])]

    def save(rank: int) -> Any:
        step = first(leaf_step(policy))
        state, _ = step(step.init(params), torch.tensor(1.0 + rank))
        fz.compat.save_dcp(tmp_path, state, model="", optim="o")
        return values(state)

    def load(rank: int) -> Any:
        return values(
            fz.compat.load_dcp(tmp_path, second(leaf_step(policy)), like=params, model="", optim="o", lossy=True)
        )

    expected = run_ranks(save, draw.randint(1, 4))[0]
    found = run_ranks(load, draw.randint(1, 4))[0]
    assert_trees_equal(found, expected)


PARAMS = {"v": torch.arange(1.0, 71.0), "w": torch.ones(3, 2)}


def test_bad_input(tmp_path: Path) -> None:
    step = leaf_step()
    state, _ = step(step.init(PARAMS), torch.ones(()))
    load = functools.partial(fz.compat.load_dcp, tmp_path, step)
    with pytest.raises(FileNotFoundError, match="no checkpoint of torch"):
        load()
    fz.compat.save_dcp(tmp_path, state, optim=None)
    with pytest.raises(ValueError, match=r"no name begins with 'optim.state.'"):
        load()
    assert load(optim=None).step == 0
    with pytest.raises(FileExistsError, match=r"has a checkpoint of torch.distributed.checkpoint.*a new folder"):
        fz.compat.save_dcp(tmp_path, state)
    assert load(optim=None).step == 0
    os.remove(tmp_path / ".metadata")
    fz.compat.save_dcp(tmp_path, state)
    assert len(os.listdir(tmp_path)) == 2
    assert_trees_equal(values(load()), values(state))
    with pytest.raises(ValueError, match="moments of another optimizer"):
        fz.compat.load_dcp(tmp_path, fz.train_step(lambda p, x: x, fz.lion(0.1)))
    with pytest.raises(ValueError, match=r"moments of another optimizer.*exp_avg"):
        fz.compat.load_dcp(tmp_path, fz.train_step(lambda p, x: x, fz.sgd(0.1)))
    with pytest.raises(ValueError, match="rounded to bf16"):
        fz.compat.load_dcp(tmp_path, leaf_step(fz.Policy.compact24()))
    with pytest.raises(ValueError, match=r"leaf 'x': got none there"):
        load(like={**PARAMS, "x": torch.ones(1)})
    part = load(like={**PARAMS, "w": torch.zeros(3, 2)}, pattern="v")
    assert torch.equal(part.params["v"], state.params["v"]) and not part.params["w"].any()
    with pytest.raises(ValueError, match=r"two tensors of the name 'state.w.exp_avg'"):
        tree = {"state": {"w": {"exp_avg": torch.ones(1)}}, "w": torch.ones(1)}
        fz.compat.save_dcp(tmp_path / "x", step.init(tree), model="", optim="")
    data = next(tmp_path.glob("*.distcp"))
    text = data.read_bytes()
    data.write_bytes(text[: len(text) // 2])
    with pytest.raises(fz.DamagedCheckpoint, match="cannot be read"):
        load()
    os.remove(data)
    with pytest.raises(fz.DamagedCheckpoint, match="cannot be read"):
        load()
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(fz.DamagedCheckpoint, match=r"its metadata names .*\.system"):
        load()
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(fz.DamagedCheckpoint, match="metadata cannot be read"):
        load()


def test_metadata_that_is_cut_or_lacks_a_part(tmp_path: Path) -> None:
    step = leaf_step()
    fz.compat.save_dcp(tmp_path, step.init(PARAMS))
    place = tmp_path / ".metadata"
    whole = place.read_bytes()
    without = []
    for pick, name in (
        (lambda found: found, "state_dict_metadata"),
        (lambda found: found.state_dict_metadata["model.w"], "chunks"),
        (lambda found: found.state_dict_metadata["model.w"], "size"),
        (lambda found: found.state_dict_metadata["model.w"], "properties"),
        (lambda found: found.state_dict_metadata["model.w"].chunks[0], "sizes"),
    ):
        found = pickle.loads(whole)
        delattr(pick(found), name)
        without.append(pickle.dumps(found))
    for damaged in (*without, *(whole[:end] for end in range(0, len(whole), 41))):
        place.write_bytes(damaged)
        with pytest.raises(fz.DamagedCheckpoint, match=r"\.metadata cannot be read"):
            fz.compat.load_dcp(tmp_path, step)


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/fzero-was-here",)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank is told why, and nothing is there."""
    real = FileSystem.create_stream

    @contextlib.contextmanager
    def full(own: Any, path: Any, mode: str) -> Any:
        with real(own, path, mode), open("/dev/full", mode, buffering=0) as stream:
            yield stream

    def rank_main(rank: int) -> None:
        state = (step := fz.shard_zero3(leaf_step())).init(PARAMS)
        with pytest.raises(OSError, match="No space left on device"):
            fz.compat.save_dcp(tmp_path, state)
        with pytest.raises(FileNotFoundError, match="no checkpoint of torch"):
            fz.compat.load_dcp(tmp_path, step)

    monkeypatch.setattr(FileSystem, "create_stream", full)
    run_ranks(rank_main, 2)


def test_every_rank_is_told(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        step = fz.shard_zero3(leaf_step())
        state = step.init(PARAMS)
        with pytest.raises(ValueError, match="The checkpoints differ"):
            fz.compat.save_dcp(tmp_path / str(rank), state)
        with pytest.raises(OSError, match="not a folder"):
            fz.compat.save_dcp(__file__, state)
        fz.compat.save_dcp(tmp_path, state)
        if rank == 0:
            os.remove(next(tmp_path.glob("*.distcp")))
        with pytest.raises(fz.DamagedCheckpoint, match="cannot be read"):
            fz.compat.load_dcp(tmp_path, step)

    run_ranks(rank_main, 2)
