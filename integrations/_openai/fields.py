"""Fields of a request: what is wrong with one, and the checks that hold for any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from agentcache import InvalidRequest, UnsupportedOption

__all__ = [
    "MAX_DEPTH",
    "MAX_ID_BYTES",
    "InvalidField",
    "UnsupportedField",
    "check_value",
    "read_session_id",
]

MAX_DEPTH = 64
"""Values nested deeper are refused: what follows walks them by recursion."""

MAX_ID_BYTES = 256
"""Longest session id, in UTF-8."""

_DOTS = re.compile(r"(^|[/\\])\.\.?($|[/\\])")
"""A step of a path that leads elsewhere."""


class InvalidField(InvalidRequest):
    """A field whose value makes no sense; `param` is its path, as in `messages[3].content`."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


class UnsupportedField(UnsupportedOption):
    """A field of the form that cannot be honoured; `param` is its path."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(f"{param} {problem}")
        self.param = param


def read_session_id(value: Any, param: str) -> str | None:
    """A session id as a request gives it; None where there is none.

    An id is an opaque name. Refused are the empty one, more than MAX_ID_BYTES, control characters,
    lone surrogates, and what reads as a path out of a folder. Raises InvalidField.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidField(param, f"is of type {type(value).__name__}; give a text")
    if not value:
        raise InvalidField(param, "is empty; leave it out for a call without a session")
    size = len(value.encode("utf-8", errors="surrogatepass"))
    if size > MAX_ID_BYTES:
        raise InvalidField(param, f"takes {size} bytes, the limit is {MAX_ID_BYTES}; shorten it")
    if any(not (char.isprintable() or char == " ") for char in value):
        raise InvalidField(param, f"is {value!r}, with characters that cannot be printed")
    if _DOTS.search(value) or value[0] in "/\\":
        raise InvalidField(param, f"is {value!r}, which reads as a path; give a plain name")
    return value


def check_value(value: Any, param: str) -> None:
    """Raise InvalidField for what is no JSON, is nested deeper than MAX_DEPTH, or is no text."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise InvalidField(param, f"is nested deeper than {MAX_DEPTH} levels; flatten it")
        if isinstance(item, str):
            _check_text(item, param)
        elif isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise InvalidField(param, f"has the key {key!r}; keys are texts")
                _check_text(key, param)
                waiting.append((inner, depth + 1))
        elif isinstance(item, (list, tuple)):
            waiting.extend((inner, depth + 1) for inner in item)
        elif item is not None and not isinstance(item, (bool, int, float)):
            raise InvalidField(param, f"holds a {type(item).__name__}; give JSON values only")


def _check_text(text: str, param: str) -> None:
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidField(
            param,
            f"holds a lone surrogate {text[error.start]!r} at character {error.start}, which is no "
            "text; replace it, for example by U+FFFD",
        ) from error
