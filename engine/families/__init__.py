"""Model families: layer kinds, what is replaced, traps. What is not here is not proven."""

from __future__ import annotations

from agentcache.engine.families import attention, convolution, delta, hymba, scan, sidecars, ssd
from agentcache.engine.families.base import Family

__all__ = ["FAMILIES", "Family", "unproven_family"]

FAMILIES: dict[str, Family] = {
    model_type: family
    for group in (attention, convolution, delta, hymba, scan, sidecars, ssd)
    for family in group.FAMILIES
    for model_type in family.model_types
}
"""By the `model_type` of the text model's config."""


def unproven_family(model_type: str) -> Family:
    """What is assumed of a family nobody has proven: its code is as good as its cache makes it.

    Nothing is replaced, a pass is cut wherever a state is to be kept, sequences decode one by one.
    """
    return Family((model_type,), mixer="mamba2", ragged=False)  # the mixer: for estimates of cost
