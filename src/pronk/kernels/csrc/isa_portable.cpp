// Portable C++: the only instruction set on Arm, and the fallback on x86.

#include "common.h"

namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;
constexpr int QUANT_TILE_M = 3, QUANT_ACCUMULATORS = 3;
#if defined(__aarch64__)
constexpr int TILE_M = FEW_TILES(6), TILE_ACCUMULATORS = 6, QUERY_TILE = FEW_TILES(6);
#else
constexpr int TILE_M = FEW_TILES(3), TILE_ACCUMULATORS = 3, QUERY_TILE = 3;
#endif
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_portable = make_quant_kernels();
const Sampling sampling_portable = {sample, sample_draft};
const IsaKernels kernels_portable = {execute, &quant_portable, round_row, &sampling_portable, BF16_ACTIVATIONS};
}  // namespace pronk
