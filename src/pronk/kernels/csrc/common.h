// What the instruction sets share: a pass as it has been prepared, and the functions that each of them has.
#pragma once
#include <atomic>

#include "pronk.h"
#include "scalar.h"

// A sanitizer's compiler takes minutes over tiles of many rows; it gets few.
#if defined(PRONK_FEW_TILES)
#define FEW_TILES(rows) ((rows) < 3 ? (rows) : 3)
#else
#define FEW_TILES(rows) (rows)
#endif

namespace pronk {

// Positions of keys that attention takes together; blocks begin at multiples of it, wherever the keys lie.
const int KEYS = 64;
// Most queries that attention takes together.
const int MOST_QUERIES = 12;
// Rows, in whole tiles, of a chunk of outputs that are computed before they are used.
const int CHUNK_ROWS = 512;
// Most blocks of 16 outputs in such a chunk.
const int CHUNK_BLOCKS = 8;
// Most rows of a tile of a product. Up to so many every thread prepares a product's input by itself, which is cheaper
// than waiting.
const int MOST_TILE_ROWS = 12;
// A multiple of 16.
const int MOST_HEAD_DIM = 512;

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Numbers from one row of activations to the next: whole vectors of 32, an odd number of them, so that rows beside each
// other do not meet in the same few places of the cache, as they would a power of two apart.
inline int64_t row_stride(int64_t width) { return ((width + 31) / 32 | 1) * 32; }

// One row: where it stands in its request's text, and how its path lies in the cache.
struct Row {
  int32_t position, slot;
  int32_t straight;  // so many of its path's nodes, from the root on, lie where a chain's would
  int32_t tail;      // place in `path` of the nodes after those
};

struct Segment {
  const pronk_segment* given;
  int32_t first_row, rows;
};

struct Coded;

struct State {
  const pronk_op* ops;
  int64_t count;
  const pronk_pass* pass;
  bool narrow;            // activations between operations are bf16
  const Coded* coded;     // products of weights of 8 and 4 bits
  Row* row;
  Segment* segment;
  int32_t* path;
  std::atomic<int32_t>* next;  // per operation, the next piece of attention
  void *a, *b, *x;        // activations [rows, row_stride(width)], and the input of a product of many rows
  int64_t widest;         // row_stride of the longest row that is multiplied
  float* q;               // [rows, heads, head_dim rounded up to 16]
  char* scratch;          // scratch_bytes for each thread
  int64_t scratch_bytes;
};

// What a tile fetches early: from the byte `start` of its weights on (in its last `lead` k `hop`), `stride` bytes for
// each step of its own.
struct Ahead {
  int64_t start, hop, stride, lead;
};

// `rows` as pack_tile leaves them; the outputs [rows, ldc] over k from k0 to k1, in parts (vdpbf16ps: in one), added to
// what is there if `more`.
typedef void (*TileFunction)(const void* weights, int64_t block, const void* rows, float* c, int64_t ldc, int64_t k0,
                             int64_t k1, int64_t part, bool more, Ahead ahead);

// Products of one type of weights, by their rows, for 1, 2 and 4 blocks of outputs beside each other.
struct Tiles {
  TileFunction by_rows[MOST_TILE_ROWS + 1][3];
};

// A tile of rows for weights of 8 or 4 bits, and one or several blocks of these; see quantized.inc.
struct CodedTile {
  const uint8_t* weights;
  int64_t block, line, group;   // bytes of a block and of a group's line, weights of a group
  int64_t ahead, stride;        // for each 64 bytes read from `from` on, what is fetched: from where on, how far
  int64_t rows;                 // of the tile; a function takes some of them, from where these point on
  const int32_t* codes;         // [k / 4][rows]: four codes of a row
  const float* scale;           // [groups][rows]
  const float* total;           // with minima, [groups][rows]: scale times the sum of the codes
  const int32_t* start;         // without, [groups][rows]: minus the sum of the codes times what weights count from
};

// Over groups `from` to `to`; see TileFunction.
typedef void (*CodedFunction)(const CodedTile* tile, float* c, int64_t ldc, int64_t from, int64_t to);

struct CodedTiles {
  CodedFunction by_rows[MOST_TILE_ROWS + 1][3];
};

struct Coded {
  int rows, sums;               // most that a function takes, and most rows times blocks
  CodedTiles tiles[2][2];       // of 8 and 4 bits, without and with minima
};

struct Choices {
  int32_t (*choose)(const float* logits, int64_t n, float temperature, uint64_t key);
  int32_t (*guess)(const float* logits, int64_t n, float temperature, const uint64_t* key, float* scores,
                   float* confidence);
};

typedef void (*RoundFunction)(const float* x, int64_t k, int bits, int64_t group, int tries, uint8_t* codes,
                              float* scales);

struct Table {
  void (*execute)(State* state, int thread, int threads);
  const Coded* coded;
  RoundFunction round;
  const Choices* choices;
  bool narrow;            // whether bf16 products take bf16 activations
};

extern const Table table_portable;
#if defined(__x86_64__) || defined(_M_X64)
extern const Table table_avx2, table_avx512, table_avx512_bf16, table_amx;
// By the type of the weights; the sets above AVX-512 use them for all types but bf16.
extern const Tiles tiles_avx512[3];
extern const Coded coded_avx512, coded_vnni;
extern const Choices choices_avx512;
extern const RoundFunction round_avx512;
#endif

// Bytes of a number of a pool, or of weights.
inline int64_t type_size(int type) { return type == PRONK_F32 ? 4 : type == PRONK_I8 ? 1 : 2; }
inline bool is_coded(const pronk_weights* w) { return w->type == PRONK_Q8 || w->type == PRONK_Q4; }
// Bytes of a group of 16 outputs, and of a row of its input.
inline int64_t coded_line(const pronk_weights* w) {
  return (w->minima ? 128 : 64) + (int64_t)w->group * (w->type == PRONK_Q4 ? 8 : 16);
}
inline int64_t coded_row(const pronk_weights* w) { return w->kp + w->kp / w->group * 8; }
// Elements of a value, and of 16 keys: codes of 8 bits have a scale behind them.
inline int64_t value_size(int type, int64_t head_dim) { return type == PRONK_I8 ? head_dim + 4 : head_dim; }
inline int64_t panel_size(int type, int64_t head_dim) {
  return type == PRONK_BF16 ? (head_dim + 1) / 2 * 32 : value_size(type, head_dim) * 16;
}
// One output's weights.
void unpack_row(const pronk_weights* w, int64_t row, float* out);
// Bytes of scratch that a thread needs.
int64_t scratch_size(const pronk_op* ops, int64_t count, const pronk_pass* pass, int64_t input, int64_t nodes);

}  // namespace pronk
