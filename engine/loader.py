"""Models by name: embedded ones, local folders, GGUF files, Hub ids; with an adapter if asked."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GgufConfig
from transformers.utils import logging as hf_logging

from agentcache.engine.adapter import find_adapter
from agentcache.engine.admission import admit
from agentcache.engine.describe import text_config
from agentcache.engine.embedded import EMBEDDED_NAMES
from agentcache.engine.machine import available_bytes
from agentcache.engine.proofs import find_proven, remember_subject, subject_of
from agentcache.engine.source import find_source, first_line, hub_hint, ways_to_name
from agentcache.engine.weights import auto_class, check_fits
from agentcache.errors import ModelNotFound, UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentcache.engine.source import Source
    from agentcache.types import BackendName

__all__ = ["LoadedModel", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model, or one mapped from its files, and its tokenizer. adapter: digest of
    what was merged into it."""

    model: Any
    tokenizer: Any
    adapter: str | None = None


def load_model(
    name: str | Path,
    dtype: torch.dtype | None = None,
    *,
    adapter: str | Path | None = None,
    cache_bytes: int = 0,
    unproven: bool = False,
    backend: BackendName = "transformers",
    device: str = "cpu",
) -> LoadedModel:
    """Load an embedded model, a folder, a GGUF file, or a Hub id.

    dtype: of the weights; by default what the config says, else float32, as always for GGUF.
    adapter: folder or Hub id of a LoRA adapter to merge into the weights. cache_bytes: what a cache
    will take beside them. unproven: load what has not been proven too. backend: what is to compute
    the model; where that may be the native one, and it is known to be right, what comes is a
    `MappedModel`. device: where it goes once it is loaded; a cache takes none of the memory here
    then. The network is reached for only where a Hub id's files are not here and HF_HUB_OFFLINE is
    not set.

    Raises, before any weight is read: ModelNotFound, naming what was tried; UnsupportedModel;
    UnsupportedOption where a package or the device is missing; ModelTooLarge where weights and
    cache do not fit into memory. After that ModelNotFound for damaged files, and ModelError for an
    adapter of another model.
    """
    _check_device(device)
    is_here = torch.device(device).type == "cpu"
    source = find_source(name)
    if source.gguf is not None:
        dtype = dtype or torch.float32
    try:
        config = source.load(AutoConfig.from_pretrained)
    except (OSError, ValueError) as error:
        remedy = hub_hint() + ", or " if source.is_hub else ""
        raise ModelNotFound(
            f"no model at {str(name)!r}: {first_line(error)}; {remedy}{ways_to_name()}"
        ) from error
    admission = admit(text_config(config), unproven=unproven)
    merged = None if adapter is None else find_adapter(adapter)
    quiet = _without_bar() if str(name) in EMBEDDED_NAMES else nullcontext()
    try:
        check_fits(source, config, dtype, cache_bytes if is_here else 0, available_bytes())
        is_plain = is_here and merged is None and admission.doubt is None
        with quiet:
            if is_plain and backend != "transformers":
                model = _proven_weights(source, config, dtype)
            else:
                model = _weights(source, config, dtype)
        tokenizer = source.load(AutoTokenizer.from_pretrained)
    except (OSError, ValueError, SafetensorError) as error:
        remedy = "; " + hub_hint() if source.is_hub else ""
        raise ModelNotFound(
            f"the model at {str(name)!r} cannot be loaded: {first_line(error)}{remedy}; complete "
            "the folder or download it again"
        ) from error
    digest = None
    if merged is not None:
        model, digest = merged.merge(model), merged.digest()
    return LoadedModel(model if is_here else model.to(device), tokenizer, digest)


def _check_device(device: str) -> None:
    """Raise UnsupportedOption for one that is not there."""
    try:
        if torch.empty(0, device=device).device.type != "meta":
            return
        reason = "it has no memory"
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = first_line(error)
    raise UnsupportedOption(f"device={device!r} cannot be used: {reason}")


def _proven_weights(source: Source, config: Any, dtype: torch.dtype | None) -> Any:
    """The model without its code, where there is a proof of it; else one to be written about."""
    stock = partial(_weights, source, config, dtype)
    subject = subject_of(source, config, dtype)
    if subject is None:
        return stock()
    model = find_proven(subject, stock)
    if model is None:
        model = stock()
        remember_subject(model, subject)
    return model


def _weights(source: Source, config: Any, dtype: torch.dtype | None) -> Any:
    options: dict[str, Any] = {"config": config, "dtype": dtype or "auto"}
    if source.gguf is not None:
        # packed weights are computed with by modules that our mixers do not know
        options["quantization_config"] = GgufConfig(dequantize=True)
    return source.load(auto_class(config).from_pretrained, **options)


@contextmanager
def _without_bar() -> Iterator[None]:
    """No progress bar for a model that is there in a moment."""
    was_enabled = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            hf_logging.enable_progress_bar()
