/* One token's attention to latents, of which keys and values of all heads are made. Part of
   _rows.h.

   weights [heads, K + V, rank]: of a head its K rows are for keys, the V behind them for values.
   Queries are brought among the latents, and what they find there is brought back to values. */

/* ---- y[r] = keep[r] * y[r] + sum_k x[r][k] * w[k] ---- */

typedef struct {
    const float *x;    /* [rows, num], rows x_stride apart */
    const void *w;     /* [num, columns], rows w_stride apart */
    const float *keep; /* [rows], or NULL where y holds nothing yet */
    float *y;          /* [rows, columns], rows y_stride apart; columns come in LANES */
    int64_t rows, num, x_stride, w_stride, y_stride;
} weighing;

enum { TILED = 4 };

INLINE void weigh_tile(const weighing *s, int64_t r, int64_t c, int rows, int vectors, int kind) {
    vf acc[TILED][TILED];
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < vectors; b++)
            acc[a][b] = s->keep ? load(s->y, (r + a) * s->y_stride + c + b * LANES, F32)
                                      * s->keep[r + a]
                                : (vf){0};
    for (int64_t k = 0; k < s->num; k++)
        for (int b = 0; b < vectors; b++) {
            vf w = load(s->w, k * s->w_stride + c + b * LANES, kind);
            for (int a = 0; a < rows; a++) acc[a][b] += w * s->x[(r + a) * s->x_stride + k];
        }
    for (int a = 0; a < rows; a++)
        for (int b = 0; b < vectors; b++)
            store(s->y + (r + a) * s->y_stride + c + b * LANES, acc[a][b]);
}

INLINE void weigh_columns(const weighing *s, int64_t c, int vectors, int kind) {
    int64_t r = 0;
    for (; r + TILED <= s->rows; r += TILED) weigh_tile(s, r, c, TILED, vectors, kind);
    switch (s->rows - r) {
    case 3: weigh_tile(s, r, c, 3, vectors, kind); break;
    case 2: weigh_tile(s, r, c, 2, vectors, kind); break;
    case 1: weigh_tile(s, r, c, 1, vectors, kind); break;
    }
}

INLINE void weigh(const weighing *s, int64_t from, int64_t to, int kind) {
    int64_t c = from;
    for (; c + TILED * LANES <= to; c += TILED * LANES) weigh_columns(s, c, TILED, kind);
    for (; c < to; c += LANES) weigh_columns(s, c, 1, kind);
}

CLONES static void weigh_f32(const weighing *s, int64_t from, int64_t to) {
    weigh(s, from, to, F32);
}
CLONES static void weigh_bf16(const weighing *s, int64_t from, int64_t to) {
    weigh(s, from, to, BF16);
}

/* ---- queries among the latents ---- */

typedef struct {
    const float *q;  /* [rows, heads, K + S]: what meets a head's own key, and the shared one */
    const void *w;   /* [heads, K, rank], heads w_stride apart */
    float *y;        /* [rows, heads, width]: what meets a latent, the shared key, then zeros */
    int64_t rows, heads, K, S, rank, width, w_stride;
    int kind;
} entering;

static void share_entering(const entering *e, int64_t t, int64_t threads) {
    int64_t in = e->K + e->S, blocks = (e->rank + TILED * LANES - 1) / (TILED * LANES);
    int64_t all = e->heads * blocks;
    for (int64_t u = all * t / threads; u < all * (t + 1) / threads; u++) {
        int64_t h = u / blocks, from = u % blocks * TILED * LANES, to = from + TILED * LANES;
        weighing s = {.x = e->q + h * in, .w = at(e->w, h * e->w_stride, e->kind),
                      .y = e->y + h * e->width, .rows = e->rows, .num = e->K,
                      .x_stride = e->heads * in, .w_stride = e->rank,
                      .y_stride = e->heads * e->width};
        if (e->kind == F32) weigh_f32(&s, from, to < e->rank ? to : e->rank);
        else weigh_bf16(&s, from, to < e->rank ? to : e->rank);
        for (int64_t r = 0; r < e->rows && from == 0; r++) {
            float *y = s.y + r * s.y_stride + e->rank;
            memset(y, 0, (e->width - e->rank) * 4);
            memcpy(y, s.x + r * s.x_stride + e->K, e->S * 4);
        }
    }
}

/* ---- attention ---- */

typedef struct {
    const float *q;                /* [rows, heads, width], as `entering` makes them */
    const void *latents, *shared;  /* [slots, rank], [slots, S]: slots each stride apart */
    const int64_t *runs;           /* [num, 2]: start and length, row after row */
    const int64_t *first_run;      /* [rows + 1] */
    float *y, *part;               /* [heads, rows, rank], [rows, SPLITS, heads, rank + 2] */
    int64_t rows, heads, rank, S, width, latent_stride, shared_stride;
    float scale;
    int kind;
} latent_attention;

/* Keys are put side by side in float32, and a few heads go through them while they are near. */
enum { NEAR_KEYS = 32, KEYS_PER_SPLIT = 4 * NEAR_KEYS, NEAR_HEADS = 16 };

/* The next keys in order, of which there are so many. run, start: where they begin, moved on. */
INLINE void bring_keys(const latent_attention *a, int64_t *run, int64_t *start, int64_t num,
                       float *keys, int kind) {
    for (int64_t j = 0; j < num; j++, ++*start) {
        while (*start == a->runs[2 * *run + 1]) ++*run, *start = 0;
        int64_t slot = a->runs[2 * *run] + *start;
        float *key = keys + j * a->width;
        for (int64_t i = 0; i < a->rank; i += LANES)
            store(key + i, load(a->latents, slot * a->latent_stride + i, kind));
        for (int64_t i = 0; i < a->width - a->rank; i += LANES)
            store(key + a->rank + i, some(a->shared, slot * a->shared_stride + i, a->S - i, kind));
    }
}

/* Scores to weights by the largest of all so far; what was found before shrinks by `keep`. */
INLINE void weights_of(float *s, int64_t num, float scale, float *top, float *total, float *keep) {
    float before = *top;
    for (int64_t j = num; j < NEAR_KEYS; j++) s[j] = -INFINITY;
    for (int64_t j = 0; j < NEAR_KEYS; j += LANES) store(s + j, load(s, j, F32) * scale);
    for (int64_t j = 0; j < num; j++) *top = s[j] > *top ? s[j] : *top;
    *keep = *total > 0 ? expf(before - *top) : 0.0f;
    for (int64_t j = 0; j < NEAR_KEYS; j += LANES) store(s + j, vexp(load(s, j, F32) - *top));
    *total *= *keep;
    for (int64_t j = 0; j < num; j++) *total += s[j];
}

/* In how many parts so many keys are gone through. */
INLINE int64_t latent_splits(int64_t num) {
    int64_t splits = num / KEYS_PER_SPLIT;
    return splits < 1 ? 1 : splits > SPLITS ? SPLITS : splits;
}

/* One of those parts, for the heads from `first` on. */
INLINE void attend_latents(const latent_attention *a, int64_t r, int64_t first, int64_t split,
                           int kind) {
    int64_t total = num_keys(a->runs, a->first_run, r), splits = latent_splits(total);
    int64_t width = a->rank + 2, heads = a->heads - first;
    if (split >= splits) return;
    if (heads > NEAR_HEADS) heads = NEAR_HEADS;
    float keys[NEAR_KEYS * a->width], scores[NEAR_HEADS * NEAR_KEYS], keep[NEAR_HEADS];
    float *out = a->part + ((r * SPLITS + split) * a->heads + first) * width;
    product meet = {.x = (float *)a->q + (r * a->heads + first) * a->width, .w = keys, .y = scores,
                    .rows = heads, .in = a->width, .out = NEAR_KEYS, .kind = F32, .y_kind = F32};
    weighing found = {.x = scores, .w = keys, .keep = keep, .y = out, .rows = heads,
                      .x_stride = NEAR_KEYS, .w_stride = a->width, .y_stride = width};
    for (int64_t g = 0; g < heads; g++) {
        memset(out + g * width, 0, width * 4);
        out[g * width + a->rank] = -INFINITY;
    }
    int64_t chunks = (total + NEAR_KEYS - 1) / NEAR_KEYS;
    int64_t from = NEAR_KEYS * (chunks * split / splits);
    int64_t to = NEAR_KEYS * (chunks * (split + 1) / splits), run = a->first_run[r], start = from;
    if (to > total) to = total;
    for (; start > a->runs[2 * run + 1]; run++) start -= a->runs[2 * run + 1];
    for (int64_t j = from; j < to; j += NEAR_KEYS) {
        found.num = to - j < NEAR_KEYS ? to - j : NEAR_KEYS;
        bring_keys(a, &run, &start, found.num, keys, kind);
        outputs_f32(&meet, 0, found.num);
        for (int64_t g = 0; g < heads; g++)
            weights_of(scores + g * NEAR_KEYS, found.num, a->scale, out + g * width + a->rank,
                       out + g * width + a->rank + 1, keep + g);
        weigh(&found, 0, a->rank, F32);
    }
}

CLONES static void attend_latents_f32(const latent_attention *a, int64_t r, int64_t first,
                                      int64_t split) {
    attend_latents(a, r, first, split, F32);
}
CLONES static void attend_latents_bf16(const latent_attention *a, int64_t r, int64_t first,
                                       int64_t split) {
    attend_latents(a, r, first, split, BF16);
}

static void share_latents(const latent_attention *a, int phase, int64_t t, int64_t threads) {
    int64_t blocks = (a->heads + NEAR_HEADS - 1) / NEAR_HEADS, all = a->rows * a->heads;
    if (phase == 0) {
        /* first parts first, as threads share them evenly where there are no others */
        for (int64_t u = t; u < a->rows * blocks * SPLITS; u += threads) {
            int64_t split = u / (a->rows * blocks), rest = u % (a->rows * blocks);
            int64_t r = rest / blocks, first = rest % blocks * NEAR_HEADS;
            if (a->kind == F32) attend_latents_f32(a, r, first, split);
            else attend_latents_bf16(a, r, first, split);
        }
        return;
    }
    for (int64_t u = all * t / threads; u < all * (t + 1) / threads; u++) {
        int64_t h = u / a->rows, r = u % a->rows;
        merge(a->part + (r * SPLITS * a->heads + h) * (a->rank + 2), a->heads * (a->rank + 2),
              latent_splits(num_keys(a->runs, a->first_run, r)), a->rank, NULL,
              a->y + u * a->rank);
    }
}

/* ---- from latents back to values ---- */

typedef struct {
    float *x;      /* [heads, rows, rank] */
    const void *w; /* [heads, V, rank], heads w_stride apart */
    void *y;       /* [rows, heads, V] */
    int64_t rows, heads, V, rank, w_stride;
    int kind, y_kind;
} leaving;

static void share_leaving(const leaving *l, int64_t t, int64_t threads) {
    int64_t V = l->V, all = l->heads * V, blocks = (all + 3) / 4;
    int64_t from = 4 * (blocks * t / threads), to = 4 * (blocks * (t + 1) / threads);
    if (to > all) to = all;
    for (int64_t h = from / V; h * V < to; h++) {
        int64_t first = h * V < from ? from - h * V : 0, last = to - h * V < V ? to - h * V : V;
        product p = {.x = l->x + h * l->rows * l->rank, .w = at(l->w, h * l->w_stride, l->kind),
                     .y = l->y, .rows = l->rows, .in = l->rank, .out = all, .first = h * V,
                     .kind = l->kind, .y_kind = l->y_kind};
        if (l->kind == F32) outputs_f32(&p, first, last);
        else outputs_bf16(&p, first, last);
    }
}
