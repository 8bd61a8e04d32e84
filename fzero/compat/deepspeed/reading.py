"""A configuration while it is read: its values by dotted path, those for "auto", and what became of each key."""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import numbers
import typing
from collections.abc import Iterable, Mapping, Sequence

import torch

from fzero.compat.deepspeed.keys import ALIASES, HINTS, OFFLOADS, ONLY, OPTIMIZERS, READ, REFUSED, ZERO
from fzero.compat.deepspeed.schedules import PARAMS

HEAD = "import torch\n\nimport fzero as fz\n"
AUTO = "auto"
_DTYPES = {name: getattr(torch, name) for name in ("half", "float16", "bfloat16", "float", "float32")}
_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class Row(typing.NamedTuple):
    """What became of one key."""

    key: str  # its dotted path, as it was written
    value: object  # or the one that took the place of "auto"
    verdict: str  # "honoured", "no effect" or "refused"
    what: str  # what it became, or why


class Name(str):
    """A name in the code, where a value is not known."""

    __repr__ = str.__str__


number = lambda x: isinstance(x, numbers.Real) and not isinstance(x, bool) and math.isfinite(x)
# a kind in words -> a value as one, or None where it is none
KINDS = {
    "an int": lambda x: int(x) if number(x) and x == int(x) else None,  # JSON's 5e8 is a float
    "a number": lambda x: (x if isinstance(x, int) else float(x)) if number(x) else None,  # numpy's too
    "true or false": lambda x: x if isinstance(x, bool) else None,
    "a string": lambda x: x if isinstance(x, str) else None,
    "one of 'bf16', 'fp16', 'fp32'": lambda x: _DTYPES.get(str(x).lower().removeprefix("torch.")),
    "two numbers in [0, 1)": lambda x: [*map(float, x)] if isinstance(x, (list, tuple)) and len(x) == 2 and all(
        [number(each) and 0 <= each < 1 for each in x]) else None,
}
_KIND_OF = {bool: "true or false", int: "an int", float: "a number", str: "a string"}  # that of a default


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
        self.lines: list[str] = []  # the code, which makes `step` of `fn`
        self.transforms: list[str] = []  # calls that become lines behind train_step
        self.loop: dict[str, object] = {}  # arguments of fz.loop
        self.mesh: dict[str, int] = {}  # axis -> ranks
        self._flatten(tree)
        if not self.has("optimizer") and "optimizer" not in autos:  # Hugging Face's Trainer then makes one
            own = {name: AUTO for name in ("lr", "betas", "eps", "weight_decay") if name == "lr" or name in autos}
            self._flatten({"optimizer": {"type": "AdamW", "params": own}})
            said = "fz.adamw, as there is no optimizer. Hugging Face's Trainer makes one that decays no norm and bias,"
            self.honour(f"{said} by its lr_scheduler_type: give a schedule as lr=, or optimizer=", "optimizer.type")
        for name, value in autos.items():
            self._fill(name, value)

    def take(
        self, path: str, default: object = None, kind: str = "", least: float = -math.inf,
        among: Sequence[object] = (), open: bool = False,
    ) -> typing.Any:  # fmt: skip
        """A value of a kind, or of its default's; the default for none or a refused one; maybe (`open`) a name."""
        value, kind = self.values.get(path), kind or _KIND_OF.get(type(default), "")
        if value is None or (isinstance(value, Name) and open):
            return default if value is None else value
        if value == AUTO and self.names and open:
            name = Name(self._auto_name(path))
            self.arguments += [name] if name not in self.arguments else []
            return name
        found = None if isinstance(value, Name) else KINDS[kind](value) if kind else value
        if value == AUTO and found != AUTO:
            self.refuse(f"'auto' has no value. Give {self._auto_name(path)}=...", path)
        elif found is None or (among and found not in among) or (isinstance(found, (int, float)) and found < least):
            words = f"one of {', '.join(map(repr, among))}" if among else kind or "what JSON can say"
            floor = f" of at least {least:g}" * (kind in ("an int", "a number") and least > -math.inf and not among)
            self.refuse(f"expected {words}{floor}", path)
        else:
            return found
        return default

    def enabled(self, block: str) -> bool | Name:
        """Whether a block is there and does not say that it is off."""
        path, there = f"{block}.enabled", self.has(block)
        if there:
            self.add(path, True, "a block that does not say it is enabled; DeepSpeed's default is false")
        return self.take(path, there and path not in self.values, open=True)

    def has(self, block: str) -> bool:
        return self.values.get(block) is not None or bool(self.under(block))

    def under(self, block: str) -> list[str]:
        """The paths in a block."""
        return [path for path in self.values if path.startswith(f"{block}.")]

    def _say(self, verdict: str, what: str, *paths: str) -> None:
        """The first word on a key counts, but for a refusal."""
        for path in paths:
            said = self.rows[path].verdict if path in self.rows else None
            if (said is None and path in self.values) or verdict == "refused" != said:
                self.rows[path] = Row(*self.written.get(path, (path, None)), verdict, what)

    honour = functools.partialmethod(_say, "honoured")
    hint = functools.partialmethod(_say, "no effect")
    refuse = functools.partialmethod(_say, "refused")

    def add(self, path: str, value: object, what: str, verdict: str = "honoured") -> None:
        """Of a key that is not there: its default counts."""
        if path not in self.values:
            self.rows.setdefault(path, Row(path, value, verdict, what))

    def report(self) -> tuple[Row, ...]:
        """A row for each key in the order of the configuration, then those for what is not there."""
        for path, value in self.values.items():
            block, _, key = path.partition(".")
            way = next((way for way in itertools.accumulate(path.split("."), "{}.{}".format) if way in _WHOLE), "")
            if way in HINTS:
                self.hint(HINTS[way], path)
            elif way and self.values.get(f"{way}.enabled", value if way == path else True) not in (False, None):
                self.refuse(REFUSED[way], path)
            elif path in ONLY and value is not None and value not in ONLY[path][0]:
                self.refuse(ONLY[path][1], path)
            elif not way and path not in KNOWN and not path.startswith(("optimizer.params.", "scheduler.params.")):
                inside = next((known for known in KNOWN if known.startswith(f"{path}.")), "")
                if not inside:
                    self.refuse(f"DeepSpeed 0.19 has no such key{nearest(path, KNOWN)}", path)
                elif value not in ({}, None):
                    self.refuse(f"expected a block of keys, such as {inside!r}", path)
            if value is None or way or (value == AUTO and path in ONLY):
                self.hint("off" if way else "it is the default", path)
            elif self.values.get(f"{block}.enabled", True) in (False, None) and key != "enabled":
                self.hint(f"{block} is not enabled", path)
            self.honour("off" if value is False else READ.get(path, "fzero does so"), path)
        return tuple([self.rows[path] for path in dict.fromkeys([*self.values, *self.rows])])

    def _flatten(self, tree: Mapping[str, object], at: str = "", known: str = "") -> None:
        """Puts the leaves below a block, `at` as it was written and `known` by its own name, in their places."""
        for key, value in tree.items():
            if not isinstance(key, str):
                raise TypeError(f"compat.from_deepspeed: got the key {key!r} in {at or 'config'}, expected strings.")
            written, path = at + key, ALIASES.get(known + key, known + key)
            if isinstance(value, Mapping) and value:
                self._flatten(value, f"{written}.", f"{path}.")
                continue
            own = value
            if path == ZERO and isinstance(value, bool):
                path, own = f"{ZERO}.stage", int(value)
            elif path in OFFLOADS and isinstance(value, bool):
                path, own = f"{ZERO}.{OFFLOADS[path]}.device", "cpu" if value else "none"
            if path in self.values:
                self.refuse(f"it is there as {written} too. Keep one", path)
            self.values[path], self.written[path] = own, (written, value)

    def _fill(self, name: str, value: object) -> None:
        """Puts a value in the place of an "auto"."""
        ways = {path: (path, self.written.get(path, (path,))[0]) for path in self.values}  # also as it was written
        same = [path for path in ways if any(name in (x.replace(".", "_"), x.rpartition(".")[2]) for x in ways[path])]
        autos = [path for path in same if self.values[path] == AUTO]
        if name == "optimizer":
            self.given[name] = value
        elif len(autos) > 1:
            names = " or ".join([f"{path.replace('.', '_')}=" for path in autos])
            self.refuse(f"{name}= stands for several keys. Write {names}", autos[0])
        elif autos or (not same and name in READ):
            path = autos[0] if autos else name
            plain = isinstance(value, (numbers.Real, str, list, tuple, type(None)))
            self.values[path] = value if plain else Name(name)
            self.written[path] = ways.get(path, (path,))[-1], value
            self.given |= {} if plain else {name: value}
        elif len(same) == 1 and self.values[same[0]] not in (None, [*value] if isinstance(value, tuple) else value):
            self.refuse(f"it is not 'auto', and got {name}={value!r} too. Keep one", same[0])
        elif name in _LASTS or name in [path.replace(".", "_") for path in KNOWN]:
            self.add(name, value, "nothing is 'auto' for it", "no effect")
        else:
            self.add(name, value, f"no key has this name{nearest(name, _LASTS)}", "refused")

    def _auto_name(self, path: str) -> str:
        """What an "auto" is called: the last part of its key, or all of it where others are alike."""
        last = path.rpartition(".")[2]
        alike = [other for other, value in self.values.items() if value == AUTO and other.rpartition(".")[2] == last]
        return last if len(alike) < 2 else path.replace(".", "_")


def nearest(name: str, known: Iterable[str]) -> str:
    last = name.rpartition(".")[2]
    found = [path for path in known if path.rpartition(".")[2] == last] or difflib.get_close_matches(name, known, 1)
    return f". The nearest one is {found[0]!r}" if found else ""


KNOWN = [*READ, *HINTS, *REFUSED, *ONLY, *ALIASES, *OFFLOADS]
for _block, _kinds in (("optimizer", OPTIMIZERS), ("scheduler", PARAMS)):
    KNOWN += [f"{_block}.params.{name}" for own in _kinds.values() for name in own]
_WHOLE = {**HINTS, **REFUSED}
_LASTS = [*dict.fromkeys([path.rpartition(".")[2] for path in KNOWN])]
