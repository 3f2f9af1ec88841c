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

// Argument of pack_blocks_part.
struct PackBlocks {
  const pronk_weights* w;
  const pronk_blocks* source;
  int32_t format;
  int64_t first, count;  // the blocks of 16 outputs to pack
  uint8_t* data;
  std::atomic<bool>* damaged;  // set if a scale is not finite
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

uint32_t load_32(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

void store_32(uint8_t* p, uint32_t x) { memcpy(p, &x, 4); }

// Store `count` unsigned codes of output `lane` at `to`, in the layout of pronk_weights. `count` is a multiple of 4 (8
// bits) or 8 (4 bits), exactly 32 (5 bits) or 16 (6 bits).
void store_codes(int bits, const uint8_t* codes, int64_t count, int64_t lane, uint8_t* to) {
  to += 4 * lane;
  if (bits == 8) {
    for (int64_t k = 0; k < count; k += 4, to += 64) store_32(to, load_32(codes + k));
    return;
  }
  uint32_t high = 0;
  int high_bits = bits - 4;
  uint32_t mask = high_bits == 2 ? 0x03030303u : high_bits == 1 ? 0x01010101u : 0;
  for (int64_t k = 0; k < count; k += 8, to += 64) {
    uint32_t first = load_32(codes + k), second = load_32(codes + k + 4);
    store_32(to, (first & 0x0f0f0f0fu) | (second & 0x0f0f0f0fu) << 4);
    high |= (first >> 4 & mask) << (k / 4 * high_bits) | (second >> 4 & mask) << ((k / 4 + 1) * high_bits);
  }
  if (high_bits) store_32(to, high);
}

// Return code `k` of output `lane` of a group or chunk, see pronk_weights.
int32_t load_code(int bits, const uint8_t* part, int64_t k, int64_t lane) {
  const uint8_t* at = part + 4 * lane + k % 4;
  if (bits == 8) return at[k / 4 * 64];
  if (bits == 2) return at[k / 16 * 64] >> (k % 16 / 4 * 2) & 3;
  if (bits == 3 && k < 24) return at[k / 8 * 64] >> (k % 8 / 4 * 3) & 7;
  if (bits == 3) return at[(k - 24) / 4 * 64] >> 6 | (at[128] >> (k / 4) & 1) << 2;
  int32_t code = at[k / 8 * 64] >> (k & 4) & 15;
  if (bits == 5) code |= (at[256] >> (k / 4) & 1) << 4;
  if (bits == 6) code |= (at[128] >> (k / 4 * 2) & 3) << 4;
  return code;
}

// Write a number as element `i` of an array of type f32, bf16 or f16. The number has that type's precision.
void store_number(uint8_t* to, int type, int64_t i, float x) {
  if (type == PRONK_F32) {
    memcpy(to + 4 * i, &x, 4);
  } else {
    uint16_t y = type == PRONK_BF16 ? float_to_bf16(x) : float_to_half(x);
    memcpy(to + 2 * i, &y, 2);
  }
}

float load_number(const uint8_t* from, int type, int64_t i) {
  if (type == PRONK_F32) {
    float x;
    memcpy(&x, from + 4 * i, 4);
    return x;
  }
  uint16_t x;
  memcpy(&x, from + 2 * i, 2);
  return type == PRONK_BF16 ? bf16_to_float(x) : half_to_float(x);
}

// Pack a thread's share of blocks from codes, see pronk_weights for the layout.
void pack_codes_part(void* argument, int thread, int threads) {
  const Pack* p = (const Pack*)argument;
  const pronk_weights* w = p->w;
  int64_t unit_bytes = quant_unit_bytes(w), groups = quant_units(w), header = quant_header(w);
  for (int64_t b = w->blocks * thread / threads; b < w->blocks * (thread + 1) / threads; b++) {
    int64_t count, first = block_rows(w, b, &count);
    for (int64_t g = 0; g < groups; g++) {
      uint8_t* to = (uint8_t*)p->data + (b * groups + g) * unit_bytes;
      for (int64_t i = 0; i < count; i++) {
        float scale = p->scale[(first + i) * groups + g];
        store_number(to, w->scale_type, i, scale);
        if (w->minima) {
          float minimum = p->minimum[(first + i) * groups + g];
          if (w->minima == 1) store_number(to + header / 2, w->scale_type, i, minimum);
          else to[header - 16 + i] = scale == 0.0f ? 0 : (uint8_t)rintf(-minimum / scale);
        }
        const uint8_t* from = (const uint8_t*)p->source + (first + i) * p->stride + g * w->group;
        store_codes(code_bits(w), from, w->group, i, to + header);
      }
    }
  }
}

// The formats of GGUF blocks, by their numbers in ggml.h: bytes of a block, and its weights (32 or 256).
enum { GGUF_Q4_0 = 2, GGUF_Q4_1 = 3, GGUF_Q5_0 = 6, GGUF_Q5_1 = 7, GGUF_Q8_0 = 8, GGUF_Q2_K = 10, GGUF_Q3_K = 11,
       GGUF_Q4_K = 12, GGUF_Q5_K = 13, GGUF_Q6_K = 14, GGUF_IQ4_XS = 23 };

int64_t gguf_block_bytes(int format) {
  switch (format) {
    case GGUF_Q4_0: return 18;
    case GGUF_Q4_1: return 20;
    case GGUF_Q5_0: return 22;
    case GGUF_Q5_1: return 24;
    case GGUF_Q8_0: return 34;
    case GGUF_Q2_K: return 84;
    case GGUF_Q3_K: return 110;
    case GGUF_Q4_K: return 144;
    case GGUF_Q5_K: return 176;
    case GGUF_Q6_K: return 210;
    case GGUF_IQ4_XS: return 136;
    default: return 0;
  }
}

bool is_finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

uint64_t load_64(const uint8_t* p) {
  uint64_t x;
  memcpy(&x, p, 8);
  return x;
}

const uint64_t NIBBLES = 0x0f0f0f0f0f0f0f0full, BITS_0 = 0x0101010101010101ull, BITS_01 = 0x0303030303030303ull;

// Store eight 4-bit codes, one in each byte of `codes`: k 0-3 in the low nibbles of 4 bytes, k 4-7 in the high nibbles.
inline void store_8_codes(uint8_t* to, uint64_t codes) { store_32(to, (uint32_t)codes | (uint32_t)(codes >> 32) << 4); }

// Pack the low 4 bits of 32 codes of an output, the low nibbles of p[0 .. 31] or, with SHIFT = 4, the high ones.
template <int SHIFT>
inline void pack_32_nibbles(const uint8_t* p, uint8_t* to) {
  for (int i = 0; i < 4; i++) store_8_codes(to + 64 * i, load_64(p + 8 * i) >> SHIFT & NIBBLES);
}

// Pack 32 4-bit codes of an output: the low nibbles of p[0 .. 15], then the high ones.
inline void pack_split_nibbles(const uint8_t* p, uint8_t* to) {
  uint64_t first = load_64(p), second = load_64(p + 8);
  store_8_codes(to, first & NIBBLES);
  store_8_codes(to + 64, second & NIBBLES);
  store_8_codes(to + 128, first >> 4 & NIBBLES);
  store_8_codes(to + 192, second >> 4 & NIBBLES);
}

// Return a packed word: byte j has the `width` high bits of code j at bit step * width, and those of code j + 4 `width`
// bits higher. Byte i of `bits` has the high bits of code i.
inline uint32_t high_bits(uint64_t bits, int step, int width) {
  return ((uint32_t)bits | (uint32_t)(bits >> 32) << width) << (step * width);
}

// Return a word whose byte j has bit j of `bits` (0 to 15) as its lowest bit. The sums of the product have no carries.
inline uint32_t spread_4_bits(uint32_t bits) { return bits * 0x00204081u & 0x01010101u; }

// Pack a GGUF block of 32 weights as a group of an output, whose first scale is at `to` and whose first codes are at
// `codes`; return whether its scale and minimum are finite.
bool pack_group(int format, const uint8_t* from, uint8_t* to, uint8_t* codes) {
  bool minima = format == GGUF_Q4_1 || format == GGUF_Q5_1, five = format == GGUF_Q5_0 || format == GGUF_Q5_1;
  memcpy(to, from, 2);
  if (minima) memcpy(to + 32, from + 2, 2);
  const uint8_t* p = from + (minima ? 4 : 2);
  if (format == GGUF_Q8_0) {
    for (int i = 0; i < 8; i++) store_32(codes + 64 * i, load_32(p + 4 * i) ^ 0x80808080u);
  } else {
    pack_split_nibbles(p + (five ? 4 : 0), codes);
    if (five) {  // bit k of 32 is the high bit of code k
      uint32_t bits = load_32(p), high = 0;
      for (int k = 0; k < 32; k += 4) high |= spread_4_bits(bits >> k & 15) << (k / 4);
      store_32(codes + 256, high);
    }
  }
  return is_finite_half(from) && (!minima || is_finite_half(from + 2));
}

// Pack a Q4_K or Q5_K block as a super-block of an output, whose first factor is at `to`, first scale at `scales` and
// first codes at `codes`; return whether its factors are finite. Byte i < 4 of the 12 scale bytes has scale i in bits
// 0-5, byte i + 4 minimum i; byte i + 8 has the low halves of scale and minimum i + 4, whose bits 4-5 are bits 6-7 of
// bytes i, i + 4.
bool pack_k45(bool five, const uint8_t* from, uint8_t* to, uint8_t* scales, uint8_t* codes) {
  memcpy(to, from, 2);
  memcpy(to + 32, from + 2, 2);
  const uint8_t *s = from + 4, *high = from + 16, *nibbles = five ? from + 48 : from + 16;
  uint8_t* minima = scales + 128;
  for (int i = 0; i < 4; i++) {
    int at = i / 2 * 32 + i % 2;  // of group i; group i + 4 is two pairs later
    scales[at] = s[i] & 63;
    minima[at] = s[i + 4] & 63;
    scales[at + 64] = (uint8_t)((s[i + 8] & 15) | (s[i] >> 6) << 4);
    minima[at + 64] = (uint8_t)(s[i + 8] >> 4 | (s[i + 4] >> 6) << 4);
  }
  int64_t group_bytes = five ? 320 : 256;
  for (int g = 0; g < 8; g++, codes += group_bytes) {
    if (g % 2) pack_32_nibbles<4>(nibbles + 32 * (g / 2), codes);
    else pack_32_nibbles<0>(nibbles + 32 * (g / 2), codes);
    if (five) {  // bit g of byte i is the high bit of the code of input i in group g
      uint32_t all = 0;
      for (int i = 0; i < 4; i++) all |= high_bits(load_64(high + 8 * i) >> g & BITS_0, 2 * i, 1);
      store_32(codes + 256, all);
    }
  }
  return is_finite_half(from) && is_finite_half(from + 2);
}

// Pack a Q6_K block as a super-block of an output, see pack_k45; return whether its factor is finite. Input
// 128 h + 32 r + i has its low 4 bits in byte 64 h + 32 (r % 2) + i (r < 2: low nibble, else high), and its high 2 bits
// in bits 2 r and 2 r + 1 of byte 128 + 32 h + i. Here i is 0 or 16, the start of group g.
bool pack_k6(const uint8_t* from, uint8_t* to, uint8_t* scales, uint8_t* codes) {
  memcpy(to, from + 208, 2);
  for (int g = 0; g < 16; g++) scales[g / 2 * 32 + g % 2] = from[192 + g];
  for (int g = 0; g < 16; g++, codes += 192) {
    int h = g / 8, r = g % 8 / 2, i = g % 2 * 16;
    const uint8_t *nibbles = from + 64 * h + r % 2 * 32 + i, *high = from + 128 + 32 * h + i;
    uint64_t first = load_64(nibbles) >> (r / 2 * 4) & NIBBLES, second = load_64(nibbles + 8) >> (r / 2 * 4) & NIBBLES;
    store_8_codes(codes, first);
    store_8_codes(codes + 64, second);
    store_32(codes + 128, high_bits(load_64(high) >> (2 * r) & BITS_01, 0, 2) |
                              high_bits(load_64(high + 8) >> (2 * r) & BITS_01, 2, 2));
  }
  return is_finite_half(from + 208);
}

// Pack the 2-bit codes of group `g` of a Q2_K or Q3_K block, whose 64 bytes of codes are at `from`. Input
// 128 h + 32 r + i has its code in bits 2 r and 2 r + 1 of byte 32 h + i. Here i is 0 or 16, the start of the group.
void pack_two_bits(const uint8_t* from, int g, uint8_t* to) {
  const uint8_t* p = from + g / 8 * 32 + g % 2 * 16;
  int shift = g % 8 / 2 * 2;
  store_32(to, high_bits(load_64(p) >> shift & BITS_01, 0, 2) | high_bits(load_64(p + 8) >> shift & BITS_01, 2, 2));
}

// Pack a Q2_K block as a super-block of an output, see pack_k45; return whether its factors are finite. The first 16
// bytes have the scale of a group in the low and the minimum in the high nibble.
bool pack_k2(const uint8_t* from, uint8_t* to, uint8_t* scales, uint8_t* codes) {
  memcpy(to, from + 80, 2);
  memcpy(to + 32, from + 82, 2);
  for (int g = 0; g < 16; g++) {
    scales[g / 2 * 32 + g % 2] = from[g];
    pack_two_bits(from + 16, g, codes + 64 * g);
  }
  return is_finite_half(from + 80) && is_finite_half(from + 82);
}

// Return the 6-bit scale of group `g` of a Q3_K block, whose 12 bytes of scales are at `s`: the low 4 bits of scales i and
// i + 8 are in byte i < 8, the high bits of scales i, i + 4, i + 8 and i + 12 in byte 8 + i, i < 4.
uint8_t scale_of_k3(const uint8_t* s, int g) {
  return (uint8_t)((s[g % 8] >> (g / 8 * 4) & 15) | (s[8 + g % 4] >> (g / 4 * 2) & 3) << 4);
}

// Pack a Q3_K block as a super-block of an output, see pack_k45; return whether its factor is finite. Of input 32 p + i,
// bit p of byte i is the high bit of the code; the low bits are those of a Q2_K block.
bool pack_k3(const uint8_t* from, uint8_t* to, uint8_t* scales, uint8_t* codes) {
  memcpy(to, from + 108, 2);
  for (int place = 0; place < 4; place++) {  // the scales of groups place, place + 4, … are at one place of a vector
    uint8_t scale[4], *at = scales + place / 2 * 32 + place % 2;
    for (int i = 0; i < 4; i++) scale[i] = scale_of_k3(from + 96, 4 * i + place);
    at[0] = (uint8_t)((scale[0] & 15) | scale[1] << 4);
    at[64] = (uint8_t)((scale[2] & 15) | scale[3] << 4);
    at[128] = (uint8_t)(scale[0] >> 4 | scale[1] >> 4 << 2 | scale[2] >> 4 << 4 | scale[3] >> 4 << 6);
  }
  for (int pair = 0; pair < 8; pair++, codes += 192) {
    uint32_t low[8], code[8];  // four codes each
    for (int step = 0; step < 8; step++) {
      low[step] = load_32(from + 32 + pair / 4 * 32 + 4 * step) >> (pair % 4 * 2) & (uint32_t)BITS_01;
      code[step] = low[step] | (load_32(from + 4 * step) >> pair & (uint32_t)BITS_0) << 2;
    }
    store_32(codes, code[0] | code[1] << 3 | low[6] << 6);
    store_32(codes + 64, code[2] | code[3] << 3 | low[7] << 6);
    store_32(codes + 128, code[4] | code[5] << 3 | (code[6] ^ low[6]) << 4 | (code[7] ^ low[7]) << 5);
  }
  return is_finite_half(from + 108);
}

// Pack an IQ4_XS block as a super-block of an output, see pack_k45; return whether its factor is finite. Bytes 2 and 3
// have the high 2 bits of the scales, bytes 4 to 7 their low 4 bits.
bool pack_iq4(const uint8_t* from, uint8_t* to, uint8_t* scales, uint8_t* codes) {
  memcpy(to, from, 2);
  int high = from[2] | from[3] << 8;
  for (int g = 0; g < 8; g++) {
    int scale = (from[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4;
    scales[g / 2 * 32 + g % 2] = (uint8_t)(scale - 32);
    pack_split_nibbles(from + 8 + 16 * g, codes + 256 * g);
  }
  return is_finite_half(from);
}

// Return whether the factors of the blocks of 16 outputs of a stored type are finite. (The scales of NVFP4 always are.)
bool have_finite_factors(const StoredType* type, const pronk_weights* w, const uint8_t* from) {
  alignas(64) uint8_t decoded[MAX_DECODED];
  float factor[16];
  type->decode(from, w->codebook, decoded);
  memcpy(factor, decoded, sizeof factor);
  bool finite = true;
  for (int i = 0; i < 16; i++) finite &= (bool)isfinite(factor[i]);
  return finite;
}

// Pack a block of type `format` as a group or super-block of an output, whose first scale or factor is at `to`, first
// scale of a super-block at `scales` and first codes at `codes`; return whether its numbers are finite.
bool pack_block(const pronk_weights* w, int32_t format, const uint8_t* from, uint8_t* to, uint8_t* scales,
                uint8_t* codes) {
  switch (w->type) {
    case PRONK_K2: return pack_k2(from, to, scales, codes);
    case PRONK_K3: return pack_k3(from, to, scales, codes);
    case PRONK_K4: case PRONK_K5: return pack_k45(format == GGUF_Q5_K, from, to, scales, codes);
    case PRONK_K6: return pack_k6(from, to, scales, codes);
    case PRONK_IQ4: return pack_iq4(from, to, scales, codes);
    default: return pack_group(format, from, to, codes);
  }
}

// Return the stored bytes of output `row`; with heads, undo the row order of interleaved RoPE (see pronk_blocks).
const uint8_t* gguf_row(const PackBlocks* p, int64_t row, int64_t row_bytes) {
  const pronk_blocks* source = p->source;
  while (row >= source->rows) row -= source++->rows;
  if (source->heads) {
    int64_t size = source->rows / source->heads, inside = row % size;
    row += inside % (size / 2) * 2 + inside / (size / 2) - inside;
  }
  return (const uint8_t*)source->data + row * row_bytes;
}

void pack_blocks_part(void* argument, int thread, int threads) {
  const PackBlocks* p = (const PackBlocks*)argument;
  const pronk_weights* w = p->w;
  int64_t units = quant_units(w), unit_bytes = quant_unit_bytes(w), header = quant_header(w);
  int64_t bytes = gguf_block_bytes(p->format);
  bool finite = true;
  int64_t end = p->first + p->count * (thread + 1) / threads;
  for (int64_t b = p->first + p->count * thread / threads; b < end; b++) {
    int64_t count, first = block_rows(w, b, &count);
    const uint8_t* row[16];
    for (int64_t i = 0; i < count; i++) row[i] = gguf_row(p, first + i, units * bytes);
    uint8_t* to = p->data + b * units * unit_bytes;
    for (int64_t u = 0; u < units; u++, to += unit_bytes)
      for (int64_t i = 0; i < count; i++) {
        const uint8_t* from = row[i] + u * bytes;
        uint8_t *scale = to + 2 * i, *scales = to + SUPER_SCALES + 2 * i, *codes = to + header + 4 * i;
        finite &= pack_block(w, p->format, from, scale, scales, codes);
      }
  }
  if (!finite) p->damaged->store(true, std::memory_order_relaxed);
}

// Pack a thread's share of blocks of a stored type: the bytes of 16 outputs alternate.
void pack_stored_part(void* argument, int thread, int threads) {
  const PackBlocks* p = (const PackBlocks*)argument;
  const pronk_weights* w = p->w;
  const StoredType* type = stored_type(w->stored);
  int64_t per_row = w->K / type->inputs;
  bool finite = true;
  int64_t end = p->first + p->count * (thread + 1) / threads;
  for (int64_t b = p->first + p->count * thread / threads; b < end; b++) {
    int64_t count, first = block_rows(w, b, &count);
    const uint8_t* row[16];
    for (int64_t i = 0; i < count; i++) row[i] = gguf_row(p, first + i, per_row * type->bytes);
    uint8_t* to = p->data + b * quant_block_bytes(w);
    for (int64_t u = 0; u < per_row; u++, to += 16 * type->bytes) {
      for (int64_t i = 0; i < count; i++)
        for (int64_t k = 0; k < type->bytes; k++) to[16 * k + i] = row[i][u * type->bytes + k];
      finite &= have_finite_factors(type, w, to);
    }
  }
  if (!finite) p->damaged->store(true, std::memory_order_relaxed);
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
  RoundFunction round = isa_kernels(isa, false)->round;
#if (defined(__x86_64__) || defined(_M_X64)) && !defined(PRONK_WITHOUT_AVX512)
  if (!round) round = round_avx512;
#endif
  Round job = {source, type, N, K, stride, bits, group, tries, codes, scale, converted, round};
  PoolLock locked;
  pool_run(threads, round_part, &job);
  free(converted);
  return 0;
}

int64_t pronk_packed_size(const pronk_weights* w) {
  if (is_quantized(w)) return w->blocks * quant_block_bytes(w);
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

int32_t pronk_pack_blocks(const pronk_weights* w, const pronk_blocks* source, int64_t count, int32_t format,
                          int64_t first, int64_t blocks, void* data, int32_t threads) {
  std::atomic<bool> damaged(false);
  int64_t rows = 0;
  for (int64_t i = 0; i < count; i++) rows += source[i].rows;
  if (rows != w->N * (w->gated ? 2 : 1) || !(w->stored || gguf_block_bytes(format))) return -2;
  if (first < 0 || blocks < 0 || first + blocks > w->blocks) return -2;
  PackBlocks pack = {w, source, format, first, blocks, (uint8_t*)data, &damaged};
  PoolLock locked;
  pool_run(threads, w->stored ? pack_stored_part : pack_blocks_part, &pack);
  return damaged ? -1 : 0;
}

// Return weight k of output `lane` (0 to 15) of a quantized block.
static float dequantize(const pronk_weights* w, int64_t block, int64_t lane, int64_t k) {
  int64_t unit = quant_unit(w), header = quant_header(w);
  const uint8_t* at = (const uint8_t*)w->data + (block * quant_units(w) + k / unit) * quant_unit_bytes(w);
  int bits = code_bits(w);
  k %= unit;
  if (!has_super_blocks(w)) {
    float scale = load_number(at, w->scale_type, lane);
    int32_t code = load_code(bits, at + header, k, lane);
    if (w->minima == 2) return scale * (float)(code - at[header - 16 + lane]);
    if (!w->minima) return scale * (float)(code - (1 << (bits - 1)));
    return scale * (float)code + load_number(at + header / 2, w->scale_type, lane);
  }
  if (w->type == PRONK_K8) {
    int32_t scale;
    memcpy(&scale, at + SUPER_SCALES + k / w->group * 64 + 4 * lane, 4);
    return load_number(at, PRONK_F32, lane) * (float)scale * (float)(load_code(8, at + header, k, lane) - 128);
  }
  const SuperFormat format = super_format(w->type);
  int64_t group = k / format.group;
  int64_t place = group / 2 * 32 + lane * 2 + group % 2;  // of the group's scale
  int64_t chunk = format.chunk();
  int32_t code = load_code(bits, at + header + k / chunk * chunk * bits * 2, k % chunk, lane);
  const uint8_t* scales = at + SUPER_SCALES;
  int32_t integer = (int8_t)scales[place], minimum = scales[128 + place];
  if (w->type == PRONK_K2) {
    integer = scales[place] & 15;
    minimum = scales[place] >> 4;
  }
  if (w->type == PRONK_K3) integer = load_code(6, scales + place % 64, place / 64 * 4, 0) - 32;
  if (w->type == PRONK_IQ4) code = IQ4_VALUES[code];
  float scale = load_number(at, PRONK_F16, lane) * (float)integer;
  if (!format.minima) return scale * (float)(code - (1 << format.zero_shift));
  return scale * (float)code - load_number(at + 32, PRONK_F16, lane) * (float)minimum;
}

// Convert `count` weights of one output to float32: blocks of a stored type from `from` on, whose bytes are `stride` bytes
// apart.
static void unpack_stored(const pronk_weights* w, const uint8_t* from, int64_t stride, int64_t count, float* out) {
  const StoredType* type = stored_type(w->stored);
  alignas(64) uint8_t decoded[MAX_DECODED];
  uint8_t blocks[16 * MAX_STORED] = {0};  // those of 16 outputs, of which the first is used
  pronk_weights one = *w;
  one.data = decoded;
  one.K = one.K_pad = type->inputs;
  for (int64_t at = 0; at < count; at += type->inputs, from += stride * type->bytes) {
    for (int64_t k = 0; k < type->bytes; k++) blocks[16 * k] = from[stride * k];
    type->decode(blocks, w->codebook, decoded);
    for (int64_t k = 0; k < type->inputs; k++) out[at + k] = dequantize(&one, 0, 0, k);
  }
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
  if (w->stored) {
    const uint8_t* from = (const uint8_t*)w->data + block * quant_block_bytes(w) + lane;
    return unpack_stored(w, from, 16, w->K, out);
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

void pronk::unpack_blocks(const pronk_weights* w, int32_t format, const void* table, int64_t row, int64_t count,
                          float* out) {
  if (w->stored) {
    const StoredType* type = stored_type(w->stored);
    int64_t row_bytes = count / type->inputs * type->bytes;
    return unpack_stored(w, (const uint8_t*)table + row * row_bytes, 1, count, out);
  }
  int64_t bytes = gguf_block_bytes(format);
  const uint8_t* from = (const uint8_t*)table + row * (count / quant_unit(w)) * bytes;
  uint8_t packed[MAX_SUPER_HEADER + SUPER_BLOCK * 16];  // at most 16 outputs of 8 bits; one of them is used
  pronk_weights one = *w;                           // a matrix of one output, of one block
  one.data = packed;
  one.K = one.K_pad = quant_unit(w);
  int64_t header = quant_header(w);
  for (int64_t at = 0; at < count; at += one.K, from += bytes) {
    pack_block(&one, format, from, packed, packed + SUPER_SCALES, packed + header);
    for (int64_t k = 0; k < one.K; k++) out[at + k] = dequantize(&one, 0, 0, k);
  }
}

// Copy key `lane` (0 to 15) of a panel to `copy`; if `writing`, copy in the other direction.
static void move_key(char* panel, int type, int64_t width, int64_t lane, char* copy, bool writing) {
  auto copy_bytes = [&](char* at, int64_t bytes) {
    writing ? memcpy(at, copy, (size_t)bytes) : memcpy(copy, at, (size_t)bytes);
    copy += bytes;
  };
  if (is_quantized_kv(type)) {
    int64_t codes = code_bytes(type, width), bytes = kv_scale_bytes(type);
    for (int64_t k = 0; k < codes; k++) copy_bytes(panel + k * 16 + lane, 1);
    for (int64_t k = 0; k < kv_scales(type, width); k++) copy_bytes(panel + codes * 16 + (k * 16 + lane) * bytes, bytes);
    return;
  }
  int64_t dims = type == PRONK_BF16 ? 2 : 1, bytes = dims * type_size(type);  // dimensions side by side; bytes
  for (int64_t k = 0; k < width; k += dims) copy_bytes(panel + (k / dims * 16 + lane) * bytes, bytes);
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
