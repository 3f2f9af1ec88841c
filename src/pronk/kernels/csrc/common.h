// Declarations shared by the instruction sets: constants, the state of one forward pass, the tables of kernels.
#pragma once
#include <math.h>
#include <string.h>

#include <atomic>

#include "pronk.h"
#include "exact_math.h"
#include "scalar.h"
#include "thread_pool.h"

// Maximum rows of a tile: `rows`. In builds with a sanitizer at most 3: more tile sizes would compile for minutes. Tiles
// with quantized weights then have 2, so that several of them share a row tile, as they do without VNNI.
#if defined(PRONK_FEW_TILES)
#define LIMIT_TILE_ROWS(rows) ((rows) < 3 ? (rows) : 3)
#define LIMIT_QUANT_ROWS(rows) ((rows) < 2 ? (rows) : 2)
#else
#define LIMIT_TILE_ROWS(rows) (rows)
#define LIMIT_QUANT_ROWS(rows) (rows)
#endif

namespace pronk {
// Positions per KV block, a step of the attention loop. KV blocks begin at multiples of KV_BLOCK in the text and are
// unrelated to the blocks of the cache.
const int KV_BLOCK = 64;
// Maximum of QUERY_TILE (queries of an attention tile) over all instruction sets.
const int MAX_QUERIES = 12;
// A chunk of a GEMM: CHUNK_M rows (rounded up to whole row tiles) by CHUNK_BLOCKS blocks of 16 outputs. The epilogue
// reads each chunk while its outputs are in the cache.
const int CHUNK_M = 512;
const int CHUNK_BLOCKS = 8;
// Maximum of TILE_M (rows of a GEMM tile) over all instruction sets. If a GEMM has at most this many rows, every thread
// prepares the whole input for itself, which is cheaper than a barrier.
const int MAX_TILE_M = 12;
// Maximum of pronk_op.experts.
const int MAX_EXPERTS = 1024;
const int MAX_TAPS = 16;  // of a short convolution
// Steps of a recurrence that are prepared together.
const int MAX_STEPS = 16;
// Maximum head_dim; a multiple of 16, because vectors have 16 lanes. 576 is DeepSeek's: a latent of 512, and 64 elements
// that RoPE rotates.
const int MAX_HEAD_DIM = 576;

static inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Elements between rows of activations: an odd multiple of 32, so that equal columns of adjacent rows are in different
// sets of the L1 cache. With a power of two they would compete for few sets.
static inline int64_t row_stride(int64_t width) { return ((width + 31) / 32 | 1) * 32; }

// One row: its position in the request's text, its cache slot, and the layout of its path in the cache.
struct Row {
  int32_t position, slot;
  int32_t contiguous;  // the row's path begins with tree nodes 0, 1, …, contiguous - 1, whose slots are in text order
  int32_t tail;        // the later nodes of the row's path are State.path[tail], State.path[tail + 1], …
  int32_t adapter;     // that of the row's segment
};

// The rows first_row <= r < first_row + rows of the forward pass, which belong to one request, and its steps in recurrent
// layers: State.step[first_step], …
struct Segment {
  const pronk_segment* given;  // the caller's description of the request
  int32_t first_row, rows;
  int32_t first_step, steps;
};

// One token in a recurrence: the state at level `from` is updated to that at level `to`. Level -1 is the state in its
// pool, level 0 the state after the certain tokens, in its pool, too, if the pass keeps it. The states of nodes of a tree
// are at levels from 1 on; they exist only while the steps are computed.
struct Step {
  int32_t row;     // row of the pass; -1: the token's update is replayed
  int32_t update;  // slot of the update; -1: none, because the token is certain
  int32_t from, to;  // `to` -1: no later step reads the new state
  int32_t copy;    // state slot to which the new state is copied; -1: none
};

// A row and one of its experts: `rank` counts the experts of the row, in their order, from 0.
struct Pair {
  int32_t row, rank;
  float share;  // factor of the expert's output
};

// The tokens of request `i` in the cache of an operation.
static inline const pronk_segment* cached_tokens(const pronk_pass* pass, const pronk_op* op, int64_t i) {
  return op->cache ? pass->others + (op->cache - 1) * pass->segments + i : pass->segment + i;
}

// Sizes of a recurrent layer, in elements. recurrence.inc explains the layouts.
struct RecurrentSizes {
  int64_t heads, key_heads, key_dim, value_dim, padded_dim;
  int64_t channels, row;                 // of a row of buffer B: the channels, and all of it
  int64_t keys, deltas, decays, update;  // first elements of the parts of an update; its size
  int64_t state;                         // size of one head's state

  explicit RecurrentSizes(const pronk_op* op) {
    heads = op->heads;
    key_heads = op->kv_heads;
    key_dim = op->head_dim;
    value_dim = op->value_dim;
    padded_dim = round_up(value_dim, 16);
    channels = 2 * key_heads * key_dim + heads * value_dim;
    row = channels + heads * value_dim;
    keys = channels;
    deltas = round_up(keys + key_heads * key_dim, 16);
    decays = deltas + heads * padded_dim;
    update = round_up(decays + heads, 16);
    state = key_dim * padded_dim;
  }
};

struct QuantKernels;

// One forward pass in progress.
struct State {
  const pronk_op* ops;
  int64_t count;
  const pronk_pass* pass;
  bool bf16;                   // buffers A, B and C hold bf16 instead of float32
  const QuantKernels* quant;   // GEMM tiles for quantized weights
  Row* row;
  Segment* segment;
  int32_t* path;               // for all rows: the tree nodes of the row's path after the contiguous ones, see Row.tail
  std::atomic<int32_t>* next;  // [count] per operation (attention only): number of work items that threads have taken
  void *a, *b, *c;             // buffers A, B and C [rows, row_stride(width)]
  float* inputs;               // buffer INPUTS [rows, inputs_width]: the inputs of all layers
  int64_t inputs_width;
  void* x;                     // prepared input of a GEMM of more than MAX_TILE_M rows, shared by all threads
  int64_t input_stride;        // row_stride(width) of the widest GEMM input
  int64_t input_bytes;         // size of Scratch.input
  float* scores;               // buffer SCORES [rows, experts]
  int32_t* choice;             // [rows, per_row] chosen experts of each row, in rising order
  float* share;                // [rows, per_row] their shares
  Pair* pair;                  // [rows * per_row] all pairs, in the order of the experts
  int32_t* first;              // [experts + 1] the pairs of expert e are first[e], …, first[e + 1] - 1
  float* sum;                  // [rows, row_stride(width)] unfinished sums over the experts of a row
  bool adapted;                // whether any row has an adapter
  float* low;                  // [rows, low_stride] products of rows with the matrices `down` of their adapters
  int64_t low_stride;
  Step* step;                  // steps of all segments
  int64_t levels;              // largest level of a step
  float* q;                    // queries [rows, heads, head_dim rounded up to 16]
  char* scratch;               // [threads, scratch_bytes] buffers that each thread uses alone
  int64_t scratch_bytes;
};

// Addresses that a GEMM tile prefetches, in bytes from the tile's first weight. Step i along K prefetches
// start + i * stride. Steps in the last `lead` inputs prefetch next_blocks + i * stride: weights of the next tile.
struct Prefetch {
  int64_t start, next_blocks, stride, lead;
};

// Compute a GEMM tile over k0 <= k < k1. `rows` is packed by pack_row_tile; the outputs are c [rows, ldc]. Each `part`
// inputs form a partial sum, which is added to `c` (the first replaces `c` unless `accumulate`). vdpbf16ps: no `part`.
typedef void (*GemmTileFunction)(const void* weights, int64_t block, const void* rows, float* c, int64_t ldc,
                                 int64_t k0, int64_t k1, int64_t part, bool accumulate, Prefetch prefetch);

// GEMM tiles of one weight type: by_rows[M][i] computes M rows by 2^i adjacent blocks of 16 outputs.
struct GemmTiles {
  GemmTileFunction by_rows[MAX_TILE_M + 1][3];
};

// Inputs of a super-block; bytes before the scales, and maximum of bytes before the codes, in one of 16 outputs.
const int SUPER_BLOCK = 256, SUPER_SCALES = 64, MAX_SUPER_HEADER = SUPER_SCALES + 256;
// Type k8: inputs of a group; bytes before the codes.
const int WIDE_GROUP = 16, WIDE_HEADER = SUPER_SCALES + SUPER_BLOCK / WIDE_GROUP * 64;

// A format with super-blocks. A weight is factor * scale * (code - zero), or factor * scale * code - minimum.
struct SuperFormat {
  int bits, group;    // bits of a code; inputs per scale
  int header;         // bytes before the codes in one of 16 outputs
  bool minima;        // whether groups have minima
  bool packed_scales; // whether scales have fewer than 8 bits in memory
  int zero_shift;     // without minima: logarithm to base 2 of the zero

  constexpr int pairs() const { return SUPER_BLOCK / group / 2; }  // pairs of groups
  // Inputs whose codes are together: a group, or a pair of groups.
  constexpr int chunk() const { return bits == 6 ? 16 : 32; }
};
constexpr SuperFormat super_format(int type) {
  switch (type) {
    case PRONK_K2: return {2, 16, SUPER_SCALES + 256, true, true, 0};
    case PRONK_K3: return {3, 16, SUPER_SCALES + 192, false, true, 2};
    case PRONK_K4: return {4, 32, SUPER_SCALES + 256, true, false, 0};
    case PRONK_K5: return {5, 32, SUPER_SCALES + 256, true, false, 0};
    case PRONK_K8: return {8, WIDE_GROUP, WIDE_HEADER, false, false, 7};
    case PRONK_IQ4: return {4, 32, SUPER_SCALES + 128, false, false, 7};
    default: return {6, 16, SUPER_SCALES + 256, false, false, 5};  // k6
  }
}

// The integers that the codes of iq4 stand for (kvalues_iq4nl of llama.cpp), plus 128; once for each 16 bytes of a vector.
#define PRONK_IQ4_VALUES 1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241
alignas(64) const uint8_t IQ4_VALUES[64] = {PRONK_IQ4_VALUES, PRONK_IQ4_VALUES, PRONK_IQ4_VALUES, PRONK_IQ4_VALUES};
#undef PRONK_IQ4_VALUES
// The numbers that the codes of an int4 cache stand for: those of GGUF's IQ4_NL, which are denser around 0, as the elements
// of rotated keys and values are.
#define PRONK_INT4_NUMBERS -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
alignas(16) const int8_t INT4_BYTES[16] = {PRONK_INT4_NUMBERS};
alignas(64) const float INT4_NUMBERS[16] = {PRONK_INT4_NUMBERS};
#undef PRONK_INT4_NUMBERS

// Operands of a GEMM tile with quantized weights; quantized.inc has the formulas. A *unit* is the inputs that share one
// scale of an input row: a group, or a super-block.
struct QuantTile {
  const uint8_t* weights;
  int64_t block, unit_bytes;  // bytes of a block of 16 outputs; bytes of one unit of a block
  int64_t group;              // inputs per group; formats with groups only
  int scale_type, minima;     // those of pronk_weights; formats with groups only
  int64_t prefetch;           // bytes from the first weight to the first prefetched address
  int64_t stride;             // bytes between prefetched addresses; 64 bytes of weights prefetch one address
  int64_t rows;               // rows of the row tile; the arrays below begin at its first row to compute
  const int32_t* codes;       // [K_pad / 4][rows]: four input codes of the row per element
  const float* scale;         // [units][rows]: scale of the row's input codes
  const int32_t* sums;        // [units][rows]: sum of the row's codes. Super-blocks: [pairs of groups][rows]: the sums
                              // of two groups, 16 bits each, the first in the low half
};

// Add the products of the units from <= i < to to c [rows, ldc].
typedef void (*QuantTileFunction)(const QuantTile* tile, float* c, int64_t ldc, int64_t from, int64_t to);

// GEMM tiles of one quantized format, indexed like GemmTiles.
struct QuantTiles {
  QuantTileFunction by_rows[MAX_TILE_M + 1][3];
};

// A type of blocks of GGUF files that keep their size in memory (decode.inc).
struct StoredType {
  int32_t number;         // in ggml.h
  int64_t inputs, bytes;  // of a block
  // Decode the blocks of 16 outputs to the units of an 8-bit type, k8 or q8 with scales of type f32.
  void (*decode)(const uint8_t* from, const void* codebook, uint8_t* to);
};
const int NUM_STORED_TYPES = 10;
// Maximum bytes of a block, and of the decoded blocks of 16 outputs: a super-block of type k8.
const int MAX_STORED = 128, MAX_DECODED = WIDE_HEADER + SUPER_BLOCK * 16;

struct QuantKernels {
  int max_rows, max_accumulators;  // maximum rows of a tile; maximum of its rows times its blocks
  const StoredType* stored;        // [NUM_STORED_TYPES]
  double (*multiply)(int64_t rounds);  // multiply codes in registers; return the number of products
  QuantTiles tiles[15];            // by quant_format
};

// Implementations of pronk_sample, pronk_sample_draft, pronk_exp, pronk_log, pronk_total and pronk_exp_total.
struct Sampling {
  int32_t (*sample)(const float* logits, int64_t vocab, float temperature, uint64_t key);
  int32_t (*sample_draft)(const float* logits, int64_t vocab, float temperature, const uint64_t* key, const int32_t* ids,
                          float* scores, float* confidence);
  void (*exps)(double* x, int64_t count);
  void (*logs)(double* x, int64_t count);
  double (*total)(const double* x, int64_t count);
  double (*exp_total)(const float* x, int64_t count, float largest);
};

// Quantize one row of K float32 weights, see round.inc.
typedef void (*RoundFunction)(const float* x, int64_t K, int bits, int64_t group, int tries, uint8_t* codes,
                              float* scales);

// Kernels of one instruction set.
struct IsaKernels {
  void (*execute)(State* state, int thread, int threads);
  const QuantKernels* quant;
  RoundFunction round;  // null: use round_avx512
  const Sampling* sampling;
  bool bf16;  // whether GEMM with bf16 weights takes bf16 input rows (BF16_ACTIVATIONS)
};

extern const IsaKernels kernels_portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const IsaKernels kernels_avx2, kernels_avx512, kernels_avx512_bf16, kernels_amx, kernels_amx_int8;
extern const IsaKernels kernels_emulated_amx;  // only with PRONK_EMULATE
// Indexed by pronk_type (f32, bf16, f16). AVX512-BF16 and AMX with fast bits do not use those for bf16.
extern const GemmTiles gemm_tiles_avx512[3];
extern const QuantKernels quant_avx512, quant_vnni, quant_avx_vnni;
extern const Sampling sampling_avx512;
extern const RoundFunction round_avx512;
#elif defined(__aarch64__)
extern const QuantKernels quant_dot, quant_i8mm;
#endif

// Kernels of an instruction set; `fast`: see pronk_pass.fast.
const IsaKernels* isa_kernels(int isa, bool fast);
const QuantKernels* quant_kernels(int isa);
// Return the type of stored blocks with a number, decoded by some kernels; null if there is none.
const StoredType* stored_type(const QuantKernels* quant, int32_t number);
// The same for callers without kernels of their own.
static inline const StoredType* stored_type(int32_t number) {
  return stored_type(quant_kernels(PRONK_PORTABLE), number);
}

// Bytes of an element of a cache pool or of weights.
static inline int64_t type_size(int type) {
  return type == PRONK_F32 ? 4 : type == PRONK_I8 || type == PRONK_I4 ? 1 : 2;
}
static inline bool is_quantized(const pronk_weights* w) {
  return w->type == PRONK_Q8 || w->type == PRONK_Q4 || w->type >= PRONK_Q5;
}
static inline bool has_super_blocks(const pronk_weights* w) { return w->type >= PRONK_K4; }
// Bits of a weight code.
static inline int code_bits(const pronk_weights* w) {
  if (has_super_blocks(w)) return super_format(w->type).bits;
  return w->type == PRONK_Q8 ? 8 : w->type == PRONK_Q5 ? 5 : 4;
}
// Index in QuantKernels.tiles: q8, q4, q4 in groups of 32, q5, each without and with minima; then k4, k5, k6, k8,
// k2, k3, iq4.
static inline int quant_format(const pronk_weights* w) {
  switch (w->type) {
    case PRONK_Q8: return w->minima != 0;
    case PRONK_Q4: return (w->group == 32 ? 4 : 2) + (w->minima != 0);
    case PRONK_Q5: return 6 + (w->minima != 0);
    default: return 8 + w->type - PRONK_K4;
  }
}
// Inputs of a unit.
static inline int64_t quant_unit(const pronk_weights* w) { return has_super_blocks(w) ? SUPER_BLOCK : w->group; }
static inline int64_t quant_units(const pronk_weights* w) { return w->K_pad / quant_unit(w); }
// Bytes before the codes in a unit of 16 outputs.
static inline int64_t quant_header(const pronk_weights* w) {
  if (has_super_blocks(w)) return super_format(w->type).header;
  return (w->scale_type == PRONK_F32 ? 64 : 32) * (w->minima == 1 ? 2 : 1) + (w->minima == 2 ? 16 : 0);
}
static inline int64_t quant_unit_bytes(const pronk_weights* w) {
  return quant_header(w) + quant_unit(w) * code_bits(w) * 2;
}
// Bytes of a quantized block of 16 outputs.
static inline int64_t quant_block_bytes(const pronk_weights* w) {
  if (!w->stored) return quant_units(w) * quant_unit_bytes(w);
  const StoredType* type = stored_type(w->stored);
  return w->K / type->inputs * type->bytes * 16;
}
// Elements of QuantTile.sums per unit and row.
static inline int64_t sums_per_unit(const pronk_weights* w) {
  return has_super_blocks(w) ? SUPER_BLOCK / w->group / 2 : 1;
}
// Bytes of a quantized input row: codes, then a scale and sums per unit, see QuantTile.
static inline int64_t quant_row_bytes(const pronk_weights* w) {
  return w->K_pad + quant_units(w) * (4 + 4 * sums_per_unit(w));
}
// Quantized keys and values: bytes of codes, which come first, then of scales, in a key or value of the cache. int8 has
// one float32 scale. int4 has a bf16 scale for each group of KV_GROUP dimensions; the last group is padded.
const int KV_GROUP = 32;
static inline int64_t kv_groups(int64_t head_dim) { return (head_dim + KV_GROUP - 1) / KV_GROUP; }
static inline int64_t code_bytes(int type, int64_t head_dim) {
  return type == PRONK_I4 ? kv_groups(head_dim) * KV_GROUP / 2 : head_dim;
}
static inline int64_t kv_scales(int type, int64_t head_dim) { return type == PRONK_I4 ? kv_groups(head_dim) : 1; }
static inline int64_t kv_scale_bytes(int type) { return type == PRONK_I4 ? 2 : 4; }
static inline bool is_quantized_kv(int type) { return type == PRONK_I8 || type == PRONK_I4; }
// value_size: elements of a value in the cache. panel_size: elements of a panel of 16 keys.
static inline int64_t value_size(int type, int64_t head_dim) {
  if (!is_quantized_kv(type)) return head_dim;
  return code_bytes(type, head_dim) + kv_scales(type, head_dim) * kv_scale_bytes(type);
}
static inline int64_t panel_size(int type, int64_t head_dim) {
  return type == PRONK_BF16 ? (head_dim + 1) / 2 * 32 : value_size(type, head_dim) * 16;
}
// Unpack the K weights of output `row` to float32.
void unpack_row(const pronk_weights* w, int64_t row, float* out);
// Convert row `row` of a table in blocks of a GGUF file, `count` numbers, to float32. `format` is that of
// pronk_pack_blocks, and w describes it. The results are those of unpack_row for a packed table.
void unpack_blocks(const pronk_weights* w, int32_t format, const void* table, int64_t row, int64_t count, float* out);
}  // namespace pronk
