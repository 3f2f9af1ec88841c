// The interface: choosing the instruction set, preparing a pass, packing weights, moving rows.
#include "pronk.h"

#include <stdlib.h>
#include <string.h>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "common.h"
#include "team.h"

using namespace pronk;

namespace {

#if defined(__x86_64__) || defined(_M_X64)
void cpuid(uint32_t leaf, uint32_t sub, uint32_t out[4]) {
  __asm__ __volatile__("cpuid" : "=a"(out[0]), "=b"(out[1]), "=c"(out[2]), "=d"(out[3]) : "a"(leaf), "c"(sub));
}

bool amx_allowed() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
#else
  return false;  // Windows and macOS give no leave to ask for
#endif
}

int detect() {
  uint32_t r[4], low = 0, high = 0;
  cpuid(0, 0, r);
  if (r[0] < 7) return PRONK_PORTABLE;
  cpuid(1, 0, r);
  bool saves = r[2] >> 27 & 1, fma = r[2] >> 12 & 1, half = r[2] >> 29 & 1;
  if (!saves || !fma || !half) return PRONK_PORTABLE;
  __asm__ __volatile__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  cpuid(7, 0, r);
  if ((low & 6) != 6 || !(r[1] >> 5 & 1)) return PRONK_PORTABLE;
  const uint32_t wanted = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;  // F, DQ, BW, VL
  if ((low & 0xe6) != 0xe6 || (r[1] & wanted) != wanted) return PRONK_AVX2;
#if defined(PRONK_EMULATE)
  return PRONK_AMX;
#endif
  bool tiles = (r[3] >> 24 & 1) && (r[3] >> 22 & 1) && (r[3] >> 25 & 1) && (low >> 17 & 3) == 3;
  uint32_t most = r[0];
  if (most < 1) return PRONK_AVX512;
  cpuid(7, 1, r);
  if (!(r[0] >> 5 & 1)) return PRONK_AVX512;
  return tiles && amx_allowed() ? PRONK_AMX : PRONK_AVX512_BF16;
}

// Whether a processor with AVX-512 has its 8-bit dot product.
bool has_vnni() {
  uint32_t r[4];
  cpuid(7, 0, r);
  return r[2] >> 11 & 1;
}
#else
int detect() { return PRONK_PORTABLE; }
bool has_vnni() { return false; }
#endif

const Table* table(int isa) {
  switch (isa) {
#if defined(__x86_64__) || defined(_M_X64)
    case PRONK_AVX2: return &table_avx2;
    case PRONK_AVX512: return &table_avx512;
    case PRONK_AVX512_BF16: return &table_avx512_bf16;
    case PRONK_AMX: return &table_amx;
#endif
    default: return &table_portable;
  }
}

const Coded* coded(int isa) {
#if defined(__x86_64__) || defined(_M_X64)
  static const bool vnni = has_vnni();
  if (isa >= PRONK_AVX512 && vnni) return &coded_vnni;
#endif
  return table(isa)->coded;
}

// Memory that is kept between passes and only grows.
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
  char* take(int64_t bytes) {
    char* at = start + (64 - (uintptr_t)start % 64) % 64 + used;
    used += round_up(bytes, 64);
    return at;
  }
};

Arena arena;

struct Entered {
  Entered() { team_enter(); }
  ~Entered() { team_leave(); }
};

int64_t widest(const pronk_op* ops, int64_t count, int buffer) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    int64_t own = op->kind == PRONK_LINEAR && op->output == buffer ? op->w->n
                  : op->kind == PRONK_ATTEND && buffer == PRONK_A  ? (int64_t)op->heads * op->head_dim
                                                                   : 0;
    if (own > width) width = own;
  }
  return row_stride(width);
}

// Of the longest row that is multiplied.
int64_t widest_input(const pronk_op* ops, int64_t count, int64_t hidden) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].w && ops[i].w->k > width) width = ops[i].w->k;
  return row_stride(width > hidden ? width : hidden);
}

int64_t query_width(const pronk_op* ops, int64_t count) {
  int64_t width = 0;
  for (int64_t i = 0; i < count; i++)
    if (ops[i].kind == PRONK_QKV && ops[i].heads * round_up(ops[i].head_dim, 16) > width)
      width = ops[i].heads * round_up(ops[i].head_dim, 16);
  return width;
}

// Where every row stands. `path` has room for what branches; returns how much it took.
int64_t place_rows(const pronk_pass* pass, const pronk_op* ops, int64_t count, Row* row, Segment* segment,
                   int32_t* path, int32_t* depth, int32_t* straight, int32_t* tail) {
  int64_t block_size = 16, at = 0, used = 0;
  for (int64_t i = count - 1; i >= 0; i--)
    if (ops[i].block_size && !ops[i].cross) block_size = ops[i].block_size;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* g = pass->segment + i;
    segment[i].given = g;
    segment[i].first_row = (int32_t)at;
    segment[i].rows = g->nodes - g->computed;
    for (int32_t node = 0; node < g->nodes; node++) {
      int32_t parent = g->parents ? g->parents[node] : node - 1;
      depth[node] = parent < 0 ? 0 : depth[parent] + 1;
      bool natural = parent < 0 || (straight[parent] == depth[node] && node == depth[node]);
      straight[node] = natural ? depth[node] + 1 : straight[parent];
      if (!natural) {
        // The parent's bent part and the node itself.
        int32_t length = depth[parent] + 1 - straight[parent];
        for (int32_t j = 0; j < length; j++) path[used + j] = path[tail[parent] + j];
        tail[node] = (int32_t)used;
        used += length;
        path[used++] = node;
      } else {
        tail[node] = 0;
      }
      if (node < g->computed) continue;
      int64_t place = g->length + node, block = place / block_size - g->released;
      row[at].position = g->length + depth[node];
      row[at].slot = g->blocks ? (int32_t)(g->blocks[block] * block_size + place % block_size) : 0;
      row[at].straight = straight[node];
      row[at].tail = tail[node];
      at++;
    }
  }
  return used;
}

// Whether every request has blocks for its rows, and the cache beside for all that is read of it.
bool is_held(const pronk_pass* pass, const pronk_op* op) {
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* g = pass->segment + i;
    if ((int64_t)g->length + g->nodes > ((int64_t)g->released + g->held) * op->block_size) return false;
  }
  return true;
}

bool beside_is_held(const pronk_pass* pass, const pronk_op* op) {
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* g = pass->beside + i;
    if (g->length > ((int64_t)g->released + g->held) * op->block_size) return false;
  }
  return true;
}

float coded_weight(const pronk_weights* w, int64_t block, int64_t lane, int64_t k) {
  const char* line = (const char*)w->data + (block * (w->kp / w->group) + k / w->group) * coded_line(w);
  const uint8_t* codes = (const uint8_t*)line + (w->minima ? 128 : 64) + lane * 4;
  float scale = ((const float*)line)[lane];
  k %= w->group;
  int32_t code = w->type == PRONK_Q8 ? codes[k / 4 * 64 + k % 4] : codes[k / 8 * 64 + k % 4] >> (k & 4) & 15;
  if (!w->minima) return scale * (float)(code - (w->type == PRONK_Q8 ? 128 : 8));
  return scale * (float)code + ((const float*)line)[16 + lane];
}

struct Job {
  State* state;
  const Table* table;
};

void work(void* argument, int thread, int threads) {
  Job* job = (Job*)argument;
  job->table->execute(job->state, thread, threads);
}

struct Read {
  const char* data;
  int64_t bytes;
  double sum[256];
};

void read_part(void* argument, int thread, int threads) {
  Read* read = (Read*)argument;
  const uint64_t* p = (const uint64_t*)read->data;
  int64_t lines = read->bytes / 64, from = lines * thread / threads * 8, to = lines * (thread + 1) / threads * 8;
  uint64_t a[8] = {0};
  for (int64_t i = from; i < to; i += 8) {
    __builtin_prefetch(p + i + 256);
    for (int j = 0; j < 8; j++) a[j] += p[i + j];
  }
  uint64_t all = 0;
  for (int j = 0; j < 8; j++) all += a[j];
  read->sum[thread] = (double)all;
}

}  // namespace

int64_t pronk::scratch_size(const pronk_op* ops, int64_t count, const pronk_pass* pass, int64_t input, int64_t nodes) {
  int64_t heads = CHUNK_BLOCKS, dims = 16, width = row_stride(pass->hidden);
  for (int64_t i = 0; i < count; i++) {
    int64_t own = round_up(ops[i].head_dim, 16);
    if (own / 16 > heads) heads = own / 16;
    if (own > dims) dims = own;
  }
  int64_t rows = pass->rows > pass->num_wanted ? pass->rows : pass->num_wanted;
  if (rows > CHUNK_ROWS + MOST_TILE_ROWS) rows = CHUNK_ROWS + MOST_TILE_ROWS;
  int64_t products = 2 * width + input + MOST_TILE_ROWS * 2 * input + rows * heads * 16;
  int64_t attention = MOST_QUERIES * (2 * dims + 2 * KEYS + round_up(nodes + KEYS, KEYS) + KEYS);
  return round_up((products > attention ? products : attention) * 4, 256) + 256;
}

int32_t pronk_version(void) { return PRONK_VERSION; }

void pronk_sizes(int32_t sizes[6]) {
  sizes[0] = sizeof(pronk_weights);
  sizes[1] = sizeof(pronk_op);
  sizes[2] = sizeof(pronk_segment);
  sizes[3] = sizeof(pronk_pass);
  sizes[4] = sizeof(pronk_chain);
  sizes[5] = sizeof(pronk_sprouts);
}

int32_t pronk_detect(void) {
  static int found = detect();
  return found;
}

int64_t pronk_workspace(void) { return arena.size; }

namespace {
struct Pack {
  const pronk_weights* w;
  const void* source;
  int64_t stride;
  void* data;
  const float *scale, *minimum;
};

// The first source row of a block, and how many rows it has.
int64_t block_rows(const pronk_weights* w, int64_t block, int64_t* count) {
  int64_t first, left;
  if (w->gated) {
    first = block / 2 * 16;
    left = w->n - first;
    first += block % 2 * w->n;
  } else {
    int64_t per_unit = round_up(w->unit, 16) / 16, inside = block % per_unit * 16;
    first = block / per_unit * w->unit + inside;
    left = w->unit - inside;
  }
  *count = left < 16 ? left : 16;
  return first;
}

void pack_part(void* argument, int thread, int threads) {
  const Pack* p = (const Pack*)argument;
  const pronk_weights* w = p->w;
  for (int64_t b = w->blocks * thread / threads; b < w->blocks * (thread + 1) / threads; b++) {
    int64_t count, first = block_rows(w, b, &count);
    for (int64_t k0 = 0; k0 < w->k; k0 += 64) {
      int64_t k1 = k0 + 64 < w->k ? k0 + 64 : w->k;
      for (int64_t i = 0; i < count; i++) {
        int64_t at = (first + i) * p->stride;
        if (w->type == PRONK_BF16) {
          const uint16_t* from = (const uint16_t*)p->source + at;
          uint16_t* to = (uint16_t*)p->data + b * w->kp * 16;
          for (int64_t k = k0; k < k1; k++) to[k / 2 * 32 + i * 2 + k % 2] = from[k];
        } else if (w->type == PRONK_F16) {
          const uint16_t* from = (const uint16_t*)p->source + at;
          uint16_t* to = (uint16_t*)p->data + b * w->k * 16;
          for (int64_t k = k0; k < k1; k++) to[k * 16 + i] = from[k];
        } else {
          const float* from = (const float*)p->source + at;
          float* to = (float*)p->data + b * w->k * 16;
          for (int64_t k = k0; k < k1; k++) to[k * 16 + i] = from[k];
        }
      }
    }
  }
}

void pack_codes_part(void* argument, int thread, int threads) {
  const Pack* p = (const Pack*)argument;
  const pronk_weights* w = p->w;
  int64_t line = coded_line(w), groups = w->kp / w->group, head = w->minima ? 128 : 64;
  for (int64_t b = w->blocks * thread / threads; b < w->blocks * (thread + 1) / threads; b++) {
    int64_t count, first = block_rows(w, b, &count);
    for (int64_t g = 0; g < groups; g++) {
      char* to = (char*)p->data + (b * groups + g) * line;
      for (int64_t i = 0; i < count; i++) {
        ((float*)to)[i] = p->scale[(first + i) * groups + g];
        if (w->minima) ((float*)to)[16 + i] = p->minimum[(first + i) * groups + g];
        const uint8_t* from = (const uint8_t*)p->source + (first + i) * p->stride + g * w->group;
        uint8_t* q = (uint8_t*)to + head + i * 4;
        if (w->type == PRONK_Q8)
          for (int64_t k = 0; k < w->group; k++) q[k / 4 * 64 + k % 4] = from[k];
        else
          for (int64_t k = 0; k < w->group; k++)
            q[k / 8 * 64 + k % 4] = (uint8_t)(q[k / 8 * 64 + k % 4] | (from[k] & 15) << (k & 4));
      }
    }
  }
}
}  // namespace

namespace {
struct Round {
  const void* source;
  int32_t type;
  int64_t rows, k, stride;
  int32_t bits;
  int64_t group;
  int32_t tries;
  uint8_t* codes;
  float *scale, *lines;  // a row of float32 for each thread, where the source has others
  RoundFunction round;
};

void round_part(void* argument, int thread, int threads) {
  const Round* r = (const Round*)argument;
  int64_t groups = (r->k + r->group - 1) / r->group;
  for (int64_t row = r->rows * thread / threads; row < r->rows * (thread + 1) / threads; row++) {
    const float* x = (const float*)r->source + row * r->stride;
    if (r->type != PRONK_F32) {
      const uint16_t* from = (const uint16_t*)r->source + row * r->stride;
      float* line = r->lines + thread * r->k;
      bool bf16 = r->type == PRONK_BF16;
      for (int64_t k = 0; k < r->k; k++) line[k] = bf16 ? bf16_to_float(from[k]) : half_to_float(from[k]);
      x = line;
    }
    r->round(x, r->k, r->bits, r->group, r->tries, r->codes + row * r->k, r->scale + row * groups);
  }
}
}  // namespace

int32_t pronk_round(const void* source, int32_t type, int64_t rows, int64_t k, int64_t stride, int32_t bits,
                    int64_t group, int32_t tries, uint8_t* codes, float* scale, int32_t threads, int32_t isa) {
  float* lines = nullptr;
  if (type != PRONK_F32 && !(lines = (float*)malloc((size_t)(threads * k) * 4))) return -1;
  RoundFunction round = table(isa)->round;
#if defined(__x86_64__) || defined(_M_X64)
  if (!round) round = round_avx512;
#endif
  Round job = {source, type, rows, k, stride, bits, group, tries, codes, scale, lines, round};
  Entered entered;
  team_run(threads, round_part, &job);
  free(lines);
  return 0;
}

int64_t pronk_packed_size(const pronk_weights* w) {
  if (is_coded(w)) return w->blocks * (w->kp / w->group) * coded_line(w);
  return w->blocks * (w->type == PRONK_BF16 ? w->kp : w->k) * 16 * type_size(w->type);
}

void pronk_pack(const pronk_weights* w, const void* source, int64_t stride, void* data, int32_t threads) {
  Pack pack = {w, source, stride, data, nullptr, nullptr};
  Entered entered;
  team_run(threads, pack_part, &pack);
}

void pronk_pack_codes(const pronk_weights* w, const uint8_t* codes, const float* scale, const float* minimum,
                      void* data, int32_t threads) {
  Pack pack = {w, codes, w->kp, data, scale, minimum};
  Entered entered;
  team_run(threads, pack_codes_part, &pack);
}

void pronk::unpack_row(const pronk_weights* w, int64_t row, float* out) {
  int64_t block, lane;
  if (w->gated) {
    int64_t inside = row % w->n;
    block = inside / 16 * 2 + row / w->n, lane = inside % 16;
  } else {
    int64_t inside = row % w->unit;
    block = row / w->unit * (round_up(w->unit, 16) / 16) + inside / 16, lane = inside % 16;
  }
  for (int64_t k = 0; k < w->k; k++) {
    if (w->type == PRONK_BF16)
      out[k] = bf16_to_float(((const uint16_t*)w->data)[block * w->kp * 16 + k / 2 * 32 + lane * 2 + k % 2]);
    else if (w->type == PRONK_F16)
      out[k] = half_to_float(((const uint16_t*)w->data)[(block * w->k + k) * 16 + lane]);
    else if (w->type == PRONK_F32)
      out[k] = ((const float*)w->data)[(block * w->k + k) * 16 + lane];
    else
      out[w->order ? w->order[k] : k] = coded_weight(w, block, lane, k);
  }
}

void pronk_unpack(const pronk_weights* w, int64_t row, float* out) { unpack_row(w, row, out); }

int32_t pronk_run(const pronk_op* ops, int64_t count, const pronk_pass* pass) {
  if (pass->isa < 0 || pass->isa > pronk_detect() || pass->threads < 1) return -2;
  const Table* isa = table(pass->isa);
  bool bf16 = false, other = false;
  for (int64_t i = 0; i < count; i++) {
    const pronk_op* op = ops + i;
    if (op->w && op->kind != PRONK_EMBED) (op->w->type == PRONK_BF16 ? bf16 : other) = true;
    if (op->head_dim % 2 || op->head_dim > MOST_HEAD_DIM || (op->block_size && op->block_size % 16)) return -2;
    if (op->keys && !op->collected && !(op->cross ? beside_is_held(pass, op) : is_held(pass, op))) return -2;
  }
  bool narrow = isa->narrow && bf16 && !other;
  int64_t nodes = 0, bent = 0;
  for (int64_t i = 0; i < pass->segments; i++) {
    const pronk_segment* g = pass->segment + i;
    if (g->nodes > nodes) nodes = g->nodes;
    if (!g->parents) continue;
    // Each node off the main chain writes the end of its path down, which has no more nodes than are off that chain.
    int64_t chain = 0;
    while (chain < g->nodes && g->parents[chain] == chain - 1) chain++;
    bent += (g->nodes - chain) * (g->nodes - chain);
  }
  int64_t rows = pass->rows > pass->num_wanted ? pass->rows : pass->num_wanted, size = narrow ? 2 : 4;
  int64_t a = widest(ops, count, PRONK_A), b = widest(ops, count, PRONK_B), q = query_width(ops, count);
  int64_t input = widest_input(ops, count, pass->hidden), scratch = scratch_size(ops, count, pass, input, nodes);
  int64_t bytes = pass->rows * (int64_t)sizeof(Row) + pass->segments * (int64_t)sizeof(Segment) + count * 4 +
                  bent * 4 + nodes * 12 + rows * (a + b + input) * size + rows * q * 4 + scratch * pass->threads;
  Entered entered;  // the arena is one; passes of several callers take turns
  if (!arena.begin(bytes + 64 * 16)) return -1;
  State s;
  s.ops = ops;
  s.count = count;
  s.pass = pass;
  s.narrow = narrow;
  s.coded = coded(pass->isa);
  s.row = (Row*)arena.take(pass->rows * (int64_t)sizeof(Row));
  s.segment = (Segment*)arena.take(pass->segments * (int64_t)sizeof(Segment));
  s.path = (int32_t*)arena.take(bent * 4);
  s.next = (std::atomic<int32_t>*)arena.take(count * 4);
  for (int64_t i = 0; i < count; i++) s.next[i].store(0, std::memory_order_relaxed);
  int32_t* tree = (int32_t*)arena.take(nodes * 12);
  s.a = arena.take(rows * a * size);
  s.b = arena.take(rows * b * size);
  s.x = arena.take(rows * input * size);
  s.widest = input;
  s.q = (float*)arena.take(rows * q * 4);
  s.scratch = arena.take(scratch * pass->threads);
  s.scratch_bytes = scratch;
  place_rows(pass, ops, count, s.row, s.segment, s.path, tree, tree + nodes, tree + 2 * nodes);
  Job job = {&s, isa};
  team_run(pass->threads, work, &job);
  return 0;
}

int32_t pronk_choose(const float* logits, int64_t n, float temperature, uint64_t key, int32_t isa) {
  return table(isa)->choices->choose(logits, n, temperature, key);
}

int32_t pronk_guess(const float* logits, int64_t n, float temperature, const uint64_t* key, float* scores,
                    float* confidence, int32_t isa) {
  return table(isa)->choices->guess(logits, n, temperature, key, scores, confidence);
}

int32_t pronk_grow(const pronk_op* ops, int64_t count, const pronk_pass* pass, const pronk_chain* chain) {
  const pronk_op* head = ops + count - 1;
  if (pass->segments != 1 || count < 1 || head->output != PRONK_LOGITS || pass->num_wanted != 1) return -2;
  pronk_pass p = *pass;
  pronk_segment own = *pass->segment;
  p.segment = &own;
  const int32_t first = 0;
  int32_t token = 0, passes = 0;
  while (passes < chain->steps) {
    int32_t code = pronk_run(ops, count, &p);
    if (code) return code;
    float confidence = 0.0f;
    uint64_t key = lot(chain->key, (uint64_t)(chain->position + passes));
    token = pronk_guess(p.logits, head->w->n, chain->temperature, chain->temperature == 0.0f ? nullptr : &key,
                        chain->scores + passes * head->w->n, &confidence, p.isa);
    passes++;
    if (token < 0 || !chain->hear(token, confidence)) break;
    own.length += own.nodes;
    own.nodes = 1;
    own.computed = 0;
    own.parents = nullptr;
    p.rows = 1;
    p.tokens = &token;
    p.wanted = &first;
  }
  return passes;
}

// The bytes of one key: copied from its panel to `copy`, or back.
static void move_key(char* panel, int type, int64_t width, int64_t lane, char* copy, bool writing) {
  auto piece = [&](char* at, int64_t bytes) {
    writing ? memcpy(at, copy, (size_t)bytes) : memcpy(copy, at, (size_t)bytes);
    copy += bytes;
  };
  int64_t unit = type == PRONK_BF16 ? 2 : 1, bytes = unit * type_size(type);  // dimensions beside each other
  for (int64_t k = 0; k < width; k += unit) piece(panel + (k / unit * 16 + lane) * bytes, bytes);
  if (type == PRONK_I8) piece(panel + width * 16 + lane * 4, 4);
}

int32_t pronk_move(void* const* pools, const int32_t* types, const int32_t* kinds, const int64_t* shapes, int64_t count,
                   const int64_t* source, const int64_t* target, int64_t moves) {
  int64_t most = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t bytes = shapes[3 * i] * value_size(types[i], shapes[3 * i + 2]) * type_size(types[i]);
    if (bytes > most) most = bytes;
  }
  char* held = (char*)malloc((size_t)(moves * most));
  if (!held && moves && most) return -1;
  for (int64_t i = 0; i < count; i++) {
    int64_t heads = shapes[3 * i], slots = shapes[3 * i + 1], width = shapes[3 * i + 2], size = type_size(types[i]);
    int64_t row = (kinds[i] ? value_size(types[i], width) : width) * size;
    char* pool = (char*)pools[i];
    // All are read before any is written.
    for (int writing = 0; writing < 2; writing++)
      for (int64_t j = 0; j < moves; j++)
        for (int64_t h = 0; h < heads; h++) {
          int64_t slot = writing ? target[j] : source[j];
          char* copy = held + (j * heads + h) * row;
          if (kinds[i] == 2) {
            char* panel = pool + (h * (slots / 16) + slot / 16) * panel_size(types[i], width) * size;
            move_key(panel, types[i], width, slot % 16, copy, writing);
          } else {
            char* at = pool + (h * slots + slot) * row;
            writing ? memcpy(at, copy, (size_t)row) : memcpy(copy, at, (size_t)row);
          }
        }
  }
  free(held);
  return 0;
}

double pronk_read(const void* data, int64_t bytes, int32_t threads) {
  Read read = {(const char*)data, bytes, {0}};
  Entered entered;
  team_run(threads, read_part, &read);
  double sum = 0;
  for (double each : read.sum) sum += each;
  return sum;
}
