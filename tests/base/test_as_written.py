"""Torch's stance on compiled code is left as others set it, however threads overlap; what torch keeps is its own."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import in_turns
from torch.utils import _python_dispatch

import fzero as fz
from fzero.testing import run_ranks

# torch's own, as it traces
pytestmark = [pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")]
eval_frame = pytest.importorskip("torch._dynamo.eval_frame")


@pytest.fixture(autouse=True)
def _default(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # which a dispatch mode that a test before had on rank threads, `with` by `with`, may have left
    monkeypatch.setattr(_python_dispatch, "_is_in_torch_dispatch_mode", False)
    monkeypatch.setattr(_python_dispatch, "_is_in_non_infra_torch_dispatch_mode", False)
    torch._dynamo.reset()  # what one function is compiled to has a limit
    yield
    torch.compiler.set_stance("default")


def stance() -> str:
    return eval_frame._stance.stance


def made(hook: Callable[[], object] = lambda: None, counts: list[int] | None = None) -> Any:
    def backend(graph: Any, inputs: object) -> Any:
        if counts is not None:
            counts.append(1)
        return graph.forward

    helper = torch.compile(lambda x: x.sin() * 2 + x, backend=backend)

    def unit(p: Any, x: torch.Tensor) -> torch.Tensor:
        hook()
        return fz.name(helper(x @ p["w"]), "a")

    called = fz.unit(unit)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return called(p["blocks"][1], called(p["blocks"][0], x)).square().mean()

    return fz.train_step(loss, fz.sgd(0.1))


def params() -> Any:
    return {"blocks": [{"w": torch.eye(4) / 2} for _ in range(2)]}


def steps(step: Any, count: int = 1) -> None:
    state = step.init(params())
    for _ in range(count):
        state, _ = step(state, torch.ones(3, 4))


FORMS = {
    "plain": lambda step: step,
    "whole": lambda step: fz.remat(step, "blocks.*"),
    "names": lambda step: fz.remat(step, "blocks.*", ("a",)),
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_another_thread_sets_a_stance_while_a_first_run_ends(form: str) -> None:
    running, is_set, ended = threading.Event(), threading.Event(), threading.Event()

    def other() -> None:
        running.wait()
        with torch.compiler.set_stance("eager_on_recompile"):
            is_set.set()
            ended.wait()

    def hook() -> None:
        running.set()
        is_set.wait()

    thread = threading.Thread(target=other)
    thread.start()
    steps(FORMS[form](made(hook)))
    assert stance() == "eager_on_recompile"
    ended.set()
    thread.join()
    assert stance() == "default"


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_function_that_sets_a_stance(form: str) -> None:
    steps(FORMS[form](made(lambda: torch.compiler.set_stance("eager_on_recompile"))))
    assert stance() == "eager_on_recompile"


def test_other_threads_compile_meanwhile() -> None:
    seen: list[str] = []

    def hook() -> None:
        thread = threading.Thread(target=lambda: seen.append(stance()))
        thread.start()
        thread.join()
        seen.append(stance())

    steps(made(hook))
    assert seen == ["default", "force_eager"] * 4  # two units, each by a trial and a run
    assert stance() == "default"


@in_turns(3)
@pytest.mark.parametrize("form", sorted(FORMS))
def test_ranks_on_threads_leave_the_default(form: str) -> None:
    """And none says to torch for ever that operators are looked at, which it does not compile under."""
    run_ranks(lambda rank: steps(fz.shard_zero3(FORMS[form](made())), 3), 3)
    assert stance() == "default"
    assert not _python_dispatch.is_in_torch_dispatch_mode()
    counts: list[int] = []
    steps(made(counts=counts), 2)
    assert counts


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_a_step_inside_of_what_is_compiled_is_refused() -> None:
    step = made()
    state = step.init(params())
    outer = torch.compile(lambda x: step(state, x * 2)[1]["loss"] + 1, backend="eager")
    with pytest.raises(RuntimeError, match=r"Call it outside of that function, keep it out by torch\.compiler"):
        outer(torch.ones(3, 4))
    assert stance() == "default"


@in_turns(12, "compiled by torch")
@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_a_unit_inside_of_what_is_compiled_is_refused() -> None:
    block = fz.unit(lambda p, x: x @ p["w"])
    outer = torch.compile(lambda p, x: block(p, x) + 1, backend="eager")

    def run(rank: int) -> None:
        step = fz.shard_zero3(fz.train_step(lambda p, x: outer(p["blocks"][0], x).square().mean(), fz.sgd(0.1)))
        steps(step, 2)

    with pytest.raises(fz.testing.RankError, match=r"Call it outside of that function.*fz\.compile"):
        run_ranks(run, 1)
    assert stance() == "default"


# ---- in a process of its own, in which nobody has imported Dynamo

PROGRAM = """
import sys, torch, fzero as fz

def block(p, x):
    return fz.name(torch.tanh(x @ p["w"]), "a")

def compiles(p, x):
    return torch.compile(lambda x: torch.tanh(x @ p["w"]), backend="eager")(x)

def params():
    return [{"w": torch.eye(4) / 2}, {"w": torch.eye(4) / 3}]

def losses(fn, *around):
    step = fz.train_step(lambda p, x: fn(p[1], fn(p[0], x)).square().mean(), fz.sgd(0.1))
    for transform in around:
        step = transform(step)
    state, out = step.init(params()), []
    for _ in range(3):
        state, metrics = step(state, torch.ones(3, 4))
        out.append(metrics["loss"].item())
    return out
"""


def printed(tmp_path: Path, lines: str) -> list[str]:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + lines)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_steps_do_not_import_dynamo(tmp_path: Path) -> None:
    """It takes seconds, and a first step milliseconds."""
    lines = """
losses(block)
losses(fz.unit(block), lambda step: fz.remat(step, save=["a"]))
torch.distributed.init_process_group("gloo", init_method="file://{store}", rank=0, world_size=1)
losses(fz.unit(block), fz.shard_zero3, fz.donate, fz.autocast)
print("torch._dynamo" in sys.modules)
"""
    assert printed(tmp_path, lines.format(store=tmp_path / "store")) == ["False"]


def test_what_is_compiled_first_in_a_first_run(tmp_path: Path) -> None:
    want, *got = printed(tmp_path, "for fn in block, compiles, fz.unit(compiles): print(losses(fn))")
    assert got == [want, want]


def test_what_is_made_to_be_compiled_in_a_first_run_is_compiled_later(tmp_path: Path) -> None:
    """Dynamo, which that run imports, would leave out for ever what it found under the run's modes."""
    lines = """
graphs = []


def counted(graph, inputs):
    graphs.append(1)
    return graph.forward


helper = functools.cache(lambda: torch.compile(lambda x: x.sin() * 2 + x, backend=counted))


def lazy(p, x):
    return helper()(x @ p["w"])


losses(fz.unit(lazy))
print(len(graphs) > 0)
"""
    assert printed(tmp_path, "import functools\n" + lines) == ["True"]
