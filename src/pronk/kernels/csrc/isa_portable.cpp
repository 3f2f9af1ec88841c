// Kernels for any processor: plain loops over 16 lanes, which the compiler vectorizes. x86 uses these without AVX2; on
// Arm, only GEMM with quantized weights has other kernels (isa_dot.cpp, isa_i8mm.cpp). Registers of NEON and SSE2 have 4 floats, so a vector of 16 floats takes 4 registers.
#include "common.h"
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened

// Accumulators of a GEMM tile: rows times blocks of 16 outputs.
#if defined(__aarch64__)
constexpr int TILE_ACCUMULATORS = 6;  // 6 x 4 = 24 of 32 registers
#else
constexpr int TILE_ACCUMULATORS = 3;  // 3 x 4 = 12 of 16 registers (SSE2)
#endif
constexpr int TILE_M = LIMIT_TILE_ROWS(TILE_ACCUMULATORS);  // maximum rows of a GEMM tile, by one block
// Maximum queries of an attention tile, by one panel of 16 keys.
constexpr int QUERY_TILE = LIMIT_TILE_ROWS(TILE_ACCUMULATORS);

// Maximum rows, and rows times blocks, of a GEMM tile with quantized weights: as for other weights.
constexpr int QUANT_TILE_M = TILE_M;
constexpr int QUANT_ACCUMULATORS = TILE_M;

#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_portable = make_quant_kernels();
const Sampling sampling_portable = SAMPLING;
const IsaKernels kernels_portable = {execute, &quant_portable, round_row, &sampling_portable, BF16_ACTIVATIONS};
}  // namespace pronk
