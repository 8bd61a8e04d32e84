"""Steps with transforms inside a component, checkpoints of it, and its end when nobody holds it."""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import remote_builds as builds
import torch
from nightly import in_turns
from remote_builds import need_close

import fzero as fz

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "accumulate": lambda step: fz.accumulate(step, 2, in_dims=(0, None)),
    "weights": lambda step: fz.accumulate(step, 2, in_dims=(0, None), weights=lambda x, _: len(x)),
    "remat": fz.remat,
    "loss_scale": lambda step: fz.loss_scale(step, 4.0),
    "freeze": lambda step: fz.freeze(step, "blocks.0.*"),
    "fuse_update": lambda step: fz.fuse_update(fz.with_fn(step, builds.program)),
    "offload": lambda step: fz.offload(step, moments="host"),
}


def base(optimizer: Any = None) -> fz.Step:
    return fz.train_step(builds.program, optimizer or fz.adamw(0.01))


@in_turns(3)
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("on", ["threads"])
def test_transforms_go_on_inside(name: str, on: str) -> None:
    """Uneven shares of a batch."""
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    params = builds.weights()
    plain = fz.freeze(base(), "blocks.0.*") if name == "freeze" else base()
    local = plain.init(params)

    def build(rank: int) -> Any:
        return fz.shard_zero2(TRANSFORMS[name](base())), params

    with fz.remote(build, 2, on) as own:
        state = own.init()
        for _ in range(3):
            local, metrics = plain(local, x, ("loss",))
            state, theirs = own(state, x, ("loss",))
            need_close(fz.fetch(theirs["loss"]), metrics["loss"])
            need_close(fz.fetch(theirs["grad_norm"]), metrics["grad_norm"])
        if name != "fuse_update":
            loss, pull = plain.vjp(local, x, ("loss",))
            local, _ = plain.update(local, pull(torch.ones_like(loss))[0])
            loss, pull = own.vjp(state, x, ("loss",))
            state, _ = own.update(state, pull(torch.ones_like(loss))[0])
        need_close(fz.gather(state.params), fz.gather(local.params))


def test_a_donated_state_is_dead() -> None:
    with fz.remote(lambda rank: (fz.donate(fz.shard_zero1(base())), builds.weights()), 2, "threads") as own:
        x = torch.ones(4, 3, dtype=torch.float64)
        state = own.init()
        new, metrics = own(state, x, ("loss",))
        fz.fetch(metrics)
        with pytest.raises(RuntimeError, match="donated"):
            fz.fetch(own.forward(state, x, ("loss",)))
        assert new.step == 1 and fz.fetch(own.forward(new, x, ("rows",))).shape == (4, 4)


def test_aux_and_randomness() -> None:
    def fn(p: Any, x: torch.Tensor) -> Any:
        y = torch.nn.functional.dropout(x * p["w"], 0.5)
        return y.square().sum(1).mean(), {"rows": y, "mean": y.mean()}

    def build(rank: int) -> Any:
        w = torch.ones(3, dtype=torch.float64)
        return fz.shard_zero3(fz.train_step(fn, fz.sgd(0.1), has_aux=True)), {"w": w}

    x = torch.arange(15.0, dtype=torch.float64).view(5, 3)
    with fz.remote(build, 2, "threads") as own:
        state = own.init(seed=3)
        loss, pullback, aux = own.vjp(state, x, rng=1)
        rows = fz.fetch(aux["rows"])
        need_close(fz.fetch(loss), rows.square().sum(1).mean())
        need_close(fz.fetch(aux["mean"]), rows.mean())
        grads, (ct,) = pullback(torch.ones_like(loss))
        need_close(fz.fetch(ct), 2 * rows * (rows != 0) * 2 / 5)
        again, same = own.forward(state, x, rng=1)
        assert fz.fetch(same["rows"]).equal(rows) and again.item() == loss.item()
        assert not fz.fetch(own.forward(state, x, rng=2)[1]["rows"]).equal(rows)
        new, metrics = own(state, x, rng=1)
        need_close(fz.fetch(metrics["loss"]), fz.fetch(loss))
        assert fz.fetch(metrics["aux"]["rows"]).equal(rows)
        other, _ = own.update(state, grads)
        need_close(fz.gather(new.params), fz.gather(other.params))


def test_checkpoints_are_those_of_any_step(tmp_path: Path) -> None:
    """Saved by a component on three ranks, read by a step here, and by one on two."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    build = functools.partial(builds.built, optimizer="adamw")
    step, _ = builds.built(0, stage=0, optimizer="adamw")
    with fz.remote(build, 3, "threads") as own:
        state, _ = own(own.init(), x, ("loss",))
        fz.save(tmp_path / "a", state, extra={"seen": [3]})
        expected, _ = own(state, x, ("loss",))
        expected = fz.gather(expected.params)
    local = fz.load(tmp_path / "a", step)
    assert fz.load_extra(tmp_path / "a") == {"seen": [3]} and local.step == 1
    need_close(fz.gather(step(local, x, ("loss",))[0].params), expected)
    fz.save(tmp_path / "b", local)
    with fz.remote(build, 2, "threads", name="vision") as own:
        again, _ = own(fz.load(tmp_path / "b", own), x, ("loss",))
        need_close(fz.gather(again.params), expected)
        assert again.seed == 0
        with pytest.raises(FileNotFoundError):
            fz.load(tmp_path / "none", own)
        with pytest.raises(TypeError, match="like"):
            fz.load(tmp_path / "b", own, like={})
        with pytest.raises(TypeError, match="extra"):
            fz.save(tmp_path / "c", again, extra=object())


def test_a_component_that_nobody_holds_ends() -> None:
    own = fz.remote(functools.partial(builds.built_trouble, stage=0), 1)
    state: Any = own.init()
    links: Any = own.group.links
    (pid,) = [link._process.pid for link in links]
    del own
    gc.collect()
    assert state.step == 0  # a handle holds it
    del state
    gc.collect()
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.02)
    assert not Path(f"/proc/{pid}").exists()


THREADS = """
import atexit, glob, sys

def left():  # what still communicates as the interpreter ends would abort it, now and then
    names = [open(path).read() for path in glob.glob("/proc/self/task/*/comm")]
    if any("gloo" in name for name in names):
        print(names, file=sys.stderr)

atexit.register(left)
import torch, remote_builds as builds, fzero as fz
own = fz.remote(builds.built_trouble, 2, "threads")
state, x = own.init(), torch.ones(4, 3, dtype=torch.float64)
own.forward(state, x, "sleep")
out = [own.forward(state, x, "sleep") for _ in range(10)]
"""


@in_turns(10, "interpreters of their own")
def test_threads_end_with_the_interpreter(tmp_path: Path) -> None:
    """Silently, in the midst of their calls."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", THREADS], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("rows", [3, 5, 6])
def test_shares_that_do_not_divide_into_microbatches(rows: int) -> None:
    """Of some ranks or all: the numbers are those of the batch. What would part rows of examples, all ranks refuse."""
    x = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain = base()
    begun = plain.init(builds.weights())
    want, wanted = plain(begun, x, ("loss",))

    def build(rank: int, in_dims: object = (0, None)) -> Any:
        return fz.shard_zero3(fz.accumulate(base(), 2, in_dims=in_dims)), builds.weights()  # type: ignore[arg-type]

    with fz.remote(build, 2, "threads", timeout=20) as own:
        state, metrics = own(own.init(), x, ("loss",))
        fz.testing.assert_trees_close(fz.fetch(metrics["loss"]), wanted["loss"])
        fz.testing.assert_trees_close(fz.gather(state.params), fz.gather(want.params))
    specs: Any = (fz.PartitionSpec("dp"), fz.PartitionSpec(), fz.PartitionSpec())
    with fz.remote(
        functools.partial(build, in_dims=(0, None, 0)),
        2,
        "threads",
        timeout=20,
        in_specs=specs,
        out_specs=fz.PartitionSpec(),
    ) as own:
        state, begun_at = own.init(), time.monotonic()
        for call in (own, own.vjp, own.forward):
            with pytest.raises(ValueError, match=r"accumulate: got inputs of sizes .* microbatches"):
                fz.fetch(call(state, x, ("loss",), torch.ones(2)))
            with pytest.raises(ValueError, match=r"accumulate: tensor 1 .* has 0 dims, .* in_dims= with None"):
                fz.fetch(call(state, x, ("loss",), torch.ones(())))
        assert time.monotonic() - begun_at < 3


def test_a_checkpoint_is_held_against_the_params_of_build(tmp_path: Path) -> None:
    """Of other shapes or names it is refused; a part of it is read, and the rest is what build returned."""

    def with_params(params: Any) -> Any:
        return fz.remote(lambda rank: (fz.shard_zero1(fz.train_step(_dot, fz.adamw(0.1))), params), 2, "threads")

    ones, x = torch.ones(3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.float64)
    with with_params({"w": ones, "b": ones[:1]}) as own:
        state, _ = own(own.init(), x)
        fz.save(tmp_path / "kept", state)
        saved = fz.gather(state.params)
    for params in (
        {"w": torch.ones(4, dtype=torch.float64), "b": ones[:1]},
        {"v": ones, "b": ones[:1]},
        {"b": ones[:1]},
    ):
        with with_params(params) as other:
            with pytest.raises(ValueError, match="kept"):
                fz.load(tmp_path / "kept", other)
            other.init()
    with with_params({"w": ones * 7, "b": ones[:1] * 7}) as other:
        assert fz.gather(fz.load(tmp_path / "kept", other).params)["w"].equal(saved["w"])
        part = fz.gather(fz.load(tmp_path / "kept", other, pattern="w").params)
        assert part["w"].equal(saved["w"]) and part["b"].equal(ones[:1] * 7)


def _dot(p: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ p["w"] * p["b"]).mean()
