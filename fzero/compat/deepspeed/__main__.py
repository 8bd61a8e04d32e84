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
    parser = argparse.ArgumentParser("python -m fzero.compat.deepspeed", description="A step out of ds_config.json.")
    parser.add_argument("config", help="the JSON file")
    parser.add_argument("--ranks", type=int, default=1, help="how many ranks will run it")
    more = 'values for "auto"; those without one become arguments of a function'
    parser.add_argument("--auto", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=more)
    given = parser.parse_args(arguments)
    autos = {name: _value(text) for name, is_there, text in (each.partition("=") for each in given.auto) if is_there}
    if given.ranks < 1 or len(autos) < len(given.auto) or "optimizer" in autos:
        said = "--ranks of at least 1, and --auto key=value, each key once, without optimizer=, which no text can say"
        parser.error(f"expected {said}")
    try:
        read = translated(given.config, autos, given.ranks, names=True)
    except (OSError, ValueError, TypeError) as error:
        print(error, file=sys.stderr)
        return 1
    said = refusals(rows := read.report())
    print(shown(rows, "", {}) if said else shown(rows, "\n".join(read.lines), read.loop, read.arguments))
    print(said, end="\n" if said else "", file=sys.stderr)
    return 1 if said else 0


def _value(text: str) -> object:
    """JSON, or a string as it is."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(text)
    return text


if __name__ == "__main__":
    sys.exit(main())
