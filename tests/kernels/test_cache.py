"""Built libraries: their folder, and what is found there; what strangers try is in tests/kernels/test_build.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fzero.kernels import cache


def test_a_library_is_found_as_long_as_it_is_what_was_built(tmp_path: Path) -> None:
    with cache.scratch(tmp_path) as own:
        library = own / "lib.so"
        library.write_bytes(b"machine code")
        kept = cache.keep(tmp_path, "key", library)
    assert list(cache.found(tmp_path, "key")) == [kept] and not list(cache.found(tmp_path, "other"))
    assert os.listdir(tmp_path) == [kept.name]  # nothing is left of the build
    kept.write_bytes(b"other code")
    assert not list(cache.found(tmp_path, "key"))


def test_the_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == Path(os.path.realpath(tmp_path)) / "fzero" / "kernels"
    with pytest.raises(FileNotFoundError, match="not absolute"):
        cache.closed(Path("relative"))
