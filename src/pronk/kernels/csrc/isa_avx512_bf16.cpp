// AVX-512 with the bf16 dot product (vdpbf16ps).
#include <immintrin.h>
#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif
#define PRONK_SIMD_AVX512
#define PRONK_DOT_BF16
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = true;  // bf16 GEMM takes bf16 input
// As in isa_avx512.cpp, whose tiles serve float32 and float16 weights.
constexpr int TILE_M = FEW_TILES(12);
constexpr int TILE_ACCUMULATORS = 24;
constexpr int QUERY_TILE = FEW_TILES(12);
// The tiles of isa_vnni.cpp or isa_avx512.cpp serve q8 and q4 weights. 1: compile as few unused tiles as possible.
constexpr int QUANT_TILE_M = 1;
constexpr int QUANT_ACCUMULATORS = 1;
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_avx512_bf16 = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
