"""Arithmetic on values writes the body of a loop in C++."""

from __future__ import annotations

from fzero.kernels.trace import Loop, Value, literal


def test_numbers_are_written_to_the_bit() -> None:
    assert literal(0.1, "f") == "(0x1.99999a0000000p-4f)"
    assert (literal(-3, "i"), literal(3, "i"), literal(-(1 << 31), "i")) == ("(-3)", "3", "INT32_MIN")


def test_operators_write_lines_and_integers_wrap_around() -> None:
    loop = Loop("t")
    x, n = Value(loop, "x", "f"), Value(loop, "n", "i")
    loop.keep("out", 2 - x * x)
    assert loop.lines == ["const float t0 = x * x;", "const float t1 = (0x1.0000000000000p+1f) - t0;", "out[i] = t1;"]
    assert (n + 1).kind == "i" and loop.lines[-1] == "const int32_t t3 = add(n, 1);"
    assert (x >= 0.0).kind == "b"
