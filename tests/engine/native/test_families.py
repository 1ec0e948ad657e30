"""Each native description gives what the stock modeling code gives, over the same cached data."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
import torch

from agentcache.engine.doctor import stock_reference
from agentcache.engine.families.tiny import VARIANTS, build
from agentcache.engine.native.backend import NativeBackend
from agentcache.engine.native.families import NATIVE
from agentcache.engine.probe import probe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from agentcache.engine.probe import Report

COVERED = [name for name, each in VARIANTS.items() if each.text_model_type in NATIVE]


def probed(model: PreTrainedModel) -> Report:
    reference = stock_reference(model)
    return probe(NativeBackend(model), reference, seed=0)


def test_every_native_family_has_a_tiny_model_to_be_probed_on() -> None:
    assert set(NATIVE) == {VARIANTS[name].text_model_type for name in COVERED}


_MULTIPLIERS = {
    "embedding_multiplier": 5.65,
    "lm_head_multiplier": 0.039,
    "key_multiplier": 0.39,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.94,
    "ssm_multipliers": [0.3536, 0.25, 0.7071, 0.5, 0.36],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.47,
    "mlp_multipliers": [0.88, 0.45],
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "partial_rotary_factor": 0.5,
}
OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "groups, limits, biases": (
        "bamba",
        {
            "mamba_n_groups": 2,
            "time_step_limit": (0.1, 0.9),
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "multipliers, gate before the norm": (
        "falcon_h1",
        {**_MULTIPLIERS, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
    ),
    "multipliers, gate after the norm, tied": (
        "falcon_h1",
        {
            **_MULTIPLIERS,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "mamba_n_groups": 2,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "narrow experts in groups": (
        "nemotron_h",
        {
            "moe_latent_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.3,
        },
    ),
    "experts": ("jamba", {"num_experts": 4, "mamba_proj_bias": True}),
    "dense layers among experts": (
        "qwen3_next",
        {
            "norm_topk_prob": False,
            "mlp_only_layers": [1],
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "yarn on half a head": (
        "qwen3_5",
        {"hidden_act": "gelu", "tie_word_embeddings": True, "rope_parameters": _YARN},
    ),
    "queries of low rank, groups": (
        "kimi_linear",
        {
            "q_lora_rank": 24,
            "num_experts": 8,
            "num_expert_group": 4,
            "topk_group": 2,
            "moe_renormalize": False,
            "num_shared_experts": 2,
        },
    ),
    "bias of experts": ("lfm2_moe", {}),
    "bias of convolutions": ("lfm2", {"conv_bias": True}),
}
_AS_THEY_ARE = re.compile(r"A_log$|dt_bias$|inv_freq$|dt_proj|mup")


def disturbed(name: str, changes: dict[str, Any]) -> PreTrainedModel:
    """A tiny model whose norms, biases and the like are not ones and zeros, as fresh ones are."""
    model = build(name, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for full_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_vector = tensor.dim() == 1 and tensor.is_floating_point()
            if is_vector and not _AS_THEY_ARE.search(full_name):
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_family_count(case: str) -> None:
    report = probed(disturbed(*OPTIONS[case]))
    assert report.ok, report.reason


def test_cap_in_a_gemma3_config_is_left_out_as_stock_attention_leaves_it_out() -> None:
    """Stock modules keep `attn_logit_softcapping` and never apply it."""
    report = probed(build("gemma3", attn_logit_softcapping=0.5))
    assert report.ok, report.reason
