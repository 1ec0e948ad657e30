# cython: language_level=3, boundscheck=False, wraparound=False
"""The compiled forms of `agentcache.kernels.rows`: addresses in, nothing checked.

Sizes and meaning of every argument are those of the structs in `_rows.h`.
"""

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free, malloc


cdef extern from "_rows.h" nogil:
    ctypedef struct product:
        const float *x
        const void *w
        const float *wscale
        const float *bias
        const float *scale
        void *y
        int64_t rows, columns "in", out, first
        int kind, y_kind

    ctypedef struct gating:
        float *y
        const void *gate
        const float *norm
        int64_t rows, width, groups, gate_stride
        float eps
        int kind, norm_before_gate

    ctypedef struct mamba2:
        const void *x
        void *conv
        float *state
        const int64_t *at
        const float *taps
        const float *bias
        const float *dt_bias
        const float *A
        const float *D
        float *mixed
        float *y
        int64_t rows, heads, head_dim, groups, state_dim, num_taps
        int64_t conv_stride, state_stride
        float dt_min, dt_max
        int x_kind, conv_kind

    ctypedef struct attention:
        const float *q
        const void *k
        const void *v
        const int64_t *runs
        const int64_t *first_run
        const float *sinks
        float *y
        float *part
        int64_t rows, heads, kv_heads, D, Dv, k_stride, v_stride
        float scale, soft_cap
        int kind

    void run_product(const product *p, int threads)
    void widen_all(const void *x, float *y, int64_t num)
    void run_rms_norm(
        const void *x, const float *weight, void *y, int64_t rows, int64_t num, float eps, int kind,
        int threads)
    void run_silu_mul(
        const void *x, void *y, int64_t rows, int64_t num, int kind, int threads)
    void run_gate(const gating *g, int threads)
    void run_mamba2(const mamba2 *m, int threads)
    int run_attention(const attention *a, int threads)


def linear(
    uintptr_t x, int x_kind, int64_t rows, int64_t columns, uintptr_t w, int kind, int64_t out,
    uintptr_t wscale, uintptr_t bias, uintptr_t scale, uintptr_t y, int y_kind, int threads,
):
    """y [rows, out] = ((x [rows, columns] @ w [out, columns].T) * wscale + bias) * scale."""
    cdef product p
    cdef float *wide = NULL
    p.x = <const float *>x
    p.w = <const void *>w
    p.wscale, p.bias, p.scale = <const float *>wscale, <const float *>bias, <const float *>scale
    p.y = <void *>y
    p.rows, p.columns, p.out, p.first = rows, columns, out, 0
    p.kind, p.y_kind = kind, y_kind
    if x_kind:
        wide = <float *>malloc(rows * columns * sizeof(float))
        if wide == NULL:
            raise MemoryError
    with nogil:
        if x_kind:
            widen_all(<const void *>x, wide, rows * columns)
            p.x = wide
        run_product(&p, threads)
    free(wide)


def rms_norm(
    uintptr_t x, uintptr_t weight, uintptr_t y, int64_t rows, int64_t num, float eps, int kind,
    int threads,
):
    """y = x / rms(x) * weight, row by row."""
    with nogil:
        run_rms_norm(
            <const void *>x, <const float *>weight, <void *>y, rows, num, eps, kind, threads)


def silu_mul(uintptr_t x, uintptr_t y, int64_t rows, int64_t num, int kind, int threads):
    """y [rows, num] = silu(gate) * up of x [rows, 2, num]."""
    with nogil:
        run_silu_mul(<const void *>x, <void *>y, rows, num, kind, threads)


def gate(
    uintptr_t y, uintptr_t gate, int kind, int64_t gate_stride, int64_t rows, int64_t width,
    uintptr_t norm, int64_t groups, int norm_before_gate, float eps, int threads,
):
    """y [rows, width] *= silu(gate), normed before or after that, or not at all."""
    cdef gating g
    g.y, g.gate, g.norm = <float *>y, <const void *>gate, <const float *>norm
    g.rows, g.width, g.groups, g.gate_stride = rows, width, groups, gate_stride
    g.eps, g.kind, g.norm_before_gate = eps, kind, norm_before_gate
    with nogil:
        run_gate(&g, threads)


def mamba2_step(
    uintptr_t x, int x_kind, uintptr_t conv, int conv_kind, int64_t conv_stride, uintptr_t state,
    int64_t state_stride, uintptr_t at, int64_t rows, uintptr_t taps, uintptr_t bias,
    int64_t num_taps, uintptr_t dt_bias, uintptr_t A, uintptr_t D, float dt_min, float dt_max,
    int64_t heads, int64_t head_dim, int64_t groups, int64_t state_dim, uintptr_t mixed,
    uintptr_t y, int threads,
):
    """One token for each of several sequences; states are moved on in place."""
    cdef mamba2 m
    m.x, m.conv, m.state = <const void *>x, <void *>conv, <float *>state
    m.at = <const int64_t *>at
    m.taps, m.bias = <const float *>taps, <const float *>bias
    m.dt_bias, m.A, m.D = <const float *>dt_bias, <const float *>A, <const float *>D
    m.mixed, m.y = <float *>mixed, <float *>y
    m.rows, m.heads, m.head_dim, m.groups, m.state_dim = rows, heads, head_dim, groups, state_dim
    m.num_taps, m.conv_stride, m.state_stride = num_taps, conv_stride, state_stride
    m.dt_min, m.dt_max, m.x_kind, m.conv_kind = dt_min, dt_max, x_kind, conv_kind
    with nogil:
        run_mamba2(&m, threads)


def attend(
    uintptr_t q, uintptr_t k, uintptr_t v, int kind, int64_t k_stride, int64_t v_stride,
    uintptr_t runs, uintptr_t first_run, int64_t rows, int64_t heads, int64_t kv_heads,
    int64_t key_dim, int64_t value_dim, uintptr_t sinks, float scale, float soft_cap,
    uintptr_t part, uintptr_t y, int threads,
):
    """y [rows, heads, value_dim]: each row's attention to the keys in its runs of slots."""
    cdef attention a
    cdef int failed
    a.q, a.k, a.v = <const float *>q, <const void *>k, <const void *>v
    a.runs, a.first_run = <const int64_t *>runs, <const int64_t *>first_run
    a.sinks, a.y, a.part = <const float *>sinks, <float *>y, <float *>part
    a.rows, a.heads, a.kv_heads, a.D, a.Dv = rows, heads, kv_heads, key_dim, value_dim
    a.k_stride, a.v_stride = k_stride, v_stride
    a.scale, a.soft_cap, a.kind = scale, soft_cap, kind
    with nogil:
        failed = run_attention(&a, threads)
    if failed:
        raise MemoryError
