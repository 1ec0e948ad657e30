"""Models whose weights lie in mapped files, without the code that computes them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from safetensors import safe_open
from transformers import GenerationConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from agentcache.engine.weight_files import Stored

__all__ = ["MappedModel", "Origin", "map_model"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a weight comes from: its name in the files, and the dtype it is taken as."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class MappedModel:
    """What a native backend and a runtime ask of a transformers model, and nothing that computes.

    tensors: by the names they have in that model. stock: loads that model.
    """

    config: Any
    generation_config: Any
    dtype: torch.dtype
    tensors: Mapping[str, Tensor]
    stock: Callable[[], Any]
    device: ClassVar[torch.device] = torch.device("cpu")

    def state_dict(self) -> Mapping[str, Tensor]:
        """The weights by name; a tied one is there under each of its names."""
        return self.tensors

    def parameters(self) -> Iterator[Tensor]:
        """The weights, a tied one once."""
        return iter({id(tensor): tensor for tensor in self.tensors.values()}.values())


def map_model(
    folder: Path,
    config: Any,
    dtype: torch.dtype,
    stored: Mapping[str, Stored],
    origins: Mapping[str, Origin],
    stock: Callable[[], Any],
) -> MappedModel:
    """Map a folder's weights; those of another dtype than in their file are copied.

    Raises OSError, ValueError, KeyError or SafetensorError where the files are not as expected.
    """
    config = deepcopy(config)
    config.dtype, config.name_or_path = dtype, str(folder)  # as loading by transformers leaves it
    taken: dict[Origin, Tensor] = {}
    wanted = set(origins.values())
    for file in {stored[origin.name].file for origin in wanted}:
        with safe_open(file, framework="pt") as opened:
            for origin in wanted:
                if stored[origin.name].file == file:
                    taken[origin] = opened.get_tensor(origin.name).to(origin.dtype)
    tensors = {name: taken[origin] for name, origin in origins.items()}
    return MappedModel(config, _generation_config(folder), dtype, tensors, stock)


def _generation_config(folder: Path) -> Any:
    """That of a folder, else what its model's config says."""
    try:
        return GenerationConfig.from_pretrained(str(folder), local_files_only=True)
    except OSError:
        return GenerationConfig.from_pretrained(
            str(folder),
            config_file_name="config.json",
            _from_model_config=True,
            local_files_only=True,
        )
