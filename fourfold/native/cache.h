/* Keys and values of the tokens so far, and attention to them.

   Heads of queries may share keys and values: only those of the G heads that differ are kept, and
   the queries that share them are computed together, four at a time, as are four tokens of a prompt
   that follow each other. Each sum is taken in the order of the positions, however many queries
   there are: the result of one is the same to the bit alone and beside others.

   Letters: G heads of keys and values, K head size, T positions. */
#pragma once
#include <math.h>

#include "matrix.h"

typedef struct {
  /* Of float32, or where `half` of half precision. */
  char *keys;   /* (sequences, G, T / 16, K, 16): panels, as of a matrix whose outputs are tokens */
  char *values; /* (sequences, G, T, K padded to 16) */
  int64_t heads, size, positions, half; /* positions: a multiple of 16 */
} Cache;

INLINE int64_t padded_size(const Cache *cache) { return (cache->size + 15) / 16 * 16; }

/* Half precision ends at 65504; what is larger, and finite, stays that large. */
INLINE uint16_t bounded_half(float x) {
  return f16_of(x > 65504.0f && x < INFINITY ? 65504.0f : x < -65504.0f && x > -INFINITY ? -65504.0f : x);
}

/* Head h of the token at a position of a sequence. */
static void store(const Cache *cache, int64_t sequence, int64_t position, int64_t h,
                  const float *key, const float *value) {
  const int64_t K = cache->size, T = cache->positions, place = sequence * cache->heads + h;
  int64_t panel = (place * T + position / PANEL * PANEL) * K + position % PANEL;
  int64_t line = (place * T + position) * padded_size(cache);
  if (cache->half) {
    uint16_t *keys = (uint16_t *)cache->keys + panel, *values = (uint16_t *)cache->values + line;
    for (int64_t d = 0; d < K; d++) keys[d * PANEL] = bounded_half(key[d]);
    for (int64_t d = 0; d < K; d++) values[d] = bounded_half(value[d]);
  } else {
    float *keys = (float *)cache->keys + panel;
    for (int64_t d = 0; d < K; d++) keys[d * PANEL] = key[d];
    memcpy((float *)cache->values + line, value, 4 * K);
  }
}

INLINE vf load_cached(const int half, const char *base, int64_t number) {
  return half ? v_half((const uint16_t *)base + number) : v_load((const float *)base + number);
}

#define QUERIES 4
typedef struct {
  const float *from; /* K numbers */
  float *to;
  int64_t start, stop; /* the positions it attends to */
} Query;

/* Queries of one sequence to its head h; starts and stops do not fall. `scores` has room for T of
   each. */
INLINE void attend_queries(const int count, const int half, const Cache *cache, int64_t sequence, int64_t h,
                           float scale, const Query *queries, float *scores) {
  const int64_t K = cache->size, KP = padded_size(cache), T = cache->positions;
  const int64_t place = sequence * cache->heads + h, size = half ? 2 : 4;
  const char *keys = cache->keys + place * T * K * size, *values = cache->values + place * T * KP * size;
  const int64_t first = queries[0].start, longest = queries[count - 1].stop;
  const int64_t begin = first / PANEL, blocks = (longest + PANEL - 1) / PANEL;
  const int one_token = queries[0].stop == longest;
  const float *from[QUERIES];
  UNROLL for (int r = 0; r < count; r++) from[r] = queries[r].from;
  enum { SIDE = 4 };
  for (int64_t block = begin; block < blocks; block += SIDE) {
    /* One token waits for memory: the values of these are fetched while their keys are used. */
    if (one_token)
      for (int64_t at = 0; at < SIDE * PANEL * KP * size; at += 64)
        _mm_prefetch(values + block * PANEL * KP * size + at, _MM_HINT_T0);
    vf sums[QUERIES][SIDE][NV];
    UNROLL for (int r = 0; r < count; r++) UNROLL for (int b = 0; b < SIDE; b++)
        UNROLL for (int v = 0; v < NV; v++) sums[r][b][v] = v_zero();
    /* Blocks beyond the last repeat it. */
    const char *at[SIDE];
    UNROLL for (int b = 0; b < SIDE; b++)
        at[b] = keys + (block + b < blocks ? block + b : blocks - 1) * PANEL * K * size;
    for (int64_t d = 0; d < K; d++) {
      vf key[SIDE][NV];
      UNROLL for (int b = 0; b < SIDE; b++) UNROLL for (int v = 0; v < NV; v++)
          key[b][v] = load_cached(half, at[b], d * PANEL + v * VL);
      UNROLL for (int r = 0; r < count; r++) {
        vf q = v_set(from[r][d]);
        UNROLL for (int b = 0; b < SIDE; b++) UNROLL for (int v = 0; v < NV; v++)
            sums[r][b][v] = v_fma(key[b][v], q, sums[r][b][v]);
      }
    }
    UNROLL for (int r = 0; r < count; r++) UNROLL for (int b = 0; b < SIDE; b++)
        UNROLL for (int v = 0; v < NV; v++) if (block + b < blocks)
            v_store(scores + r * T + (block + b) * PANEL + v * VL, v_mul(sums[r][b][v], v_set(scale)));
  }
  float inverse[QUERIES];
  for (int r = 0; r < count; r++) {
    float *row = scores + r * T;
    int64_t start = queries[r].start, stop = queries[r].stop, whole = blocks * PANEL;
    for (int64_t t = begin * PANEL; t < start; t++) row[t] = -INFINITY;
    for (int64_t t = stop; t < whole; t++) row[t] = -INFINITY;
    vf most = v_load(row + begin * PANEL);
    for (int64_t t = begin * PANEL + VL; t < whole; t += VL) most = v_max(most, v_load(row + t));
    float largest = v_largest(most);
    vf total = v_zero();
    for (int64_t t = begin * PANEL; t < whole; t += VL) {
      vf weight = v_exp(v_sub(v_load(row + t), v_set(largest)));
      v_store(row + t, weight);
      if (t + VL <= stop) total = v_add(total, weight);
    }
    for (int64_t t = begin * PANEL; t < start; t++) row[t] = 0.0f;
    for (int64_t t = stop; t < whole; t++) row[t] = 0.0f;
    float sum = v_sum(total);
    for (int64_t t = stop / VL * VL; t < stop; t++) sum += row[t];
    inverse[r] = 1.0f / sum;
  }
  for (int64_t d = 0; d < KP; d += 4 * VL) {
    const int64_t parts = (KP - d) / VL < 4 ? (KP - d) / VL : 4;
    vf sums[QUERIES][4];
    UNROLL for (int r = 0; r < count; r++) UNROLL for (int v = 0; v < 4; v++) sums[r][v] = v_zero();
    if (parts == 4) {
      for (int64_t t = first; t < longest; t++) {
        vf value[4];
        UNROLL for (int v = 0; v < 4; v++) value[v] = load_cached(half, values, t * KP + d + v * VL);
        UNROLL for (int r = 0; r < count; r++) {
          vf weight = v_set(scores[r * T + t]);
          UNROLL for (int v = 0; v < 4; v++) sums[r][v] = v_fma(value[v], weight, sums[r][v]);
        }
      }
    } else {
      for (int64_t t = first; t < longest; t++)
        for (int r = 0; r < count; r++)
          for (int v = 0; v < parts; v++)
            sums[r][v] = v_fma(load_cached(half, values, t * KP + d + v * VL),
                               v_set(scores[r * T + t]), sums[r][v]);
    }
    for (int r = 0; r < count; r++)
      for (int v = 0; v < parts; v++) {
        float some[VL];
        v_store(some, v_mul(sums[r][v], v_set(inverse[r])));
        for (int j = 0; j < VL && d + v * VL + j < K; j++) queries[r].to[d + v * VL + j] = some[j];
      }
  }
}

#define ATTEND(count)                                                                             \
  static __attribute__((noinline)) void attend_##count(const Cache *cache, int64_t sequence, int64_t h, \
                                                       float scale, const Query *queries, float *scores) { \
    if (cache->half)                                                                              \
      attend_queries(count, 1, cache, sequence, h, scale, queries, scores);                       \
    else                                                                                          \
      attend_queries(count, 0, cache, sequence, h, scale, queries, scores);                       \
  }
ATTEND(1) ATTEND(2) ATTEND(4)

/* As many as there are. */
static void attend(int64_t count, const Cache *cache, int64_t sequence, int64_t h, float scale,
                   const Query *queries, float *scores) {
  for (; count >= 4; count -= 4, queries += 4) attend_4(cache, sequence, h, scale, queries, scores);
  for (; count >= 2; count -= 2, queries += 2) attend_2(cache, sequence, h, scale, queries, scores);
  if (count) attend_1(cache, sequence, h, scale, queries, scores);
}
