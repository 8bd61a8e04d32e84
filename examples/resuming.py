"""What a run's checkpoints say as it is started again: the options that it had, and that no other run begins there."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import fzero as fz

OF_A_START = ("ranks", "resume", "out", "sample_bytes", "temperature")  # options that are no part of the run
OF_THE_RUN = ("width", "blocks", "heads", "context", "seed")  # which model it is, and which data: these stay


def kept_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options that go on with a run, as JSON."""
    return {name: value for name, value in vars(args).items() if name not in OF_A_START}


def parse_options(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """The options; with --resume, those that are not given are the run's own.

    Without it, a folder that holds a run is refused: the new run's checkpoints would take the place of the old one's.
    """
    args = parser.parse_args(argv)
    folder = args.out / "checkpoints"
    if folder.is_dir() and any(folder.iterdir()) and not args.resume:
        parser.error(f"--out {args.out} holds a run: --resume goes on with it, another --out begins a new one")
    progress = newest_progress(folder)
    if progress is None:
        return args
    parser.set_defaults(**progress["options"])
    args = parser.parse_args(argv)
    for name in OF_THE_RUN:
        if (got := getattr(args, name)) != (was := progress["options"][name]):
            parser.error(
                f"--{name} {got}, but the run in --out {args.out} has {was}; leave it out, or say another --out"
            )
    return args


def newest_progress(folder: Path) -> Any:
    """The `extra` of the newest checkpoint; None where there is none."""
    for path in sorted(folder.glob("*-update-*"), reverse=True):
        with contextlib.suppress(FileNotFoundError, fz.DamagedCheckpoint):
            return fz.load_extra(path)
    return None
