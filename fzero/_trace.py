"""Arithmetic that writes C++: formats and formulas run on `Value`s, and leave the body of a loop."""

from __future__ import annotations

import struct
from typing import Any


class Value:
    """A float, an int32 or a condition in a loop's body; arithmetic on it writes the loop."""

    __slots__ = ("kind", "loop", "name")

    def __init__(self, loop: Loop, name: str, kind: str) -> None:
        self.loop, self.name, self.kind = loop, name, kind

    def _binary(self, operator: str, other: Any, swapped: bool = False, kind: str | None = None) -> Value:
        other = literal(other, self.kind)
        a, b = (other, self.name) if swapped else (self.name, other)
        wrapping = {"+": "add", "-": "sub", "*": "mul", "<<": "left"}
        integral = self.kind == "i" and kind is None and operator in wrapping  # wraps around, as torch's do
        return self.loop.let(
            f"{wrapping[operator]}({a}, {b})" if integral else f"{a} {operator} {b}", kind or self.kind
        )

    def __add__(self, other: Any) -> Value:
        return self._binary("+", other)

    def __sub__(self, other: Any) -> Value:
        return self._binary("-", other)

    def __mul__(self, other: Any) -> Value:
        return self._binary("*", other)

    def __truediv__(self, other: Any) -> Value:
        return self._binary("/", other)

    def __and__(self, other: Any) -> Value:
        return self._binary("&", other)

    def __or__(self, other: Any) -> Value:
        return self._binary("|", other)

    def __xor__(self, other: Any) -> Value:
        return self._binary("^", other)

    def __lshift__(self, other: int) -> Value:
        return self._binary("<<", other)

    def __radd__(self, other: Any) -> Value:
        return self._binary("+", other, swapped=True)

    def __rsub__(self, other: Any) -> Value:
        return self._binary("-", other, swapped=True)

    def __rmul__(self, other: Any) -> Value:
        return self._binary("*", other, swapped=True)

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary("/", other, swapped=True)

    def __gt__(self, other: Any) -> Value:
        return self._binary(">", other, kind="b")

    def __ge__(self, other: Any) -> Value:
        return self._binary(">=", other, kind="b")


def literal(value: Any, kind: str) -> str:
    """C text of a number, floats to the bit."""
    if isinstance(value, Value):
        return value.name
    if kind == "i":
        return "INT32_MIN" if value == -(1 << 31) else f"({value})" if value < 0 else str(value)
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"({single.hex()}f)"


class Loop:
    """A loop over N elements (or their groups); its values live in its body."""

    def __init__(self, names: str) -> None:
        self.lines: list[str] = []
        self.names = names

    def let(self, expression: str, kind: str) -> Value:
        name = f"{self.names}{len(self.lines)}"
        self.lines.append(f"const {'float' if kind == 'f' else 'int32_t'} {name} = {expression};")
        return Value(self, name, kind)

    def keep(self, array: str, value: Value) -> None:
        self.lines.append(f"{array}[i] = {value.name};")


class KernelOps:
    """The operations of formats and formulas on `Value`s."""

    @staticmethod
    def _call(name: str, kind: str, *args: Any, of: str | None = None) -> Value:
        loop = next(x.loop for x in args if isinstance(x, Value))
        return loop.let(f"{name}({', '.join(literal(x, of or kind) for x in args)})", kind)

    @classmethod
    def bits(cls, x: Value) -> Value:
        return cls._call("bits", "i", x)

    @classmethod
    def floats(cls, x: Value) -> Value:
        return cls._call("floats", "f", x)

    @classmethod
    def shift(cls, x: Value, count: int) -> Value:
        return cls._call("shift", "i", x, count)

    @classmethod
    def extended(cls, x: Value, count: int) -> Value:
        return cls._call("extended", "i", x, count)

    @classmethod
    def sqrt(cls, x: Value) -> Value:
        return cls._call("sqrtf", "f", x)

    @classmethod
    def abs(cls, x: Value) -> Value:
        return cls._call("fabsf", "f", x)

    @classmethod
    def floor(cls, x: Value) -> Value:
        return cls._call("floorf", "f", x)

    @classmethod
    def sign(cls, x: Value) -> Value:
        return cls._call("sign", "f", x)

    @classmethod
    def least(cls, x: Value, bound: Any) -> Value:
        return cls._call(f"least_{x.kind}", x.kind, x, bound)

    @classmethod
    def most(cls, x: Value, bound: Any) -> Value:
        return cls._call(f"most_{x.kind}", x.kind, x, bound)

    @classmethod
    def clamp(cls, x: Value, low: float, high: float) -> Value:
        return cls.least(cls.most(x, low), high)

    @staticmethod
    def where(condition: Value, a: Any, b: Any) -> Value:
        kind = next(x.kind for x in (a, b) if isinstance(x, Value))
        return condition.loop.let(f"{condition.name} ? {literal(a, kind)} : {literal(b, kind)}", kind)

    @classmethod
    def to_float(cls, x: Value) -> Value:
        return cls._call("(float)", "f", x)

    @classmethod
    def to_int(cls, x: Value) -> Value:
        return cls._call("(int32_t)", "i", x)
