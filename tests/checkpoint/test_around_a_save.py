"""What surrounds a save: how the script ends, forks, interrupts, training that goes on, and what other ranks see."""

from __future__ import annotations

import datetime
import errno
import functools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import by_turns, in_turns

import fzero as fz
from fzero.checkpoint import chunks, files, manifest
from fzero.testing import assert_trees_equal, run_ranks


def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
    return sum((block(own["w"]) for own in p["blocks"]), p["head"].square().sum()) * x.sum()


@fz.unit
def block(w: torch.Tensor) -> torch.Tensor:
    return (w - 0.1).square().mean()


def params() -> Any:
    return {"blocks": [{"w": torch.linspace(-1.0, i, 150)} for i in range(3)], "head": torch.ones(5)}


def step_of(ranks: int = 1) -> fz.Step:
    step = fz.train_step(loss, fz.adamw(0.1))
    return fz.shard_zero3(step) if ranks > 1 else step


X = torch.ones(1)


# ---- training that goes on

STAGES = (lambda step: step, fz.shard_zero1, fz.shard_zero2, fz.shard_zero3)
POLICIES = (None, fz.Policy(compute=torch.bfloat16), fz.Policy.compact24())


@in_turns(6)
@pytest.mark.filterwarnings("ignore:fz.offload to 'host'")
@pytest.mark.parametrize("seed", range(16))
def test_what_a_save_began_with_is_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, write = random.Random(seed), files.write
    world, stage = draw.randint(1, 2), draw.randrange(4)
    memories = [draw.choice((None, "host", fz.Disk(tmp_path / "scratch"))) for _ in range(2)]
    policy, fused = draw.choice(POLICIES), draw.random() < 0.3

    def slowly(*given: Any) -> None:
        time.sleep(0.002)
        write(*given)

    def rank_main(rank: int) -> None:
        step = fz.donate(STAGES[stage](fz.train_step(loss, fz.adamw(0.1), policy)))
        step = fz.fuse_update(step) if fused else step
        away: dict[str, Any] = {k: m for k, m in zip(("params", "moments"), memories, strict=True) if m is not None}
        step = fz.offload(step, **away) if away else step
        state, _ = step(step.init(params()), X)
        expected = fz.gather({"params": state.params, "moments": state.moments})
        extra = {"losses": [1.0]}
        saving = fz.save_async(tmp_path / "it", state, extra)
        extra["losses"].append(2.0)
        for _ in range(3):
            state, _ = step(state, X)
        saving.wait()
        again = fz.load(tmp_path / "it", step)
        assert again.step == 1 and fz.load_extra(tmp_path / "it") == {"losses": [1.0]}
        assert_trees_equal(fz.gather({"params": again.params, "moments": again.moments}), expected)

    monkeypatch.setattr(files, "write", slowly)
    run_ranks(rank_main, world)


# ---- ends, forks, interrupts

SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch.distributed as dist
from checkpoint.test_around_a_save import *
rank, ranks = {rank}, {ranks}
if ranks > 1:
    dist.init_process_group("gloo", init_method="file://{folder}/rendezvous", rank=rank, world_size=ranks)
write = files.write
def slowly(*given):
    time.sleep(0.05)
    write(*given)
files.write = slowly
fz.save_async({folder!r} + "/it", step_of(ranks).init(params()))
"""


@in_turns(10, "interpreters of their own")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_script_that_ends_meanwhile(tmp_path: Path, ranks: int) -> None:
    """The interpreter waits for the save."""
    tests = str(Path(__file__).parents[1])
    scripts = [SCRIPT.format(tests=tests, rank=rank, ranks=ranks, folder=str(tmp_path)) for rank in range(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = [subprocess.Popen([sys.executable, "-c", script], env=env, stderr=subprocess.PIPE) for script in scripts]
    for each in ran:
        _, said = each.communicate(timeout=120)
        assert each.returncode == 0 and not said, said.decode()
    assert_trees_equal(fz.gather(fz.load(tmp_path / "it", step_of()).params), params())


def test_an_interrupt_while_one_save_waits_for_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is forgotten: the next save waits again, and tells how the first one ended."""
    sync, fails = files.sync, [True]

    def slowly(descriptor: int) -> None:
        time.sleep(0.5)
        if fails[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    state = step_of().init(params())
    monkeypatch.setattr(files, "sync", slowly)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        fz.save_async(tmp_path / "first", state)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            fz.save(tmp_path / "second", state)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(OSError, match=r"the save before this one has failed.*first.*No space left"):
        fz.save(tmp_path / "third", state)
    fails[0] = False
    fz.save(tmp_path / "first", state)
    assert fz.load(tmp_path / "first", step_of()).step == 0


def test_a_process_that_is_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    out, into = os.pipe()
    with pytest.raises(RuntimeError), files.Folder(str(tmp_path)).only_writer():
        if (child := os.fork()) == 0:
            os.close(into)
            os.read(out, 1)  # until the parent has ended its part
            os._exit(0)
        raise RuntimeError
    try:
        fz.save(tmp_path, step_of().init(params()))
    finally:
        os.close(into)
        os.close(out)
        os.waitpid(child, 0)


# ---- other ranks


def test_a_folder_that_the_ranks_do_not_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at, own = files.Folder._at, threading.local()

    def elsewhere(self: files.Folder, name: str) -> str:
        path = at(self, name)
        second = threading.current_thread().name == "fzero-save" and "00001-of-" in name and self.path == str(tmp_path)
        return path + ".elsewhere" if second and getattr(own, "writes", True) else path

    def rank_main(rank: int) -> None:
        with pytest.raises(OSError, match=r"rank 1 has written \d+ bytes, of which rank 0 sees none.*all ranks share"):
            fz.save(tmp_path, step_of(2).init(params()))

    def size(self: files.Folder, name: str) -> int:
        return os.stat(at(self, name)).st_size

    monkeypatch.setattr(files.Folder, "_at", elsewhere)
    monkeypatch.setattr(files.Folder, "size", size)
    run_ranks(rank_main, 2)
    monkeypatch.undo()
    with pytest.raises(FileNotFoundError):
        fz.load(tmp_path, step_of())


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ({"params_only": True}, "all but the params anew"),
        ({"lossy": True}, "lossy True"),
        ({"pattern": "head", "like": params()}, r"of \['head'\]"),
        ({"lossy": "yes"}, "lossy='yes', expected True or False"),
        (fz.Policy(compute=torch.bfloat16), "compute=torch.bfloat16"),
        (fz.Policy.exact(torch.float32), "Policy"),
    ],
)
def test_ranks_that_ask_for_different_things(tmp_path: Path, what: Any, match: str) -> None:
    fz.save(tmp_path, step_of().init(params()))

    def rank_main(rank: int) -> None:
        step = fz.train_step(loss, fz.adamw(0.1), what if rank and isinstance(what, fz.Policy) else None)
        options = what if rank and isinstance(what, dict) else {}
        with pytest.raises((ValueError, TypeError), match=match):
            fz.load(tmp_path, fz.shard_zero3(step), **options)

    run_ranks(rank_main, 2)


def test_seeds_that_differ(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        state = step_of(2).init(params()).replace(seed=rank)
        with pytest.raises(ValueError, match="rank 0 has 'seed 0', rank 1 has 'seed 1'"):
            fz.save(tmp_path, state)

    run_ranks(rank_main, 2)


# ---- what is kept of state.extra

KEEP: Any = lambda value, params, applied: value


@pytest.mark.parametrize("job", ["load", "convert"])
def test_names_that_look_alike(tmp_path: Path, job: str) -> None:
    nested = {"a": {"b": 1.5, "t": torch.ones(1)}, "a.b": 2.5, "a%2Eb": 3.5, 1: 4.5}
    trees = lambda p: {"a": {"b": p.map(lambda x: x * 2)}, "a.b": p.map(lambda x: x * 3)}
    step = step_of().with_state(fz.Extra("e", "e()", lambda p: nested, KEEP))
    step = step.with_state(fz.Extra("f", "f()", trees, KEEP))
    step = step.with_state(fz.Extra("a", "a()", lambda p: {"b": {"c": 1.0}}, KEEP))
    step = step.with_state(fz.Extra("a.b", "b()", lambda p: {"c": 2.0}, KEEP))
    state = step.init(params())
    fz.save(tmp_path, state)
    again = fz.load(tmp_path, step) if job == "load" else fz.convert(state, fz.donate(step))
    assert again.extra["e"] == nested and (again.extra["a"], again.extra["a.b"]) == ({"b": {"c": 1.0}}, {"c": 2.0})
    for one in (lambda e: e["a"]["b"], lambda e: e["a.b"]):
        assert_trees_equal(fz.gather(one(again.extra["f"])), fz.gather(one(state.extra["f"])))
    both = fz.Extra("g", "g()", lambda p: {1: 1.0, "1": 2.0}, KEEP)
    with pytest.raises(ValueError, match=r"state.extra.g.1: got two values of this name"):
        fz.save(tmp_path, step_of().with_state(both).init(params()))


def test_partitions_whose_patterns_look_like_places(tmp_path: Path) -> None:
    table = {"head": fz.chain(fz.adamw(0.1)), "head.0": fz.adamw(0.2), "*": fz.sgd(0.1)}
    step = fz.train_step(lambda p, x: p["head"].sum() + p["head.0"].sum() + p["w"].sum(), fz.partition(table), units=[])
    state, _ = step(step.init({"head": torch.ones(2), "head.0": torch.ones(3), "w": torch.ones(1)}), X)
    fz.save(tmp_path, state)
    again = fz.load(tmp_path, step)
    assert_trees_equal(fz.gather(again.moments["head.0"].mu), fz.gather(state.moments["head.0"].mu))


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.float64])
def test_trees_of_any_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    """Also where the first update has widened what init began with."""
    later: Any = lambda value, params, applied: params.map(lambda p: (p > 0).to(dtype))
    step = step_of().with_state(fz.Extra("seen", "seen()", lambda p: p.map(lambda x: x.bfloat16()), later))
    state, _ = step(step.init(params()), X)
    fz.save(tmp_path, state)
    for again in (fz.load(tmp_path, step), fz.convert(state, fz.donate(step))):
        assert_trees_equal(fz.gather(again.extra["seen"]), fz.gather(state.extra["seen"]))


@pytest.mark.parametrize("kind", ["tensor", "tree"])
def test_dtypes_that_no_checkpoint_keeps(tmp_path: Path, kind: str) -> None:
    def init(params: fz.Sharded) -> object:
        return params.map(lambda x: x.to(torch.complex64)) if kind == "tree" else torch.ones(2).to_sparse()

    match = rf"state.extra.own.*{'complex64' if kind == 'tree' else 'dense'}.*kept in a checkpoint"
    with pytest.raises(TypeError, match=match):
        fz.save(tmp_path, step_of().with_state(fz.Extra("own", "own()", init, KEEP)).init(params()))


class Turning(torch.nn.Module):
    """Turns its inputs by complex phases, and keeps what it saw last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(5))
        self.register_buffer("phases", torch.polar(torch.ones(5), torch.arange(5.0)).conj())
        self.register_buffer("last", torch.zeros((), dtype=torch.complex128))
        self.register_buffer("none", torch.zeros(0, 3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = x * self.scale * self.phases
        self.last = turned.detach().sum().to(torch.complex128)
        self.phases = (self.phases * self.phases).conj()  # whose memory holds other numbers
        return torch.view_as_real(turned).square().sum()


def turned(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """The buffers of a state after two steps, which one of these ranks has saved and all have loaded."""
    apply, params, buffers = fz.functional(Turning(), buffers=True)
    step = fz.shard_zero3(fz.carry(fz.train_step(apply, fz.adamw(0.1)), buffers))
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, torch.arange(5.0) + rank)
    fz.save_async(folder, state, {"rank": "any"}).wait()
    loaded = fz.load(folder, step)
    assert_trees_equal(fz.gather(loaded.params), fz.gather(state.params))
    if rank == 0:
        assert_trees_equal(loaded.extra["carry"], state.extra["carry"])
    converted = fz.convert(state, fz.shard_zero1(fz.carry(fz.train_step(apply, fz.adamw(0.1)), buffers)))
    assert_trees_equal(converted.extra["carry"], loaded.extra["carry"])
    state, _ = step(loaded, torch.ones(5))
    assert state.extra["carry"]["last"].abs() > 0
    return {name: x.resolve_conj() for name, x in loaded.extra["carry"].items()}


@pytest.mark.filterwarnings("ignore:fz.save. the ranks' carries")
@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_complex_buffers(tmp_path: Path, backend: str) -> None:
    first, *others = run_ranks(functools.partial(turned, folder=str(tmp_path)), 2, backend=backend)
    for other in others:
        assert_trees_equal(other, first)
    assert {name: x.dtype for name, x in first.items()} == {
        **{"phases": torch.complex64, "last": torch.complex128, "none": torch.complex64}
    }
    module = Turning()
    for _ in range(2):
        module(torch.arange(5.0))
    torch.testing.assert_close(first["phases"], module.phases.resolve_conj(), rtol=1e-6, atol=1e-6)


OTHERS = [
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.float4_e2m1fn_x2, torch.uint16, torch.uint32, torch.uint64, torch.complex32),
]


def of_other_dtypes(rank: int, folder: str) -> dict[str, torch.Tensor]:
    """Every pattern of bits, contiguous and not, empty and 0-d, as a state keeps it, and what is loaded of it."""
    warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
    bits = torch.arange(256, dtype=torch.uint8).repeat(8)
    own = {str(dtype).removeprefix("torch."): bits.view(dtype).reshape(32, -1) for dtype in OTHERS}
    own |= {f"turned {name}": x.t() for name, x in own.items()} | {f"no {name}": x[:0] for name, x in own.items()}
    own |= {f"one {name}": x[1, 3] for name, x in own.items() if x.numel() and not name.startswith("turned")}
    fn = lambda p, carry, x: ((p["w"] * x).sum(), carry)
    step = fz.shard_zero3(fz.carry(fz.train_step(fn, fz.adamw(0.1)), own))
    state, _ = step(step.init({"w": torch.ones(3)}), torch.ones(3))
    fz.save(folder, state)
    loaded = fz.load(folder, step).extra["carry"]
    converted = fz.convert(state, fz.shard_zero1(fz.carry(fz.train_step(fn, fz.adamw(0.1)), own)))
    for name, x in own.items():
        for found in (loaded[name], converted.extra["carry"][name], state.extra["carry"][name]):
            assert (found.dtype, found.shape) == (x.dtype, x.shape), name
            mine, other = (y.contiguous().reshape(-1).view(torch.uint8) for y in (x, found))
            assert torch.equal(mine, other), name
    return {name: x.contiguous().reshape(-1).view(torch.uint8) for name, x in loaded.items()}


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_carries_of_dtypes_that_no_file_names(tmp_path: Path, backend: str) -> None:
    first, other = run_ranks(functools.partial(of_other_dtypes, folder=str(tmp_path)), 2, backend=backend)
    assert_trees_equal(other, first)


def test_a_carry_of_no_numbers_is_refused_as_it_is_made() -> None:
    step = fz.train_step(lambda p, carry, x: (p["w"].sum(), carry), fz.sgd(0.1))
    for dtype in (torch.bits8, getattr(torch, "uint4")):  # noqa: B009
        with pytest.raises(TypeError, match=rf"carry: got value c=a tensor of .*{dtype}, expected one of numbers"):
            fz.carry(step, {"c": torch.empty(2, dtype=dtype)})


# ---- Checkpoints


def test_a_damaged_one_is_not_counted(tmp_path: Path) -> None:
    kept, state = fz.Checkpoints(tmp_path, keep=2), step_of().init(params())
    for number in range(3):
        kept.save(state, {"number": number})
    for path in [*tmp_path.glob("000003*/*.safetensors"), *tmp_path.glob("000002*/*.safetensors")]:
        os.truncate(path, 100)
    (tmp_path / "000009-update-0").write_text("a file of somebody's")
    kept.save(state, {"number": 3})
    kept.save(state, {"number": 4})
    assert sorted(os.listdir(tmp_path)) == ["000004-update-0", "000005-update-0", "000009-update-0"]

    def rank_main(rank: int) -> Any:
        found = kept.restore(step_of(2))
        return found and found[1]

    assert run_ranks(rank_main, 2) == [{"number": 4}] * 2


def test_a_newest_one_that_was_emptied_is_told(tmp_path: Path) -> None:
    kept = fz.Checkpoints(tmp_path)
    for number in range(2):
        kept.save(step_of().init(params()), number)
    for path in tmp_path.glob("000002*/*"):
        path.unlink()
    with pytest.warns(UserWarning, match=r"000002-update-0 is empty and is skipped"):
        found = kept.restore(step_of())
    assert found is not None and found[1] == 0


def test_a_folder_that_is_restored_from_while_another_run_saves_there(tmp_path: Path) -> None:
    state, ended = step_of().init(params()), threading.Event()
    fz.Checkpoints(tmp_path, keep=1).save(state, 0)

    def saves() -> None:
        for number in range(1, 40):
            fz.Checkpoints(tmp_path, keep=1).save(state.replace(step=number), number)
            time.sleep(0.03)  # else each may be gone before a busy machine has read it
        ended.set()

    def rank_main(rank: int) -> None:
        last = 0
        while True:
            over = torch.tensor(float(ended.is_set()))
            torch.distributed.all_reduce(over)
            found = fz.Checkpoints(tmp_path).restore(step_of(2))
            assert found is not None and found[0].step == found[1] >= last
            last = found[1]
            if over:
                return

    other = threading.Thread(target=saves)
    other.start()
    run_ranks(rank_main, 2)
    other.join()


def test_another_save_between_the_looks_of_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, looked, saved = step_of().init(params()), threading.Event(), threading.Event()
    fz.save(tmp_path, state)
    read = manifest.read_manifest

    def later(folder: str) -> object:
        if torch.distributed.get_rank() == 1 and not saved.is_set():
            assert looked.wait(60)
            fz.save(tmp_path, state.replace(step=7))
            saved.set()
        found = read(folder)
        looked.set()
        return found

    monkeypatch.setattr("fzero.checkpoint.read.read_manifest", later)

    def rank_main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"The checkpoints differ .*let nobody save there meanwhile"):
            fz.load(tmp_path, step_of(2))
        assert fz.load(tmp_path, step_of(2)).step == 7

    run_ranks(rank_main, 2)


@pytest.mark.parametrize(
    ("path", "is_folder"),
    [("file://{}/a", True), ("file://localhost{}/b", True), ("file:{}/c", True), ("file://d", False)],
)
def test_local_urls(tmp_path: Path, path: str, is_folder: bool) -> None:
    state, own = step_of().init(params()), path.format(tmp_path)
    if is_folder:
        fz.save(own, state)
        assert len(list(tmp_path.iterdir())) == 1 and fz.load(own, step_of()).step == 0
    else:
        with pytest.raises(ValueError, match="the URL of an absolute path"):
            fz.save(own, state)


# ---- ranks that take their time


def slow_save(rank: int, folder: str, slow: int, timeout: float, pieces: float) -> str:
    """What a save says where one rank's writes take so many times the process group's timeout."""
    write = files.write
    group: Any = torch.distributed.new_group(timeout=datetime.timedelta(seconds=timeout))
    mesh = torch.distributed.DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))

    def slowly(descriptor: int, data: memoryview, offset: int) -> None:
        if rank == slow and len(data) > 1000:
            time.sleep(timeout * pieces)
        write(descriptor, data, offset)

    step = fz.shard_zero3(fz.train_step(lambda p: p["w"].sum(), fz.sgd(0.1)), mesh=mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "CHUNK", 4096)
        patch.setattr(files, "write", slowly)
        try:
            fz.save(folder, step.init({"w": torch.ones(6000)}))
            return "saved"
        except OSError as error:
            return str(error)


@pytest.mark.parametrize(("slow", "how"), by_turns([0, 1], [(2.0, 0.5, True), (1.0, 1.5, False)]))
def test_a_rank_that_is_slower_than_the_timeout(tmp_path: Path, slow: int, how: tuple[float, float, bool]) -> None:
    timeout, pieces, saved = how
    """Who gets on is waited for; otherwise it has failed on every rank."""
    fn = functools.partial(slow_save, folder=str(tmp_path), slow=slow, timeout=timeout, pieces=pieces)
    said = run_ranks(fn, 2, backend="processes")
    assert all((text == "saved") == saved for text in said), said
    assert (tmp_path / "manifest.json").exists() == saved


# ---- what was found by others


def test_a_file_that_a_callable_misses_is_no_damage(tmp_path: Path) -> None:
    kept = fz.Checkpoints(tmp_path)
    for number in range(2):
        kept.save(step_of().init(params()), number)

    def missing() -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise FileNotFoundError("/data/head.pt")
        return torch.ones(5)

    calls: list[int] = []
    with pytest.raises(FileNotFoundError, match=r"/data/head.pt"):
        kept.restore(step_of(), like={**params(), "head": missing}, pattern="blocks*")


def test_a_forked_process_does_not_wait_for_its_parents_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, write = threading.Event(), files.write

    def late(*given: Any) -> None:
        go.wait(60)
        write(*given)

    monkeypatch.setattr(files, "write", late)
    state = step_of().init(params())
    saving = fz.save_async(tmp_path / "it", state)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)
            go.set()
            try:
                saving.wait()
            except RuntimeError as error:
                code = 0 if "was forked from it" in str(error) else 2
            fz.save(tmp_path / "own", state)
        except BaseException:
            code = 3
        os._exit(code)
    _, status = os.waitpid(child, 0)
    go.set()
    saving.wait()
    assert status == 0 and fz.load(tmp_path / "own", step_of()).step == 0


def test_ranks_at_different_verbs_are_told(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        state = step_of(2).init(params())
        fz.save(tmp_path, state)
        with (
            fz.testing.checked_collectives(False),
            pytest.raises(RuntimeError, match=r"diverged: rank 0: save; rank 1: load\."),
        ):
            fz.save(tmp_path, state) if rank == 0 else fz.load(tmp_path, step_of(2))

    run_ranks(rank_main, 2)


def test_counts_that_dcp_has_no_place_for(tmp_path: Path) -> None:
    state = step_of().init(params())
    with pytest.raises(ValueError, match=r"state.step is 100 and the optimizer has counted 0"):
        fz.compat.save_dcp(tmp_path, state.replace(step=100))
    fz.compat.save_dcp(tmp_path, state.replace(step=100), optim=None)


def test_paths_of_files(tmp_path: Path) -> None:
    fz.save(tmp_path / "it", step_of().init(params()))
    with pytest.raises(NotADirectoryError, match="got a file, expected the folder of a checkpoint"):
        fz.load(tmp_path / "it" / "manifest.json", step_of())
    with pytest.raises(NotADirectoryError, match="got a file or a link to nothing, expected a folder"):
        fz.Checkpoints(tmp_path / "it" / "manifest.json" / "run").restore(step_of())


def test_an_extra_that_is_deep_or_holds_itself(tmp_path: Path) -> None:
    extra: Any = 0
    for _ in range(900):
        extra = [extra]
    fz.save(tmp_path, step_of().init(params()), extra)
    assert str(fz.load_extra(tmp_path)) == str(extra)
    extra.append(extra)
    with pytest.raises(ValueError, match=r"fz.save: extra: got .*Circular reference"):
        fz.save(tmp_path, step_of().init(params()), extra)
