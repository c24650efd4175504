/* Causal self-attention for training: softmax(scale q k^T) v, and its gradients.

   Heads of queries may share a head of keys and values, whose gradients are then sums over these.
   Rotary positions are applied as queries and keys are loaded, and taken back from their gradients
   before these are stored: no pass over memory is spent on them.

   A block of BLOCK queries of one head is held against all keys it may see at once, so a row of
   scores is whole when it is normalised, and the half of the table above the diagonal is never
   computed. Nothing of the size of the table is kept: the backward pass makes the scores again from
   the logarithm of each row's sum. Dropout draws from a hash of (seed, sequence, head, query, key),
   so it needs no table either, and a head drops the same wherever it is computed.

   All products go through one micro-kernel, TILE rows by WIDTH columns held in registers. Its right
   side is packed into panels of WIDTH columns; its left side is read in place, by rows or by
   columns. Both consist of words of four bytes: a float32 or, where q, k and v are bfloat16 and the
   processor multiplies that, two of these that follow each other along the sum (`pairs`). Sums,
   scores and probabilities are float32, which a product with pairs then rounds; without such
   instructions bfloat16 is widened as it is loaded. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "simd.h"

#if WIDE
#define TILE 12
#else
#define TILE 6
#endif
#define WIDTH (2 * VL)
#define BLOCK 48 /* whole tiles, and even */

#if WIDE && defined(__AVX512BF16__)
#define HAS_PAIRS 1
INLINE vf v_dot(vf a, vf b, vf sum) {
  return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
}
#else
#define HAS_PAIRS 0
INLINE vf v_dot(vf a, vf b, vf sum) { return v_fma(a, b, sum); } /* never called */
#endif

typedef struct {
  int64_t sequences, heads, shared, positions, size; /* B, H, of keys and values, T, K */
  int64_t strides[3][3];                             /* of q, k, v: sequence, position, head */
  int64_t gradient_strides[3][3];                    /* of dq, dk, dv */
  int64_t rotated, turn_stride; /* pairs of a head; from sequence to sequence, in `turns` */
  int64_t first_head;           /* of the model's, where this process has some */
  uint64_t seed;
  float scale, dropout;
  int32_t low; /* q, k, v, the output and all gradients are bfloat16 */
} Shape;

INLINE int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* ---- products ---------------------------------------------------------------------------------*/

/* c (TILE x WIDTH) = or += a (TILE x depth) times a panel (depth x WIDTH); depth counts words. */
INLINE void tile(float *c, int64_t ldc, const float *a, int64_t row, int64_t column,
                 const float *panel, int64_t depth, int add, int pairs) {
  vf sums[TILE][2];
  UNROLL for (int i = 0; i < TILE; i++) {
    sums[i][0] = add ? v_load(c + i * ldc) : v_zero();
    sums[i][1] = add ? v_load(c + i * ldc + VL) : v_zero();
  }
  for (int64_t d = 0; d < depth; d++) {
    vf left = v_load(panel + d * WIDTH), right = v_load(panel + d * WIDTH + VL);
    UNROLL for (int i = 0; i < TILE; i++) {
      vf x = v_set(a[i * row + d * column]);
      sums[i][0] = pairs ? v_dot(x, left, sums[i][0]) : v_fma(x, left, sums[i][0]);
      sums[i][1] = pairs ? v_dot(x, right, sums[i][1]) : v_fma(x, right, sums[i][1]);
    }
  }
  UNROLL for (int i = 0; i < TILE; i++) {
    v_store(c + i * ldc, sums[i][0]);
    v_store(c + i * ldc + VL, sums[i][1]);
  }
}

/* c (rows x columns) = a (rows x depth) times panels, each `panel` words after the one before.
   Rows are whole tiles and columns whole panels. */
static void multiply(float *c, int64_t ldc, int64_t rows, int64_t columns, const float *a,
                     int64_t lda, const float *panels, int64_t panel, int64_t depth, int pairs) {
  for (int64_t j = 0; j < columns; j += WIDTH)
    for (int64_t i = 0; i < rows; i += TILE) {
      const float *right = panels + j / WIDTH * panel;
      if (pairs)
        tile(c + i * ldc + j, ldc, a + i * lda, lda, 1, right, depth, 0, 1);
      else
        tile(c + i * ldc + j, ldc, a + i * lda, lda, 1, right, depth, 0, 0);
    }
}

/* c (rows x columns) += the transpose of a (depth x rows) times panels. */
static void multiply_transposed(float *c, int64_t ldc, int64_t rows, int64_t columns,
                                const float *a, int64_t lda, const float *panels, int64_t panel,
                                int64_t depth, int pairs) {
  for (int64_t j = 0; j < columns; j += WIDTH)
    for (int64_t i = 0; i < rows; i += TILE) {
      const float *right = panels + j / WIDTH * panel;
      if (pairs)
        tile(c + i * ldc + j, ldc, a + i, 1, lda, right, depth, 1, 1);
      else
        tile(c + i * ldc + j, ldc, a + i, 1, lda, right, depth, 1, 0);
    }
}

/* ---- rotary positions -------------------------------------------------------------------------*/

/* Of one sequence, (T, half) each; number i of a head is a pair with number i + half. */
typedef struct {
  const float *cosines, *sines;
  int64_t half; /* 0: nothing is rotated */
} Turns;

static const Turns NO_TURNS = {NULL, NULL, 0};

/* `turns` is (2, B or 1, T, half): cosines, then sines. */
static Turns turns_of(const Shape *s, const float *turns, int64_t sequence) {
  if (!turns) return NO_TURNS;
  int64_t table = s->positions * s->rotated, all = s->turn_stride ? s->sequences : 1;
  const float *cosines = turns + sequence * s->turn_stride;
  return (Turns){cosines, cosines + all * table, s->rotated};
}

/* A row by the angles of its position, or (`sign` -1) back. */
INLINE void turn(float *row, const Turns *turns, int64_t position, float sign) {
  int64_t half = turns->half;
  const float *c = turns->cosines + position * half, *s = turns->sines + position * half;
  float *one = row, *other = row + half;
#pragma omp simd
  for (int64_t d = 0; d < half; d++) {
    float a = one[d], b = other[d], sine = sign * s[d];
    one[d] = a * c[d] - b * sine;
    other[d] = b * c[d] + a * sine;
  }
}

/* Gradients of what was turned, (rows x width) from `position` on. */
static void turn_back(float *rows, int64_t width, int64_t position, int64_t count,
                      const Turns *turns) {
  for (int64_t t = 0; turns->half && t < count; t++)
    turn(rows + t * width, turns, position + t, -1.0f);
}

/* ---- rows in and out --------------------------------------------------------------------------*/

/* `rows` rows of `size` numbers, turned, each filled up with zeros to `width` words, and zeros to
   `all` rows; `pairs` stay as they are, other bfloat16 (`low`) is widened. */
static void load_rows(float *to, int64_t width, int64_t all, const void *from, int64_t at,
                      int64_t stride, int64_t rows, int64_t size, int low, int pairs, Turns turns) {
  float whole[size];
  for (int64_t t = 0; t < rows; t++) {
    float *row = to + t * width, *wide = pairs ? whole : row;
    const uint16_t *x = (const uint16_t *)from + at + t * stride;
    if (pairs && !turns.half)
      memcpy(row, x, size * sizeof(uint16_t));
    else if (low)
      for (int64_t d = 0; d < size; d++) wide[d] = of_bf16(x[d]);
    else
      memcpy(row, (const float *)from + at + t * stride, size * sizeof(float));
    if (turns.half) turn(wide, &turns, t, 1.0f);
    if (pairs && turns.half)
      for (int64_t d = 0; d < size; d++) ((uint16_t *)row)[d] = bf16_of(whole[d]);
    int64_t written = size * (pairs ? sizeof(uint16_t) : sizeof(float));
    memset((char *)row + written, 0, width * sizeof(float) - written);
  }
  memset(to + rows * width, 0, (all - rows) * width * sizeof(float));
}

static void store_rows(void *to, int64_t at, int64_t stride, const float *from, int64_t width,
                       int64_t rows, int64_t size, int low) {
  for (int64_t t = 0; t < rows; t++) {
    const float *row = from + t * width;
    if (low) {
      uint16_t *y = (uint16_t *)to + at + t * stride;
      for (int64_t d = 0; d < size; d++) y[d] = bf16_of(row[d]);
    } else
      memcpy((float *)to + at + t * stride, row, size * sizeof(float));
  }
}

/* rows (n x width words) into panels over their columns: [columns / WIDTH][n][WIDTH], with `pairs`
   [columns / WIDTH][n / 2][WIDTH], two rows joined. */
static void pack(float *panels, const float *rows, int64_t width, int64_t n, int pairs) {
  if (!pairs) {
    for (int64_t p = 0; p < width; p += WIDTH)
      for (int64_t t = 0; t < n; t++)
        memcpy(panels + p * n + t * WIDTH, rows + t * width + p, WIDTH * sizeof(float));
    return;
  }
  for (int64_t p = 0; p < 2 * width; p += WIDTH)
    for (int64_t t = 0; t < n; t += 2) {
      const uint16_t *first = (const uint16_t *)(rows + t * width) + p, *second = first + 2 * width;
      uint32_t *to = (uint32_t *)(panels + p * (n / 2) + t / 2 * WIDTH);
      for (int64_t j = 0; j < WIDTH; j++) to[j] = first[j] | (uint32_t)second[j] << 16;
    }
}

/* The transpose of rows (n x width) into panels: [n / WIDTH][width][WIDTH]. */
static void pack_transposed(float *panels, const float *rows, int64_t width, int64_t n) {
  for (int64_t t = 0; t < n; t += WIDTH)
    for (int64_t j = 0; j < WIDTH; j++)
      for (int64_t d = 0; d < width; d++)
        panels[t * width + d * WIDTH + j] = rows[(t + j) * width + d];
}

/* A row of the table in half its memory. */
static void narrow(float *row, int64_t first, int64_t last) {
  uint16_t *to = (uint16_t *)row;
  for (int64_t j = first; j < last; j++) to[j] = bf16_of(row[j]);
}

/* Two rows of the table as pairs, for products with its transpose. */
static void join(float *pairs, const float *one, const float *other, int64_t first, int64_t last) {
  uint32_t *to = (uint32_t *)pairs;
  for (int64_t j = first; j < last; j++)
    to[j] = bf16_of(one[j]) | (uint32_t)bf16_of(other[j]) << 16;
}

/* ---- rows of the table ------------------------------------------------------------------------*/

/* Every bit of the result depends on every bit of x (Murmur's finalizer). */
INLINE uint32_t scramble(uint32_t x) {
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

static uint32_t row_key(const Shape *s, int64_t sequence, int64_t head, int64_t query) {
  uint32_t key = scramble((uint32_t)s->seed ^ 0x9e3779b9u);
  key = scramble(key ^ (uint32_t)(s->seed >> 32));
  key = scramble(key ^ (uint32_t)sequence);
  key = scramble(key ^ (uint32_t)(s->first_head + head));
  return scramble(key ^ (uint32_t)query);
}

static void drop(float *to, const float *from, int64_t start, int64_t stop, uint32_t key,
                 float dropout) {
  uint32_t threshold = (uint32_t)((double)dropout * 4294967296.0);
  float factor = 1.0f / (1.0f - dropout);
#pragma omp simd
  for (int64_t j = start; j < stop; j++)
    to[j] = scramble(key + (uint32_t)j * 0x9e3779b9u) >= threshold ? from[j] * factor : 0.0f;
}

/* Zeros outside of start to stop, of what is computed: first to last, both whole vectors. */
INLINE void clear(float *row, int64_t first, int64_t start, int64_t stop, int64_t last) {
  for (int64_t j = first; j < start; j++) row[j] = 0;
  for (int64_t j = stop; j < last; j++) row[j] = 0;
}

/* Scores of start to stop become probabilities; returns the logarithm of their sum. */
static float normalize(float *row, int64_t first, int64_t start, int64_t stop, int64_t last,
                       float scale) {
  float most = row[start];
#pragma omp simd reduction(max : most)
  for (int64_t j = start; j < stop; j++) most = row[j] > most ? row[j] : most;
  vf lowest = v_set(most * scale), by = v_set(scale), sums = v_zero();
  int64_t from = start / VL * VL, to = up(stop, VL);
  for (int64_t j = from; j < to; j += VL)
    v_store(row + j, v_exp(v_sub(v_mul(v_load(row + j), by), lowest)));
  clear(row, first, start, stop, last);
  for (int64_t j = from; j < to; j += VL) sums = v_add(sums, v_load(row + j));
  float sum = v_sum(sums);
  vf share = v_set(1.0f / sum);
  for (int64_t j = from; j < to; j += VL) v_store(row + j, v_mul(v_load(row + j), share));
  return most * scale + logf(sum);
}

/* The keys a block of queries sees: whole panels from `first` to `last`. */
typedef struct {
  int64_t first, last;
} Span;

static Span span_of(const int32_t *starts, int64_t begin, int64_t end) {
  int64_t first = starts ? starts[begin] : 0;
  for (int64_t i = begin; starts && i < end; i++) first = least(first, starts[i]);
  return (Span){first / WIDTH * WIDTH, up(end, WIDTH)};
}

/* How many heads in a row one thread takes: all that share keys and values, which then are packed
   once, or a single one where there would not be enough for all threads. */
static int64_t heads_at_once(const Shape *s) {
  int enough = s->sequences * s->shared >= 2 * omp_get_max_threads();
  return enough ? s->heads / s->shared : 1;
}

static float *floats(int64_t count) { return aligned_alloc(64, up(count * sizeof(float), 64)); }

/* ---- the two passes ---------------------------------------------------------------------------*/

/* `starts` (B, T) is the first key each query may see; NULL: the first of all. `turns` are those of
   rotary positions, or NULL. The output is (B, T, H, K), the logarithms of the sums (B, H, T).
   Returns 1 where memory ran out. */
int attention_forward(const Shape *s, const void *q, const void *k, const void *v,
                      const int32_t *starts, const float *turns, void *out, float *sums) {
  int64_t T = s->positions, K = s->size, wide = up(K, WIDTH), keys = up(T, WIDTH);
  int64_t rows = up(T, BLOCK);
  const int64_t (*strides)[3] = s->strides;
  int failed = 0, low = s->low, pairs = low && HAS_PAIRS, each = 1 + pairs; /* numbers of a word */
  int64_t words = wide / each, group = s->heads / s->shared, at_once = heads_at_once(s);
#pragma omp parallel
  {
    float *own = floats((rows + 3 * keys) * wide + BLOCK * (keys + wide));
    float *queries = own, *plain = queries + rows * words, *keys_t = plain + keys * words,
          *values = keys_t + keys * words, *table = values + keys * words,
          *mixed = table + BLOCK * keys;
    if (!own) failed = 1;
#pragma omp for schedule(dynamic, at_once)
    for (int64_t job = 0; job < s->sequences * s->heads; job++) {
      if (failed) continue;
      int64_t b = job / s->heads, h = job % s->heads, at[3];
      for (int i = 0; i < 3; i++) at[i] = b * strides[i][0] + (i ? h / group : h) * strides[i][2];
      const int32_t *from = starts ? starts + b * T : NULL;
      Turns by = turns_of(s, turns, b);
      load_rows(queries, words, rows, q, at[0], strides[0][1], T, K, low, pairs, by);
      if (h % at_once == 0) {
        load_rows(plain, words, keys, k, at[1], strides[1][1], T, K, low, pairs, by);
        pack_transposed(keys_t, plain, words, keys);
        load_rows(plain, words, keys, v, at[2], strides[2][1], T, K, low, pairs, NO_TURNS);
        pack(values, plain, words, keys, pairs);
      }
      for (int64_t i0 = 0; i0 < T; i0 += BLOCK) {
        int64_t end = least(i0 + BLOCK, T);
        Span seen = span_of(from, i0, end);
        multiply(table + seen.first, keys, BLOCK, seen.last - seen.first, queries + i0 * words,
                 words, keys_t + seen.first * words, WIDTH * words, words, pairs);
        for (int64_t i = i0; i < i0 + BLOCK; i++) {
          float *row = table + (i - i0) * keys;
          if (i < T) {
            int64_t start = from ? from[i] : 0;
            sums[job * T + i] = normalize(row, seen.first, start, i + 1, seen.last, s->scale);
            if (s->dropout > 0) drop(row, row, start, i + 1, row_key(s, b, h, i), s->dropout);
          } else
            clear(row, seen.first, seen.last, 0, 0);
          if (pairs) narrow(row, seen.first, seen.last);
        }
        multiply(mixed, wide, BLOCK, wide, table + seen.first / each, keys,
                 values + seen.first / each * WIDTH, keys / each * WIDTH,
                 (seen.last - seen.first) / each, pairs);
        store_rows(out, ((b * T + i0) * s->heads + h) * K, s->heads * K, mixed, wide, end - i0, K,
                   low);
      }
    }
    free(own);
  }
  return failed;
}

/* Where heads that share keys and values were not done one after the other: the sums of their
   gradients `parts` (B, H, T, K) into the first of them, and from there to where they belong. */
static void add_up_shared(const Shape *s, float *parts, const float *turns, void *to, int which) {
  int64_t T = s->positions, K = s->size, group = s->heads / s->shared, one = T * K;
  const int64_t *strides = s->gradient_strides[which];
#pragma omp parallel for
  for (int64_t job = 0; job < s->sequences * s->shared; job++) {
    float *sum = parts + job * group * one;
    for (int64_t member = 1; member < group; member++)
      for (int64_t i = 0; i < one; i++) sum[i] += sum[member * one + i];
    Turns by = turns_of(s, turns, job / s->shared);
    turn_back(sum, K, 0, T, &by);
    store_rows(to, job / s->shared * strides[0] + job % s->shared * strides[2], strides[1], sum, K,
               T, K, s->low);
  }
}

/* `out` and its gradient are (B, T, H, K). */
int attention_backward(const Shape *s, const void *q, const void *k, const void *v,
                       const int32_t *starts, const float *turns, const void *out,
                       const float *sums, const void *grad, void *dq, void *dk, void *dv) {
  int64_t T = s->positions, K = s->size, wide = up(K, WIDTH), keys = up(T, WIDTH);
  int64_t rows = up(T, BLOCK);
  const int64_t (*strides)[3] = s->strides, (*steps)[3] = s->gradient_strides;
  int64_t line = up(keys + TILE, VL); /* of the table, whose columns are also cut into tiles */
  int failed = 0, low = s->low, pairs = low && HAS_PAIRS, each = 1 + pairs; /* numbers of a word */
  int64_t words = wide / each, group = s->heads / s->shared, at_once = heads_at_once(s);
  int64_t whole = s->sequences * s->heads * T * K;
  float *parts = at_once < group ? floats(2 * whole) : NULL;
  if (at_once < group && !parts) return 1;
#pragma omp parallel
  {
    int64_t table = BLOCK * line, block = BLOCK * wide, tall = (keys + TILE) * wide;
    float *own = floats((2 * rows + 4 * keys) * words + 5 * table + 2 * block + 2 * tall + 2 * wide);
    float *queries = own, *grads = queries + rows * words, *plain = grads + rows * words,
          *keys_t = plain + keys * words, *values_t = keys_t + keys * words,
          *packed = values_t + keys * words, *p = packed + keys * words, *dp = p + table,
          *kept = dp + table, *joined = kept + table, *djoined = joined + table,
          *some = djoined + table, *panel = some + block, *dkeys = panel + block,
          *dvalues = dkeys + tall, *two = dvalues + tall;
    if (!own) failed = 1;
#pragma omp for schedule(dynamic, at_once)
    for (int64_t job = 0; job < s->sequences * s->heads; job++) {
      if (failed) continue;
      int64_t b = job / s->heads, h = job % s->heads, at[3], to[3];
      for (int i = 0; i < 3; i++) {
        int64_t head = i ? h / group : h;
        at[i] = b * strides[i][0] + head * strides[i][2];
        to[i] = b * steps[i][0] + head * steps[i][2];
      }
      int64_t here = (b * T * s->heads + h) * K, unit = s->heads * K;
      const int32_t *from = starts ? starts + b * T : NULL;
      Turns by = turns_of(s, turns, b);
      load_rows(queries, words, rows, q, at[0], strides[0][1], T, K, low, pairs, by);
      load_rows(grads, words, rows, grad, here, unit, T, K, low, pairs, NO_TURNS);
      if (h % at_once == 0) {
        load_rows(plain, words, keys, k, at[1], strides[1][1], T, K, low, pairs, by);
        pack_transposed(keys_t, plain, words, keys);
        pack(packed, plain, words, keys, pairs);
        load_rows(plain, words, keys, v, at[2], strides[2][1], T, K, low, pairs, NO_TURNS);
        pack_transposed(values_t, plain, words, keys);
        memset(dkeys, 0, 2 * tall * sizeof(float));
      }
      for (int64_t i0 = 0; i0 < T; i0 += BLOCK) {
        int64_t end = least(i0 + BLOCK, T);
        Span seen = span_of(from, i0, end);
        int64_t first = seen.first, width = seen.last - first, tiled = up(width, TILE);
        multiply(p + first, line, BLOCK, width, queries + i0 * words, words,
                 keys_t + first * words, WIDTH * words, words, pairs);
        multiply(dp + first, line, BLOCK, width, grads + i0 * words, words,
                 values_t + first * words, WIDTH * words, words, pairs);
        for (int64_t i = i0; i < i0 + BLOCK; i++) {
          float *own_p = p + (i - i0) * line, *own_dp = dp + (i - i0) * line,
                *own_kept = kept + (i - i0) * line;
          int64_t start = from && i < T ? from[i] : 0, stop = i < T ? i + 1 : 0;
          vf level = v_set(i < T ? sums[job * T + i] : 0), scale = v_set(s->scale), dots = v_zero();
          if (i < T) {
            load_rows(two, wide, 1, grad, here + i * unit, 0, 1, K, low, 0, NO_TURNS);
            load_rows(two + wide, wide, 1, out, here + i * unit, 0, 1, K, low, 0, NO_TURNS);
            for (int64_t d = 0; d < wide; d += VL)
              dots = v_fma(v_load(two + d), v_load(two + wide + d), dots);
          }
          vf delta = v_set(v_sum(dots));
          uint32_t key = s->dropout > 0 ? row_key(s, b, h, i) : 0;
          if (s->dropout > 0) drop(own_dp, own_dp, start, stop, key, s->dropout);
          for (int64_t j = start / VL * VL; j < stop; j += VL) {
            vf share = v_exp(v_sub(v_mul(v_load(own_p + j), scale), level));
            v_store(own_p + j, share);
            v_store(own_dp + j, v_mul(v_mul(share, v_sub(v_load(own_dp + j), delta)), scale));
          }
          clear(own_p, first, start, stop, first + tiled);
          clear(own_dp, first, start, stop, first + tiled);
          if (s->dropout > 0) drop(own_kept, own_p, first, first + tiled, key, s->dropout);
        }
        const float *weights = s->dropout > 0 ? kept : p, *scores = dp;
        if (pairs) {
          for (int64_t i = 0; i < BLOCK; i += 2) {
            int64_t row = i * line, half = i / 2 * line;
            join(joined + half, weights + row, weights + row + line, first, first + tiled);
            join(djoined + half, dp + row, dp + row + line, first, first + tiled);
            narrow(dp + row, first, first + tiled);
            narrow(dp + row + line, first, first + tiled);
          }
          weights = joined, scores = djoined;
        }
        multiply(some, wide, BLOCK, wide, dp + first / each, line, packed + first / each * WIDTH,
                 keys / each * WIDTH, width / each, pairs);
        turn_back(some, wide, i0, end - i0, &by);
        store_rows(dq, to[0] + i0 * steps[0][1], steps[0][1], some, wide, end - i0, K, low);
        pack(panel, grads + i0 * words, words, BLOCK, pairs);
        multiply_transposed(dvalues + first * wide, wide, tiled, wide, weights + first, line, panel,
                            BLOCK / each * WIDTH, BLOCK / each, pairs);
        pack(panel, queries + i0 * words, words, BLOCK, pairs);
        multiply_transposed(dkeys + first * wide, wide, tiled, wide, scores + first, line, panel,
                            BLOCK / each * WIDTH, BLOCK / each, pairs);
      }
      if (parts) {
        store_rows(parts, job * T * K, K, dkeys, wide, T, K, 0);
        store_rows(parts, whole + job * T * K, K, dvalues, wide, T, K, 0);
      } else if (h % at_once == at_once - 1) {
        turn_back(dkeys, wide, 0, T, &by);
        store_rows(dk, to[1], steps[1][1], dkeys, wide, T, K, low);
        store_rows(dv, to[2], steps[2][1], dvalues, wide, T, K, low);
      }
    }
    free(own);
  }
  if (parts && !failed) {
    add_up_shared(s, parts, turns, dk, 1);
    add_up_shared(s, parts + whole, NULL, dv, 2);
  }
  free(parts);
  return failed;
}
