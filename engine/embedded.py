"""The models that come with the package, by name."""

from __future__ import annotations

from pathlib import Path

from agentcache.engine.tiny_hybrid import EMBEDDED_MODELS, hybrid_path

__all__ = ["AGENT_FOLDER", "EMBEDDED_NAMES", "RANDOM_NAMES", "embedded_folder"]

AGENT_FOLDER = Path(__file__).with_name("assets") / "tiny-agent"
"""Config, trained weights, tokenizer, template and card of `tiny-agent`, as they are shipped."""

RANDOM_NAMES = frozenset(EMBEDDED_MODELS)
"""Those whose weights follow from a seed: they compute honestly and answer noise."""

EMBEDDED_NAMES = (*sorted({*EMBEDDED_MODELS, "tiny-agent"}),)


def embedded_folder(name: str) -> Path:
    """The folder of an embedded model, for `from_pretrained`; those of a seed are built first.

    Raises ModelNotFound for a name not in `EMBEDDED_NAMES`, ModelError if a folder cannot be
    written.
    """
    return AGENT_FOLDER if name == "tiny-agent" else hybrid_path(name)
