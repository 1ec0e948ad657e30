"""Hymba, which transformers does not have: config, model and names of weights.

Importing the package makes them known to transformers, so that its `from_pretrained` finds them.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from agentcache.engine.hymba.config import HymbaConfig
from agentcache.engine.hymba.model import HymbaForCausalLM
from agentcache.engine.hymba.weights import register_names

__all__ = ["HymbaConfig", "HymbaForCausalLM"]

AutoConfig.register(HymbaConfig.model_type, HymbaConfig, exist_ok=True)
AutoModelForCausalLM.register(HymbaConfig, HymbaForCausalLM, exist_ok=True)
register_names()
