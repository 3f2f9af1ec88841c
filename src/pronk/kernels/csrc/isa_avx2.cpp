// AVX2, FMA and F16C: 16 registers of 8 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX2
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // bf16 weights are widened to float32
// 16 floats are 2 registers. 6 accumulators, 1 weight vector and 1 input take 12 + 2 + 1 = 15 of 16 registers.
constexpr int TILE_ACCUMULATORS = 6;      // rows times blocks of 16 outputs of a GEMM tile
constexpr int TILE_M = FEW_TILES(6);      // rows of a GEMM tile: 6 x 1 accumulators
constexpr int QUERY_TILE = FEW_TILES(6);  // queries of an attention tile: 6 queries x 1 panel of 16 keys
// 3 sums, the codes of 8 k (q4), 1 input and a constant take 6 + 4 + 1 + 1 = 12 registers; the others are temporary.
constexpr int QUANT_TILE_M = 3;           // rows of a GEMM tile with q8 or q4 weights
constexpr int QUANT_ACCUMULATORS = 3;     // rows times blocks of such a tile
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_avx2 = make_quant_kernels();
const Sampling sampling_avx2 = {sample, sample_draft};
const IsaKernels kernels_avx2 = {execute, &quant_avx2, round_row, &sampling_avx2, BF16_ACTIVATIONS};
}  // namespace pronk
