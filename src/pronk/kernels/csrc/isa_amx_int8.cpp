// `amx` with portable bits: AMX tiles for GEMM with quantized weights (gemm_amx.inc), whose integer sums are exact.
// AVX-512 computes everything else, bf16 GEMM included.
#include <immintrin.h>
#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif
#define PRONK_SIMD_AVX512
#define PRONK_TILES_INT8
#define PRONK_SHARED_TILES
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened
#include "tiles_avx512.inc"
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_amx_int8 = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
