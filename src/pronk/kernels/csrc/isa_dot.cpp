// Arm with the 8-bit dot product (Armv8.2), for GEMM with quantized weights only. The results are bit-identical on all
// instruction sets.
#include <arm_neon.h>
#include "common.h"
#define PRONK_SIMD_NEON
namespace pronk {
namespace {
// Maximum rows, and rows times blocks of 16 outputs, of a GEMM tile with quantized weights. 6 sums, the codes of a step
// and 1 input take 24 + 4 + 1 of 32 registers.
constexpr int QUANT_TILE_M = LIMIT_QUANT_ROWS(6);
constexpr int QUANT_ACCUMULATORS = 1;

#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_dot = make_quant_kernels();
}  // namespace pronk
