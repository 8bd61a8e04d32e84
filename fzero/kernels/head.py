"""The C++ that every kernel begins with: vectors as wide as the machine's, and what it has instructions of its own for.

`F` and `I` are vectors of LANES floats and int32. Of two versions of a function the last is for any machine.
"""

from __future__ import annotations

from collections.abc import Iterable

from fzero.formats.formats import GROUP

N = 64  # elements of a loop; every buffer of a step is a multiple of it
AHEAD = 12 * N  # elements that are fetched ahead where arithmetic sets the pace: a tenth is gained in scattered pages


def listed(numbers: Iterable[object]) -> str:
    return ", ".join(map(str, numbers))


_ANY = f"""#include <stdint.h>
#include <math.h>
#include <string.h>
#if defined(__AVX512BW__)
#define LANES 16
#elif defined(__AVX2__) && defined(__FMA__)
#define LANES 8
#else
#define LANES 4
#endif
#if LANES > 4
#include <immintrin.h>
#endif
#define N {N}
#define AHEAD {AHEAD}
#define SIMD _Pragma("omp simd")
#define GROUPS _Pragma("GCC unroll 2") for (int k = 0; k < N / {GROUP}; k++)
typedef float F __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t I __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t U __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
static inline F all(float x) {{ return x - F{{}}; }}
static inline I all(int32_t x) {{ return x + I{{}}; }}
static inline F at(const float* x) {{ return *(const F*)x; }}
static inline I at(const int32_t* x) {{ return *(const I*)x; }}
static inline void put(float* y, F x) {{ *(F*)y = x; }}
static inline void put(int32_t* y, I x) {{ *(I*)y = x; }}
static inline void put(int32_t* y, int32_t x) {{ *y = x; }}
static inline float floats(int32_t x) {{ float y; memcpy(&y, &x, 4); return y; }}
static inline int32_t bits(float x) {{ int32_t y; memcpy(&y, &x, 4); return y; }}
static inline F floats(I x) {{ return (F)x; }}
static inline I bits(F x) {{ return (I)x; }}
#define BOTH(S, T) \\
  static inline S shift(S x, int n) {{ return (S)((T)x >> n); }} \\
  static inline S left(S x, int n) {{ return (S)((T)x << n); }} \\
  static inline S extended(S x, int n) {{ return (S)((T)x << (32 - n)) >> (32 - n); }} \\
  static inline S add(S x, S y) {{ return (S)((T)x + (T)y); }} \\
  static inline S sub(S x, S y) {{ return (S)((T)x - (T)y); }} \\
  static inline S mul(S x, S y) {{ return (S)((T)x * (T)y); }}
BOTH(int32_t, uint32_t) BOTH(I, U)
static inline int32_t least(int32_t x, int32_t y) {{ return x > y ? y : x; }}
static inline int32_t most(int32_t x, int32_t y) {{ return x < y ? y : x; }}
static inline F sign(F x) {{ return __builtin_convertvector((I)(x < 0) - (I)(x > 0), F); }}
static inline int32_t counter(const int32_t* runs, int64_t& at, int64_t block) {{
  while (runs[3 * (at + 1)] <= block) at++;
  return add(runs[3 * at + 1], mul(runs[3 * at + 2], (int32_t)(block - runs[3 * at])));
}}
alignas(64) static const int32_t bytes[256] = {{{listed(range(256))}}}; // to have one in all lanes from memory
template <typename T> static inline void narrow(const int32_t* __restrict x, T* __restrict y, int n) {{ // 16 bits
  SIMD for (int i = 0; i < n; i++) y[i] = (T)x[i];
}}
static inline uint16_t nearest(float x) {{
  uint32_t y = (uint32_t)bits(x);
  uint16_t z = (uint16_t)((y + 0x7fff + ((y >> 16) & 1)) >> 16);
  return (y & 0x7fffffff) > 0x7f800000 ? (uint16_t)0x7fc0 : z;
}}
"""

_AVX512 = f"""
#if LANES == 16
alignas(64) static const uint16_t into_upper[32] = {{{listed(i // 2 for i in range(32))}}};
alignas(64) static const uint16_t of_upper[32] = {{{listed(2 * i + 1 for i in range(32))}}};
#define HALF(x) _mm_loadu_si128((const __m128i*)(x))
#define WHOLE(x) _mm256_loadu_si256((const __m256i*)(x))
static inline I wide(const int8_t* x) {{ return (I)_mm512_cvtepi8_epi32(HALF(x)); }}
static inline I wide(const uint8_t* x) {{ return (I)_mm512_cvtepu8_epi32(HALF(x)); }}
static inline I wide(const int16_t* x) {{ return (I)_mm512_cvtepi16_epi32(WHOLE(x)); }}
static inline F wide(const uint16_t* x) {{ // bfloat16 as the upper halves of words
  const __m512i halves = _mm512_castsi256_si512(WHOLE(x)), into = _mm512_load_si512(into_upper);
  return (F)_mm512_maskz_permutexvar_epi16(0xaaaaaaaa, into, halves);
}}
static inline I least(I x, I y) {{ return (I)_mm512_min_epi32((__m512i)x, (__m512i)y); }}
static inline I most(I x, I y) {{ return (I)_mm512_max_epi32((__m512i)x, (__m512i)y); }}
static inline F root(F x) {{ return (F)_mm512_sqrt_ps((__m512)x); }}
static inline F times_plus(F x, F y, F z) {{ return (F)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)z); }}
static inline void upper(const float* x, uint16_t* y) {{
  const __m512i of = _mm512_load_si512(of_upper);
  _Pragma("GCC unroll 16") for (int i = 0; i < N; i += 32)
    _mm512_storeu_si512(y + i, _mm512_permutex2var_epi16(_mm512_load_si512(x + i), of, _mm512_load_si512(x + i + 16)));
}}
static inline void nearest(const float* __restrict x, uint16_t* __restrict y) {{
  SIMD for (int i = 0; i < N; i++) y[i] = nearest(x[i]);
}}
static inline void levels(const uint8_t* x, float* y, const float* table) {{ // two codes of 4 bits a byte
  const __m512 of = _mm512_loadu_ps(table);
  _Pragma("GCC unroll 16") for (int i = 0; i < N / 2; i += 16) {{
    const __m512i codes = _mm512_cvtepu8_epi32(HALF(x + i));
    _mm512_store_ps(y + 2 * i, _mm512_permutexvar_ps(codes, of));
    _mm512_store_ps(y + 2 * i + 16, _mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4), of));
  }}
}}
static inline void largest(const int32_t* x, int32_t* y) {{ // of four vectors at once, whose lanes take turns
  const __m512i a = _mm512_load_si512(x), b = _mm512_load_si512(x + 16);
  const __m512i c = _mm512_load_si512(x + 32), d = _mm512_load_si512(x + 48);
  const __m512i ab = _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  const __m512i cd = _mm512_max_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
  const __m512i all = _mm512_max_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m256i half = _mm256_max_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
  _mm_store_si128((__m128i*)y, _mm_max_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1)));
}}
"""

_AVX2 = """
#elif LANES == 8
#define QUARTER(x) _mm_loadl_epi64((const __m128i*)(x))
#define HALF(x) _mm_loadu_si128((const __m128i*)(x))
#define WHOLE(x) _mm256_load_si256((const __m256i*)(x))
#define LAID(y, x) _mm256_storeu_si256((__m256i*)(y), x)
static inline I wide(const int8_t* x) { return (I)_mm256_cvtepi8_epi32(QUARTER(x)); }
static inline I wide(const uint8_t* x) { return (I)_mm256_cvtepu8_epi32(QUARTER(x)); }
static inline I wide(const int16_t* x) { return (I)_mm256_cvtepi16_epi32(HALF(x)); }
static inline F wide(const uint16_t* x) { // bfloat16 as the upper halves of words
  const __m256i into = _mm256_setr_epi32(0x0100ffff, 0x0302ffff, 0x0504ffff, 0x0706ffff,
                                         0x0908ffff, 0x0b0affff, 0x0d0cffff, 0x0f0effff);
  return (F)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(HALF(x)), into);
}
static inline I least(I x, I y) { return (I)_mm256_min_epi32((__m256i)x, (__m256i)y); }
static inline I most(I x, I y) { return (I)_mm256_max_epi32((__m256i)x, (__m256i)y); }
static inline F root(F x) { return (F)_mm256_sqrt_ps((__m256)x); }
static inline F times_plus(F x, F y, F z) { return (F)_mm256_fmadd_ps((__m256)x, (__m256)y, (__m256)z); }
static inline void halves(uint16_t* y, __m256i a, __m256i b) { // of 16 words, whose upper halves are 0
  LAID(y, _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0xd8));
}
static inline void upper(const float* x, uint16_t* y) {
  _Pragma("GCC unroll 16") for (int i = 0; i < N; i += 16)
    halves(y + i, _mm256_srli_epi32(WHOLE(x + i), 16), _mm256_srli_epi32(WHOLE(x + i + 8), 16));
}
static inline __m256i rounded(__m256i x) {
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
  const __m256i y = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i size = _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff));
  const __m256i nan = _mm256_cmpgt_epi32(size, _mm256_set1_epi32(0x7f800000));
  return _mm256_srli_epi32(_mm256_blendv_epi8(y, _mm256_set1_epi32(0x7fc00000), nan), 16);
}
static inline void nearest(const float* x, uint16_t* y) {
  _Pragma("GCC unroll 16") for (int i = 0; i < N; i += 16)
    halves(y + i, rounded(WHOLE(x + i)), rounded(WHOLE(x + i + 8)));
}
static inline void narrow(const int32_t* x, int16_t* y, int n) {
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 16)
    LAID(y + i, _mm256_permute4x64_epi64(_mm256_packs_epi32(WHOLE(x + i), WHOLE(x + i + 8)), 0xd8));
}
static inline void narrow(const int32_t* x, uint8_t* y, int n) {
  const __m256i low = _mm256_set1_epi16(255), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  if (n % 32) { for (int i = 0; i < n; i++) y[i] = (uint8_t)x[i]; return; }
  _Pragma("GCC unroll 16") for (int i = 0; i < n; i += 32) {
    const __m256i a = _mm256_and_si256(_mm256_packs_epi32(WHOLE(x + i), WHOLE(x + i + 8)), low);
    const __m256i b = _mm256_and_si256(_mm256_packs_epi32(WHOLE(x + i + 16), WHOLE(x + i + 24)), low);
    LAID(y + i, _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), order));
  }
}
static inline void narrow(const int32_t* x, int8_t* y, int n) { narrow(x, (uint8_t*)y, n); }
static inline __m256 level(__m256i codes, __m256 low, __m256 high, int up) { // of the lowest 4 bits, at bit 32 - up
  const __m256 which = _mm256_castsi256_ps(_mm256_slli_epi32(codes, up)); // whose upper bit says from which half
  const __m256i at = up == 28 ? codes : _mm256_srli_epi32(codes, 28 - up);
  return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, at), _mm256_permutevar8x32_ps(high, at), which);
}
static inline void levels(const uint8_t* x, float* y, const float* table) { // two codes of 4 bits a byte
  const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  _Pragma("GCC unroll 16") for (int i = 0; i < N / 2; i += 16)
    _Pragma("GCC unroll 2") for (int j = 0; j < 16; j += 8) {
      const __m256i codes = _mm256_cvtepu8_epi32(QUARTER(x + i + j));
      _mm256_store_ps(y + 2 * i + j, level(codes, low, high, 28));
      _mm256_store_ps(y + 2 * i + 16 + j, level(codes, low, high, 24));
    }
}
static inline void largest(const int32_t* x, int32_t* y) { // of four vectors at once, whose lanes take turns
  const __m256i a = WHOLE(x), b = WHOLE(x + 8), c = WHOLE(x + 16), d = WHOLE(x + 24);
  const __m256i ab = _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  const __m256i cd = _mm256_max_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
  const __m256i all = _mm256_max_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
  _mm_store_si128((__m128i*)y, _mm_max_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
}
"""

_OTHERS = """
#else
#define EACH _Pragma("GCC unroll 4") for (int i = 0; i < LANES; i++)
template <typename T> static inline I wide(const T* x) { I y; EACH y[i] = x[i]; return y; }
static inline F wide(const uint16_t* x) { I y; EACH y[i] = left((int32_t)x[i], 16); return (F)y; }
static inline I least(I x, I y) { return x > y ? y : x; }
static inline I most(I x, I y) { return x < y ? y : x; }
static inline F root(F x) { EACH x[i] = sqrtf(x[i]); return x; }
static inline F times_plus(F x, F y, F z) { EACH z[i] = __builtin_fmaf(x[i], y[i], z[i]); return z; }
static inline void upper(const float* __restrict x, uint16_t* __restrict y) {
  SIMD for (int i = 0; i < N; i++) y[i] = (uint16_t)shift(bits(x[i]), 16);
}
static inline void nearest(const float* __restrict x, uint16_t* __restrict y) {
  SIMD for (int i = 0; i < N; i++) y[i] = nearest(x[i]);
}
static inline void levels(const uint8_t* __restrict x, float* __restrict y, const float* table) {
  for (int i = 0; i < N / 2; i += 16) {
    for (int j = 0; j < 16; j++) {
      y[2 * i + j] = table[x[i + j] & 15];
      y[2 * i + 16 + j] = table[x[i + j] >> 4];
    }
  }
}
static inline void largest(const int32_t* __restrict x, int32_t* __restrict y) {
  for (int k = 0; k < 4; k++) {
    y[k] = x[k * LANES];
    for (int i = 1; i < LANES; i++) y[k] = most(y[k], x[k * LANES + i]);
  }
}
#endif
"""

HEAD = _ANY + _AVX512 + _AVX2 + _OTHERS
