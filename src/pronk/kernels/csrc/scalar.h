// Scalar arithmetic with specified rounding, conversions, and the hash behind the sampling noise.
#pragma once
#include <float.h>
#include <stdint.h>
#include <string.h>

static_assert(FLT_EVAL_METHOD == 0, "float operations have to round to float (32-bit x86: -mfpmath=sse)");

// Fused multiply-add a * b + c, rounded once, for processors without the instruction. The product is exact in double. The
// sum is rounded to odd (Boldo and Melquiond 2008, "Emulation of FMA and correctly rounded sums"): truncated, and its last
// bit set if it is inexact. So the second rounding, to float, sees on which side of a tie the exact sum is.
static inline float fused_multiply_add(float a, float b, float c) {
  double product = (double)a * (double)b, sum = product + (double)c;
  double added = sum - product;
  double error = (product - (sum - added)) + ((double)c - added);  // exact (Knuth's TwoSum); NaN for an infinite sum
  uint64_t bits, error_bits;
  memcpy(&bits, &sum, 8);
  memcpy(&error_bits, &error, 8);
  uint64_t is_inexact = (error < 0.0) | (error > 0.0);
  uint64_t is_above = (bits ^ error_bits) >> 63;  // whether the rounded sum has the larger magnitude
  bits = (bits - (is_inexact & is_above)) | is_inexact;
  memcpy(&sum, &bits, 8);
  return (float)sum;
}

static inline float bf16_to_float(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// Round to the nearest bf16, ties to even.
static inline uint16_t float_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float half_to_float(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13;
  } else if (exponent) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else {
    float y = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
    return sign ? -y : y;
  }
  float y;
  memcpy(&y, &bits, 4);
  return y;
}

// Convert a number that float16 represents exactly.
static inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
  if (exponent == 255) return (uint16_t)(sign | 0x7c00 | fraction >> 13);
  if (exponent >= 113) return (uint16_t)(sign | (exponent - 112) << 10 | fraction >> 13);
  if (exponent < 102) return (uint16_t)sign;
  return (uint16_t)(sign | (fraction | 0x800000) >> (126 - exponent));
}

// Hash `key` together with `token`, which is a token id or a position: output number `token` of SplitMix64.
static inline uint64_t hash_token(uint64_t key, uint64_t token) {
  uint64_t x = key + token * 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return x ^ x >> 31;
}
