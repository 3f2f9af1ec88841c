// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // bf16 weights are widened to float32
// 24 accumulators, up to 4 weight vectors and 1 input take 29 of 32 registers.
constexpr int TILE_ACCUMULATORS = 24;      // rows times blocks of 16 outputs of a GEMM tile, such as 6 x 4
constexpr int TILE_M = FEW_TILES(12);      // rows of a GEMM tile: 12 x 2 accumulators; 13 rows would leave one block
constexpr int QUERY_TILE = FEW_TILES(12);  // queries of an attention tile: 12 queries x 2 panels of 16 keys
// Without VNNI a product of codes takes 3 (q4) to 9 (q8) instructions; loading codes costs little beside them.
constexpr int QUANT_TILE_M = 4;            // rows of a GEMM tile with q8 or q4 weights
constexpr int QUANT_ACCUMULATORS = 8;      // rows times blocks of such a tile: 4 x 2 or 2 x 4
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
