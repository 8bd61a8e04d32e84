"""A Disk is a value, its folder is made for this user alone, and what cannot be one is refused."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from processes import run_forked

from fzero.stores.disk import Disk


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    disk = Disk(str(tmp_path / "a" / "b"))
    assert disk.path == str(tmp_path.resolve() / "a" / "b")
    assert mode(tmp_path / "a" / "b") == 0o700
    Disk(tmp_path)
    assert mode(tmp_path) == 0o755  # the user's own


def test_a_path_has_one_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path)
    Disk(tmp_path / "real")
    assert Disk("link") == Disk(tmp_path / "real") == Disk("real/../real") and type(Disk("real").path) is str


def test_it_is_a_value(tmp_path: Path) -> None:
    one, same, other = Disk(tmp_path / "x"), Disk(tmp_path / "x"), Disk(tmp_path / "x", verify=True)
    assert one == same and hash(one) == hash(same) and one != other
    assert repr(one) == f"Disk({one.path!r})" and repr(other) == f"Disk({one.path!r}, verify=True)"
    said = pickle.dumps(other)
    shutil.rmtree(tmp_path / "x")
    assert pickle.loads(said) == other and vars(pickle.loads(said)) == vars(other)
    assert not (tmp_path / "x").exists()  # to look at a checkpoint elsewhere makes no folders


@pytest.mark.parametrize(
    ("error", "words", "arguments"),
    [
        (TypeError, "got path=3, expected the path of a folder", {"path": 3}),
        (TypeError, "got path=bytes", {"path": b"/tmp"}),
        (ValueError, "got path=''", {"path": ""}),
        (ValueError, "expected the path", {"path": "a\0b"}),
        (TypeError, "got direct='yes', expected True or False or None", {"direct": "yes"}),
        (TypeError, "got verify=None, expected True or False", {"verify": None}),
        (ValueError, "got threads=0, expected at least 1", {"threads": 0}),
        (TypeError, "got threads=True, expected an int", {"threads": True}),
    ],
)
def test_wrong_arguments(error: type[Exception], words: str, arguments: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        Disk(**{"path": str(tmp_path), **arguments})  # type: ignore[arg-type]


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match=r"file is not a folder\. Give the path of a folder"):
        Disk(tmp_path / "file")
    with pytest.raises(OSError, match=r"cannot make the folder .*below.*\(Not a directory\)"):
        Disk(tmp_path / "file" / "below")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere" / "else")
    assert Disk(tmp_path / "dangling").path == str(tmp_path.resolve() / "nowhere" / "else")
    assert (tmp_path / "file").read_text() == "mine"


def test_no_permission() -> None:
    """Root may do anything, so another user tries."""
    code = """
import os, sys
from fzero.stores.disk import Disk
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
for path in sys.argv[1:]:
    try:
        Disk(path)
    except PermissionError as error:
        print(error)
"""
    with tempfile.TemporaryDirectory() as closed:  # tmp_path cannot be seen by another user
        os.chmod(closed, 0o555)
        paths = [closed, os.path.join(closed, "new")]
        done = run_forked("-c", code, *paths)
        cannot_write, cannot_make = done.stdout.splitlines()
        assert "cannot write to" in cannot_write and "cannot make the folder" in cannot_make, done.stderr
