"""Named weights on their way from a loaded model into layers: each has to be there, and be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

__all__ = ["Weights"]


@dataclass(slots=True)
class Weights:
    """Weights by name, under a prefix. What `get` has handed out counts as used.

    >>> import torch
    >>> weights = Weights({"model.norm.weight": torch.ones(4)})
    >>> weights.at("model").get("norm.weight", 4).shape
    torch.Size([4])
    """

    tensors: Mapping[str, Tensor]
    prefix: str = ""
    used: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, model: Any) -> Weights:
        """Those of a loaded causal LM, under the names they have in a model of text alone.

        Of a model that also sees they are its text model's and its head's. What its towers for
        pictures hold is left out: no text goes through it.
        """
        tensors = dict(model.state_dict())
        if model.config.get_text_config(decoder=True) is model.config:
            return cls(tensors)
        text = model.get_decoder()
        prefix = next(name for name, module in model.named_modules() if module is text) + "."
        of_text = {
            "model." + name.removeprefix(prefix): tensor
            for name, tensor in tensors.items()
            if name.startswith(prefix)
        }
        head = {name: tensor for name, tensor in tensors.items() if name.startswith("lm_head.")}
        return cls(of_text | head)

    def at(self, part: str | int) -> Weights:
        """Those whose names begin with `part` and a dot."""
        return Weights(self.tensors, f"{self.prefix}{part}.", self.used)

    def has(self, name: str) -> bool:
        """Whether there is a weight of this name."""
        return self.prefix + name in self.tensors

    def get(self, name: str, *shape: int) -> Tensor:
        """One weight. Raises ModelError where it is missing or has another shape."""
        full = self.prefix + name
        tensor = self.tensors.get(full)
        if tensor is None:
            raise ModelError(f"the model has no weight {full!r}, which its description needs")
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"weight {full!r} has the shape {tuple(tensor.shape)}, but by the config and the "
                f"description of this family it is {shape}"
            )
        self.used.add(full)
        return tensor.detach()

    def maybe(self, name: str, *shape: int) -> Tensor | None:
        """One weight, or None where there is none of this name."""
        return self.get(name, *shape) if self.has(name) else None

    def check_all_used(self) -> None:
        """Raise ModelError for a weight that no layer has taken."""
        left = sorted(set(self.tensors) - self.used)
        if left:
            raise ModelError(
                f"{len(left)} weights are no part of the description of this family, among them "
                f"{left[0]!r}"
            )
