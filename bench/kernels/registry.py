"""Every kernel with the shapes it is measured at, its reference and what it is compared with.

`REGISTRY` maps an op, named like its file in `kernels/`, to a function that makes its cases, from
the cheapest to the dearest. Shapes are those of the embedded models and of one twice their width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from _cases import Case, Form, Outputs, alone, in_place, pure
from row_cases import (
    mamba2_step_cases,
    recording_cases,
    row_attention_cases,
    row_experts_cases,
    row_gates_cases,
    row_latent_cases,
    row_moves_cases,
    rows_cases,
)
from step_cases import conv_step_cases, delta_step_cases, mamba1_step_cases
from torch import Tensor

from agentcache.kernels.causal_conv1d import (
    causal_conv1d,
    causal_conv1d_reference,
    causal_conv1d_update,
)
from agentcache.kernels.gated_delta import (
    gated_delta,
    gated_delta_reference,
    gated_delta_update,
    gated_delta_update_reference,
)
from agentcache.kernels.paged_attention import segment_attention, segment_attention_reference
from agentcache.kernels.rg_lru import rg_lru, rg_lru_reference
from agentcache.kernels.selective_scan import (
    selective_scan,
    selective_scan_reference,
    selective_state_update,
    selective_state_update_reference,
)
from agentcache.kernels.ssd_scan import ssd_scan, ssd_scan_reference
from agentcache.kernels.state_update import state_update, state_update_reference

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["REGISTRY", "Case", "Form"]


@dataclass(frozen=True, slots=True)
class _MambaSizes:
    """Heads, head width, state width; one group."""

    num_heads: int
    head_dim: int
    state_dim: int

    @property
    def name(self) -> str:
        return f"H{self.num_heads} P{self.head_dim} N{self.state_dim}"

    @property
    def num_channels(self) -> int:
        return self.num_heads * self.head_dim + 2 * self.state_dim

    def state(self, rows: int) -> Tensor:
        return torch.randn(rows, self.num_heads, self.head_dim, self.state_dim)

    def inputs(self, *lead: int) -> dict[str, Any]:
        """Arguments of the scan with leading sizes `lead`, as views of one convolved tensor."""
        widths = [self.num_heads * self.head_dim, self.state_dim, self.state_dim]
        x, B, C = torch.randn(*lead, self.num_channels).split(widths, dim=-1)
        return {
            "x": x.unflatten(-1, (self.num_heads, self.head_dim)),
            "dt": torch.rand(*lead, self.num_heads) * 0.1 + 0.001,
            "A": -torch.linspace(0.01, 16.0, self.num_heads),
            "B": B.unflatten(-1, (1, self.state_dim)),
            "C": C.unflatten(-1, (1, self.state_dim)),
            "D": torch.randn(self.num_heads),
        }


_SIZES = (_MambaSizes(12, 32, 64), _MambaSizes(28, 32, 128))


def _ssd_scan_cases() -> Iterator[Case]:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import mamba2_chunk_scan

    for sizes in _SIZES:
        for num_tokens in (32, 128, 512):
            inputs, state = sizes.inputs(1, num_tokens), sizes.state(1)

            def ours(inputs: dict[str, Any] = inputs, state: Tensor = state) -> Outputs:
                result = ssd_scan(**inputs, initial_state=state)
                return result.y, result.final_state

            # the family's own chunk size, and the one that suits its fallback best
            others = {
                f"transformers_chunk_{chunk_size}": pure(
                    partial(
                        mamba2_chunk_scan,
                        *(inputs[name] for name in ("x", "dt", "A", "B", "C")),
                        chunk_size,
                        D=inputs["D"],
                        initial_states=state,
                        return_final_states=True,
                    )
                )
                for chunk_size in (256, 64)
            }
            reference = partial(ssd_scan_reference, **inputs, initial_state=state)
            name = f"{sizes.name} T{num_tokens}"
            yield Case(name, num_tokens, pure(ours), pure(reference), others)


def _state_update_cases() -> Iterator[Case]:
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
        mamba2_selective_state_update,
    )

    for sizes in _SIZES:
        for rows in (1, 8):
            inputs, state = sizes.inputs(rows), sizes.state(rows)
            expanded = _for_transformers(inputs, sizes)
            yield Case(
                f"{sizes.name} R{rows}",
                rows,
                in_place(partial(state_update, **inputs), state),
                pure(partial(state_update_reference, state, **inputs)),
                {
                    "transformers": in_place(
                        partial(mamba2_selective_state_update, **expanded), state
                    )
                },
            )


def _for_transformers(inputs: dict[str, Tensor], sizes: _MambaSizes) -> dict[str, Tensor]:
    """dt, A and D per channel, as its one-token form takes them."""
    shape = (sizes.num_heads, sizes.head_dim)
    return {
        "hidden_states": inputs["x"],
        "dt": inputs["dt"][..., None].expand(-1, *shape),
        "A": inputs["A"][:, None, None].expand(*shape, sizes.state_dim),
        "B": inputs["B"],
        "C": inputs["C"],
        "D": inputs["D"][:, None].expand(shape),
    }


def _selective_scan_cases() -> Iterator[Case]:
    """The one-token form first; scans start from zeros, the only start transformers' scan knows."""
    from transformers.models.jamba.modeling_jamba import (
        mamba_selective_scan,
        mamba_selective_state_update,
    )

    for channels in (384, 1536):
        yield _selective_step(channels, mamba_selective_state_update)
        for num_tokens in (32, 128, 512):
            yield _selective_run(channels, num_tokens, mamba_selective_scan)


def _selective_inputs(channels: int, *lead: int) -> dict[str, Any]:
    """Arguments of the selective scan with leading sizes `lead`."""
    state_dim = 16
    return {
        "x": torch.randn(*lead, channels),
        "dt": torch.randn(*lead, channels) - 4.0,
        "A": -torch.arange(1.0, state_dim + 1).repeat(channels, 1),
        "B": torch.randn(*lead, 1, state_dim),
        "C": torch.randn(*lead, 1, state_dim),
        "D": torch.randn(channels),
        "z": torch.randn(*lead, channels),
        "dt_bias": torch.randn(channels),
        "dt_softplus": True,
    }


def _selective_step(channels: int, theirs: Callable[..., Tensor]) -> Case:
    inputs = _selective_inputs(channels, 1)
    state = torch.randn(1, *inputs["A"].shape)
    renamed = {("hidden_states" if name == "x" else name): inputs[name] for name in inputs}
    one_group = {name: inputs[name].squeeze(1) for name in ("B", "C")}
    return Case(
        f"E{channels} T1",
        1,
        in_place(partial(selective_state_update, **inputs), state),
        pure(partial(selective_state_update_reference, state, **inputs)),
        {"transformers": in_place(partial(theirs, **renamed | one_group), state)},
    )


def _selective_run(channels: int, num_tokens: int, theirs: Callable[..., Outputs]) -> Case:
    inputs = _selective_inputs(channels, 1, num_tokens)

    def ours() -> Outputs:
        result = selective_scan(**inputs)
        return result.y, result.final_state

    def transformers() -> Outputs:
        """Its layout is channels first."""
        x, dt, B, C, z = (
            inputs[name].flatten(2).transpose(1, 2) for name in ("x", "dt", "B", "C", "z")
        )
        y, state = theirs(
            x,
            dt,
            inputs["A"],
            B,
            C,
            D=inputs["D"],
            z=z,
            delta_bias=inputs["dt_bias"],
            delta_softplus=True,
            return_last_state=True,
        )
        return y.transpose(1, 2), state

    return Case(
        f"E{channels} T{num_tokens}",
        num_tokens,
        pure(ours),
        pure(partial(selective_scan_reference, **inputs)),
        {"transformers": pure(transformers)},
    )


def _rg_lru_cases() -> Iterator[Case]:
    """Theirs, too, is a loop over tokens; its outputs are the states, here both in float32."""
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import RecurrentGemmaRglru

    for width in (512, 2560):
        for num_tokens in (1, 32, 512):
            x, decay = torch.randn(1, num_tokens, width), torch.rand(1, num_tokens, width) ** 0.01
            state = torch.randn(1, width)
            reset = torch.zeros(1, num_tokens, 1, dtype=torch.bool)
            theirs = partial(RecurrentGemmaRglru._rnn_scan, None, x, decay, reset, state)
            yield Case(
                f"W{width} T{num_tokens}",
                num_tokens,
                alone(partial(rg_lru, x, decay, state)),
                alone(partial(rg_lru_reference, x, decay, state)),
                {"transformers": Form(theirs, lambda theirs=theirs: theirs()[:1])},
            )


def _gated_delta_cases() -> Iterator[Case]:
    """Decay per head with two value heads for one of keys, and per channel; one token first."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    for num_heads, width in ((8, 64), (16, 128)):
        for per_channel in (False, True):
            one, many = (
                (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention)
                if per_channel
                else (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)
            )
            sizes = (num_heads, width, per_channel)
            yield from (_delta_step(sizes, rows, one) for rows in (1, 8))
            yield from (_delta_run(sizes, num_tokens, many) for num_tokens in (2, 32, 128, 512))


_DeltaSizes = tuple[int, int, bool]
"""Heads of values, width of keys and values, whether each key channel has a decay of its own."""


def _delta_inputs(sizes: _DeltaSizes, *lead: int) -> dict[str, Tensor]:
    """Arguments of the gated delta rule with leading sizes `lead`."""
    num_heads, width, per_channel = sizes
    groups = num_heads if per_channel else num_heads // 2
    q, k = F.normalize(torch.randn(2, *lead, groups, width), dim=-1)
    return {
        "q": q * width**-0.5,
        "k": k,
        "v": torch.randn(*lead, num_heads, width),
        "decay": -(torch.rand(*lead, num_heads, *([width] if per_channel else [])) ** 4),
        "beta": torch.rand(*lead, num_heads),
    }


def _delta_name(sizes: _DeltaSizes) -> str:
    num_heads, width, per_channel = sizes
    return f"H{num_heads} K{width} {'channel' if per_channel else 'head'}"


def _their_delta(run: Callable[..., Outputs], inputs: dict[str, Tensor], state: Tensor) -> Outputs:
    """transformers' forms scale the queries themselves."""
    q, k, v, decay, beta = inputs.values()
    scaled = q * q.shape[-1] ** 0.5
    return run(scaled, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True)


def _delta_step(sizes: _DeltaSizes, rows: int, theirs: Callable[..., Outputs]) -> Case:
    inputs, state = _delta_inputs(sizes, rows), torch.randn(rows, *sizes[:2], sizes[1])
    as_sequences = {name: tensor.unsqueeze(1) for name, tensor in inputs.items()}

    def transformers() -> Outputs:
        y, moved = _their_delta(theirs, as_sequences, state)
        return y[:, 0], moved

    return Case(
        f"{_delta_name(sizes)} R{rows}",
        rows,
        in_place(partial(gated_delta_update, **inputs), state),
        pure(partial(gated_delta_update_reference, state, **inputs)),
        {"transformers": pure(transformers)},
    )


def _delta_run(sizes: _DeltaSizes, num_tokens: int, theirs: Callable[..., Outputs]) -> Case:
    inputs, state = _delta_inputs(sizes, 1, num_tokens), torch.randn(1, *sizes[:2], sizes[1])

    def ours() -> Outputs:
        result = gated_delta(**inputs, initial_state=state)
        return result.y, result.final_state

    return Case(
        f"{_delta_name(sizes)} T{num_tokens}",
        num_tokens,
        pure(ours),
        pure(partial(gated_delta_reference, **inputs, initial_state=state)),
        {"transformers": pure(partial(_their_delta, theirs, inputs, state))},
    )


def _causal_conv1d_cases() -> Iterator[Case]:
    for sizes in _SIZES:
        channels = sizes.num_channels
        weight, bias = torch.randn(channels, 4), torch.randn(channels)
        for num_tokens in (1, 32, 512):
            x, state = torch.randn(1, num_tokens, channels), torch.randn(1, channels, 3)
            yield Case(
                f"C{channels} T{num_tokens}",
                num_tokens,
                _our_conv(x, state, weight, bias),
                pure(partial(causal_conv1d_reference, x, weight, bias, state, activation="silu")),
                {"transformers": in_place(partial(_their_conv, x, weight, bias), state)},
            )


def _our_conv(x: Tensor, state: Tensor, weight: Tensor, bias: Tensor) -> Form:
    """The one-token form for one token."""

    def one(state: Tensor) -> Tensor:
        y = causal_conv1d_update(x[:, 0], state, weight, bias, activation="silu")
        return y[:, None]

    def several() -> Outputs:
        result = causal_conv1d(x, weight, bias, state, activation="silu")
        return result.y, result.final_state

    return in_place(one, state) if x.shape[1] == 1 else pure(several)


def _their_conv(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor) -> Tensor:
    """transformers' form for any number of tokens after others, channels first."""
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import causal_conv1d_update

    y: Tensor = causal_conv1d_update(x.transpose(1, 2), state, weight, bias, "silu")
    return y.transpose(1, 2)


def _paged_attention_cases() -> Iterator[Case]:
    num_heads, num_kv_heads, head_dim, num_layers = 6, 2, 64, 2
    scale = head_dim**-0.5
    for num_new, lengths, window in (
        (1, [1024], None),
        (1, [16] * 100, None),
        (1, [32768], None),
        (32, [8192], None),
        (1, [8192], 1024),
        (32, [8192], 1024),
    ):
        q, k, v = (
            torch.randn(h, num_new, head_dim) for h in (num_heads, num_kv_heads, num_kv_heads)
        )
        pages = [torch.randn(n, num_layers, 2, num_kv_heads, head_dim) for n in lengths]
        history = [(page[:, 0, 0], page[:, 0, 1]) for page in pages]

        arguments = (q, history, k, v)
        ours, reference, copying = (
            pure(partial(_single, form, arguments, scale=scale, window=window))
            for form in (segment_attention, _reference_attention, _attention_by_copy)
        )
        name = f"T{num_new} history {len(lengths)}x{lengths[0]}"
        yield Case(
            name if window is None else f"{name} window {window}",
            num_new,
            ours,
            reference,
            {"copy_and_sdpa": copying},
        )


def _single(form: Callable[..., Tensor], arguments: tuple[Any, ...], **options: Any) -> Outputs:
    return (form(*arguments, **options),)


def _reference_attention(
    q: Tensor,
    history: list[tuple[Tensor, Tensor]],
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    return segment_attention_reference(q, history, k, v, scale, window=window)


def _attention_by_copy(
    q: Tensor,
    history: list[tuple[Tensor, Tensor]],
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    window: int | None,
) -> Tensor:
    """PyTorch's attention on keys and values gathered for it, as a cache that appends does.

    With a window, on those that one of the new tokens sees, as a cache that slides does.
    """
    num_new = q.shape[1]
    if window is not None:
        assert len(history) == 1, "the cases with a window have one run"
        history = [(keys[1 - window :], values[1 - window :]) for keys, values in history]
    keys = torch.cat([*(run.transpose(0, 1) for run, _ in history), k], dim=1)
    values = torch.cat([*(run.transpose(0, 1) for _, run in history), v], dim=1)
    past_len = keys.shape[1] - num_new
    mask = torch.ones(num_new, keys.shape[1], dtype=torch.bool).tril(past_len)
    if window is not None:
        mask = mask.triu(past_len + 1 - window)
    out = F.scaled_dot_product_attention(
        q[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)


REGISTRY: dict[str, Callable[[], Iterator[Case]]] = {
    "causal_conv1d": _causal_conv1d_cases,
    "conv_step": conv_step_cases,
    "delta_step": delta_step_cases,
    "gated_delta": _gated_delta_cases,
    "mamba1_step": mamba1_step_cases,
    "mamba2_step": mamba2_step_cases,
    "paged_attention": _paged_attention_cases,
    "recording": recording_cases,
    "rg_lru": _rg_lru_cases,
    "row_attention": row_attention_cases,
    "row_experts": row_experts_cases,
    "row_gates": row_gates_cases,
    "row_latent": row_latent_cases,
    "row_moves": row_moves_cases,
    "rows": rows_cases,
    "selective_scan": _selective_scan_cases,
    "ssd_scan": _ssd_scan_cases,
    "state_update": _state_update_cases,
}
