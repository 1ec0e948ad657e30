"""Model families: layer kinds, what is replaced, traps. What is not here is refused."""

from __future__ import annotations

from agentcache.engine.families import attention, convolution, delta, hymba, scan, sidecars, ssd
from agentcache.engine.families.base import Family
from agentcache.errors import UnsupportedModel

__all__ = ["FAMILIES", "Family", "family_of"]

FAMILIES: dict[str, Family] = {
    model_type: family
    for group in (attention, convolution, delta, hymba, scan, sidecars, ssd)
    for family in group.FAMILIES
    for model_type in family.model_types
}
"""By the `model_type` of the text model's config."""


def family_of(model_type: str) -> Family:
    """The family of a config's `model_type`. Raises UnsupportedModel, naming what is supported."""
    family = FAMILIES.get(model_type)
    if family is None:
        raise UnsupportedModel(
            f"model type {model_type!r} is not admitted: restoring its state has not been proven "
            f"exact; supported: {', '.join(sorted(FAMILIES))}"
        )
    return family
