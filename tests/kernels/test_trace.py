"""Arithmetic on values writes the body of a loop in C++."""

from __future__ import annotations

from fzero.kernels.trace import KernelOps, Loop, Value, literal


def test_numbers_are_written_to_the_bit() -> None:
    assert literal(0.1, "f") == "(0x1.99999a0000000p-4f)"
    assert (literal(-3, "i"), literal(3, "i"), literal(-(1 << 31), "i")) == ("(-3)", "3", "INT32_MIN")


def test_operators_write_lines_and_integers_wrap_around() -> None:
    loop = Loop("t")
    x, n = Value(loop, "x", "f"), Value(loop, "n", "i")
    loop.keep("out", 2 - x * x)
    two = "all((0x1.0000000000000p+1f))"
    assert loop.lines == ["const F t0 = x * x;", f"const F t1 = {two} - t0;", "put(out + i, t1);"]
    assert (n + 1).kind == "i" and loop.lines[-1] == "const I t3 = add(n, all(1));"
    assert (x >= 0.0).kind == "b"
    assert (n << 3).name == "t5" and loop.lines[-1] == "const I t5 = left(n, 3);"


def test_a_loop_over_single_values_has_no_vectors() -> None:
    loop = Loop("g", vectors=False)
    n = Value(loop, "n", "i")
    assert KernelOps.least(n + 1, 253).name == "g1"
    assert loop.lines == ["const int32_t g0 = add(n, 1);", "const int32_t g1 = least(g0, 253);"]
