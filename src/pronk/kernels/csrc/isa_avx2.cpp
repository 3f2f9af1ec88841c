// AVX2, FMA and F16C: 16 registers of 8 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX2
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened
#include "tiles_avx2.inc"
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
static const QuantKernels quant_avx2 = make_quant_kernels();
const Sampling sampling_avx2 = SAMPLING;
const IsaKernels kernels_avx2 = {execute, &quant_avx2, round_row, &sampling_avx2, BF16_ACTIVATIONS};
}  // namespace pronk
