"""Cases of the kernels for a few rows: a decode step, a short extension."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _cases import Case, alone, moving

from agentcache.kernels import row_latent
from agentcache.kernels.mamba2_step import mamba2_step, mamba2_step_reference
from agentcache.kernels.recording import Scratch, record
from agentcache.kernels.row_attention import KeyRuns, attend, attend_reference
from agentcache.kernels.row_experts import mix, mix_reference
from agentcache.kernels.row_gates import opened, opened_reference
from agentcache.kernels.row_moves import add, rotate, rotate_reference
from agentcache.kernels.rows import IS_COMPILED, linear, linear_reference, rms_norm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = [
    "mamba2_step_cases",
    "recording_cases",
    "row_attention_cases",
    "row_experts_cases",
    "row_gates_cases",
    "row_latent_cases",
    "row_moves_cases",
    "rows_cases",
]

_PRODUCTS = ((448, 2076), (768, 3376))
"""Inputs and outputs of the first product of a Mamba-2 layer in models of these widths."""


def rows_cases() -> Iterator[Case]:
    """`linear`, the op that takes the time."""
    for width, out in _PRODUCTS:
        for num_rows in (1, 8, 32):
            yield _float32_product(num_rows, width, out)
            yield _bfloat16_product(num_rows, width, out)


def _float32_product(num_rows: int, width: int, out: int) -> Case:
    """PyTorch's product also with the weights as it is faster with them: transposed in memory."""
    x, weight = torch.randn(num_rows, width), torch.randn(out, width)
    return Case(
        f"float32 {width}x{out} R{num_rows}",
        num_rows,
        alone(partial(linear, x, weight)),
        alone(partial(linear_reference, x, weight)),
        {
            "torch": alone(partial(F.linear, x, weight)),
            "torch_transposed": alone(partial(F.linear, x, weight.t().contiguous().t())),
        },
    )


def _bfloat16_product(num_rows: int, width: int, out: int) -> Case:
    """Of small whole numbers: their sums are exact in any order, so all forms round them alike."""
    x, weight = (
        torch.randint(-8, 9, shape).bfloat16() for shape in ((num_rows, width), (out, width))
    )

    def widened() -> Tensor:
        return F.linear(x.float(), weight.float()).bfloat16()

    return Case(
        f"bfloat16 {width}x{out} R{num_rows}",
        num_rows,
        alone(partial(linear, x, weight)),
        alone(partial(linear_reference, x, weight)),
        {"torch": alone(partial(F.linear, x, weight)), "torch_widened": alone(widened)},
    )


def mamba2_step_cases() -> Iterator[Case]:
    """One token each of several sequences; transformers' forms of the ops that it joins."""
    for num_heads, head_dim, state_dim in ((12, 32, 64), (28, 32, 128)):
        for num_rows in (1, 8):
            yield _step(num_rows, num_heads, head_dim, state_dim)


def _step(num_rows: int, num_heads: int, head_dim: int, state_dim: int) -> Case:
    width = num_heads * head_dim
    channels = width + 2 * state_dim
    projected = torch.randn(num_rows, width + channels + num_heads)
    conv = torch.randn(num_rows, channels, 3)
    state = torch.randn(num_rows, num_heads, head_dim, state_dim)
    weights = {
        "taps": torch.randn(channels, 4),
        "bias": torch.randn(channels),
        "dt_bias": torch.randn(num_heads) - 4.0,
        "A": -torch.linspace(0.01, 16.0, num_heads),
        "D": torch.randn(num_heads),
    }
    ours, reference = (
        moving(
            partial(
                form,
                projected,
                rows=torch.arange(num_rows),
                dt_limits=(0.0, float("inf")),
                num_groups=1,
                **weights,
            ),
            conv=conv,
            state=state,
        )
        for form in (mamba2_step, mamba2_step_reference)
    )
    return Case(
        f"H{num_heads} P{head_dim} N{state_dim} R{num_rows}",
        num_rows,
        ours,
        reference,
        {
            "transformers": moving(
                partial(_their_step, projected, **weights), conv=conv, state=state
            )
        },
    )


def _their_step(
    projected: Tensor,
    *,
    conv: Tensor,
    state: Tensor,
    taps: Tensor,
    bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
) -> Tensor:
    """Time steps, A and D per channel, as its one-token form takes them."""
    from transformers.models.granitemoehybrid import modeling_granitemoehybrid as granite

    _, num_heads, head_dim, state_dim = state.shape
    shape = (num_heads, head_dim)
    width, channels = num_heads * head_dim, conv.shape[1]
    _, mixed, dt = projected.split([width, channels, num_heads], -1)
    mixed = granite.causal_conv1d_update(mixed[..., None], conv, taps, bias, "silu")[..., 0]
    x, b, c = mixed.split([width, state_dim, state_dim], -1)
    y: Tensor = granite.mamba2_selective_state_update(
        state,
        x.unflatten(-1, shape),
        dt[..., None].expand(-1, *shape),
        A[:, None, None].expand(*shape, state_dim),
        b.unsqueeze(1),
        c.unsqueeze(1),
        D=D[:, None].expand(shape),
        dt_bias=dt_bias[:, None].expand(shape),
        dt_softplus=True,
    )
    return y.flatten(1)


def row_attention_cases() -> Iterator[Case]:
    """One token each of several sequences, whose keys lie in one run each, as PyTorch needs it."""
    for num_keys in (500, 4000):
        for num_rows in (1, 8):
            yield _attention(num_rows, num_keys)


def _attention(num_rows: int, num_keys: int) -> Case:
    num_heads, num_kv_heads, head_dim, num_layers = 6, 2, 64, 2
    scale = head_dim**-0.5
    q = torch.randn(num_rows, num_heads, head_dim)
    pool = torch.randn(num_rows * num_keys, num_layers, 2, num_kv_heads, head_dim)
    keys, values = pool[:, 0, 0], pool[:, 0, 1]
    runs = KeyRuns.of([[(row * num_keys, num_keys)] for row in range(num_rows)])
    attends = partial(attend, q, keys, values, runs, scale=scale)
    formula = partial(attend_reference, q, keys, values, runs, scale=scale)

    def row_by_row() -> Tensor:
        """As the pool has them, without a copy; each row's query as its heads of one token."""
        of_rows = (each.split(num_keys) for each in (keys, values))
        return torch.cat(
            [
                F.scaled_dot_product_attention(
                    query[None, :, None],
                    k.transpose(0, 1)[None],
                    v.transpose(0, 1)[None],
                    scale=scale,
                    enable_gqa=True,
                )[:, :, 0]
                for query, k, v in zip(q, *of_rows, strict=True)
            ]
        )

    others = {"torch": alone(row_by_row)}
    return Case(f"R{num_rows} K{num_keys}", num_rows, alone(attends), alone(formula), others)


def row_latent_cases() -> Iterator[Case]:
    """One token each of several sequences, of 2,000 tokens in one run each, as PyTorch needs it."""
    num_keys, num_layers = 2000, 2
    for num_heads, key_dim, shared_dim, rank in ((8, 32, 16, 64), (32, 128, 64, 512)):
        for num_rows in (1, 8):
            q = torch.randn(num_rows, num_heads, key_dim + shared_dim)
            pool = torch.randn(num_rows * num_keys, num_layers, rank + shared_dim)
            expand = torch.randn(num_heads, 2 * key_dim, rank) * rank**-0.5
            latents, shared = pool[:, 0].split([rank, shared_dim], -1)
            runs = KeyRuns.of([[(row * num_keys, num_keys)] for row in range(num_rows)])
            options = {"key_dim": key_dim, "scale": (key_dim + shared_dim) ** -0.5}
            ours, reference = (
                alone(partial(form, q, latents, shared, runs, expand, **options))
                for form in (row_latent.attend, row_latent.attend_reference)
            )
            others = {"torch": alone(partial(_among_latents, q, pool[:, 0], expand, **options))}
            name = f"H{num_heads} rank {rank} R{num_rows}"
            yield Case(name, num_rows, ours, reference, others)


def _among_latents(
    q: Tensor, cached: Tensor, expand: Tensor, *, key_dim: int, scale: float
) -> Tensor:
    """Queries [R, H, K + S] brought among latents and shared keys [R * num, rank + S]."""
    num_rows, rank = len(q), expand.shape[2]
    to_keys, to_values = expand.split([key_dim, expand.shape[1] - key_dim], 1)
    moved = torch.bmm(q[..., :key_dim].transpose(0, 1), to_keys).transpose(0, 1)
    moved = torch.cat([moved, q[..., key_dim:]], -1)
    found = torch.stack(
        [
            F.scaled_dot_product_attention(
                of_row[None], keys[None], keys[None, :, :rank], scale=scale
            )[0]
            for of_row, keys in zip(moved, cached.chunk(num_rows), strict=True)
        ]
    )
    return torch.bmm(found.transpose(0, 1), to_values.transpose(1, 2)).transpose(0, 1).flatten(1)


def row_experts_cases() -> Iterator[Case]:
    """Each row through 4 of 16 experts; PyTorch's is a product for each of them."""
    num, best = 16, 4
    for width, middle in ((256, 128), (1024, 512)):
        up = torch.randn(num, 2 * middle, width) * width**-0.5
        down = torch.randn(num, width, middle) * middle**-0.5
        for num_rows in (1, 8):
            x, weights = torch.randn(num_rows, width), torch.rand(num_rows, best)
            chosen = torch.stack([torch.randperm(num)[:best] for _ in range(num_rows)])
            given = (x, chosen, weights, up, down)
            yield Case(
                f"{width}x{middle} R{num_rows}",
                num_rows,
                alone(partial(mix, *given, F.silu)),
                alone(partial(mix_reference, *given, F.silu)),
                {"torch": alone(partial(_row_by_row_mixed, *given))},
            )


def _row_by_row_mixed(
    x: Tensor, chosen: Tensor, weights: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    y = torch.zeros_like(x)
    for row, experts in enumerate(chosen.tolist()):
        for expert, share in zip(experts, weights[row], strict=True):
            gate, inputs = torch.mv(up[expert], x[row]).chunk(2)
            y[row] += share * torch.mv(down[expert], F.silu(gate) * inputs)
    return y


def row_gates_cases() -> Iterator[Case]:
    """A gated MLP's gate, against PyTorch's two passes."""
    for width in (704, 8192):
        for num_rows in (1, 8):
            gate, up = torch.randn(num_rows, 2 * width).chunk(2, -1)
            yield Case(
                f"silu {width} R{num_rows}",
                num_rows,
                alone(partial(opened, gate, F.silu, up)),
                alone(partial(opened_reference, gate, F.silu, up)),
                {"torch": alone(lambda gate=gate, up=up: F.silu(gate).mul_(up))},
            )


def row_moves_cases() -> Iterator[Case]:
    """`rotate`, the op that computes; transformers' form has cosines and sines from before."""
    from transformers.models.llama.modeling_llama import rotate_half

    num_heads, head_dim = 6, 64
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2) / head_dim)
    for num_rows in (1, 8, 32):
        x, positions = torch.randn(num_rows, num_heads, head_dim), torch.randint(8000, (num_rows,))
        angles = torch.outer(positions.float(), frequencies).repeat(1, 2)[:, None]
        cosine, sine = angles.cos(), angles.sin()

        def theirs(x: Tensor = x, cosine: Tensor = cosine, sine: Tensor = sine) -> Tensor:
            turned: Tensor = x * cosine + rotate_half(x) * sine
            return turned

        yield Case(
            f"rotate H{num_heads} D{head_dim} R{num_rows}",
            num_rows,
            alone(partial(rotate, x, positions, frequencies)),
            alone(partial(rotate_reference, x, positions, frequencies)),
            {"transformers": alone(theirs)},
        )


def recording_cases() -> Iterator[Case]:
    """The feed-forward parts of a model's layers: the reference calls the kernels one by one."""
    for width, hidden in ((448, 896), (768, 1536)):
        for num_rows in (1, 8):
            yield _played(num_rows, width, hidden)


def _played(num_rows: int, width: int, hidden: int) -> Case:
    num_layers, eps = 3, 1e-5
    x, norm = torch.zeros(num_rows, width), torch.randn(width)
    ups = torch.randn(num_layers, 2 * hidden, width) * width**-0.5
    downs = torch.randn(num_layers, width, hidden) * hidden**-0.5

    def call_by_call() -> Tensor:
        y = x
        for up, down in zip(ups, downs, strict=True):
            gates, inputs = linear(rms_norm(y, norm, eps), up).chunk(2, -1)
            y = add(y, linear(opened(gates, F.silu, inputs), down))
        return y

    def pytorchs() -> Tensor:
        y = x
        for up, down in zip(ups, downs, strict=True):
            gates, inputs = F.linear(F.rms_norm(y, (width,), norm, eps), up).chunk(2, -1)
            y = y + F.linear(F.silu(gates) * inputs, down)
        return y

    # without the compiled forms nothing is recorded, and each step is done call by call
    play = record(call_by_call, Scratch()).play if IS_COMPILED else call_by_call
    x.normal_()  # other inputs than those it was recorded on
    return Case(
        f"{num_layers} layers {width}x{hidden} R{num_rows}",
        num_rows,
        alone(play),
        alone(call_by_call),
        {"torch": alone(pytorchs)},
    )
