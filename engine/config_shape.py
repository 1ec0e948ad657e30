"""The sizes of a model by its config alone: the model is built and run without memory."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig

from agentcache.engine.describe import describe, text_config
from agentcache.engine.source import find_source, first_line, ways_to_name
from agentcache.engine.weights import auto_class
from agentcache.errors import ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from agentcache.types import ModelShape

__all__ = ["shape_by_config"]

_fx_config: Any = import_module("torch.fx.experimental._config")  # its settings have no types


def shape_by_config(name: str | Path) -> ModelShape:
    """The shape that a model has once it is loaded, from its config: no weights are needed.

    name: a config file, a folder with one, an embedded model, or a Hub id that was downloaded.
    Sizes in bytes are those of the dtype the config names, float32 if none. A family that is not
    proven is described too, since nothing is computed. Raises ModelNotFound, UnsupportedModel.
    """
    config = _config(name)
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(
                config, dtype=_dtype(config), attn_implementation="eager"
            )
        # of the ways to run experts this one does not ask which of them were chosen
        model.set_experts_implementation("batched_mm")
        # nor can sparse attention tell how much it selects: all of it, as in any short run
        with _fx_config.patch(meta_nonzero_assume_all_nonzero=True):
            return describe(model.eval(), unproven=True).shape
    except (NotImplementedError, RuntimeError, ValueError, KeyError) as error:
        raise UnsupportedModel(
            f"the sizes of this {text_config(config).model_type} model cannot be found without its "
            f"weights: {first_line(error)}; take the config of another model, or a preset"
        ) from error


def _config(name: str | Path) -> Any:
    is_config = Path(name).suffix == ".json" and Path(name).expanduser().is_file()
    try:
        if is_config:
            return AutoConfig.from_pretrained(str(Path(name).expanduser()))
        source = find_source(name)
        if source.folder is None:
            raise FileNotFoundError("it has not been downloaded")
        options = {} if source.gguf is None else {"gguf_file": source.gguf}
        return AutoConfig.from_pretrained(str(source.folder), local_files_only=True, **options)
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no config of a model at {str(name)!r}: {first_line(error)}; give a config.json, or "
            f"{ways_to_name().removeprefix('give ')}"
        ) from error


def _dtype(config: Any) -> torch.dtype:
    """Of the weights, as a model that is loaded would have them."""
    found = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    if isinstance(found, str):
        found = getattr(torch, found, None)
    return found if isinstance(found, torch.dtype) else torch.float32
