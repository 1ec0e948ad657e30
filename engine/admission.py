"""Which models are admitted: what is proven, what only a flag lets in, what cannot be right."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from agentcache.engine.families import FAMILIES, unproven_family
from agentcache.engine.source import first_line
from agentcache.errors import UnsupportedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.engine.families import Family

__all__ = ["Admission", "admit", "code_of_others"]


@dataclass(frozen=True, slots=True)
class Admission:
    """The family a model is run as. doubt: why it is not proven that warm equals cold, if so."""

    family: Family
    doubt: str | None = None


def admit(config: Any, *, unproven: bool = False) -> Admission:
    """Admit a model by the config of its text model.

    unproven: let in what has not been proven too, with nothing assumed of how its sequences may
    share passes. What is known to be wrong stays out.

    Raises UnsupportedModel with the reason, and where there is one, the remedy.
    """
    model_type = config.model_type
    family = FAMILIES.get(model_type)
    wrong = None if family is None else family.refuses(config)
    if wrong is not None:
        raise UnsupportedModel(f"this {model_type} model is not admitted: {wrong}")
    if family is None:
        family = unproven_family(model_type)
        doubt: str | None = "restoring its state has not been proven exact"
    else:
        doubt = _rope(config)
    if doubt is None:
        return Admission(family)
    if not unproven:
        raise UnsupportedModel(
            f"model type {model_type!r} is not admitted: {doubt}; unproven=True (--unproven) "
            "admits it all the same, without the promise that an answer from the cache is the "
            f"answer without one; proven are: {', '.join(sorted(FAMILIES))}"
        )
    return Admission(replace(family, ragged=False), doubt)


@contextmanager
def code_of_others(model_type: str, doubt: str | None) -> Iterator[None]:
    """Turn whatever the code of a model that is in doubt raises into UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:  # nobody has looked at that code: it may raise anything
        if doubt is None:
            raise
        raise UnsupportedModel(
            f"this {model_type} model cannot work, with unproven=True neither: "
            f"{type(error).__name__}: {first_line(error)}; take another model"
        ) from error


_CHANGING_ROPE = ("dynamic", "longrope")


def _rope(config: Any) -> str | None:
    """Positions that are scaled by the longest of a whole batch depend on who shares the pass."""
    given = getattr(config, "rope_parameters", None) or {}
    kinds = [given, *(value for value in given.values() if isinstance(value, dict))]
    found = {kind.get("rope_type") for kind in kinds}.intersection(_CHANGING_ROPE)
    if not found:
        return None
    return f"rope of type {found.pop()!r} depends on the longest sequence of a pass"
