// Vectors of 16 floats (vf) with the same functions on every instruction set. Each isa_*.cpp includes this file in its
// unnamed namespace and is compiled with the flags of its instruction set.
//
// Every function has one result, to the bit, on every instruction set (but for which NaN a NaN is): operations are those
// of IEEE 754, rounded to nearest, ties to even; vfma is rounded once; if one of the two arguments is NaN, or both are
// zeros, vmax and vmin return the second argument, as the x86 instructions do; vsum, vlargest, vexp and vnormal define
// their operations below. Conversions to bf16 round to nearest, ties to even; any NaN becomes 0x7fc0. From 32 bf16, veven
// loads the 16 elements of even index, vodd those of odd index.

#if defined(PRONK_SIMD_AVX512)

typedef __m512 vf;
typedef __m512i vi;
static inline vf vzero() { return _mm512_setzero_ps(); }
static inline vf vset(float x) { return _mm512_set1_ps(x); }
static inline vf vload(const float* p) { return _mm512_loadu_ps(p); }
static inline void vstore(float* p, vf x) { _mm512_storeu_ps(p, x); }
static inline vf vadd(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vsub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vmul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vdiv(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vfma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
#if !defined(PRONK_FEW_TILES)  // not in builds with a sanitizer, which cannot check inline assembly
// sum += a * b. Inline assembly, because the compiler adds register copies around the intrinsic.
static inline void vadd_product(vf& sum, vf a, vf b) { asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
static inline void vadd_product_at(vf& sum, vf a, const float* b) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(a), "m"(*b));
}
#endif
static inline vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vf vbelow(vf x, float limit, vf then, vf other) {  // per lane: x < limit ? then : other
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_LT_OQ), other, then);
}
static inline vf vrange(vf x, int low, int high, float other) {  // lanes i with low <= i < high: x; others: `other`
  low = low < 0 ? 0 : low > 16 ? 16 : low;
  uint32_t mask = high <= low ? 0u : ((1u << (high > 16 ? 16 : high)) - 1u) & ~((1u << low) - 1u);
  return _mm512_mask_blend_ps((__mmask16)mask, _mm512_set1_ps(other), x);
}
static inline vf veven(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
static inline vf vodd(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32((int)0xffff0000)));
}
static inline vf vload_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
static inline vf vload_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
static inline vf vload_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// The numbers of 16 codes of an int4 cache: of the low nibbles of 16 bytes, or of the high ones.
static inline vf vload_i4(const uint8_t* p, bool high) {
  vi bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
  return _mm512_permutexvar_ps(high ? _mm512_srli_epi32(bytes, 4) : bytes, vload(INT4_NUMBERS));  // 4 bits of an index
}
// Lane i is lane i ^ distance of x.
template <int distance>
static inline vf vswap(vf x) {
  if constexpr (distance == 1) return _mm512_permute_ps(x, 0xb1);
  else if constexpr (distance == 2) return _mm512_permute_ps(x, 0x4e);
  else return _mm512_shuffle_f32x4(x, x, distance == 4 ? 0xb1 : 0x4e);
}
static inline void vstore_i8(int8_t* p, vf x) {  // x holds integers in -128 .. 127
  _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
}
static inline void vstore_bf16(uint16_t* p, vf x) {
  vi bits = _mm512_castps_si512(x);
  vi odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  vi up = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  vi rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, up), 16);
  rounded = _mm512_mask_blend_epi32(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), rounded, _mm512_set1_epi32(0x7fc0));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
}
static inline vf vscale2(vf x, vf n) {  // x * 2^n for integers n in -127 .. 128
  vi exponent = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
  return _mm512_mul_ps(x, _mm512_castsi512_ps(exponent));
}
static inline vf vround(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

#elif defined(PRONK_SIMD_AVX2)

struct vf { __m256 a, b; };
static inline vf vzero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline vf vset(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
static inline vf vload(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void vstore(float* p, vf x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline vf vadd(vf x, vf y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline vf vsub(vf x, vf y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline vf vmul(vf x, vf y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline vf vdiv(vf x, vf y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline vf vfma(vf x, vf y, vf z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline vf vmax(vf x, vf y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline vf vmin(vf x, vf y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline vf vbelow(vf x, float limit, vf then, vf other) {
  __m256 l = _mm256_set1_ps(limit);
  return {_mm256_blendv_ps(other.a, then.a, _mm256_cmp_ps(x.a, l, _CMP_LT_OQ)),
          _mm256_blendv_ps(other.b, then.b, _mm256_cmp_ps(x.b, l, _CMP_LT_OQ))};
}
static inline vf vrange(vf x, int low, int high, float other) {
  __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), second = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
  __m256i under = _mm256_set1_epi32(low - 1), above = _mm256_set1_epi32(high);
  __m256i in_a = _mm256_and_si256(_mm256_cmpgt_epi32(first, under), _mm256_cmpgt_epi32(above, first));
  __m256i in_b = _mm256_and_si256(_mm256_cmpgt_epi32(second, under), _mm256_cmpgt_epi32(above, second));
  __m256 o = _mm256_set1_ps(other);
  return {_mm256_blendv_ps(o, x.a, _mm256_castsi256_ps(in_a)), _mm256_blendv_ps(o, x.b, _mm256_castsi256_ps(in_b))};
}
static inline __m256 even8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16));
}
static inline __m256 odd8(const uint16_t* p) {
  __m256i both = _mm256_loadu_si256((const __m256i*)p);
  return _mm256_castsi256_ps(_mm256_and_si256(both, _mm256_set1_epi32((int)0xffff0000)));
}
static inline vf veven(const uint16_t* p) { return {even8(p), even8(p + 16)}; }
static inline vf vodd(const uint16_t* p) { return {odd8(p), odd8(p + 16)}; }
static inline __m256 bf16_8(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
static inline vf vload_bf16(const uint16_t* p) { return {bf16_8(p), bf16_8(p + 8)}; }
static inline vf vload_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
static inline __m256 i8_8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
static inline vf vload_i8(const int8_t* p) { return {i8_8(p), i8_8(p + 8)}; }
static inline vf vload_i4(const uint8_t* p, bool high) {
  __m128i bytes = _mm_loadu_si128((const __m128i*)p);
  __m128i codes = _mm_and_si128(high ? _mm_srli_epi16(bytes, 4) : bytes, _mm_set1_epi8(15));
  __m128i numbers = _mm_shuffle_epi8(_mm_load_si128((const __m128i*)INT4_BYTES), codes);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(numbers)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(numbers, 8)))};
}
template <int distance>
static inline vf vswap(vf x) {
  if constexpr (distance == 1) return {_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
  else if constexpr (distance == 2) return {_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)};
  else if constexpr (distance == 4)
    return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  else return {x.b, x.a};
}
static inline void vstore_i8(int8_t* p, vf x) {
  __m256i a = _mm256_cvtps_epi32(x.a), b = _mm256_cvtps_epi32(x.b);
  __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(low, high));
}
static inline __m128i round_bf16(__m256 x) {
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i up = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, up), 16);
  __m256 nan = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(nan));
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
}
static inline void vstore_bf16(uint16_t* p, vf x) {
  _mm_storeu_si128((__m128i*)p, round_bf16(x.a));
  _mm_storeu_si128((__m128i*)(p + 8), round_bf16(x.b));
}
static inline __m256 scale2_8(__m256 x, __m256 n) {
  __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23)));
}
static inline vf vscale2(vf x, vf n) { return {scale2_8(x.a, n.a), scale2_8(x.b, n.b)}; }
static inline vf vround(vf x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

#else

// Loops over 16 lanes, which the compiler vectorizes for the target (SSE2, NEON, SVE …).
struct vf { float x[16]; };
#define PRONK_EACH for (int i = 0; i < 16; i++)
static inline float bits_to_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static inline uint32_t float_to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static inline vf vset(float x) { vf r; PRONK_EACH r.x[i] = x; return r; }
static inline vf vzero() { return vset(0.0f); }
static inline vf vload(const float* p) { vf r; PRONK_EACH r.x[i] = p[i]; return r; }
static inline void vstore(float* p, vf a) { PRONK_EACH p[i] = a.x[i]; }
static inline vf vadd(vf a, vf b) { PRONK_EACH a.x[i] += b.x[i]; return a; }
static inline vf vsub(vf a, vf b) { PRONK_EACH a.x[i] -= b.x[i]; return a; }
static inline vf vmul(vf a, vf b) { PRONK_EACH a.x[i] *= b.x[i]; return a; }
static inline vf vdiv(vf a, vf b) { PRONK_EACH a.x[i] /= b.x[i]; return a; }
static inline vf vfma(vf a, vf b, vf c) {
#if defined(__FMA__) || defined(__aarch64__) || defined(__FP_FAST_FMAF)
  PRONK_EACH c.x[i] = __builtin_fmaf(a.x[i], b.x[i], c.x[i]);
#else
  PRONK_EACH c.x[i] = fused_multiply_add(a.x[i], b.x[i], c.x[i]);
#endif
  return c;
}
static inline vf vmax(vf a, vf b) { PRONK_EACH b.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i]; return b; }
static inline vf vmin(vf a, vf b) { PRONK_EACH b.x[i] = a.x[i] < b.x[i] ? a.x[i] : b.x[i]; return b; }
static inline vf vbelow(vf x, float limit, vf then, vf other) {
  PRONK_EACH other.x[i] = x.x[i] < limit ? then.x[i] : other.x[i];
  return other;
}
static inline vf vrange(vf x, int low, int high, float other) {
  PRONK_EACH x.x[i] = i >= low && i < high ? x.x[i] : other;
  return x;
}
static inline vf veven(const uint16_t* p) { vf r; PRONK_EACH r.x[i] = bf16_to_float(p[2 * i]); return r; }
static inline vf vodd(const uint16_t* p) { vf r; PRONK_EACH r.x[i] = bf16_to_float(p[2 * i + 1]); return r; }
static inline vf vload_bf16(const uint16_t* p) { vf r; PRONK_EACH r.x[i] = bf16_to_float(p[i]); return r; }
static inline vf vload_f16(const uint16_t* p) { vf r; PRONK_EACH r.x[i] = half_to_float(p[i]); return r; }
static inline vf vload_i8(const int8_t* p) { vf r; PRONK_EACH r.x[i] = p[i]; return r; }
static inline vf vload_i4(const uint8_t* p, bool high) {
  vf r;
  PRONK_EACH r.x[i] = INT4_NUMBERS[high ? p[i] >> 4 : p[i] & 15];
  return r;
}
template <int distance>
static inline vf vswap(vf a) { vf r; PRONK_EACH r.x[i] = a.x[i ^ distance]; return r; }
static inline void vstore_i8(int8_t* p, vf a) { PRONK_EACH p[i] = (int8_t)a.x[i]; }
static inline void vstore_bf16(uint16_t* p, vf a) { PRONK_EACH p[i] = float_to_bf16(a.x[i]); }
static inline vf vround(vf a) { PRONK_EACH a.x[i] = __builtin_rintf(a.x[i]); return a; }
static inline vf vscale2(vf x, vf n) {
  PRONK_EACH x.x[i] *= n.x[i] == n.x[i] ? bits_to_float((uint32_t)((int32_t)n.x[i] + 127) << 23) : n.x[i];
  return x;
}
#undef PRONK_EACH

#endif

#if !defined(PRONK_SIMD_AVX512) || defined(PRONK_FEW_TILES)
static inline void vadd_product(vf& sum, vf a, vf b) { sum = vfma(a, b, sum); }
static inline void vadd_product_at(vf& sum, vf a, const float* b) { sum = vfma(a, vset(*b), sum); }
#endif

// sum[m][n] += a[n] * b[m * STRIDE]. With AVX-512, for odd m, b is a memory operand of the FMA: this saves instructions
// for loading b but repeats the load for each n, so using it for every second m balances instructions and loads.
template <int M, int N, int STRIDE>
static inline void vadd_products(vf (&sum)[M][N], const vf (&a)[N], const float* b) {
#pragma GCC unroll 16
  for (int m = 0; m < M; m++) {
    if (m % 2) {
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) vadd_product_at(sum[m][n], a[n], b + m * STRIDE);
    } else {
      vf factor = vset(b[m * STRIDE]);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) vadd_product(sum[m][n], a[n], factor);
    }
  }
}

// Add the 16 lanes in the same order on every instruction set: lane[i] += lane[i + 8] for i < 8, then + 4, + 2, + 1.
static inline float vsum(vf x) {
#if defined(PRONK_SIMD_AVX512) || defined(PRONK_SIMD_AVX2)
#if defined(PRONK_SIMD_AVX512)
  __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  __m256 eight = _mm256_add_ps(x.a, x.b);
#endif
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lane[16];
  vstore(lane, x);
  for (int step = 8; step; step >>= 1)
    for (int i = 0; i < step; i++) lane[i] += lane[i + step];
  return lane[0];
#endif
}

// Maximum of the 16 lanes, in the order of vsum; of two lanes the one with the larger index if one is NaN.
static inline float vlargest(vf x) {
#if defined(PRONK_SIMD_AVX512) || defined(PRONK_SIMD_AVX2)
#if defined(PRONK_SIMD_AVX512)
  __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
#else
  __m256 eight = _mm256_max_ps(x.a, x.b);
#endif
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lane[16];
  vstore(lane, x);
  for (int step = 8; step; step >>= 1)
    for (int i = 0; i < step; i++) lane[i] = lane[i] > lane[i + step] ? lane[i] : lane[i + step];
  return lane[0];
#endif
}

// e^x, with an error of at most 2 units in the last place; 0 below -87.33, infinity above 88.37, NaN for NaN.
static inline vf vexp(vf x) {
  vf y = vmin(vset(89.0f), vmax(vset(-88.0f), x));
  vf n = vround(vmul(y, vset(1.44269504088896341f)));
  vf r = vfma(n, vset(-0.693359375f), y);
  r = vfma(n, vset(2.12194440e-4f), r);
  vf p = vset(1.9875691500e-4f);
  p = vfma(p, r, vset(1.3981999507e-3f));
  p = vfma(p, r, vset(8.3334519073e-3f));
  p = vfma(p, r, vset(4.1665795894e-2f));
  p = vfma(p, r, vset(1.6666665459e-1f));
  p = vfma(p, r, vset(5.0000001201e-1f));
  p = vadd(vfma(p, vmul(r, r), r), vset(1.0f));
  return vbelow(x, -87.33f, vzero(), vscale2(p, n));
}

// Distribution function of the normal distribution, with an absolute error below 2e-7: erfc(t) / 2 for x < 0, otherwise
// 1 - erfc(t) / 2, where t = |x| / sqrt(2). With v = t / (2 + t), erfc(t) = (1 - v) e^(v Q(v) - t^2) on all of t >= 0; Q is
// a minimax polynomial.
static inline vf vnormal(vf x) {
  vf t = vmul(vmax(vsub(vzero(), x), x), vset(0.70710678118654752f));
  vf u = vdiv(vset(2.0f), vadd(vset(2.0f), t));
  vf v = vmul(vmul(vset(0.5f), t), u);
  vf q = vset(-0.135161608f);
  q = vfma(q, v, vset(0.587498248f));
  q = vfma(q, v, vset(-0.871955931f));
  q = vfma(q, v, vset(0.465236425f));
  q = vfma(q, v, vset(-0.145498127f));
  q = vfma(q, v, vset(0.238289639f));
  q = vfma(q, v, vset(0.155830249f));
  q = vfma(q, v, vset(-0.302898079f));
  q = vfma(q, v, vset(-1.25676537f));
  vf half_erfc = vmul(vmul(vset(0.5f), u), vexp(vfma(q, v, vsub(vzero(), vmul(t, t)))));
  return vbelow(x, 0.0f, half_erfc, vsub(vset(1.0f), half_erfc));
}
