// Scalar conversions and the hash behind the sampling noise.
#pragma once
#include <stdint.h>
#include <string.h>

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
