/* What stands between the products, each in one pass over memory: GELU, gates, RMSNorm, the loss.

   Numbers are float32 inside; `low` says they are bfloat16 in memory. */
#include <math.h>
#include <stdlib.h>

#include "simd.h"

#define PIECE 4096 /* numbers a thread takes at a time; whole vectors */

INLINE void *bytes(int64_t count) { return aligned_alloc(64, (count + 63) / 64 * 64); }

/* ---- GELU in its tanh form --------------------------------------------------------------------*/

INLINE void gelu_piece(int64_t at, int64_t n, const void *x, void *y, int low) {
  for (int64_t i = at; i < least(at + PIECE, n); i += VL)
    v_give(y, i, n - i, v_gelu(v_take(x, i, n - i, low)), low);
}

void gelu_forward(int64_t n, const void *x, void *y, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE)
    if (low)
      gelu_piece(at, n, x, y, 1);
    else
      gelu_piece(at, n, x, y, 0);
}

INLINE void gelu_slopes(int64_t at, int64_t n, const void *x, const void *gradient, void *dx,
                        int low) {
  for (int64_t i = at; i < least(at + PIECE, n); i += VL) {
    vf slope = v_gelu_slope(v_take(x, i, n - i, low));
    v_give(dx, i, n - i, v_mul(v_take(gradient, i, n - i, low), slope), low);
  }
}

/* dx = gradient times the derivative at x. */
void gelu_backward(int64_t n, const void *x, const void *gradient, void *dx, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE)
    if (low)
      gelu_slopes(at, n, x, gradient, dx, 1);
    else
      gelu_slopes(at, n, x, gradient, dx, 0);
}

/* ---- gates: act(gate) * up, of SiLU or GELU ---------------------------------------------------*/

INLINE vf v_sigmoid(vf x) {
  return v_div(v_set(1.0f), v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
}

INLINE void gate_piece(int64_t at, int64_t n, const void *gate, const void *up, void *y, int silu,
                       int low) {
  for (int64_t i = at; i < least(at + PIECE, n); i += VL) {
    vf x = v_take(gate, i, n - i, low);
    vf opened = silu ? v_mul(x, v_sigmoid(x)) : v_gelu(x);
    v_give(y, i, n - i, v_mul(opened, v_take(up, i, n - i, low)), low);
  }
}

void gate_forward(int64_t n, const void *gate, const void *up, void *y, int silu, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE)
    if (low)
      gate_piece(at, n, gate, up, y, silu, 1);
    else
      gate_piece(at, n, gate, up, y, silu, 0);
}

INLINE void gate_slopes(int64_t at, int64_t n, const void *gate, const void *up,
                        const void *gradient, void *dgate, void *dup, int silu, int low) {
  for (int64_t i = at; i < least(at + PIECE, n); i += VL) {
    vf x = v_take(gate, i, n - i, low), g = v_take(gradient, i, n - i, low), opened, slope;
    if (silu) {
      vf s = v_sigmoid(x);
      opened = v_mul(x, s);
      slope = v_fma(opened, v_sub(v_set(1.0f), s), s); /* s + x s (1 - s) */
    } else
      opened = v_gelu(x), slope = v_gelu_slope(x);
    vf multiplied = v_mul(g, v_take(up, i, n - i, low));
    v_give(dup, i, n - i, v_mul(g, opened), low);
    v_give(dgate, i, n - i, v_mul(multiplied, slope), low);
  }
}

void gate_backward(int64_t n, const void *gate, const void *up, const void *gradient, void *dgate,
                   void *dup, int silu, int low) {
#pragma omp parallel for
  for (int64_t at = 0; at < n; at += PIECE)
    if (low)
      gate_slopes(at, n, gate, up, gradient, dgate, dup, silu, 1);
    else
      gate_slopes(at, n, gate, up, gradient, dgate, dup, silu, 0);
}

/* ---- RMSNorm ----------------------------------------------------------------------------------*/

#define MOST_PARTS 64  /* of the rows, each with a sum of its own for the weight's gradient: */
#define ROWS_OF_PART 32 /* the order of additions is the same with any number of threads */

INLINE void norm_row(int64_t width, const void *x, int64_t at, const float *weight, void *y,
                     int64_t to, float *inverse, float eps, int low, int low_out) {
  vf sums = v_zero(), more = v_zero();
  int64_t i = 0;
  for (; i + 2 * VL <= width; i += 2 * VL) {
    vf one = v_take(x, at + i, VL, low), other = v_take(x, at + i + VL, VL, low);
    sums = v_fma(one, one, sums), more = v_fma(other, other, more);
  }
  for (; i < width; i += VL) {
    vf one = v_take(x, at + i, width - i, low);
    sums = v_fma(one, one, sums);
  }
  *inverse = 1.0f / sqrtf(v_sum(v_add(sums, more)) / width + eps);
  vf by = v_set(*inverse);
  for (i = 0; i < width; i += VL) {
    vf unit = v_mul(v_take(x, at + i, width - i, low), by);
    v_give(y, to + i, width - i, v_mul(unit, v_take(weight, i, width - i, 0)), low_out);
  }
}

/* y (rows x width) = x / sqrt(mean of x^2 + eps) * weight, of rows of x `stride` apart; what x was
   multiplied by is kept in `inverse`. */
void rms_norm_forward(int64_t rows, int64_t width, const void *x, int64_t stride,
                      const float *weight, void *y, float *inverse, float eps, int low,
                      int low_out) {
#pragma omp parallel for
  for (int64_t r = 0; r < rows; r++) {
    int64_t at = r * stride, to = r * width;
    if (low && low_out)
      norm_row(width, x, at, weight, y, to, inverse + r, eps, 1, 1);
    else if (low)
      norm_row(width, x, at, weight, y, to, inverse + r, eps, 1, 0);
    else if (low_out)
      norm_row(width, x, at, weight, y, to, inverse + r, eps, 0, 1);
    else
      norm_row(width, x, at, weight, y, to, inverse + r, eps, 0, 0);
  }
}

INLINE void norm_row_backward(int64_t width, const void *gradient, int64_t from, const void *x,
                              int64_t at, const float *weight, float inverse, void *dx, int64_t to,
                              float *dweight, int low, int low_out) {
  vf dots = v_zero(), by = v_set(inverse);
  for (int64_t i = 0; i < width; i += VL) {
    vf g = v_take(gradient, from + i, width - i, low_out);
    vf weighed = v_mul(g, v_take(weight, i, width - i, 0));
    dots = v_fma(weighed, v_take(x, at + i, width - i, low), dots);
  }
  /* What changes the root of the mean square, by how much it is in x. */
  vf along = v_set(v_sum(dots) * inverse * inverse * inverse / width);
  for (int64_t i = 0; i < width; i += VL) {
    vf g = v_take(gradient, from + i, width - i, low_out);
    vf given = v_take(x, at + i, width - i, low);
    vf weighed = v_mul(v_mul(g, v_take(weight, i, width - i, 0)), by);
    v_give(dx, to + i, width - i, v_sub(weighed, v_mul(given, along)), low);
    v_store(dweight + i, v_fma(g, v_mul(given, by), v_load(dweight + i)));
  }
}

/* dx (rows x width) and the gradient of the weight, from a gradient whose rows are `step` apart.
   Returns 1 where memory ran out. */
int rms_norm_backward(int64_t rows, int64_t width, const void *gradient, int64_t step,
                      const void *x, int64_t stride, const float *weight, const float *inverse,
                      void *dx, float *dweight, int low, int low_out) {
  int64_t padded = (width + VL - 1) / VL * VL;
  int64_t each = (rows + MOST_PARTS - 1) / MOST_PARTS;
  if (each < ROWS_OF_PART) each = ROWS_OF_PART;
  int64_t parts = (rows + each - 1) / each;
  float *sums = bytes(parts * padded * sizeof(float));
  if (!sums) return 1;
#pragma omp parallel for
  for (int64_t part = 0; part < parts; part++) {
    float *own = sums + part * padded;
    memset(own, 0, padded * sizeof(float));
    for (int64_t r = part * each; r < least((part + 1) * each, rows); r++) {
      int64_t from = r * step, at = r * stride, to = r * width;
      if (low && low_out)
        norm_row_backward(width, gradient, from, x, at, weight, inverse[r], dx, to, own, 1, 1);
      else if (low)
        norm_row_backward(width, gradient, from, x, at, weight, inverse[r], dx, to, own, 1, 0);
      else if (low_out)
        norm_row_backward(width, gradient, from, x, at, weight, inverse[r], dx, to, own, 0, 1);
      else
        norm_row_backward(width, gradient, from, x, at, weight, inverse[r], dx, to, own, 0, 0);
    }
  }
  memset(dweight, 0, width * sizeof(float));
  for (int64_t part = 0; part < parts; part++)
    for (int64_t i = 0; i < width; i++) dweight[i] += sums[part * padded + i];
  free(sums);
  return 0;
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
    float *row = bytes(padded * sizeof(float));
    if (!row) failed = 1;
#pragma omp for
    for (int64_t r = 0; r < rows; r++) {
      if (failed) continue;
      for (int64_t i = 0; i < words; i += VL)
        v_store(row + i, v_take(logits, r * words + i, words - i, low));
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
      for (int64_t i = 0; i < words; i += VL)
        v_give(logits, r * words + i, words - i, v_load(row + i), low);
    }
    free(row);
  }
  return failed;
}
