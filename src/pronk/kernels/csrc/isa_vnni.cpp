// AVX-512 with the 8-bit dot product (VNNI), for GEMM with quantized weights only. The results are bit-identical
// on all instruction sets.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
// Maximum rows, and rows times blocks of 16 outputs (such as 12 x 2), of a GEMM tile with quantized weights. 24 sums,
// the codes of a step of 2 blocks and 1 input take 24 + 2 + 1 = 27 of 32 registers.
constexpr int QUANT_TILE_M = LIMIT_QUANT_ROWS(12);
constexpr int QUANT_ACCUMULATORS = 24;

#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_vnni = make_quant_kernels();
}  // namespace pronk
