// AVX2, FMA and F16C: 16 registers of 8 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX2
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened

// Accumulators of a GEMM tile: rows times blocks of 16 outputs. An accumulator or a weight vector has 16 floats, that
// is 2 registers. 6 accumulators, 1 weight vector and 1 input take 12 + 2 + 1 = 15 of 16 registers.
constexpr int TILE_ACCUMULATORS = 6;
constexpr int TILE_M = LIMIT_TILE_ROWS(6);      // maximum rows of a GEMM tile: 6 rows x 1 block
constexpr int QUERY_TILE = LIMIT_TILE_ROWS(6);  // maximum queries of an attention tile: 6 x 1 panel of 16 keys

// Maximum rows of a GEMM tile with quantized weights. The sums of 6 rows, the codes of a step, an input and a product
// take 12 + 2 + 1 + 1 = 16 registers. QUANT_ACCUMULATORS = 1: tiles of any number of rows have one block.
constexpr int QUANT_TILE_M = LIMIT_TILE_ROWS(6);
constexpr int QUANT_ACCUMULATORS = 1;

#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_avx2 = make_quant_kernels();
const Sampling sampling_avx2 = {sample, sample_draft};
const IsaKernels kernels_avx2 = {execute, &quant_avx2, round_row, &sampling_avx2, BF16_ACTIVATIONS};
}  // namespace pronk
