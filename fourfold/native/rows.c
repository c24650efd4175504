/* GELU and the loss, each in one pass over memory: between reading a row and writing it back, all
   that is computed stays in the cache. Numbers are float32 inside; `low` says they are bfloat16 in
   memory. */
#include <math.h>
#include <stdlib.h>

#include "simd.h"

#define PIECE 4096 /* numbers a thread takes at a time; whole vectors */


static void widen(float *to, const uint16_t *from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = of_bf16(from[i]);
}

static void narrow(uint16_t *to, const float *from, int64_t n) {
  for (int64_t i = 0; i < n; i++) to[i] = bf16_of(from[i]);
}

/* Numbers `at` to `at` + n, as float32: in place, or in `room`, with zeros up to a whole vector. */
INLINE const float *numbers(const void *from, int64_t at, int64_t n, float *room, int low) {
  if (!low && n % VL == 0) return (const float *)from + at;
  if (low)
    widen(room, (const uint16_t *)from + at, n);
  else
    memcpy(room, (const float *)from + at, n * sizeof(float));
  for (int64_t i = n; i % VL; i++) room[i] = 0;
  return room;
}

INLINE void put(void *to, int64_t at, const float *from, int64_t n, int low) {
  if (low)
    narrow((uint16_t *)to + at, from, n);
  else
    memcpy((float *)to + at, from, n * sizeof(float));
}

/* ---- GELU in its tanh form --------------------------------------------------------------------*/

void gelu_forward(int64_t n, const void *x, void *y, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE) {
    float room[PIECE], made[PIECE];
    int64_t count = least(PIECE, n - at);
    const float *given = numbers(x, at, count, room, low);
    for (int64_t i = 0; i < count; i += VL) v_store(made + i, v_gelu(v_load(given + i)));
    put(y, at, made, count, low);
  }
}

/* The derivative is s + x s (1 - s) u', with s = 1 / (1 + e^-u) and gelu(x) = x s. */
INLINE vf v_gelu_slope(vf x) {
  const float two_c = 1.5957691216057308f; /* 2 sqrt(2 / pi) */
  vf square = v_mul(x, x);
  vf u = v_mul(v_set(-two_c), v_fma(v_mul(square, x), v_set(0.044715f), x));
  vf s = v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(u)));
  vf du = v_fma(square, v_set(two_c * 3 * 0.044715f), v_set(two_c));
  vf bend = v_mul(v_mul(x, v_mul(s, v_sub(v_set(1.0f), s))), du);
  return v_add(s, bend);
}

/* dx = gradient times the derivative at x. */
void gelu_backward(int64_t n, const void *x, const void *gradient, void *dx, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE) {
    float room[PIECE], other[PIECE], made[PIECE];
    int64_t count = least(PIECE, n - at);
    const float *given = numbers(x, at, count, room, low);
    const float *upstream = numbers(gradient, at, count, other, low);
    for (int64_t i = 0; i < count; i += VL)
      v_store(made + i, v_mul(v_load(upstream + i), v_gelu_slope(v_load(given + i))));
    put(dx, at, made, count, low);
  }
}

/* ---- cross-entropy ----------------------------------------------------------------------------*/

/* losses = -log softmax(logits)[label] of every row; with `gradient` the logits are replaced by
   weight (softmax - one-hot). Returns 1 where memory ran out. */
int cross_entropy(int64_t rows, int64_t words, void *logits, const int64_t *labels,
                  const float *weights, float *losses, int gradient, int low) {
  int failed = 0;
  int64_t padded = (words + VL - 1) / VL * VL;
#pragma omp parallel
  {
    float *row = aligned_alloc(64, (padded * sizeof(float) + 63) / 64 * 64);
    if (!row) failed = 1;
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      if (failed) continue;
      if (low)
        widen(row, (uint16_t *)logits + r * words, words);
      else
        memcpy(row, (float *)logits + r * words, words * sizeof(float));
      for (int64_t i = words; i < padded; i++) row[i] = -INFINITY;
      vf most = v_set(-INFINITY), sums = v_zero();
      for (int64_t i = 0; i < padded; i += VL) most = v_max(v_load(row + i), most);
      float largest = v_largest(most), target = row[labels[r]];
      vf shift = v_set(largest);
      for (int64_t i = 0; i < padded; i += VL) {
        vf e = v_exp(v_sub(v_load(row + i), shift));
        v_store(row + i, e);
        sums = v_add(sums, e);
      }
      float sum = v_sum(sums);
      losses[r] = (largest - target) + logf(sum);
      if (!gradient) continue;
      vf share = v_set(weights[r] / sum);
      for (int64_t i = 0; i < padded; i += VL) v_store(row + i, v_mul(v_load(row + i), share));
      row[labels[r]] -= weights[r];
      put(logits, r * words, row, words, low);
    }
    free(row);
  }
  return failed;
}
