// AVX2, FMA and F16C: 16 registers of 8 floats.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "common.h"
#include "team.h"

#define PRONK_SIMD_AVX2

namespace pronk {
namespace {
const bool NARROW = false;
constexpr int CODED_ROWS = 3, CODED_SUMS = 3;
constexpr int TILE_ROWS = FEW_TILES(6), TILE_SUMS = 6, QUERIES = FEW_TILES(6);
#include "kernels.inc"
#include "choose.inc"
#include "round.inc"
}  // namespace
static const Coded coded_avx2 = make_coded();
const Choices choices_avx2 = {choose, guess};
const Table table_avx2 = {execute, &coded_avx2, round_row, &choices_avx2, NARROW};
}  // namespace pronk
