// One forward pass: validation, workspace, positions and cache slots of all rows, then the program on all threads.
#include <stdlib.h>

#include "common.h"

using namespace pronk;

namespace {
// Memory of a forward pass. It is kept for the next pass, and replaced by a larger one when a pass needs more.
struct Arena {
  char* start = nullptr;
  int64_t size = 0, used = 0;

  bool begin(int64_t bytes) {
    used = 0;
    if (bytes <= size) return true;
    free(start);
    start = (char*)malloc((size_t)(bytes + 64));
    size = start ? bytes : 0;
    return start != nullptr;
  }
  char* allocate(int64_t bytes) {
    char* at = start + (64 - (uintptr_t)start % 64) % 64 + used;
    used += round_up(bytes, 64);
    return at;
  }
};

Arena arena;

// Row stride of buffer A or B for the widest output that the program writes to it.
int64_t buffer_stride(const pronk_op* ops, int64_t count, int buffer) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    int64_t op_width = 0;
    if (op->kind == PRONK_LINEAR && op->output == buffer) op_width = op->w->N;
    else if (op->kind == PRONK_ATTEND && buffer == PRONK_A) op_width = (int64_t)op->heads * op->head_dim;
    if (op_width > width) width = op_width;
  }
  return row_stride(width);
}

// Row stride of the widest GEMM input.
int64_t input_stride(const pronk_op* ops, int64_t count, int64_t hidden) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].w && ops[i].w->K > width) width = ops[i].w->K;
  return row_stride(width > hidden ? width : hidden);
}

// Number of elements of one row in State.q: the queries of the QKV operation with the most elements.
int64_t query_width(const pronk_op* ops, int64_t count) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_QKV && ops[i].heads * round_up(ops[i].head_dim, 16) > width)
      width = ops[i].heads * round_up(ops[i].head_dim, 16);
  return width;
}

// Fill in State.row, State.segment and State.path. `depth`, `contiguous` and `tail` are temporary arrays with an entry
// per node of the largest tree.
void place_rows(const pronk_pass* pass, const pronk_op* ops, int64_t count, Row* row, Segment* segment, int32_t* path,
                int32_t* depth, int32_t* contiguous, int32_t* tail) {
  int64_t block_size = 16, at = 0, used = 0;
  for (int64_t i = count - 1; i >= 0; i--)
    if (ops[i].block_size && !ops[i].cross) block_size = ops[i].block_size;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = pass->segment + i;
    segment[i].given = given;
    segment[i].first_row = (int32_t)at;
    segment[i].rows = given->nodes - given->computed;
    for (int32_t node = 0; node < given->nodes; node++) {
      int32_t parent = given->parents ? given->parents[node] : node - 1;
      depth[node] = parent < 0 ? 0 : depth[parent] + 1;
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
      row[at].slot = given->blocks ? (int32_t)(given->blocks[block] * block_size + slot_index % block_size) : 0;
      row[at].contiguous = contiguous[node];
      row[at].tail = tail[node];
      at++;
    }
  }
}

// Whether every request has a cache block for each slot that the operation reads or writes.
bool has_slots(const pronk_pass* pass, const pronk_op* op) {
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = (op->cross ? pass->cross_segment : pass->segment) + i;
    int64_t end = (int64_t)given->length + (op->cross ? 0 : given->nodes);
    if (end > ((int64_t)given->released + given->num_blocks) * op->block_size) return false;
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

// Bytes of State.scratch per thread: enough for Scratch (ops.inc) and for AttentionScratch (attention.inc).
int64_t scratch_size(const pronk_op* ops, int64_t count, const pronk_pass* pass, int64_t input, int64_t nodes) {
  int64_t blocks = CHUNK_BLOCKS, dims = 16, width = row_stride(pass->hidden);
  for (int64_t i = 0; i < count; i++) {
    int64_t padded = round_up(ops[i].head_dim, 16);
    if (padded / 16 > blocks) blocks = padded / 16;
    if (padded > dims) dims = padded;
  }
  int64_t rows = pass->rows > pass->num_wanted ? pass->rows : pass->num_wanted;
  if (rows > CHUNK_M + MAX_TILE_M) rows = CHUNK_M + MAX_TILE_M;
  int64_t products = 2 * width + input + MAX_TILE_M * 2 * input + rows * blocks * 16;
  int64_t attention = MAX_QUERIES * (2 * dims + 2 * KV_BLOCK + round_up(nodes + KV_BLOCK, KV_BLOCK) + KV_BLOCK);
  return round_up((products > attention ? products : attention) * 4, 256) + 256;
}
}  // namespace

int64_t pronk_workspace(void) { return arena.size; }

int32_t pronk_run(const pronk_op* ops, int64_t count, const pronk_pass* pass) {
  if (pass->isa < 0 || pass->isa > pronk_detect() || pass->threads < 1) return -2;
  const IsaKernels* isa = isa_kernels(pass->isa);
  bool has_bf16 = false, has_other = false;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    if (op->w && op->kind != PRONK_EMBED) (op->w->type == PRONK_BF16 ? has_bf16 : has_other) = true;
    if (op->head_dim % 2 || op->head_dim > MAX_HEAD_DIM || (op->block_size && op->block_size % 16)) return -2;
    if (op->keys && !op->collected && !has_slots(pass, op)) return -2;
  }
  bool bf16 = isa->bf16 && has_bf16 && !has_other;
  int64_t nodes = 0, path_size = 0;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* given = pass->segment + i;
    if (given->nodes > nodes) nodes = given->nodes;
    if (!given->parents) continue;
    // Upper bound of the size of State.path: each of the n nodes after the leading chain has a tail of at most n nodes.
    int64_t chain = 0;
    while (chain < given->nodes && given->parents[chain] == chain - 1) chain++;
    path_size += (given->nodes - chain) * (given->nodes - chain);
  }
  int64_t rows = pass->rows > pass->num_wanted ? pass->rows : pass->num_wanted, size = bf16 ? 2 : 4;
  int64_t a = buffer_stride(ops, count, PRONK_A), b = buffer_stride(ops, count, PRONK_B), q = query_width(ops, count);
  int64_t input = input_stride(ops, count, pass->hidden), scratch = scratch_size(ops, count, pass, input, nodes);
  int64_t bytes = pass->rows * (int64_t)sizeof(Row) + pass->segments * (int64_t)sizeof(Segment) + count * 4 +
                  path_size * 4 + nodes * 12 + rows * (a + b + input) * size + rows * q * 4 + scratch * pass->threads;
  PoolLock locked;  // also protects the arena, which only one forward pass at a time may use
  if (!arena.begin(bytes + 64 * 16)) return -1;
  State s;
  s.ops = ops;
  s.count = count;
  s.pass = pass;
  s.bf16 = bf16;
  s.quant = quant_kernels(pass->isa);
  s.row = (Row*)arena.allocate(pass->rows * (int64_t)sizeof(Row));
  s.segment = (Segment*)arena.allocate(pass->segments * (int64_t)sizeof(Segment));
  s.path = (int32_t*)arena.allocate(path_size * 4);
  s.next = (std::atomic<int32_t>*)arena.allocate(count * 4);
  for (int64_t i = 0; i < count; i++) s.next[i].store(0, std::memory_order_relaxed);
  int32_t* tree = (int32_t*)arena.allocate(nodes * 12);
  s.a = arena.allocate(rows * a * size);
  s.b = arena.allocate(rows * b * size);
  s.x = arena.allocate(rows * input * size);
  s.input_stride = input;
  s.q = (float*)arena.allocate(rows * q * 4);
  s.scratch = arena.allocate(scratch * pass->threads);
  s.scratch_bytes = scratch;
  place_rows(pass, ops, count, s.row, s.segment, s.path, tree, tree + nodes, tree + 2 * nodes);
  ProgramTask program_task = {&s, isa};
  pool_run(pass->threads, run_program, &program_task);
  return 0;
}
