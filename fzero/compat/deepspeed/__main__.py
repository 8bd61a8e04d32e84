"""`python -m fzero.compat.deepspeed ds_config.json --ranks 8 --auto lr=1e-3`: the table of a configuration, and its step."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from fzero.compat.deepspeed.config import HEAD, refusal, shown, translated
from fzero.compat.deepspeed.reading import load


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints them. Returns 1 where a key is refused."""
    parser = argparse.ArgumentParser("python -m fzero.compat.deepspeed", description="A step out of ds_config.json.")
    parser.add_argument("config", help="the JSON file")
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks will run it")
    parser.add_argument(
        "--auto", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help='values for "auto"; those without one become arguments of a function',
    )  # fmt: skip
    given = parser.parse_args(arguments)
    if given.ranks < 1 or (wrong := [each for each in given.auto if "=" not in each]):
        parser.error(f"got --auto {wrong[0]}, expected key=value" if given.ranks > 0 else "--ranks is at least 1")
    autos = {name: _value(text) for name, _, text in (each.partition("=") for each in given.auto)}
    try:
        read = translated(load(given.config), autos, given.ranks, names=True)
    except (OSError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    rows = read.report()
    refused = [row for row in rows if row.verdict == "refused"]
    print(shown(rows, "" if refused else "\n".join([HEAD, "", *read.lines]), read.loop, read.arguments))
    if refused:
        print(refusal(refused), file=sys.stderr)
    return 1 if refused else 0


def _value(text: str) -> object:
    """JSON, or a string as it is."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
