// What any compiler can build: the only set on Arm, and the last resort on x86.
#include <math.h>
#include <string.h>

#include "common.h"
#include "team.h"

namespace pronk {
namespace {
const bool NARROW = false;
constexpr int CODED_ROWS = 3, CODED_SUMS = 3;
#if defined(__aarch64__)
constexpr int TILE_ROWS = FEW_TILES(6), TILE_SUMS = 6, QUERIES = FEW_TILES(6);
#else
constexpr int TILE_ROWS = FEW_TILES(3), TILE_SUMS = 3, QUERIES = 3;
#endif
#include "kernels.inc"
#include "choose.inc"
#include "round.inc"
}  // namespace
static const Coded coded_portable = make_coded();
const Choices choices_portable = {choose, guess};
const Table table_portable = {execute, &coded_portable, round_row, &choices_portable, NARROW};
}  // namespace pronk
