// AVX-512 with the 8-bit dot product (VNNI), for GEMM with weights of 8 and 4 bits only. Its results have the same
// bits as those of all other instruction sets.
#include <immintrin.h>

#include "common.h"

#define PRONK_SIMD_AVX512

namespace pronk {
namespace {
constexpr int QUANT_TILE_M = FEW_TILES(12), QUANT_ACCUMULATORS = 24;
#include "simd.h"

#include "quantized.inc"
}  // namespace
const QuantKernels quant_vnni = make_quant_kernels();
}  // namespace pronk
