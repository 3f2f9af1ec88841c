// `avx512_bf16` with fast bits: AVX-512 with the bf16 dot product (vdpbf16ps).
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
#include "tiles_avx512.inc"
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_avx512_bf16 = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
