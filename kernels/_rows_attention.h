/* One token's attention to the keys of its sequence, by runs of slots. Part of _rows.h. */

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

INLINE int64_t num_keys(const int64_t *runs, const int64_t *first_run, int64_t r) {
    int64_t num = 0;
    for (int64_t n = first_run[r]; n < first_run[r + 1]; n++) num += runs[2 * n + 1];
    return num;
}

/* In how many parts a row's keys are gone through: by their number alone. */
INLINE int64_t splits_of(int64_t num) {
    int64_t splits = num / (CHUNK * CHUNKS_PER_SPLIT);
    return splits < 1 ? 1 : splits > SPLITS ? SPLITS : splits;
}

/* One of those parts, for one head of keys. */
INLINE void attend(const attention *a, int64_t r, int64_t kv, int64_t split, float *scores,
                   int kind) {
    int64_t group = a->heads / a->kv_heads, width = a->Dv + 2;
    int64_t total = num_keys(a->runs, a->first_run, r), splits = splits_of(total);
    float *out = a->part + ((r * SPLITS + split) * a->heads + kv * group) * width;
    if (split >= splits) return;
    for (int64_t g = 0; g < group; g++) {
        memset(out + g * width, 0, a->Dv * 4);
        out[g * width + a->Dv] = -INFINITY;
        out[g * width + a->Dv + 1] = 0;
    }
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

/* y [Dv]: what was found in so many parts, each [Dv + 2] and `step` behind the one before. */
CLONES static void merge(const float *part, int64_t step, int64_t splits, int64_t Dv,
                         const float *sink, float *y) {
    float top = sink ? *sink : -INFINITY, total;
    for (int64_t s = 0; s < splits; s++)
        if (part[s * step + Dv] > top) top = part[s * step + Dv];
    total = sink ? expf(*sink - top) : 0.0f;
    memset(y, 0, Dv * 4);
    for (int64_t s = 0; s < splits; s++) {
        const float *o = part + s * step;
        if (o[Dv + 1] == 0) continue;
        float factor = expf(o[Dv] - top);
        total += o[Dv + 1] * factor;
        for (int64_t i = 0; i < Dv; i += LANES)
            store(y + i, load(y, i, F32) + load(o, i, F32) * factor);
    }
    if (total != 0)
        for (int64_t i = 0; i < Dv; i++) y[i] /= total;
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
    for (int64_t u = all * t / threads; u < all * (t + 1) / threads; u++) {
        int64_t r = u / a->heads, h = u % a->heads, width = a->Dv + 2;
        merge(a->part + (r * SPLITS * a->heads + h) * width, a->heads * width,
              splits_of(num_keys(a->runs, a->first_run, r)), a->Dv, a->sinks ? a->sinks + h : NULL,
              a->y + u * a->Dv);
    }
}
