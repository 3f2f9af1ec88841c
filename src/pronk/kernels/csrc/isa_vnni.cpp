// AVX-512 with the 8-bit dot product (VNNI), for GEMM with weights of 8 and 4 bits only. Its results have the same
// bits as those of all other instruction sets.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
// 24 sums, the codes of 2 blocks and 8 k (q4) and 1 input take 24 + 4 + 1 = 29 of 32 registers.
constexpr int QUANT_TILE_M = FEW_TILES(12);  // rows of a GEMM tile with q8 or q4 weights: 12 x 2 sums
constexpr int QUANT_ACCUMULATORS = 24;       // rows times blocks of 16 outputs of such a tile
#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_vnni = make_quant_kernels();
}  // namespace pronk
