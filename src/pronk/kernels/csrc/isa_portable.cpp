// Kernels for any processor: plain loops over 16 lanes, which the compiler vectorizes. Arm has no other kernels; on x86
// they are the fallback. Registers of NEON and SSE2 have 4 floats, so 16 floats are 4 registers.
#include "common.h"
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // bf16 weights are widened to float32
#if defined(__aarch64__)
constexpr int TILE_ACCUMULATORS = 6;   // rows times blocks of 16 outputs of a GEMM tile: 24 of 32 registers
#else
constexpr int TILE_ACCUMULATORS = 3;   // 12 of 16 registers (SSE2)
#endif
constexpr int TILE_M = FEW_TILES(TILE_ACCUMULATORS);      // rows of a GEMM tile, of one block
constexpr int QUERY_TILE = FEW_TILES(TILE_ACCUMULATORS);  // queries of an attention tile, of one panel of 16 keys
// The sums of a GEMM tile with q8 or q4 weights are int32: 3 vectors take 12 registers.
constexpr int QUANT_TILE_M = 3;        // rows of such a tile
constexpr int QUANT_ACCUMULATORS = 3;  // rows times blocks of such a tile
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_portable = make_quant_kernels();
const Sampling sampling_portable = {sample, sample_draft};
const IsaKernels kernels_portable = {execute, &quant_portable, round_row, &sampling_portable, BF16_ACTIVATIONS};
}  // namespace pronk
