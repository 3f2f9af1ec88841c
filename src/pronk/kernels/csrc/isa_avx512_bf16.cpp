// AVX-512 with the bf16 dot product.
#include <immintrin.h>
#include <string.h>

#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif
#include "team.h"

#define PRONK_SIMD_AVX512
#define PRONK_DOT_BF16
namespace pronk {
namespace {
const bool NARROW = true;
constexpr int CODED_ROWS = 1, CODED_SUMS = 1;
constexpr int TILE_ROWS = FEW_TILES(12), TILE_SUMS = 24, QUERIES = FEW_TILES(12);
#include "kernels.inc"
}  // namespace
const Table table_avx512_bf16 = {execute, &coded_avx512, nullptr, &choices_avx512, NARROW};
}  // namespace pronk
