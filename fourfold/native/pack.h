/* Weights of float32 into the panels of matrix.h, and single ones out of them again.

   An output of INT8 has one scale, by its largest weight. The groups of INT4 have one each, tried out
   among 16 for the smallest squared error, in half precision. */
#pragma once
#include "matrix.h"

/* The scale of a group that leaves the smallest squared error, and its 4-bit numbers plus 8. */
static uint16_t round_group(const float *x, int64_t count, uint8_t *q) {
  float extreme = 0.0f;
  for (int64_t i = 0; i < count; i++)
    if (__builtin_fabsf(x[i]) > __builtin_fabsf(extreme)) extreme = x[i];
  uint16_t best = 0;
  float least = 3.4e38f;
  for (int trial = 0; trial < 16; trial++) {
    /* The largest magnitude becomes -8, or less where that serves the others better. */
    uint16_t half = f16_of(extreme / (-8.0f + 0.15f * trial));
    float scale = of_f16(half), inverse = scale == 0.0f ? 0.0f : 1.0f / scale, error = 0.0f;
    for (int64_t i = 0; i < count; i++) {
      float n = __builtin_rintf(x[i] * inverse);
      n = n < -8.0f ? -8.0f : n > 7.0f ? 7.0f : n;
      error += (x[i] - n * scale) * (x[i] - n * scale);
    }
    if (error < least) least = error, best = half;
  }
  float scale = of_f16(best), inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
  for (int64_t i = 0; i < GROUP; i++) {
    float n = i < count ? __builtin_rintf(x[i] * inverse) : 0.0f;
    q[i] = (uint8_t)(8 + (int)(n < -8.0f ? -8.0f : n > 7.0f ? 7.0f : n));
  }
  return best;
}

/* The place of input k of a lane within its panel, counted in numbers of the kind; of INT4 in bytes
   of the word it is part of. */
INLINE int64_t place_of(int64_t kind, int64_t k, int lane) {
  const int64_t chunk = BLOCK * CHUNK;
  switch (kind) {
    case FLOAT32: return k * (chunk / 4) + lane;
    case FLOAT16: return k / 2 * (chunk / 2) + k % 2 * PANEL + lane;
    case BFLOAT16: return k / 2 * (chunk / 2) + lane * 2 + k % 2;
    case INT8: return k / 4 * chunk + lane * 4 + k % 4;
    default: return k / 8 * chunk + lane * 4;
  }
}
INLINE int shift_of(int64_t k) { return 4 * (k % 8 / 2) + 16 * (k % 2); }

/* One output into its panel, which is zero. */
static void pack_output(int64_t kind, const float *x, int64_t given, int64_t inputs, int64_t output,
                        char *weights, void *scales, int32_t *sums) {
  char *panel = weights + panel_start(kind, inputs, output / PANEL);
  int lane = output % PANEL;
  if (kind == FLOAT32) {
    for (int64_t k = 0; k < given; k++) ((float *)panel)[place_of(kind, k, lane)] = x[k];
  } else if (kind == FLOAT16) {
    for (int64_t k = 0; k < given; k++) ((uint16_t *)panel)[place_of(kind, k, lane)] = f16_of(x[k]);
  } else if (kind == BFLOAT16) {
    for (int64_t k = 0; k < given; k++) ((uint16_t *)panel)[place_of(kind, k, lane)] = bf16_of(x[k]);
  } else if (kind == INT8) {
    float largest = 1.1754944e-38f;
    for (int64_t k = 0; k < given; k++)
      if (__builtin_fabsf(x[k]) > largest) largest = __builtin_fabsf(x[k]);
    float scale = largest / 127.0f;
    int32_t sum = 0;
    for (int64_t k = 0; k < given; k++) {
      int8_t q = (int8_t)__builtin_rintf(x[k] / scale);
      ((int8_t *)panel)[place_of(kind, k, lane)] = q;
      sum += q;
    }
    ((float *)scales)[output] = scale;
    sums[output] = 128 * sum;
  } else {
    for (int64_t group = 0; group < inputs / GROUP; group++) {
      uint8_t q[GROUP];
      int64_t left = given - group * GROUP;
      uint16_t *halves = (uint16_t *)scales + scale_start(inputs / GROUP, output / PANEL, group);
      halves[lane] = round_group(x + group * GROUP, left < 0 ? 0 : left < GROUP ? left : GROUP, q);
      for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k++)
        *(uint32_t *)(panel + place_of(kind, k, lane)) |= (uint32_t)q[k % GROUP] << shift_of(k);
    }
  }
}

/* Input k of an output, as the matrix holds it. */
static float weight_at(const Matrix *m, int64_t output, int64_t k) {
  const char *panel = (const char *)m->weights + panel_start(m->kind, m->inputs, output / PANEL);
  int lane = output % PANEL;
  int64_t place = place_of(m->kind, k, lane);
  switch (m->kind) {
    case FLOAT32: return ((const float *)panel)[place];
    case FLOAT16: return of_f16(((const uint16_t *)panel)[place]);
    case BFLOAT16: return of_bf16(((const uint16_t *)panel)[place]);
    case INT8: return ((const float *)m->scales)[output] * ((const int8_t *)panel)[place];
    default: {
      const uint16_t *halves = (const uint16_t *)m->scales +
                               scale_start(m->inputs / GROUP, output / PANEL, k / GROUP);
      uint32_t word = *(const uint32_t *)(panel + place);
      return of_f16(halves[lane]) * ((int)(word >> shift_of(k) & 15) - 8);
    }
  }
}

/* -- whole matrices ------------------------------------------------------------------------------ */

void rows_of(const Matrix *m, const int64_t *outputs, int64_t count, int64_t width, float *to) {
  for (int64_t i = 0; i < count; i++)
    for (int64_t k = 0; k < width; k++) to[i * width + k] = weight_at(m, outputs[i], k);
}

/* Bytes of the packed weights, of their scales and of their sums. */
void packed_bytes(int64_t kind, int64_t outputs, int64_t inputs, int64_t *bytes) {
  int64_t lanes = padded_panels(outputs) * PANEL, width = padded(inputs);
  bytes[0] = padded_panels(outputs) * panel_bytes(kind, width);
  bytes[1] = kind == INT8 ? 4 * lanes : kind == INT4 ? 2 * lanes * (width / GROUP) : 0;
  bytes[2] = kind == INT8 ? 4 * lanes : 0;
}

/* Weights (outputs, inputs) of float32 into memory that is zero. */
void pack(int64_t kind, int64_t outputs, int64_t inputs, const float *from, char *weights,
          void *scales, int32_t *sums, int64_t threads) {
#pragma omp parallel for schedule(static, PANEL) num_threads(threads)
  for (int64_t output = 0; output < outputs; output++)
    pack_output(kind, from + output * inputs, inputs, padded(inputs), output, weights, scales, sums);
}
