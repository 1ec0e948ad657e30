"""Models by name: embedded ones, local folders, Hub ids that lie in the local cache."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as hf_logging

from agentcache.engine.describe import text_config
from agentcache.engine.families import family_of
from agentcache.engine.tiny_hybrid import EMBEDDED_MODELS, hybrid_path
from agentcache.errors import ModelNotFound

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentcache.engine.tokenizer import Tokenizer

__all__ = ["LoadedModel", "fingerprint", "load_model"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A transformers model and its tokenizer."""

    model: Any
    tokenizer: Any


def load_model(name: str | Path, dtype: torch.dtype | None = None) -> LoadedModel:
    """Load an embedded model, a folder, or a Hub id.

    dtype: of the weights; by default what the config says, else float32. Raises ModelNotFound,
    naming what was tried; UnsupportedModel before any weight is read.
    """
    where = str(hybrid_path(str(name))) if str(name) in EMBEDDED_MODELS else str(name)
    try:
        config = AutoConfig.from_pretrained(where)
    except (OSError, ValueError) as error:
        known = ", ".join(sorted(EMBEDDED_MODELS))
        raise ModelNotFound(
            f"no model at {name!r}: {_first_line(error)}; give an embedded name ({known}), a "
            "folder with config.json and weights, or a Hub id that has been downloaded"
        ) from error
    family_of(text_config(config).model_type)
    quiet = _without_bar() if str(name) in EMBEDDED_MODELS else nullcontext()
    try:
        with quiet:
            model = AutoModelForCausalLM.from_pretrained(where, dtype=dtype or "auto")
        tokenizer = AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"the model at {name!r} cannot be loaded: {_first_line(error)}; complete the folder or "
            "download it again"
        ) from error
    return LoadedModel(model, tokenizer)


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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def fingerprint(model: Any, tokenizer: Tokenizer) -> str:
    """Hex digest of everything a cached state depends on besides its tokens.

    Weights with their names, shapes and dtypes, the config, and the tokenizer with its template;
    each part is length-prefixed.
    """
    out = hashlib.sha256()

    def add(data: bytes) -> None:
        out.update(len(data).to_bytes(8, "little"))
        out.update(data)

    add(json.dumps(model.config.to_dict(), sort_keys=True, default=str).encode())
    add(tokenizer.fingerprint.encode())
    for name, tensor in sorted(model.state_dict().items()):
        add(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        add(tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data.tobytes())
    return out.hexdigest()
