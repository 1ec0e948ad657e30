/* Norms, activations and gates of rows. Part of _rows.h. */

/* Up to sixteen numbers; zeros stand for the rest. */
INLINE vf some(const void *p, int64_t i, int64_t num, int kind) {
    if (num >= LANES) return load(p, i, kind);
    float part[LANES] = {0};
    for (int64_t j = 0; j < num; j++) part[j] = get(p, i + j, kind);
    return load(part, 0, F32);
}

INLINE void put_some(void *p, int64_t i, int64_t num, int kind, vf v) {
    if (kind == F32 && num >= LANES) {
        store((float *)p + i, v);
        return;
    }
    float part[LANES];
    store(part, v);
    for (int64_t j = 0; j < num && j < LANES; j++) put(p, i + j, kind, part[j]);
}

/* y, but NaN where that was given; its sign may be set. */
INLINE vf but_nan(vf given, vf y) {
    const vi infinity = (vi){0} + 0x7f800000;
    return choose((vf)(infinity - ((vi)given & 0x7fffffff)), given, y);
}

/* ---- activations ---- */

enum act { IDENTITY, SILU, SIGMOID, RELU_SQUARED, GELU, GELU_TANH, SOFT_CAP };

INLINE vf vsigmoid(vf x) { return 1.0f / (1.0f + vexp(-x)); }

/* Cephes' tanhf: an odd polynomial near zero, where 1 - 2 / (e^2x + 1) would lose what is small. */
INLINE vf vtanh(vf x) {
    vi sign = (vi)x & (int32_t)0x80000000;
    vf size = (vf)((vi)x & 0x7fffffff), z = x * x;
    vf p = z * -5.70498872745E-3f + 2.06390887954E-2f;
    p = p * z - 5.37397155531E-2f;
    p = p * z + 1.33314422036E-1f;
    p = p * z - 3.33332819422E-1f;
    vf far = 1.0f - 2.0f / (vexp(size + size) + 1.0f);
    return choose(size - 0.625f, p * z * x + x, (vf)((vi)far | sign));
}

/* limit: of SOFT_CAP */
INLINE vf activate(vf x, int act, float limit) {
    vf y = x;
    switch (act) {
    case SILU: return vsilu(x);
    case SIGMOID: return vsigmoid(x);
    case RELU_SQUARED:
        y = choose(x, (vf){0}, x);
        return but_nan(x, y * y);
    case GELU: /* x * P(X <= x) of a normal X */
        for (int j = 0; j < LANES; j++) y[j] = 0.5f * x[j] * erfcf(x[j] * -0.70710678118654752f);
        return y;
    case GELU_TANH: /* (1 + tanh u) / 2 is sigmoid 2u */
        return x * vsigmoid(x * (1.5957691216057308f + 0.0713548162726009f * x * x));
    case SOFT_CAP: return limit * vtanh(x / limit);
    }
    return y;
}

/* y = act(x) * by, rows of `inner` parts of `num` each */
typedef struct {
    const void *x, *by; /* by may be NULL */
    void *y;            /* [rows, inner, num] */
    int64_t rows, inner, num, x_stride, x_part, by_stride, by_part; /* of rows, of parts */
    float limit;
    int kind, act;
} opening;

enum { OPENED = 16 * LANES };

INLINE void open_block(const opening *o, int64_t unit, int64_t from, int64_t to, int kind,
                       int act) {
    int64_t r = unit / o->inner, part = unit % o->inner;
    int64_t x = r * o->x_stride + part * o->x_part, by = r * o->by_stride + part * o->by_part;
    for (int64_t i = from; i < to; i += LANES) {
        vf v = activate(some(o->x, x + i, to - i, kind), act, o->limit);
        if (o->by) v *= some(o->by, by + i, to - i, kind);
        put_some(o->y, unit * o->num + i, to - i, kind, v);
    }
}

CLONES static void share_opening(const opening *o, int64_t t, int64_t threads) {
    int64_t num = o->num, blocks = (num + OPENED - 1) / OPENED;
    int64_t all = o->rows * o->inner * blocks;
    for (int64_t b = all * t / threads; b < all * (t + 1) / threads; b++) {
        int64_t from = b % blocks * OPENED, to = from + OPENED < num ? from + OPENED : num;
        if (o->kind == F32 && o->act == SILU) open_block(o, b / blocks, from, to, F32, SILU);
        else open_block(o, b / blocks, from, to, o->kind, o->act);
    }
}

/* ---- norms ---- */

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

/* rows of `inner` parts of `num` each, rows and parts any distance apart; each part is normed by
   itself */
typedef struct {
    const void *x;
    const float *weight; /* [num] */
    void *y;             /* [rows, inner, num] */
    int64_t rows, inner, num, x_stride, x_part;
    float eps;
    int kind;
} norm;

INLINE void norm_rows(const norm *n, int64_t from, int64_t to, int kind) {
    for (int64_t u = from; u < to; u++)
        norm_row(at(n->x, u / n->inner * n->x_stride + u % n->inner * n->x_part, kind), n->weight,
                 (void *)at(n->y, u * n->num, kind), n->num, n->eps, kind);
}

CLONES static void share_norm(const norm *n, int64_t t, int64_t threads) {
    int64_t units = n->rows * n->inner, from = units * t / threads, to = units * (t + 1) / threads;
    if (n->kind == F32) norm_rows(n, from, to, F32);
    else norm_rows(n, from, to, BF16);
}

/* ---- gates of what a recurrence gives ---- */

/* y *= act(gate), with a norm of groups of each row before that, after it, or none */
typedef struct {
    float *y;          /* [rows, width] */
    const void *gate;  /* rows gate_stride apart */
    const float *norm; /* [width] or NULL */
    int64_t rows, width, groups, gate_stride;
    float eps;
    int kind, act, norm_before_gate;
} gating;

CLONES static void share_gate(const gating *g, int64_t t, int64_t threads) {
    int64_t width = g->width, part = width / g->groups;
    int64_t from = g->rows * t / threads, to = g->rows * (t + 1) / threads;
    for (int64_t r = from; r < to; r++) {
        float *y = g->y + r * width;
        for (int64_t n = 0; g->norm && g->norm_before_gate && n < g->groups; n++)
            norm_row(y + n * part, g->norm + n * part, y + n * part, part, g->eps, F32);
        for (int64_t i = 0; i < width; i += LANES) {
            vf opened = some(g->gate, r * g->gate_stride + i, width - i, g->kind);
            put_some(y, i, width - i, F32,
                     some(y, i, width - i, F32) * activate(opened, g->act, 0.0f));
        }
        for (int64_t n = 0; g->norm && !g->norm_before_gate && n < g->groups; n++)
            norm_row(y + n * part, g->norm + n * part, y + n * part, part, g->eps, F32);
    }
}
