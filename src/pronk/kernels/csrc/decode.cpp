// Blocks of GGUF files that stay in memory as they are: their decoding to units of 8-bit codes, of which a product needs
// only a few at a time (gemm_chunk_stored). Kernels of every instruction set use the same functions.
//
// The blocks of 16 outputs decode to a super-block of type k8 (256 inputs), or with NVFP4 to four groups of type q8 with
// f32 scales (64 inputs). A type is a struct with a function for each number of a block. Codes are 128 plus the value.
// Sources: ggml-common.h and ggml-quants.c of llama.cpp. All scales are odd numbers; the
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
const uint64_t EVEN_BYTES = 0x00ff00ff00ff00ffull;

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

// Return eight bytes times a number, modulo 256.
inline uint64_t multiply_bytes(uint64_t bytes, uint64_t factor) {
  uint64_t even = (bytes & EVEN_BYTES) * factor & EVEN_BYTES, odd = (bytes >> 8 & EVEN_BYTES) * factor & EVEN_BYTES;
  return even | odd << 8;
}

// Give eight positive bytes their signs, and return codes. No byte is 0, whose negation would carry into the next byte.
inline uint64_t signed_codes(uint64_t values, uint8_t signs) {
  uint64_t mask = SIGN_MASKS.of[signs];
  return ((values ^ mask) + (mask & ONES)) ^ ZEROS_OF_CODES;
}

inline int nibble(const uint8_t* p, int i) { return p[i / 2] >> (i % 2 * 4) & 15; }

// Return the factor of a type whose float16 scale is at `p`.
inline float scaled_half(const uint8_t* p, float unit) { return half_to_float(load_16(p)) * unit; }

// In each type: the number of inputs and bytes of a block; `factor`, and the scale of group `g` of 16 inputs; and `codes`,
// those of the inputs 8 i, 8 i + 1, …, 8 i + 7, from the block `from`.
struct Iq2Xxs {
  static const int NUMBER = 16, INPUTS = 256, BYTES = 66;
  static float factor(const uint8_t* from) { return scaled_half(from, 0.125f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * (from[9 + 8 * (g / 2)] >> 4) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    const uint8_t* group = from + 2 + 8 * (i / 4);
    uint32_t signs = load_32(group + 4) >> (7 * (i % 4)) & 127;
    return signed_codes(load_64(codebook, group[i % 4]), EVEN_SIGNS.of[signs]);
  }
};

struct Iq2Xs {
  static const int NUMBER = 17, INPUTS = 256, BYTES = 74;
  static float factor(const uint8_t* from) { return scaled_half(from, 0.125f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * nibble(from + 66, g) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    int entry = load_16(from + 2 + 2 * i);
    return signed_codes(load_64(codebook, entry & 511), EVEN_SIGNS.of[entry >> 9]);
  }
};

struct Iq2S {
  static const int NUMBER = 22, INPUTS = 256, BYTES = 82;
  static float factor(const uint8_t* from) { return scaled_half(from, 0.125f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * nibble(from + 74, g) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    int index = from[2 + i] | (from[66 + i / 4] >> (i % 4 * 2) & 3) << 8;
    return signed_codes(load_64(codebook, index), from[34 + i]);
  }
};

// Return the magnitudes of eight inputs: those of four each, of two indices.
inline uint64_t two_fours(const void* codebook, int first, int second) {
  const uint8_t* fours = (const uint8_t*)codebook;
  return load_32(fours + 4 * first) | (uint64_t)load_32(fours + 4 * second) << 32;
}

struct Iq3Xxs {
  static const int NUMBER = 18, INPUTS = 256, BYTES = 98;
  static float factor(const uint8_t* from) { return scaled_half(from, 0.25f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * (from[69 + 4 * (g / 2)] >> 4) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    uint32_t signs = load_32(from + 66 + 4 * (i / 4)) >> (7 * (i % 4)) & 127;
    return signed_codes(two_fours(codebook, from[2 + 2 * i], from[3 + 2 * i]), EVEN_SIGNS.of[signs]);
  }
};

struct Iq3S {
  static const int NUMBER = 21, INPUTS = 256, BYTES = 110;
  static float factor(const uint8_t* from) { return scaled_half(from, 1.0f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * nibble(from + 106, g / 2) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    int high = from[66 + i / 4] >> (i % 4 * 2);
    int first = from[2 + 2 * i] | (high & 1) << 8, second = from[3 + 2 * i] | (high & 2) << 7;
    return signed_codes(two_fours(codebook, first, second), from[74 + i]);
  }
};

// Return the codes of the numbers 8 * {-1, 0, 1} + 1, or - 1 if `negative` is 1. There is no branch, because half of the
// shifts are negative in no order.
inline uint64_t shifted_codes(uint64_t values, int negative) {
  return (values ^ ZEROS_OF_CODES) - ONES + (uint64_t)(2 - 2 * negative) * ONES;
}

struct Iq1S {
  static const int NUMBER = 19, INPUTS = 256, BYTES = 50;
  static float factor(const uint8_t* from) { return scaled_half(from, 0.125f); }
  static int32_t scale(const uint8_t* from, int g) { return 2 * (from[35 + 2 * (g / 2)] >> 4 & 7) + 1; }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    int high = load_16(from + 34 + 2 * (i / 4));
    int index = from[2 + i] | (high >> (i % 4 * 3) & 7) << 8;
    return shifted_codes(load_64(codebook, index), high >> 15);
  }
};

// The four numbers of 16 bits at the end have a scale of 3 bits for each of four groups, and above them 4 bits of d.
struct Iq1M {
  static const int NUMBER = 29, INPUTS = 256, BYTES = 56;
  static float factor(const uint8_t* from) {
    int d = from[49] >> 4 | (from[51] & 0xf0) | (from[53] & 0xf0) << 4 | (from[55] & 0xf0) << 8;
    return half_to_float((uint16_t)d) * 0.125f;
  }
  static int32_t scale(const uint8_t* from, int g) {
    return 2 * (load_16(from + 48 + g / 4 * 2) >> (g % 4 * 3) & 7) + 1;
  }
  static uint64_t codes(const uint8_t* from, const void* codebook, int i) {
    int high = nibble(from + 32, i);
    return shifted_codes(load_64(codebook, from[i] | (high & 7) << 8), high >> 3);
  }
};

// A byte is a fraction of 256 in the ternary system, rounded up: its next digit is the integer part of three times the
// fraction. Digit n of bytes 0-31 belongs to the inputs 32 n, …, 32 n + 31, that of bytes 32-47 to 160 + 16 n, …, and that
// of the last four bytes to 240 + 4 n, ….
struct Tq10 {
  static const int NUMBER = 34, INPUTS = 256, BYTES = 54;
  static float factor(const uint8_t* from) { return scaled_half(from + 52, 1.0f); }
  static int32_t scale(const uint8_t*, int) { return 1; }
  static uint64_t codes(const uint8_t* from, const void*, int i) {
    static const uint64_t POWERS[5] = {1, 3, 9, 27, 81};
    uint64_t bytes, power;
    if (i < 20) {
      bytes = load_64(from + 8 * (i % 4)), power = POWERS[i / 4];
    } else if (i < 30) {
      bytes = load_64(from + 32 + 8 * (i % 2)), power = POWERS[i / 2 - 10];
    } else {  // two digits of four bytes
      uint64_t four = load_32(from + 48);
      bytes = four | multiply_bytes(four, 3) << 32, power = POWERS[2 * (i - 30)];
    }
    uint64_t fractions = multiply_bytes(bytes, power);
    uint64_t even = (fractions & EVEN_BYTES) * 3 >> 8, odd = (fractions >> 8 & EVEN_BYTES) * 3;
    return ((even & EVEN_BYTES) | (odd & ~EVEN_BYTES)) + 127 * ONES;
  }
};

// Bits 2 r and 2 r + 1 of bytes 32 h to 32 h + 31 are those of the inputs 128 h + 32 r to 128 h + 32 r + 31.
struct Tq20 {
  static const int NUMBER = 35, INPUTS = 256, BYTES = 66;
  static float factor(const uint8_t* from) { return scaled_half(from + 64, 1.0f); }
  static int32_t scale(const uint8_t*, int) { return 1; }
  static uint64_t codes(const uint8_t* from, const void*, int i) {
    uint64_t bytes = load_64(from + 32 * (i / 16) + 8 * (i % 4));
    return (bytes >> (i % 16 / 4 * 2) & 3 * ONES) + 127 * ONES;
  }
};

// NVFP4's scales by their bits: E4M3 without a sign, halved because the values are doubled. 0x7f, which would be NaN, is 0.
struct Nvfp4Scales {
  float of[256];
  constexpr Nvfp4Scales() : of() {
    for (int x = 0; x < 256; x++) {
      int exponent = x >> 3 & 15, mantissa = x & 7;
      float unit = 1.0f / 1024;
      for (int i = 1; i < exponent; i++) unit *= 2;
      of[x] = x == 0x7f ? 0.0f : unit * (float)(exponent ? mantissa + 8 : mantissa);
    }
  }
};
constexpr Nvfp4Scales NVFP4_SCALES;

// In each group of 16 inputs, the low nibbles are those of the first eight.
struct Nvfp4 {
  static const int NUMBER = 40, INPUTS = 64, BYTES = 36;
  static float scale(const uint8_t* from, int g) { return NVFP4_SCALES.of[from[g]]; }
  static uint64_t codes(const uint8_t* from, const void*, int i) {
    uint64_t floats = load_64(from + 4 + 8 * (i / 2)) >> (i % 2 * 4);
    // The values 0, 1, 2, 3 of the first two bits; doubled from the exponent 2 on, and once more for the exponent 3.
    uint64_t mantissa = floats & ONES, low = floats >> 1 & ONES, high = floats >> 2 & ONES;
    uint64_t values = mantissa | (low | high) << 1;
    values += values & high * 255;
    values += values & (low & high) * 255;
    uint64_t negative = values & (floats >> 3 & ONES) * 255;
    return ZEROS_OF_CODES + (values - negative) - negative;
  }
};

// Store the codes `i` of 16 outputs, of eight inputs each: two steps of four.
template <class T>
inline void store_codes(const uint8_t* from, const void* codebook, int i, uint8_t* to) {
  for (int lane = 0; lane < 16; lane++) {
    uint64_t codes = T::codes(from + lane * T::BYTES, codebook, i);
    uint32_t first = (uint32_t)codes, second = (uint32_t)(codes >> 32);
    memcpy(to + 4 * lane, &first, 4);
    memcpy(to + 64 + 4 * lane, &second, 4);
  }
}

// Decode the blocks of 16 outputs to a super-block of type k8.
template <class T>
void decode_super(const uint8_t* from, const void* codebook, uint8_t* to) {
  float* factors = (float*)to;
  for (int lane = 0; lane < 16; lane++) factors[lane] = T::factor(from + lane * T::BYTES);
  int32_t* scales = (int32_t*)(to + SUPER_SCALES);
  for (int g = 0; g < SUPER_BLOCK / WIDE_GROUP; g++)
    for (int lane = 0; lane < 16; lane++) scales[16 * g + lane] = T::scale(from + lane * T::BYTES, g);
  for (int i = 0; i < SUPER_BLOCK / 8; i++) store_codes<T>(from, codebook, i, to + WIDE_HEADER + 128 * i);
}

// Decode the blocks of 16 outputs to groups of 16 inputs of type q8.
template <class T>
void decode_groups(const uint8_t* from, const void* codebook, uint8_t* to) {
  for (int g = 0; g < T::INPUTS / 16; g++) {
    float* scales = (float*)to;
    for (int lane = 0; lane < 16; lane++) scales[lane] = T::scale(from + lane * T::BYTES, g);
    store_codes<T>(from, codebook, 2 * g, to + 64);
    store_codes<T>(from, codebook, 2 * g + 1, to + 192);
    to += 320;
  }
}

template <class T>
constexpr StoredType super_type() { return {T::NUMBER, T::INPUTS, T::BYTES, decode_super<T>}; }

const StoredType STORED_TYPES[] = {
    super_type<Iq1S>(),   super_type<Iq1M>(), super_type<Iq2Xxs>(), super_type<Iq2Xs>(), super_type<Iq2S>(),
    super_type<Iq3Xxs>(), super_type<Iq3S>(), super_type<Tq10>(),   super_type<Tq20>(),
    {Nvfp4::NUMBER, Nvfp4::INPUTS, Nvfp4::BYTES, decode_groups<Nvfp4>},
};
}  // namespace

const StoredType* stored_type(int32_t number) {
  for (const StoredType& type : STORED_TYPES)
    if (type.number == number) return &type;
  return nullptr;
}
}  // namespace pronk
