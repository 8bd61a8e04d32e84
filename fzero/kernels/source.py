"""The C++ of one-pass CPU kernels: formats and formulas, traced into loops.

Every loop runs over the vectors of N elements that stay in the first cache; values of one loop that another needs
lie in small arrays.
Operations come in the order and precision that torch's eager ones have, so the results are the same to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fzero.formats.bits import LANES, Fields, hashed, word
from fzero.formats.formats import GROUP, Companded, Format, Grouped, Part
from fzero.kernels.head import HEAD, N, listed
from fzero.kernels.trace import KernelOps, Loop

_LINE = 64  # bytes
TYPES = {
    torch.float32: "float",
    torch.bfloat16: "uint16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.int16: "int16_t",
    torch.int32: "int32_t",
}


_OPS: Any = KernelOps  # for torch's operations, over which formats and formulas are written


class Source:
    """The C++ text of one update: the arguments, the arrays between loops, the loops; `loop` is being written."""

    def __init__(self, hypers: int) -> None:
        self.loop, self.hypers = Loop("t"), hypers
        self.arguments: list[str] = []
        self.shared: list[str] = []
        self.arrays: dict[str, str] = {}
        self.text: list[str] = []
        self.tables: list[str] = []
        self.stores: list[tuple[Part, str, str, bool]] = []  # the arguments of `store`

    def array(self, name: str, kind: str, numel: int = N) -> str:
        self.arrays[name] = f"{kind} {name}[{numel}]"
        return name

    def word(self, number: int) -> torch.Tensor:
        """A random word of the loop's elements, which is drawn where it is first read, and kept for other loops."""
        array = f"word{number}"
        if array in self.arrays:
            return self.loop.let(f"at({array} + i)", "i")
        self.array(array, "int32_t")
        drawn: Any = word(self.loop.let("add(all(block), at(lanes + i))", "i"), 0, number, _OPS.shift)
        self.loop.keep(array, drawn)
        return drawn

    def add(self, loop: Loop, shared: Sequence[str] = (), after: Sequence[str] = ()) -> None:
        """Emits a loop; `shared` are declarations of what the elements of group k have in common, `after` ends it."""
        body = "\n        ".join(loop.lines)
        if not shared:
            self.text.append(f"      for (int i = 0; i < N; i += LANES) {{\n        {body}\n      }}")
            return
        self.text.append(
            f"      GROUPS {{ {' '.join(shared)}\n"
            f"      for (int i = k * {GROUP}; i < (k + 1) * {GROUP}; i += LANES) {{\n"
            f"        {body}\n      }} {' '.join(after)} }}"
        )

    def load(self, part: Part, name: str, form: Format | None = None) -> str:
        """What the vector from element i of a stored part is.

        What a group shares is declared in `shared`. Codes of 4 bits are looked up, in a loop before.
        """
        self.arguments.append(f"{TYPES[part.dtype]}* __restrict {name}_")
        if part.dtype == torch.float32:
            return f"at({name}_ + start + i)"
        if part.every == GROUP:
            self.shared.append(f"const I {name} = all(bytes[{name}_[start / {GROUP} + k]]);")
            return name
        if part.every == 2:
            assert isinstance(form, Companded)  # the one format of 4 bits
            array = self.array(name, "float")
            table = listed(f"{level.hex()}f" for level in form.levels)
            self.tables.append(f"  static const float {name}levels[16] = {{{table}}};\n")
            self.text.append(f"      levels(&{name}_[start / 2], {array}, {name}levels);")
            return f"at({array} + i)"
        return f"wide({name}_ + start + i)"

    def fetch(self, part: Part, name: str) -> None:
        """Emits that the lines of elements further on come into the cache; those of scales come by themselves."""
        if part.every != GROUP:
            for at in range(0, N // part.every, _LINE // part.dtype.itemsize):
                self.text.append(f"      __builtin_prefetch(&{name}_[(start + AHEAD) / {part.every} + {at}]);")

    def store(self, part: Part, name: str, array: str, rounds: bool) -> None:
        """Emits the loop that brings an array into a stored part; `rounds` where bfloat16 does not hold it as it is."""
        if part.every == 2:
            pairs = self.array(f"{name}pairs", "int32_t")
            self.text.append(
                f"      GROUPS SIMD for (int i = 0; i < {GROUP // 2}; i++)\n"
                f"        {pairs}[k * {GROUP // 2} + i] = ({array}[k * {GROUP} + i] & 15)"
                f" | left({array}[k * {GROUP} + {GROUP // 2} + i], 4);"
            )
            array = pairs
        if part.dtype == torch.bfloat16:
            self.text.append(f"      {'nearest' if rounds else 'upper'}({array}, &{name}_[start]);")
            return
        self.text.append(f"      narrow({array}, &{name}_[start / {part.every}], N / {part.every});")

    def __str__(self) -> str:
        arrays = "\n".join(f"  alignas(64) {array} = {{}};" for array in self.arrays.values())
        counted = ["const int32_t* __restrict runs_", "int64_t first"]
        arguments = ", ".join(["int64_t count", *self.arguments, *counted, "const float* h"])
        body = "\n".join(self.text)
        hypers = " ".join(f"const F h{i} = all(h[{i}]);" for i in range(self.hypers))
        lanes = listed(LANES) if "word0" in self.arrays else ""
        if lanes:
            arrays = f"  alignas(64) static const int32_t lanes[N] = {{{lanes}}};\n{arrays}"
            block = Loop("b", vectors=False)
            key: Any = hashed(block.let("counter(runs_, run, first + start / N)", "i"), _OPS.shift)
            body = f"      {' '.join(block.lines)} const int32_t block = {key.name};\n{body}"
        return (
            f'{HEAD}extern "C" void kernel({arguments}) {{\n{"".join(self.tables)}{arrays}\n'
            f"  {hypers}\n  int64_t run = 0;\n"
            f"  for (int64_t start = 0; start < count; start += N) {{\n{body}\n  }}\n}}\n"
        )


def source_of(
    formula: Callable[..., Sequence[torch.Tensor]],
    formats: Sequence[Format],
    grad: torch.dtype,
    hypers: int,
) -> str:
    """C++ of one update of a buffer: params in formats[0], moments in the others."""
    source = Source(hypers)
    names = [[f"s{i}{part.name}" for part in form.parts] for i, form in enumerate(formats)]
    if any(form.group > 1 for form in formats):
        for form, own in zip(formats, names, strict=True):
            for part, name in zip(form.parts, own, strict=True):
                source.fetch(part, name)
        source.fetch(Part("", grad), "grad")
    arrays = [
        [source.load(part, name, form) for part, name in zip(form.parts, own, strict=True)]
        for form, own in zip(formats, names, strict=True)
    ]
    grads = source.load(Part("", grad), "grad")
    noise, loop = Fields(source.word, _OPS.shift), source.loop
    kinds = [["f" if p.dtype.is_floating_point or p.every == 2 else "i" for p in form.parts] for form in formats]
    params, *moments = [
        functools.partial(form.decode, _OPS, [loop.let(*pair) for pair in zip(own, kind, strict=True)])
        for form, own, kind in zip(formats, arrays, kinds, strict=True)
    ]
    hyper = [loop.value(f"h{i}", "f") for i in range(hypers)]
    new = formula(_OPS, hyper, params(), loop.let(grads, "f"), *moments)
    kept = {i: source.array(f"new{i}", "float") for i, f in enumerate(formats) if isinstance(f, Grouped)}
    for i, array in kept.items():
        loop.keep(array, new[i])
    grouped: list[tuple[int, Grouped, str]] = []
    for i, (form, value) in enumerate(zip(formats, new, strict=True)):
        if isinstance(form, Grouped):
            magnitude = form.magnitude(_OPS, value)
            loop.keep(source.array(f"size{i}", "int32_t"), magnitude)
            top = _OPS.most(loop.value(f"top{i}", "i"), magnitude)
            loop.lines.append(f"top{i} = {top.name};")
            grouped.append((i, form, kept[i]))
            continue
        encoded: Any = form.encode(_OPS, value, noise)
        for part, name, out in zip(form.parts, names[i], encoded, strict=True):
            if part.dtype == torch.float32:
                loop.keep(f"(start + {name}_)", out)
                continue
            target = source.array(f"out_{name}", "float" if out.kind == "f" else "int32_t")
            loop.keep(target, out)
            source.stores.append((part, name, target, form.plain and not form.rounds))
    tops = [f"I top{i} = {{}};" for i, _, _ in grouped]
    after = [f"put(tops + {(n * N // GROUP)} * LANES + k * LANES, top{i});" for n, (i, _, _) in enumerate(grouped)]
    source.add(loop, shared=[*source.shared, *tops], after=after)
    if grouped:
        _grouped(source, noise, grouped, names)
    for stored in source.stores:
        source.store(*stored)
    return str(source)


def _grouped(
    source: Source, noise: Fields, grouped: Sequence[tuple[int, Grouped, str]], names: Sequence[Sequence[str]]
) -> None:
    """Emits the scales and codes of new values, each an (index, format, array).

    The largest magnitude of each group is found first, of the vectors of four at a time, as the loop before left them.
    """
    groups = N // GROUP
    padded = -(-len(grouped) * groups // 4) * 4
    tops, most = source.array("tops", "int32_t", padded * 16), source.array("most_", "int32_t", padded)
    source.text += [f"      largest({tops} + {k} * LANES, {most} + {k});" for k in range(0, padded, 4)]
    for n, (i, form, kept) in enumerate(grouped):
        scales, codes = source.array(f"scale{i}", "int32_t", groups), source.array(f"codes{i}", "int32_t")
        loop = Loop("g", vectors=False)
        loop.keep(scales, form.scale(_OPS, loop.let(f"{most}[{n * groups} + i]", "i")))
        source.text.append(f"      GROUPS {{ const int i = k; {' '.join(loop.lines)} }}")
        loop = source.loop = Loop("c")
        value, size = loop.let(f"at({kept} + i)", "f"), loop.let(f"at(size{i} + i)", "i")
        loop.keep(codes, form.codes(_OPS, value, size, loop.value("scale", "i"), noise))
        source.add(loop, shared=[f"const I scale = all({scales}[k]);"])
        source.stores += [(form.parts[0], names[i][0], codes, False), (form.parts[1], names[i][1], scales, False)]
