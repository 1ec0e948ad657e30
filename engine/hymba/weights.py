"""Published names of Hymba's weights, and ours."""

from __future__ import annotations

from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

__all__ = ["RENAMED", "register_names"]

RENAMED = {
    r"^model\.memory_tokens": "model.meta_tokens",
    r"^model\.final_layernorm\.": "model.norm.",
    r"\.pre_moe_layernorm\.": ".post_mixer_layernorm.",
    r"\.moe\.experts\.0\.": ".mlp.",
    r"\.mamba\.pre_avg_layernorm1\.": ".mixer.attention_norm.",
    r"\.mamba\.pre_avg_layernorm2\.": ".mixer.scan_norm.",
    r"\.mamba\.B_layernorm\.": ".mixer.b_layernorm.",
    r"\.mamba\.C_layernorm\.": ".mixer.c_layernorm.",
    r"\.mamba\.dt_layernorm\.": ".mixer.dt_layernorm.",
    r"\.mamba\.x_proj\.0\.": ".mixer.x_proj.",
    r"\.mamba\.dt_proj\.0\.": ".mixer.dt_proj.",
    r"\.mamba\.in_proj\.": ".mixer.in_proj.",
    r"\.mamba\.out_proj\.": ".mixer.out_proj.",
    r"\.mamba\.conv1d\.": ".mixer.conv1d.",
    r"\.mamba\.A_log\.0": ".mixer.A_log",
    r"\.mamba\.D\.0": ".mixer.D",
}
"""Parts of published names, as patterns, and what they are called here. Shapes are the same.

What is on the right is a pattern too, on the way back: it must match nothing else.
"""


def register_names() -> None:
    """Make the names known to transformers, which then loads and saves published checkpoints."""
    renamings: list[WeightConverter | WeightRenaming] = [
        WeightRenaming(theirs, ours) for theirs, ours in RENAMED.items()
    ]
    register_checkpoint_conversion_mapping("hymba", renamings, overwrite=True)
