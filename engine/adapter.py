"""LoRA adapters: merged into a model's weights before anything else sees them."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from huggingface_hub import is_offline_mode, snapshot_download
from safetensors import SafetensorError

from agentcache.engine.source import first_line, hub_hint, is_hub_id
from agentcache.errors import ModelError, ModelNotFound, UnsupportedOption

__all__ = ["Adapter", "find_adapter"]

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A folder with a LoRA adapter as peft saves it."""

    folder: Path

    def digest(self) -> str:
        """Hex digest of its config and weights, each part length-prefixed."""
        out = hashlib.sha256()
        for name in (_CONFIG, *_WEIGHTS):
            path = self.folder / name
            data = path.read_bytes() if path.exists() else b""
            out.update(len(data).to_bytes(8, "little"))
            out.update(data)
        return out.hexdigest()

    def merge(self, model: Any) -> Any:
        """The model with this adapter added to its weights.

        Raises ModelError where the adapter was made for another model: every weight of it has to
        find its place, and every place a weight.
        """
        peft = import_module("peft")
        try:
            with warnings.catch_warnings():
                # peft asks a model for a property that transformers has renamed
                warnings.filterwarnings("ignore", ".*is_gradient_checkpointing", FutureWarning)
                config = peft.PeftConfig.from_pretrained(str(self.folder))
                adapted = peft.get_peft_model(model, config)
            loaded = peft.load_peft_weights(str(self.folder), device="cpu")
            result = peft.set_peft_model_state_dict(adapted, loaded)
            unfit = [*result.unexpected_keys, *filter(_is_adapters, result.missing_keys)]
            if unfit:
                raise ValueError(f"{len(unfit)} weights do not match, among them {unfit[0]}")
            return adapted.merge_and_unload(safe_merge=True)
        except (OSError, RuntimeError, ValueError, SafetensorError) as error:
            raise ModelError(
                f"the adapter at {str(self.folder)!r} does not fit this model: "
                f"{first_line(error)}; take the model it was trained on"
            ) from error


def find_adapter(name: str | Path) -> Adapter:
    """An adapter by its folder or Hub id.

    Raises ModelNotFound, and UnsupportedOption for one that cannot be merged or where peft is
    missing.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir() and is_hub_id(name):
        folder = _from_hub(str(name))
    try:
        config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFound(
            f"no adapter at {str(name)!r}: {first_line(error)}; give a folder with {_CONFIG} and "
            "weights, as peft saves it, or a Hub id"
        ) from error
    kind = config.get("peft_type")
    if kind != "LORA" or config.get("alora_invocation_tokens"):
        kind = "activated LoRA" if kind == "LORA" else kind
        raise UnsupportedOption(
            f"the adapter at {str(name)!r} is of type {kind!r}, which cannot be merged into the "
            "weights; give one of type LORA"
        )
    if find_spec("peft") is None:
        raise UnsupportedOption("adapters need peft; pip install agentcache[adapters]")
    if not any((folder / weights).is_file() for weights in _WEIGHTS):
        raise ModelNotFound(
            f"the adapter at {str(name)!r} has no weights; complete the folder with {_WEIGHTS[0]}"
        )
    return Adapter(folder)


def _is_adapters(key: str) -> bool:
    """Whether a key is the adapter's, not the model's: peft files it under the adapter's name."""
    return ".default" in key


def _from_hub(name: str) -> Path:
    """The folder of an adapter's files, downloaded only if they are not here."""
    wanted = [_CONFIG, *_WEIGHTS]
    try:
        here = Path(snapshot_download(name, allow_patterns=wanted, local_files_only=True))
        if is_offline_mode() or any((here / weights).exists() for weights in _WEIGHTS):
            return here
    except OSError as error:
        if is_offline_mode():
            raise _not_on_hub(name, error) from error
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except OSError as error:
        raise _not_on_hub(name, error) from error


def _not_on_hub(name: str, error: OSError) -> ModelNotFound:
    return ModelNotFound(f"no adapter at {name!r}: {first_line(error)}; {hub_hint()}")
