"""Kernels: the bits without a compiler, the folder that they are kept in, compilers that fail, builds at once."""

from __future__ import annotations

import concurrent.futures
import json
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import updates
from nightly import NIGHTLY, at_length, in_turns

from fzero.formats.formats import CHUNK
from fzero.kernels import build, onepass
from fzero.testing import assert_trees_equal

SEVEN = 'extern "C" int kernel() { return 7; }\n'
EIGHT = 'extern "C" int kernel() { return 8; }\n'
PLANTED = 'extern "C" int kernel() { return 13; }\n'
STRANGER = 12345  # another user
NO_COMPILER = "/nonexistent/g++"

ROOT = Path(__file__).parent.parent.parent
needs_compiler = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler")


def forget() -> None:
    """As a process does that begins."""
    build.kernel.cache_clear()
    build._built.cache_clear()
    build._told.clear()


@pytest.fixture
def fresh() -> Iterator[None]:
    """As in a process that begins; libraries that other tests have built are in the user's own cache folder."""
    forget()
    yield
    forget()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, quick: Path) -> Path:
    """A cache folder of this test's own, a folder for temporaries beside it, and a compiler that takes no time."""
    monkeypatch.setenv("CXX", str(quick))
    (tmp_path / "home").mkdir(0o700)
    (tmp_path / "temporary").mkdir(0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compiler of the sources above, which has built them already."""
    folder = tmp_path_factory.mktemp("built")
    for source in (SEVEN, EIGHT, PLANTED):
        (folder / f"{_number(source)}.so").write_bytes(library_of(source, folder / _number(source)))
    text = r's/.*return \([0-9]*\).*/\1/p'
    find = f'while [ "$2" != -o ]; do shift; done\ncp "{folder}/$(sed -n \'{text}\' "$1").so" "$3"'
    return script(folder / "g++", find)


def _number(source: str) -> str:
    return source.split("return ")[1].split(";")[0]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path, quick: Path) -> Path:
    """Where a compiler, CXX, writes down what it is called with."""
    script(tmp_path / "wrapper", f'echo "$@" >> {tmp_path}/log\nexec {quick} "$@"')
    monkeypatch.setenv("CXX", str(tmp_path / "wrapper"))
    (tmp_path / "log").touch()
    return tmp_path / "log"


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user owns it from now on."""
    if os.geteuid() == 0:
        os.lchown(path, STRANGER, STRANGER)
    else:
        seem_given_away(path, monkeypatch)


def seem_given_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.stat

    def stat_(of: Path, **options: Any) -> os.stat_result:
        about = real(of, **options)
        return os.stat_result((*about[:4], STRANGER, *about[5:])) if of == path else about

    monkeypatch.setattr(Path, "stat", stat_)


def libraries(home: Path) -> list[Path]:
    return sorted(home.rglob("*.so"))


def built(source: str = SEVEN) -> int:
    forget()
    return build._function(source)()


def library_of(source: str, folder: Path) -> bytes:
    folder.mkdir()
    text = folder / "text.cpp"
    text.write_text(source)
    subprocess.run(["g++", "-shared", "-fPIC", str(text), "-o", str(folder / "made")], check=True)
    return (folder / "made").read_bytes()


def environment(cxx: Path | str) -> dict[str, str]:
    """Of a process that imports this copy of the package."""
    return {
        **os.environ,
        "CXX": str(cxx),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parent.parent.parent),
    }


def large(optimizer: str = "lion") -> list[torch.Tensor]:
    return updates.updated(optimizer, updates.POLICIES["float32"], onepass.LARGE, scaled=False)


# ---- the same bits with and without a compiler

# by day without those whose formulas are parts of others'
OPTIMIZERS = [name for name in updates.OPTIMIZERS if NIGHTLY or name not in ("adam, no decay", "sgd, nesterov")]


@pytest.fixture(scope="module")
def without_a_compiler() -> Any:
    """The digests of all updates, in a process that finds no compiler and takes warnings for errors; what it said."""
    done = subprocess.run(
        [sys.executable, "-W", "error", updates.__file__, *OPTIMIZERS],
        env=environment(NO_COMPILER),
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout), done.stderr


@needs_compiler
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_bits_are_the_same_with_and_without_a_compiler(
    optimizer: str, without_a_compiler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every scheme, with scaled gradients and without."""
    monkeypatch.setattr(onepass, "LARGE", CHUNK)
    theirs, ours = without_a_compiler[0][optimizer], updates.digests(optimizer)
    assert theirs.keys() == ours.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []


def test_a_process_without_a_compiler_says_so_once(without_a_compiler: Any) -> None:
    said = without_a_compiler[1]
    assert said.count("no C++ compiler") == 1 and said.count("\n") == 1 and NO_COMPILER in said
    assert "10 to 50 times slower, to the same bits. Install g++" in said


@needs_compiler
def test_large_buffers_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So what is compared above are two ways, not one."""
    monkeypatch.setattr(onepass, "_block", lambda *_: pytest.fail("a chunk ran"))
    large("adamw")


# ---- the folder


@needs_compiler
@pytest.mark.parametrize("said", ["XDG_CACHE_HOME", "HOME", "a relative XDG_CACHE_HOME"])
def test_kernels_are_kept_in_the_users_cache_folder(
    said: str, home: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is made for nobody else, whatever the umask."""
    if said != "XDG_CACHE_HOME":
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("XDG_CACHE_HOME", "" if said == "HOME" else "relative")
        home = home / ".cache"
    before = os.umask(0)
    try:
        assert built() == 7
    finally:
        os.umask(before)
    (library,) = libraries(home)
    assert library.parent == home / "fzero" / "kernels"
    for folder in (library.parent, library.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list(library.parent.iterdir()) == [library], "nothing is left of the build"
    assert built() == 7 and len(log.read_text().splitlines()) == 1, "the second process found it"


@needs_compiler
@pytest.mark.parametrize("change", ["group-writable", "writable by all", "another user's", "sticky", "a file"])
@pytest.mark.parametrize("folder", ["home", "home/fzero", "home/fzero/kernels"])
def test_a_folder_that_others_can_change_is_not_used(
    folder: str,
    change: str,
    home: Path,
    tmp_path: Path,
    log: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Wherever it is up the path; kernels are then built for one process, which says so once."""
    path = tmp_path / folder
    (home / "fzero" / "kernels").mkdir(parents=True)
    if change == "another user's":
        give_away(path, monkeypatch)
    elif change == "a file":
        shutil.rmtree(path)
        path.touch()
    else:
        path.chmod({"group-writable": 0o770, "writable by all": 0o707, "sticky": 0o1777}[change])
    if change == "sticky" and folder != "home/fzero/kernels":
        assert built() == 7 and len(libraries(home)) == 1, "as in /tmp, nobody can exchange what is another's"
        return
    assert built() == 7 and build._function(EIGHT)() == 8
    assert libraries(tmp_path) == [] and len(log.read_text().splitlines()) == 2
    assert caplog.text.count("every process builds them anew") == 1 and str(path) in caplog.text
    if change == "group-writable":
        assert f"chmod go-w {path}" in caplog.text


def test_what_a_stranger_put_into_a_sticky_folder_is_not_used(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.chmod(0o1777)
    (home / "fzero").mkdir()
    give_away(home / "fzero", monkeypatch)
    with pytest.raises(PermissionError, match=rf"home/fzero belongs to user {STRANGER}, expected this user"):
        build.folder()


@needs_compiler
@pytest.mark.parametrize("broken", ["no folder", "no home"])
def test_without_a_home_kernels_are_built_for_one_process(
    broken: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    if broken == "no folder":
        monkeypatch.setenv("HOME", "/dev/null")
    else:
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("none")))
    assert built() == 7 and build._function(EIGHT)() == 8
    assert caplog.text.count("every process builds them anew") == 1
    assert list((tmp_path / "temporary").iterdir()) == [], "they are loaded, so their files are gone"


@needs_compiler
def test_nothing_is_loaded_where_no_folder_is_this_users_alone(home: Path, tmp_path: Path) -> None:
    home.chmod(0o777)
    (tmp_path / "temporary").chmod(0o777)
    forget()
    with pytest.warns(UserWarning, match=r"what it built, failed: others can write to .*temporary; `chmod go-w"):
        assert build._function(SEVEN) is None


# ---- what is loaded


@needs_compiler
@pytest.mark.parametrize("change", ["torn", "empty", "of another loader", "a link to nothing"])
def test_a_library_that_cannot_be_loaded_is_built_again(change: str, home: Path, tmp_path: Path, log: Path) -> None:
    assert built() == 7
    (library,) = libraries(home)
    content = library.read_bytes()
    library.unlink()  # and not written over, as this process runs it
    if change == "a link to nothing":
        library.symlink_to(tmp_path / "nothing")
    else:
        library.write_bytes({"torn": content[:100], "empty": b"", "of another loader": b"other code"}[change])
    home.rename(tmp_path / "moved")  # the loader knows a path that it has loaded before
    home.symlink_to(tmp_path / "moved")
    assert built() == 7 and len(log.read_text().splitlines()) == 2
    (again,) = libraries(tmp_path / "moved")
    assert not again.is_symlink()
    assert built() == 7 and len(log.read_text().splitlines()) == 2, "the new one fits"


# ---- compilers


@needs_compiler
def test_a_failed_build_says_so_once_with_the_compilers_words(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    want = large("lion"), large("adamw")
    forget()
    script(tmp_path / "broken", 'echo "kernel.cpp:1:1: error: no such thing" >&2\nexit 3')
    monkeypatch.setenv("CXX", f"{tmp_path}/broken --really")
    words = rf"`{tmp_path}/broken --really`. It ended with status 3 and said:\nkernel.cpp:1:1: error: no such thing\n"
    with pytest.warns(UserWarning, match=words + r".*slower, to the same bits\. Set CXX") as record:
        got = large("lion"), large("adamw")
    assert len(record) == 1
    assert_trees_equal(got, want)


def test_a_compiler_that_cannot_be_started_says_so(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(tmp_path / "broken", "").write_text("#!/nonexistent/interpreter\n")
    monkeypatch.setenv("CXX", str(tmp_path / "broken"))
    with pytest.warns(UserWarning, match=r"(?s)Starting it.*No such file.*slower, to the same bits"):
        assert build._function(SEVEN) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build._function(EIGHT) is None


def test_a_failed_build_that_is_an_error_is_one_once(
    fresh: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update that is tried again goes on without the kernel."""
    monkeypatch.setenv("CXX", str(script(tmp_path / "broken", "exit 1")))
    with pytest.raises(UserWarning, match=r"could not build"):
        large()
    large()


@pytest.mark.parametrize("said", [NO_COMPILER, "'g++"])
def test_no_compiler_is_told_once_and_is_no_warning(
    said: str, fresh: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Warnings may be errors, as they are in these tests, and a machine without a compiler is none."""
    monkeypatch.setenv("CXX", said)
    for optimizer in ("lion", "adamw"):
        large(optimizer)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and said in record.message and "slower, to the same bits" in record.message


@needs_compiler
@pytest.mark.parametrize("said", ["wrapper -O2 -DX='a b'", "ccache wrapper", "'with space/g++' -O2"])
def test_cxx_may_be_a_command_with_arguments(
    said: str, home: Path, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(tmp_path / "ccache", f'echo ccache "$1" >> {log}\nexec "$@"')
    (tmp_path / "with space").mkdir()
    shutil.copy(tmp_path / "wrapper", tmp_path / "with space" / "g++")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CXX", said.replace("with space", f"{tmp_path}/with space"))
    assert built() == 7
    text = log.read_text()
    if "ccache" in said:
        assert text.startswith("ccache wrapper\n")
    else:
        assert text.startswith("-O2 ")
    assert ("-DX=a b" in text) == ("-DX" in said)


@needs_compiler
def test_options_of_cxx_change_no_bits(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    want = large("adamw")
    monkeypatch.setenv("CXX", "g++ -Ofast -ffast-math")
    forget()
    assert_trees_equal(large("adamw"), want)
    assert (torch.tensor([1e-40]) * 1.0).item() != 0, "subnormal numbers are not flushed"


X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86")
NARROWER = [pytest.param("-mno-avx512f", marks=X86), pytest.param("-mno-avx512f -mno-avx2", marks=[X86, at_length])]
LOSSY = (
    "compact24",
    "compact16, 4-bit",
    *(("bf16", "exact", "compact16", "compact16, bf16 moments") if NIGHTLY else ()),
)


@needs_compiler
@pytest.mark.parametrize("options", NARROWER)
def test_narrower_vectors_change_no_bits(options: str, fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: as one with AVX2 only, and as one without vectors of 256 bits, does them."""
    run = lambda: [updates.updated("adamw", updates.POLICIES[name], onepass.LARGE, scaled=False) for name in LOSSY]
    want, library, asked = run(), build._library, list[str]()
    monkeypatch.setattr(build, "_library", lambda text, command: (asked.append(command[1]), library(text, command))[1])
    monkeypatch.setenv("CXX", f"g++ {options}")
    forget()
    assert_trees_equal(run(), want)
    assert asked == [options.split()[0]] * len(LOSSY), "each was built otherwise"


# ---- builds at once


@needs_compiler
def test_threads_build_once(home: Path, log: Path) -> None:
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert [made() for made in pool.map(build._function, [SEVEN] * 4)] == [7] * 4
    assert len(log.read_text().splitlines()) == 1


def start(cxx: Path) -> subprocess.Popen[str]:
    """A process that builds once it is told to."""
    program = f"from fzero.kernels import build\ninput()\nprint(build._function({SEVEN!r})())"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", program],
        env=environment(cxx),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def go(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def wait_for(path: Path, lines: int) -> None:
    for _ in range(1200):
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.05)
    pytest.fail(f"{path} has not come")


@in_turns(10, "interpreters of their own")
@needs_compiler
def test_two_processes_build_at_once(home: Path, quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sees the other's in the making; one library is left, which a third finds."""
    log = tmp_path / "log"
    meet = f'while [ "$(wc -l < {log})" -lt 2 ]; do sleep 0.05; done'
    slow = script(tmp_path / "slow", f'echo begun >> {log}\n{meet}\nexec {quick} "$@"')
    both = [start(slow), start(slow)]
    for process in both:
        go(process)
    for process in both:
        out, err = process.communicate(timeout=120)
        assert (out, err, process.returncode) == ("7\n", "", 0)
    assert len(log.read_text().splitlines()) == 2
    assert len(list((home / "fzero" / "kernels").iterdir())) == 1
    monkeypatch.setenv("CXX", str(slow))
    assert built() == 7 and len(log.read_text().splitlines()) == 2


@in_turns(10, "interpreters of their own")
@needs_compiler
def test_a_process_killed_while_it_builds_leaves_nothing_that_is_loaded(
    home: Path, quick: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = script(
        tmp_path / "stuck", f'{quick} "$@" || exit 1\n[ -e {tmp_path}/log ] && exit 0\necho > {tmp_path}/log\nsleep 600'
    )
    process = start(stuck)
    go(process)
    wait_for(tmp_path / "log", 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    (left,) = (home / "fzero" / "kernels").iterdir()
    assert left.is_dir() and (left / "kernel.so").stat().st_size > 0, "a whole library, in a folder that is not read"
    monkeypatch.setenv("CXX", str(stuck))
    assert built() == 7
