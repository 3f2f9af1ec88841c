// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats.
#include <immintrin.h>
#include "common.h"
#define PRONK_SIMD_AVX512
namespace pronk {
namespace {
const bool BF16_ACTIVATIONS = false;  // GEMM takes float32 input; bf16 weights are widened
#include "tiles_avx512.inc"
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
}  // namespace
const GemmTiles gemm_tiles_avx512[3] = {GEMM_TILES[0], GEMM_TILES[1], GEMM_TILES[2]};
const QuantKernels quant_avx512 = make_quant_kernels();
const RoundFunction round_avx512 = round_row;
const Sampling sampling_avx512 = SAMPLING;
const IsaKernels kernels_avx512 = {execute, &quant_avx512, round_row, &sampling_avx512, BF16_ACTIVATIONS};
}  // namespace pronk
