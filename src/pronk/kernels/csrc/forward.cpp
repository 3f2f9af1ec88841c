// One forward pass: validation, workspace, positions and cache slots of all rows, then the program on all threads.
#include <stdlib.h>

#include "common.h"

using namespace pronk;

namespace {
const int64_t CACHE_LINE = 64;  // bytes; arrays of a forward pass begin with a cache line
enum Error { OUT_OF_MEMORY = -1, UNSUPPORTED = -2 };

// Memory of a forward pass. It is kept for the next pass, and replaced by a larger one when a pass needs more.
struct Arena {
  char* memory = nullptr;
  int64_t size = 0;

  // Return `bytes` bytes at the beginning of a cache line, or null. Memory that was returned before becomes invalid.
  char* reserve(int64_t bytes) {
    if (bytes > size) {
      free(memory);
      memory = (char*)malloc((size_t)(bytes + CACHE_LINE));
      size = memory ? bytes : 0;
    }
    return memory ? (char*)round_up((int64_t)memory, CACHE_LINE) : nullptr;
  }
};

Arena arena;

// Whether an operation of a program has experts.
bool has_experts(const pronk_op* op) { return op->kind == PRONK_ROUTE || op->mixing != PRONK_DENSE; }

// Elements of a buffer for the largest output that the program writes to it; `rows` is buffer_rows.
int64_t buffer_size(const pronk_op* ops, int64_t count, int buffer, int64_t rows, int64_t hidden) {
  int64_t size = 0;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    int64_t width = 0;
    bool is_product = op->kind == PRONK_LINEAR || op->kind == PRONK_HEADS;
    if (is_product && op->output == buffer) width = op->columns ? op->columns : op->w->N;
    else if (op->kind == PRONK_LAYER_INPUTS && buffer == PRONK_INPUTS) width = (int64_t)op->parts * op->columns;
    else if (op->kind == PRONK_ATTEND && buffer == PRONK_A) width = (int64_t)op->heads * op->value_dim;
    else if (op->kind == PRONK_NORM && op->output == buffer && op->columns) width = op->columns;
    else if ((op->kind == PRONK_NORM || op->kind == PRONK_EMBED) && op->output == buffer)
      width = op->parts ? op->parts * hidden : hidden;
    else if (op->kind == PRONK_CONVOLVE && buffer == PRONK_A) width = hidden;
    else if (op->kind == PRONK_RECUR && buffer == PRONK_A) width = (int64_t)op->heads * op->value_dim;
    int64_t op_size = rows * (op->mixing == PRONK_SPREAD ? op->per_row : 1) * row_stride(width);
    if (op_size > size) size = op_size;
  }
  return size;
}

// Largest sizes over all mixtures of experts of a program, for its buffers; zeros if a program has no mixture.
struct Mixture {
  int64_t experts = 0;  // number of experts
  int64_t per_row = 0;  // number of experts of a row
  int64_t outputs = 0;  // number of outputs N of a PRONK_GATHER operation
};

Mixture largest_mixture(const pronk_op* ops, int64_t count) {
  Mixture m;
  for (int64_t i = 0; i < count; i++) {
    if (!has_experts(ops + i)) continue;
    if (ops[i].experts > m.experts) m.experts = ops[i].experts;
    if (ops[i].per_row > m.per_row) m.per_row = ops[i].per_row;
    if (ops[i].mixing == PRONK_GATHER && ops[i].w->N > m.outputs) m.outputs = ops[i].w->N;
  }
  return m;
}

// Largest number of outputs of a matrix `down` of an adapter.
int64_t adapter_width(const pronk_op* ops, int64_t count) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    for (int32_t a = 0; a < ops[i].num_adapters; a++)
      if (ops[i].adapters[a].down && ops[i].adapters[a].down->N > width) width = ops[i].adapters[a].down->N;
  return width;
}

// Elements of a row of buffer SCORES: the most outputs of an operation that writes to it.
int64_t score_width(const pronk_op* ops, int64_t count) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_LINEAR && ops[i].output == PRONK_SCORES && ops[i].w->N > width) width = ops[i].w->N;
  return width;
}

// Elements of a row of buffer INPUTS; 0 for a program whose layers have no inputs.
int64_t inputs_width(const pronk_op* ops, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_LAYER_INPUTS) return (int64_t)ops[i].parts * ops[i].columns;
  return 0;
}

// Whether a linear layer that reads an input of a layer has as many outputs, and the program computes the inputs before.
bool has_layer_input(const pronk_op* ops, int64_t i) {
  const pronk_op* op = ops + i;
  if (op->mixing || op->wanted || op->layer_input < 0) return false;
  for (int64_t j = 0; j < i; j++)
    if (ops[j].kind == PRONK_LAYER_INPUTS) return op->layer_input <= ops[j].parts && op->w->N == ops[j].columns;
  return false;
}

// Row stride of the widest GEMM input.
int64_t input_stride(const pronk_op* ops, int64_t count, int64_t hidden) {
  int64_t width = adapter_width(ops, count);
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_LAYER_INPUTS) width = width > inputs_width(ops, count) ? width : inputs_width(ops, count);
    else if (ops[i].w && ops[i].w->K > width) width = ops[i].w->K;
    else if (ops[i].kind == PRONK_QKV && ops[i].heads * ops[i].head_dim > width) width = ops[i].heads * ops[i].head_dim;
  return row_stride(width > hidden ? width : hidden);
}

// Number of elements of one row in State.q: the queries of the operation with the most elements.
int64_t query_width(const pronk_op* ops, int64_t count) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++) {
    if (ops[i].kind != PRONK_QKV && ops[i].kind != PRONK_LATENT) continue;
    int64_t own = ops[i].heads * round_up(ops[i].head_dim, 16);
    if (own > width) width = own;
  }
  return width;
}

// Bytes of Scratch.input: rows of a GEMM of at most MAX_TILE_M rows, or of one head of a chunk of PRONK_HEADS. `rows` are
// those of a chunk.
int64_t input_bytes(const pronk_op* ops, int64_t count, int64_t rows, int64_t input_stride) {
  int64_t size = MAX_TILE_M * input_stride;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_HEADS && rows * row_stride(ops[i].w->K) > size) size = rows * row_stride(ops[i].w->K);
  return size * 4;
}

// Fill in State.row, State.segment and State.path. `depth`, `contiguous` and `tail` are temporary arrays with an entry
// per node of the largest tree; Row explains the last two.
void place_rows(const pronk_pass* pass, const pronk_op* ops, int64_t count, Row* row, Segment* segment, int32_t* path,
                int32_t* depth, int32_t* contiguous, int32_t* tail) {
  int64_t block_size = 16, at = 0, used = 0;  // a cache has one block size; 16 is for programs without a cache
  for (int64_t i = 0; i < count; i++)
    if (ops[i].block_size && !ops[i].cache) block_size = ops[i].block_size;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = pass->segment + i;
    segment[i].given = given;
    segment[i].first_row = (int32_t)at;
    segment[i].rows = given->nodes - given->computed;
    for (int32_t node = 0; node < given->nodes; node++) {
      int32_t parent = given->parents ? given->parents[node] : node - 1;
      depth[node] = parent < 0 ? 0 : depth[parent] + 1;
      // The path from the root is the nodes 0, 1, …, node, in this order, so its slots are in the order of the text.
      bool is_contiguous = parent < 0 || (contiguous[parent] == depth[node] && node == depth[node]);
      contiguous[node] = is_contiguous ? depth[node] + 1 : contiguous[parent];
      if (!is_contiguous) {
        // This node's tail is its parent's tail followed by this node.
        int32_t length = depth[parent] + 1 - contiguous[parent];
        for (int32_t j = 0; j < length; j++) path[used + j] = path[tail[parent] + j];
        tail[node] = (int32_t)used;
        used += length;
        path[used++] = node;
      } else {
        tail[node] = 0;
      }
      if (node < given->computed) continue;
      int64_t slot_index = given->length + node, block = slot_index / block_size - given->released;
      row[at].position = given->length + depth[node];
      // A model that stores no keys needs no blocks.
      bool has_slot = block < given->num_blocks;
      row[at].slot = has_slot ? (int32_t)(given->blocks[block] * block_size + slot_index % block_size) : 0;
      row[at].contiguous = contiguous[node];
      row[at].tail = tail[node];
      row[at].adapter = given->adapter;
      at++;
    }
  }
}

// Steps of a pass in recurrent layers, at most: one per row and per token that is replayed.
int64_t count_steps(const pronk_pass* pass) {
  int64_t steps = 0;
  if (!pass->recurrence) return 0;
  for (int64_t i = 0; i < pass->segments; i++)
    steps += (int64_t)pass->recurrence[i].replayed + pass->segment[i].nodes;
  return steps;
}

// Fill in State.step: for each segment the replayed tokens, the certain ones, then the other nodes depth first, without
// those that no row follows. Return the largest level. `child`, `sibling` and `level` are temporary arrays with an entry
// per node of the largest tree.
int64_t plan_steps(const pronk_pass* pass, Segment* segment, Step* step, int32_t* child, int32_t* sibling,
                   int32_t* level) {
  int64_t at = 0;
  int32_t levels = 0;
  for (int64_t g = 0; g < pass->segments; g++) {
    const pronk_segment* given = pass->segment + g;
    const pronk_recurrence* r = pass->recurrence + g;
    int32_t first = r->absorbed + r->certain, copy = 0;
    segment[g].first_step = (int32_t)at;
    for (int32_t i = 0; i < r->replayed + r->certain; i++) {
      bool is_replayed = i < r->replayed;
      int32_t row = is_replayed ? -1 : segment[g].first_row + i - r->replayed;
      step[at] = {row, is_replayed ? r->updates[i] : -1, i ? 0 : -1, 0, -1};
      if (copy < r->num_copies && r->copies[2 * copy] == i + 1) step[at].copy = r->copies[2 * copy++ + 1];
      at++;
    }
    int32_t base = r->replayed + r->certain ? 0 : -1, root = -1;
    for (int32_t node = first; node < given->nodes; node++) child[node] = -1;
    for (int32_t node = given->nodes - 1; node >= first; node--) {
      if (node < given->computed && child[node] < 0) continue;
      int32_t parent = given->parents ? given->parents[node] : node - 1;
      int32_t* list = parent < first ? &root : child + parent;
      sibling[node] = *list;
      *list = node;
    }
    // `node` is the next step; the state before it is at level `from`. A last child overwrites its parent's state.
    int32_t node = root;
    while (node >= 0) {
      int32_t parent = given->parents ? given->parents[node] : node - 1;
      int32_t from = parent < first ? base : level[parent];
      int32_t to = parent < first ? 1 : sibling[node] < 0 ? from : from + 1;
      int32_t row = node < given->computed ? -1 : segment[g].first_row + node - given->computed;
      step[at++] = {row, r->updates[r->replayed + node - first], from, child[node] < 0 ? -1 : to, -1};
      level[node] = to;
      if (to > levels) levels = to;
      if (child[node] >= 0) {
        node = child[node];
        continue;
      }
      while (node >= first && sibling[node] < 0) node = given->parents ? given->parents[node] : node - 1;
      node = node >= first ? sibling[node] : -1;
    }
    segment[g].steps = (int32_t)(at - segment[g].first_step);
  }
  return levels;
}

// Upper bound of the largest level of a step: of a chain 1, of a tree the number of its nodes.
int64_t max_levels(const pronk_pass* pass) {
  int64_t levels = 1;
  for (int64_t i = 0; pass->recurrence && i < pass->segments; i++)
    if (pass->segment[i].parents && pass->segment[i].nodes > levels) levels = pass->segment[i].nodes;
  return levels;
}

// Whether the caller's pools have the layout of RecurrentSizes, the states and updates of all requests are in them, and
// the nodes after the certain ones hang below the last of these.
bool has_states(const pronk_pass* pass, const pronk_op* op) {
  if (!pass->recurrence || !op->states || !op->inputs || !op->updates) return false;
  RecurrentSizes z(op);
  if (op->state_size != z.heads * z.state || op->update_size != z.update) return false;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_recurrence* r = pass->recurrence + i;
    const pronk_segment* given = pass->segment + i;
    int32_t first = r->absorbed + r->certain;
    if (r->slot < 0 || r->slot >= op->slots || r->absorbed > given->computed || first > given->nodes) return false;
    if (r->certain && (!r->keeps || r->absorbed != given->computed)) return false;
    for (int32_t j = 0; j < r->replayed + given->nodes - first; j++)
      if (r->updates[j] < 0 || r->updates[j] >= op->num_updates) return false;
    for (int32_t j = 0; j < r->num_copies; j++)
      if (!r->keeps || r->copies[2 * j + 1] < 0 || r->copies[2 * j + 1] >= op->slots) return false;
    for (int32_t node = first; node < given->nodes; node++)
      if (given->parents && given->parents[node] < first - 1) return false;
  }
  return true;
}

// Whether every request has a cache block for each slot that the operation reads or writes.
bool has_slots(const pronk_pass* pass, const pronk_op* op) {
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = cached_tokens(pass, op, i);
    int64_t end = (int64_t)given->length + given->nodes;
    if (end > ((int64_t)given->released + given->num_blocks) * op->block_size) return false;
  }
  return true;
}

// Whether any row has an adapter.
bool has_adapted_rows(const pronk_pass* pass) {
  for (int64_t i = 0; i < pass->segments; i++)
    if (pass->segment[i].adapter >= 0) return true;
  return false;
}

// Whether the operation has the adapters of all rows, in shapes that fit its matrix.
bool has_valid_adapters(const pronk_pass* pass, const pronk_op* op) {
  if (!op->num_adapters) return true;
  if (!op->adapters || !op->w || op->wanted || op->mixing != PRONK_DENSE) return false;
  for (int64_t i = 0; i < pass->segments; i++)
    if (pass->segment[i].adapter >= op->num_adapters) return false;
  for (int32_t i = 0; i < op->num_adapters; i++) {
    const pronk_adapter* a = op->adapters + i;
    if (!a->down) continue;
    if (a->down->type != PRONK_F32 || a->up->type != PRONK_F32 || a->down->gated) return false;
    if (a->down->K != op->w->K || a->up->K > a->down->N || a->up->blocks != op->w->blocks) return false;
  }
  return true;
}

// Whether the matrices of the heads consist of whole blocks, and the input has columns for each of them.
bool has_valid_heads(const pronk_op* op) {
  const pronk_weights* w = op->w;
  if (!w || w->gated || w->unit % 16 || w->N % w->unit || op->num_adapters) return false;
  return op->input_columns >= w->N / w->unit * w->K && (op->input == PRONK_A || op->input == PRONK_B);
}

// Whether the pairs of a bias of keys are in RoPE's part of a head, and are rotated by positions.
bool has_valid_key_bias(const pronk_pass* pass, const pronk_op* op) {
  if (!op->key_bias) return true;
  if (op->rope < 1 || pass->rope_by_row[op->rope - 1]) return false;
  if (op->rope_dim > op->head_dim || op->num_bias_pairs < 1 || op->num_bias_pairs > op->rope_dim / 2) return false;
  for (int32_t i = 0; i < op->num_bias_pairs; i++) {
    if (op->bias_pairs[i] < 0 || op->bias_pairs[i] >= op->rope_dim / 2) return false;
  }
  return true;
}

struct ProgramTask {
  State* state;
  const IsaKernels* isa;
};

void run_program(void* argument, int thread, int threads) {
  ProgramTask* program_task = (ProgramTask*)argument;
  program_task->isa->execute(program_task->state, thread, threads);
}

// The choices of a pass. Each thread takes the next request until none is left.
struct ChoiceTask {
  const pronk_pass* pass;
  int64_t vocab;
  std::atomic<int64_t> next;
};

void choose_tokens(void* argument, int, int) {
  ChoiceTask* task = (ChoiceTask*)argument;
  const pronk_pass* pass = task->pass;
  for (int64_t i; (i = task->next.fetch_add(1, std::memory_order_relaxed)) < pass->segments;) {
    pronk_choice* choice = pass->choices + i;
    if (!choice->sampling) continue;
    const float* logits = pass->logits + choice->first * task->vocab;
    choice->accepted = pronk_verify(choice->sampling, logits, task->vocab, choice->position, choice->tokens,
                                    choice->parents, choice->nodes, choice->path, pass->isa);
  }
}

// Choose the tokens of all requests by the logits of the program's last operation.
void run_choices(const pronk_op* head, const pronk_pass* pass) {
  ChoiceTask task = {pass, head->w->N, {0}};
  int64_t choices = 0;
  for (int64_t i = 0; i < pass->segments; i++) choices += pass->choices[i].sampling != nullptr;
  pool_share(choices < pass->threads ? (int)choices : pass->threads, choose_tokens, &task);
}

// Rows of the buffers for inputs and outputs of GEMM, which computes all rows or the requested ones (op_num_rows).
int64_t buffer_rows(const pronk_pass* pass) {
  return pass->rows > pass->num_wanted ? pass->rows : pass->num_wanted;
}

// Upper bound of the rows of a chunk of a GEMM.
int64_t chunk_rows(const pronk_pass* pass) {
  int64_t rows = buffer_rows(pass);
  return rows > CHUNK_M + MAX_TILE_M ? CHUNK_M + MAX_TILE_M : rows;
}

// Floats of State.scratch per thread that PRONK_MIX and PRONK_RECUR use.
int64_t recurrent_scratch(const pronk_op* op, int64_t levels) {
  RecurrentSizes z(op);
  if (op->kind == PRONK_MIX) return (op->taps + 1) * round_up(z.channels, 16);
  if (op->kind != PRONK_RECUR) return 0;
  return (levels + 2) * z.state + MAX_STEPS * (2 * round_up(z.key_dim, 16) + 3 * z.padded_dim);
}

// Bytes of State.scratch per thread. GEMM (Scratch in ops.inc), attention (AttentionScratch) and recurrent layers take
// turns in using it.
int64_t scratch_size(const pronk_op* ops, int64_t count, const pronk_pass* pass, int64_t input, int64_t input_bytes,
                     int64_t nodes, int64_t levels) {
  int64_t blocks = CHUNK_BLOCKS, dims = 16;
  for (int64_t i = 0; i < count; i++) {
    int64_t padded = round_up(ops[i].head_dim, 16);
    if (padded / 16 > blocks) blocks = padded / 16;
    if (padded > dims) dims = padded;
  }
  int64_t gemm = 3 * input +                        // row, normed, ordered
                 MAX_TILE_M * input +               // tile_rows
                 input_bytes / 4 +                  // input
                 chunk_rows(pass) * blocks * 16;    // chunk
  int64_t attention = MAX_QUERIES * (dims + 3 * KV_BLOCK + round_up(nodes + KV_BLOCK, KV_BLOCK) + KV_BLOCK) +
                      3 * 16 * dims;                // queries, rows, biased_queries
  int64_t largest = gemm > attention ? gemm : attention;
  for (int64_t i = 0; i < count; i++) {
    int64_t recurrent = recurrent_scratch(ops + i, levels);
    if (recurrent > largest) largest = recurrent;
  }
  return round_up(largest * 4, 256) + 256;
}

// Whether a row can choose its experts, and its groups of experts.
bool has_valid_groups(const pronk_op* op) {
  if (op->groups < 1 || op->experts % op->groups) return false;
  int64_t size = op->experts / op->groups;
  if (op->row_groups < 1 || op->row_groups > op->groups || op->per_row > op->row_groups * size) return false;
  return op->groups == 1 || (op->group_best >= 1 && op->group_best <= size);
}

// Whether the instruction set exists here, and the shapes and cache slots fit every operation.
bool is_valid(const pronk_op* ops, int64_t count, const pronk_pass* pass) {
  if (pass->isa < 0 || pass->isa > pronk_detect() || pass->threads < 1) return false;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    bool is_recurrent = op->kind == PRONK_MIX || op->kind == PRONK_RECUR;
    if (op->head_dim % 2 && !is_recurrent) return false;
    if (op->head_dim > MAX_HEAD_DIM || (op->block_size && op->block_size % 16)) return false;
    if (has_experts(op) && (op->experts > MAX_EXPERTS || op->per_row < 1 || op->per_row > op->experts)) return false;
    if (op->kind == PRONK_ROUTE && !has_valid_groups(op)) return false;
    if (!has_valid_adapters(pass, op)) return false;
    if (is_recurrent && !has_states(pass, op)) return false;
    if (op->kind == PRONK_HEADS && !has_valid_heads(op)) return false;
    if (op->kind == PRONK_LATENT && op->value_dim + op->rope_dim != op->head_dim) return false;
    if (op->kind == PRONK_ATTEND && (op->value_dim < 1 || op->value_dim > op->head_dim)) return false;
    if (op->layer_input && !has_layer_input(ops, i)) return false;
    if (op->kind == PRONK_RECUR && op->rule == PRONK_MAMBA2 && !op->skip) return false;
    if (op->kind == PRONK_MIX && (op->taps < 1 || op->taps > MAX_TAPS)) return false;
    if (op->kind == PRONK_CONVOLVE && (op->taps < 1 || op->taps > MAX_TAPS)) return false;
    if (op->collected && !pass->collected) return false;
    if (op->output == PRONK_SLOTS && (!op->keys || op->residual || op->wanted)) return false;
    if (op->cache < 0 || op->cache > pass->num_others) return false;
    bool uses_cache = op->keys || op->values;
    if (uses_cache && !has_slots(pass, op)) return false;
    if (!has_valid_key_bias(pass, op)) return false;
  }
  return true;
}

// Whether activations between operations are bf16: only if every GEMM takes bf16 rows, since others take float32 rows. A
// router does not count: it widens its input. Nor does a feature of a drafter: the bits of the model do not depend on it.
bool has_bf16_activations(const pronk_op* ops, int64_t count, const IsaKernels* isa) {
  bool any = false;
  for (int64_t i = 0; i < count; i++) {
    bool is_table = ops[i].kind == PRONK_EMBED || ops[i].kind == PRONK_LAYER_INPUTS;
    if (!ops[i].w || is_table || ops[i].output == PRONK_SCORES || ops[i].output == PRONK_SLOTS)
      continue;
    if (ops[i].w->type != PRONK_BF16) return false;
    any = true;
  }
  return isa->bf16 && any;
}

// Nodes of the largest tree.
int64_t max_nodes(const pronk_pass* pass) {
  int64_t nodes = 0;
  for (int64_t i = 0; i < pass->segments; i++)
    if (pass->segment[i].nodes > nodes) nodes = pass->segment[i].nodes;
  return nodes;
}

// Upper bound of the size of State.path: each of the n nodes after a tree's main chain has a tail of at most n nodes.
int64_t path_size(const pronk_pass* pass) {
  int64_t size = 0;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = pass->segment + i;
    if (!given->parents) continue;
    int64_t chain = 0;
    while (chain < given->nodes && given->parents[chain] == chain - 1) chain++;
    size += (given->nodes - chain) * (given->nodes - chain);
  }
  return size;
}

// An array of a forward pass: the pointer to set, and its size in bytes.
struct Array {
  void** pointer;
  int64_t bytes;
};
}  // namespace

int64_t pronk_workspace(void) { return arena.size; }

int32_t pronk_run(const pronk_op* ops, int64_t count, const pronk_pass* pass) {
  if (!is_valid(ops, count, pass)) return UNSUPPORTED;
  const IsaKernels* isa = isa_kernels(pass->isa, pass->fast);
  State s;
  s.ops = ops;
  s.count = count;
  s.pass = pass;
  s.bf16 = has_bf16_activations(ops, count, isa);
  s.quant = quant_kernels(pass->isa);
  int64_t rows = buffer_rows(pass), tree = max_nodes(pass), size = s.bf16 ? 2 : 4, hidden = pass->hidden;
  Mixture mixture = largest_mixture(ops, count);
  int64_t pairs = pass->rows * mixture.per_row, most_rows = pairs > rows ? pairs : rows;
  s.input_stride = input_stride(ops, count, pass->hidden);
  s.input_bytes = input_bytes(ops, count, chunk_rows(pass), s.input_stride);
  s.inputs_width = inputs_width(ops, count);
  s.scratch_bytes = scratch_size(ops, count, pass, s.input_stride, s.input_bytes, tree, max_levels(pass));
  s.adapted = has_adapted_rows(pass);
  s.low_stride = row_stride(adapter_width(ops, count));
  int32_t* nodes;  // temporary: three entries per node of the largest tree
  const Array arrays[] = {
      {(void**)&s.row, pass->rows * (int64_t)sizeof(Row)},
      {(void**)&s.segment, pass->segments * (int64_t)sizeof(Segment)},
      {(void**)&s.path, path_size(pass) * 4},
      {(void**)&s.next, count * 4},
      {(void**)&nodes, 3 * tree * 4},
      {(void**)&s.step, count_steps(pass) * (int64_t)sizeof(Step)},
      {&s.a, buffer_size(ops, count, PRONK_A, rows, hidden) * size},
      {&s.b, buffer_size(ops, count, PRONK_B, rows, hidden) * size},
      {&s.c, buffer_size(ops, count, PRONK_C, rows, hidden) * size},
      {(void**)&s.inputs, pass->rows * s.inputs_width * 4},
      {&s.x, most_rows * s.input_stride * (pairs ? 4 : size)},
      {(void**)&s.scores, pass->rows * score_width(ops, count) * 4},
      {(void**)&s.choice, pairs * 4},
      {(void**)&s.share, pairs * 4},
      {(void**)&s.pair, pairs * (int64_t)sizeof(Pair)},
      {(void**)&s.first, (mixture.experts + 1) * 4},
      {(void**)&s.sum, (pairs ? pass->rows : 0) * row_stride(mixture.outputs) * 4},
      {(void**)&s.low, s.adapted ? pass->rows * s.low_stride * 4 : 0},
      {(void**)&s.q, rows * query_width(ops, count) * 4},
      {(void**)&s.scratch, s.scratch_bytes * pass->threads},
  };
  int64_t bytes = 0;
  for (const Array& array : arrays) bytes += round_up(array.bytes, CACHE_LINE);
  PoolLock locked;  // also protects the arena, which only one forward pass at a time may use
  char* memory = arena.reserve(bytes);
  if (!memory) return OUT_OF_MEMORY;
  for (const Array& array : arrays) {
    *array.pointer = memory;
    memory += round_up(array.bytes, CACHE_LINE);
  }
  for (int64_t i = 0; i < count; i++) s.next[i].store(0, std::memory_order_relaxed);
  place_rows(pass, ops, count, s.row, s.segment, s.path, nodes, nodes + tree, nodes + 2 * tree);
  s.levels = pass->recurrence ? plan_steps(pass, s.segment, s.step, nodes, nodes + tree, nodes + 2 * tree) : 0;
  ProgramTask program_task = {&s, isa};
  pool_run(pass->threads, run_program, &program_task);
  for (int64_t i = 0; pass->recurrence && i < pass->segments; i++) {
    const pronk_recurrence* r = pass->recurrence + i;
    if (r->keeps) *r->length += r->replayed + r->certain;
  }
  if (pass->choices) run_choices(ops + count - 1, pass);
  return 0;
}
