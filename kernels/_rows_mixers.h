/* One token of recurrent mixers for each of several sequences. Part of _rows.h.

   Their states lie in rows of a pool, `at` says in which, and are moved on in place. */

/* ---- a causal convolution of each channel by itself ---- */

typedef struct {
    const void *x;            /* [rows, channels], rows x_stride apart */
    void *held;               /* [pool, channels, num_taps - 1], rows held_stride apart */
    const int64_t *at;        /* [rows] rows of the pool */
    const float *taps, *bias; /* [channels, num_taps], [channels] or NULL */
    void *y;                  /* [rows, channels] */
    int64_t rows, channels, num_taps, x_stride, held_stride; /* in elements */
    int x_kind, held_kind, y_kind, act;
} convolution;

INLINE void convolve(const convolution *c, int64_t r, int64_t from, int64_t to, int x_kind,
                     int held_kind, int64_t num_taps) {
    int64_t num_held = num_taps - 1, in = r * c->x_stride, row = c->at[r] * c->held_stride;
    for (int64_t first = from; first < to; first += LANES) {
        int64_t num = to - first < LANES ? to - first : LANES;
        float sums[LANES] = {0};
        for (int64_t j = 0; j < num; j++) {
            int64_t channel = first + j, kept = row + channel * num_held;
            const float *taps = c->taps + channel * num_taps;
            float now = get(c->x, in + channel, x_kind), s = c->bias ? c->bias[channel] : 0.0f;
            for (int64_t k = 0; k < num_held; k++) {
                float before = get(c->held, kept + k, held_kind);
                s += before * taps[k];
                if (k) put(c->held, kept + k - 1, held_kind, before);
            }
            if (num_held) put(c->held, kept + num_held - 1, held_kind, now);
            sums[j] = s + now * taps[num_held];
        }
        put_some(c->y, r * c->channels + first, num, c->y_kind,
                 activate(load(sums, 0, F32), c->act, 0.0f));
    }
}

CLONES static void share_convolution(const convolution *c, int64_t t, int64_t threads) {
    int64_t blocks = (c->channels + LANES - 1) / LANES;
    int64_t from = LANES * (blocks * t / threads), to = LANES * (blocks * (t + 1) / threads);
    if (to > c->channels) to = c->channels;
    for (int64_t r = 0; r < c->rows; r++)
        if (c->x_kind == F32 && c->held_kind == F32 && c->num_taps == 4)
            convolve(c, r, from, to, F32, F32, 4);
        else convolve(c, r, from, to, c->x_kind, c->held_kind, c->num_taps);
}

/* As torch's: linear where e^x is all there is. */
INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

/* max(x, 0) + log(1 + z) with z = e^-|x|; the logarithm by the series of 2 artanh(z / (2 + z)), in
   which a small z keeps its digits. */
INLINE vf vsoftplus(vf x) {
    vf z = vexp((vf)((vi)x | (int32_t)0x80000000));
    vf s = z / (2.0f + z), q = s * s, p = q * (2.0f / 15) + 2.0f / 13;
    p = p * q + 2.0f / 11;
    p = p * q + 2.0f / 9;
    p = p * q + 2.0f / 7;
    p = p * q + 2.0f / 5;
    p = p * q + 2.0f / 3;
    p = p * q + 2.0f;
    return choose(x, (vf){0}, x) + p * s;
}

/* ---- Mamba-2 (arXiv:2405.21060) ---- */

typedef struct {
    convolution conv; /* of x, B and C, in float32; time steps [heads] come behind its inputs */
    float *state;     /* [pool, heads, P, N], rows state_stride apart */
    const float *dt_bias, *A, *D; /* [heads] */
    float *y;                     /* [rows, heads, P] */
    int64_t heads, head_dim, groups, state_dim, state_stride;
    float dt_min, dt_max;
} mamba2;

CLONES static void m2_head(const mamba2 *m, int64_t r, int64_t h) {
    const convolution *c = &m->conv;
    int64_t P = m->head_dim, N = m->state_dim, width = m->heads * P;
    const float *x = (const float *)c->y + r * c->channels;
    int64_t group = h / (m->heads / m->groups);
    const float *B = x + width + group * N, *C = B + m->groups * N;
    float *s = m->state + c->at[r] * m->state_stride + h * P * N, *y = m->y + r * width + h * P;
    float dt = softplus(get(c->x, r * c->x_stride + c->channels + h, c->x_kind) + m->dt_bias[h]);
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
    int64_t units = m->conv.rows * m->heads;
    if (phase == 0) {
        share_convolution(&m->conv, t, threads);
        return;
    }
    for (int64_t u = units * t / threads; u < units * (t + 1) / threads; u++)
        m2_head(m, u / m->heads, u % m->heads);
}

/* ---- Mamba-1 (arXiv:2312.00752), behind its convolution ---- */

typedef struct {
    const void *x, *dt, *B, *C, *gate; /* [rows, E], [rows, E], [rows, N] twice, [rows, E] */
    float *state;                      /* [pool, E, N], rows state_stride apart */
    const int64_t *at;                 /* [rows] rows of the pool */
    const float *A, *D, *dt_bias;      /* [E, N], [E] twice */
    void *y;                           /* [rows, E] */
    int64_t rows, channels, state_dim, state_stride, gate_stride; /* other rows lie behind others */
    int kind;
} mamba1;

CLONES static void share_mamba1(const mamba1 *m, int64_t t, int64_t threads) {
    int64_t E = m->channels, N = m->state_dim, blocks = (E + LANES - 1) / LANES;
    int64_t all = m->rows * blocks;
    for (int64_t b = all * t / threads; b < all * (t + 1) / threads; b++) {
        int64_t r = b / blocks, first = b % blocks * LANES;
        int64_t num = E - first < LANES ? E - first : LANES;
        float *s = m->state + m->at[r] * m->state_stride + first * N, sums[LANES] = {0};
        vf x = some(m->x, r * E + first, num, m->kind);
        float steps[LANES];
        store(steps, vsoftplus(some(m->dt, r * E + first, num, m->kind)
                               + some(m->dt_bias, first, num, F32)));
        for (int64_t j = 0; j < num; j++, s += N) {
            float dt = steps[j], in = x[j] * dt;
            vf acc = {0};
            for (int64_t n = 0; n < N; n += LANES) {
                vf keep = vexp(dt * some(m->A, (first + j) * N + n, N - n, F32));
                vf v = some(s, n, N - n, F32) * keep + some(m->B, r * N + n, N - n, m->kind) * in;
                put_some(s, n, N - n, F32, v);
                acc += v * some(m->C, r * N + n, N - n, m->kind);
            }
            sums[j] = sum(acc);
        }
        vf y = load(sums, 0, F32) + x * some(m->D, first, num, F32);
        y *= vsilu(some(m->gate, r * m->gate_stride + first, num, m->kind));
        put_some(m->y, r * E + first, num, m->kind, y);
    }
}

/* ---- the gated delta rule (arXiv:2412.06464; by channel: arXiv:2510.26692) ---- */

typedef struct {
    convolution conv; /* of queries and keys [G, K] each and values [H, V], in float32 */
    float *state;     /* [pool, H, K, V], rows state_stride apart */
    const void *decay, *beta; /* [rows, H] or [rows, H, K], and [rows, H]: before they are opened */
    const float *A, *dt_bias; /* [H]; [H] or [H, K] */
    float *y;                 /* [rows, H, V] */
    int64_t groups, key_dim, heads, value_dim, state_stride, decay_stride, beta_stride;
    float eps; /* under the roots that queries and keys are divided by */
    int by_channel;
} delta;

INLINE float dot(const float *a, const float *b, int64_t num) {
    vf acc = {0};
    for (int64_t i = 0; i < num; i += LANES)
        acc += some(a, i, num - i, F32) * some(b, i, num - i, F32);
    return sum(acc);
}

/* exp(A * softplus(x)): what is left after a decay, of which no less counts */
INLINE vf left_of(float A, vf x) {
    const vf least = (vf){0} - 69.0f;
    vf log = A * vsoftplus(x);
    return but_nan(x, vexp(choose(log - least, least, log)));
}

/* Key and query read the old state together; then the correction is written:
   S = keep S + k u^T with u = beta (v - S^T (keep k)), y = S^T (keep q) + u (q k) */
CLONES static void delta_head(const delta *d, int64_t r, int64_t h) {
    int64_t K = d->key_dim, V = d->value_dim, H = d->heads, G = d->groups;
    int64_t padded = (V + LANES - 1) / LANES * LANES, padded_keys = (K + LANES - 1) / LANES * LANES;
    int kind = d->conv.x_kind;
    const float *mixed = (const float *)d->conv.y + r * d->conv.channels;
    const float *q = mixed + h / (H / G) * K, *k = q + G * K, *v = mixed + 2 * G * K + h * V;
    float *state = d->state + d->conv.at[r] * d->state_stride + h * K * V;
    float *y = d->y + (r * H + h) * V, keep[padded_keys], seen[padded], read[padded];
    float to_q = 1.0f / sqrtf((dot(q, q, K) + d->eps) * (float)K);
    float to_k = 1.0f / sqrtf(dot(k, k, K) + d->eps), overlap = dot(q, k, K) * to_q * to_k;
    float beta = sigmoid(get(d->beta, r * d->beta_stride + h, kind));
    for (int64_t i = 0; i < K; i += LANES) {
        int64_t first = d->by_channel ? h * K + i : h, num = d->by_channel ? K - i : 1;
        vf x = some(d->decay, r * d->decay_stride + first, num, kind)
               + some(d->dt_bias, first, num, F32);
        if (!d->by_channel) x = (vf){0} + x[0];
        store(keep + i, left_of(d->A[h], x));
    }
    memset(seen, 0, sizeof seen);
    memset(read, 0, sizeof read);
    for (int64_t i = 0; i < K; i++) {
        float by_k = k[i] * to_k * keep[i], by_q = q[i] * to_q * keep[i];
        for (int64_t n = 0; n < V; n += LANES) {
            vf s = some(state, i * V + n, V - n, F32);
            store(seen + n, load(seen, n, F32) + s * by_k);
            store(read + n, load(read, n, F32) + s * by_q);
        }
    }
    for (int64_t n = 0; n < V; n += LANES) {
        vf u = beta * (some(v, n, V - n, F32) - load(seen, n, F32));
        store(seen + n, u);
        put_some(y, n, V - n, F32, load(read, n, F32) + u * overlap);
    }
    for (int64_t i = 0; i < K; i++)
        for (int64_t n = 0; n < V; n += LANES)
            put_some(state, i * V + n, V - n, F32,
                     some(state, i * V + n, V - n, F32) * keep[i]
                         + load(seen, n, F32) * (k[i] * to_k));
}

static void share_delta(const delta *d, int phase, int64_t t, int64_t threads) {
    int64_t units = d->conv.rows * d->heads;
    if (phase == 0) {
        share_convolution(&d->conv, t, threads);
        return;
    }
    for (int64_t u = units * t / threads; u < units * (t + 1) / threads; u++)
        delta_head(d, u / d->heads, u % d->heads);
}
