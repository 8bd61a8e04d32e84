"""Arithmetic that writes C++: formats and formulas run on `Value`s, and leave the body of a loop."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


def _operator(symbol: str, wraps: str = "", swapped: bool = False, kind: str = "") -> Callable[[Value, object], Value]:
    """A binary operator; `wraps` names its form for integers, which wraps around as torch's do."""

    def method(self: Value, other: object) -> Value:
        shifts = symbol in ("<<", ">>")
        a, b = self.name, literal(other, self.kind) if shifts else self.loop.operand(other, self.kind)
        a, b = (b, a) if swapped else (a, b)
        integral = wraps and self.kind == "i"
        return self.loop.let(f"{wraps}({a}, {b})" if integral else f"{a} {symbol} {b}", kind or self.kind)

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


def literal(value: object, kind: str) -> str:
    """C text of a value or a number, floats to the bit."""
    if isinstance(value, Value):
        return value.name
    assert isinstance(value, (int, float))
    if kind == "i":
        return "INT32_MIN" if value == -(1 << 31) else f"({value})" if value < 0 else str(value)
    single = struct.unpack("f", struct.pack("f", value))[0]
    return f"({single.hex()}f)"


class Loop:
    """A loop over vectors of N elements, or over their groups one by one; its values live in its body."""

    def __init__(self, names: str, vectors: bool = True) -> None:
        self.lines: list[str] = []
        self.names, self.vectors = names, vectors

    def value(self, name: str, kind: str) -> Any:
        """A `Value`, which formulas and formats take for a tensor."""
        return Value(self, name, kind)

    def operand(self, value: object, kind: str) -> str:
        """C text of a value or a number, which all lanes of a vector have."""
        text = literal(value, kind)
        return f"all({text})" if self.vectors and not isinstance(value, Value) else text

    def let(self, expression: str, kind: str) -> Any:
        name = f"{self.names}{len(self.lines)}"
        types = ("F", "I") if self.vectors else ("float", "int32_t")
        self.lines.append(f"const {types[kind != 'f']} {name} = {expression};")
        return self.value(name, kind)

    def keep(self, array: str, value: Any) -> None:
        self.lines.append(f"put({array} + i, {value.name});")


def _function(name: str, kind: str, counts: bool = False) -> Callable[..., Value]:
    """An operation that is a function of that name in C++; `counts` where a number says how many bits."""

    def call(*args: object) -> Value:
        loop = next(x.loop for x in args if isinstance(x, Value))
        texts = [literal(x, kind) if counts else loop.operand(x, kind) for x in args]
        return loop.let(f"{name}({', '.join(texts)})", kind)

    return call


class KernelOps:
    """The operations of formats and formulas on `Value`s."""

    bits, floats = _function("bits", "i"), _function("floats", "f")
    upper = floats  # a store takes the upper half
    shift, extended = _function("shift", "i", counts=True), _function("extended", "i", counts=True)
    least, most = _function("least", "i"), _function("most", "i")
    sqrt, sign = _function("root", "f"), _function("sign", "f")
    times_plus = _function("times_plus", "f")

    @staticmethod
    def level(code: Value, of: object) -> Value:
        return code  # looked up where it was loaded

    @classmethod
    def less_times(cls, x: Value, y: float, z: Value) -> Value:
        return cls.times_plus(x, z, z * -y)

    @staticmethod
    def where(condition: Value, a: object, b: object) -> Value:
        kind = next(x.kind for x in (a, b) if isinstance(x, Value))
        texts = [condition.loop.operand(x, kind) for x in (a, b)]
        return condition.loop.let(f"{condition.name} ? {texts[0]} : {texts[1]}", kind)
