"""The C++ of one-pass CPU kernels: formats and formulas, traced into loops.

Every loop runs over N elements that stay in the first cache; values of one loop that another needs lie in small arrays.
Operations come in the order and precision that torch's eager ones have, so the results are the same to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fzero.formats.bits import Fields, hashed, word
from fzero.formats.formats import GROUP, Companded, Format, Grouped, Part
from fzero.kernels.trace import KernelOps, Loop

N = 64  # elements of a loop; every buffer of a step is a multiple of it
AHEAD = 12 * N  # elements that are fetched ahead where arithmetic sets the pace: a tenth is gained in scattered pages
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


def _listed(numbers: Iterable[object]) -> str:
    return ", ".join(map(str, numbers))


_HEAD = f"""#include <stdint.h>
#include <math.h>
#include <string.h>
#define N {N}
#define AHEAD {AHEAD}
#define SIMD _Pragma("omp simd")
#define GROUPS _Pragma("GCC unroll 1") for (int k = 0; k < N / {GROUP}; k++)
static inline float floats(int32_t x) {{ float y; memcpy(&y, &x, 4); return y; }}
static inline int32_t bits(float x) {{ int32_t y; memcpy(&y, &x, 4); return y; }}
static inline int32_t shift(int32_t x, int n) {{ return (int32_t)((uint32_t)x >> n); }}
static inline int32_t extended(int32_t x, int n) {{ return (int32_t)((uint32_t)x << (32 - n)) >> (32 - n); }}
static inline int32_t least(int32_t x, int32_t y) {{ return x > y ? y : x; }}
static inline int32_t most(int32_t x, int32_t y) {{ return x < y ? y : x; }}
static inline float sign(float x) {{ return (float)((x > 0) - (x < 0)); }}
static inline int32_t add(int32_t x, int32_t y) {{ return (int32_t)((uint32_t)x + (uint32_t)y); }}
static inline int32_t sub(int32_t x, int32_t y) {{ return (int32_t)((uint32_t)x - (uint32_t)y); }}
static inline int32_t mul(int32_t x, int32_t y) {{ return (int32_t)((uint32_t)x * (uint32_t)y); }}
static inline int32_t left(int32_t x, int n) {{ return (int32_t)((uint32_t)x << n); }}
static inline int32_t counter(const int32_t* runs, int64_t& at, int64_t block) {{
  while (runs[3 * (at + 1)] <= block) at++;
  return add(runs[3 * at + 1], mul(runs[3 * at + 2], (int32_t)(block - runs[3 * at])));
}}
#ifdef __AVX512BW__
#include <immintrin.h>
alignas(64) static const uint16_t into_upper[32] = {{{_listed(i // 2 for i in range(32))}}};
alignas(64) static const uint16_t of_upper[32] = {{{_listed(2 * i + 1 for i in range(32))}}};
#define WIDE(T, kind, load) static inline void wide(const T* x, int32_t* y, int n) {{ \\
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 16) \\
    _mm512_store_si512(y + i, _mm512_cvt##kind##_epi32(load(x + i))); }}
#define HALF(x) _mm_loadu_si128((const __m128i*)(x))
#define WHOLE(x) _mm256_loadu_si256((const __m256i*)(x))
WIDE(int8_t, epi8, HALF) WIDE(uint8_t, epu8, HALF) WIDE(int16_t, epi16, WHOLE)
static inline void wide(const uint16_t* x, float* y, int n) {{ // bfloat16 as the upper halves of words
  const __m512i low = _mm512_load_si512(into_upper), high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 32) {{
    const __m512i halves = _mm512_loadu_si512(x + i);
    _mm512_store_si512(y + i, _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, low, halves));
    _mm512_store_si512(y + i + 16, _mm512_maskz_permutexvar_epi16(0xaaaaaaaa, high, halves));
  }}
}}
static inline void upper(const float* x, uint16_t* y, int n) {{
  const __m512i of = _mm512_load_si512(of_upper);
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 32)
    _mm512_storeu_si512(y + i, _mm512_permutex2var_epi16(_mm512_load_si512(x + i), of, _mm512_load_si512(x + i + 16)));
}}
static inline void levels(const uint8_t* x, float* y, const float* table, int n) {{ // two codes of 4 bits a byte
  const __m512 of = _mm512_loadu_ps(table);
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 16) {{
    const __m512i codes = _mm512_cvtepu8_epi32(HALF(x + i));
    _mm512_store_ps(y + 2 * i, _mm512_permutexvar_ps(codes, of));
    _mm512_store_ps(y + 2 * i + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), of));
  }}
}}
static inline __m512i highest(const int32_t* x) {{
  return _mm512_max_epi32(_mm512_load_si512(x), _mm512_load_si512(x + 16));
}}
static inline void largest(const int32_t* x, int32_t* y) {{ // of four groups at once, whose lanes take turns
  const __m512i a = highest(x), b = highest(x + 32), c = highest(x + 64), d = highest(x + 96);
  const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_store_si128((__m128i*)y, _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}}
#else
template <typename T> static inline void wide(const T* __restrict x, int32_t* __restrict y, int n) {{
  SIMD for (int i = 0; i < n; i++) y[i] = x[i];
}}
static inline void wide(const uint16_t* __restrict x, float* __restrict y, int n) {{
  SIMD for (int i = 0; i < n; i++) y[i] = floats(left(x[i], 16));
}}
static inline void upper(const float* __restrict x, uint16_t* __restrict y, int n) {{
  SIMD for (int i = 0; i < n; i++) y[i] = (uint16_t)shift(bits(x[i]), 16);
}}
static inline void levels(const uint8_t* __restrict x, float* __restrict y, const float* table, int n) {{
  for (int i = 0; i < n; i += 16) {{
    for (int j = 0; j < 16; j++) {{
      y[2 * i + j] = table[x[i + j] & 15];
      y[2 * i + 16 + j] = table[x[i + j] >> 4];
    }}
  }}
}}
static inline void largest(const int32_t* __restrict x, int32_t* __restrict y) {{
  for (int k = 0; k < 4; k++) {{
    int32_t z = 0;
    _Pragma("omp simd reduction(max:z)")
    for (int i = 0; i < {GROUP}; i++) z = most(z, x[k * {GROUP} + i]);
    y[k] = z;
  }}
}}
#endif
static inline double each(const float* x, int64_t n) {{
  double sum = 0;
  _Pragma("omp simd reduction(+:sum)")
  for (int64_t i = 0; i < n; i++) sum += (double)x[i] * (double)x[i];
  return sum;
}}
static inline double squares(const float* __restrict x) {{ // in single precision, where squares are in its range
  float sum = 0;
  _Pragma("omp simd reduction(+:sum)")
  for (int i = 0; i < N; i++) sum += x[i] * x[i];
  return sum > 1e-24f && sum < 1e36f ? sum : each(x, N);
}}
static inline uint16_t nearest(float x) {{
  uint32_t y = (uint32_t)bits(x);
  uint16_t z = (uint16_t)((y + 0x7fff + ((y >> 16) & 1)) >> 16);
  return (y & 0x7fffffff) > 0x7f800000 ? (uint16_t)0x7fc0 : z;
}}
"""


class Source:
    """The C++ text of one update: the arguments, the arrays between loops, the loops; `loop` is being written."""

    def __init__(self) -> None:
        self.loop = Loop("t")
        self.arguments: list[str] = []
        self.shared: list[str] = []
        self.arrays: dict[str, str] = {}
        self.text: list[str] = []
        self.tables: list[str] = []
        self.measured = 0  # arrays whose squares are summed up
        self.stores: list[tuple[Part, str, str, bool]] = []  # the arguments of `store`

    def array(self, name: str, kind: str, numel: int = N) -> str:
        self.arrays[name] = f"{kind} {name}[{numel}]"
        return name

    def word(self, number: int) -> torch.Tensor:
        """A random word of the loop's elements, from an array that is made where it is first read."""
        array = f"word{number}"
        if array not in self.arrays:
            self.array(array, "int32_t")
            block, loop = Loop("b"), Loop("w")
            key: Any = hashed(block.let("counter(runs_, run, first + start / 64 + k)", "i"), _OPS.shift)
            bits: Any = word(loop.value(key.name, "i"), loop.value("i", "i"), number, _OPS.shift)
            loop.lines.append(f"{array}[k * 64 + i] = {bits.name};")
            self.text.append(
                f"      for (int k = 0; k < N / 64; k++) {{ {' '.join(block.lines)}\n"
                f"        SIMD for (int i = 0; i < 64; i++) {{ {' '.join(loop.lines)} }} }}"
            )
        return self.loop.let(f"{array}[i]", "i")

    def add(self, loop: Loop, shared: Sequence[str] = ()) -> None:
        """Emits a loop; `shared` are declarations of what the elements of group k have in common."""
        body = "\n        ".join(loop.lines)
        if not shared:
            self.text.append(f"      SIMD for (int i = 0; i < N; i++) {{\n        {body}\n      }}")
            return
        self.text.append(
            f"      GROUPS {{ {' '.join(shared)}\n"
            f"      SIMD for (int j = 0; j < {GROUP}; j++) {{ const int i = k * {GROUP} + j;\n"
            f"        {body}\n      }} }}"
        )

    def load(self, part: Part, name: str, form: Format | None = None) -> str:
        """Emits the loop that brings N elements of a stored part into an array; what element i is there.

        What a group shares is declared in `shared`. Codes of 4 bits are looked up.
        """
        self.arguments.append(f"{TYPES[part.dtype]}* __restrict {name}_")
        if part.dtype == torch.float32:
            return f"{name}_[start + i]"
        if part.every == GROUP:
            self.shared.append(f"const int32_t {name} = {name}_[start / {GROUP} + k];")
            return name
        if part.every == 2:
            assert isinstance(form, Companded)  # the one format of 4 bits
            array = self.array(name, "float")
            table = _listed(f"{level.hex()}f" for level in form.levels)
            self.tables.append(f"  static const float {name}levels[16] = {{{table}}};\n")
            self.text.append(f"      levels(&{name}_[start / 2], {array}, {name}levels, N / 2);")
            return f"{array}[i]"
        array = self.array(name, "float" if part.dtype == torch.bfloat16 else "int32_t")
        self.text.append(f"      wide(&{name}_[start], {array}, N);")
        return f"{array}[i]"

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
        if part.dtype == torch.bfloat16 and not rounds:
            self.text.append(f"      upper({array}, &{name}_[start], N);")
            return
        value = f"nearest({array}[i])" if rounds else f"({TYPES[part.dtype]}){array}[i]"
        self.text.append(f"      SIMD for (int i = 0; i < N / {part.every}; i++)")
        self.text.append(f"        {name}_[start / {part.every} + i] = {value};")

    def measure(self, array: str, place: int) -> None:
        """Emits the sum of an array's squares, which goes to the piece that the elements belong to."""
        if not self.measured:
            self.text.append(
                "      const int64_t at = first * N + start;\n"
                "      while (piece < pieces && (ends[piece] + N - 1) / N * N <= at) piece++;\n"
                "      const int64_t real = piece < pieces ? ends[piece] - at : 0;"
            )
        self.measured += 1
        self.text.append(f"      sums[piece * SUMS + {place}] += real < N ? each({array}, real) : squares({array});")

    def __str__(self) -> str:
        arrays = "\n".join(f"  alignas(64) {array} = {{}};" for array in self.arrays.values())
        counted = ["const int32_t* __restrict runs_", "int64_t first"]
        sums = ["double* __restrict sums", "const int64_t* ends", "int64_t pieces"] if self.measured else []
        arguments = ", ".join(["int64_t count", *self.arguments, *counted, "const float* h", *sums])
        arrays = f"  enum {{ SUMS = {self.measured} }}; int64_t piece = 0;\n{arrays}" if self.measured else arrays
        body = "\n".join(self.text)
        return (
            f'{_HEAD}extern "C" void kernel({arguments}) {{\n{"".join(self.tables)}{arrays}\n  int64_t run = 0;\n'
            f"  for (int64_t start = 0; start < count; start += N) {{\n{body}\n  }}\n}}\n"
        )


def source_of(
    formula: Callable[..., Sequence[torch.Tensor]],
    formats: Sequence[Format],
    grad: torch.dtype,
    hypers: int,
    measures: bool = False,
) -> str:
    """C++ of one update of a buffer: params in formats[0], moments in the others.

    Args:
        measures: adds the squares of the new params, of what is added to them and of the new moments, of each piece of
            the buffer by itself, to sums[pieces + 1][...]; pieces begin at multiples of N, and end at `ends`.
    """
    source = Source()
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
    hyper = [loop.value(f"h[{i}]", "f") for i in range(hypers)]
    old = params()
    new = formula(_OPS, hyper, old, loop.let(grads, "f"), *moments)
    measured = [new[0], new[0] - old, *new[1:]] if measures else []
    for i, value in enumerate(measured):
        loop.keep(source.array(f"measured{i}", "float"), value)
    grouped: list[tuple[int, Grouped, str]] = []
    for i, (form, value) in enumerate(zip(formats, new, strict=True)):
        if isinstance(form, Grouped):
            kept = source.array(f"new{i}", "float")
            loop.keep(kept, value)
            grouped.append((i, form, kept))
            continue
        encoded: Any = form.encode(_OPS, value, noise)
        for part, name, out in zip(form.parts, names[i], encoded, strict=True):
            if part.dtype == torch.float32:
                loop.keep(f"(start + {name}_)", out)
                continue
            target = source.array(f"out_{name}", "float" if out.kind == "f" else "int32_t")
            loop.keep(target, out)
            source.stores.append((part, name, target, form.plain and not form.rounds))
    source.add(loop, shared=source.shared)
    for i in range(len(measured)):
        source.measure(f"measured{i}", i)
    if grouped:
        _grouped(source, noise, grouped, names)
    for stored in source.stores:
        source.store(*stored)
    return str(source)


def _grouped(
    source: Source, noise: Fields, grouped: Sequence[tuple[int, Grouped, str]], names: Sequence[Sequence[str]]
) -> None:
    """Emits the scales and codes of new values, each an (index, format, array).

    The largest of each group's elements is found first, for four groups at a time.
    """
    groups = N // GROUP
    padded = -(-len(grouped) * groups // 4) * 4
    sizes, tops = source.array("sizes", "int32_t", padded * GROUP), source.array("tops", "int32_t", padded)
    for n, (_, form, kept) in enumerate(grouped):
        loop = Loop("b")
        loop.keep(f"({sizes} + {n * N})", form.magnitude(_OPS, loop.let(f"{kept}[i]", "f")))
        source.add(loop)
    source.text += [f"      largest({sizes} + {k * GROUP}, {tops} + {k});" for k in range(0, padded, 4)]
    for n, (i, form, kept) in enumerate(grouped):
        scales, codes, loop = source.array(f"scale{i}", "int32_t"), source.array(f"codes{i}", "int32_t"), Loop("g")
        loop.keep(scales, form.scale(_OPS, loop.let(f"{tops}[{n * groups} + i]", "i")))
        source.text.append(f"      GROUPS {{ const int i = k; {' '.join(loop.lines)} }}")
        loop = source.loop = Loop("c")
        scale = loop.let("scale", "i")
        value, size = loop.let(f"{kept}[i]", "f"), loop.let(f"{sizes}[{n * N} + i]", "i")
        loop.keep(codes, form.codes(_OPS, value, size, scale, noise))
        source.add(loop, shared=[f"const int32_t scale = {scales}[k];"])
        source.stores += [(form.parts[0], names[i][0], codes, False), (form.parts[1], names[i][1], scales, False)]
