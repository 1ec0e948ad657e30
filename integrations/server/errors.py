"""Errors as clients know them: status, OpenAI's shape or Anthropic's, and the field at fault."""

from __future__ import annotations

import json
import logging
import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web
from pydantic import ValidationError

from agentcache import (
    AgentCacheError,
    PromptTooLong,
    RequestCancelled,
    RuntimeClosed,
    UnknownTip,
)
from agentcache.integrations._openai import error_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["ApiError", "bad_field", "is_anthropic", "named_by", "translate"]

_LOG = logging.getLogger("agentcache.server")


class ApiError(Exception):
    """An answer that is an error. param: the field at fault, as `messages[3].role`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's word for this sort of error."""
        return _KINDS.get(self.status, "server_error" if self.status >= 500 else _INVALID)

    def to_json(self, *, anthropic: bool = False) -> dict[str, Any]:
        """The body: OpenAI's shape, or Anthropic's with the field beside the message."""
        if anthropic:
            error = {"type": self.anthropic_kind, "message": self.message}
            if self.param is not None:
                error["param"] = self.param
            return {"type": "error", "error": error}
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def anthropic_kind(self) -> str:
        """Anthropic's word for it."""
        return _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else _INVALID)

    def response(self, *, anthropic: bool = False) -> web.Response:
        """As a response."""
        body = json.dumps(self.to_json(anthropic=anthropic))
        response = web.Response(
            status=self.status, text=body, content_type="application/json", headers=self.headers
        )
        if self.headers.get("Connection") == "close":
            response.force_close()
        return response


_INVALID = "invalid_request_error"
_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(request: web.BaseRequest) -> bool:
    """Whether the path is one of Anthropic's."""
    return request.path.startswith("/v1/messages")


def bad_field(param: str, problem: str, *, code: str | None = None) -> ApiError:
    """400 for one field, which the message names as well."""
    return ApiError(400, f"{param}: {problem}", param=param, code=code)


@contextmanager
def named_by(names: Mapping[str, str]) -> Iterator[None]:
    """In the block, errors of fields are told by the names that the request has for them."""
    try:
        yield
    except AgentCacheError as error:
        param = str(getattr(error, "param", None) or "")
        head = _HEAD.match(param)
        if head is None or head[0] not in names:
            raise
        place = names[head[0]] + param[head.end() :]
        raise bad_field(place, str(error).removeprefix(f"{param} ")) from error


_HEAD = re.compile(r"\w+(?:\[\d+\])?")


def translate(error: BaseException) -> ApiError:
    """What a client is told of an error; one that nobody expects is logged, not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ValidationError):
        return _from_validation(error)
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took too long", headers={"x-should-retry": "false"})
    if isinstance(error, web.HTTPException):
        return _from_http(error)
    if isinstance(error, AgentCacheError):
        return _from_ours(error)
    _LOG.error("a request failed", exc_info=error)
    return ApiError(500, "internal error; the server's log says more")


def _from_ours(error: AgentCacheError) -> ApiError:
    shape = error_of(error)
    if shape.status >= 500 and not isinstance(error, RuntimeClosed):
        _LOG.error("a request failed", exc_info=error)
    status, message, param = shape.status, shape.message, shape.param or _param_in(shape.message)
    if isinstance(error, RequestCancelled):
        status = 503  # not by its client, who would not be told
    elif isinstance(error, UnknownTip):
        status, param = 404, "tip"
    elif isinstance(error, PromptTooLong):
        # clients know the error by this beginning
        message = f"This model's maximum context length is {error.limit} tokens: {message}"
    return ApiError(status, message, param=param, code=shape.code)


_NAMED = re.compile(
    r"(?:the chat template refuses )?(message|tool) (\d+)\b|(\w+) (?:is|holds|has) "
)


def _param_in(message: str) -> str | None:
    """The field that one of the runtime's messages begins with."""
    found = _NAMED.match(message)
    if found is None:
        return None
    if found[1] is not None:
        return f"{found[1]}s[{found[2]}]"
    return _WIRE_NAMES.get(found[3])


_WIRE_NAMES = {"max_new_tokens": "max_tokens", "json_schema": "response_format", "stop": "stop"}
"""Options of a call by the fields they come from."""


def _from_http(error: web.HTTPException) -> ApiError:
    """aiohttp's own: no such path, wrong method, too large."""
    headers = {name: error.headers[name] for name in ("Allow",) if name in error.headers}
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return ApiError(413, f"the request body is too large: {error.text}", headers=headers)
    return ApiError(error.status, f"{error.reason}", headers=headers)


def _from_validation(error: ValidationError) -> ApiError:
    """The first fault and its place; of the forms its field may have, what fits furthest."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    rivals = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    known = [fault for fault in rivals if fault["type"] != "extra_forbidden"]
    fault = max(known or rivals, key=lambda fault: len(_place(fault["loc"])))
    param, problem = _place(fault["loc"]), fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        problem = "not a field that is supported; leave it out"
    return bad_field(param, problem) if param else ApiError(400, problem)


def _place(loc: Sequence[int | str]) -> str:
    """`("messages", 3, "content", "str")` as `messages[3].content`; names of types are left out."""
    place = ""
    for part in loc:
        if isinstance(part, int):
            place += f"[{part}]"
        elif not _TYPE_NAME.fullmatch(part):
            place += f".{part}" if place else part
    return place


_TYPE_NAME = re.compile(r"(?:str|int|float|bool|list|dict|constrained-\w+|[A-Z]\w*|\w+\[.*\]?.*)")
"""What pydantic puts into a place for the member of a union that it tried."""
