# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled forms of `agentcache.kernels.rows`: addresses in, nothing checked.

Sizes and meaning of every argument are those of the structs in `_rows.h`.
"""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc, realloc
from threading import get_ident


cdef extern from "_rows.h" nogil:
    enum:
        PRODUCT, NORM, OPEN, GATE, CONVOLVE, MAMBA1, MAMBA2, DELTA, ATTENTION, SUM, MOVE, ROTATE
        ROUTE, SELECT, BLEND, ENTER, LATENT, LEAVE
        F32

    ctypedef struct product:
        const void *narrow
        float *x
        const void *w
        const float *wscale
        const float *bias
        const float *scale
        void *y
        int64_t rows, columns "in", out, first
        int kind, y_kind

    ctypedef struct norm:
        const void *x
        const float *weight
        void *y
        int64_t rows, inner, num, x_stride, x_part
        float eps
        int kind

    ctypedef struct opening:
        const void *x
        const void *by
        void *y
        int64_t rows, inner, num, x_stride, x_part, by_stride, by_part
        float limit
        int kind, act

    ctypedef struct gating:
        float *y
        const void *gate
        const float *norm
        int64_t rows, width, groups, gate_stride
        float eps
        int kind, act, norm_before_gate

    ctypedef struct convolution:
        const void *x
        void *held
        const int64_t *at
        const float *taps
        const float *bias
        void *y
        int64_t rows, channels, num_taps, x_stride, held_stride
        int x_kind, held_kind, y_kind, act

    ctypedef struct mamba1:
        const void *x
        const void *dt
        const void *B
        const void *C
        const void *gate
        float *state
        const int64_t *at
        const float *A
        const float *D
        const float *dt_bias
        void *y
        int64_t rows, channels, state_dim, state_stride, gate_stride
        int kind

    ctypedef struct mamba2:
        convolution conv
        float *state
        const float *dt_bias
        const float *A
        const float *D
        float *y
        int64_t heads, head_dim, groups, state_dim, state_stride
        float dt_min, dt_max

    ctypedef struct delta:
        convolution conv
        float *state
        const void *decay
        const void *beta
        const float *A
        const float *dt_bias
        float *y
        int64_t groups, key_dim, heads, value_dim, state_stride, decay_stride, beta_stride
        float eps
        int by_channel

    ctypedef struct attention:
        const float *q
        const void *k
        const void *v
        const int64_t *runs
        const int64_t *first_run
        const float *sinks
        float *y
        float *part
        int64_t rows, heads, kv_heads, D, Dv, q_stride, k_stride, v_stride
        float scale, soft_cap
        int kind

    ctypedef struct summing:
        const void *a
        const void *b
        void *y
        int64_t num
        float alpha, beta
        int kind

    ctypedef struct moving:
        const void *x
        const float *factors
        void *y
        const int64_t *source "from"
        const int64_t *to
        int64_t rows, num, x_stride, y_stride
        int kind, y_kind

    ctypedef struct rotation:
        const void *x
        void *y
        const int64_t *positions
        const float *frequencies
        int64_t rows, heads, D, num, x_stride
        float scale
        int in_turns, kind

    ctypedef struct routing:
        const void *scores
        const float *bias
        int64_t *chosen
        float *weights
        int64_t rows, experts, best, groups, best_groups
        float scale, least
        int kind, way, normed

    ctypedef struct selection:
        const float *x
        const void *w
        const float *wscale
        const int64_t *chosen
        float *y
        int64_t rows, repeat, columns "in", out
        int kind

    ctypedef struct blending:
        const void *x
        const float *weights
        void *y
        int64_t rows, num, width
        int kind, y_kind

    ctypedef struct entering:
        const float *q
        const void *w
        float *y
        int64_t rows, heads, K, S, rank, width, w_stride
        int kind

    ctypedef struct latent_attention:
        const float *q
        const void *latents
        const void *shared
        const int64_t *runs
        const int64_t *first_run
        float *y
        float *part
        int64_t rows, heads, rank, S, width, latent_stride, shared_stride
        float scale
        int kind

    ctypedef struct leaving:
        float *x
        const void *w
        void *y
        int64_t rows, heads, V, rank, w_stride
        int kind, y_kind

    ctypedef struct operation:
        int what
        product product
        norm norm
        opening opening
        gating gating
        convolution convolution
        mamba1 mamba1
        mamba2 mamba2
        delta delta
        attention attention
        summing sum
        moving moving
        rotation rotation
        routing routing
        selection selection
        blending blending
        entering entering
        latent_attention latent
        leaving leaving

    enum: MOST_PHASES

    ctypedef struct progress:
        pass

    void run(const operation *o, int threads)
    void run_all(const operation *all, int64_t num, progress *at, int threads)


cdef class Tape:
    """What one thread has had done between `start` and `stop`, to be done again."""

    cdef operation *_all
    cdef progress *_at
    cdef Py_ssize_t _num, _room

    def __dealloc__(self):
        free(self._all)
        free(self._at)

    def __len__(self):
        return self._num

    cdef int _add(self, const operation *o) except -1:
        cdef operation *more
        if self._num == self._room:
            self._room = 2 * self._room + 64
            more = <operation *>realloc(self._all, self._room * sizeof(operation))
            if more == NULL:
                raise MemoryError
            self._all = more
        self._all[self._num] = o[0]
        self._num += 1
        return 0

    def start(self):
        """Note down what this thread has done from here on; it is done all the same."""
        _tapes[get_ident()] = self

    def stop(self):
        del _tapes[get_ident()]
        self._at = <progress *>malloc((self._num + 1) * MOST_PHASES * sizeof(progress))
        if self._at == NULL:
            raise MemoryError

    def play(self, int threads):
        """Do it all, with what then lies at the same addresses."""
        with nogil:
            run_all(self._all, self._num, self._at, threads)


cdef dict _tapes = {}
"""By thread."""


cdef int _do(const operation *o, int threads) except -1:
    cdef Tape tape
    with nogil:
        run(o, threads)
    if _tapes:
        tape = _tapes.get(get_ident())
        if tape is not None:
            tape._add(o)
    return 0


def linear(
    uintptr_t narrow, uintptr_t x, int64_t rows, int64_t columns, uintptr_t w, int kind,
    int64_t out, uintptr_t wscale, uintptr_t bias, uintptr_t scale, uintptr_t y, int y_kind,
    int threads,
):
    """y [rows, out] = ((x [rows, columns] @ w [out, columns].T) * wscale + bias) * scale."""
    cdef operation o
    o.what = PRODUCT
    o.product.narrow, o.product.x, o.product.w = <const void *>narrow, <float *>x, <const void *>w
    o.product.wscale, o.product.bias = <const float *>wscale, <const float *>bias
    o.product.scale, o.product.y = <const float *>scale, <void *>y
    o.product.rows, o.product.columns, o.product.out, o.product.first = rows, columns, out, 0
    o.product.kind, o.product.y_kind = kind, y_kind
    _do(&o, threads)


def rms_norm(
    uintptr_t x, int64_t x_stride, int64_t x_part, uintptr_t weight, uintptr_t y, int64_t rows,
    int64_t inner, int64_t num, float eps, int kind, int threads,
):
    """y = x / rms(x) * weight, part by part of each row."""
    cdef operation o
    o.what = NORM
    o.norm.x, o.norm.weight, o.norm.y = <const void *>x, <const float *>weight, <void *>y
    o.norm.rows, o.norm.inner, o.norm.num = rows, inner, num
    o.norm.x_stride, o.norm.x_part = x_stride, x_part
    o.norm.eps, o.norm.kind = eps, kind
    _do(&o, threads)


def open_up(
    uintptr_t x, int64_t x_stride, int64_t x_part, int act, float limit, uintptr_t by,
    int64_t by_stride, int64_t by_part, uintptr_t y, int64_t rows, int64_t inner, int64_t num,
    int kind, int threads,
):
    """y [rows, inner, num] = act(x) * by, or without by."""
    cdef operation o
    o.what = OPEN
    o.opening.x, o.opening.by, o.opening.y = <const void *>x, <const void *>by, <void *>y
    o.opening.rows, o.opening.inner, o.opening.num = rows, inner, num
    o.opening.x_stride, o.opening.x_part = x_stride, x_part
    o.opening.by_stride, o.opening.by_part = by_stride, by_part
    o.opening.kind, o.opening.act, o.opening.limit = kind, act, limit
    _do(&o, threads)


def gate(
    uintptr_t y, uintptr_t gate, int kind, int act, int64_t gate_stride, int64_t rows,
    int64_t width, uintptr_t norm, int64_t groups, int norm_before_gate, float eps, int threads,
):
    """y [rows, width] *= act(gate), normed before or after that, or not at all."""
    cdef operation o
    o.what = GATE
    o.gating.y, o.gating.gate, o.gating.norm = <float *>y, <const void *>gate, <const float *>norm
    o.gating.rows, o.gating.width, o.gating.groups = rows, width, groups
    o.gating.gate_stride, o.gating.eps, o.gating.kind = gate_stride, eps, kind
    o.gating.act, o.gating.norm_before_gate = act, norm_before_gate
    _do(&o, threads)


cdef convolution _convolution(
    uintptr_t x, int x_kind, int64_t x_stride, uintptr_t held, int held_kind, int64_t held_stride,
    uintptr_t at, int64_t rows, int64_t channels, uintptr_t taps, uintptr_t bias,
    int64_t num_taps, int act, uintptr_t y, int y_kind,
):
    cdef convolution c
    c.x, c.held, c.at, c.y = <const void *>x, <void *>held, <const int64_t *>at, <void *>y
    c.taps, c.bias = <const float *>taps, <const float *>bias
    c.rows, c.channels, c.num_taps = rows, channels, num_taps
    c.x_stride, c.held_stride = x_stride, held_stride
    c.x_kind, c.held_kind, c.y_kind, c.act = x_kind, held_kind, y_kind, act
    return c


def convolve(
    uintptr_t x, int x_kind, int64_t x_stride, uintptr_t held, int held_kind, int64_t held_stride,
    uintptr_t at, int64_t rows, int64_t channels, uintptr_t taps, uintptr_t bias,
    int64_t num_taps, int act, uintptr_t y, int y_kind,
    int threads,
):
    """y [rows, channels]: one token for each of several sequences; what is held moves on."""
    cdef operation o
    o.what = CONVOLVE
    o.convolution = _convolution(
        x, x_kind, x_stride, held, held_kind, held_stride, at, rows, channels, taps, bias,
        num_taps, act, y, y_kind,
    )
    _do(&o, threads)


def mamba1_step(
    uintptr_t x, uintptr_t dt, uintptr_t B, uintptr_t C, uintptr_t gate, int64_t gate_stride,
    int kind, uintptr_t state, int64_t state_stride, uintptr_t at, int64_t rows,
    int64_t channels, int64_t state_dim, uintptr_t A, uintptr_t D, uintptr_t dt_bias,
    uintptr_t y, int threads,
):
    """One token for each of several sequences; states are moved on in place."""
    cdef operation o
    cdef mamba1 m
    m.x, m.dt, m.B, m.C = <const void *>x, <const void *>dt, <const void *>B, <const void *>C
    m.gate, m.state, m.at = <const void *>gate, <float *>state, <const int64_t *>at
    m.A, m.D, m.dt_bias = <const float *>A, <const float *>D, <const float *>dt_bias
    m.y, m.rows, m.channels, m.state_dim = <void *>y, rows, channels, state_dim
    m.state_stride, m.gate_stride, m.kind = state_stride, gate_stride, kind
    o.what, o.mamba1 = MAMBA1, m
    _do(&o, threads)


def mamba2_step(
    uintptr_t x, int x_kind, int64_t x_stride, uintptr_t held, int held_kind, int64_t held_stride,
    uintptr_t at, int64_t rows, int64_t channels, uintptr_t taps, uintptr_t bias,
    int64_t num_taps, int act, uintptr_t mixed,
    uintptr_t state, int64_t state_stride, uintptr_t dt_bias, uintptr_t A, uintptr_t D,
    float dt_min, float dt_max, int64_t heads, int64_t head_dim, int64_t groups,
    int64_t state_dim, uintptr_t y, int threads,
):
    """One token for each of several sequences; states are moved on in place."""
    cdef operation o
    cdef mamba2 m
    m.conv = _convolution(
        x, x_kind, x_stride, held, held_kind, held_stride, at, rows, channels, taps, bias,
        num_taps, act, mixed, F32,
    )
    m.state, m.y = <float *>state, <float *>y
    m.dt_bias, m.A, m.D = <const float *>dt_bias, <const float *>A, <const float *>D
    m.heads, m.head_dim, m.groups, m.state_dim = heads, head_dim, groups, state_dim
    m.state_stride, m.dt_min, m.dt_max = state_stride, dt_min, dt_max
    o.what, o.mamba2 = MAMBA2, m
    _do(&o, threads)


def delta_step(
    uintptr_t x, int x_kind, int64_t x_stride, uintptr_t held, int held_kind, int64_t held_stride,
    uintptr_t at, int64_t rows, int64_t channels, uintptr_t taps, uintptr_t bias,
    int64_t num_taps, int act, uintptr_t mixed,
    uintptr_t state, int64_t state_stride, uintptr_t decay, int64_t decay_stride,
    uintptr_t beta, int64_t beta_stride, uintptr_t A, uintptr_t dt_bias, int by_channel,
    float eps, int64_t groups, int64_t key_dim, int64_t heads, int64_t value_dim, uintptr_t y,
    int threads,
):
    """One token for each of several sequences; states are moved on in place."""
    cdef operation o
    cdef delta d
    d.conv = _convolution(
        x, x_kind, x_stride, held, held_kind, held_stride, at, rows, channels, taps, bias,
        num_taps, act, mixed, F32,
    )
    d.state, d.y = <float *>state, <float *>y
    d.decay, d.beta = <const void *>decay, <const void *>beta
    d.A, d.dt_bias = <const float *>A, <const float *>dt_bias
    d.groups, d.key_dim, d.heads, d.value_dim = groups, key_dim, heads, value_dim
    d.state_stride, d.decay_stride, d.beta_stride = state_stride, decay_stride, beta_stride
    d.eps, d.by_channel = eps, by_channel
    o.what, o.delta = DELTA, d
    _do(&o, threads)


def attend(
    uintptr_t q, int64_t q_stride, uintptr_t k, uintptr_t v, int kind, int64_t k_stride,
    int64_t v_stride, uintptr_t runs, uintptr_t first_run, int64_t rows, int64_t heads,
    int64_t kv_heads, int64_t key_dim, int64_t value_dim, uintptr_t sinks, float scale,
    float soft_cap, uintptr_t part, uintptr_t y, int threads,
):
    """y [rows, heads, value_dim]: each row's attention to the keys in its runs of slots."""
    cdef operation o
    cdef attention a
    a.q, a.k, a.v = <const float *>q, <const void *>k, <const void *>v
    a.runs, a.first_run = <const int64_t *>runs, <const int64_t *>first_run
    a.sinks, a.y, a.part = <const float *>sinks, <float *>y, <float *>part
    a.rows, a.heads, a.kv_heads, a.D, a.Dv = rows, heads, kv_heads, key_dim, value_dim
    a.q_stride, a.k_stride, a.v_stride = q_stride, k_stride, v_stride
    a.scale, a.soft_cap, a.kind = scale, soft_cap, kind
    o.what, o.attention = ATTENTION, a
    _do(&o, threads)


def sum_of_two(
    uintptr_t a, float alpha, uintptr_t b, float beta, uintptr_t y, int64_t num, int kind,
    int threads,
):
    """y = alpha * a + beta * b, or without b."""
    cdef operation o
    o.what = SUM
    o.sum.a, o.sum.b, o.sum.y = <const void *>a, <const void *>b, <void *>y
    o.sum.alpha, o.sum.beta, o.sum.num, o.sum.kind = alpha, beta, num, kind
    _do(&o, threads)


def move(
    uintptr_t x, int kind, int64_t x_stride, uintptr_t source, uintptr_t factors, uintptr_t y,
    int y_kind, int64_t y_stride, uintptr_t to, int64_t rows, int64_t num, int threads,
):
    """y[to] = x[source], or (x * factors)[source], row by row."""
    cdef operation o
    o.what = MOVE
    o.moving.x, o.moving.y = <const void *>x, <void *>y
    o.moving.source, o.moving.to = <const int64_t *>source, <const int64_t *>to
    o.moving.factors = <const float *>factors
    o.moving.rows, o.moving.num = rows, num
    o.moving.x_stride, o.moving.y_stride = x_stride, y_stride
    o.moving.kind, o.moving.y_kind = kind, y_kind
    _do(&o, threads)


def rotate(
    uintptr_t x, int kind, int64_t x_stride, uintptr_t y, uintptr_t positions,
    uintptr_t frequencies, int64_t rows, int64_t heads, int64_t width, int64_t num, float scale,
    int in_turns, int threads,
):
    """y [rows, heads, width]: x with its positions in it."""
    cdef operation o
    o.what = ROTATE
    o.rotation.x, o.rotation.y = <const void *>x, <void *>y
    o.rotation.positions = <const int64_t *>positions
    o.rotation.frequencies = <const float *>frequencies
    o.rotation.rows, o.rotation.heads, o.rotation.D, o.rotation.num = rows, heads, width, num
    o.rotation.x_stride, o.rotation.scale = x_stride, scale
    o.rotation.in_turns, o.rotation.kind = in_turns, kind
    _do(&o, threads)


def route(
    uintptr_t scores, int kind, uintptr_t bias, uintptr_t chosen, uintptr_t weights,
    int64_t rows, int64_t experts, int64_t best, int64_t groups, int64_t best_groups, int way,
    int normed, float scale, float least, int threads,
):
    """chosen and weights [rows, best] by scores [rows, experts]."""
    cdef operation o
    o.what = ROUTE
    o.routing.scores, o.routing.bias = <const void *>scores, <const float *>bias
    o.routing.chosen, o.routing.weights = <int64_t *>chosen, <float *>weights
    o.routing.rows, o.routing.experts, o.routing.best = rows, experts, best
    o.routing.groups, o.routing.best_groups = groups, best_groups
    o.routing.kind, o.routing.way, o.routing.normed = kind, way, normed
    o.routing.scale, o.routing.least = scale, least
    _do(&o, threads)


def select(
    uintptr_t x, uintptr_t w, int kind, uintptr_t wscale, uintptr_t chosen, uintptr_t y,
    int64_t rows, int64_t repeat, int64_t columns, int64_t out, int threads,
):
    """y [rows, out] = x [rows / repeat, columns] @ w[chosen].T * wscale[chosen], row by row."""
    cdef operation o
    o.what = SELECT
    o.selection.x, o.selection.w = <const float *>x, <const void *>w
    o.selection.wscale = <const float *>wscale
    o.selection.chosen, o.selection.y = <const int64_t *>chosen, <float *>y
    o.selection.rows, o.selection.repeat = rows, repeat
    o.selection.columns, o.selection.out, o.selection.kind = columns, out, kind
    _do(&o, threads)


def blend(
    uintptr_t x, int kind, uintptr_t weights, uintptr_t y, int y_kind, int64_t rows, int64_t num,
    int64_t width, int threads,
):
    """y [rows, width] = x [rows, num, width] summed by weights [rows, num]."""
    cdef operation o
    o.what = BLEND
    o.blending.x, o.blending.weights = <const void *>x, <const float *>weights
    o.blending.y, o.blending.rows, o.blending.num = <void *>y, rows, num
    o.blending.width, o.blending.kind, o.blending.y_kind = width, kind, y_kind
    _do(&o, threads)


def enter_latents(
    uintptr_t q, uintptr_t w, int kind, int64_t w_stride, uintptr_t y, int64_t rows, int64_t heads,
    int64_t key_dim, int64_t shared_dim, int64_t rank, int64_t width, int threads,
):
    """y [rows, heads, width]: what of queries meets latents, what meets shared keys, then zeros."""
    cdef operation o
    o.what = ENTER
    o.entering.q, o.entering.w, o.entering.y = <const float *>q, <const void *>w, <float *>y
    o.entering.rows, o.entering.heads = rows, heads
    o.entering.K, o.entering.S, o.entering.rank = key_dim, shared_dim, rank
    o.entering.width, o.entering.w_stride, o.entering.kind = width, w_stride, kind
    _do(&o, threads)


def attend_latents(
    uintptr_t q, uintptr_t latents, uintptr_t shared, int kind, int64_t latent_stride,
    int64_t shared_stride, uintptr_t runs, uintptr_t first_run, int64_t rows, int64_t heads,
    int64_t rank, int64_t shared_dim, int64_t width, float scale, uintptr_t part, uintptr_t y,
    int threads,
):
    """y [heads, rows, rank]: each row's attention to the latents in its runs of slots."""
    cdef operation o
    cdef latent_attention a
    a.q, a.latents, a.shared = <const float *>q, <const void *>latents, <const void *>shared
    a.runs, a.first_run = <const int64_t *>runs, <const int64_t *>first_run
    a.y, a.part, a.rows, a.heads = <float *>y, <float *>part, rows, heads
    a.rank, a.S, a.width = rank, shared_dim, width
    a.latent_stride, a.shared_stride, a.scale, a.kind = latent_stride, shared_stride, scale, kind
    o.what, o.latent = LATENT, a
    _do(&o, threads)


def leave_latents(
    uintptr_t x, uintptr_t w, int kind, int64_t w_stride, uintptr_t y, int y_kind, int64_t rows,
    int64_t heads, int64_t value_dim, int64_t rank, int threads,
):
    """y [rows, heads, value_dim] = x [heads, rows, rank] @ w [heads, value_dim, rank].T."""
    cdef operation o
    o.what = LEAVE
    o.leaving.x, o.leaving.w, o.leaving.y = <float *>x, <const void *>w, <void *>y
    o.leaving.rows, o.leaving.heads = rows, heads
    o.leaving.V, o.leaving.rank, o.leaving.w_stride = value_dim, rank, w_stride
    o.leaving.kind, o.leaving.y_kind = kind, y_kind
    _do(&o, threads)
