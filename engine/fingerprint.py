"""What a model is known by: everything a cached state depends on besides its tokens."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.engine.tokenizer import Tokenizer
    from agentcache.types import WeightFormat

__all__ = ["config_text", "digest_of", "fingerprint", "model_digest", "remember_digest"]


def fingerprint(model: Any, tokenizer: Tokenizer, weight_format: WeightFormat = "unchanged") -> str:
    """Hex digest of a model's config and weights, what they are rounded to, and the tokenizer with
    its template."""
    return digest_of([weight_format, model_digest(model), tokenizer.fingerprint])


def model_digest(model: Any) -> str:
    """Hex digest of a model's config and of its weights with their names, shapes and dtypes.

    model: of transformers, or one mapped from its files.
    """
    known: str | None = vars(model).get(_NAME)
    return digest_of(_parts(model)) if known is None else known


def remember_digest(model: Any) -> str:
    """The digest of a model whose weights change no more, which is not computed again."""
    digest: str = vars(model).setdefault(_NAME, model_digest(model))
    return digest


_NAME = "agentcache_digest"


def _parts(model: Any) -> Iterable[str | memoryview]:
    yield config_text(model.config)
    for name, tensor in sorted(model.state_dict().items()):
        yield f"{name} {tuple(tensor.shape)} {tensor.dtype}"
        yield tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().data


def config_text(config: Any) -> str:
    """What a config says of a model, wherever that was loaded from, as JSON."""
    said = {name: value for name, value in config.to_dict().items() if name != "_name_or_path"}
    return json.dumps(said, sort_keys=True, default=str)


def digest_of(parts: Iterable[str | memoryview]) -> str:
    """Hex sha256 of several parts, each length-prefixed."""
    out = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        out.update(len(data).to_bytes(8, "little"))
        out.update(data)
    return out.hexdigest()
