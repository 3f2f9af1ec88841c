// C interface of the compute kernels. Only plain data and pointers, so the library depends on no version of torch or
// Python.
//
// A *program* is a list of operations (pronk_op), such as the layers of a model. `pronk_run` executes a program for one
// forward pass (pronk_pass) on the library's thread pool. A *row* is one token; the rows of all requests follow each
// other. The *stream* is the residual stream, the hidden state of every row. Matrix dimensions: M rows, N outputs, K
// inputs. Sizes are in elements unless bytes are mentioned. Pointers belong to the caller and must outlive the call.
// `structures.py` mirrors every structure; `library.py` compares `pronk_version` and `pronk_sizes` when it loads the
// library.
#pragma once
#include "export.h"

// Increase it with every change of a structure, a function, or the layout of packed weights, which may lie in files.
#define PRONK_VERSION 28

// Types of numbers, of weights, and of the KV cache (f32, bf16, i8, i4).
enum pronk_type {
  PRONK_F32 = 0, PRONK_BF16 = 1, PRONK_F16 = 2, PRONK_Q8 = 3, PRONK_Q4 = 4, PRONK_I8 = 5,
  PRONK_Q5 = 6, PRONK_K4 = 7, PRONK_K5 = 8, PRONK_K6 = 9, PRONK_K8 = 10, PRONK_K2 = 11, PRONK_K3 = 12, PRONK_IQ4 = 13,
  PRONK_I4 = 14
};
enum pronk_isa { PRONK_PORTABLE = 0, PRONK_AVX2 = 1, PRONK_AVX512 = 2, PRONK_AVX512_BF16 = 3, PRONK_AMX = 4 };

enum pronk_kind {
  PRONK_EMBED = 0,   // stream = scale * table[token], or row `token` of w (+ positions[position])
  PRONK_LINEAR = 1,  // output = cap(scale * activate(norm(input) W^T + b)): W [N, K] is pronk_op.w and b its bias
  PRONK_QKV = 2,     // project; apply RoPE to queries and keys; scale queries; write keys and values to the cache.
                     // Without w: the projections are in buffer B, and the norms span all query or all key heads
  PRONK_ATTEND = 3,  // buffer A = attention outputs of the queries, `heads` times `value_dim` elements. A row at position
                     // p of its text sees the cached tokens before p and, in the cache that this pass writes, its
                     // ancestors in the tree and itself. With `keys` null, the pool `values` has rows of `head_dim`
                     // elements: a token's row is its key, and its first `value_dim` elements are the value
  PRONK_STORE = 4,   // copy stream rows to the pool `keys` (by slot) or to pass.collected (by row)
  PRONK_NORM = 5,    // output = scale * norm(input), or output += scale * norm(input) with `residual`. Rows are as wide as
                     // the stream, or without `residual` from buffer to buffer `columns` wide
  PRONK_ROUTE = 6,   // router: each row gets the `per_row` experts with the largest ranks, of equal ranks the expert with
                     // the smaller number, and their shares. An expert's score is its softmax over the router's outputs
                     // or, if `sigmoid` is 1, the sigmoid of its output. Its rank is score + correction, and its share
                     // scale * score or, if `normalized` is 1, scale * score / (sum of the row's scores + eps),
                     // times its `expert_scale`
  PRONK_CONVOLVE = 7,  // gated short convolution. A row of buffer B is [b, c, x], each as wide as the stream; its state
                     // b * x goes to its slot of the pool `keys` [slots, hidden]. Buffer A = c * (filter_bias +
                     // filter[0] * state of the token taps - 1 places before + … + filter[taps - 1] * own state)
  PRONK_GATE = 8,    // output = output * sigmoid(input), for buffer A or B as output. `columns` is the width of its rows.
                     // The input is buffer B, as wide, or SCORES with one number for each of `heads` equal parts of a row
  PRONK_MIX = 9,     // causal convolution over time of a recurrent layer, then SiLU, in place in the first columns of
                     // buffer B: filter_bias + filter[0] * input of the token taps - 1 places before + … +
                     // filter[taps - 1] * own input
  PRONK_RECUR = 10,  // recurrence of a recurrent layer by `rule`: buffer A = norm(outputs) * silu(gates), the norm over
                     // each value head, if there is one. recurrence.inc explains its inputs, buffers B and SCORES
  PRONK_LAYER_INPUTS = 11,  // the inputs of `parts` layers, each `columns` wide, from the row of B and that of the token
                     // in `table`, both parts * columns wide: buffer INPUTS = (norm(B) + scale * table[token]) / sqrt(2),
                     // with a norm of each layer's part of B
  PRONK_HEADS = 12,    // a product for each head: w has a matrix [unit, K] per head. Head h multiplies the columns h K,
                       // h K + 1, … of a row of buffer A or B, which is `input_columns` wide, by its matrix
  PRONK_LATENT = 13,   // queries and keys of multi-head latent attention, see latent.inc
  PRONK_GROUP_NORM = 14,  // buffer A = norm(A) in place, over each of `heads` equal parts of its rows. `columns` is the
                          // width of the rows
};
// Update rule of a recurrent layer, see recurrence.inc.
enum pronk_rule { PRONK_GATED_DELTA = 0, PRONK_MAMBA2 = 1 };
// Input or output of an operation. A and B hold activations between operations, SCORES those of a router (f32). C, as
// wide as the stream, holds one branch of a layer while another is computed. INPUTS (f32) holds the inputs of all layers.
// SLOTS are the rows' slots of the pool `keys`, of the stream's type and as wide as the output: a result of PRONK_LINEAR or
// PRONK_NORM that only other programs read, the feature of a drafter.
enum pronk_buffer {
  PRONK_STREAM = 0, PRONK_A = 1, PRONK_B = 2, PRONK_LOGITS = 3, PRONK_SCORES = 4, PRONK_C = 5, PRONK_INPUTS = 6,
  PRONK_SLOTS = 7
};
// What PRONK_LINEAR multiplies.
// DENSE: each row, by one matrix w.
// SPREAD and GATHER: each *pair* of a row and one of its experts, by the expert's matrix. w [experts] has a matrix per
// expert, all of one shape, type and group. Pairs are sorted by expert, then by row.
// SPREAD (gate and up projection): reads one row per row of the pass, writes one row per pair.
// GATHER (down projection): reads one row per pair, writes one row per row of the pass: the sum over its experts, in
// the order of their numbers, of share * (output of the expert).
enum pronk_mixing { PRONK_DENSE = 0, PRONK_SPREAD = 1, PRONK_GATHER = 2 };
enum pronk_norm_kind { PRONK_NO_NORM = 0, PRONK_RMS = 1, PRONK_LAYER = 2 };
// CLAMPED (gpt-oss), for gated matrices only: g * sigmoid(1.702 g) * (1 + u), where g = min(gate, 7) and u is the up
// projection, clamped to -7..7.
// RELU2: max(x, 0) squared.
enum pronk_activation {
  PRONK_IDENTITY = 0, PRONK_SILU = 1, PRONK_GELU = 2, PRONK_GELU_TANH = 3, PRONK_CLAMPED = 4, PRONK_RELU2 = 5
};

// A matrix [N, K] packed in blocks of 16 outputs. Every `unit` outputs a new block begins; zeros fill the last block:
//   f32, f16   [blocks][K][16]
//   bf16       [blocks][K_pad / 2][16][2], K_pad = K rounded up to 32: 16 pairs of k are one AMX tile
//   q8, q5, q4 [blocks][K_pad / group] groups, K_pad = K rounded up to `group` (q5: 32). A group is 16 scales; if there
//              are minima 16 minima (both of `scale_type`), or 16 zero points (unsigned bytes); and unsigned codes:
//                q8  [group / 4][16][4]
//                q4  [group / 8][16][4], with k 0-3 in the low nibbles and k 4-7 in the high nibbles
//                q5  the low 4 bits like q4, then the high bits [16][4]: bit i of byte j is that of k = 4 i + j
//   k4, k5, k6 [blocks][K / 256] super-blocks, those of llama.cpp's Q4_K, Q5_K and Q6_K:
//                16 factors, 16 factors of the minima (f16; k6: 32 bytes of zeros); the signed 8-bit scales of each
//                pair of groups [pairs][16][2]; k4, k5: the unsigned 8-bit minima [pairs][16][2]; and the codes, group
//                after group. A group is 32 inputs, with k6 16. k4 like q4, k5 like q5, and k6 the low 4 bits like q4,
//                then the high bits [16][4]: bits 2 i and 2 i + 1 of byte j are those of k = 4 i + j
//   k2, k3, iq4  [blocks][K / 256] super-blocks, those of Q2_K, Q3_K and IQ4_XS. They begin with the factors of k4 to k6
//              (k3, iq4: zeros in place of factors of the minima). A *chunk* is the 32 codes of a pair of groups of 16:
//                k2  bytes [pairs][16][2], with a 4-bit scale in the low and a 4-bit minimum in the high nibble; then
//                    chunks of two vectors [16][4], one for each group: bits 2 i and 2 i + 1 of byte j are those of
//                    k = 4 i + j
//                k3  6-bit scales, less a zero of 32: of the bytes [8 pairs][16][2] = [4][64] that 8-bit scales would
//                    be, the low 4 bits [2][64], with vectors 0 and 2 in the low and 1 and 3 in the high nibbles, then
//                    the high bits [64], bits 2 i and 2 i + 1 of vector i; then chunks of three vectors [16][4]: bits
//                    3 i to 3 i + 2 of byte j of vector v are those of k = 8 v + 4 i + j. Bits 6 and 7 of vectors 0 and
//                    1 are the low bits of k = 24 + j and 28 + j, and bits 6 and 7 of vector 2 their high bits
//                iq4 the signed 8-bit scales of pairs of groups of 32 like k4; then codes like q4, which are indices of
//                    the table IQ4_VALUES (common.h)
//   k8         [blocks][K / 256] super-blocks: 16 factors (f32), the scales of 16 groups of 16 inputs [16][16] (int32), and
//              the codes like q8. Only decoded blocks of a file have this type, see `stored`
// A weight is scale * code + minimum; without minima scale * (code - zero), with the group's zero point or a zero of 128
// (q8), 16 (q5) or 8 (q4).
// k4 and k5: factor * scale * code - factor of the minima * minimum; k6: factor * scale * (code - 32); k8: factor * scale *
// (code - 128). k2 is like k4, k3 like k6 with code - 4, and iq4 with a value of the table.
//
// With `stored`, the data are the blocks of a GGUF file, [blocks][K / inputs of a file's block][bytes of a file's block][16],
// and the fields `type` to `scale_type` describe what the kernels decode them to when they multiply (decode.inc).
typedef struct {
  int32_t type;
  int32_t gated;         // 1: gate and up projection in one matrix, whose blocks alternate: gate, up, gate, up, …
  int32_t group;         // quantized: number of weights along K that share a scale; a multiple of 8
  int32_t minima;        // q8, q5, q4: what groups have besides a scale: 0 nothing, 1 a minimum, 2 a zero point (q8, q4)
  int32_t scale_type;    // q8, q5, q4: type of scales and minima, f32, bf16 or f16
  int32_t stored;        // number in ggml.h of the type of the file's blocks that are the data; 0: none
  int64_t N, K, K_pad;   // outputs (of the gate alone, if gated), inputs, padded inputs
  int64_t unit;          // outputs after which a new block begins: head_dim for PRONK_QKV, else N
  int64_t blocks;
  const void* data;
  const float* bias;     // [blocks * 16] or null
  const int32_t* order;  // quantized: [K] index of the input that each weight multiplies; null: 0, 1, …, K - 1
  const void* codebook;  // stored: for each index in a block, the bytes that decode.inc describes; null: the type has none
} pronk_weights;

// A low-rank adapter (LoRA) of the matrix W of an operation. The operation computes x W^T + (x down^T) up^T + b instead of
// x W^T + b. Both matrices are f32, and `up` includes the adapter's scale. Block b of `up` has the outputs of block b of W.
// Its K inputs are the outputs first[b], first[b] + 1, … of `down`; first[b] = -1: the adapter does not change the block.
typedef struct {
  const pronk_weights *down, *up;  // both null: the adapter does not change W
  const int32_t* first;            // [blocks]
} pronk_adapter;

// Rows of a GGUF file in quantized blocks, one after the other.
typedef struct {
  const void* data;
  int64_t rows;
  int64_t heads;  // 0, or the number of heads; the rows of each head are then stored in the order of interleaved RoPE:
                  // row 2 i + j of a head of n rows is its output i + j * n / 2
} pronk_blocks;

typedef struct {
  int32_t kind;
  int32_t input, output;  // pronk_buffer
  int32_t residual;       // 1: add to the output, the stream or with PRONK_NORM buffer C, instead of replacing it
  int32_t activation;
  int32_t wanted;         // 1: compute only the rows in pass.wanted
  int32_t norm;
  float eps;
  const float *norm_weight, *norm_bias;
  const pronk_weights* w;
  int32_t heads, kv_heads, head_dim;
  int32_t first_head;     // PRONK_QKV: number of the first head in w, counting query heads, then key, then value heads
  int32_t rope;           // RoPE table. 0: none; n > 0: pass.rope[n - 1]. PRONK_ATTEND: that of `key_bias`
  int32_t window;         // sliding window in tokens; 0: none
  int32_t cache;          // PRONK_ATTEND: cache of `keys` and `values`. 0: that of pass.segment, which this pass writes;
                          // n > 0: that of pass.others[n - 1], which another model has written
  int32_t block_size;     // slots of a cache block, a multiple of 16
  int32_t kv_type;        // f32, bf16, i8 or i4
  int64_t slots;          // number of slots of a pool
  const float *q_norm, *k_norm, *v_norm;  // [head_dim], or null without a norm; without w: of all heads, v_norm null
  const float* key_bias;  // PRONK_QKV and PRONK_ATTEND with an int4 cache: null, or [kv_heads, head_dim], a bias that keys
                          // in the cache lack. It is 0 but in the elements i and i + rope_dim / 2 of `bias_pairs`
  const int32_t* bias_pairs; // [num_bias_pairs] numbers i
  void *keys, *values;    // cache pools of one layer; store_key and store_value (ops.inc) have the layout
  const void *table, *positions;
  int32_t table_type;     // pronk_type of `table` and `positions`; with w: that of w, whose format `table` has
  int32_t collected;      // n > 0: PRONK_STORE copies to pass.collected[n - 1], PRONK_NORM reads from there;
                          // 0: PRONK_STORE copies to `keys`, PRONK_NORM reads `input`
  float scale;            // factor of embeddings, of outputs, of queries, or of experts' shares; 1: none
  float cap;              // soft cap of outputs or of attention scores: cap * tanh(x / cap); 0: none
  float query_growth;     // PRONK_QKV: queries times 1 + query_growth * log(1 + floor(position / query_period));
  int32_t query_period;   // query_growth 0: none
  int32_t rope_dim;       // number of dimensions of a head that RoPE rotates, the first ones
  int32_t num_bias_pairs;
  const float* sinks;     // PRONK_ATTEND: null, or [heads]: score of each head's sink, a key without a value
  int32_t mixing;         // PRONK_LINEAR: pronk_mixing
  int32_t experts, per_row;  // PRONK_ROUTE, and PRONK_LINEAR with experts
  int32_t normalized;        // PRONK_ROUTE: 1: shares are divided by their sum
  int32_t sigmoid;           // PRONK_ROUTE: 1: scores are sigmoids; 0: softmax
  int32_t groups;            // PRONK_ROUTE: number of equal groups of adjacent experts. A row's experts are in its
  int32_t row_groups;        // `row_groups` best groups, those with the largest sums of their `group_best` largest ranks
  int32_t group_best;
  const float* correction;   // PRONK_ROUTE: [experts] what the choice adds to the scores, or null
  const float* expert_scale; // PRONK_ROUTE: [experts] factor of each expert's shares, or null
  // PRONK_CONVOLVE, PRONK_MIX: weights [taps, hidden or channels], the oldest token first; null, or a bias
  // [hidden or channels]
  const float *filter, *filter_bias;
  int32_t taps;           // PRONK_CONVOLVE, PRONK_MIX: number of tokens that an output depends on, its own included
  int32_t num_adapters;
  int32_t part, parts;    // PRONK_EMBED, PRONK_NORM: `parts` 0: rows of the output are as wide as the stream; n > 0: they
                          // are rows of buffer A, n times as wide as the stream, of which part `part`, from 0, is written
  int32_t zero_first;     // PRONK_EMBED: 1: the row of the text's first token is zero
  int32_t layer_input;    // PRONK_LINEAR: n > 0: activated outputs times the inputs of layer n - 1, N numbers
  int32_t table_format;   // PRONK_LAYER_INPUTS: 0, or `format` of pronk_pack_blocks: `table` has blocks of a GGUF file,
                          // and w describes them (type, group, minima, scale_type), without data
  int32_t columns;        // PRONK_LINEAR and PRONK_HEADS to buffer A or B: width of the buffer's rows; 0: N.
                          // PRONK_NORM: that of both buffers' rows; 0: that of the stream. PRONK_LATENT: that of
                          // the rows of buffer B. PRONK_GATE, PRONK_GROUP_NORM: see
                          // there
  int32_t first_column;   // PRONK_LINEAR to buffer A or B: column of the first output. PRONK_LATENT: see latent.inc
  int32_t input_columns;  // PRONK_HEADS: width of the input's rows
  // PRONK_MIX and PRONK_RECUR: `heads` value heads, `kv_heads` key heads with keys of `head_dim` elements, `slots` states.
  int32_t value_dim;      // elements of a value; also of PRONK_ATTEND and PRONK_LATENT
  int32_t tiled;          // 1: value head i uses key head i % kv_heads; 0: i / (heads / kv_heads)
  int32_t num_updates;    // number of update slots
  int32_t rule;           // pronk_rule
  int32_t state_size, update_size;  // elements of a slot of `states` and of `updates`, as the caller has laid them out
  float *states, *inputs, *updates;  // pools of one layer; recurrence.inc has the layout
  const float *decay_rate, *decay_bias;  // PRONK_RECUR: [heads]
  const float* skip;      // PRONK_RECUR, PRONK_MAMBA2: [heads] factors of the values that are added to the outputs
  const pronk_adapter* adapters;  // PRONK_LINEAR without experts, PRONK_QKV: [num_adapters], or null
} pronk_op;

// Rows of one request: a tree of `nodes` tokens after `length` cached tokens. The tree is a chunk of the prompt (a
// chain) or the last token with its draft tokens. The first `computed` nodes have no rows: their keys and values are
// already in the cache.
typedef struct {
  const int32_t* blocks;   // [num_blocks] numbers of the request's cache blocks, without those that were freed
  const int32_t* parents;  // [nodes] parent of each node, -1 for the root; null: a chain
  int32_t released;        // number of leading cache blocks that were freed
  int32_t length, nodes, computed;
  int32_t num_blocks;
  int32_t adapter;         // number of the request's adapter in pronk_op.adapters; -1: none
} pronk_segment;

// State of one request in the recurrent layers, and what a pass does with it. The state in slot `slot` holds the first
// *length tokens of the request's text; without a token it is zero, whatever the slot contains. The *update* of a token
// is what it adds to the state. It is kept in an update slot as long as it is not certain that the token stays.
//
//   text    tokens in the state | replayed | nodes: absorbed, certain, others
//
// The updates of replayed tokens, and of computed nodes that are not absorbed, are in their slots. All other nodes are
// rows of this pass: certain ones are added to the state, others leave their updates in their slots.
typedef struct {
  const int32_t* updates;  // slots of the updates of the replayed tokens, then of the nodes after the certain ones
  const int32_t* copies;   // [num_copies][2] pairs, ascending: a number n of tokens, and a state slot, to which the state
                           // is copied when the pass has added n tokens to it
  int32_t* length;         // a pass with `keeps` adds `replayed` + `certain` in the end
  int32_t slot;
  int32_t keeps;           // 1: the pass changes the state; 0: it does not, and `certain` is 0
  int32_t replayed;        // number of committed tokens that follow those of the state
  int32_t absorbed;        // number of leading nodes that are in the state; all of them are computed
  int32_t certain;         // number of nodes that follow, rows that are tokens of the text
  int32_t num_copies;
} pronk_recurrence;

// Options by which a request chooses tokens: those of pronk.sampling.params that need no state besides the
// tokens of its text.
typedef struct {
  uint64_t key;       // key of the request; a position's noise key is hash_token(key, position)
  float temperature;  // 0: greedy, without noise and truncation
  float log_min_p;    // logarithm of min-p; minus infinity: none
  int64_t top_k;      // 0: all tokens
  double top_p;       // 1: all tokens
  double repetition, frequency, presence;  // penalties
  int32_t* counts;    // [vocab] how often the output has each token; null: no penalties
  const uint8_t* in_prompt;  // [vocab] whether the prompt has a token
} pronk_sampling;

// Arguments and results of pronk_verify for a request, called at the end of a pass.
typedef struct {
  const pronk_sampling* sampling;  // null: the pass chooses no token of this request
  const int32_t* tokens;   // [nodes] token ids of the tree
  const int32_t* parents;  // [nodes] as for pronk_verify
  int64_t position;        // of the token after the root
  int64_t first;           // row of pronk_pass.logits with the logits after the root; those of the other nodes follow
  int32_t nodes;
  int32_t accepted;        // output: result of pronk_verify
  int32_t* path;           // [nodes] output
} pronk_choice;

typedef struct {
  int64_t rows, segments, num_others, num_wanted;
  int32_t type;              // type of the stream: f32 or bf16
  int32_t hidden;            // width of the stream
  int32_t isa;               // pronk_isa, at most pronk_detect()
  int32_t threads;           // at least 1
  int32_t fast;              // 0: portable bits, the same on every instruction set. 1: bf16 GEMM takes bf16 rows and the
                             // bf16 products of avx512_bf16 or amx, which round differently from each other
  const int32_t* tokens;     // [rows] token ids
  const pronk_segment* segment;  // [segments], one per request
  const pronk_segment* others;   // [num_others, segments] the requests' tokens in other caches; without nodes
  void* stream;              // [rows, hidden]
  const float* rope[4];      // tables [positions or rows, 2, rope_dim / 2]: cosines, sines
  int32_t rope_by_row[4];    // per table of `rope`. 1: the table has an entry per row; 0: an entry per position
  const int32_t* wanted;     // [num_wanted] rows whose logits are requested
  float* logits;             // [num_wanted, N], or [rows, N] if `wanted` of the LM head's operation is 0
  void* collected;           // [layers, rows, hidden] rows of the stream's type: copies by PRONK_STORE, or inputs of
                             // PRONK_NORM
  int64_t* experts_read;     // null, or a counter: every PRONK_ROUTE adds the number of experts that have rows
  const pronk_recurrence* recurrence;  // [segments], or null for a program without recurrent layers
  int64_t* state_bytes;      // null, or [2] counters: PRONK_RECUR adds the bytes of states that it reads from, and writes
                             // to, the pool `states`
  pronk_choice* choices;     // [segments], or null: the pass chooses no tokens. For programs that end with an LM head
} pronk_pass;

// Second stage of an LM head whose tokens are divided into clusters. The first stage is the last operation of the pass:
// its logits are one score for each cluster.
typedef struct {
  const pronk_op* op;                    // operation of the first cluster; the others differ in `w`
  const pronk_weights* const* clusters;  // [num_clusters] rows of the LM head; all have the same N, the cluster's size
  const int32_t* tokens;                 // [num_clusters, N] token of each row
  int32_t num_clusters;                  // number of clusters
  int32_t num_best;                      // number of clusters with the largest scores, whose rows get logits
  float* logits;                         // [num_best * N] overwritten with the logits of each pass
  int32_t* ids;                          // [steps, num_best * N] output: token of each logit
} pronk_clusters;

// A chain of tokens from a draft model: each token is sampled from one forward pass and is the only row of the next.
typedef struct {
  const pronk_sampling* sampling;  // options of the request
  int64_t position;    // position of the first token
  int32_t steps;       // maximum number of tokens
  const int32_t* ids;  // [vocab] token of each logit; null: 0, 1, …
  float* scores;       // [steps, vocab] output: `scores` of pronk_sample_draft for each token
  const pronk_clusters* clusters;  // second stage of the LM head, whose logits take the place of `vocab`; null: none
  // Called with each token; returning 0 ends the chain. With penalties, it adds the token to `sampling->counts`.
  int32_t (*on_token)(int32_t token, float confidence);
} pronk_chain;

PRONK_API int32_t pronk_version(void);
// Write the sizes in bytes of the eleven structures, so that a mismatch is found at load time.
PRONK_API void pronk_sizes(int32_t sizes[11]);
// Return the highest instruction set that the processor and the operating system support.
PRONK_API int32_t pronk_detect(void);
// Pack the rows of `source` [rows, K] (f32, bf16 or f16, as in w->type) into `data`, which must be filled with 0.
PRONK_API void pronk_pack(const pronk_weights* w, const void* source, int64_t stride, void* data, int32_t threads);
// Pack q8, q5 or q4 weights into `data`, filled with 0. `codes` [rows, K_pad] has one byte per code; `scale` and
// `minimum` are [rows, K_pad / group]; `minimum` may be null. w->scale_type must represent their numbers exactly; with
// zero points those of `scale`, and a minimum is -scale * zero point.
PRONK_API void pronk_pack_codes(const pronk_weights* w, const uint8_t* codes, const float* scale, const float* minimum,
                                void* data, int32_t threads);
// Pack blocks of a GGUF file into `data`, filled with 0: of all w->blocks blocks of 16 outputs those from `first` on,
// `blocks` of them. The `count` sources are stacked, with all rows of w; gated: the gate, then the up projection.
// `format` is the number of their type in llama.cpp: 2, 3, 6, 7, 8 for Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, 10 to 14 for Q2_K to
// Q6_K, and 23 for IQ4_XS. Returns 0; -1 if a scale is not finite; -2 if the sources do not have w's rows, w does not have
// the blocks, or the type is unknown.
PRONK_API int32_t pronk_pack_blocks(const pronk_weights* w, const pronk_blocks* source, int64_t count, int32_t format,
                                    int64_t first, int64_t blocks, void* data, int32_t threads);
// Quantize `source` [N, K] (f32, bf16 or f16, `stride` elements between rows) to 8 or 4 bits without minima: `codes`
// [N, K], `scale` [N, groups]. `tries`: number of ranges 1, 0.95, 0.9, … to try, see best_scale (round.inc). Returns 0,
// or -1 if memory is exhausted.
PRONK_API int32_t pronk_round(const void* source, int32_t type, int64_t N, int64_t K, int64_t stride, int32_t bits,
                              int64_t group, int32_t tries, uint8_t* codes, float* scale, int32_t threads, int32_t isa);
// Return the size in bytes of `data` of packed weights.
PRONK_API int64_t pronk_packed_size(const pronk_weights* w);
// Unpack the weights of output `row` to float, `out` [K].
PRONK_API void pronk_unpack(const pronk_weights* w, int64_t row, float* out);
// Run a program, then choose tokens by its logits. Returns 0; -1 if memory is exhausted; -2 if a shape or isa is
// unsupported or a row has no cache slot.
PRONK_API int32_t pronk_run(const pronk_op* ops, int64_t count, const pronk_pass* pass);
// Sample the target's token: the first argmax of logits / temperature + Gumbel noise(key, token), or of the logits at
// temperature 0. Returns -1 if a logit is not finite.
PRONK_API int32_t pronk_sample(const float* logits, int64_t vocab, float temperature, uint64_t key, int32_t isa);
// Follow the target's tokens from the root of a token tree, as long as children have them. `logits` [nodes, vocab] are
// those after each node, and `position` is that of the token after the root. `parents` [nodes] of a node that may not be
// accepted is -1; null: a chain. `path` [nodes] receives the accepted nodes, then the token after the last of them.
// Returns the number of accepted nodes; -1 if a logit is not finite; -2 if memory is exhausted. `counts` is changed during
// the call only.
PRONK_API int32_t pronk_verify(const pronk_sampling* sampling, const float* logits, int64_t vocab, int64_t position,
                               const int32_t* tokens, const int32_t* parents, int32_t nodes, int32_t* path, int32_t isa);
// Write the tokens that top-k (0: all), top-p (1: all) and min-p (its logarithm) keep to `ids` [vocab], in ascending
// order. `scores` [vocab] are logits divided by the temperature; those of banned tokens are minus infinity. Of equal
// scores, those of the first tokens are kept. Returns the number of tokens; -2 if memory is exhausted.
PRONK_API int64_t pronk_truncate(const float* scores, int64_t vocab, int64_t top_k, double top_p, float log_min_p,
                                 int64_t* ids, int32_t isa);
// Write the tokens of the `count` largest logits of each row to `ids` [rows, count], the largest first, and of equal logits
// the first token first. NaN counts as minus infinity. `logits` is [rows, vocab], and `largest` [rows, count] receives the
// logits of these tokens.
PRONK_API void pronk_likeliest(const float* logits, int64_t rows, int64_t vocab, int64_t count, int32_t* ids,
                               float* largest);
// Sample a draft token for a position: the argmax of `scores` [vocab], which are the logits by the request's options plus
// noise. The noise has less precision than in pronk_sample. `ids` [vocab] has the token of each logit; null: 0, 1, ….
// `confidence` receives the token's softmax probability over `scores`. A logit of -infinity bans its token. Returns -1 if
// all are banned or a logit is NaN or plus infinity; -2 if memory is exhausted.
PRONK_API int32_t pronk_sample_draft(const pronk_sampling* sampling, const float* logits, int64_t vocab,
                                     int64_t position, const int32_t* ids, float* scores, float* confidence,
                                     int32_t isa);
// Replace numbers by their exponentials or natural logarithms, with the bits of pronk.base.exact_math on every isa.
PRONK_API void pronk_exp(double* x, int64_t count, int32_t isa);
PRONK_API void pronk_log(double* x, int64_t count, int32_t isa);
// Return the sum of `x`, or of the exponentials of `x` minus `largest`, in the order of pronk.base.exact_math.total.
PRONK_API double pronk_total(const double* x, int64_t count, int32_t isa);
PRONK_API double pronk_exp_total(const float* x, int64_t count, float largest, int32_t isa);
// Run a program over the rows of one request, sample a draft token, run the program for this token, and so on, up to
// chain->steps times. The stream of each further run begins with the last row of the run before: a program that reads
// features continues with its own output. `pass->logits` is [1, vocab]. Returns the number of forward passes, or
// pronk_run's error code.
PRONK_API int32_t pronk_draft_chain(const pronk_op* ops, int64_t count, const pronk_pass* pass,
                                    const pronk_chain* chain);
// Copy the slots `source` [moves] to the slots `target` in `count` cache pools. Pool i has elements of `types[i]` and
// sizes `shapes[i]`: heads, slots, width. `kinds[i]` is its layout: 0 rows [heads, slots, width], 1 values
// (store_value), 2 keys (store_key). Returns 0, or -1 if memory is exhausted.
PRONK_API int32_t pronk_move(void* const* pools, const int32_t* types, const int32_t* kinds, const int64_t* shapes,
                             int64_t count, const int64_t* source, const int64_t* target, int64_t moves);
// Read `bytes` once on all threads, to measure memory bandwidth. Returns a sum, so that the read is not optimised away.
PRONK_API double pronk_read(const void* data, int64_t bytes, int32_t threads);
// Multiply 8-bit codes in registers, in `rounds` rounds of a fixed number of products per thread, to measure the limit
// of the instructions. Returns the number of products. AMX tiles are not used.
PRONK_API double pronk_multiply(int64_t rounds, int32_t isa, int32_t threads);
// Return the number of bytes that the library holds between forward passes.
PRONK_API int64_t pronk_workspace(void);
