/* Vectors of floats, as wide as the processor has them: 16 with AVX-512, 8 with AVX2. */
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define WIDE 1
#define VL 16
typedef __m512 vf;
typedef __m512i vi;
INLINE vf v_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm512_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm512_set1_ps(a); }
INLINE vf v_zero(void) { return _mm512_setzero_ps(); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf v_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf v_round(vf a) { return _mm512_roundscale_ps(a, 0); }
INLINE float v_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float v_largest(vf a) { return _mm512_reduce_max_ps(a); }
INLINE vi vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE vi vi_set(int a) { return _mm512_set1_epi32(a); }
INLINE vi vi_and(vi a, vi b) { return _mm512_and_si512(a, b); }
INLINE vi vi_add(vi a, vi b) { return _mm512_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm512_sub_epi32(a, b); }
#define vi_shl(a, n) _mm512_slli_epi32(a, n)
#define vi_shr(a, n) _mm512_srli_epi32(a, n)
INLINE vf v_of(vi a) { return _mm512_cvtepi32_ps(a); }
INLINE vi v_to(vf a) { return _mm512_cvtps_epi32(a); }
INLINE vf v_bits(vi a) { return _mm512_castsi512_ps(a); }
INLINE vf v_half(const uint16_t *p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
/* bfloat16 in memory; rounding is to nearest even, and NaN stays NaN, as `bf16_of` has it. */
INLINE vf v_load_bf16(const uint16_t *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE void v_store_bf16(uint16_t *p, vf a) {
#if defined(__AVX512BF16__) /* differs in what is below the least normal number, which becomes 0 */
  _mm256_storeu_si256((__m256i *)p, (__m256i)_mm512_cvtneps_pbh(a));
#else
  __m512i bits = _mm512_castps_si512(a), top = _mm512_srli_epi32(bits, 16);
  __m512i odd = _mm512_and_si512(top, _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __m512i found = _mm512_srli_epi32(rounded, 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  found = _mm512_mask_or_epi32(found, nan, top, _mm512_set1_epi32(0x40));
  _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(found));
#endif
}
/* 2^n by its exponent bits, and x * 2^n in one instruction. */
INLINE vf v_scale2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
/* Lanes as bits of a number: a >= b, and whether a lane is NaN. */
INLINE unsigned v_reaches(vf a, vf b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
INLINE unsigned v_unordered(vf a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
INLINE vf v_zero_below(vf a, vf x, vf least) {
  return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(x, least, _CMP_LT_OQ), _mm512_setzero_ps());
}
#else
#define WIDE 0
#define VL 8
typedef __m256 vf;
typedef __m256i vi;
INLINE vf v_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void v_store(float *p, vf a) { _mm256_storeu_ps(p, a); }
INLINE vf v_set(float a) { return _mm256_set1_ps(a); }
INLINE vf v_zero(void) { return _mm256_setzero_ps(); }
INLINE vf v_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf v_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf v_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf v_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf v_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf v_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf v_min(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf v_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf v_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float v_sum(vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE float v_largest(vf a) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE vi vi_load(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE vi vi_set(int a) { return _mm256_set1_epi32(a); }
INLINE vi vi_and(vi a, vi b) { return _mm256_and_si256(a, b); }
INLINE vi vi_add(vi a, vi b) { return _mm256_add_epi32(a, b); }
INLINE vi vi_sub(vi a, vi b) { return _mm256_sub_epi32(a, b); }
#define vi_shl(a, n) _mm256_slli_epi32(a, n)
#define vi_shr(a, n) _mm256_srli_epi32(a, n)
INLINE vf v_of(vi a) { return _mm256_cvtepi32_ps(a); }
INLINE vi v_to(vf a) { return _mm256_cvtps_epi32(a); }
INLINE vf v_bits(vi a) { return _mm256_castsi256_ps(a); }
INLINE vf v_half(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf v_load_bf16(const uint16_t *p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
INLINE void v_store_bf16(uint16_t *p, vf a) {
  __m256i bits = _mm256_castps_si256(a), top = _mm256_srli_epi32(bits, 16);
  __m256i odd = _mm256_and_si256(top, _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  __m256i quiet = _mm256_or_si256(top, _mm256_set1_epi32(0x40));
  __m256i found = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), quiet, nan);
  __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(found, found), 0x88);
  _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(packed));
}
INLINE vf v_scale2(vf a, vf n) {
  __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(e));
}
INLINE unsigned v_reaches(vf a, vf b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ)); }
INLINE unsigned v_unordered(vf a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)); }
INLINE vf v_zero_below(vf a, vf x, vf least) {
  return _mm256_andnot_ps(_mm256_cmp_ps(x, least, _CMP_LT_OQ), a);
}
#endif

/* e^x within 2 units in the last place; 0 below -87.3, NaN stays NaN (the order of the operands
   of min and max decides that). */
INLINE vf v_exp(vf x) {
  vf bounded = v_min(v_set(88.0f), v_max(v_set(-87.3f), x));
  vf n = v_round(v_mul(bounded, v_set(1.44269504088896341f)));
  vf r = v_fma(n, v_set(-0.693359375f), bounded);
  r = v_fma(n, v_set(2.12194440e-4f), r);
  vf p = v_set(1.9875691500e-4f);
  p = v_fma(p, r, v_set(1.3981999507e-3f));
  p = v_fma(p, r, v_set(8.3334519073e-3f));
  p = v_fma(p, r, v_set(4.1665795894e-2f));
  p = v_fma(p, r, v_set(1.6666665459e-1f));
  p = v_fma(p, r, v_set(5.0000001201e-1f));
  vf e = v_add(v_fma(p, v_mul(r, r), r), v_set(1.0f));
  return v_zero_below(v_scale2(e, n), x, v_set(-87.3f));
}

/* GELU in its tanh form, x / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3). */
INLINE vf v_gelu(vf x) {
  vf u = v_mul(v_set(-1.5957691216057308f), v_fma(v_mul(v_mul(x, x), x), v_set(0.044715f), x));
  return v_div(x, v_add(v_set(1.0f), v_exp(u)));
}

/* The derivative of GELU, s + x s (1 - s) u', with s = 1 / (1 + e^-u) and gelu(x) = x s. */
INLINE vf v_gelu_slope(vf x) {
  const float two_c = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
  vf square = v_mul(x, x);
  vf u = v_mul(v_set(-two_c), v_fma(v_mul(square, x), v_set(0.044715f), x));
  vf s = v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(u)));
  vf du = v_fma(square, v_set(two_c * 3 * 0.044715f), v_set(two_c));
  vf bend = v_mul(v_mul(x, v_mul(s, v_sub(v_set(1.0f), s))), du);
  return v_add(s, bend);
}

INLINE uint16_t bf16_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE float of_bf16(uint16_t value) {
  uint32_t bits = (uint32_t)value << 16;
  float found;
  memcpy(&found, &bits, 4);
  return found;
}
INLINE uint16_t f16_of(float value) { return (uint16_t)_cvtss_sh(value, 0); }
INLINE float of_f16(uint16_t value) { return _cvtsh_ss(value); }

/* ---- numbers in memory, float32 or (`low`) bfloat16 -------------------------------------------*/

/* A vector from number `at` on, of which there are `left`; zeros beyond. */
INLINE vf v_take(const void *from, int64_t at, int64_t left, int low) {
  if (left >= VL && low) return v_load_bf16((const uint16_t *)from + at);
  if (left >= VL) return v_load((const float *)from + at);
  float room[VL] = {0};
  for (int64_t i = 0; i < left; i++)
    room[i] = low ? of_bf16(((const uint16_t *)from)[at + i]) : ((const float *)from)[at + i];
  return v_load(room);
}

INLINE void v_give(void *to, int64_t at, int64_t left, vf a, int low) {
  if (left >= VL) {
    if (low)
      v_store_bf16((uint16_t *)to + at, a);
    else
      v_store((float *)to + at, a);
    return;
  }
  float room[VL];
  v_store(room, a);
  for (int64_t i = 0; i < left; i++) {
    if (low)
      ((uint16_t *)to)[at + i] = bf16_of(room[i]);
    else
      ((float *)to)[at + i] = room[i];
  }
}
