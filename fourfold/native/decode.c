/* The GPT network as generation runs it, in one call: tokens in, logits out.

   A call takes rows: tokens, each with its sequence and its position there. One token of each of
   many sequences (a step), whole prompts, the rest of a prompt, or several tokens to check at once
   are all the same to it. Keys and values go into the cache first, then every row attends to its
   sequence up to itself. The numbers of a row depend on its sequence alone, to the bit.

   It is the network of fourfold/model/gpt.py with its options, which fourfold/generate/packed.py
   translates into `Network` and `Layer`.

   Letters: R rows, D hidden, H heads, G heads of keys and values, K head size, T positions. */
#include <omp.h>
#include <sched.h>

#include "cache.h"
#include "pack.h"

typedef struct {
  const float *norm1_weight, *norm1_bias, *norm2_weight, *norm2_bias;
  const float *q_norm_weight, *q_norm_bias, *k_norm_weight, *k_norm_bias; /* may all be null */
  Matrix q, k, v; /* without k and v: q has the rows of all three, head by head */
  Matrix out, gate, up, down; /* gate: may be empty */
  Cache cache;
  int64_t window; /* 0: attention to all tokens before */
} Layer;

typedef struct {
  int64_t layers, hidden, heads, ffn, vocabulary;
  int64_t activation;                  /* GELU, GELU_ERF, RELU_SQUARED, SILU */
  int64_t rms_norm, post_norm, parallel_residual, norm_all_heads; /* 0 or 1 */
  int64_t rotary_pairs;                /* of numbers of a head that are rotated */
  const Layer *layer;
  const float *norm_weight, *norm_bias;
  const Matrix *head;
  const uint16_t *half_words; /* a table in half precision */
  const float *words;         /* or in float32; null both: the rows of the head */
  const float *places;        /* (max positions, D); may be null */
  const float *cosines, *sines; /* (T, rotary_pairs) */
  float epsilon, attention_scale, embedding_scale, logit_scale, logit_softcap; /* softcap 0: none */
} Network;

typedef struct {
  int32_t token, sequence, position;
} Row;

/* -- parts of a layer ---------------------------------------------------------------------------- */

static void embed(const Network *net, Row row, float *to) {
  const int64_t D = net->hidden, first = row.token * D;
  for (int64_t d = 0; d < D; d++) {
    float word = net->half_words ? of_f16(net->half_words[first + d])
                 : net->words    ? net->words[first + d]
                                 : weight_at(net->head, row.token, d);
    to[d] = word * net->embedding_scale;
  }
  if (net->places)
    for (int64_t d = 0; d < D; d++) to[d] += net->places[row.position * D + d];
}

/* LayerNorm, or RMSNorm, which leaves the mean where it is. `to` may be x. */
static void normalize(const Network *net, const float *x, int64_t width, const float *weight,
                      const float *bias, float *to) {
  float mean = 0.0f;
  int64_t d = 0;
  if (!net->rms_norm) {
    vf total = v_zero();
    for (; d + VL <= width; d += VL) total = v_add(total, v_load(x + d));
    mean = v_sum(total);
    for (int64_t e = d; e < width; e++) mean += x[e];
    mean /= width;
  }
  vf squares = v_zero(), middle = v_set(mean);
  for (d = 0; d + VL <= width; d += VL) {
    vf off = v_sub(v_load(x + d), middle);
    squares = v_fma(off, off, squares);
  }
  float variance = v_sum(squares);
  for (int64_t e = d; e < width; e++) variance += (x[e] - mean) * (x[e] - mean);
  float factor = 1.0f / sqrtf(variance / width + net->epsilon);
  for (d = 0; d + VL <= width; d += VL) {
    vf unit = v_mul(v_sub(v_load(x + d), middle), v_set(factor));
    v_store(to + d, v_fma(unit, v_load(weight + d), v_load(bias + d)));
  }
  for (; d < width; d++) to[d] = (x[d] - mean) * factor * weight[d] + bias[d];
}

/* The heads of queries, or of keys, of one token: each by itself, or all together (RMSNorm only). */
static void normalize_heads(const Network *net, float *x, int64_t heads, int64_t step, int64_t K,
                            const float *weight, const float *bias) {
  if (!net->norm_all_heads) {
    for (int64_t h = 0; h < heads; h++) normalize(net, x + h * step, K, weight, bias, x + h * step);
    return;
  }
  float squares = 0.0f;
  for (int64_t h = 0; h < heads; h++)
    for (int64_t d = 0; d < K; d++) squares += x[h * step + d] * x[h * step + d];
  float factor = 1.0f / sqrtf(squares / (heads * K) + net->epsilon);
  for (int64_t h = 0; h < heads; h++)
    for (int64_t d = 0; d < K; d++) x[h * step + d] = x[h * step + d] * factor * weight[h * K + d];
}

/* Pairs of a head's numbers, i and i + half, by the angles of a position. */
static void rotate(float *x, int64_t half, const float *cosines, const float *sines) {
  for (int64_t i = 0; i < half; i++) {
    float one = x[i], other = x[half + i];
    x[i] = one * cosines[i] - other * sines[i];
    x[half + i] = other * cosines[i] + one * sines[i];
  }
}

/* Where queries, keys and values of a token are in what its products give: either [q, k, v] head by
   head, or all queries, all keys, all values. */
typedef struct {
  int64_t width, keys, values;    /* of all; where keys and values begin */
  int64_t query_step, key_step;   /* from head to head */
} Projected;

static Projected projected(const Network *net) {
  const Layer *layer = net->layer;
  const int64_t H = net->heads, G = layer->cache.heads, K = layer->cache.size;
  if (!layer->k.outputs) return (Projected){3 * H * K, K, 2 * K, 3 * K, 3 * K};
  return (Projected){(H + 2 * G) * K, H * K, (H + G) * K, K, K};
}

/* Norms and rotation of one token's queries and keys; then its keys and values go into the cache. */
static void take_in(const Network *net, const Layer *layer, Row row, Projected at, float *qkv) {
  const Cache *cache = &layer->cache;
  const int64_t H = net->heads, G = cache->heads, K = cache->size, half = net->rotary_pairs;
  if (layer->q_norm_weight) {
    normalize_heads(net, qkv, H, at.query_step, K, layer->q_norm_weight, layer->q_norm_bias);
    normalize_heads(net, qkv + at.keys, G, at.key_step, K, layer->k_norm_weight, layer->k_norm_bias);
  }
  if (half) {
    const float *cosines = net->cosines + row.position * half, *sines = net->sines + row.position * half;
    for (int64_t h = 0; h < H; h++) rotate(qkv + h * at.query_step, half, cosines, sines);
    for (int64_t g = 0; g < G; g++) rotate(qkv + at.keys + g * at.key_step, half, cosines, sines);
  }
  for (int64_t g = 0; g < G; g++) {
    const float *key = qkv + at.keys + g * at.key_step, *value = qkv + at.values + g * at.key_step;
    store(cache, row.sequence, row.position, g, key, value);
  }
}

/* Heads `first` to `stop`, which share keys and values, of `count` rows that follow each other in
   one sequence: four rows of a head together, or all these heads of a row. */
static void attend_tile(const Network *net, const Layer *layer, const Row *rows, int64_t count,
                        int64_t first, int64_t stop, Projected at, const float *qkv, float *mixed,
                        float *scores) {
  const Cache *cache = &layer->cache;
  const int64_t K = cache->size, shared = first * cache->heads / net->heads;
  const int by_rows = count == QUERIES;
  for (int64_t outer = 0; outer < (by_rows ? stop - first : count); outer++) {
    Query queries[QUERIES];
    int64_t inner = by_rows ? count : stop - first;
    for (int64_t i = 0; i < inner; i++) {
      int64_t r = by_rows ? i : outer, h = first + (by_rows ? outer : i);
      int64_t end = rows[r].position + 1, start = layer->window ? end - layer->window : 0;
      queries[i] = (Query){qkv + r * at.width + h * at.query_step, mixed + (r * net->heads + h) * K,
                           start > 0 ? start : 0, end};
    }
    attend(inner, cache, rows[0].sequence, shared, net->attention_scale, queries, scores);
  }
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

/* Rows of `width` numbers in the form the matrix, and others of its kind and inputs, multiply with.
   All rows of x must be there. */
static Rows prepare(Team team, const Matrix *m, const float *x, int64_t width, int64_t rows,
                    Prepared to) {
  if (row_bytes(m->kind, 1) == 4 && width == m->inputs) return (Rows){x, 4 * width, 0};
  int64_t size = row_bytes(m->kind, m->inputs);
  Team mine = to.alone ? (Team){0, 1, 0, 0} : team;
  MY_ROWS(mine, rows)
  prepare_row(m->kind, x + r * width, width, m->inputs, to.data + r * size, to.scales + r);
  if (!to.alone) meet(team);
  return (Rows){to.data, size, to.scales};
}

/* This thread's share of the outputs; it does not wait for the others. */
static void times(Team team, const Matrix *m, Rows given, int64_t rows, Result y) {
  int64_t first, stop;
  share(team, panels_of(m->outputs), &first, &stop);
  multiply(m, first, stop, given, rows, y);
}

static void product(Team team, const Matrix *m, const float *x, int64_t width, int64_t rows,
                    Prepared to, Result y) {
  times(team, m, prepare(team, m, x, width, rows, to), rows, y);
}

static void normalize_all(Team team, const Network *net, const float *x, int64_t rows,
                          const float *weight, const float *bias, float *to) {
  const int64_t D = net->hidden;
  Team mine = rows <= FEW ? (Team){0, 1, 0, 0} : team;
  MY_ROWS(mine, rows) normalize(net, x + r * D, D, weight, bias, to + r * D);
  if (rows > FEW) meet(team);
}

/* x += norm(branch), which the norm changes. */
static void add_normalized(Team team, const Network *net, float *branch, int64_t rows,
                           const float *weight, const float *bias, float *x) {
  const int64_t D = net->hidden;
  MY_ROWS(team, rows) {
    normalize(net, branch + r * D, D, weight, bias, branch + r * D);
    for (int64_t d = 0; d < D; d++) x[r * D + d] += branch[r * D + d];
  }
  meet(team);
}

/* Up to the product with `down`. */
static void feed_forward(Team team, const Network *net, const Layer *layer, const float *x,
                         int64_t rows, Prepared to, float *inner) {
  const int64_t F = net->ffn;
  Rows given = prepare(team, layer->gate.outputs ? &layer->gate : &layer->up, x, net->hidden, rows, to);
  /* The same thread has the same outputs of both. */
  if (layer->gate.outputs)
    times(team, &layer->gate, given, rows, (Result){inner, F, F, net->activation});
  times(team, &layer->up, given, rows,
        (Result){inner, F, F, layer->gate.outputs ? TIMES : net->activation});
  meet(team);
}

/* cap * tanh(logits / cap), of this thread's outputs. */
static void cap(Team team, const Network *net, float *logits, int64_t rows) {
  int64_t first, stop, V = net->vocabulary;
  share(team, panels_of(V), &first, &stop);
  vf limit = v_set(net->logit_softcap), twice = v_set(2.0f / net->logit_softcap);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t o = first * PANEL; o < stop * PANEL && o < V; o += VL) {
      float some[VL] = {0};
      int64_t count = V - o < VL ? V - o : VL;
      memcpy(some, logits + r * V + o, 4 * count);
      vf power = v_exp(v_mul(v_load(some), twice));
      vf rest = v_div(v_set(2.0f), v_add(power, v_set(1.0f)));
      v_store(some, v_mul(limit, v_sub(v_set(1.0f), rest)));
      memcpy(logits + r * V + o, some, 4 * count);
    }
}

/* -- the network --------------------------------------------------------------------------------- */

static int64_t round_up(int64_t bytes) { return (bytes + 63) / 64 * 64; }

enum { X, UNIT, QKV, MIXED, INNER, BRANCH, PREPARED, SCALES, SCORES, TILES, PARTS };

/* Bytes of scratch memory that `forward` needs; of the parts in its order. */
static int64_t scratch_parts(const Network *net, int64_t rows, int64_t threads, int64_t *sizes) {
  int64_t D = net->hidden, M = net->heads * net->layer->cache.size, few = rows <= FEW ? threads : 1;
  int64_t widest = net->ffn > D ? net->ffn : D;
  if (M > widest) widest = M;
  sizes[X] = round_up(4 * rows * D);
  sizes[UNIT] = few * round_up(4 * rows * D); /* normalized */
  sizes[QKV] = round_up(4 * rows * projected(net).width);
  sizes[MIXED] = round_up(4 * rows * (M > D ? M : D));
  sizes[INNER] = round_up(4 * rows * net->ffn);
  sizes[BRANCH] = net->post_norm ? round_up(4 * rows * D) : 0;
  sizes[PREPARED] = few * round_up(4 * rows * padded(widest));
  sizes[SCALES] = few * round_up(4 * rows); /* of prepared */
  sizes[SCORES] = threads * round_up(4 * QUERIES * net->layer->cache.positions);
  sizes[TILES] = round_up(4 * (rows + 1)); /* where they start */
  int64_t total = 0;
  for (int i = 0; i < PARTS; i++) total += sizes[i];
  return total;
}

int64_t scratch_bytes(const Network *net, int64_t rows, int64_t threads) {
  int64_t sizes[PARTS];
  return scratch_parts(net, rows, threads, sizes) + 64;
}

/* Heads that one thread attends with at a time: those that share keys and values, at most four, and
   fewer where there would not be enough for all threads. */
static int64_t heads_at_once(const Network *net, int64_t threads) {
  int64_t G = net->layer->cache.heads, group = net->heads / G, most = QUERIES;
  while (most > 1 && G * ((group + most - 1) / most) < threads) most /= 2;
  return most < group ? most : group;
}

/* Logits (wanted, V) of the rows whose numbers are in `wants`. */
void forward(const Network *net, const Row *rows, int64_t count, const int32_t *wants,
             int64_t wanted, float *logits, char *scratch, int64_t threads) {
  const int64_t D = net->hidden, F = net->ffn, V = net->vocabulary;
  const int64_t M = net->heads * net->layer->cache.size;
  int64_t sizes[PARTS];
  scratch_parts(net, count, threads, sizes);
  char *part[PARTS];
  part[0] = (char *)(((uintptr_t)scratch + 63) / 64 * 64);
  for (int i = 1; i < PARTS; i++) part[i] = part[i - 1] + sizes[i - 1];
  float *x = (float *)part[X], *qkv = (float *)part[QKV], *mixed = (float *)part[MIXED];
  float *inner = (float *)part[INNER], *branch = (float *)part[BRANCH];
  int32_t *starts = (int32_t *)part[TILES];
  int64_t tiles = 0;
  for (int64_t r = 0; r < count; r++) {
    int follows = r > 0 && rows[r].sequence == rows[r - 1].sequence &&
                  rows[r].position == rows[r - 1].position + 1;
    if (!follows || r - starts[tiles - 1] == QUERIES) starts[tiles++] = (int32_t)r;
  }
  starts[tiles] = (int32_t)count;
  const int few = count <= FEW, post = net->post_norm, parallel = net->parallel_residual;
  const Projected at = projected(net);
  const int64_t group = net->heads / net->layer->cache.heads, side = heads_at_once(net, threads);
  const int64_t sides = (group + side - 1) / side, units = net->layer->cache.heads * sides;
  const Result to_stream = post ? (Result){branch, D, D, PLAIN} : (Result){x, D, D, ADD};
  int32_t meeting[2] = {0, 0};
#pragma omp parallel num_threads(threads)
  {
    /* There may be fewer threads than were asked for. */
    Team team = {omp_get_thread_num(), omp_get_num_threads(), meeting, meeting + 1};
    int64_t mine = few ? team.me : 0, parts = few ? threads : 1;
    float *unit = (float *)(part[UNIT] + mine * (sizes[UNIT] / parts));
    float *scales = (float *)(part[SCALES] + mine * (sizes[SCALES] / parts));
    Prepared prepared = {part[PREPARED] + mine * (sizes[PREPARED] / parts), scales, few};
    float *scores = (float *)(part[SCORES] + team.me * (sizes[SCORES] / threads));
    const float *seen = post ? x : unit; /* what attention and the feed-forward block read */
    MY_ROWS(team, count) embed(net, rows[r], x + r * D);
    meet(team);
    for (int64_t l = 0; l < net->layers; l++) {
      const Layer *layer = net->layer + l;
      if (!post) normalize_all(team, net, x, count, layer->norm1_weight, layer->norm1_bias, unit);
      Rows given = prepare(team, &layer->q, seen, D, count, prepared);
      times(team, &layer->q, given, count, (Result){qkv, at.width, layer->q.outputs, PLAIN});
      if (layer->k.outputs) {
        times(team, &layer->k, given, count, (Result){qkv + at.keys, at.width, layer->k.outputs, PLAIN});
        times(team, &layer->v, given, count, (Result){qkv + at.values, at.width, layer->v.outputs, PLAIN});
      }
      meet(team);
      MY_ROWS(team, count) take_in(net, layer, rows[r], at, qkv + r * at.width);
      meet(team);
      for (int64_t one = team.me; one < tiles * units; one += team.threads) {
        int64_t t = one / units, r = starts[t], unit_of = one % units;
        int64_t end = unit_of / sides * group + group, first = end - group + unit_of % sides * side;
        attend_tile(net, layer, rows + r, starts[t + 1] - r, first, least(first + side, end), at,
                    qkv + r * at.width, mixed + r * M, scores);
      }
      meet(team);
      if (parallel) { /* before the residual stream changes */
        normalize_all(team, net, x, count, layer->norm2_weight, layer->norm2_bias, unit);
        feed_forward(team, net, layer, unit, count, prepared, inner);
      }
      product(team, &layer->out, mixed, M, count, prepared, to_stream);
      meet(team);
      if (post) add_normalized(team, net, branch, count, layer->norm1_weight, layer->norm1_bias, x);
      if (!parallel) {
        if (!post) normalize_all(team, net, x, count, layer->norm2_weight, layer->norm2_bias, unit);
        feed_forward(team, net, layer, seen, count, prepared, inner);
      }
      product(team, &layer->down, inner, F, count, prepared, to_stream);
      meet(team);
      if (post) add_normalized(team, net, branch, count, layer->norm2_weight, layer->norm2_bias, x);
    }
    MY_ROWS(team, wanted) {
      float *row = mixed + r * D;
      normalize(net, x + (int64_t)wants[r] * D, D, net->norm_weight, net->norm_bias, row);
      if (net->logit_scale != 1.0f)
        for (int64_t d = 0; d < D; d++) row[d] *= net->logit_scale;
    }
    meet(team);
    product(team, net->head, mixed, D, wanted, prepared, (Result){logits, V, V, PLAIN});
    if (net->logit_softcap != 0.0f) cap(team, net, logits, wanted);
  }
}

/* -- one product alone --------------------------------------------------------------------------- */

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
