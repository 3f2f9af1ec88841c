// AVX512-BF16, AMX and AVX-VNNI instructions as plain loops, to test the code around them on processors that lack them
// (`python build.py OUT -DPRONK_EMULATE`); slow. Integer sums equal those of the instructions, bf16 sums are close to
// theirs. In every instruction a row of the result does not depend on the other rows of its tile.
#pragma once
#include <immintrin.h>
#include <stdlib.h>
#include <string.h>

#include <atomic>

#include "scalar.h"

#if !defined(__AVX512F__)
namespace emulate {
// vpdpbusd: sum[i] += a[4 i + j] * b[4 i + j] for j = 0 to 3; codes of `a` are unsigned, those of `b` signed.
static inline __m256i dot_codes(__m256i sum, __m256i a, __m256i b) {
  // Not a loop, in which the compiler may find the instruction.
  __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                   _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sum, _mm256_add_epi32(even, odd));
}
}  // namespace emulate

#undef _mm256_dpbusd_avx_epi32
#define _mm256_dpbusd_avx_epi32 emulate::dot_codes
#else
namespace emulate {
// vdpbf16ps: sum[i] += a[2i + 1] * b[2i + 1], then sum[i] += a[2i] * b[2i], the odd element first as in the processor.
static inline __m512 dot(__m512 sum, __m512bh a, __m512bh b) {
  float s[16];
  uint16_t x[32], y[32];
  memcpy(s, &sum, 64);
  memcpy(x, &a, 64);
  memcpy(y, &b, 64);
  for (int i = 0; i < 16; i++)
    for (int odd = 1; odd >= 0; odd--)
      s[i] = __builtin_fmaf(bf16_to_float(x[2 * i + odd]), bf16_to_float(y[2 * i + odd]), s[i]);
  memcpy(&sum, s, 64);
  return sum;
}
}  // namespace emulate

#undef _mm512_dpbf16_ps
#define _mm512_dpbf16_ps emulate::dot
#endif

// Number of tdpbsud and tdpbssd instructions so far: tests read the symbol to prove that a GEMM uses tiles.
inline __attribute__((visibility("default"))) std::atomic<int64_t> pronk_emulated_products{0};

namespace emulate {
// The eight tile registers and their configuration, the operand of LDTILECFG: byte 0 is the palette, bytes 16-31 are
// each tile's bytes per row (uint16, low byte first), bytes 48-55 each tile's number of rows.
struct Tiles {
  uint8_t config[64];
  uint8_t data[8][16][64];  // [tile][row][byte]
  int rows(int t) const { return config[48 + t]; }
  int row_bytes(int t) const { return config[16 + 2 * t] | config[17 + 2 * t] << 8; }
};
static thread_local Tiles tiles;

// Load a configuration, or abort if it is invalid (a processor would raise an exception). Palette 1 is the only valid
// one.
static inline void load_config(const void* config) {
  memcpy(tiles.config, config, 64);
  memset(tiles.data, 0, sizeof tiles.data);
  if (tiles.config[0] != 1) abort();
  for (int t = 0; t < 8; t++)
    if (tiles.rows(t) < 1 || tiles.rows(t) > 16 || tiles.row_bytes(t) > 64) abort();
}
static inline void release() { memset(&tiles, 0, sizeof tiles); }
static inline void zero(int t) { memset(tiles.data[t], 0, sizeof tiles.data[t]); }
static inline void load(int t, const void* base, int64_t stride) {
  zero(t);
  for (int r = 0; r < tiles.rows(t); r++)
    memcpy(tiles.data[t][r], (const char*)base + r * stride, (size_t)tiles.row_bytes(t));
}
static inline void store(int t, void* base, int64_t stride) {
  for (int r = 0; r < tiles.rows(t); r++)
    memcpy((char*)base + r * stride, tiles.data[t][r], (size_t)tiles.row_bytes(t));
}
// Abort unless the tiles' shapes fit sum [M][N] += a [M][K] * b [K][N], where N and K count units of 4 bytes.
static inline void check_shapes(int sum, int a, int b) {
  if (tiles.rows(sum) != tiles.rows(a) || tiles.row_bytes(a) / 4 != tiles.rows(b)) abort();
  if (tiles.row_bytes(sum) != tiles.row_bytes(b)) abort();
}

// tdpbf16ps: a unit of 4 bytes is a pair of bf16; the even element is added first.
static inline void multiply(int sum, int a, int b) {
  check_shapes(sum, a, b);
  for (int m = 0; m < tiles.rows(a); m++)
    for (int k = 0; k < tiles.rows(b); k++)
      for (int n = 0; n < tiles.row_bytes(b) / 4; n++) {
        uint16_t x[2], y[2];
        float s;
        memcpy(x, tiles.data[a][m] + 4 * k, 4);
        memcpy(y, tiles.data[b][k] + 4 * n, 4);
        memcpy(&s, tiles.data[sum][m] + 4 * n, 4);
        s = __builtin_fmaf(bf16_to_float(x[0]), bf16_to_float(y[0]), s);
        s = __builtin_fmaf(bf16_to_float(x[1]), bf16_to_float(y[1]), s);
        memcpy(tiles.data[sum][m] + 4 * n, &s, 4);
      }
}

// tdpbsud and tdpbssd: a unit of 4 bytes is four codes, signed in `a`; Code is the type of those in `b`.
template <class Code>
static inline void multiply_codes(int sum, int a, int b) {
  check_shapes(sum, a, b);
  pronk_emulated_products.fetch_add(1, std::memory_order_relaxed);
  for (int m = 0; m < tiles.rows(a); m++) {
    int32_t total[16];
    memcpy(total, tiles.data[sum][m], 64);
    for (int k = 0; k < tiles.rows(b); k++) {
      const int8_t* x = (const int8_t*)tiles.data[a][m] + 4 * k;
      const Code* w = (const Code*)tiles.data[b][k];
      for (int n = 0; n < tiles.row_bytes(b) / 4; n++)
        for (int j = 0; j < 4; j++) total[n] += x[j] * w[4 * n + j];
    }
    memcpy(tiles.data[sum][m], total, 64);
  }
}
}  // namespace emulate

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbsud
#undef _tile_dpbssd
#define _tile_loadconfig emulate::load_config
#define _tile_release emulate::release
#define _tile_zero emulate::zero
#define _tile_loadd emulate::load
#define _tile_stored emulate::store
#define _tile_dpbf16ps emulate::multiply
#define _tile_dpbsud emulate::multiply_codes<uint8_t>
#define _tile_dpbssd emulate::multiply_codes<int8_t>
