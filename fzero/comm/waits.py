"""Waiting for transfers that were started."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def finish_all(waits: Sequence[Callable[[], object]]) -> None:
    """Calls all of them, also where one fails: what nobody waits for would meet a later message."""
    errors: list[BaseException] = []
    for wait in waits:
        try:
            wait()
        except BaseException as error:
            errors.append(error)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # or the error and this frame would hold each other, and with them all that it went through
