/* Mixtures of experts, of which each row goes through a few. Part of _rows.h. */

/* ---- which ones, and how much each counts ---- */

enum way { SOFTMAX_OF_BEST, BEST_OF_SOFTMAX, BEST_BY_SIGMOID };

typedef struct {
    const void *scores; /* [rows, experts] */
    const float *bias;  /* [experts] on what experts are ranked by, or NULL */
    int64_t *chosen;    /* [rows, best], the best first */
    float *weights;     /* [rows, best] */
    int64_t rows, experts, best, groups, best_groups;
    float scale, least;
    int kind, way, normed;
} routing;

/* NaN is the largest of all, so that it is seen. */
INLINE int exceeds(float a, float b) { return a > b || (a != a && b == b); }

/* The best of `num`, which is then out of the contest; the first of equals. */
INLINE int64_t take_best(float *ranks, int *is_out, int64_t num) {
    int64_t best = -1;
    for (int64_t e = 0; e < num; e++)
        if (!is_out[e] && (best < 0 || exceeds(ranks[e], ranks[best]))) best = e;
    is_out[best] = 1;
    return best;
}

/* Of each group the sum of its best two ranks; experts outside the best groups are out. */
INLINE void close_groups(const routing *g, float *ranks, int *is_out) {
    int64_t size = g->experts / g->groups;
    float sums[g->groups];
    int is_open[g->groups];
    for (int64_t n = 0; n < g->groups; n++) {
        float *of_group = ranks + n * size;
        int is_seen[size];
        memset(is_seen, 0, sizeof is_seen);
        float first = of_group[take_best(of_group, is_seen, size)];
        sums[n] = first + of_group[take_best(of_group, is_seen, size)];
    }
    memset(is_open, 0, sizeof is_open);
    for (int64_t n = 0; n < g->best_groups; n++) take_best(sums, is_open, g->groups);
    for (int64_t e = 0; e < g->experts; e++) is_out[e] = !is_open[e / size];
}

static void route_row(const routing *g, int64_t r) {
    int64_t E = g->experts, *chosen = g->chosen + r * g->best;
    float shares[E], ranks[E], *weights = g->weights + r * g->best, total = 0;
    int is_out[E];
    memset(is_out, 0, sizeof is_out);
    for (int64_t e = 0; e < E; e++) {
        float score = get(g->scores, r * E + e, g->kind);
        shares[e] = g->way == BEST_BY_SIGMOID ? sigmoid(score) : score;
        ranks[e] = g->bias ? shares[e] + g->bias[e] : shares[e];
    }
    if (g->best_groups < g->groups) close_groups(g, ranks, is_out);
    for (int64_t n = 0; n < g->best; n++) chosen[n] = take_best(ranks, is_out, E);
    if (g->way == BEST_BY_SIGMOID) {
        for (int64_t n = 0; n < g->best; n++) total += weights[n] = shares[chosen[n]];
        total = g->normed ? total + g->least : 1.0f;
    } else { /* the first chosen has the highest score */
        float top = shares[chosen[0]];
        for (int64_t e = 0; e < E && g->way == BEST_OF_SOFTMAX; e++) total += expf(shares[e] - top);
        for (int64_t n = 0; n < g->best; n++) {
            weights[n] = expf(shares[chosen[n]] - top);
            if (g->way == SOFTMAX_OF_BEST) total += weights[n];
        }
    }
    for (int64_t n = 0; n < g->best; n++) weights[n] = weights[n] / total * g->scale;
}

static void share_routing(const routing *g, int64_t t, int64_t threads) {
    for (int64_t r = g->rows * t / threads; r < g->rows * (t + 1) / threads; r++) route_row(g, r);
}

/* ---- products of each row with the weights of its own expert ---- */

typedef struct {
    const float *x;        /* [rows / repeat, in], each for `repeat` rows in turn */
    const void *w;         /* [experts, out, in] */
    const float *wscale;   /* [experts, out], or NULL for none */
    const int64_t *chosen; /* [rows] */
    float *y;              /* [rows, out] */
    int64_t rows, repeat, in, out;
    int kind;
} selection;

enum { SELECTED = 64, TOGETHER = 4 };

/* A few outputs of some rows of one expert, brought together so that its weights are read, and
   widened, once for all of them. */
static void select_some(const selection *s, const int64_t *rows, int64_t num, int64_t from,
                        int64_t to) {
    float x[TOGETHER * WIDENED], y[TOGETHER * SELECTED];
    int64_t expert = s->chosen[rows[0]];
    product p = {.w = at(s->w, expert * s->out * s->in, s->kind), .x = x, .y = y, .rows = num,
                 .in = s->in, .out = SELECTED, .first = -from, .kind = s->kind, .y_kind = F32,
                 .wscale = s->wscale ? s->wscale + expert * s->out : NULL};
    for (int64_t n = 0; n < num; n++) {
        const float *given = s->x + rows[n] / s->repeat * s->in;
        if (num == 1) p.x = (float *)given;
        else memcpy(x + n * s->in, given, 4 * s->in);
    }
    outputs_of(&p, from, to);
    for (int64_t n = 0; n < num; n++)
        memcpy(s->y + rows[n] * s->out + from, y + n * SELECTED, 4 * (to - from));
}

/* Rows of one expert take turns at a few of its outputs, whose weights are then near by. */
static void share_selection(const selection *s, int64_t t, int64_t threads) {
    int64_t blocks = (s->out + 3) / 4, together = s->in > WIDENED ? 1 : TOGETHER;
    int64_t from = 4 * (blocks * t / threads), to = 4 * (blocks * (t + 1) / threads);
    if (to > s->out) to = s->out;
    for (int64_t first = 0; first < s->rows; first++) {
        int64_t expert = s->chosen[first], before = 0;
        while (s->chosen[before] != expert) before++;
        if (before < first) continue;
        for (int64_t o = from; o < to; o += SELECTED) {
            int64_t end = o + SELECTED < to ? o + SELECTED : to, rows[TOGETHER], num = 0;
            for (int64_t r = first; r < s->rows; r++) {
                if (s->chosen[r] == expert) rows[num++] = r;
                if (num < together && r + 1 < s->rows) continue;
                if (num) select_some(s, rows, num, o, end);
                num = 0;
            }
        }
    }
}

/* ---- y = sum_n weights[n] * x[n] ---- */

typedef struct {
    const void *x;        /* [rows, num, width] */
    const float *weights; /* [rows, num] */
    void *y;              /* [rows, width] */
    int64_t rows, num, width;
    int kind, y_kind;
} blending;

CLONES static void share_blending(const blending *b, int64_t t, int64_t threads) {
    int64_t blocks = (b->width + LANES - 1) / LANES, all = b->rows * blocks;
    for (int64_t u = all * t / threads; u < all * (t + 1) / threads; u++) {
        int64_t r = u / blocks, i = u % blocks * LANES;
        vf y = {0};
        for (int64_t n = 0; n < b->num; n++)
            y += some(b->x, (r * b->num + n) * b->width + i, b->width - i, b->kind)
                 * b->weights[r * b->num + n];
        put_some(b->y, r * b->width + i, b->width - i, b->y_kind, y);
    }
}
