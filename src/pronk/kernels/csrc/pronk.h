// The C interface of the kernels. Plain data and pointers: independent of torch's and Python's versions.
//
// A *program* is a list of operations over packed rows; a *pass* says which rows. `pronk_run` executes one program over
// one pass on the library's own threads. Sizes are in elements, pointers are the caller's and must outlive the call.
// `library.py` mirrors every structure here, and checks `pronk_version` and `pronk_sizes` when it loads the library.
#pragma once
#include <stdint.h>

#ifdef _WIN32
#define PRONK_API extern "C" __declspec(dllexport)
#else
#define PRONK_API extern "C" __attribute__((visibility("default")))
#endif

#define PRONK_VERSION 5

enum pronk_type { PRONK_F32 = 0, PRONK_BF16 = 1, PRONK_F16 = 2, PRONK_Q8 = 3, PRONK_Q4 = 4, PRONK_I8 = 5 };
enum pronk_isa { PRONK_PORTABLE = 0, PRONK_AVX2 = 1, PRONK_AVX512 = 2, PRONK_AVX512_BF16 = 3, PRONK_AMX = 4 };

enum pronk_kind {
  PRONK_EMBED = 0,   // stream = table[token], or row `token` of w (+ positions[position])
  PRONK_LINEAR = 1,  // output = activate(norm(input) W + b), see pronk_op
  PRONK_QKV = 2,     // queries rotated and scaled; keys and values into the cache; several where weights differ in form
  PRONK_ATTEND = 3,  // A = attention of the queries
  PRONK_STORE = 4,   // stream rows into a pool, by slot, or into the pass's `collected`, by row
  PRONK_NORM = 5,    // stream = norm(stream)
};
enum pronk_buffer { PRONK_STREAM = 0, PRONK_A = 1, PRONK_B = 2, PRONK_LOGITS = 3 };
enum pronk_norm_kind { PRONK_NO_NORM = 0, PRONK_RMS = 1, PRONK_LAYER = 2 };
enum pronk_activation { PRONK_IDENTITY = 0, PRONK_SILU = 1, PRONK_GELU = 2, PRONK_GELU_TANH = 3 };

// A matrix [n, k] in blocks of 16 outputs, the last one of each unit padded with zeros:
//   f32, f16   [blocks][k][16]
//   bf16       [blocks][kp / 2][16][2], kp = k rounded up to 32: 16 pairs of k are one AMX tile
//   q8, q4     [blocks][kp / group] lines, kp = k rounded up to `group`: 16 scales, 16 minima if there are any
//              (float32), and codes, unsigned: q8 [group / 4][16][4], q4 [group / 8][16][4], k 0-3 in the low halves
//              and 4-7 in the high ones
// A weight of q8 or q4 is scale * code + minimum, or scale * (code - 128) and scale * (code - 8) without minima.
typedef struct {
  int32_t type;
  int32_t gated;       // blocks alternate between the gate and what it gates
  int32_t group;       // of q8, q4: weights that share a scale, a multiple of 8
  int32_t minima;      // of q8, q4: whether groups have a minimum
  int64_t n, k, kp;    // outputs (of one half, if gated), inputs, padded inputs
  int64_t unit;        // outputs that are padded to whole blocks together (a head), or n
  int64_t blocks;
  const void* data;
  const float* bias;   // [blocks * 16] or null
  const int32_t* order;  // of q8, q4: [k] the input that each weight is multiplied with; null: its own
} pronk_weights;

typedef struct {
  int32_t kind;
  int32_t input, output;      // pronk_buffer
  int32_t residual;           // add to the stream instead of replacing it
  int32_t activation;
  int32_t wanted;             // only the rows of pass.wanted
  int32_t norm;
  float eps;
  const float *norm_weight, *norm_bias;
  const pronk_weights* w;
  int32_t heads, kv_heads, head_dim;
  int32_t first_head;         // of qkv: where the outputs of w begin among all heads: queries, then keys, then values
  int32_t rope;               // 0: none; 1, 2: by pass.rope[0], pass.rope[1]
  int32_t window;             // 0: none
  int32_t cross;              // attend to the tables of pass.beside
  int32_t block_size;
  int32_t kv_type;            // f32, bf16 or i8
  int64_t slots;              // of a pool
  const float *q_norm, *k_norm;
  void *keys, *values;        // one layer's pools, see kernels.inc
  const void *table, *positions;
  int32_t table_type, collected;  // collected: 1 + its place in pass.collected, or 0 for `keys` as the pool
} pronk_op;

// One request's rows: `nodes` nodes of a tree below `length` tokens, of which the first `computed` are there already.
typedef struct {
  const int32_t* blocks;      // block numbers from the first one held on
  const int32_t* parents;     // [nodes], or null for a chain
  int32_t released;           // leading blocks that have been given back
  int32_t length, nodes, computed;
  int32_t held;               // blocks
} pronk_segment;

typedef struct {
  int64_t rows, segments, num_wanted;
  int32_t type;               // of the stream: f32 or bf16
  int32_t hidden;             // its width
  int32_t isa;                // pronk_isa, at most pronk_detect
  int32_t threads;            // at least 1
  const int32_t* tokens;      // [rows]
  const pronk_segment *segment, *beside;  // [segments]
  void* stream;               // [rows, hidden]
  const float* rope[2];       // [positions or rows, 2, head_dim / 2]: cosines, sines
  int32_t rope_by_row[2];     // whether the table has a line per row instead of one per position
  const int32_t* wanted;      // [num_wanted] rows
  float* logits;              // [num_wanted or rows, n]
  void* collected;            // [layers, rows, hidden]
} pronk_pass;

// How a draft model goes on by itself: each token is guessed from the pass before and is the next one's only row.
typedef struct {
  uint64_t key;               // of the request; the noise of each position is a hash of it
  int64_t position;           // of the first token
  int32_t steps;              // most tokens
  float temperature;          // 0: without noise
  float* scores;              // [steps, vocab]
  int32_t (*hear)(int32_t token, float confidence);  // is told of each; 0 ends the chain
} pronk_chain;

// The strings of some texts and what followed them: a suffix automaton.
typedef struct pronk_suffixes pronk_suffixes;

// A tree of what followed the longest ends of a text, likeliest first. A guess is of one of 32 ways, and is right with a
// probability of (taken + prior * weight) / (offered + weight), where `prior` depends on its depth, too.
typedef struct {
  const pronk_suffixes* const* sources;  // the text's own first, then earlier outputs'
  const int32_t* tail;        // the text's last tokens, at least one; the last one is the root
  int32_t num_sources, tail_tokens;
  int32_t width, max_depth;   // guesses, and how deep they go, at most
  int32_t min_match;          // shortest match that counts
  double depth_factor;        // a match supports guesses to so many times its length
  double least;               // guesses of a smaller gain do not count
  double weight;
  const double *offered, *taken;  // [32]
  double* priors;             // [32, 4], by depth, the last one for all above; not a number where `prior` is to be asked
  double (*prior)(int32_t way, int32_t depth);
  int32_t *tokens, *parents, *ways;  // [width + 1], parents before their children
  double* gains;              // [width + 1]
} pronk_sprouts;

PRONK_API int32_t pronk_version(void);
// Sizes in bytes of the six structures, to find a mismatch before it does harm.
PRONK_API void pronk_sizes(int32_t sizes[6]);
// The highest instruction set that this processor and system have.
PRONK_API int32_t pronk_detect(void);
// Pack rows of `source` [rows, k] (f32, bf16, f16 as w->type) into `data`, which is zeroed memory.
PRONK_API void pronk_pack(const pronk_weights* w, const void* source, int64_t stride, void* data, int32_t threads);
// The same for q8, q4: one byte a code, `codes` [rows, kp]; `scale` and `minimum` (or null) [rows, kp / group].
PRONK_API void pronk_pack_codes(const pronk_weights* w, const uint8_t* codes, const float* scale, const float* minimum,
                                void* data, int32_t threads);
// Round `rows` of `source` [rows, k] (f32, bf16 or f16, `stride` numbers apart) to 8 or 4 bits in groups, without
// minima: `codes` [rows, k], `scale` [rows, groups]. `tries` ranges are tried, each 5 % narrower, beside that of the
// largest weight. Returns 0; -1: not enough memory.
PRONK_API int32_t pronk_round(const void* source, int32_t type, int64_t rows, int64_t k, int64_t stride, int32_t bits,
                              int64_t group, int32_t tries, uint8_t* codes, float* scale, int32_t threads, int32_t isa);
// Bytes of packed data.
PRONK_API int64_t pronk_packed_size(const pronk_weights* w);
// The packed elements of one output, as float: for whoever wants to look at a weight again. `out` is [k].
PRONK_API void pronk_unpack(const pronk_weights* w, int64_t row, float* out);
// 0; -1: not enough memory, -2: a shape or an instruction set that is not covered, or rows without a place.
PRONK_API int32_t pronk_run(const pronk_op* ops, int64_t count, const pronk_pass* pass);
// The target's choice at one row of logits: the first largest of logits / temperature + Gumbel noise(key, token), or of
// the logits alone at temperature 0; -1 if a number is not finite.
PRONK_API int32_t pronk_choose(const float* logits, int64_t n, float temperature, uint64_t key, int32_t isa);
// The same as a draft model does it, for which less precise noise will do; without noise if `key` is null. `scores` [n]
// are what the choice was made by, `confidence` is the share of the chosen one among their exponentials. A logit of
// minus infinity is a token that is banned; -1 if there is no other, or a number is not finite.
PRONK_API int32_t pronk_guess(const float* logits, int64_t n, float temperature, const uint64_t* key, float* scores,
                              float* confidence, int32_t isa);
// Run a program over one request's rows, guess the token after the last one (`pass->logits` is [1, vocab]), run that
// as a row of its own, and so on. Returns the number of passes, or what `pronk_run` returns where it fails.
PRONK_API int32_t pronk_grow(const pronk_op* ops, int64_t count, const pronk_pass* pass, const pronk_chain* chain);
// Move rows of pools to other slots: pool i of `pools` has numbers of `types[i]`, `kinds[i]` 0 for rows [heads, slots,
// width], 1 for values and 2 for keys of heads of `width`; `shapes` [count, 3] are heads, slots and width.
PRONK_API int32_t pronk_move(void* const* pools, const int32_t* types, const int32_t* kinds, const int64_t* shapes,
                             int64_t count, const int64_t* source, const int64_t* target, int64_t moves);
// For matches of up to `max_match` tokens; null: not enough memory.
PRONK_API pronk_suffixes* pronk_suffixes_new(int32_t max_match);
PRONK_API void pronk_suffixes_free(pronk_suffixes* suffixes);
// The text goes on with `tokens`, each at least 0. Returns 0; -1: not enough memory, and they are of no use any more.
PRONK_API int32_t pronk_suffixes_extend(pronk_suffixes* suffixes, const int32_t* tokens, int64_t count);
// The next token begins another text: no string goes across.
PRONK_API void pronk_suffixes_end_text(pronk_suffixes* suffixes);
// Tokens that they were extended by.
PRONK_API int64_t pronk_suffixes_tokens(const pronk_suffixes* suffixes);
// Whether two were made from the same texts.
PRONK_API int32_t pronk_suffixes_equal(const pronk_suffixes* a, const pronk_suffixes* b);
// Bytes that are held.
PRONK_API int64_t pronk_suffixes_bytes(const pronk_suffixes* suffixes);
// Grow a tree. Returns its nodes, the root among them, or -1: not enough memory.
PRONK_API int32_t pronk_suffixes_grow(const pronk_sprouts* call);
// Read `bytes` once on all threads, for measuring the memory floor; returns a sum that keeps the read alive.
PRONK_API double pronk_read(const void* data, int64_t bytes, int32_t threads);
// Bytes that the library holds between passes.
PRONK_API int64_t pronk_workspace(void);
