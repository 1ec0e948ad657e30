"""How much memory a model takes, known before any weight is read, and how much it leaves."""

from __future__ import annotations

import copy
import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from agentcache.engine.describe import text_config
from agentcache.engine.hymba import HymbaConfig
from agentcache.engine.machine import available_bytes, mapped_bytes
from agentcache.engine.weight_files import stored_in, weight_files
from agentcache.errors import ModelTooLarge

if TYPE_CHECKING:
    from pathlib import Path

    from agentcache.engine.source import Source

__all__ = ["auto_class", "check_fits", "free_bytes", "weight_bytes"]

_FLOATS = ("F64", "F32", "F16", "BF16")


def check_fits(
    source: Source, config: Any, dtype: torch.dtype | None, cache_bytes: int, available: int
) -> None:
    """Raise ModelTooLarge if weights and cache cannot fit into so many available bytes."""
    weights = weight_bytes(source, config, dtype)
    if weights + cache_bytes > available:
        # a checkpoint may hold more than the model takes from it
        weights = min(weights, _built_bytes(config, dtype))
    if weights + cache_bytes > available:
        raise ModelTooLarge(weights, cache_bytes, available)


def weight_bytes(source: Source, config: Any, dtype: torch.dtype | None) -> int:
    """Bytes of a model's weights once loaded.

    By the headers of its safetensors files; without such files, and where packed weights are
    unpacked on loading, by building the model without memory. dtype: as for `load_model`.
    """
    shards = weight_files(source.folder) if source.gguf is None else ()
    if not shards or _is_unpacked(config):
        return _built_bytes(config, dtype)
    is_packed = getattr(config, "quantization_config", None) is not None
    target = None if is_packed else _target(config, dtype)
    return sum(_shard_bytes(shard, target) for shard in shards)


def free_bytes(model: Any) -> int:
    """Bytes left for a cache beside a loaded model, on the model's device."""
    if model.device.type == "cuda":
        return int(torch.cuda.mem_get_info(model.device)[0])
    # Weights that are mapped from a file count as available, for they can be read again: not
    # without reading them again for every token.
    weights: int = sum(weight.nbytes for weight in model.parameters())
    return max(0, available_bytes() - min(mapped_bytes(), weights))


def auto_class(config: Any) -> Any:
    """The class to load a model with: a causal LM, else one that also sees, whose text model is
    used."""
    if isinstance(config, HymbaConfig):
        import_module("agentcache.engine.hymba.model")  # makes itself known to transformers
    known = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if known else AutoModelForImageTextToText


def _target(config: Any, dtype: torch.dtype | None) -> torch.dtype | None:
    """What floating weights become; None: they stay as they are."""
    found = dtype or getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    return getattr(torch, found) if isinstance(found, str) else found


def _is_unpacked(config: Any) -> bool:
    """Whether the weights are in a packed form that is computed with on a GPU only."""
    quantization = getattr(config, "quantization_config", None) or {}
    return isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"


def _shard_bytes(path: Path, target: torch.dtype | None) -> int:
    """What the tensors of a file take."""
    return sum(
        tensor.num_bytes
        if target is None or tensor.dtype not in _FLOATS
        else math.prod(tensor.shape) * target.itemsize
        for tensor in stored_in(path).values()
    )


def _built_bytes(config: Any, dtype: torch.dtype | None) -> int:
    """What a model of this config takes, built on the device that has no memory."""
    config = copy.deepcopy(config)
    target = _target(config, dtype) or torch.float32
    with torch.device("meta"):
        return _tensor_bytes(auto_class(config).from_config(config, dtype=target))


def _tensor_bytes(model: Any) -> int:
    tensors = {id(tensor): tensor.nbytes for tensor in [*model.parameters(), *model.buffers()]}
    return sum(tensors.values())
