"""`python -m fzero.compat.deepspeed ds_config.json --ranks 8 --auto lr=1e-3`: a configuration's table and its step."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence

from fzero.compat.deepspeed.config import refusals, shown, translated


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints them. Returns 1 if something is refused."""
    parser = argparse.ArgumentParser("python -m fzero.compat.deepspeed", description=__doc__)
    parser.add_argument("config", help="the JSON file")
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks will run it")
    more = 'values for "auto", each key once; those without one become arguments of a function'
    parser.add_argument("--auto", nargs="+", action="extend", default=[], metavar="KEY=VALUE", type=_pair, help=more)
    given = parser.parse_args(arguments)
    autos = dict(given.auto)
    if given.ranks < 1 or len(autos) < len(given.auto) or "optimizer" in autos:
        parser.error("expected --ranks of at least 1, and each key of --auto once, but optimizer=, which no text says")
    try:
        read = translated(given.config, autos, given.ranks, names=True)
    except (OSError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    said = refusals(rows := read.report())
    print(shown(rows, "", {}) if said else shown(rows, "\n".join(read.lines), read.loop, read.arguments))
    print(said, end="\n" if said else "", file=sys.stderr)
    return 1 if said else 0


def _pair(text: str) -> tuple[str, object]:
    """A key, and JSON or a string as it is."""
    name, value = text.split("=", 1)
    with contextlib.suppress(json.JSONDecodeError):
        return name, json.loads(value)
    return name, value


if __name__ == "__main__":
    sys.exit(main())
