// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened

// Accumulators of a GEMM tile: rows times blocks of 16 outputs, such as 6 x 4. 24 accumulators, up to 4 weight vectors
// and 1 input take 29 of 32 registers.
constexpr int TILE_ACCUMULATORS = 24;
constexpr int TILE_M = LIMIT_TILE_ROWS(12);      // maximum rows of a GEMM tile: 12 rows x 2 blocks; 13 rows x 1
constexpr int QUERY_TILE = LIMIT_TILE_ROWS(12);  // maximum queries of an attention tile: 12 x 2 panels of 16 keys

// Maximum rows, and rows times blocks (4 x 2 or 2 x 4), of a GEMM tile with q8 or q4 weights. Without VNNI a product of
// codes takes 3 (q4) to 9 (q8) instructions, so larger tiles, which load codes less often, would save little.
constexpr int QUANT_TILE_M = 4;
constexpr int QUANT_ACCUMULATORS = 8;

#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
const GemmTiles gemm_tiles_avx512[3] = {GEMM_TILES[0], GEMM_TILES[1], GEMM_TILES[2]};
const QuantKernels quant_avx512 = make_quant_kernels();
const RoundFunction round_avx512 = round_row;
const Sampling sampling_avx512 = {sample, sample_draft};
const IsaKernels kernels_avx512 = {execute, &quant_avx512, round_row, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
