// Blocks of GGUF files that stay in memory as they are: their decoding to units of 8-bit codes, of which a product needs
// only a few at a time (gemm_chunk_stored). Kernels of every instruction set use the same functions.
//
// A block of one output decodes to a super-block of type k8 (256 inputs), or with NVFP4 to four groups of type q8 with f32
// scales (64 inputs). In both, element i of an array [16] of 4 bytes belongs to output i. So every number of an output is
// a multiple of 64 bytes behind its first one, `to`:
//
//   k8      the factor; 16 scales; 64 steps of four codes
//   NVFP4   four times: the scale; 4 steps of four codes
//
// Codes are 128 plus the value. Sources: ggml-common.h and ggml-quants.c of llama.cpp. All scales are odd numbers; the
// denominators of their formulas belong to the factor:
//
//   type      bytes of a block, in order                                        weight
//   IQ2_XXS   d 2; for 32 inputs: indices 4, and 4 x 7 sign bits, scale 4       d / 8 * (2 scale + 1) * {8, 25, 43}
//   IQ2_XS    d 2, 32 x (index 9 bits, signs 7 bits), 4-bit scales 8            the same
//   IQ2_S     d 2, indices 32, signs 32, high bits 8, 4-bit scales 8            the same
//   IQ3_XXS   d 2, indices 64, for 32 inputs: 4 x 7 sign bits, scale 4          d / 4 * (2 scale + 1) * {4, 12, …, 62}
//   IQ3_S     d 2, indices 64, high bits 8, signs 32, 4-bit scales 4            d * (2 scale + 1) * {1, 3, …, 15}
//   IQ1_S     d 2, indices 32, for 32 inputs: 4 x 3 high bits, scale 3, shift   d / 8 * (2 scale + 1) * (8 * {-1, 0, 1} ± 1)
//   IQ1_M     indices 32, for 8 inputs: high bits 3, shift 1; scales and d 8    the same
//   TQ1_0     bytes of 5 ternary digits 48, of 4 digits 4, d 2                  d * {-1, 0, 1}
//   TQ2_0     2-bit codes 64, d 2                                               d * (code - 1)
//   NVFP4     4 scales (E4M3, of 16 inputs each), nibbles 32 (E2M1)             scale / 2 * {0, ±1, 2, 3, 4, 6, 8, 12}
//
// An index selects the values of eight inputs, with IQ3 of four, in the codebook: their magnitudes as bytes, with IQ1 the
// signed numbers 8 * {-1, 0, 1}. Seven sign bits have an eighth one that makes their number even.
#include <math.h>

#include "common.h"

namespace pronk {
namespace {
const uint64_t ONES = 0x0101010101010101ull, ZEROS_OF_CODES = 0x8080808080808080ull;  // a byte eight times: 1, 128

uint16_t load_16(const uint8_t* p) {
  uint16_t x;
  memcpy(&x, p, 2);
  return x;
}

uint32_t load_32(const uint8_t* p) {
  uint32_t x;
  memcpy(&x, p, 4);
  return x;
}

uint64_t load_64(const void* p, int64_t index = 0) {
  uint64_t x;
  memcpy(&x, (const uint8_t*)p + 8 * index, 8);
  return x;
}

// For each byte, the byte 255 for every bit that is set: byte i is that of bit i.
struct SignMasks {
  uint64_t of[256];
  constexpr SignMasks() : of() {
    for (int bits = 0; bits < 256; bits++)
      for (int i = 0; i < 8; i++)
        if (bits >> i & 1) of[bits] |= 255ull << (8 * i);
  }
};
constexpr SignMasks SIGN_MASKS;

// For seven sign bits, all eight: their number is even.
struct EvenSigns {
  uint8_t of[128];
  constexpr EvenSigns() : of() {
    for (int bits = 0; bits < 128; bits++) {
      int odd = 0;
      for (int i = 0; i < 7; i++) odd ^= bits >> i & 1;
      of[bits] = (uint8_t)(bits | odd << 7);
    }
  }
};
constexpr EvenSigns EVEN_SIGNS;

// Give eight positive bytes their signs, and return codes. No byte is 0, whose negation would carry into the next byte.
inline uint64_t signed_codes(uint64_t values, uint8_t signs) {
  uint64_t mask = SIGN_MASKS.of[signs];
  return ((values ^ mask) + (mask & ONES)) ^ ZEROS_OF_CODES;
}

// The places of a super-block of type k8 for one output, see StoredType.
struct Super {
  uint8_t* to;
  void set_factor(float x) const { memcpy(to, &x, 4); }
  void set_scale(int group, int32_t x) const { memcpy(to + SUPER_SCALES + 64 * group, &x, 4); }
  // Set the scale of the groups 2 i and 2 i + 1.
  void set_pair(int i, int32_t x) const {
    set_scale(2 * i, x);
    set_scale(2 * i + 1, x);
  }
  // Store the codes of the inputs 8 i, …, 8 i + 7.
  void set_codes(int i, uint64_t codes) const {
    uint32_t first = (uint32_t)codes, second = (uint32_t)(codes >> 32);
    memcpy(to + WIDE_HEADER + 128 * i, &first, 4);
    memcpy(to + WIDE_HEADER + 128 * i + 64, &second, 4);
  }
};

inline int nibble(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }

void decode_iq2_xxs(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  super.set_factor(half_to_float(load_16(from)) / 8);
  for (int g = 0; g < 8; g++) {
    const uint8_t* group = from + 2 + 8 * g;
    uint32_t signs = load_32(group + 4);
    super.set_pair(g, 2 * (int32_t)(signs >> 28) + 1);
    for (int i = 0; i < 4; i++, signs >>= 7)
      super.set_codes(4 * g + i, signed_codes(load_64(codebook, group[i]), EVEN_SIGNS.of[signs & 127]));
  }
}

void decode_iq2_xs(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  super.set_factor(half_to_float(load_16(from)) / 8);
  for (int g = 0; g < 16; g++) super.set_scale(g, 2 * nibble(from + 66, g) + 1);
  for (int i = 0; i < 32; i++) {
    int entry = load_16(from + 2 + 2 * i);
    super.set_codes(i, signed_codes(load_64(codebook, entry & 511), EVEN_SIGNS.of[entry >> 9]));
  }
}

void decode_iq2_s(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  const uint8_t *indices = from + 2, *signs = from + 34, *high = from + 66;
  super.set_factor(half_to_float(load_16(from)) / 8);
  for (int g = 0; g < 16; g++) super.set_scale(g, 2 * nibble(from + 74, g) + 1);
  for (int i = 0; i < 32; i++) {
    int index = indices[i] | (high[i / 4] >> (i % 4 * 2) & 3) << 8;
    super.set_codes(i, signed_codes(load_64(codebook, index), signs[i]));
  }
}

// Return the magnitudes of eight inputs: those of four each, of two indices.
inline uint64_t two_fours(const void* codebook, int first, int second) {
  const uint8_t* fours = (const uint8_t*)codebook;
  return load_32(fours + 4 * first) | (uint64_t)load_32(fours + 4 * second) << 32;
}

void decode_iq3_xxs(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  const uint8_t* indices = from + 2;
  super.set_factor(half_to_float(load_16(from)) / 4);
  for (int g = 0; g < 8; g++) {
    uint32_t signs = load_32(from + 66 + 4 * g);
    super.set_pair(g, 2 * (int32_t)(signs >> 28) + 1);
    for (int i = 0; i < 4; i++, indices += 2, signs >>= 7)
      super.set_codes(4 * g + i,
                      signed_codes(two_fours(codebook, indices[0], indices[1]), EVEN_SIGNS.of[signs & 127]));
  }
}

void decode_iq3_s(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  const uint8_t *indices = from + 2, *high = from + 66, *signs = from + 74;
  super.set_factor(half_to_float(load_16(from)));
  for (int g = 0; g < 8; g++) super.set_pair(g, 2 * nibble(from + 106, g) + 1);
  for (int i = 0; i < 32; i++) {
    int bits = high[i / 4] >> (i % 4 * 2);
    int first = indices[2 * i] | (bits & 1) << 8, second = indices[2 * i + 1] | (bits & 2) << 7;
    super.set_codes(i, signed_codes(two_fours(codebook, first, second), signs[i]));
  }
}

// Return the codes of the numbers 8 * {-1, 0, 1} ± 1.
inline uint64_t shifted_codes(uint64_t values, bool negative) {
  uint64_t codes = values ^ ZEROS_OF_CODES;
  return negative ? codes - ONES : codes + ONES;
}

void decode_iq1_s(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  super.set_factor(half_to_float(load_16(from)) / 8);
  for (int g = 0; g < 8; g++) {
    int high = load_16(from + 34 + 2 * g);
    super.set_pair(g, 2 * (high >> 12 & 7) + 1);
    for (int i = 4 * g; i < 4 * g + 4; i++) {
      int index = from[2 + i] | (high >> (i % 4 * 3) & 7) << 8;
      super.set_codes(i, shifted_codes(load_64(codebook, index), high >> 15));
    }
  }
}

// The four numbers of 16 bits at the end have a scale of 3 bits for each of four groups, and above them 4 bits of d.
void decode_iq1_m(const uint8_t* from, const void* codebook, uint8_t* to) {
  const Super super = {to};
  const uint8_t* high = from + 32;
  uint16_t d = 0;
  for (int n = 0; n < 4; n++) {
    int scales = load_16(from + 48 + 2 * n);
    for (int i = 0; i < 4; i++) super.set_scale(4 * n + i, 2 * (scales >> (3 * i) & 7) + 1);
    d |= (uint16_t)(scales >> 12 << (4 * n));
  }
  super.set_factor(half_to_float(d) / 8);
  for (int i = 0; i < 32; i++) {
    int bits = nibble(high, i), index = from[i] | (bits & 7) << 8;
    super.set_codes(i, shifted_codes(load_64(codebook, index), bits >> 3));
  }
}

void set_ternary_scales(const Super& super, const uint8_t* d) {
  super.set_factor(half_to_float(load_16(d)));
  for (int g = 0; g < 16; g++) super.set_scale(g, 1);
}

// A byte is a fraction of 256 in the ternary system, rounded up: its next digit is the integer part of three times the
// fraction. Digit i of bytes 0-31 belongs to inputs 32 i to 32 i + 31, that of bytes 32-47 to inputs 160 + 16 i, …, and
// that of the last four bytes to inputs 240 + 4 i, ….
void decode_tq1_0(const uint8_t* from, const void*, uint8_t* to) {
  const Super super = {to};
  const uint64_t LOW_BYTES = 0x00ff00ff00ff00ffull;
  set_ternary_scales(super, from + 52);
  for (int j = 0; j < 6; j++) {
    uint64_t bytes = load_64(from, j), even = bytes & LOW_BYTES, odd = bytes >> 8 & LOW_BYTES;
    for (int i = 0; i < 5; i++) {
      even *= 3, odd *= 3;
      uint64_t digits = (even >> 8 & LOW_BYTES) | (odd & ~LOW_BYTES);
      super.set_codes(j < 4 ? 4 * i + j : 20 + 2 * i + j - 4, digits + 127 * ONES);
      even &= LOW_BYTES, odd &= LOW_BYTES;
    }
  }
  for (int half = 0; half < 2; half++) {  // digits 0 and 1, then digits 2 and 3, of four bytes
    uint64_t codes = 0;
    for (int i = 0; i < 8; i++) {
      int power = half ? i < 4 ? 9 : 27 : i < 4 ? 1 : 3;
      int digit = (uint8_t)(from[48 + i % 4] * power) * 3 >> 8;
      codes |= (uint64_t)(digit + 127) << (8 * i);
    }
    super.set_codes(30 + half, codes);
  }
}

// Bits 2 r and 2 r + 1 of bytes 32 h to 32 h + 31 are those of the inputs 128 h + 32 r to 128 h + 32 r + 31.
void decode_tq2_0(const uint8_t* from, const void*, uint8_t* to) {
  const Super super = {to};
  set_ternary_scales(super, from + 64);
  for (int j = 0; j < 8; j++)
    for (int r = 0; r < 4; r++)
      super.set_codes(j / 4 * 16 + 4 * r + j % 4, (load_64(from, j) >> (2 * r) & 3 * ONES) + 127 * ONES);
}

// E4M3 without a sign, halved because the values are doubled; the number 0x7f, which would be NaN, is 0.
float nvfp4_scale(uint8_t x) {
  int exponent = x >> 3 & 15, mantissa = x & 7;
  if (x == 0x7f) return 0.0f;
  return ldexpf((float)(exponent ? mantissa + 8 : mantissa), (exponent ? exponent : 1) - 11);
}

// In each group of 16 inputs, the low nibbles are those of the first eight.
void decode_nvfp4(const uint8_t* from, const void*, uint8_t* to) {
  static const uint8_t CODES[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
  for (int g = 0; g < 4; g++) {
    float scale = nvfp4_scale(from[g]);
    memcpy(to, &scale, 4);
    to += 64;
    const uint8_t* nibbles = from + 4 + 8 * g;
    for (int step = 0; step < 4; step++, to += 64)
      for (int i = 0; i < 4; i++) to[i] = CODES[nibbles[step % 2 * 4 + i] >> (step / 2 * 4) & 15];
  }
}

const StoredType STORED_TYPES[] = {
    {16, 256, 66, decode_iq2_xxs}, {17, 256, 74, decode_iq2_xs}, {18, 256, 98, decode_iq3_xxs},
    {19, 256, 50, decode_iq1_s},   {21, 256, 110, decode_iq3_s}, {22, 256, 82, decode_iq2_s},
    {29, 256, 56, decode_iq1_m},   {34, 256, 54, decode_tq1_0},  {35, 256, 66, decode_tq2_0},
    {40, 64, 36, decode_nvfp4},
};
}  // namespace

const StoredType* stored_type(int32_t number) {
  for (const StoredType& type : STORED_TYPES)
    if (type.number == number) return &type;
  return nullptr;
}
}  // namespace pronk
