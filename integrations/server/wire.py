"""What all bodies have in common: how they are read, and that unknown fields are errors."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, model_validator

from agentcache.integrations._openai import MAX_DEPTH
from agentcache.integrations.server.errors import ApiError, bad_field

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Wire", "read_json", "without_nulls"]

M = TypeVar("M", bound="Wire")


class Wire(BaseModel):
    """A body, or a part of one; null means not given."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return without_nulls(values) if isinstance(values, dict) else values


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of an object's fields."""
    return {key: value for key, value in values.items() if value is not None}


def read_json(raw: bytes, model: type[M]) -> tuple[M, dict[str, Any]]:
    """A body from its bytes: checked, and as it came. Raises ApiError 400, pydantic's error."""
    try:
        values = json.loads(raw, parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deep; flatten it") from error
    except ValueError as error:
        raise ApiError(400, f"the body is no JSON: {error}") from error
    if not isinstance(values, dict):
        raise ApiError(400, f"the body is a {type(values).__name__}; send a JSON object")
    for name, value in values.items():
        if _is_deep(value):
            raise bad_field(name, f"nested deeper than {MAX_DEPTH} levels; flatten it")
    return model.model_validate(values), values


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _is_deep(value: Any) -> bool:
    """Whether lists and objects are nested deeper than the limit."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            if isinstance(outer, (dict, list))
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return False
    return any(isinstance(inner, (dict, list)) for inner in level)
