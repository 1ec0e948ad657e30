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
/* What is compiled besides is for processors with AVX2 (setup.py). */
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "default")))
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
   are called for, in the order in which they lie: memory is read a quarter faster in one stream than
   in four. WIDTH numbers at a time: GET_W, GET_X, and MULTIPLY, which adds to 16 sums. */
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
                    __builtin_prefetch(at(p->w, (o + NUM_O + FROM) * p->in + i * (TO - FROM)      \
                                          + (b - FROM) * WIDTH, kind));                           \
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

static void outputs_of(const product *p, int64_t from, int64_t to) {
    if (p->kind == F32) outputs_f32(p, from, to);
    else if (p->kind == BF16) outputs_bf16(p, from, to);
    else outputs_i8(p, from, to);
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
        else outputs_of(&part, from, to);
    }
}

#include "_rows_gates.h"
#include "_rows_mixers.h"
#include "_rows_experts.h"
#include "_rows_attention.h"
#include "_rows_latent.h"
#include "_rows_moves.h"

/* ---- operations, one after the other ---- */

enum what {
    PRODUCT, NORM, OPEN, GATE, CONVOLVE, MAMBA1, MAMBA2, DELTA, ATTENTION, SUM, MOVE, ROTATE,
    ROUTE, SELECT, BLEND, ENTER, LATENT, LEAVE
};

typedef struct {
    enum what what;
    union {
        product product;
        norm norm;
        opening opening;
        gating gating;
        convolution convolution;
        mamba1 mamba1;
        mamba2 mamba2;
        delta delta;
        attention attention;
        summing sum;
        moving moving;
        rotation rotation;
        routing routing;
        selection selection;
        blending blending;
        entering entering;
        latent_attention latent;
        leaving leaving;
    };
} operation;

static int64_t keys_of_all(const int64_t *runs, const int64_t *first_run, int64_t rows) {
    int64_t num = 0;
    for (int64_t r = 0; r < rows; r++) num += num_keys(runs, first_run, r);
    return num;
}

/* Multiplications, or as much; 0 where one thread does it all. */
static int64_t work_of(const operation *o) {
    switch (o->what) {
    case PRODUCT: return o->product.rows * o->product.in * o->product.out;
    case NORM: return o->norm.rows * o->norm.inner * o->norm.num;
    case OPEN: return o->opening.rows * o->opening.inner * o->opening.num;
    case GATE: return o->gating.rows * o->gating.width;
    case CONVOLVE:
        return o->convolution.rows * o->convolution.channels * o->convolution.num_taps;
    case MAMBA1: return o->mamba1.rows * o->mamba1.channels * o->mamba1.state_dim;
    case MAMBA2:
        return o->mamba2.conv.rows * o->mamba2.heads * o->mamba2.head_dim * o->mamba2.state_dim;
    case DELTA:
        return o->delta.conv.rows * o->delta.heads * o->delta.key_dim * o->delta.value_dim;
    case ATTENTION:
        return keys_of_all(o->attention.runs, o->attention.first_run, o->attention.rows)
               * o->attention.heads * o->attention.D;
    case SELECT: return o->selection.rows * o->selection.in * o->selection.out;
    case BLEND: return o->blending.rows * o->blending.num * o->blending.width;
    case ENTER: return o->entering.rows * o->entering.heads * o->entering.K * o->entering.rank;
    case LATENT:
        return keys_of_all(o->latent.runs, o->latent.first_run, o->latent.rows)
               * o->latent.heads * o->latent.width;
    case LEAVE: return o->leaving.rows * o->leaving.heads * o->leaving.V * o->leaving.rank;
    default: return 0;
    }
}

enum { MOST_PHASES = 2 };

static int phases_of(const operation *o) {
    switch (o->what) {
    case MAMBA2:
    case DELTA:
    case ATTENTION:
    case LATENT: return 2;
    case PRODUCT: return o->product.narrow && !is_by_pairs(&o->product) ? 2 : 1;
    default: return 1;
    }
}

/* Part number `part` of a phase that is done in so many parts. */
static void share(const operation *o, int phase, int64_t part, int64_t parts) {
    switch (o->what) {
    case PRODUCT: share_product(&o->product, phase, part, parts); break;
    case NORM: share_norm(&o->norm, part, parts); break;
    case OPEN: share_opening(&o->opening, part, parts); break;
    case GATE: share_gate(&o->gating, part, parts); break;
    case CONVOLVE: share_convolution(&o->convolution, part, parts); break;
    case MAMBA1: share_mamba1(&o->mamba1, part, parts); break;
    case MAMBA2: share_mamba2(&o->mamba2, phase, part, parts); break;
    case DELTA: share_delta(&o->delta, phase, part, parts); break;
    case ATTENTION: share_attention(&o->attention, phase, part, parts); break;
    case SUM: do_sum(&o->sum); break;
    case MOVE: do_move(&o->moving); break;
    case ROTATE: do_rotate(&o->rotation); break;
    case ROUTE: share_routing(&o->routing, part, parts); break;
    case SELECT: share_selection(&o->selection, part, parts); break;
    case BLEND: share_blending(&o->blending, part, parts); break;
    case ENTER: share_entering(&o->entering, part, parts); break;
    case LATENT: share_latents(&o->latent, phase, part, parts); break;
    case LEAVE: share_leaving(&o->leaving, part, parts); break;
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
