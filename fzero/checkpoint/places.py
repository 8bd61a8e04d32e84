"""Which folder a path names: one on a local disk, or one behind a URL."""

from __future__ import annotations

from fzero.checkpoint.files import Local
from fzero.checkpoint.folder import Folder, is_url
from fzero.checkpoint.remote import Remote


def folder_at(path: str) -> Folder:
    """The folder of a path.

    Raises:
        ImportError, ValueError: a URL for which there is no filesystem.
    """
    return Remote(path) if is_url(path) else Local(path)
