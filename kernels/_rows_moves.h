/* Moving rows about. Part of _rows.h. */

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

/* y[to ? to[r] : r] = x[from ? from[r] : r], rows of num, each times its factor if there are any */
typedef struct {
    const void *x;
    const float *factors; /* one for each row of x, or NULL */
    void *y;
    const int64_t *from, *to; /* [rows], or NULL where rows follow each other */
    int64_t rows, num, x_stride, y_stride;
    int kind, y_kind;
} moving;

CLONES static void do_move(const moving *m) {
    for (int64_t r = 0; r < m->rows; r++) {
        int64_t source = m->from ? m->from[r] : r, in = source * m->x_stride;
        int64_t out = (m->to ? m->to[r] : r) * m->y_stride;
        float factor = m->factors ? m->factors[source] : 1.0f;
        if (m->kind == m->y_kind)
            memcpy((void *)at(m->y, out, m->kind), at(m->x, in, m->kind),
                   m->num * (m->kind == F32 ? 4 : 2));
        else
            for (int64_t i = 0; i < m->num; i++)
                put(m->y, out + i, m->y_kind, get(m->x, in + i, m->kind) * factor);
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
