"""Mamba-2 layers: the scan hands out states at any position of a pass."""

from __future__ import annotations

from agentcache.engine.families.base import Family

__all__ = ["FAMILIES"]

FAMILIES = (
    Family(
        ("granitemoehybrid", "bamba", "nemotron_h", "zamba2", "mamba2", "falcon_h1"),
        mixer="mamba2",
        install="agentcache.engine.mixers.mamba2:install_mamba2",
        captures="mixer",
        traps=(
            "the stock one-token path changes states in place: rows are private copies",
            "recurrent states stay float32 whatever the weights are",
            "bamba: without positions a continuation begins at position 0",
            "falcon_h1: attention and Mamba-2 side by side in every layer, with multipliers",
            "nemotron_h, zamba2: the stock step does not clamp time steps, the stock scan does",
            "zamba2: one attention module serves several layers",
        ),
    ),
)
