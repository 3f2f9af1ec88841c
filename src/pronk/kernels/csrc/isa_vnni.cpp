// AVX-512 with the 8-bit dot product (VNNI), for GEMM with weights of 8 and 4 bits only. The results are bit-identical
// on all instruction sets.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
// Maximum rows, and rows times blocks of 16 outputs (such as 12 x 2), of a GEMM tile with q8 or q4 weights. 24 sums,
// the codes of 2 blocks for 8 k (q4) and 1 input take 24 + 4 + 1 = 29 of 32 registers.
constexpr int QUANT_TILE_M = LIMIT_TILE_ROWS(12);
constexpr int QUANT_ACCUMULATORS = 24;

#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_vnni = make_quant_kernels();
}  // namespace pronk
