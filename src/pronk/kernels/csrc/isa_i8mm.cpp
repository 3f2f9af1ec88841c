// Arm with 8-bit matrix products (i8mm, Armv8.6), for GEMM with quantized weights only. The results are bit-identical
// on all instruction sets.
#include <arm_neon.h>
#include "common.h"
#define PRONK_SIMD_NEON
#define PRONK_NEON_I8MM
namespace pronk {
namespace {
// Maximum rows, and rows times blocks of 16 outputs, of a GEMM tile with quantized weights. 6 sums take 24 of
// 32 registers; the codes of two steps are loaded vector by vector.
constexpr int QUANT_TILE_M = LIMIT_QUANT_ROWS(6);
constexpr int QUANT_ACCUMULATORS = 1;

#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_i8mm = make_quant_kernels();
}  // namespace pronk
