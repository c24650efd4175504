/* The next token of each row of logits, by the rules of fourfold/generate/sampling.py.

   One pass finds the largest logit, one the probabilities; what `top_k` and `top_p` keep is found
   with few more, without sorting the vocabulary. Sums are taken in double precision. */
#include <math.h>
#include <omp.h>
#include <stdlib.h>

#include "simd.h"

typedef struct {
  int64_t top_k;                       /* 0: all */
  double top_p, temperature, uniform;  /* temperature 0: the largest logit */
} Rule;

#define BUCKETS 2048 /* of probabilities, by exponent and three bits: the first 11 bits of a float */

INLINE uint32_t bucket_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits >> 20;
}

/* The largest of the row; NaN if it has one. */
static float largest_of(const float *x, int64_t size) {
  vf most = v_set(-INFINITY);
  unsigned unordered = 0;
  int64_t i = 0;
  for (; i + VL <= size; i += VL) {
    vf some = v_load(x + i);
    unordered |= v_unordered(some);
    most = v_max(most, some);
  }
  float largest = v_largest(most);
  for (; i < size; i++) {
    unordered |= x[i] != x[i];
    largest = x[i] > largest ? x[i] : largest;
  }
  return unordered ? NAN : largest;
}

static int64_t first_at(const float *x, int64_t size, float value) {
  for (int64_t i = 0; i + VL <= size; i += VL) {
    unsigned reached = v_reaches(v_load(x + i), v_set(value));
    if (reached) return i + __builtin_ctz(reached);
  }
  for (int64_t i = size / VL * VL; i < size; i++)
    if (x[i] >= value) return i;
  return -1;
}

/* The k-th largest: a heap of k, its smallest first, which most values do not get into. */
static float kth_largest(const float *x, int64_t size, int64_t k, float *heap) {
  int64_t held = 0;
  for (int64_t i = 0; i < size; i++) {
    if (held == k) {
      if (i % VL == 0)
        while (i + VL <= size && !v_reaches(v_load(x + i), v_set(heap[0]))) i += VL;
      if (i >= size) break;
      if (x[i] <= heap[0]) continue;
      int64_t place = 0;
      for (int64_t child; (child = 2 * place + 1) < k; place = child) {
        if (child + 1 < k && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= x[i]) break;
        heap[place] = heap[child];
      }
      heap[place] = x[i];
    } else {
      int64_t place = held++;
      for (int64_t parent; place > 0 && heap[parent = (place - 1) / 2] > x[i]; place = parent)
        heap[place] = heap[parent];
      heap[place] = x[i];
    }
  }
  return heap[0];
}

typedef struct {
  float value;
  int32_t id;
} Candidate;

static int by_value(const void *a, const void *b) {
  const Candidate *one = a, *other = b;
  if (one->value != other->value) return one->value > other->value ? -1 : 1;
  return one->id - other->id;
}

/* Zeros for the candidates that the nucleus leaves out: the most probable stay, up to the one that
   takes their sum beyond `share`. Equals go by their id. */
static void keep_nucleus(Candidate *all, int64_t count, double share, Candidate *some) {
  double sums[BUCKETS] = {0};
  for (int64_t i = 0; i < count; i++) sums[bucket_of(all[i].value)] += all[i].value;
  double before = 0.0;
  int64_t border = BUCKETS - 1;
  while (border > 0 && before + sums[border] <= share) before += sums[border--];
  int64_t found = 0;
  for (int64_t i = 0; i < count; i++)
    if (bucket_of(all[i].value) == border) some[found++] = all[i];
  qsort(some, found, sizeof(Candidate), by_value);
  float least = 0.0f;
  int32_t last = -1; /* of those as probable as the least, the highest id that stays */
  for (int64_t i = 0; i < found && before <= share; i++) {
    before += some[i].value;
    least = some[i].value, last = some[i].id;
  }
  for (int64_t i = 0; i < count; i++) {
    float value = all[i].value;
    uint32_t bucket = bucket_of(value);
    int stays = bucket > border ||
                (bucket == border && (value > least || (value == least && all[i].id <= last)));
    if (!stays) all[i].value = 0.0f;
  }
}

static int64_t choose_row(const float *logits, int64_t size, Rule rule, float *e, Candidate *all,
                          Candidate *some) {
  float largest = largest_of(logits, size);
  if (!isfinite(largest)) return -1;
  if (rule.temperature == 0.0) return first_at(logits, size, largest);
  vf top = v_set(largest), inverse = v_set((float)(1.0 / rule.temperature));
  double total = 0.0;
  vf sums = v_zero(); /* of a few vectors, which float32 adds up well enough */
  for (int64_t i = 0; i < size; i += VL) {
    float tail[VL];
    const float *from = logits + i;
    if (i + VL > size) { /* beyond the end there is nothing */
      for (int j = 0; j < VL; j++) tail[j] = i + j < size ? logits[i + j] : -INFINITY;
      from = tail;
    }
    vf some_e = v_exp(v_mul(v_sub(v_load(from), top), inverse));
    v_store(e + i, some_e);
    sums = v_add(sums, some_e);
    if (i / VL % 16 == 15 || i + VL >= size) {
      total += v_sum(sums);
      sums = v_zero();
    }
  }
  if (rule.top_k == 0 && rule.top_p >= 1.0) {
    double target = rule.uniform * total, reached = 0.0;
    int64_t i = 0, last = -1;
    for (; i + VL <= size; i += VL) { /* whole vectors first, then the one the target is in */
      double next = reached + v_sum(v_load(e + i));
      if (next > target) break;
      reached = next;
    }
    for (; i < size; i++) {
      if (e[i] > 0.0f) last = i;
      reached += e[i];
      if (reached > target && e[i] > 0.0f) return i;
    }
    return last >= 0 ? last : first_at(logits, size, largest);
  }
  int64_t count = 0;
  float threshold = 0.0f;
  if (rule.top_k > 0 && rule.top_k < size) threshold = kth_largest(e, size, rule.top_k, (float *)some);
  for (int64_t i = 0; i < size; i += VL) {
    unsigned reached = v_reaches(v_load(e + i), v_set(threshold));
    for (; reached; reached &= reached - 1) {
      int64_t id = i + __builtin_ctz(reached);
      if (id < size) all[count++] = (Candidate){e[id], (int32_t)id};
    }
  }
  if (rule.top_p < 1.0) keep_nucleus(all, count, rule.top_p * total, some);
  double kept = 0.0, reached = 0.0;
  for (int64_t i = 0; i < count; i++) kept += all[i].value;
  int64_t last = -1;
  for (int64_t i = 0; i < count; i++) {
    if (all[i].value > 0.0f) last = all[i].id;
    reached += all[i].value;
    if (reached > rule.uniform * kept) return all[i].id;
  }
  return last;
}

int64_t choose_scratch_bytes(int64_t size, int64_t threads) {
  return threads * ((size + VL) * (sizeof(float) + 2 * sizeof(Candidate)) + 64);
}

/* One token for each row, -1 where its logits are not finite. */
void choose(const float *logits, int64_t rows, int64_t stride, int64_t size, const Rule *rules,
            int64_t *chosen, char *scratch, int64_t threads) {
  if (threads > rows) threads = rows;
  int64_t room = choose_scratch_bytes(size, 1);
#pragma omp parallel for schedule(static, 1) num_threads(threads)
  for (int64_t r = 0; r < rows; r++) {
    char *mine = scratch + omp_get_thread_num() * room;
    Candidate *all = (Candidate *)mine, *some = all + size + VL;
    chosen[r] = choose_row(logits + r * stride, size, rules[r], (float *)(some + size + VL), all, some);
  }
}
