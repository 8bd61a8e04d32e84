from __future__ import annotations

import collections
import gc
import os
import re
from collections.abc import Generator, Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, too: the workers take all cores
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # or each that compiles has a pool of processes with torch
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # or each builds and loads a library to see that it can

import pytest
import torch
from dispositions import as_in_a_terminal
from hypothesis import HealthCheck, settings
from nightly import DAY, FEW, PROFILE, of_other_days, with_fewer_examples

from fzero.base.thread_state import prepare_for_fakes
from fzero.kernels import build

pytest_plugins = ["fzero.testing.plugin", "pytester"]
torch.set_num_threads(1)
prepare_for_fakes()  # tests make some on threads of their own
for name in ("ci", "day"):
    settings.register_profile(
        name, max_examples=FEW, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
    )
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(PROFILE)


@pytest.fixture
def terminal() -> Iterator[None]:
    """Signals do what they do in a program that a terminal has started, however these tests were."""
    with as_in_a_terminal():
        yield


# these start programs and wait for them, up to half a minute each
LONG = (
    *("test_remote_ray", "test_resuming", "test_examples", "test_notebooks", "test_multimodal", "test_lora"),
    *("test_benchmarks", "test_jit_function_ranks", "test_jit_axes", "test_jit_function_random", "test_huggingface"),
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "in_turns(of, group): one of so many cases runs on a day, see nightly.py")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is long comes first: no worker is left with it at the end, when the others have nothing to do."""
    others = of_other_days(items)
    config.hook.pytest_deselected(items=[*others])
    items[:] = [item for item in items if item not in others]
    with_fewer_examples(items)
    items.sort(key=lambda item: item.path.stem not in LONG)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without a look for garbage: nearly all that is imported stays, and looking took a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(10_000)  # garbage of tests is soon all there is; to look for it takes a twentieth of the time
        _leave_alone_what_stays()


def pytest_runtest_logstart() -> None:
    if len(gc.get_objects(generation=2)) > 20_000:
        _leave_alone_what_stays()


def _leave_alone_what_stays() -> None:
    """What is imported or cached between tests is no garbage: tests that collect it look at a million objects less."""
    gc.collect()
    gc.freeze()


_EXAMPLES = "examples of Hypothesis"
_IN_VAIN = "InvalidCxxCompiler: No working C++ compiler found"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes how many examples Hypothesis ran. Tests to which torch says that it has no C++ compiler are skipped."""
    report = yield
    if report.when == "call" and (statistics := getattr(item, "hypothesis_statistics", "")):
        report.user_properties.append((_EXAMPLES, sum(map(int, re.findall(r"(\d+) passing", statistics)))))
    if report.failed and build.compiler() is None and _IN_VAIN in report.longreprtext:
        path, line, _ = item.location
        report.outcome, report.longrepr = "skipped", (path, line or 0, "torch.compile needs a C++ compiler")
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints how many examples Hypothesis ran, by file, and what tests have counted, by class.

    A test counts by `record_property("counted", (title, class, column, name))`; the same name counts once.
    """
    if DAY is not None:
        terminalreporter.section(f"the cases of one day, again with HYPOTHESIS_PROFILE={PROFILE} TESTS_DAY={DAY}")
    by_file: collections.Counter[str] = collections.Counter()
    counted: set[tuple[str, ...]] = set()
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name == _EXAMPLES:
                by_file[report.nodeid.partition("::")[0]] += value
            elif name == "counted":
                counted.add(tuple(value))
    if by_file:
        terminalreporter.section(f"{by_file.total():,} examples of Hypothesis in {len(by_file)} files")
        for path, ran in sorted(by_file.items()):
            terminalreporter.write_line(f"{ran:6,} {path}")
    for title in sorted({title for title, *_ in counted}):
        own = [each for each in counted if each[0] == title]
        terminalreporter.section(f"{len({each[1::2] for each in own})} {title}")
        for (kind, column), ran in sorted(collections.Counter(each[1:3] for each in own).items()):
            terminalreporter.write_line(f"{ran:6} {kind}: {column}")
