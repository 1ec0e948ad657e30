"""Hymba, which transformers does not have: config, model and names of weights.

Importing the package makes the config known to transformers, importing `model` the rest, so that
its `from_pretrained` finds them.
"""

from __future__ import annotations

from transformers import AutoConfig

from agentcache.engine.hymba.config import HymbaConfig

__all__ = ["HymbaConfig"]

AutoConfig.register(HymbaConfig.model_type, HymbaConfig, exist_ok=True)
