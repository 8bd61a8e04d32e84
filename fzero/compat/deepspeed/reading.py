"""A configuration while it is read: its values by dotted path, those for "auto", and what became of each key."""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from fzero.compat.deepspeed.keys import ALIASES, HINTS, OFFLOADS, OPTIMIZERS, READ, REFUSED
from fzero.compat.deepspeed.schedules import PARAMS

WHO = "compat.from_deepspeed"
AUTO = "auto"
DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), torch.float32),
}
OF_TRAINER = ("optimizer", "lr", "betas", "eps", "weight_decay")  # values that make an optimizer where there is none


class Row(NamedTuple):
    """What became of one key.

    Attributes:
        key: its dotted path, as it was written.
        value: its value, or the one that took the place of "auto".
        verdict: "honoured", "no effect" or "refused".
        what: what it became, or why.
    """

    key: str
    value: object
    verdict: str
    what: str


class Name(str):
    """A name in the code, where a value is not known."""

    def __repr__(self) -> str:
        return str(self)


def integer(value: object) -> int | None:
    """JSON's 5e8 is a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return int(value) if int(value) == value else None


def number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def boolean(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def dtype(value: object) -> torch.dtype | None:
    return DTYPES.get(value.lower()) if isinstance(value, str) else None


def betas(value: object) -> list[float] | None:
    if not isinstance(value, (list, tuple)) or len(value) != 2 or any(number(each) is None for each in value):
        return None
    return [*value]


def anything(value: object) -> object:
    return value


KINDS: dict[Callable[[object], object], str] = {
    integer: "an int", number: "a number", boolean: "true or false", text: "a string", anything: "a value",
    dtype: "one of 'bf16', 'fp16', 'fp32'", betas: "two numbers",
}  # fmt: skip


class Reading:
    """One configuration, and what became of its keys so far.

    Args:
        tree: the configuration.
        autos: values for "auto".
        ranks: how many there are.
        names: whether an "auto" without a value becomes a name in the code, an argument, where it may.
    """

    def __init__(self, tree: Mapping[str, object], autos: Mapping[str, object], ranks: int, names: bool) -> None:
        self.ranks, self.names = ranks, names
        self.values: dict[str, object] = {}  # by the path that it is known by
        self.keys: dict[str, str] = {}  # that path -> as it was written
        self.written: dict[str, object] = {}  # values of deprecated keys, as they were written
        self.rows: dict[str, Row] = {}
        self.arguments: list[Name] = []
        self.given: dict[str, object] = {}  # values that are no JSON, by their names in the code
        # what is made of it
        self.lines: list[str] = []  # the code
        self.transforms: list[str] = []  # calls that become lines behind train_step
        self.loop: dict[str, object] = {}  # arguments of fz.loop
        self.mesh: dict[str, int] = {}  # axis -> ranks; one axis needs no mesh
        self._flatten("", tree)
        self._fill(dict(autos))
        self._settle()

    # ---- what a translation asks and says

    def take(
        self,
        path: str,
        default: object = None,
        kind: Callable[[object], object] = anything,
        least: float = -math.inf,
        among: Sequence[object] = (),
        open: bool = False,
    ) -> object:
        """A value; the default where there is none or where it is refused; a name where it may be one.

        Args:
            least: of a number.
            among: the only values, where they are few.
            open: whether it may be a name.
        """
        value = self.values.get(path)
        if value is None:
            return default
        if isinstance(value, Name):
            if not open:
                self.refuse(path, f"expected {KINDS[kind]}")
            return value if open else default
        if value == AUTO:
            if not (self.names and open):
                self.refuse(path, f"'auto' has no value. Give {self.auto_name(path)}=...")
                return default
            if (name := Name(self.auto_name(path))) not in self.arguments:
                self.arguments.append(name)
            return name
        found = kind(value)
        if found is None or (isinstance(found, (int, float)) and not found >= least) or (among and found not in among):
            said = f"one of {', '.join(map(repr, among))}" if among else KINDS[kind]
            self.refuse(path, f"expected {said}" + (f" of at least {least:g}" if least > -math.inf else ""))
            return default
        return found

    def honour(self, path: str, what: str) -> None:
        self._say(path, "honoured", what)

    def hint(self, path: str, why: str) -> None:
        self._say(path, "no effect", why)

    def refuse(self, path: str, why: str) -> None:
        self._say(path, "refused", why)

    def add(self, path: str, value: object, verdict: str, what: str) -> None:
        """A row for a key that is not there: its default counts, or it is missing."""
        self.rows.setdefault(path, Row(path, value, verdict, what))

    def under(self, block: str) -> dict[str, object]:
        """The keys in a block, by the rest of their paths."""
        return {path[len(block) + 1 :]: x for path, x in self.values.items() if path.startswith(f"{block}.")}

    def has(self, block: str) -> bool:
        return self.values.get(block) is not None or bool(self.under(block))

    def enabled(self, block: str, open: bool = False) -> bool | Name:
        """Whether a block is there, and does not say that it is off."""
        value = self.take(f"{block}.enabled", self.has(block), boolean, open=open)
        return value if isinstance(value, (bool, Name)) else False

    def auto_name(self, path: str) -> str:
        """What an "auto" is called in the call: the last part of its key, or all of it where others are alike."""
        last = path.rpartition(".")[2]
        alike = [other for other, value in self.values.items() if value == AUTO and other.rpartition(".")[2] == last]
        return last if len(alike) < 2 else path.replace(".", "_")

    def report(self) -> tuple[Row, ...]:
        """A row for each key in the order of the configuration, then those for defaults."""
        for path, value in self.values.items():
            block, _, key = path.rpartition(".")
            if key == "enabled" and isinstance(value, bool):
                self.honour(path, "on" if value else "off")
            self.hint(path, f"{block or path} is not enabled")
        order = [path for path in self.values if path in self.rows]
        return tuple(self.rows[path] for path in [*order, *[path for path in self.rows if path not in order]])

    # ---- how it is read

    def _say(self, path: str, verdict: str, what: str) -> None:
        """The first word on a key counts, but a refusal always."""
        if path not in self.values and verdict != "refused":
            return
        if path not in self.rows or (verdict == "refused" and self.rows[path].verdict != "refused"):
            value = self.written.get(path, self.values.get(path))
            self.rows[path] = Row(self.keys.get(path, path), value, verdict, what)

    def _flatten(self, at: str, tree: Mapping[str, object]) -> None:
        for key, value in tree.items():
            if not isinstance(key, str):
                raise TypeError(f"{WHO}: got the key {key!r}{f' in {at}' if at else ''}, expected strings.")
            written = f"{at}.{key}" if at else key
            if isinstance(value, Mapping) and value:
                self._flatten(written, value)
                continue
            own, (path, value) = value, self._known_as(written, value)
            if path in self.values:
                self.refuse(path, f"it is said twice: as {self.keys[path]} too")
                continue
            self.values[path], self.keys[path] = value, written
            self.written |= {} if own is value else {path: own}

    def _known_as(self, path: str, value: object) -> tuple[str, object]:
        """The path and the value that stand for deprecated ones."""
        block, _, key = path.partition(".")
        path = ".".join([ALIASES.get(block, block), key]) if key else ALIASES.get(block, block)
        path = ALIASES.get(path, path)
        if path == "zero_optimization" and isinstance(value, bool):
            return f"{path}.stage", int(value)
        if block == "zero_optimization" and key in OFFLOADS and isinstance(value, bool):
            return f"{block}.{OFFLOADS[key]}.device", "cpu" if value else "none"
        return path, value

    def _fill(self, autos: dict[str, object]) -> None:
        """Puts values in the place of "auto"."""
        for name, value in autos.items():
            same = [path for path in self.values if name in (path.rpartition(".")[2], path.replace(".", "_"))]
            exact = [path for path in same if path.replace(".", "_") == name]
            open = [path for path in exact or same if self.values[path] == AUTO]
            if len(open) > 1:
                names = " or ".join([f"{path.replace('.', '_')}=" for path in open])
                self.refuse(open[0], f"{name}= stands for several keys. Write {names}")
            elif open:
                plain = isinstance(value, (bool, int, float, str, list, tuple, type(None)))
                self.values[open[0]] = value if plain else Name(name)
                self.given |= {} if plain else {name: value}
            elif len(exact or same) == 1 and self.values[(exact or same)[0]] is not None:
                path = (exact or same)[0]
                if self.values[path] != (list(value) if isinstance(value, tuple) else value):
                    self.refuse(path, f"it is not 'auto', and got {name}={value!r} too. Keep one")
            elif same:
                self.hint(same[0], "")
            elif name in READ and not isinstance(value, (dict, tuple)):
                self.values[name], self.keys[name] = value, name
            elif name in OF_TRAINER and not self.has("optimizer"):
                self.given[name] = value
            elif name in _LASTS or name.replace("_", ".") in KNOWN:
                self.add(name, value, "no effect", "nothing in the configuration is 'auto' for it")
            else:
                self.add(name, value, "refused", f"no key has this name{nearest(name, _LASTS)}")

    def _settle(self) -> None:
        """Says what is so of keys by themselves: hints, what fzero lacks, and what nobody knows."""
        for path, value in self.values.items():
            ways = [".".join(path.split(".")[:n]) for n in range(1, path.count(".") + 2)]
            if why := next((HINTS[way] for way in ways if way in HINTS), ""):
                self.hint(path, why)
            elif block := next((way for way in ways if way in REFUSED), ""):
                self._lacking(path, block, value)
            elif path not in KNOWN and not path.startswith(("optimizer.params.", "scheduler.params.")):
                if value in ({}, None) and any(known.startswith(f"{path}.") for known in KNOWN):
                    continue
                self.refuse(path, f"DeepSpeed 0.19 has no such key{nearest(path, KNOWN)}")

    def _lacking(self, path: str, block: str, value: object) -> None:
        """A key of what fzero does not have, which may be off."""
        on = self.values.get(f"{block}.enabled", self.values.get(f"{block}.deepcompile", True))
        if block != path and on not in (False, None):
            self.refuse(path, REFUSED[block])
        elif block == path and value not in (False, None):
            self.refuse(path, REFUSED[block])
        else:
            self.hint(path, "it is off")


def load(config: str | os.PathLike[str] | Mapping[str, object]) -> Mapping[str, object]:
    """A configuration, out of its file if it is a path."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, (str, os.PathLike)):
        raise TypeError(f"{WHO}: got config={type(config).__name__}, expected a path of a JSON file, or a dict.")
    try:
        with open(config, encoding="utf-8") as file:
            found = json.load(file, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise ValueError(f"{WHO}: {os.fspath(config)}: got no JSON ({error}), expected ds_config.json.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{WHO}: {os.fspath(config)}: got {type(found).__name__}, expected an object with keys.")
    return found


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{WHO}: got the key {twice[0]!r} twice, expected it once.")
    return dict(pairs)


def nearest(name: str, known: Sequence[str]) -> str:
    last = name.rpartition(".")[2]
    found = [path for path in known if path.rpartition(".")[2] == last][:1] or difflib.get_close_matches(name, known, 1)
    return f". The nearest one is {found[0]!r}" if found else ""


KNOWN = [
    *READ, *HINTS, *REFUSED, *ALIASES, *[f"zero_optimization.{name}" for name in OFFLOADS],
    *[f"optimizer.params.{name}" for own in OPTIMIZERS.values() for name in own],
    *[f"scheduler.params.{name}" for own in PARAMS.values() for name in own],
]  # fmt: skip
_LASTS = [*dict.fromkeys([path.rpartition(".")[2] for path in KNOWN])]
