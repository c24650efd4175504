/* The GPT network as generation runs it, in one call: tokens in, logits out.

   A call takes rows: tokens, each with its sequence and its position there. One token of each of
   many sequences (a step), whole prompts, the rest of a prompt, or several tokens to check at once
   are all the same to it. Keys and values go into the cache first, then every row attends to its
   sequence up to itself. The numbers of a row depend on its sequence alone, to the bit.

   Letters: R rows, D hidden, H heads, K head size, T positions. */
#include <math.h>
#include <omp.h>
#include <sched.h>

#include "matrix.h"

typedef struct {
  const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
  Matrix qkv, out, up, down;
  /* Of float32, or where `half_cache` of half precision. */
  char *keys;   /* (sequences, H, T / 16, K, 16): panels, as of a matrix whose outputs are tokens */
  char *values; /* (sequences, H, T, K padded to 16) */
} Layer;

typedef struct {
  int64_t layers, hidden, heads, head_size, ffn, vocabulary;
  int64_t positions, half_cache; /* of the cache; positions: a multiple of 16 */
  const Layer *layer;
  const float *norm_weight, *norm_bias;
  const Matrix *head;
  const uint16_t *words; /* half-precision table; null: the rows of the head */
  const float *places;   /* (max positions, D) */
  float epsilon;
} Network;

typedef struct {
  int32_t token, sequence, position;
} Row;

/* -- parts of a layer ---------------------------------------------------------------------------- */

static void embed(const Network *net, Row row, float *to) {
  const float *place = net->places + (int64_t)row.position * net->hidden;
  for (int64_t d = 0; d < net->hidden; d++) {
    float word = net->words ? of_f16(net->words[row.token * net->hidden + d])
                            : weight_at(net->head, row.token, d);
    to[d] = word + place[d];
  }
}

static void normalize(const float *x, int64_t width, const float *weight, const float *bias,
                      float epsilon, float *to) {
  vf total = v_zero();
  int64_t d = 0;
  for (; d + VL <= width; d += VL) total = v_add(total, v_load(x + d));
  float mean = v_sum(total);
  for (int64_t e = d; e < width; e++) mean += x[e];
  mean /= width;
  vf squares = v_zero(), middle = v_set(mean);
  for (d = 0; d + VL <= width; d += VL) {
    vf off = v_sub(v_load(x + d), middle);
    squares = v_fma(off, off, squares);
  }
  float variance = v_sum(squares);
  for (int64_t e = d; e < width; e++) variance += (x[e] - mean) * (x[e] - mean);
  float factor = 1.0f / sqrtf(variance / width + epsilon);
  for (d = 0; d + VL <= width; d += VL) {
    vf unit = v_mul(v_sub(v_load(x + d), middle), v_set(factor));
    v_store(to + d, v_fma(unit, v_load(weight + d), v_load(bias + d)));
  }
  for (; d < width; d++) to[d] = (x[d] - mean) * factor * weight[d] + bias[d];
}

INLINE int64_t head_padded(const Network *net) { return (net->head_size + 15) / 16 * 16; }

/* Half precision ends at 65504; what is larger, and finite, stays that large. */
INLINE uint16_t bounded_half(float x) {
  return f16_of(x > 65504.0f && x < INFINITY ? 65504.0f : x < -65504.0f && x > -INFINITY ? -65504.0f : x);
}

static void store_keys_values(const Network *net, const Layer *layer, Row row, const float *qkv) {
  const int64_t K = net->head_size, KP = head_padded(net), T = net->positions;
  for (int64_t h = 0; h < net->heads; h++) {
    const float *key = qkv + h * 3 * K + K, *value = key + K;
    int64_t place = row.sequence * net->heads + h;
    int64_t panel = (place * T + row.position / PANEL * PANEL) * K + row.position % PANEL;
    int64_t line = (place * T + row.position) * KP;
    if (net->half_cache) {
      uint16_t *keys = (uint16_t *)layer->keys + panel, *values = (uint16_t *)layer->values + line;
      for (int64_t d = 0; d < K; d++) keys[d * PANEL] = bounded_half(key[d]);
      for (int64_t d = 0; d < K; d++) values[d] = bounded_half(value[d]);
    } else {
      float *keys = (float *)layer->keys + panel;
      for (int64_t d = 0; d < K; d++) keys[d * PANEL] = key[d];
      memcpy((float *)layer->values + line, value, 4 * K);
    }
  }
}

INLINE vf load_cached(const int half, const char *base, int64_t number) {
  return half ? v_half((const uint16_t *)base + number) : v_load((const float *)base + number);
}

#define QUERIES 4
/* Head h of `count` rows that follow each other in one sequence. `scores` has room for T of each. */
INLINE void attend_rows(const int count, const int half, const Network *net, const Layer *layer, const Row *rows,
                        int64_t h, const float *qkv, int64_t qkv_stride, float *mixed,
                        int64_t mixed_stride, float *scores) {
  const int64_t K = net->head_size, KP = head_padded(net), T = net->positions;
  const int64_t place = rows[0].sequence * net->heads + h;
  const int64_t size = half ? 2 : 4;
  const char *keys = layer->keys + place * T * K * size, *values = layer->values + place * T * KP * size;
  const int64_t longest = rows[count - 1].position + 1;
  const float scale = 1.0f / sqrtf((float)K);
  const int64_t blocks = (longest + PANEL - 1) / PANEL;
  enum { SIDE = 4 };
  for (int64_t block = 0; block < blocks; block += SIDE) {
    /* Few rows wait for memory: the values of these tokens are fetched while their keys are used. */
    if (count == 1)
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
        vf q = v_set(qkv[r * qkv_stride + h * 3 * K + d]);
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
    int64_t length = rows[r].position + 1, whole = blocks * PANEL;
    for (int64_t t = length; t < whole; t++) row[t] = -INFINITY;
    vf most = v_load(row);
    for (int64_t t = VL; t < whole; t += VL) most = v_max(most, v_load(row + t));
    float largest = v_largest(most);
    vf total = v_zero();
    for (int64_t t = 0; t < whole; t += VL) {
      vf weight = v_exp(v_sub(v_load(row + t), v_set(largest)));
      v_store(row + t, weight);
      if (t + VL <= length) total = v_add(total, weight);
    }
    for (int64_t t = length; t < whole; t++) row[t] = 0.0f;
    float sum = v_sum(total);
    for (int64_t t = length / VL * VL; t < length; t++) sum += row[t];
    inverse[r] = 1.0f / sum;
  }
  for (int64_t d = 0; d < KP; d += 4 * VL) {
    const int64_t parts = (KP - d) / VL < 4 ? (KP - d) / VL : 4;
    vf sums[QUERIES][4];
    UNROLL for (int r = 0; r < count; r++) UNROLL for (int v = 0; v < 4; v++) sums[r][v] = v_zero();
    if (parts == 4) {
      for (int64_t t = 0; t < longest; t++) {
        vf value[4];
        UNROLL for (int v = 0; v < 4; v++) value[v] = load_cached(half, values, t * KP + d + v * VL);
        UNROLL for (int r = 0; r < count; r++) {
          vf weight = v_set(scores[r * T + t]);
          UNROLL for (int v = 0; v < 4; v++) sums[r][v] = v_fma(value[v], weight, sums[r][v]);
        }
      }
    } else {
      for (int64_t t = 0; t < longest; t++)
        for (int r = 0; r < count; r++)
          for (int v = 0; v < parts; v++)
            sums[r][v] = v_fma(load_cached(half, values, t * KP + d + v * VL),
                               v_set(scores[r * T + t]), sums[r][v]);
    }
    for (int r = 0; r < count; r++)
      for (int v = 0; v < parts; v++) {
        float some[VL];
        v_store(some, v_mul(sums[r][v], v_set(inverse[r])));
        for (int j = 0; j < VL && d + v * VL + j < K; j++)
          mixed[r * mixed_stride + h * K + d + v * VL + j] = some[j];
      }
  }
}

static void attend(int count, const Network *net, const Layer *layer, const Row *rows, int64_t h,
                   const float *qkv, int64_t qkv_stride, float *mixed, int64_t mixed_stride,
                   float *scores) {
  if (count == QUERIES) {
    if (net->half_cache)
      attend_rows(QUERIES, 1, net, layer, rows, h, qkv, qkv_stride, mixed, mixed_stride, scores);
    else
      attend_rows(QUERIES, 0, net, layer, rows, h, qkv, qkv_stride, mixed, mixed_stride, scores);
    return;
  }
  for (int r = 0; r < count; r++, qkv += qkv_stride, mixed += mixed_stride)
    if (net->half_cache)
      attend_rows(1, 1, net, layer, rows + r, h, qkv, qkv_stride, mixed, mixed_stride, scores);
    else
      attend_rows(1, 0, net, layer, rows + r, h, qkv, qkv_stride, mixed, mixed_stride, scores);
}

/* -- products, by all threads of a team ---------------------------------------------------------- */

typedef struct {
  int64_t me, threads;
  int32_t *arrived, *phase; /* of the team */
} Team;

/* Wait for all threads. Steps are so short that it pays to look again and again, for a while; where
   other programs, or the threads of a server, need the processor, it is left to them: one of ours
   may be waiting for it. OpenMP's own barrier keeps it for milliseconds. */
static void meet(Team team) {
  int32_t phase = __atomic_load_n(team.phase, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(team.arrived, 1, __ATOMIC_ACQ_REL) == team.threads) {
    __atomic_store_n(team.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(team.phase, phase + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int looks = 0; __atomic_load_n(team.phase, __ATOMIC_ACQUIRE) == phase; looks++) {
    if (looks < 2000)
      _mm_pause();
    else
      sched_yield();
  }
}

#define MY_ROWS(team, count)                                 \
  for (int64_t r = (count) * (team).me / (team).threads,     \
               last = (count) * ((team).me + 1) / (team).threads; \
       r < last; r++)

/* The panels of this thread: an equal share, in whole blocks. */
INLINE void share(Team team, int64_t panels, int64_t *first, int64_t *stop) {
  int64_t blocks = (panels + BLOCK - 1) / BLOCK;
  *first = blocks * team.me / team.threads * BLOCK;
  *stop = blocks * (team.me + 1) / team.threads * BLOCK;
  if (*stop > panels) *stop = panels;
}

typedef struct {
  char *data; /* prepared rows, of the team, or where there are few, of this thread alone */
  float *scales;
  int alone; /* of this thread alone */
} Prepared;

#define FEW 4 /* rows that every thread prepares for itself, which costs less than to wait */

/* `x` times the matrix. All rows of x must be there; it does not wait for the whole result. */
static void product(Team team, const Matrix *m, const float *x, int64_t x_stride, int64_t width,
                    int64_t rows, Prepared to, Result y) {
  Rows given = {x, 4 * x_stride, 0};
  if (row_bytes(m->kind, 1) != 4 || width != m->inputs) {
    int64_t size = row_bytes(m->kind, m->inputs);
    Team mine = to.alone ? (Team){0, 1, 0, 0} : team;
    MY_ROWS(mine, rows)
    prepare_row(m->kind, x + r * x_stride, width, m->inputs, to.data + r * size, to.scales + r);
    if (!to.alone) meet(team);
    given = (Rows){to.data, size, to.scales};
  }
  int64_t first, stop;
  share(team, panels_of(m->outputs), &first, &stop);
  multiply(m, first, stop, given, rows, y);
}

static void normalize_all(Team team, const Network *net, const float *x, int64_t rows,
                          const float *weight, const float *bias, float *to) {
  const int64_t D = net->hidden;
  Team mine = rows <= FEW ? (Team){0, 1, 0, 0} : team;
  MY_ROWS(mine, rows) normalize(x + r * D, D, weight, bias, net->epsilon, to + r * D);
  if (rows > FEW) meet(team);
}

/* -- the network --------------------------------------------------------------------------------- */

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Bytes of scratch memory that `forward` needs; of the parts in its order. */
static int64_t scratch_parts(const Network *net, int64_t rows, int64_t threads, int64_t *sizes) {
  int64_t D = net->hidden, F = net->ffn > D ? net->ffn : D, few = rows <= FEW ? threads : 1;
  sizes[0] = round_up(4 * rows * D);                      /* x */
  sizes[1] = few * round_up(4 * rows * D);                /* normalized */
  sizes[2] = round_up(4 * rows * 3 * D);                  /* qkv */
  sizes[3] = round_up(4 * rows * D);                      /* mixed */
  sizes[4] = round_up(4 * rows * net->ffn);               /* inner */
  sizes[5] = few * round_up(4 * rows * padded(F));        /* prepared */
  sizes[6] = few * round_up(4 * rows);                    /* scales of prepared */
  sizes[7] = threads * round_up(4 * QUERIES * net->positions);
  sizes[8] = round_up(4 * (rows + 1));                    /* starts of tiles */
  int64_t total = 0;
  for (int i = 0; i < 9; i++) total += sizes[i];
  return total;
}

int64_t scratch_bytes(const Network *net, int64_t rows, int64_t threads) {
  int64_t sizes[9];
  return scratch_parts(net, rows, threads, sizes) + 64;
}

/* Logits (wanted, V) of the rows whose numbers are in `wants`. */
void forward(const Network *net, const Row *rows, int64_t count, const int32_t *wants,
             int64_t wanted, float *logits, char *scratch, int64_t threads) {
  const int64_t D = net->hidden, F = net->ffn;
  int64_t sizes[9];
  scratch_parts(net, count, threads, sizes);
  char *part[9];
  part[0] = (char *)(((uintptr_t)scratch + 63) / 64 * 64);
  for (int i = 1; i < 9; i++) part[i] = part[i - 1] + sizes[i - 1];
  float *x = (float *)part[0], *qkv = (float *)part[2], *mixed = (float *)part[3];
  float *inner = (float *)part[4];
  int32_t *starts = (int32_t *)part[8];
  int64_t tiles = 0;
  for (int64_t r = 0; r < count; r++) {
    int follows = r > 0 && rows[r].sequence == rows[r - 1].sequence &&
                  rows[r].position == rows[r - 1].position + 1;
    if (!follows || r - starts[tiles - 1] == QUERIES) starts[tiles++] = (int32_t)r;
  }
  starts[tiles] = (int32_t)count;
  const int few = count <= FEW;
  int32_t meeting[2] = {0, 0};
#pragma omp parallel num_threads(threads)
  {
    /* There may be fewer threads than were asked for. */
    Team team = {omp_get_thread_num(), omp_get_num_threads(), meeting, meeting + 1};
    int64_t mine = few ? team.me : 0, parts = few ? threads : 1;
    float *unit = (float *)(part[1] + mine * (sizes[1] / parts));
    float *scales = (float *)(part[6] + mine * (sizes[6] / parts));
    Prepared prepared = {part[5] + mine * (sizes[5] / parts), scales, few};
    float *scores = (float *)(part[7] + team.me * (sizes[7] / threads));
    MY_ROWS(team, count) embed(net, rows[r], x + r * D);
    meet(team);
    for (int64_t l = 0; l < net->layers; l++) {
      const Layer *layer = net->layer + l;
      normalize_all(team, net, x, count, layer->norm1_weight, layer->norm1_bias, unit);
      product(team, &layer->qkv, unit, D, D, count, prepared, (Result){qkv, 3 * D, 3 * D, PLAIN});
      meet(team);
      MY_ROWS(team, count) store_keys_values(net, layer, rows[r], qkv + r * 3 * D);
      meet(team);
      for (int64_t unit_of = team.me; unit_of < tiles * net->heads; unit_of += team.threads) {
        int64_t t = unit_of / net->heads, r = starts[t];
        attend(starts[t + 1] - starts[t], net, layer, rows + r, unit_of % net->heads,
               qkv + r * 3 * D, 3 * D, mixed + r * D, D, scores);
      }
      meet(team);
      product(team, &layer->out, mixed, D, D, count, prepared, (Result){x, D, D, ADD});
      meet(team);
      normalize_all(team, net, x, count, layer->norm2_weight, layer->norm2_bias, unit);
      product(team, &layer->up, unit, D, D, count, prepared, (Result){inner, F, F, GELU});
      meet(team);
      product(team, &layer->down, inner, F, F, count, prepared, (Result){x, D, D, ADD});
      meet(team);
    }
    MY_ROWS(team, wanted)
    normalize(x + (int64_t)wants[r] * D, D, net->norm_weight, net->norm_bias, net->epsilon,
              mixed + r * D);
    meet(team);
    product(team, net->head, mixed, D, D, wanted, prepared,
            (Result){logits, net->vocabulary, net->vocabulary, PLAIN});
  }
}

/* -- one product alone, and packing -------------------------------------------------------------- */

int64_t linear_scratch_bytes(const Matrix *m, int64_t rows) {
  return round_up(4 * rows) + rows * row_bytes(m->kind, m->inputs) + 64;
}

void linear(const Matrix *m, const float *x, int64_t width, int64_t rows, float *y, char *scratch,
            int64_t threads) {
  scratch = (char *)(((uintptr_t)scratch + 63) / 64 * 64);
  float *scales = (float *)scratch;
  char *data = scratch + round_up(4 * rows);
  int64_t size = row_bytes(m->kind, m->inputs);
#pragma omp parallel num_threads(threads)
  {
    Team team = {omp_get_thread_num(), omp_get_num_threads(), 0, 0};
#pragma omp for schedule(static)
    for (int64_t r = 0; r < rows; r++)
      prepare_row(m->kind, x + r * width, width, m->inputs, data + r * size, scales + r);
    int64_t first, stop;
    share(team, panels_of(m->outputs), &first, &stop);
    multiply(m, first, stop, (Rows){data, size, scales}, rows,
             (Result){y, m->outputs, m->outputs, PLAIN});
  }
}

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
