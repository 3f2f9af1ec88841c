// AVX2 with the 8-bit dot product (AVX-VNNI), for GEMM with quantized weights only: processors without AVX-512, such as
// Intel's Alder Lake and later ones. The results are bit-identical on all instruction sets.
#include <immintrin.h>
#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#define PRONK_TILES_INT8
#endif
#define PRONK_SIMD_AVX2
#define PRONK_AVX_VNNI
namespace pronk {
namespace {
#include "tiles_avx2.inc"
#if defined(PRONK_EMULATE)
// All kernels of AVX2, with emulated AMX tiles for quantized weights: `amx` on a processor without AVX-512.
const bool BF16_ACTIVATIONS = false;
#include "kernels.inc"
#include "sample.inc"
#include "round.inc"
#else
#include "simd.h"
#include "quantized.inc"
#endif
}  // namespace
const QuantKernels quant_avx_vnni = make_quant_kernels();
#if defined(PRONK_EMULATE)
const IsaKernels kernels_emulated_amx = {execute, &quant_avx_vnni, round_row, &SAMPLING, BF16_ACTIVATIONS};
#endif
}  // namespace pronk
