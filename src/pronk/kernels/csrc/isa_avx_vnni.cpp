// AVX2 with the 8-bit dot product (AVX-VNNI), for GEMM with quantized weights only: processors without AVX-512, such as
// Intel's Alder Lake and later ones. The results are bit-identical on all instruction sets.
#include <immintrin.h>
#include "common.h"
#if defined(PRONK_EMULATE)
#include "emulate.h"
#endif
#define PRONK_SIMD_AVX2
#define PRONK_AVX_VNNI
namespace pronk {
namespace {
// Maximum rows of a GEMM tile with quantized weights: as in isa_avx2.cpp.
constexpr int QUANT_TILE_M = LIMIT_TILE_ROWS(6);
constexpr int QUANT_ACCUMULATORS = 1;

#include "simd.h"
#include "quantized.inc"
}  // namespace
const QuantKernels quant_avx_vnni = make_quant_kernels();
}  // namespace pronk
