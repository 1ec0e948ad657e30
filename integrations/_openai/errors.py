"""Errors of this package as an OpenAI-form answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentcache import (
    InvalidRequest,
    ModelNotFound,
    PromptTooLong,
    RequestCancelled,
    RequestTooLarge,
    RuntimeClosed,
    SessionError,
    UnsupportedOption,
)

__all__ = ["ErrorShape", "error_of"]


@dataclass(frozen=True, slots=True)
class ErrorShape:
    """An error by OpenAI's names, and the status of an HTTP answer with it."""

    status: int
    type: str
    message: str
    param: str | None = None
    code: str | None = None

    def body(self) -> dict[str, Any]:
        """The answer's JSON."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


_SHAPES: tuple[tuple[tuple[type[Exception], ...], int, str, str | None], ...] = (
    ((PromptTooLong, RequestTooLarge), 400, "invalid_request_error", "context_length_exceeded"),
    ((UnsupportedOption,), 400, "invalid_request_error", "unsupported_parameter"),
    ((InvalidRequest,), 400, "invalid_request_error", None),
    ((ModelNotFound,), 404, "invalid_request_error", "model_not_found"),
    ((SessionError,), 409, "invalid_request_error", "session_conflict"),
    ((RequestCancelled,), 499, "invalid_request_error", "cancelled"),
    ((RuntimeClosed,), 503, "server_error", "closed"),
)
"""Kinds of errors, the first that fits counts: status, type, code."""


def error_of(error: Exception) -> ErrorShape:
    """The answer to a call that failed; 500 for what is no error of the caller's."""
    param = getattr(error, "param", None)
    for kinds, status, type_, code in _SHAPES:
        if isinstance(error, kinds):
            if code == "context_length_exceeded":
                param = "messages"
            return ErrorShape(status, type_, str(error), param, code)
    return ErrorShape(500, "server_error", str(error) or type(error).__name__)
