"""Arithmetic that writes C++: formats and formulas run on `Value`s, and leave the body of a loop."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


def _operator(symbol: str, wrapping: str = "", swapped: bool = False, kind: str = "") -> Callable[[Value, Any], Value]:
    """A binary operator; `wrapping` names its form for integers, which wraps around as torch's do."""

    def method(self: Value, other: object) -> Value:
        a, b = self.name, literal(other, self.kind)
        a, b = (b, a) if swapped else (a, b)
        integral = wrapping and self.kind == "i"
        return self.loop.let(f"{wrapping}({a}, {b})" if integral else f"{a} {symbol} {b}", kind or self.kind)

    return method


class Value:
    """A float, an int32 or a condition in a loop's body; arithmetic on it writes the loop."""

    __slots__ = ("kind", "loop", "name")

    def __init__(self, loop: Loop, name: str, kind: str) -> None:
        self.loop, self.name, self.kind = loop, name, kind

    __add__, __radd__ = _operator("+", "add"), _operator("+", "add", swapped=True)
    __sub__, __rsub__ = _operator("-", "sub"), _operator("-", "sub", swapped=True)
    __mul__, __rmul__ = _operator("*", "mul"), _operator("*", "mul", swapped=True)
    __truediv__, __rtruediv__ = _operator("/"), _operator("/", swapped=True)
    __and__, __or__, __xor__ = _operator("&"), _operator("|"), _operator("^")
    __lshift__, __rshift__ = _operator("<<", "left"), _operator(">>")
    __ge__ = _operator(">=", kind="b")


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

    def let(self, expression: str, kind: str) -> Any:
        name = f"{self.names}{len(self.lines)}"
        self.lines.append(f"const {'float' if kind == 'f' else 'int32_t'} {name} = {expression};")
        return Value(self, name, kind)

    def keep(self, array: str, value: Any) -> None:
        self.lines.append(f"{array}[i] = {value.name};")


class KernelOps:
    """The operations of formats and formulas on `Value`s."""

    @staticmethod
    def _call(name: str, kind: str, *args: object, of: str | None = None) -> Value:
        loop = next(x.loop for x in args if isinstance(x, Value))
        return loop.let(f"{name}({', '.join(literal(x, of or kind) for x in args)})", kind)

    @classmethod
    def bits(cls, x: Value) -> Value:
        return cls._call("bits", "i", x)

    @classmethod
    def floats(cls, x: Value) -> Value:
        return cls._call("floats", "f", x)

    @classmethod
    def upper(cls, x: Value) -> Value:
        return cls.floats(x)  # a store takes the upper half

    @classmethod
    def shift(cls, x: Value, count: int) -> Value:
        return cls._call("shift", "i", x, count)

    @classmethod
    def extended(cls, x: Value, count: int) -> Value:
        return cls._call("extended", "i", x, count)

    @staticmethod
    def level(code: Value, of: object) -> Value:
        return code  # looked up where it was loaded

    @classmethod
    def sqrt(cls, x: Value) -> Value:
        return cls._call("sqrtf", "f", x)

    @classmethod
    def times_plus(cls, x: Value, y: Value, z: object) -> Value:
        return cls._call("__builtin_fmaf", "f", x, y, z)

    @classmethod
    def less_times(cls, x: Value, y: float, z: Value) -> Value:
        return cls.times_plus(x, z, z * -y)

    @classmethod
    def sign(cls, x: Value) -> Value:
        return cls._call("sign", "f", x)

    @classmethod
    def least(cls, x: Value, bound: int) -> Value:
        return cls._call("least", "i", x, bound)

    @classmethod
    def most(cls, x: Value, bound: int) -> Value:
        return cls._call("most", "i", x, bound)

    @staticmethod
    def where(condition: Value, a: object, b: object) -> Value:
        kind = next(x.kind for x in (a, b) if isinstance(x, Value))
        return condition.loop.let(f"{condition.name} ? {literal(a, kind)} : {literal(b, kind)}", kind)
