/* Products with weights in five formats, for one row or thousands.

   A matrix of `outputs` x `inputs` is cut into panels of 16 outputs. Within a panel the weights
   stand in the order in which they are used: for an input (or for the 2, 4 or 8 inputs that one
   32-bit word holds) the 16 outputs side by side, one lane each. So a sum stays in its lane, and
   there is nothing to add up across lanes. The panels of a block of 4 take turns, 64 bytes each (a
   chunk), so that a block is one stream from memory, and the next block continues it.

   Whatever the number of rows, each sum is taken in the order of the inputs, with the same
   operations: the result of a row is the same to the bit alone, in a batch and in a prompt. */
#pragma once
#include "simd.h"

enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 };
#define PANEL 16
#define BLOCK 4 /* panels; a thread takes them through all rows, so that they stay in its cache */
#define CHUNK 64
#define NV (PANEL / VL)
#define GROUP 32 /* inputs that share a scale in INT4 */

#if WIDE && defined(__AVX512BF16__)
#define HAS_BF16 1
#else
#define HAS_BF16 0
#endif
#if WIDE && defined(__AVX512VNNI__)
#define HAS_VNNI 1
#else
#define HAS_VNNI 0
#endif

typedef struct {
  int64_t kind, outputs, inputs; /* inputs: padded to a multiple of GROUP */
  const void *weights;
  const void *scales; /* INT8: float per output; INT4: half per group and output */
  const int32_t *sums; /* INT8: 128 times the sum of an output's weights */
  const float *bias;   /* padded to whole blocks; may be null */
} Matrix;

INLINE int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
INLINE int64_t padded_panels(int64_t outputs) {
  return (panels_of(outputs) + BLOCK - 1) / BLOCK * BLOCK;
}
INLINE int64_t padded(int64_t inputs) { return (inputs + GROUP - 1) / GROUP * GROUP; }

static const int BITS[] = {32, 16, 16, 8, 4};
INLINE int64_t panel_bytes(int64_t kind, int64_t inputs) { return PANEL * inputs * BITS[kind] / 8; }
/* Where the first chunk of a panel is; the next ones follow at distances of a chunk of the block. */
INLINE int64_t panel_start(int64_t kind, int64_t inputs, int64_t panel) {
  return panel / BLOCK * BLOCK * panel_bytes(kind, inputs) + panel % BLOCK * CHUNK;
}
/* Where the first of a panel's 16 scales for a group of inputs is (INT4). */
INLINE int64_t scale_start(int64_t groups, int64_t panel, int64_t group) {
  return ((panel / BLOCK * groups + group) * BLOCK + panel % BLOCK) * PANEL;
}

/* -- what goes in: rows of activations, in the form a kind multiplies with ---------------------- */

typedef struct {
  const void *data;
  int64_t stride;      /* bytes from row to row */
  const float *scales; /* INT8: one a row */
} Rows;

INLINE int rounds_to_bf16(int64_t kind) { return HAS_BF16 && (kind == BFLOAT16 || kind == INT4); }
INLINE int64_t row_bytes(int64_t kind, int64_t inputs) {
  return kind == INT8 ? inputs : rounds_to_bf16(kind) ? 2 * inputs : 4 * inputs;
}

/* One row of `given` floats, padded with zeros to `inputs`. */
static void prepare_row(int64_t kind, const float *x, int64_t given, int64_t inputs, void *to,
                        float *scale) {
  if (kind == INT8) {
    vf most = v_set(1.1754944e-38f);
    unsigned unordered = 0; /* a maximum does not keep NaN */
    int64_t i = 0;
    for (; i + VL <= given; i += VL) {
      unordered |= v_unordered(v_load(x + i));
      most = v_max(v_abs(v_load(x + i)), most);
    }
    float largest = v_largest(most);
    for (; i < given; i++) {
      unordered |= x[i] != x[i];
      largest = __builtin_fabsf(x[i]) > largest ? __builtin_fabsf(x[i]) : largest;
    }
    *scale = unordered ? __builtin_nanf("") : largest / 127.0f;
    float inverse = 127.0f / largest;
    int8_t *q = to;
    vf factor = v_set(inverse);
    for (i = 0; i + VL <= given; i += VL) {
      vi whole = v_to(v_mul(v_load(x + i), factor));
#if WIDE
      _mm_storeu_si128((__m128i *)(q + i), _mm512_cvtepi32_epi8(whole));
#else
      int32_t some[VL];
      _mm256_storeu_si256((__m256i *)some, whole);
      for (int j = 0; j < VL; j++) q[i + j] = (int8_t)some[j];
#endif
    }
    for (; i < given; i++) q[i] = (int8_t)_mm_cvtss_si32(_mm_set_ss(x[i] * inverse));
    memset(q + given, 0, inputs - given);
#if HAS_VNNI
    for (i = 0; i < inputs; i += 32) { /* from signed to offset by 128 */
      __m256i *place = (__m256i *)(q + i);
      _mm256_storeu_si256(place, _mm256_xor_si256(_mm256_loadu_si256(place), _mm256_set1_epi8(-128)));
    }
#endif
  } else if (rounds_to_bf16(kind)) {
    uint16_t *pairs = to;
    int64_t i = 0;
#if HAS_BF16
    for (; i + 16 <= given; i += 16) {
      __m256bh some = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + i));
      memcpy(pairs + i, &some, 32);
    }
#endif
    for (; i < given; i++) pairs[i] = bf16_of(x[i]);
    memset(pairs + given, 0, 2 * (inputs - given));
  } else {
    if (to != x) memcpy(to, x, 4 * given);
    memset((float *)to + given, 0, 4 * (inputs - given));
  }
}

/* The products of pairs and of fours, added to a sum. Written out because GCC 12 copies and spills
   the sums around its own functions for them. */
#if HAS_BF16
INLINE vf add_pairs(vf sum, vi a, vi b) {
  __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  return sum;
}
#endif
#if HAS_VNNI
INLINE vi add_fours(vi sum, vi offset, vi b) {
  __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(offset), "v"(b));
  return sum;
}
#endif

/* -- tiles: `rows` rows times `panels` panels, all sums in registers ---------------------------- */

#define SUMS(rows, panels) vf sums[rows][panels][NV]
#define EACH_SUM(rows, panels)                  \
  UNROLL for (int r = 0; r < (rows); r++)       \
  UNROLL for (int p = 0; p < (panels); p++)     \
  UNROLL for (int v = 0; v < NV; v++)
#define EACH_PART(panels)                   \
  UNROLL for (int p = 0; p < (panels); p++) \
  UNROLL for (int v = 0; v < NV; v++)
#define EACH_ROW(rows) UNROLL for (int r = 0; r < (rows); r++)

/* Weights are fetched before their use, since the hardware stops at each page: a tile of `panels`
   panels fetches as many lines for each chunk that it reads. A tile of fewer panels than a block
   fetches the next block, which is larger than the first cache: to the second one, or each line
   would drive out what is about to be used, which took 1.6 times as long with eight rows. */
#define AHEAD 2048
typedef struct {
  const char *place; /* for the first chunk */
  int64_t step;      /* bytes from chunk to chunk */
} Ahead;
#define FETCH(chunk)                                                 \
  UNROLL for (int p = 0; p < panels; p++)                            \
      _mm_prefetch(ahead.place + (chunk) * ahead.step + p * CHUNK,   \
                   panels < BLOCK ? _MM_HINT_T1 : _MM_HINT_T0);
#define AT(w, chunk, p) ((w) + (chunk) * (BLOCK * CHUNK) + (p) * CHUNK)

INLINE void tile_float32(const int rows, const int panels, const Matrix *m, const char *w,
                         Ahead ahead, Rows x, vf (*sums)[4][NV]) {
  for (int64_t k = 0; k < m->inputs; k++) {
    vf weight[4][NV];
    FETCH(k)
    EACH_PART(panels) weight[p][v] = v_load((const float *)AT(w, k, p) + v * VL);
    EACH_ROW(rows) {
      vf one = v_set(((const float *)((const char *)x.data + r * x.stride))[k]);
      EACH_PART(panels) sums[r][p][v] = v_fma(weight[p][v], one, sums[r][p][v]);
    }
  }
}

INLINE void tile_float16(const int rows, const int panels, const Matrix *m, const char *w,
                         Ahead ahead, Rows x, vf (*sums)[4][NV]) {
  for (int64_t pair = 0; pair < m->inputs / 2; pair++) {
    FETCH(pair)
    UNROLL for (int k = 0; k < 2; k++) {
      vf weight[4][NV];
      EACH_PART(panels)
      weight[p][v] = v_half((const uint16_t *)AT(w, pair, p) + k * PANEL + v * VL);
      EACH_ROW(rows) {
        const float *row = (const float *)((const char *)x.data + r * x.stride);
        vf one = v_set(row[2 * pair + k]);
        EACH_PART(panels) sums[r][p][v] = v_fma(weight[p][v], one, sums[r][p][v]);
      }
    }
  }
}

INLINE void tile_bfloat16(const int rows, const int panels, const Matrix *m, const char *w,
                          Ahead ahead, Rows x, vf (*sums)[4][NV]) {
  for (int64_t pair = 0; pair < m->inputs / 2; pair++) {
    vi both[4][NV];
    FETCH(pair)
    EACH_PART(panels) both[p][v] = vi_load(AT(w, pair, p) + v * 4 * VL);
#if HAS_BF16
    EACH_ROW(rows) {
      vi ones = vi_set(((const int32_t *)((const char *)x.data + r * x.stride))[pair]);
      EACH_PART(panels)
      sums[r][p][v] = add_pairs(sums[r][p][v], both[p][v], ones);
    }
#else
    EACH_ROW(rows) {
      const float *row = (const float *)((const char *)x.data + r * x.stride) + 2 * pair;
      vf even = v_set(row[0]), odd = v_set(row[1]);
      EACH_PART(panels) {
        sums[r][p][v] = v_fma(v_bits(vi_shl(both[p][v], 16)), even, sums[r][p][v]);
        sums[r][p][v] =
            v_fma(v_bits(vi_and(both[p][v], vi_set((int)0xffff0000))), odd, sums[r][p][v]);
      }
    }
#endif
  }
}

INLINE void tile_int8(const int rows, const int panels, const Matrix *m, const char *w,
                      Ahead ahead, Rows x, int64_t first_panel, vf (*sums)[4][NV]) {
  vi whole[12][4][NV];
  EACH_SUM(rows, panels) whole[r][p][v] = vi_set(0);
  for (int64_t four = 0; four < m->inputs / 4; four++) {
    vi weight[4][NV];
    FETCH(four)
    EACH_PART(panels) weight[p][v] = vi_load(AT(w, four, p) + v * 4 * VL);
    EACH_ROW(rows) {
      vi ones = vi_set(((const int32_t *)((const char *)x.data + r * x.stride))[four]);
      EACH_PART(panels) {
#if HAS_VNNI
        whole[r][p][v] = add_fours(whole[r][p][v], ones, weight[p][v]);
#elif WIDE
        /* Two halves of 256 bits: there is no sign instruction for 512. */
        __m256i part[2];
        for (int h = 0; h < 2; h++) {
          __m256i a = h ? _mm512_extracti64x4_epi64(ones, 1) : _mm512_castsi512_si256(ones);
          __m256i b = h ? _mm512_extracti64x4_epi64(weight[p][v], 1)
                        : _mm512_castsi512_si256(weight[p][v]);
          __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
          part[h] = _mm256_madd_epi16(twos, _mm256_set1_epi16(1));
        }
        vi sum = _mm512_inserti64x4(_mm512_castsi256_si512(part[0]), part[1], 1);
        whole[r][p][v] = vi_add(whole[r][p][v], sum);
#else
        __m256i twos = _mm256_maddubs_epi16(_mm256_abs_epi8(ones), _mm256_sign_epi8(weight[p][v], ones));
        whole[r][p][v] = vi_add(whole[r][p][v], _mm256_madd_epi16(twos, _mm256_set1_epi16(1)));
#endif
      }
    }
  }
  EACH_SUM(rows, panels) {
    int64_t output = (first_panel + p) * PANEL + v * VL;
    vi sum = whole[r][p][v];
#if HAS_VNNI
    sum = vi_sub(sum, vi_load(m->sums + output));
#endif
    vf scale = v_mul(v_load((const float *)m->scales + output), v_set(x.scales[r]));
    sums[r][p][v] = v_mul(v_of(sum), scale);
  }
}

INLINE void tile_int4(const int rows, const int panels, const Matrix *m, const char *w,
                      Ahead ahead, Rows x, int64_t first_panel, vf (*sums)[4][NV]) {
  const int64_t groups = m->inputs / GROUP;
#if HAS_BF16
  /* bfloat16 numbers -8 to 7, twice, since the index of a word has five bits. */
  static const uint16_t numbers[32] = {
      0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000,
      0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
      0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
  const vi table = vi_load(numbers);
#endif
  for (int64_t group = 0; group < groups; group++) {
    vf parts[12][4][NV];
    EACH_SUM(rows, panels) parts[r][p][v] = v_zero();
    UNROLL for (int chunk = 0; chunk < GROUP / 8; chunk++) {
      vi eight[4][NV];
      FETCH(group * 4 + chunk)
      EACH_PART(panels) eight[p][v] = vi_load(AT(w, group * 4 + chunk, p) + v * 4 * VL);
#if HAS_BF16
      UNROLL for (int n = 0; n < 4; n++) {
        vi two[4];
        UNROLL for (int p = 0; p < panels; p++)
            two[p] = _mm512_permutexvar_epi16(_mm512_srli_epi16(eight[p][0], 4 * n), table);
        EACH_ROW(rows) {
          const int32_t *row = (const int32_t *)((const char *)x.data + r * x.stride);
          vi ones = vi_set(row[group * 16 + chunk * 4 + n]);
          UNROLL for (int p = 0; p < panels; p++) parts[r][p][0] =
              add_pairs(parts[r][p][0], two[p], ones);
        }
      }
#else
      UNROLL for (int n = 0; n < 8; n++) {
        vf one[4][NV];
        EACH_PART(panels)
        one[p][v] = v_of(vi_sub(vi_and(vi_shr(eight[p][v], 4 * (n / 2) + 16 * (n % 2)), vi_set(15)), vi_set(8)));
        EACH_ROW(rows) {
          const float *row = (const float *)((const char *)x.data + r * x.stride);
          vf factor = v_set(row[group * GROUP + chunk * 8 + n]);
          EACH_PART(panels) parts[r][p][v] = v_fma(one[p][v], factor, parts[r][p][v]);
        }
      }
#endif
    }
    vf scale[4][NV];
    const uint16_t *halves = (const uint16_t *)m->scales + scale_start(groups, first_panel, group);
    _mm_prefetch((const char *)halves + AHEAD, _MM_HINT_T0);
    if (panels == BLOCK) _mm_prefetch((const char *)halves + CHUNK + AHEAD, _MM_HINT_T0);
    EACH_PART(panels) scale[p][v] = v_half(halves + p * PANEL + v * VL);
    EACH_SUM(rows, panels) sums[r][p][v] = v_fma(parts[r][p][v], scale[p][v], sums[r][p][v]);
  }
}

/* -- what comes out ------------------------------------------------------------------------------ */

/* y = product, y = f(product), y += product, y *= product; the product with its bias. */
enum { PLAIN, GELU, GELU_ERF, RELU_SQUARED, SILU, ADD, TIMES };

/* x / 2 (1 + erf(x / sqrt 2)); erf as 1 - p(t) e^-zz with t = 1 / (1 + 0.3275911 z), within 2e-7
   (Abramowitz and Stegun 7.1.26). */
INLINE vf v_gelu_erf(vf x) {
  vf z = v_mul(v_abs(x), v_set(0.70710678118654752f));
  vf t = v_div(v_set(1.0f), v_fma(v_set(0.3275911f), z, v_set(1.0f)));
  vf p = v_set(1.061405429f);
  p = v_fma(p, t, v_set(-1.453152027f));
  p = v_fma(p, t, v_set(1.421413741f));
  p = v_fma(p, t, v_set(-0.284496736f));
  p = v_fma(p, t, v_set(0.254829592f));
  vf tail = v_mul(v_mul(p, t), v_exp(v_mul(z, v_sub(v_zero(), z))));
  return v_mul(v_set(0.5f), v_fma(v_abs(x), v_sub(v_set(1.0f), tail), x));
}

INLINE vf activated(int how, vf x) {
  if (how == GELU) return v_gelu(x);
  if (how == GELU_ERF) return v_gelu_erf(x);
  if (how == SILU) return v_div(x, v_add(v_set(1.0f), v_exp(v_sub(v_zero(), x))));
  if (how == RELU_SQUARED) {
    vf above = v_max(v_zero(), x); /* of NaN the second operand */
    return v_mul(above, above);
  }
  return x;
}

typedef struct {
  float *data;
  int64_t stride, width; /* in floats; width: outputs that exist */
  int how;
} Result;

static __attribute__((noinline)) void finish(int rows, int64_t width, const Matrix *m,
                                            int64_t first, Result y, const float *sums) {
  for (int r = 0; r < rows; r++) {
    float *row = y.data + r * y.stride + first;
    for (int64_t o = 0; o < width; o += VL) {
      vf value = v_load(sums + r * width + o);
      if (m->bias) value = v_add(value, v_load(m->bias + first + o));
      value = activated(y.how, value);
      if (first + o + VL <= y.width) {
        if (y.how == ADD) value = v_add(v_load(row + o), value);
        if (y.how == TIMES) value = v_mul(v_load(row + o), value);
        v_store(row + o, value);
      } else {
        float some[VL];
        v_store(some, value);
        for (int j = 0; first + o + j < y.width; j++)
          row[o + j] = y.how == ADD     ? row[o + j] + some[j]
                       : y.how == TIMES ? row[o + j] * some[j]
                                        : some[j];
      }
    }
  }
}

INLINE void finish_tile(const int rows, const int panels, const Matrix *m, int64_t first_panel,
                        Result y, vf (*sums)[4][NV]) {
  float all[rows * panels * PANEL];
  EACH_SUM(rows, panels) v_store(all + (r * panels + p) * PANEL + v * VL, sums[r][p][v]);
  finish(rows, panels * PANEL, m, first_panel * PANEL, y, all);
}

#define TILE(KIND, kind_name, ...)                                                              \
  static __attribute__((noinline)) void KIND(const Matrix *m, int64_t panel, Ahead ahead, Rows x,  \
                                             Result y) { \
    const char *w = (const char *)m->weights + panel_start(m->kind, m->inputs, panel);          \
    vf sums[12][4][NV];                                                                         \
    kind_name                                                                                   \
  }

#define MAKE(rows, panels)                                                                       \
  TILE(float32_##rows##x##panels, EACH_SUM(rows, panels) sums[r][p][v] = v_zero();               \
       tile_float32(rows, panels, m, w, ahead, x, sums);                                        \
       finish_tile(rows, panels, m, panel, y, sums);)                                            \
  TILE(float16_##rows##x##panels, EACH_SUM(rows, panels) sums[r][p][v] = v_zero();               \
       tile_float16(rows, panels, m, w, ahead, x, sums);                                        \
       finish_tile(rows, panels, m, panel, y, sums);)                                            \
  TILE(bfloat16_##rows##x##panels, EACH_SUM(rows, panels) sums[r][p][v] = v_zero();              \
       tile_bfloat16(rows, panels, m, w, ahead, x, sums);                                       \
       finish_tile(rows, panels, m, panel, y, sums);)                                            \
  TILE(int8_##rows##x##panels, tile_int8(rows, panels, m, w, ahead, x, panel, sums);            \
       finish_tile(rows, panels, m, panel, y, sums);)
#define MAKE_INT4(rows, panels)                                                                  \
  TILE(int4_##rows##x##panels, EACH_SUM(rows, panels) sums[r][p][v] = v_zero();                  \
       tile_int4(rows, panels, m, w, ahead, x, panel, sums);                                    \
       finish_tile(rows, panels, m, panel, y, sums);)

typedef void (*Tile)(const Matrix *, int64_t, Ahead, Rows, Result);
typedef struct {
  int rows, panels; /* rows 0 ends the list */
  Tile tiles[5], single[5]; /* by kind; `single`: for one panel */
} TileSize;
#define SIZE(rows, panels)                                                                        \
  {rows, panels,                                                                                  \
   {float32_##rows##x##panels, bfloat16_##rows##x##panels, float16_##rows##x##panels,             \
    int8_##rows##x##panels, 0},                                                                   \
   {float32_##rows##x1, bfloat16_##rows##x1, float16_##rows##x1, int8_##rows##x1, 0}}
#define SIZE_INT4(rows, panels) \
  {rows, panels, {0, 0, 0, 0, int4_##rows##x##panels}, {0, 0, 0, 0, int4_##rows##x1}}

#if WIDE
MAKE(12, 2) MAKE(12, 1) MAKE(8, 2) MAKE(8, 1) MAKE(4, 4) MAKE(4, 1)
MAKE(2, 4) MAKE(2, 1) MAKE(1, 4) MAKE(1, 1)
static const TileSize SIZES[] = {SIZE(12, 2), SIZE(8, 2), SIZE(4, 4), SIZE(2, 4), SIZE(1, 4), {0}};
MAKE_INT4(12, 1) MAKE_INT4(8, 2) MAKE_INT4(8, 1) MAKE_INT4(4, 2) MAKE_INT4(4, 1)
MAKE_INT4(2, 4) MAKE_INT4(2, 1) MAKE_INT4(1, 4) MAKE_INT4(1, 1)
static const TileSize SIZES_INT4[] = {SIZE_INT4(12, 1), SIZE_INT4(8, 2), SIZE_INT4(4, 2),
                                      SIZE_INT4(2, 4), SIZE_INT4(1, 4), {0}};
#else
MAKE(6, 1) MAKE(4, 1) MAKE(2, 2) MAKE(2, 1) MAKE(1, 4) MAKE(1, 1)
static const TileSize SIZES[] = {SIZE(6, 1), SIZE(4, 1), SIZE(2, 2), SIZE(1, 4), {0}};
MAKE_INT4(2, 1) MAKE_INT4(1, 2) MAKE_INT4(1, 1)
static const TileSize SIZES_INT4[] = {SIZE_INT4(2, 1), SIZE_INT4(1, 2), {0}};
#endif

/* Panels `first` to `stop` of the product of `rows` prepared rows. */
static void multiply(const Matrix *m, int64_t first, int64_t stop, Rows x, int64_t rows, Result y) {
  const TileSize *sizes = m->kind == INT4 ? SIZES_INT4 : SIZES;
  const int64_t bytes = panel_bytes(m->kind, m->inputs); /* of one panel */
  for (int64_t block = first; block < stop; block += BLOCK) {
    const char *w = (const char *)m->weights + panel_start(m->kind, m->inputs, block);
    const int is_last = block + BLOCK >= stop;
    int64_t end = is_last ? stop : block + BLOCK;
    int64_t row = 0;
    for (const TileSize *size = sizes; size->rows; size++) {
      for (; row + size->rows <= rows; row += size->rows) {
        Rows some = {(const char *)x.data + row * x.stride, x.stride, x.scales ? x.scales + row : 0};
        Result part = {y.data + row * y.stride, y.stride, y.width, y.how};
        /* Where the first rows take several tiles for a block, which then stays in the cache, these
           fetch the next one: memory would have nothing to do during all but the first of them. */
        const int spread = row == 0 && size->panels < BLOCK && !is_last;
        const int64_t apart = spread ? bytes : CHUNK; /* from panel to panel */
        const int64_t side = spread ? size->panels : BLOCK;
        Ahead ahead = {w + (spread ? BLOCK * bytes : AHEAD), side * CHUNK};
        int64_t panel = block;
        for (; panel + size->panels <= end; panel += size->panels) {
          size->tiles[m->kind](m, panel, ahead, some, part);
          ahead.place += size->panels * apart;
        }
        for (ahead.step = spread ? CHUNK : BLOCK * CHUNK; panel < end; panel++) {
          size->single[m->kind](m, panel, ahead, some, part);
          ahead.place += apart;
        }
      }
    }
  }
}
