// AMX tiles for every bf16 GEMM, even of one row, and for 8- and 4-bit GEMM of more rows; AVX-512 for everything else.
#include <immintrin.h>

#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif

#define PRONK_SIMD_AVX512
#define PRONK_DOT_BF16
#define PRONK_TILES_AMX
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = true;
constexpr int QUANT_TILE_M = 1, QUANT_ACCUMULATORS = 1;
constexpr int TILE_M = FEW_TILES(12), TILE_ACCUMULATORS = 24, QUERY_TILE = FEW_TILES(12);
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_amx = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
