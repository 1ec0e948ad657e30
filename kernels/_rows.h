/* Inner loops for a few rows at a time, as in a decode step: bound by what they read, so each
   weight and each state is read once, and what surrounds a product is done in the same pass.

   An operation is a struct with addresses and sizes, and has one phase or two, each of which can
   be done in any number of parts (`share`). So it can be done at once (`run`), or kept in a list
   and done later with what then lies at the same addresses (`run_all`).

   Sums run in an order that depends on no thread and on no other row. Numbers of 16 bits are
   bfloat16. Needs GCC's or Clang's vector extensions; one build holds code for several
   generations of x86-64, of which the loader takes the best. */
#ifndef AGENTCACHE_ROWS_H
#define AGENTCACHE_ROWS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#define TEAM omp_get_num_threads()
#else
#define TEAM 1
#endif
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#define YIELD sched_yield()
#else
#define YIELD (void)0
#endif
#if defined(__x86_64__) || defined(__i386__)
#define PAUSE __builtin_ia32_pause()
#else
#define PAUSE (void)0
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef float vf4 __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(64)));
typedef uint32_t vu __attribute__((vector_size(64)));
typedef uint16_t vh __attribute__((vector_size(32)));
typedef int16_t vs __attribute__((vector_size(32)));
typedef int8_t vb __attribute__((vector_size(16)));

enum { LANES = 16 };
enum kind { F32 = 0, BF16 = 1, I8 = 2 };

/* ---- one number, sixteen numbers ---- */

INLINE float widen(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

INLINE uint16_t narrow(float x) { /* to the nearest, ties to even; NaN stays one */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 64);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

INLINE float get(const void *p, int64_t i, int kind) {
    if (kind == F32) return ((const float *)p)[i];
    if (kind == BF16) return widen(((const uint16_t *)p)[i]);
    return (float)((const int8_t *)p)[i];
}

INLINE void put(void *p, int64_t i, int kind, float x) {
    if (kind == F32) ((float *)p)[i] = x;
    else ((uint16_t *)p)[i] = narrow(x);
}

INLINE vf load(const void *p, int64_t i, int kind) {
    if (kind == F32) {
        vf v;
        memcpy(&v, (const float *)p + i, 64);
        return v;
    }
    if (kind == BF16) {
        vh h;
        memcpy(&h, (const uint16_t *)p + i, 32);
        vu u = __builtin_convertvector(h, vu) << 16;
        return (vf)u;
    }
    vb b;
    memcpy(&b, (const int8_t *)p + i, 16);
    return __builtin_convertvector(__builtin_convertvector(__builtin_convertvector(b, vs), vi), vf);
}

INLINE const void *at(const void *p, int64_t i, int kind) {
    return (const char *)p + i * (kind == F32 ? 4 : kind == BF16 ? 2 : 1);
}

INLINE void store(float *p, vf v) { memcpy(p, &v, 64); }

INLINE vf4 quarter(vf v) {
    vf8 a, b;
    memcpy(&a, &v, 32);
    memcpy(&b, (const char *)&v + 32, 32);
    a += b;
    vf4 c, d;
    memcpy(&c, &a, 16);
    memcpy(&d, (const char *)&a + 16, 16);
    return c + d;
}

INLINE float sum(vf v) {
    vf4 c = quarter(v);
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* Four sums at once, each as `sum` makes it. */
INLINE vf4 sums(vf a, vf b, vf c, vf d) {
    vf4 p = quarter(a), q = quarter(b), r = quarter(c), s = quarter(d);
    vf4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
    vf4 rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

INLINE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* a where the sign of `by` is set, else b. GCC 12 takes comparisons of vectors apart, not shifts. */
INLINE vf choose(vf by, vf a, vf b) {
    vi mask = (vi)by >> 31;
    return (vf)(((vi)a & mask) | ((vi)b & ~mask));
}

/* e^x by 2^n times a polynomial of the rest (Cephes' expf), within 2 units in the last place. Beyond
   the range of float32 it is that of its end; of NaN it is NaN. */
INLINE vf vexp(vf given) {
    const vf hi = (vf){0} + 88.3762626647949f, lo = (vf){0} - 87.3365478515625f;
    vf x = choose(hi - given, hi, given);
    x = choose(x - lo, lo, x);
    vf n = x * 1.44269504088896341f;
    vf half = (vf)(((vi)n & (int32_t)0x80000000) | (int32_t)0x3f000000);
    vi whole = __builtin_convertvector(n + half, vi);
    vf f = __builtin_convertvector(whole, vf);
    vf r = x - f * 0.693359375f;
    r = r + f * 2.12194440e-4f;
    vf p = r * 1.9875691500E-4f + 1.3981999507E-3f;
    p = p * r + 8.3334519073E-3f;
    p = p * r + 4.1665795894E-2f;
    p = p * r + 1.6666665459E-1f;
    p = p * r + 5.0000001201E-1f;
    vf y = p * (r * r) + r + 1.0f;
    vi scale = (whole + 127) << 23;
    const vi infinity = (vi){0} + 0x7f800000;
    return choose((vf)(infinity - ((vi)given & 0x7fffffff)), given, y * (vf)scale);
}

INLINE vf vsilu(vf x) { return x / (1.0f + vexp(-x)); }

/* ---- products: y[r][o] = (sum_i x[r][i] w[o][i] * wscale[o] + bias[o]) * scale[o] ---- */

typedef struct {
    const void *narrow; /* [rows, in] bfloat16, widened into x first if need be; or NULL */
    float *x;       /* [rows, in] */
    const void *w;  /* [out, in] */
    const float *wscale, *bias, *scale; /* [out], or NULL for none */
    void *y;        /* [rows, out] */
    int64_t rows, in, out, first; /* first: output of y that is number 0 here */
    int kind, y_kind;
} product;

INLINE void finish(const product *p, int64_t r, int64_t o, float s) {
    if (p->wscale) s *= p->wscale[o];
    if (p->bias) s += p->bias[o];
    if (p->scale) s *= p->scale[o];
    put(p->y, r * p->out + p->first + o, p->y_kind, s);
}

INLINE vf4 load4(const float *p) {
    vf4 v;
    memcpy(&v, p, 16);
    return v;
}

INLINE void finish4(const product *p, int64_t r, int64_t o, vf4 s) {
    if (p->wscale) s *= load4(p->wscale + o);
    if (p->bias) s += load4(p->bias + o);
    if (p->scale) s *= load4(p->scale + o);
    int64_t at = r * p->out + p->first + o;
    if (p->y_kind == F32) memcpy((float *)p->y + at, &s, 16);
    else
        for (int j = 0; j < 4; j++) put(p->y, at + j, BF16, s[j]);
}

/* NUM_R rows from R on by NUM_O outputs from o on; of the next outputs' weights, those from FROM to TO
   are called for. WIDTH numbers at a time: GET_W, GET_X, and MULTIPLY, which adds to 16 sums. */
#define TILE(NUM_R, NUM_O, FROM, TO, R)                                                           \
    do {                                                                                          \
        vf acc[NUM_R][NUM_O];                                                                     \
        for (int a = 0; a < NUM_R; a++)                                                           \
            for (int b = 0; b < NUM_O; b++) acc[a][b] = (vf){0};                                  \
        int64_t i = 0;                                                                            \
        for (; i + WIDTH <= p->in; i += WIDTH) {                                                  \
            VECTOR wv[NUM_O];                                                                     \
            for (int b = 0; b < NUM_O; b++) {                                                     \
                wv[b] = GET_W((o + b) * p->in + i);                                               \
                if (FROM <= b && b < TO)                                                          \
                    __builtin_prefetch(at(p->w, (o + NUM_O + b) * p->in + i, kind));              \
            }                                                                                     \
            for (int a = 0; a < NUM_R; a++) {                                                     \
                VECTOR xv = GET_X((R + a) * p->in + i);                                           \
                for (int b = 0; b < NUM_O; b++) MULTIPLY(acc[a][b], xv, wv[b]);                   \
            }                                                                                     \
        }                                                                                         \
        for (int a = 0; a < NUM_R; a++) {                                                         \
            if (NUM_O == 4 && i == p->in) {                                                       \
                finish4(p, R + a, o, sums(acc[a][0], acc[a][1 % NUM_O], acc[a][2 % NUM_O],        \
                                          acc[a][3 % NUM_O]));                                    \
                continue;                                                                         \
            }                                                                                     \
            for (int b = 0; b < NUM_O; b++) {                                                     \
                float s = sum(acc[a][b]);                                                         \
                for (int64_t j = i; j < p->in; j++)                                               \
                    s = fmaf(ONE_X((R + a) * p->in + j), get(p->w, (o + b) * p->in + j, kind), s); \
                finish(p, R + a, o + b, s);                                                       \
            }                                                                                     \
        }                                                                                         \
    } while (0)

/* One to three rows. */
#define REST(NUM_O, TO, R)                                                                        \
    do {                                                                                          \
        switch (p->rows - (R)) {                                                                  \
        case 3: TILE(3, NUM_O, 0, TO, R); break;                                                  \
        case 2: TILE(2, NUM_O, 0, TO, R); break;                                                  \
        case 1: TILE(1, NUM_O, 0, TO, R); break;                                                  \
        }                                                                                         \
    } while (0)

/* The next weights are called for on the way, half with each of the first two tiles, so that memory
   is as busy with one as with the other; what is left finds them near by. */
#define TILES(NUM_O)                                                                              \
    do {                                                                                          \
        int64_t r = 4;                                                                            \
        if (p->rows < 4) {                                                                        \
            REST(NUM_O, NUM_O, 0);                                                                \
        } else {                                                                                  \
            if (p->rows < 8) {                                                                    \
                TILE(4, NUM_O, 0, NUM_O, 0);                                                      \
            } else if (p->rows < 16) {                                                            \
                TILE(4, NUM_O, 0, NUM_O / 2, 0);                                                  \
                TILE(4, NUM_O, NUM_O / 2, NUM_O, 4);                                              \
                for (r = 8; r + 4 <= p->rows; r += 4) TILE(4, NUM_O, 0, 0, r);                    \
            } else {                                                                              \
                TILE(4, NUM_O, 0, 1, 0);                                                          \
                TILE(4, NUM_O, 1, 2, 4);                                                          \
                TILE(4, NUM_O, 2, 3, 8);                                                          \
                TILE(4, NUM_O, 3, 4, 12);                                                         \
                for (r = 16; r + 4 <= p->rows; r += 4) TILE(4, NUM_O, 0, 0, r);                   \
            }                                                                                     \
            REST(NUM_O, 0, r);                                                                    \
        }                                                                                         \
    } while (0)

#define VECTOR vf
#define WIDTH LANES
#define GET_W(I) load(p->w, I, kind)
#define GET_X(I) load(p->x, I, F32)
#define ONE_X(I) p->x[I]
#define MULTIPLY(SUMS, X, W) SUMS += X * W

INLINE void outputs(const product *p, int64_t from, int64_t to, int kind) {
    int64_t o = from;
    for (; o + 4 <= to; o += 4) TILES(4);
    for (; o < to; o++) TILES(1);
}

enum { WIDENED = 4096 };

/* For more rows than one tile has, four outputs' weights are made float32 once. */
INLINE void widened_outputs(const product *p, int64_t from, int64_t to, int kind) {
    float wide[4 * WIDENED];
    int64_t in = p->in;
    if (p->rows <= 4 || in > WIDENED) {
        outputs(p, from, to, kind);
        return;
    }
    product part = *p;
    part.w = wide;
    for (int64_t o = from; o < to; o += 4) {
        int64_t num = to - o < 4 ? to - o : 4, i = 0;
        for (; i + LANES <= num * in; i += LANES) store(wide + i, load(p->w, o * in + i, kind));
        for (; i < num * in; i++) wide[i] = get(p->w, o * in + i, kind);
        part.wscale = p->wscale ? p->wscale + o : NULL;
        part.bias = p->bias ? p->bias + o : NULL;
        part.scale = p->scale ? p->scale + o : NULL;
        part.first = p->first + o;
        outputs(&part, 0, num, F32);
    }
}

CLONES static void outputs_f32(const product *p, int64_t from, int64_t to) {
    outputs(p, from, to, F32);
}
CLONES static void outputs_bf16(const product *p, int64_t from, int64_t to) {
    widened_outputs(p, from, to, BF16);
}
CLONES static void outputs_i8(const product *p, int64_t from, int64_t to) {
    widened_outputs(p, from, to, I8);
}

CLONES static void widen_part(const void *x, float *y, int64_t from, int64_t to) {
    int64_t i = from;
    for (; i + LANES <= to; i += LANES) store(y + i, load(x, i, BF16));
    for (; i < to; i++) y[i] = get(x, i, BF16);
}

#undef VECTOR
#undef WIDTH
#undef GET_W
#undef GET_X
#undef ONE_X
#undef MULTIPLY

/* Where the processor multiplies pairs of bfloat16 and sums in float32, nothing is widened. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#include <immintrin.h>
#define VECTOR __m512i
#define WIDTH (2 * LANES)
#define GET_W(I) _mm512_loadu_si512((const uint16_t *)p->w + (I))
#define GET_X(I) _mm512_loadu_si512((const uint16_t *)p->narrow + (I))
#define ONE_X(I) get(p->narrow, I, BF16)
#define MULTIPLY(SUMS, X, W) \
    SUMS = (vf)_mm512_dpbf16_ps((__m512)SUMS, (__m512bh)(X), (__m512bh)(W))

__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))) static void
outputs_by_pairs(const product *p, int64_t from, int64_t to) {
    const int kind = BF16;
    int64_t o = from;
    for (; o + 4 <= to; o += 4) TILES(4);
    for (; o < to; o++) TILES(1);
}

INLINE int is_by_pairs(const product *p) {
    return p->narrow && p->kind == BF16 && __builtin_cpu_supports("avx512bf16");
}
#else
INLINE void outputs_by_pairs(const product *p, int64_t from, int64_t to) {
    outputs_bf16(p, from, to);
}
INLINE int is_by_pairs(const product *p) { return 0; }
#endif

/* Many rows go in blocks that stay in the cache next to a core while all weights pass by, but not
   in so small ones that reading the weights is what takes the time. */
enum { BLOCK_BYTES = 1 << 18, LEAST_BLOCK = 64 };

static void share_product(const product *p, int phase, int64_t t, int64_t threads) {
    int by_pairs = is_by_pairs(p);
    if (p->narrow && !by_pairs && phase == 0) {
        int64_t num = p->rows * p->in;
        widen_part(p->narrow, p->x, num * t / threads, num * (t + 1) / threads);
        return;
    }
    int64_t blocks = (p->out + 3) / 4;
    int64_t from = 4 * (blocks * t / threads), to = 4 * (blocks * (t + 1) / threads);
    int64_t most = BLOCK_BYTES / (4 * p->in + 1) / 4 * 4;
    if (to > p->out) to = p->out;
    if (most < LEAST_BLOCK) most = LEAST_BLOCK;
    product part = *p;
    for (int64_t r = 0; r < p->rows; r += most) {
        part.x = p->x + r * p->in;
        part.narrow = by_pairs ? at(p->narrow, r * p->in, BF16) : NULL;
        part.y = (void *)at(p->y, r * p->out, p->y_kind);
        part.rows = p->rows - r < most ? p->rows - r : most;
        if (by_pairs) outputs_by_pairs(&part, from, to);
        else if (p->kind == F32) outputs_f32(&part, from, to);
        else if (p->kind == BF16) outputs_bf16(&part, from, to);
        else outputs_i8(&part, from, to);
    }
}

/* ---- norms and gates of rows ---- */

INLINE float mean_square(const void *x, int64_t num, int kind) {
    vf acc = {0};
    int64_t i = 0;
    for (; i + LANES <= num; i += LANES) {
        vf v = load(x, i, kind);
        acc += v * v;
    }
    float s = sum(acc);
    for (; i < num; i++) s += get(x, i, kind) * get(x, i, kind);
    return s / (float)num;
}

INLINE void norm_row(const void *x, const float *weight, void *y, int64_t num, float eps, int kind) {
    float factor = 1.0f / sqrtf(mean_square(x, num, kind) + eps);
    int64_t i = 0;
    if (kind == F32)
        for (; i + LANES <= num; i += LANES)
            store((float *)y + i, load(x, i, F32) * factor * load(weight, i, F32));
    for (; i < num; i++) put(y, i, kind, get(x, i, kind) * factor * weight[i]);
}

/* rows of `inner` parts of `num` each, the rows x_stride apart; each part is normed by itself */
typedef struct {
    const void *x;
    const float *weight; /* [num] */
    void *y;             /* [rows, inner, num] */
    int64_t rows, inner, num, x_stride;
    float eps;
    int kind;
} norm;

INLINE void norm_rows(const norm *n, int64_t from, int64_t to, int kind) {
    for (int64_t u = from; u < to; u++)
        norm_row(at(n->x, u / n->inner * n->x_stride + u % n->inner * n->num, kind), n->weight,
                 (void *)at(n->y, u * n->num, kind), n->num, n->eps, kind);
}

CLONES static void share_norm(const norm *n, int64_t t, int64_t threads) {
    int64_t units = n->rows * n->inner, from = units * t / threads, to = units * (t + 1) / threads;
    if (n->kind == F32) norm_rows(n, from, to, F32);
    else norm_rows(n, from, to, BF16);
}

/* y = silu(gate) * up, of rows [gate, up] */
typedef struct {
    const void *x; /* [rows, 2, num] */
    void *y;       /* [rows, num] */
    int64_t rows, num;
    int kind;
} opening;

CLONES static void share_silu_mul(const opening *o, int64_t t, int64_t threads) {
    const void *x = o->x;
    void *y = o->y;
    int64_t num = o->num, from = o->rows * t / threads, to = o->rows * (t + 1) / threads;
    int kind = o->kind;
    for (int64_t r = from; r < to; r++) {
        int64_t i = 0, at = 2 * r * num;
        if (kind == F32)
            for (; i + LANES <= num; i += LANES)
                store((float *)y + r * num + i,
                      vsilu(load(x, at + i, F32)) * load(x, at + num + i, F32));
        else
            for (; i + LANES <= num; i += LANES) {
                float out[LANES];
                store(out, vsilu(load(x, at + i, BF16)) * load(x, at + num + i, BF16));
                for (int j = 0; j < LANES; j++) put(y, r * num + i + j, BF16, out[j]);
            }
        for (; i < num; i++) {
            float gate = get(x, at + i, kind);
            put(y, r * num + i, kind, gate * sigmoid(gate) * get(x, at + num + i, kind));
        }
    }
}

/* y *= silu(gate), with a norm of groups of each row before that, after it, or none */
typedef struct {
    float *y;          /* [rows, width] */
    const void *gate;  /* rows gate_stride apart */
    const float *norm; /* [width] or NULL */
    int64_t rows, width, groups, gate_stride;
    float eps;
    int kind, norm_before_gate;
} gating;

CLONES static void share_gate(const gating *g, int64_t t, int64_t threads) {
    int64_t width = g->width, part = width / g->groups;
    int64_t from = g->rows * t / threads, to = g->rows * (t + 1) / threads;
    for (int64_t r = from; r < to; r++) {
        float *y = g->y + r * width;
        int64_t at = r * g->gate_stride, i;
        for (int64_t n = 0; g->norm && g->norm_before_gate && n < g->groups; n++)
            norm_row(y + n * part, g->norm + n * part, y + n * part, part, g->eps, F32);
        for (i = 0; i + LANES <= width; i += LANES)
            store(y + i, load(y, i, F32) * vsilu(load(g->gate, at + i, g->kind)));
        for (; i < width; i++) {
            float gate = get(g->gate, at + i, g->kind);
            y[i] *= gate * sigmoid(gate);
        }
        for (int64_t n = 0; g->norm && !g->norm_before_gate && n < g->groups; n++)
            norm_row(y + n * part, g->norm + n * part, y + n * part, part, g->eps, F32);
    }
}

/* ---- one token of Mamba-2 for each of several sequences (arXiv:2405.21060) ---- */

typedef struct {
    const void *x;              /* [rows, width + channels + heads]: gate (not used), x B C, dt */
    void *conv;                 /* [pool, channels, taps - 1], rows conv_stride apart */
    float *state;               /* [pool, heads, P, N], rows state_stride apart */
    const int64_t *at;          /* [rows] rows of the pool */
    const float *taps, *bias;   /* [channels, num_taps], [channels] or NULL */
    const float *dt_bias, *A, *D; /* [heads] */
    float *mixed, *y;           /* scratch [rows, channels], output [rows, width] */
    int64_t rows, heads, head_dim, groups, state_dim, num_taps;
    int64_t conv_stride, state_stride; /* in elements */
    float dt_min, dt_max;
    int x_kind, conv_kind;
} mamba2;

INLINE int64_t m2_width(const mamba2 *m) { return m->heads * m->head_dim; }
INLINE int64_t m2_channels(const mamba2 *m) {
    return m2_width(m) + 2 * m->groups * m->state_dim;
}
INLINE int64_t m2_inputs(const mamba2 *m) { return m2_width(m) + m2_channels(m) + m->heads; }

CLONES static void m2_convolve(const mamba2 *m, int64_t r, int64_t from, int64_t to) {
    int64_t width = m2_width(m), held = m->num_taps - 1, in = r * m2_inputs(m) + width;
    float *out = m->mixed + r * m2_channels(m);
    int64_t row = m->at[r] * m->conv_stride;
    for (int64_t c = from; c < to; c++) {
        int64_t kept = row + c * held;
        const float *taps = m->taps + c * m->num_taps;
        float now = get(m->x, in + c, m->x_kind), s = m->bias ? m->bias[c] : 0.0f;
        for (int64_t k = 0; k < held; k++) {
            float before = get(m->conv, kept + k, m->conv_kind);
            s += before * taps[k];
            if (k) put(m->conv, kept + k - 1, m->conv_kind, before);
        }
        if (held) put(m->conv, kept + held - 1, m->conv_kind, now);
        out[c] = s + now * taps[held];
    }
    int64_t c = from;
    for (; c + LANES <= to; c += LANES) store(out + c, vsilu(load(out, c, F32)));
    for (; c < to; c++) out[c] *= sigmoid(out[c]);
}

CLONES static void m2_head(const mamba2 *m, int64_t r, int64_t h) {
    int64_t P = m->head_dim, N = m->state_dim, width = m2_width(m);
    const float *x = m->mixed + r * m2_channels(m);
    int64_t group = h / (m->heads / m->groups);
    const float *B = x + width + group * N, *C = B + m->groups * N;
    float *s = m->state + m->at[r] * m->state_stride + h * P * N, *y = m->y + r * width + h * P;
    float raw = get(m->x, r * m2_inputs(m) + width + m2_channels(m) + h, m->x_kind) + m->dt_bias[h];
    float dt = raw > 20.0f ? raw : log1pf(expf(raw));
    dt = dt < m->dt_min ? m->dt_min : dt > m->dt_max ? m->dt_max : dt; /* NaN stays */
    float keep = expf(dt * m->A[h]);
    for (int64_t p = 0; p < P; p++, s += N) {
        float in = x[h * P + p] * dt;
        vf acc = {0};
        int64_t n = 0;
        for (; n + LANES <= N; n += LANES) {
            vf v = load(s, n, F32) * keep + load(B, n, F32) * in;
            store(s + n, v);
            acc += v * load(C, n, F32);
        }
        float out = sum(acc);
        for (; n < N; n++) {
            s[n] = s[n] * keep + B[n] * in;
            out += s[n] * C[n];
        }
        y[p] = out + m->D[h] * x[h * P + p];
    }
}

static void share_mamba2(const mamba2 *m, int phase, int64_t t, int64_t threads) {
    int64_t channels = m2_channels(m), blocks = (channels + LANES - 1) / LANES;
    int64_t units = m->rows * m->heads;
    if (phase == 0) {
        int64_t from = LANES * (blocks * t / threads), to = LANES * (blocks * (t + 1) / threads);
        for (int64_t r = 0; r < m->rows; r++)
            m2_convolve(m, r, from, to < channels ? to : channels);
        return;
    }
    for (int64_t u = units * t / threads; u < units * (t + 1) / threads; u++)
        m2_head(m, u / m->heads, u % m->heads);
}

/* ---- one token's attention to the keys of its sequence, by runs of slots ---- */

typedef struct {
    const float *q;             /* [rows, heads, D], rows q_stride apart */
    const void *k, *v;          /* [slots, kv_heads, D or Dv], slots k_stride and v_stride apart */
    const int64_t *runs;        /* [num, 2]: start and length, row after row */
    const int64_t *first_run;   /* [rows + 1] */
    const float *sinks;         /* [heads] or NULL */
    float *y, *part;            /* [rows, heads, Dv]; scratch [rows, SPLITS, heads, Dv + 2] */
    int64_t rows, heads, kv_heads, D, Dv, q_stride, k_stride, v_stride;
    float scale, soft_cap;      /* soft_cap 0: none */
    int kind;
} attention;

enum { CHUNK = 128, AHEAD = 8, CHUNKS_PER_SPLIT = 4, SPLITS = 8 };

/* Values by their weights onto NUM times 16 numbers of the output. */
#define ADD_VALUES(NUM)                                                                           \
    do {                                                                                          \
        vf even[NUM], odd[NUM];                                                                   \
        for (int n = 0; n < NUM; n++) {                                                           \
            even[n] = load(o, i + n * LANES, F32) * shrink;                                       \
            odd[n] = (vf){0};                                                                     \
        }                                                                                         \
        for (j = 0; j + 2 <= num; j += 2)                                                         \
            for (int n = 0; n < NUM; n++) {                                                       \
                even[n] += load(v, j * a->v_stride + i + n * LANES, kind) * s[j];                 \
                odd[n] += load(v, (j + 1) * a->v_stride + i + n * LANES, kind) * s[j + 1];        \
            }                                                                                     \
        for (int n = 0; n < NUM; n++) {                                                           \
            if (j < num) even[n] += load(v, j * a->v_stride + i + n * LANES, kind) * s[j];        \
            store(o + i + n * LANES, even[n] + odd[n]);                                           \
        }                                                                                         \
    } while (0)

INLINE void attend_chunk(const attention *a, const float *q, const void *k, const void *v,
                         int64_t num, int64_t group, float *scores, float *out, int kind) {
    int64_t D = a->D, Dv = a->Dv, width = Dv + 2, line = kind == F32 ? LANES : 2 * LANES, j = 0;
    for (; j + 4 <= num; j += 4) {
        for (int64_t n = j; n < j + 4; n++) { /* values are called for, and keys that come later */
            for (int64_t i = 0; i < D; i += line)
                __builtin_prefetch(at(k, (n + AHEAD) * a->k_stride + i, kind));
            for (int64_t i = 0; i < Dv; i += line)
                __builtin_prefetch(at(v, n * a->v_stride + i, kind));
        }
        for (int64_t g = 0; g < group; g++) {
            vf acc[4] = {{0}};
            for (int64_t i = 0; i < D; i += LANES) {
                vf query = load(q, g * D + i, F32);
                for (int n = 0; n < 4; n++)
                    acc[n] += load(k, (j + n) * a->k_stride + i, kind) * query;
            }
            vf4 four = sums(acc[0], acc[1], acc[2], acc[3]) * a->scale;
            memcpy(scores + g * CHUNK + j, &four, 16);
        }
    }
    for (; j < num; j++)
        for (int64_t g = 0; g < group; g++) {
            vf acc = {0};
            for (int64_t i = 0; i < D; i += LANES)
                acc += load(k, j * a->k_stride + i, kind) * load(q, g * D + i, F32);
            scores[g * CHUNK + j] = sum(acc) * a->scale;
        }
    for (int64_t g = 0; g < group; g++) {
        float *s = scores + g * CHUNK, *o = out + g * width, top = o[Dv], total = o[Dv + 1];
        if (a->soft_cap > 0)
            for (j = 0; j < num; j++) s[j] = a->soft_cap * tanhf(s[j] / a->soft_cap);
        for (j = 0; j < num; j++) top = s[j] > top ? s[j] : top;
        float shrink = o[Dv + 1] > 0 ? expf(o[Dv] - top) : 0.0f;
        total *= shrink;
        for (j = 0; j < num; j += LANES) {
            for (int64_t e = num; e < j + LANES; e++) s[e] = -INFINITY;
            store(s + j, vexp(load(s, j, F32) - top));
        }
        for (j = 0; j < num; j++) total += s[j];
        int64_t i = 0;
        for (; i + 4 * LANES <= Dv; i += 4 * LANES) ADD_VALUES(4);
        for (; i < Dv; i += LANES) ADD_VALUES(1);
        o[Dv] = top;
        o[Dv + 1] = total;
    }
}

/* In how many parts a row's keys are gone through: by their number alone. */
INLINE int64_t splits_of(const attention *a, int64_t r) {
    int64_t total = 0;
    for (int64_t n = a->first_run[r]; n < a->first_run[r + 1]; n++) total += a->runs[2 * n + 1];
    int64_t splits = total / (CHUNK * CHUNKS_PER_SPLIT);
    return splits < 1 ? 1 : splits > SPLITS ? SPLITS : splits;
}

/* One of those parts, for one head of keys. */
INLINE void attend(const attention *a, int64_t r, int64_t kv, int64_t split, float *scores,
                   int kind) {
    int64_t group = a->heads / a->kv_heads, width = a->Dv + 2, total = 0, splits = splits_of(a, r);
    float *out = a->part + ((r * SPLITS + split) * a->heads + kv * group) * width;
    if (split >= splits) return;
    for (int64_t g = 0; g < group; g++) {
        memset(out + g * width, 0, a->Dv * 4);
        out[g * width + a->Dv] = -INFINITY;
        out[g * width + a->Dv + 1] = 0;
    }
    for (int64_t n = a->first_run[r]; n < a->first_run[r + 1]; n++) total += a->runs[2 * n + 1];
    int64_t chunks = (total + CHUNK - 1) / CHUNK;
    int64_t from = CHUNK * (chunks * split / splits), to = CHUNK * (chunks * (split + 1) / splits);
    int64_t size = kind == F32 ? 4 : 2, seen = 0;
    for (int64_t n = a->first_run[r]; n < a->first_run[r + 1]; n++) {
        int64_t start = a->runs[2 * n], len = a->runs[2 * n + 1];
        int64_t j = from > seen ? from - seen : 0, end = to - seen < len ? to - seen : len;
        for (; j < end; j += CHUNK) {
            int64_t num = end - j < CHUNK ? end - j : CHUNK;
            attend_chunk(a, a->q + r * a->q_stride + kv * group * a->D,
                         (const char *)a->k + ((start + j) * a->k_stride + kv * a->D) * size,
                         (const char *)a->v + ((start + j) * a->v_stride + kv * a->Dv) * size, num,
                         group, scores, out, kind);
        }
        seen += len;
    }
}

CLONES static void attend_f32(const attention *a, int64_t r, int64_t kv, int64_t split, float *s) {
    attend(a, r, kv, split, s, F32);
}
CLONES static void attend_bf16(const attention *a, int64_t r, int64_t kv, int64_t split, float *s) {
    attend(a, r, kv, split, s, BF16);
}

CLONES static void merge(const attention *a, int64_t r, int64_t h) {
    int64_t width = a->Dv + 2, step = a->heads * width, splits = splits_of(a, r);
    const float *part = a->part + (r * SPLITS * a->heads + h) * width;
    float top = a->sinks ? a->sinks[h] : -INFINITY, total;
    for (int64_t s = 0; s < splits; s++)
        if (part[s * step + a->Dv] > top) top = part[s * step + a->Dv];
    total = a->sinks ? expf(a->sinks[h] - top) : 0.0f;
    float *y = a->y + (r * a->heads + h) * a->Dv;
    memset(y, 0, a->Dv * 4);
    for (int64_t s = 0; s < splits; s++) {
        const float *o = part + s * step;
        if (o[a->Dv + 1] == 0) continue;
        float factor = expf(o[a->Dv] - top);
        total += o[a->Dv + 1] * factor;
        for (int64_t i = 0; i < a->Dv; i += LANES)
            store(y + i, load(y, i, F32) + load(o, i, F32) * factor);
    }
    if (total != 0)
        for (int64_t i = 0; i < a->Dv; i++) y[i] /= total;
}

static void share_attention(const attention *a, int phase, int64_t t, int64_t threads) {
    int64_t units = a->rows * a->kv_heads * SPLITS, all = a->rows * a->heads;
    if (phase == 0) {
        float scores[a->heads / a->kv_heads * CHUNK];
        /* first parts first: most rows have no other, and threads should share those evenly */
        for (int64_t u = t; u < units; u += threads) {
            int64_t split = u / (a->rows * a->kv_heads), rest = u % (a->rows * a->kv_heads);
            if (a->kind == F32)
                attend_f32(a, rest / a->kv_heads, rest % a->kv_heads, split, scores);
            else attend_bf16(a, rest / a->kv_heads, rest % a->kv_heads, split, scores);
        }
        return;
    }
    for (int64_t u = all * t / threads; u < all * (t + 1) / threads; u++)
        merge(a, u / a->heads, u % a->heads);
}

/* ---- moving rows about ---- */

/* y = alpha * a + beta * b, or alpha * a */
typedef struct {
    const void *a, *b; /* [num]; b may be NULL */
    void *y;           /* [num] */
    int64_t num;
    float alpha, beta;
    int kind;
} summing;

CLONES static void do_sum(const summing *s) {
    int64_t i = 0;
    if (s->kind == F32)
        for (; i + LANES <= s->num; i += LANES) {
            vf v = load(s->a, i, F32) * s->alpha;
            if (s->b) v += load(s->b, i, F32) * s->beta;
            store((float *)s->y + i, v);
        }
    for (; i < s->num; i++) {
        float v = get(s->a, i, s->kind) * s->alpha;
        if (s->b) v += get(s->b, i, s->kind) * s->beta;
        put(s->y, i, s->kind, v);
    }
}

/* y[to ? to[r] : r] = x[from ? from[r] : r], rows of num */
typedef struct {
    const void *x;
    void *y;
    const int64_t *from, *to; /* [rows], or NULL where rows follow each other */
    int64_t rows, num, x_stride, y_stride;
    int kind, y_kind;
} moving;

CLONES static void do_move(const moving *m) {
    for (int64_t r = 0; r < m->rows; r++) {
        int64_t in = (m->from ? m->from[r] : r) * m->x_stride;
        int64_t out = (m->to ? m->to[r] : r) * m->y_stride;
        if (m->kind == m->y_kind)
            memcpy((void *)at(m->y, out, m->kind), at(m->x, in, m->kind),
                   m->num * (m->kind == F32 ? 4 : 2));
        else
            for (int64_t i = 0; i < m->num; i++)
                put(m->y, out + i, m->y_kind, get(m->x, in + i, m->kind));
    }
}

/* y: x [rows, heads, D] with its positions in it (arXiv:2104.09864): pairs of the first 2 * num
   channels of each head are turned by position * frequency, the others copied */
typedef struct {
    const void *x;
    void *y;                  /* [rows, heads, D] */
    const int64_t *positions; /* [rows] */
    const float *frequencies; /* [num] */
    int64_t rows, heads, D, num, x_stride;
    float scale;              /* on cosine and sine */
    int in_turns, kind;       /* in_turns: neighbours are pairs, not halves */
} rotation;

CLONES static void do_rotate(const rotation *o) {
    int64_t apart = o->in_turns ? 1 : o->num, step = o->in_turns ? 2 : 1;
    for (int64_t r = 0; r < o->rows; r++)
        for (int64_t i = 0; i < o->num; i++) {
            double angle = (double)((float)o->positions[r] * o->frequencies[i]);
            float c = (float)cos(angle) * o->scale, s = (float)sin(angle) * o->scale;
            for (int64_t h = 0; h < o->heads; h++) {
                int64_t in = r * o->x_stride + h * o->D + i * step;
                int64_t out = (r * o->heads + h) * o->D + i * step;
                float a = get(o->x, in, o->kind), b = get(o->x, in + apart, o->kind);
                put(o->y, out, o->kind, a * c - b * s);
                put(o->y, out + apart, o->kind, b * c + a * s);
            }
        }
    for (int64_t u = 0; u < o->rows * o->heads; u++)
        for (int64_t i = 2 * o->num; i < o->D; i++)
            put(o->y, u * o->D + i, o->kind,
                get(o->x, u / o->heads * o->x_stride + u % o->heads * o->D + i, o->kind));
}

/* ---- operations, one after the other ---- */

enum what { PRODUCT, NORM, SILU_MUL, GATE, MAMBA2, ATTENTION, SUM, MOVE, ROTATE };

typedef struct {
    enum what what;
    union {
        product product;
        norm norm;
        opening opening;
        gating gating;
        mamba2 mamba2;
        attention attention;
        summing sum;
        moving moving;
        rotation rotation;
    };
} operation;

/* Multiplications, or as much; 0 where one thread does it all. */
static int64_t work_of(const operation *o) {
    int64_t keys = 0;
    switch (o->what) {
    case PRODUCT: return o->product.rows * o->product.in * o->product.out;
    case NORM: return o->norm.rows * o->norm.inner * o->norm.num;
    case SILU_MUL: return o->opening.rows * o->opening.num;
    case GATE: return o->gating.rows * o->gating.width;
    case MAMBA2:
        return o->mamba2.rows * o->mamba2.heads * o->mamba2.head_dim * o->mamba2.state_dim;
    case ATTENTION:
        for (int64_t n = 0; n < o->attention.first_run[o->attention.rows]; n++)
            keys += o->attention.runs[2 * n + 1];
        return keys * o->attention.heads * o->attention.D;
    default: return 0;
    }
}

enum { MOST_PHASES = 2 };

static int phases_of(const operation *o) {
    if (o->what == PRODUCT) return o->product.narrow && !is_by_pairs(&o->product) ? 2 : 1;
    return o->what == MAMBA2 || o->what == ATTENTION ? 2 : 1;
}

/* Part number `part` of a phase that is done in so many parts. */
static void share(const operation *o, int phase, int64_t part, int64_t parts) {
    switch (o->what) {
    case PRODUCT: share_product(&o->product, phase, part, parts); break;
    case NORM: share_norm(&o->norm, part, parts); break;
    case SILU_MUL: share_silu_mul(&o->opening, part, parts); break;
    case GATE: share_gate(&o->gating, part, parts); break;
    case MAMBA2: share_mamba2(&o->mamba2, phase, part, parts); break;
    case ATTENTION: share_attention(&o->attention, phase, part, parts); break;
    case SUM: do_sum(&o->sum); break;
    case MOVE: do_move(&o->moving); break;
    case ROTATE: do_rotate(&o->rotation); break;
    }
}

/* Work below this is done sooner than a second thread has heard of it. */
enum { WORTH_THREADS = 1 << 15, PARTS_PER_THREAD = 4 };

/* How far a phase has come: its next part that nobody has begun, and how many are done. */
typedef struct {
    int64_t next, done;
    char apart[48]; /* from the next one, which other threads may be at */
} progress;

static void wait_for(const int64_t *done, int64_t parts) {
    for (int looks = 0; __atomic_load_n(done, __ATOMIC_ACQUIRE) < parts; looks++) {
        PAUSE;
        if (looks > 4096) YIELD; /* whoever has the last part may be waiting for this processor */
    }
}

/* One thread's way through the list. Whoever comes by takes the next part, so that a thread which
   gets no processor holds up nobody: the others do its work, and it passes over what is done. */
static void go_through(const operation *all, int64_t num, progress *at, int64_t team) {
    for (const operation *o = all; o < all + num; o++) {
        int64_t parts = work_of(o) < WORTH_THREADS ? 1 : PARTS_PER_THREAD * team, part;
        for (int phase = 0; phase < phases_of(o); phase++, at++) {
            while ((part = __atomic_fetch_add(&at->next, 1, __ATOMIC_RELAXED)) < parts) {
                share(o, phase, part, parts);
                __atomic_fetch_add(&at->done, 1, __ATOMIC_RELEASE);
            }
            wait_for(&at->done, parts);
        }
    }
}

/* All of them in order. at: MOST_PHASES for each. */
static void run_all(const operation *all, int64_t num, progress *at, int threads) {
    if (threads < 2) {
        for (int64_t n = 0; n < num; n++)
            for (int phase = 0; phase < phases_of(all + n); phase++) share(all + n, phase, 0, 1);
        return;
    }
    memset(at, 0, num * MOST_PHASES * sizeof(progress));
#pragma omp parallel num_threads(threads)
    go_through(all, num, at, TEAM);
}

static void run(const operation *o, int threads) {
    progress at[MOST_PHASES];
    run_all(o, 1, at, work_of(o) < WORTH_THREADS ? 1 : threads);
}

#endif
