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
const bool BF16_ACTIVATIONS = true;  // GEMM with bf16 weights takes bf16 input

// TILE_M must be that of isa_avx512.cpp, whose GEMM tiles are used for float32 and float16 weights. isa_avx512.cpp
// explains all three constants.
constexpr int TILE_M = LIMIT_TILE_ROWS(12);
constexpr int TILE_ACCUMULATORS = 24;
constexpr int QUERY_TILE = LIMIT_TILE_ROWS(12);

// q8 and q4 weights use the tiles of isa_vnni.cpp or isa_avx512.cpp (quant_kernels in dispatch.cpp). The tiles of
// this file are compiled, too, but unused: 1 keeps their number small.
constexpr int QUANT_TILE_M = 1;
constexpr int QUANT_ACCUMULATORS = 1;
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_avx512_bf16 = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
