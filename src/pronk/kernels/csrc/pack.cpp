// Packing, unpacking and quantizing weights, and moving rows of the KV cache. pronk.h has the layout of packed weights,
// ops.inc (store_key, store_value) that of the cache.
#include <stdlib.h>

#include "common.h"

using namespace pronk;

namespace {
// Argument of pack_part and pack_codes_part. `scale` and `minimum` are null for pack_part.
struct Pack {
  const pronk_weights* w;
  const void* source;
  int64_t stride;
  void* data;
  const float *scale, *minimum;
};

// Return the first row of `source` that belongs to a block; write the number of its rows (at most 16) to `count`.
int64_t block_rows(const pronk_weights* w, int64_t block, int64_t* count) {
  int64_t first, left;
  if (w->gated) {
    first = block / 2 * 16;
    left = w->N - first;
    first += block % 2 * w->N;
  } else {
    int64_t per_unit = round_up(w->unit, 16) / 16, inside = block % per_unit * 16;
    first = block / per_unit * w->unit + inside;
    left = w->unit - inside;
  }
  *count = left < 16 ? left : 16;
  return first;
}

// Pack `count` source rows of a block over k0 <= k < k1. Callers pass at most 64 values of k, so that the written part
// of the block stays in the L1 cache.
template <class T>
void pack_rows(const Pack* p, int64_t block, int64_t first, int64_t count, int64_t k0, int64_t k1) {
  bool pairs = p->w->type == PRONK_BF16;
  T* to = (T*)p->data + block * (pairs ? p->w->K_pad : p->w->K) * 16;
  for (int64_t i = 0; i < count; i++) {
    const T* from = (const T*)p->source + (first + i) * p->stride;
    if (pairs)
      for (int64_t k = k0; k < k1; k++) to[k / 2 * 32 + i * 2 + k % 2] = from[k];
    else
      for (int64_t k = k0; k < k1; k++) to[k * 16 + i] = from[k];
  }
}

void pack_part(void* argument, int thread, int threads) {
  const Pack* p = (const Pack*)argument;
  const pronk_weights* w = p->w;
  for (int64_t b = w->blocks * thread / threads; b < w->blocks * (thread + 1) / threads; b++) {
    int64_t count, first = block_rows(w, b, &count);
    for (int64_t k0 = 0; k0 < w->K; k0 += 64) {
      int64_t k1 = k0 + 64 < w->K ? k0 + 64 : w->K;
      if (w->type == PRONK_F32) pack_rows<uint32_t>(p, b, first, count, k0, k1);
      else pack_rows<uint16_t>(p, b, first, count, k0, k1);
    }
  }
}

// Pack a thread's share of q8 or q4 blocks, see pronk_weights for the layout.
void pack_codes_part(void* argument, int thread, int threads) {
  const Pack* p = (const Pack*)argument;
  const pronk_weights* w = p->w;
  int64_t group_bytes = quant_group_bytes(w), groups = w->K_pad / w->group;
  int64_t header = w->minima ? 128 : 64;  // bytes of the scales and minima
  for (int64_t b = w->blocks * thread / threads; b < w->blocks * (thread + 1) / threads; b++) {
    int64_t count, first = block_rows(w, b, &count);
    for (int64_t g = 0; g < groups; g++) {
      char* to = (char*)p->data + (b * groups + g) * group_bytes;
      for (int64_t i = 0; i < count; i++) {
        ((float*)to)[i] = p->scale[(first + i) * groups + g];
        if (w->minima) ((float*)to)[16 + i] = p->minimum[(first + i) * groups + g];
        const uint8_t* from = (const uint8_t*)p->source + (first + i) * p->stride + g * w->group;
        uint8_t* q = (uint8_t*)to + header + i * 4;
        if (w->type == PRONK_Q8)
          for (int64_t k = 0; k < w->group; k++) q[k / 4 * 64 + k % 4] = from[k];
        else
          for (int64_t k = 0; k < w->group; k++)
            q[k / 8 * 64 + k % 4] = (uint8_t)(q[k / 8 * 64 + k % 4] | (from[k] & 15) << (k & 4));
      }
    }
  }
}

// Argument of round_part: the arguments of pronk_round, a buffer and the kernel.
struct Round {
  const void* source;
  int32_t type;
  int64_t N, K, stride;
  int32_t bits;
  int64_t group;
  int32_t tries;
  uint8_t* codes;
  float* scale;
  float* converted;  // [threads, K] float32 copies of rows; null if the source is float32
  RoundFunction round;
};

void round_part(void* argument, int thread, int threads) {
  const Round* r = (const Round*)argument;
  int64_t groups = (r->K + r->group - 1) / r->group;
  for (int64_t row = r->N * thread / threads; row < r->N * (thread + 1) / threads; row++) {
    const float* x = (const float*)r->source + row * r->stride;
    if (r->type != PRONK_F32) {
      const uint16_t* from = (const uint16_t*)r->source + row * r->stride;
      float* row_x = r->converted + thread * r->K;
      bool bf16 = r->type == PRONK_BF16;
      for (int64_t k = 0; k < r->K; k++) row_x[k] = bf16 ? bf16_to_float(from[k]) : half_to_float(from[k]);
      x = row_x;
    }
    r->round(x, r->K, r->bits, r->group, r->tries, r->codes + row * r->K, r->scale + row * groups);
  }
}
}  // namespace

int32_t pronk_round(const void* source, int32_t type, int64_t N, int64_t K, int64_t stride, int32_t bits,
                    int64_t group, int32_t tries, uint8_t* codes, float* scale, int32_t threads, int32_t isa) {
  float* converted = nullptr;
  if (type != PRONK_F32 && !(converted = (float*)malloc((size_t)(threads * K) * 4))) return -1;
  RoundFunction round = isa_kernels(isa)->round;
#if defined(__x86_64__) || defined(_M_X64)
  if (!round) round = round_avx512;
#endif
  Round job = {source, type, N, K, stride, bits, group, tries, codes, scale, converted, round};
  PoolLock locked;
  pool_run(threads, round_part, &job);
  free(converted);
  return 0;
}

int64_t pronk_packed_size(const pronk_weights* w) {
  if (is_quantized(w)) return w->blocks * (w->K_pad / w->group) * quant_group_bytes(w);
  return w->blocks * (w->type == PRONK_BF16 ? w->K_pad : w->K) * 16 * type_size(w->type);
}

void pronk_pack(const pronk_weights* w, const void* source, int64_t stride, void* data, int32_t threads) {
  Pack pack = {w, source, stride, data, nullptr, nullptr};
  PoolLock locked;
  pool_run(threads, pack_part, &pack);
}

void pronk_pack_codes(const pronk_weights* w, const uint8_t* codes, const float* scale, const float* minimum,
                      void* data, int32_t threads) {
  Pack pack = {w, codes, w->K_pad, data, scale, minimum};
  PoolLock locked;
  pool_run(threads, pack_codes_part, &pack);
}

// Return weight k of output `lane` (0 to 15) of a q8 or q4 block.
static float dequantize(const pronk_weights* w, int64_t block, int64_t lane, int64_t k) {
  const char* group = (const char*)w->data + (block * (w->K_pad / w->group) + k / w->group) * quant_group_bytes(w);
  const uint8_t* codes = (const uint8_t*)group + (w->minima ? 128 : 64) + lane * 4;
  float scale = ((const float*)group)[lane];
  k %= w->group;
  int32_t code = w->type == PRONK_Q8 ? codes[k / 4 * 64 + k % 4] : codes[k / 8 * 64 + k % 4] >> (k & 4) & 15;
  if (!w->minima) return scale * (float)(code - (w->type == PRONK_Q8 ? 128 : 8));
  return scale * (float)code + ((const float*)group)[16 + lane];
}

void pronk::unpack_row(const pronk_weights* w, int64_t row, float* out) {
  int64_t block, lane;
  if (w->gated) {
    int64_t inside = row % w->N;
    block = inside / 16 * 2 + row / w->N, lane = inside % 16;
  } else {
    int64_t inside = row % w->unit;
    block = row / w->unit * (round_up(w->unit, 16) / 16) + inside / 16, lane = inside % 16;
  }
  for (int64_t k = 0; k < w->K; k++) {
    if (w->type == PRONK_BF16)
      out[k] = bf16_to_float(((const uint16_t*)w->data)[block * w->K_pad * 16 + k / 2 * 32 + lane * 2 + k % 2]);
    else if (w->type == PRONK_F16)
      out[k] = half_to_float(((const uint16_t*)w->data)[(block * w->K + k) * 16 + lane]);
    else if (w->type == PRONK_F32)
      out[k] = ((const float*)w->data)[(block * w->K + k) * 16 + lane];
    else
      out[w->order ? w->order[k] : k] = dequantize(w, block, lane, k);
  }
}

void pronk_unpack(const pronk_weights* w, int64_t row, float* out) { unpack_row(w, row, out); }

// Copy key `lane` (0 to 15) of a panel to `copy`; if `writing`, copy in the other direction.
static void move_key(char* panel, int type, int64_t width, int64_t lane, char* copy, bool writing) {
  auto copy_bytes = [&](char* at, int64_t bytes) {
    writing ? memcpy(at, copy, (size_t)bytes) : memcpy(copy, at, (size_t)bytes);
    copy += bytes;
  };
  int64_t dims = type == PRONK_BF16 ? 2 : 1, bytes = dims * type_size(type);  // dimensions side by side; bytes
  for (int64_t k = 0; k < width; k += dims) copy_bytes(panel + (k / dims * 16 + lane) * bytes, bytes);
  if (type == PRONK_I8) copy_bytes(panel + width * 16 + lane * 4, 4);
}

int32_t pronk_move(void* const* pools, const int32_t* types, const int32_t* kinds, const int64_t* shapes, int64_t count,
                   const int64_t* source, const int64_t* target, int64_t moves) {
  int64_t max_bytes = 0;
  for (int64_t i = 0; i < count; i++) {
    int64_t bytes = shapes[3 * i] * value_size(types[i], shapes[3 * i + 2]) * type_size(types[i]);
    if (bytes > max_bytes) max_bytes = bytes;
  }
  char* saved = (char*)malloc((size_t)(moves * max_bytes));
  if (!saved && moves && max_bytes) return -1;
  for (int64_t i = 0; i < count; i++) {
    int64_t heads = shapes[3 * i], slots = shapes[3 * i + 1], width = shapes[3 * i + 2], size = type_size(types[i]);
    int64_t row = (kinds[i] ? value_size(types[i], width) : width) * size;
    char* pool = (char*)pools[i];
    // Read all rows before writing any: source and target slots may overlap.
    for (int writing = 0; writing < 2; writing++)
      for (int64_t j = 0; j < moves; j++)
        for (int64_t h = 0; h < heads; h++) {
          int64_t slot = writing ? target[j] : source[j];
          char* copy = saved + (j * heads + h) * row;
          if (kinds[i] == 2) {
            char* panel = pool + (h * (slots / 16) + slot / 16) * panel_size(types[i], width) * size;
            move_key(panel, types[i], width, slot % 16, copy, writing);
          } else {
            char* at = pool + (h * slots + slot) * row;
            writing ? memcpy(at, copy, (size_t)row) : memcpy(copy, at, (size_t)row);
          }
        }
  }
  free(saved);
  return 0;
}
