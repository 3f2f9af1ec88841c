// Exponential and logarithm with specified bits: only + - * / and comparisons of doubles, in the order of
// pronk.base.exact_math, which documents formulas, sources and errors. The C library's functions would give other last
// bits on other systems.
#pragma once
#include <stdint.h>
#include <string.h>

static inline uint64_t bits_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  return bits;
}

static inline double double_of(uint64_t bits) {
  double x;
  memcpy(&x, &bits, 8);
  return x;
}

// Return `a` if the condition holds, else `b`; without a branch, so that loops are vectorized.
static inline double choose(bool condition, double a, double b) {
  uint64_t mask = -(uint64_t)condition;
  return double_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}

const double LN2_HIGH = 6.93147180369123816490e-01, LN2_LOW = 1.90821492927058770002e-10;

// e^x; 0 for x below -708, infinite above 709.
static inline double exact_exp(double x) {
  double bounded = choose((x < -708.0) | (x > 709.0), 0.0, x);
  // The sum is rounded to an integer, whose two's complement is in the lowest bits.
  double shifted = bounded * 1.44269504088896338700e+00 + 0x1.8p52;
  double power = shifted - 0x1.8p52;
  double high = bounded - power * LN2_HIGH;
  double low = power * LN2_LOW;
  double r = high - low;
  double z = r * r;
  double series = -1.65339022054652515390e-06 + z * 4.13813679705723846039e-08;
  series = 6.61375632143793436117e-05 + z * series;
  series = -2.77777777770155933842e-03 + z * series;
  series = 1.66666666666666019037e-01 + z * series;
  double c = r - z * series;
  double fraction = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
  double result = double_of(bits_of(fraction) + (bits_of(shifted) << 52));
  result = choose(x < -708.0, 0.0, result);
  result = choose(x > 709.0, __builtin_inf(), result);
  return choose(x != x, x, result);
}

// Natural logarithm of a positive number below 2^960; NaN for infinity and NaN.
static inline double exact_log(double x) {
  uint64_t bits = bits_of(x * 0x1p54);  // so that subnormal numbers need no branch
  // Divide by 2^(exponent - 1023), so that the fraction is in [sqrt(1/2), sqrt(2)).
  uint64_t exponent = (bits - 0x3fe6a09e667f3bcdu + (1023ull << 52)) >> 52;
  double fraction = double_of(bits - ((exponent - 1023) << 52));
  double power = double_of(exponent | 0x4330000000000000u) - (0x1p52 + 1023.0 + 54.0);
  double f = fraction - 1.0;
  double s = f / (2.0 + f);
  double z = s * s;
  double half_square = 0.5 * f * f;
  double series = 1.531383769920937332e-01 + z * 1.479819860511658591e-01;
  series = 1.818357216161805012e-01 + z * series;
  series = 2.222219843214978396e-01 + z * series;
  series = 2.857142874366239149e-01 + z * series;
  series = 3.999999999940941908e-01 + z * series;
  series = 6.666666666666735130e-01 + z * series;
  double tail = half_square - (s * (half_square + z * series) + power * LN2_LOW);
  return power * LN2_HIGH - (tail - f) + (x - x);  // x - x: NaN for NaN and infinity
}
