// `amx` with fast bits: AMX tiles for every bf16 GEMM, even for one row, since a row's bits may not depend on the number
// of rows. GEMM with
// quantized weights uses AMX from amx_min_rows on (gemm_amx.inc), and VNNI below. AVX-512 computes everything else.
#include <immintrin.h>
#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif
#define PRONK_SIMD_AVX512
#define PRONK_DOT_BF16
#define PRONK_TILES_BF16
#define PRONK_TILES_INT8
#define PRONK_SHARED_TILES
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = true;  // GEMM with bf16 weights takes bf16 input
#include "tiles_avx512.inc"
#include "kernels.inc"
}  // namespace
const IsaKernels kernels_amx = {execute, &quant_avx512, nullptr, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
