from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from fzero.stores import blocks
from fzero.stores.disk import Disk
from fzero.stores.folder import Folder, folder_of


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three blocks, so that small tensors have several."""
    monkeypatch.setattr(blocks, "CHUNK", 3 * blocks.BLOCK)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


@pytest.fixture
def folder(disk: Disk) -> Iterator[Folder]:
    yield folder_of(disk, lambda: "tests")
    gc.collect()  # what a caught error holds
