// AVX-512 F, BW, DQ, VL: 32 registers of 16 floats; bf16 weights are widened.
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "common.h"
#include "team.h"

#define PRONK_SIMD_AVX512

namespace pronk {
namespace {
const bool NARROW = false;
constexpr int CODED_ROWS = 4, CODED_SUMS = 8;
constexpr int TILE_ROWS = FEW_TILES(12), TILE_SUMS = 24, QUERIES = FEW_TILES(12);
#include "kernels.inc"
#include "choose.inc"
#include "round.inc"
}  // namespace
const Tiles tiles_avx512[3] = {TILES[0], TILES[1], TILES[2]};
const Coded coded_avx512 = make_coded();
const RoundFunction round_avx512 = round_row;
const Choices choices_avx512 = {choose, guess};
const Table table_avx512 = {execute, &coded_avx512, round_row, &choices_avx512, NARROW};
}  // namespace pronk
