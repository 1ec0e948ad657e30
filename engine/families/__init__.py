"""Model families, one file each: layer kinds, state shapes, traps. What is not here is refused."""

from __future__ import annotations

from agentcache.engine.families.base import Family
from agentcache.engine.families.granitemoehybrid import GRANITE_MOE_HYBRID
from agentcache.errors import UnsupportedModel

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GRANITE_MOE_HYBRID,)}


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`. Raises UnsupportedModel, naming what is supported."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"model type {model_type!r} is not admitted: restoring its state has not been proven "
            f"exact; supported: {', '.join(sorted(FAMILIES))}"
        )
    return family
