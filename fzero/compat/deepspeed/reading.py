"""A configuration while it is read: its values by dotted path, those for "auto", and what became of each key."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.compat.deepspeed.keys import ALIASES, HINTS, OFFLOADS, ONLY, OPTIMIZERS, READ, REFUSED, ZERO
from fzero.compat.deepspeed.schedules import PARAMS

HEAD = "import torch\n\nimport fzero as fz\n"
AUTO = "auto"
DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
}


class Row(NamedTuple):
    """What became of one key."""

    key: str  # its dotted path, as it was written
    value: object  # or the one that took the place of "auto"
    verdict: str  # "honoured", "no effect" or "refused"
    what: str  # what it became, or why


class Name(str):
    """A name in the code, where a value is not known."""

    def __repr__(self) -> str:
        return str(self)


number = lambda x: isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)
# a kind in words -> a value as one, or None where it is none
KINDS = {
    "an int": lambda x: int(x) if number(x) and x == int(x) else None,  # JSON's 5e8 is a float
    "a number": lambda x: x if number(x) else None,
    "true or false": lambda x: x if isinstance(x, bool) else None,
    "a string": lambda x: x if isinstance(x, str) else None,
    "one of 'bf16', 'fp16', 'fp32'": lambda x: DTYPES.get(x.lower()) if isinstance(x, str) else None,
    "two numbers in [0, 1)": lambda x: [*x] if isinstance(x, (list, tuple)) and len(x) == 2 and all(
        [number(each) and 0 <= each < 1 for each in x]) else None,
    "a value": lambda x: x,
}


class Reading:
    """One configuration, what became of its keys so far, and the code that is made of it.

    With `names`, an "auto" without a value becomes an argument, a name in the code, where it may.
    """

    def __init__(self, tree: Mapping[str, object], autos: Mapping[str, object], ranks: int, names: bool) -> None:
        self.ranks, self.names = ranks, names
        self.values: dict[str, object] = {}  # by the path that it is known by
        self.written: dict[str, tuple[str, object]] = {}  # that path -> key and value as they were written
        self.rows: dict[str, Row] = {}
        self.given: dict[str, object] = {}  # values of autos that are no JSON, by their names in the code
        self.arguments: list[Name] = []
        self.lines: list[str] = []  # the code
        self.transforms: list[str] = []  # calls that become lines behind train_step
        self.loop: dict[str, object] = {}  # arguments of fz.loop
        self.mesh: dict[str, int] = {}  # axis -> ranks
        self._flatten("", tree)
        if not self.has("optimizer") and "optimizer" not in autos:  # Hugging Face's Trainer then makes one
            own = {name: AUTO for name in ("lr", "betas", "eps", "weight_decay") if name == "lr" or name in autos}
            self._flatten("optimizer.", {"type": "AdamW", "params": own})
            self.honour("optimizer.type", "fz.adamw: there is no optimizer, and Hugging Face's Trainer makes this one")
        for name, value in autos.items():
            self._fill(name, value)
        for path in self.values:
            self._settle(path)

    @property
    def code(self) -> str:
        """The code, which makes `step` of `fn`."""
        return "\n".join([HEAD, *self.lines])

    # ---- what a translation asks

    def take(
        self, path: str, default: object = None, kind: str = "a value", least: float = -math.inf,
        among: Sequence[object] = (), open: bool = False,
    ) -> object:  # fmt: skip
        """A value of a kind; the default where there is none, or a refusal; a name where it may be one (`open`)."""
        value = self.values.get(path)
        if value is None or (isinstance(value, Name) and open):
            return default if value is None else value
        if value == AUTO and self.names and open:
            name = Name(self._auto_name(path))
            self.arguments += [name] if name not in self.arguments else []
            return name
        found = None if isinstance(value, Name) else KINDS[kind](value)
        if value == AUTO and found != AUTO:
            self.refuse(path, f"'auto' has no value. Give {self._auto_name(path)}=...")
        elif found is None or (among and found not in among) or (isinstance(found, (int, float)) and found < least):
            words = f"one of {', '.join(map(repr, among))}" if among else kind
            self.refuse(path, f"expected {words}" + (f" of at least {least:g}" if least > -math.inf else ""))
        else:
            return found
        return default

    def integer(self, path: str, default: int, least: float = -math.inf) -> int:
        found = self.take(path, default, "an int", least)
        return found if isinstance(found, int) else default

    def flag(self, path: str, default: bool = False) -> bool:
        return self.take(path, default, "true or false") is True

    def enabled(self, block: str) -> bool | Name:
        """Whether a block is there and does not say that it is off."""
        path, there = f"{block}.enabled", self.has(block)
        if there:
            self.add(path, True, "honoured", "a block that does not say it is enabled; DeepSpeed's default is false")
        value = self.take(path, there and path not in self.values, "true or false", open=True)
        return value if isinstance(value, Name) else bool(value)

    def has(self, block: str) -> bool:
        return self.values.get(block) is not None or bool(self.under(block))

    def under(self, block: str) -> list[str]:
        """The keys in a block."""
        return [path[len(block) + 1 :] for path in self.values if path.startswith(f"{block}.")]

    # ---- what it says

    def honour(self, path: str, what: str) -> None:
        self._say(path, "honoured", what)

    def hint(self, path: str, why: str) -> None:
        self._say(path, "no effect", why)

    def refuse(self, path: str, why: str) -> None:
        if path not in self.rows or self.rows[path].verdict != "refused":
            self.rows.pop(path, None)
            self._say(path, "refused", why)

    def add(self, path: str, value: object, verdict: str, what: str) -> None:
        """Of a key that is not there: its default counts, or it is missing."""
        if path not in self.values:
            self.rows.setdefault(path, Row(path, value, verdict, what))

    def report(self) -> tuple[Row, ...]:
        """A row for each key in the order of the configuration, then those for what is not there."""
        for path, value in self.values.items():
            block, _, key = path.partition(".")
            if value is None or (self.values.get(f"{block}.enabled", True) in (False, None) and key != "enabled"):
                self.hint(path, f"{block} is not enabled" if value is not None else "null is the default")
            self.honour(path, "off" if value is False else "fzero does so")
        order = [*self.values, *self.rows]
        return tuple([self.rows[path] for path in dict.fromkeys(order)])

    def _say(self, path: str, verdict: str, what: str) -> None:
        """The first word on a key counts."""
        if path in self.values or verdict == "refused":
            key, value = self.written.get(path, (path, None))
            self.rows.setdefault(path, Row(key, value, verdict, what))

    # ---- how it is read

    def _flatten(self, at: str, tree: Mapping[str, object]) -> None:
        for key, given in tree.items():
            value = _plain(given)
            if not isinstance(key, str):
                raise TypeError(f"compat.from_deepspeed: got the key {key!r} in {at or 'config'}, expected strings.")
            written, (block, _, rest) = at + key, (at + key).partition(".")
            path = ".".join([ALIASES.get(block, block), rest]) if rest else ALIASES.get(block, block)
            path, own = ALIASES.get(path, path), value
            if isinstance(value, Mapping) and value:
                self._flatten(f"{written}.", value)
                continue
            if path == ZERO and isinstance(value, bool):
                path, own = f"{ZERO}.stage", int(value)
            elif path in OFFLOADS and isinstance(value, bool):
                path, own = f"{ZERO}.{OFFLOADS[path]}.device", "cpu" if value else "none"
            if path in self.values:
                self.refuse(path, f"it is there as {written} too. Keep one")
            self.values[path], self.written[path] = own, (written, value)

    def _fill(self, name: str, value: object) -> None:
        """Puts a value in the place of an "auto"."""
        value = _plain(value)
        same = [path for path in self.values if path.replace(".", "_") == name]
        same = same or [path for path in self.values if path.rpartition(".")[2] == name]
        autos = [path for path in same if self.values[path] == AUTO]
        if len(autos) > 1:
            names = " or ".join([f"{path.replace('.', '_')}=" for path in autos])
            self.refuse(autos[0], f"{name}= stands for several keys. Write {names}")
        elif autos or (not same and name in READ):
            path = autos[0] if autos else name
            plain = isinstance(value, (bool, int, float, str, list, tuple, type(None)))
            self.values[path], self.written[path] = value if plain else Name(name), (path, value)
            self.given |= {} if plain else {name: value}
        elif len(same) == 1 and self.values[same[0]] is not None:
            if self.values[same[0]] != ([*value] if isinstance(value, tuple) else value):
                self.refuse(same[0], f"it is not 'auto', and got {name}={value!r} too. Keep one")
        elif name == "optimizer":
            self.given[name] = value
        elif same or name in _LASTS or name in [path.replace(".", "_") for path in KNOWN]:
            self.add(name, value, "no effect", "nothing is 'auto' for it")
        else:
            self.add(name, value, "refused", f"no key has this name{nearest(name, _LASTS)}")

    def _settle(self, path: str) -> None:
        """Says what is so of a key by itself: without effect, not in fzero, or not known."""
        value, parts = self.values[path], path.split(".")
        ways = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if why := next((HINTS[way] for way in ways if way in HINTS), ""):
            self.hint(path, why)
        elif block := next((way for way in ways if way in REFUSED), ""):
            on = self.values.get(f"{block}.enabled", value if block == path else True)
            (self.hint if on in (False, None) else self.refuse)(path, "off" if on in (False, None) else REFUSED[block])
        elif path in ONLY:
            if value is not None and value not in ONLY[path][0]:
                self.refuse(path, ONLY[path][1])
            (self.hint if value == AUTO else self.honour)(path, "fzero does so")
        elif path not in KNOWN and not path.startswith(("optimizer.params.", "scheduler.params.")):
            inside = next((known for known in KNOWN if known.startswith(f"{path}.")), "")
            if inside and value not in ({}, None):
                self.refuse(path, f"expected a block of keys, such as {inside!r}")
            elif not inside:
                self.refuse(path, f"DeepSpeed 0.19 has no such key{nearest(path, KNOWN)}")

    def _auto_name(self, path: str) -> str:
        """What an "auto" is called: the last part of its key, or all of it where others are alike."""
        last = path.rpartition(".")[2]
        alike = [other for other, value in self.values.items() if value == AUTO and other.rpartition(".")[2] == last]
        return last if len(alike) < 2 else path.replace(".", "_")


def _plain(value: object) -> object:
    """Numbers and arrays of numpy as Python's own, which the code can say."""
    tolist = None if isinstance(value, torch.Tensor) else getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def nearest(name: str, known: Iterable[str]) -> str:
    last = name.rpartition(".")[2]
    found = [path for path in known if path.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, 1)
    return f". The nearest one is {found[0]!r}" if found else ""


KNOWN = [
    *READ, *HINTS, *REFUSED, *ONLY, *ALIASES, *OFFLOADS,
    *[f"optimizer.params.{name}" for own in OPTIMIZERS.values() for name in own],
    *[f"scheduler.params.{name}" for own in PARAMS.values() for name in own],
]  # fmt: skip
_LASTS = [*dict.fromkeys([path.rpartition(".")[2] for path in KNOWN])]
