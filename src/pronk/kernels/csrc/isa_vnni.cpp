// AVX-512 with the 8-bit dot product, for weights of 8 and 4 bits alone: it has the same bits as every other set.
#include <immintrin.h>
#include <string.h>

#include "common.h"

#define PRONK_SIMD_AVX512

namespace pronk {
namespace {
constexpr int CODED_ROWS = FEW_TILES(12), CODED_SUMS = 24;
#include "simd.h"

#include "quantized.inc"
}  // namespace
const Coded coded_vnni = make_coded();
}  // namespace pronk
