"""What the tiny models of `tiny` are made of: one variant per known way a family keeps things."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VARIANTS", "Variant"]

_VOCAB = 256
_WINDOW = 16

_Settings = dict[str, Any]

_BASE: _Settings = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_RECURRENT_ALONE: _Settings = {
    "vocab_size": _VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS: _Settings = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
_FOUR_EXPERTS: _Settings = {**_EXPERTS, "num_experts": 4}
_SHARED_EXPERT: _Settings = {**_FOUR_EXPERTS, "shared_expert_intermediate_size": 32}
_DENSE_THEN_SPARSE: _Settings = {"mlp_layer_types": ["dense", "sparse"] * 2}
_MAMBA2: _Settings = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
_DELTA: _Settings = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_KDA: _Settings = {"linear_head_dim": 16, "linear_num_heads": 4}
_LATENT: _Settings = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "qk_nope_head_dim": 16,
}
_LINEAR_FULL: _Settings = {"layer_types": ["linear_attention", "full_attention"] * 2}
_FULL_LINEAR: _Settings = {"layer_types": ["full_attention", "linear_attention"] * 2}
_LINEAR_INDEXED: _Settings = {"layer_types": ["linear_attention", "indexed_attention"] * 2}
_CONV_FULL: _Settings = {"layer_types": ["conv", "full_attention"] * 2, "conv_L_cache": 3}
_SLIDING_FULL: _Settings = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": _WINDOW,
}
_HYBRID_SLIDING: _Settings = {"layer_types": ["hybrid_sliding", "hybrid"] * 2}
_GRANITE: _Settings = {
    **_LINEAR_FULL,
    **_MAMBA2,
    "shared_intermediate_size": 96,
    "attention_multiplier": 0.25,
}
_PER_LAYER_INPUTS: _Settings = {
    "vocab_size_per_layer_input": _VOCAB,
    "hidden_size_per_layer_input": 8,
}
_INKLING: _Settings = {
    **_EXPERTS,
    **_HYBRID_SLIDING,
    "head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": _WINDOW,
    "d_rel": 8,
    "rel_extent": 32,
    "n_routed_experts": 4,
}
_QWEN4: _Settings = {
    **_SHARED_EXPERT,
    **_DELTA,
    **_LINEAR_INDEXED,
    "head_dim": 16,
    "hc_count": 2,
    "hc_lowrank": 8,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "ple_embed_dim": 16,
    "ngram_vocab_size_base": 256,
}
_GLM5: _Settings = {
    **_BASE,
    **_EXPERTS,
    **_KDA,
    **_LATENT,
    **_LINEAR_INDEXED,
    **_DENSE_THEN_SPARSE,
    "model_type": "glm5_next_text",
    "q_lora_rank": 32,
    "qk_rope_head_dim": 0,
    "n_routed_experts": 4,
    "index_topk": 8,
    "index_kpool": 4,
    "index_head_dim": 16,
    "index_n_heads": 16,
}
_NO_EYES: _Settings = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "projection_intermediate_size": 32,
    "out_hidden_size": 64,
}
"""As little of a vision tower as the model can be built with; no test shows it a picture."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One tiny model: a class of transformers, or of ours, and what its config is made of.

    `model_type` is the config's; several variants may share one where its options change what a
    layer keeps.
    """

    name: str
    model_type: str
    class_name: str
    settings: Mapping[str, Any]

    @property
    def text_model_type(self) -> str:
        """The `model_type` of its text model, by which families are known."""
        text: Mapping[str, Any] = self.settings.get("text_config", {})
        return str(text.get("model_type", self.model_type))

    @property
    def module(self) -> str:
        """Where its class is defined."""
        folder = self.model_type.removesuffix("_text")
        if folder in _OURS:
            return f"agentcache.engine.{folder}.model"
        return f"transformers.models.{folder}.modeling_{folder}"


_OURS = ("hymba",)


def _variant(name: str, model_type: str, class_name: str, *parts: Mapping[str, Any]) -> Variant:
    settings: _Settings = {}
    for part in parts:
        settings.update(part)
    return Variant(name, model_type, class_name, settings)


_ALL = (
    # Mamba-2
    _variant(
        "granitemoehybrid",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _BASE,
        _GRANITE,
        {"num_local_experts": 0, "num_experts_per_tok": 0},
    ),
    _variant(
        "granitemoehybrid_moe",
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        _BASE,
        _GRANITE,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    _variant("bamba", "bamba", "BambaForCausalLM", _BASE, _MAMBA2, {"attn_layer_indices": [1, 3]}),
    _variant(
        "falcon_h1",
        "falcon_h1",
        "FalconH1ForCausalLM",
        _BASE,
        _MAMBA2,
        {"num_hidden_layers": 3, "mamba_d_ssm": 64, "mamba_n_heads": 4},
    ),
    _variant(
        "nemotron_h",
        "nemotron_h",
        "NemotronHForCausalLM",
        {key: value for key, value in _BASE.items() if key != "num_hidden_layers"},
        {
            "layers_block_type": [
                "linear_attention",
                "moe",
                "full_attention",
                "mlp",
                "linear_attention",
            ],
            "head_dim": 16,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    _variant(
        "zamba2",
        "zamba2",
        "Zamba2ForCausalLM",
        _BASE,
        {
            "layers_block_type": ["linear_attention", "hybrid"] * 2,
            "mamba_d_state": 16,
            "n_mamba_heads": 4,
            "chunk_size": 8,
            "num_key_value_heads": 4,
            "use_mem_rope": True,
            "mamba_ngroups": 1,
            "adapter_rank": 8,
        },
    ),
    _variant(
        "mamba2",
        "mamba2",
        "Mamba2ForCausalLM",
        _RECURRENT_ALONE,
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    ),
    # gated delta rule
    _variant(
        "qwen3_next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _BASE,
        _SHARED_EXPERT,
        _DELTA,
        _LINEAR_FULL,
        {"head_dim": 16},
    ),
    _variant(
        "qwen3_5",
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        _BASE,
        _DELTA,
        _LINEAR_FULL,
        {"head_dim": 16},
    ),
    _variant(
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _BASE,
        _SHARED_EXPERT,
        _DELTA,
        _LINEAR_FULL,
        {"head_dim": 16},
    ),
    _variant(
        "olmo_hybrid",
        "olmo_hybrid",
        "OlmoHybridForCausalLM",
        _BASE,
        _DELTA,
        _LINEAR_FULL,
        {"num_key_value_heads": 4, "linear_num_key_heads": 4},
    ),
    _variant(
        "lara_mini",
        "lara_mini",
        "LaraMiniForCausalLM",
        _BASE,
        _SHARED_EXPERT,
        _DELTA,
        {
            "head_dim": 16,
            "sliding_window": _WINDOW,
            "layer_types": [
                "linear_attention",
                "sliding_attention",
                "linear_attention",
                "full_attention",
            ],
        },
    ),
    _variant("qwen4_exp", "qwen4_exp_text", "Qwen4ExpForCausalLM", _BASE, _QWEN4),
    _variant(
        "qwen4_exp_ple",
        "qwen4_exp_text",
        "Qwen4ExpForCausalLM",
        _BASE,
        _QWEN4,
        {"ple_embed_dim": 32, "ple_layer_ids": [1], "number_of_conv_states": 3},
    ),
    # delta rule with a decay per channel, beside latent attention
    _variant(
        "kimi_linear",
        "kimi_linear",
        "KimiLinearForCausalLM",
        _BASE,
        _LATENT,
        _KDA,
        _LINEAR_FULL,
        _DENSE_THEN_SPARSE,
        {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_token": 2},
    ),
    _variant(
        "bailing_hybrid",
        "bailing_hybrid",
        "BailingHybridForCausalLM",
        _BASE,
        _LATENT,
        _KDA,
        _LINEAR_FULL,
        _DENSE_THEN_SPARSE,
        {
            "num_experts": 4,
            "num_expert_group": 2,
            "topk_group": 1,
            "moe_intermediate_size": 32,
            "num_experts_per_token": 2,
            "head_dim": 8,
        },
    ),
    _variant(
        "glm5_next",
        "glm5_next",
        "Glm5NextForConditionalGeneration",
        {"text_config": _GLM5, "vision_config": _NO_EYES},
    ),
    # short convolution
    _variant("lfm2", "lfm2", "Lfm2ForCausalLM", _BASE, _CONV_FULL, {"block_multiple_of": 8}),
    _variant(
        "lfm2_moe",
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        _BASE,
        _FOUR_EXPERTS,
        _CONV_FULL,
        {"num_dense_layers": 1},
    ),
    _variant(
        "lfm3",
        "lfm3",
        "Lfm3ForCausalLM",
        _BASE,
        {
            "layer_types": ["conv", "full_attention", "conv", "sliding_attention"],
            "conv_L_cache": 7,
            "head_dim": 16,
            "sliding_window": _WINDOW,
        },
    ),
    # convolutions inside attention
    _variant(
        "inkling",
        "inkling_text",
        "InklingForCausalLM",
        _BASE,
        _INKLING,
        _DENSE_THEN_SPARSE,
        {"n_shared_experts": 1, "logits_mup_width_multiplier": 1.0},
    ),
    _variant(
        "inkling2",
        "inkling2_text",
        "Inkling2ForCausalLM",
        _BASE,
        _INKLING,
        {"n_layers_per_attn_res_block": 2, "unpadded_vocab_size": _VOCAB},
    ),
    _variant(
        "zaya",
        "zaya",
        "ZayaForCausalLM",
        _BASE,
        {
            "layer_types": ["hybrid", "hybrid_sliding"] * 2,
            "sliding_window": _WINDOW,
            "head_dim": 16,
            "num_experts": 4,
            "router_hidden_size": 16,
            "moe_intermediate_size": 32,
            "num_experts_per_tok": 1,
        },
    ),
    # attention alone
    _variant("gemma3", "gemma3_text", "Gemma3ForCausalLM", _BASE, _SLIDING_FULL, {"head_dim": 16}),
    _variant(
        "gemma3n",
        "gemma3n_text",
        "Gemma3nForCausalLM",
        _BASE,
        _SLIDING_FULL,
        _PER_LAYER_INPUTS,
        {
            "head_dim": 16,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [96] * 4,
        },
    ),
    _variant(
        "gemma4",
        "gemma4_text",
        "Gemma4ForCausalLM",
        _BASE,
        _SLIDING_FULL,
        _PER_LAYER_INPUTS,
        {"head_dim": 16, "global_head_dim": 32},
    ),
    _variant(
        "gemma4_shared",
        "gemma4_text",
        "Gemma4ForCausalLM",
        _BASE,
        _SLIDING_FULL,
        _PER_LAYER_INPUTS,
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_kv_shared_layers": 2,
        },
    ),
    _variant(
        "gpt_oss",
        "gpt_oss",
        "GptOssForCausalLM",
        _BASE,
        _SLIDING_FULL,
        {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _variant(
        "mimo_v2_flash",
        "mimo_v2_flash",
        "MiMoV2FlashForCausalLM",
        _BASE,
        _EXPERTS,
        _SLIDING_FULL,
        _DENSE_THEN_SPARSE,
        {"head_dim": 16, "v_head_dim": 8, "n_routed_experts": 4},
    ),
    _variant(
        "granite_swa",
        "granite_swa",
        "GraniteSWAForCausalLM",
        _BASE,
        _SLIDING_FULL,
        {"layer_rope_theta": [1e4] * 4, "attention_multiplier": 0.25},
    ),
    _variant("llama", "llama", "LlamaForCausalLM", _BASE, {"num_hidden_layers": 2}),
    _variant("qwen3", "qwen3", "Qwen3ForCausalLM", _BASE, {"num_hidden_layers": 2, "head_dim": 16}),
    # a model of our own
    _variant(
        "hymba",
        "hymba",
        "HymbaForCausalLM",
        _BASE,
        {
            "num_hidden_layers": 5,
            "sliding_window": _WINDOW - 1,
            "global_attn_idx": [0, 4],
            "kv_reuse_group": [[1, 2, 3]],
            "num_memory_tokens": 8,
            "rope_type": "ntk",
            "orig_max_position_embeddings": 1024,
        },
    ),
    # stock modules that lose their state
    _variant(
        "jamba",
        "jamba",
        "JambaForCausalLM",
        _BASE,
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 8,
        },
    ),
    _variant(
        "zamba",
        "zamba",
        "ZambaForCausalLM",
        _BASE,
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "n_mamba_heads": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "num_key_value_heads": 4,
        },
    ),
    _variant(
        "falcon_mamba",
        "falcon_mamba",
        "FalconMambaForCausalLM",
        _RECURRENT_ALONE,
        {"state_size": 8},
    ),
    _variant(
        "minimax",
        "minimax",
        "MiniMaxForCausalLM",
        _BASE,
        _LINEAR_FULL,
        {"head_dim": 16, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _variant(
        "minimax_full_first",
        "minimax",
        "MiniMaxForCausalLM",
        _BASE,
        _FULL_LINEAR,
        {"head_dim": 16, "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    _variant(
        "recurrent_gemma",
        "recurrent_gemma",
        "RecurrentGemmaForCausalLM",
        _BASE,
        {
            "num_hidden_layers": 6,
            "lru_width": 64,
            "attention_window_size": _WINDOW,
            "num_key_value_heads": 1,
            "head_dim": 16,
        },
    ),
    _variant(
        "deepseek_v4",
        "deepseek_v4",
        "DeepseekV4ForCausalLM",
        _BASE,
        _EXPERTS,
        {
            "num_hidden_layers": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "qk_rope_head_dim": 8,
            "q_lora_rank": 32,
            "layer_types": [
                "sliding_attention",
                "heavily_compressed_attention",
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe"],
            "n_routed_experts": 4,
            "o_groups": 2,
            "o_lora_rank": 16,
            "compress_rates": {
                "compressed_sparse_attention": 4,
                "heavily_compressed_attention": 8,
            },
            "hc_mult": 2,
            "index_n_heads": 16,
            "index_head_dim": 16,
            "index_topk": 4,
            "sliding_window": _WINDOW,
        },
    ),
)

VARIANTS: dict[str, Variant] = {variant.name: variant for variant in _ALL}
"""Every variant by its name, in order of kinship."""
