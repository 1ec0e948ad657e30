"""The config of Hymba, under the names of the published `config.json`."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

__all__ = ["HymbaConfig"]


class HymbaConfig(PreTrainedConfig):
    """Sizes and layout of a Hymba model.

    Fields are those of published configs; what no published model uses is read and refused (see
    `unsupported`). num_memory_tokens: learned embeddings in front of every sequence, the meta
    tokens. global_attn_idx: layers that see everything; the others see `sliding_window` tokens
    before their own, and the meta tokens. kv_reuse_group: layers that share the keys and values of
    the group's first. mamba_expand: width of the Mamba heads, and of attention's values, over the
    hidden size.
    """

    model_type = "hymba"

    vocab_size: int = 32001
    hidden_size: int = 1600
    intermediate_size: int = 5504
    num_hidden_layers: int = 32
    num_attention_heads: int = 25
    num_key_value_heads: int = 5
    hidden_act: str = "silu"
    mlp_hidden_act: str = "silu"
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = True
    pad_token_id: int | None = 0
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    max_position_embeddings: int = 8192
    orig_max_position_embeddings: int | None = None
    rope: bool = True
    rope_type: str | None = None
    rope_theta: float = 10000.0
    sliding_window: int | None = None
    global_attn_idx: list[int] | None = None
    kv_reuse_group: list[list[int]] | None = None
    kv_reuse_every_i_layer: int = -1
    kv_weight_reuse: bool = False
    num_memory_tokens: int = 0
    memory_tokens_interspersed_every: int = 0
    mamba_d_state: int = 16
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_dt_rank: int | str = "auto"
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    mamba_inner_layernorms: bool = True
    num_mamba: int = 1
    num_experts: int = 1
    num_experts_per_tok: int = 1
    attn_hidden_size: int = -1
    kq_head_dim: int = -1
    v_head_dim: int = -1
    kq_norm: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if kwargs.get("attn_implementation") == "flex":  # a name of the published code alone
            kwargs.pop("attn_implementation")
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def head_dim(self) -> int:
        """Width of a query and of a key."""
        return self.hidden_size // self.num_attention_heads

    @property
    def inner_size(self) -> int:
        """Channels of the Mamba heads; attention's values are as wide, taken together."""
        return self.mamba_expand * self.hidden_size

    @property
    def value_dim(self) -> int:
        """Width of one head's value."""
        return self.inner_size // self.num_attention_heads

    @property
    def time_step_rank(self) -> int:
        rank = self.mamba_dt_rank
        return math.ceil(self.hidden_size / 16) if isinstance(rank, str) else rank

    @property
    def rope_base(self) -> float:
        """Base of the rotary frequencies; "ntk" stretches them once for all lengths."""
        if self.rope_type != "ntk":
            return self.rope_theta
        assert self.orig_max_position_embeddings is not None
        factor = 2 * self.max_position_embeddings / self.orig_max_position_embeddings - 1
        return float(self.rope_theta * factor ** (self.head_dim / (self.head_dim - 2)))

    @property
    def layer_types(self) -> list[str]:
        """What transformers' own caches keep of each layer: states, and KV where it is computed.

        They keep all KV; the model hides what lies before a window.
        """
        layers = range(self.num_hidden_layers)
        return ["hybrid" if self.producer_of(i) == i else "linear_attention" for i in layers]

    def producer_of(self, layer_idx: int) -> int:
        """The layer whose keys and values this layer attends to."""
        for group in self.kv_reuse_group or ():
            if layer_idx in group:
                return group[0]
        return layer_idx

    def window_of(self, layer_idx: int) -> int | None:
        """How many tokens of text one token sees, its own included; None: all before it."""
        if self.sliding_window is None or layer_idx in (self.global_attn_idx or ()):
            return None
        return self.sliding_window + 1

    @property
    def unsupported(self) -> str | None:
        """Why a model of this config cannot be computed; None if it can."""
        fixed: dict[str, tuple[Any, ...]] = {
            "kq_norm": (None, "none"),
            "num_experts": (1,),
            "num_mamba": (1,),
            "attn_hidden_size": (-1, self.hidden_size),
            "kq_head_dim": (-1, self.head_dim),
            "v_head_dim": (-1, self.value_dim),
            "memory_tokens_interspersed_every": (0,),
            "kv_reuse_every_i_layer": (-1,),
            "kv_weight_reuse": (False,),
            "hidden_act": ("silu",),
            "mlp_hidden_act": ("silu", "relu2"),
            "mamba_inner_layernorms": (True,),
            "rope_type": (None, "default", "ntk"),
        }
        for name, known in fixed.items():
            if getattr(self, name) not in known:
                return f"{name} is {getattr(self, name)!r}; supported: {known}"
        if self.rope_type == "ntk" and self.orig_max_position_embeddings is None:
            return "rope of type 'ntk' needs orig_max_position_embeddings"
        for group in self.kv_reuse_group or ():
            if len({self.window_of(layer) for layer in group}) > 1 or group != sorted(group):
                return f"layers {group} share KV, but not one window, or not in order"
        return None
