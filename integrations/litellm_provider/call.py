"""One call: from litellm's arguments to a turn in the making, and to the reply as a whole."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import litellm
from litellm import exceptions
from litellm.types.utils import (
    ChatCompletionMessageToolCall,
    ChoiceLogprobs,
    Choices,
    Function,
    Message,
    Usage,
)

from agentcache import AgentCacheError, RequestCancelled
from agentcache.integrations._openai import (
    InvalidField,
    error_of,
    finish_reason_of,
    logprobs_of,
    read_call,
    read_session_id,
    usage_of,
)
from agentcache.integrations.litellm_provider.models import PROVIDER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from litellm.types.utils import ModelResponse

    from agentcache import Runtime, TurnStream
    from agentcache.integrations._openai import Call, ReplyForm
    from agentcache.integrations.litellm_provider.models import Model, Use

__all__ = ["Running", "begin", "translated"]

_IGNORED = ("extra_body", "extra_headers", "max_retries")
"""What litellm itself has dealt with."""


def begin(model: Model, kwargs: Mapping[str, Any]) -> Running:
    """Queue a call. Everything that is wrong with the request is found here."""
    given, extra = kwargs["optional_params"], kwargs["optional_params"].get("extra_body")
    if not isinstance(extra or {}, dict):
        raise InvalidField("extra_body", f"is of type {type(extra).__name__}; give an object")
    settings = kwargs.get("litellm_params") or {}
    id = _session_id(given, extra or {}, settings, kwargs.get("headers") or {})
    messages = [_plain(message) for message in kwargs["messages"]]
    call = read_call(
        {**given, **(extra or {}), "messages": messages},
        call_grammar=model.call_grammar,
        defaults=model.defaults,
        ignored=_IGNORED,
        drop=litellm.drop_params is True or settings.get("drop_params") is True,
    )
    runtime, timeout_s = model.runtime(), _seconds(kwargs.get("timeout"))
    use = model.sessions.open(runtime, id)
    try:
        stream = use.session.complete(call.messages, tools=call.tools, stream=True, **call.options)
    except BaseException:
        use.end()
        raise
    return Running(model.name, runtime, call, stream, use, timeout_s)


def _session_id(
    given: Mapping[str, Any],
    extra: Mapping[str, Any],
    settings: Mapping[str, Any],
    headers: Mapping[str, Any],
) -> str | None:
    """The session id of a request, from the first place that has one."""
    received = _inner(_inner(settings, "proxy_server_request"), "headers")
    by_name = {str(k).lower(): v for k, v in [*received.items(), *headers.items()]}
    places = (
        ("session_id", given.get("session_id")),
        ("extra_body.session_id", extra.get("session_id")),
        ("metadata.session_id", _inner(settings, "metadata").get("session_id")),
        ("litellm_session_id", settings.get("litellm_session_id")),
        ("x-session-id", by_name.get("x-session-id")),
        ("prompt_cache_key", given.get("prompt_cache_key")),
    )
    for name, value in places:
        if value is not None:
            return read_session_id(value, name)
    return None


def _inner(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """One of the settings that holds others; nothing where it does not."""
    inner = settings.get(name)
    return inner if isinstance(inner, dict) else {}


def _plain(message: Any) -> Any:
    """A message as a dict: replies come back as litellm's own objects."""
    dump = getattr(message, "model_dump", None)
    return message if dump is None else dump(exclude_none=True, warnings=False)


def _seconds(timeout: Any) -> float | None:
    """A time limit as a number; of httpx's, which has one for each phase, that for reading."""
    limit = getattr(timeout, "read", timeout)
    return min(float(limit), threading.TIMEOUT_MAX) if isinstance(limit, (int, float)) else None


class Running:
    """A call under way. Closing it, or dropping it, before its end stops the work within a step."""

    def __init__(
        self,
        model: str,
        runtime: Runtime,
        call: Call,
        stream: TurnStream,
        use: Use,
        timeout_s: float | None,
    ) -> None:
        self.id = f"chatcmpl-{uuid4()}"
        self.model = model
        self.form: ReplyForm = call.form
        self.stream = stream
        self._runtime = runtime
        self._use = use
        self._timeout_s = timeout_s
        self._is_late = False
        self._timer: threading.Timer | None = None
        if timeout_s is not None:
            # the timer does not keep a call alive that nobody waits for any more
            self._timer = threading.Timer(timeout_s, _expire, [weakref.ref(self)])
            self._timer.daemon = True
            self._timer.start()

    def expire(self) -> None:
        """End the call, whose time is over."""
        self._is_late = True
        self.stream.close()

    def close(self) -> None:
        """Give everything back; a turn that is not over is cancelled. Waits for nothing: event
        loops and the garbage collector call it."""
        if self._timer is not None:
            self._timer.cancel()
        self.stream.close()
        self._use.end()

    def __del__(self) -> None:
        self.close()

    def answer(self, response: ModelResponse) -> ModelResponse:
        """Wait for the reply."""
        try:
            for _ in self.stream:
                pass
            return self._filled(response)
        except AgentCacheError as error:
            raise self.translated(error) from error
        finally:
            self.close()

    async def aanswer(self, response: ModelResponse) -> ModelResponse:
        """The same, for async callers."""
        try:
            async for _ in self.stream:
                pass
            return self._filled(response)
        except AgentCacheError as error:
            raise self.translated(error) from error
        finally:
            self.close()

    def logprobs(self) -> ChoiceLogprobs | None:
        """Those of the finished turn, if they were asked for."""
        told = logprobs_of(self.stream.turn.logprobs, self._runtime.tokenizer)
        return None if told is None else ChoiceLogprobs(**told)

    def fields(self) -> dict[str, Any] | None:
        """What litellm has no name for: texts that begin as tool calls and are none."""
        malformed = self.stream.turn.malformed_calls
        return {"malformed_calls": list(malformed)} if malformed else None

    def translated(self, error: AgentCacheError) -> Exception:
        """An error of the call as litellm's; a cancelled one whose time was over is a timeout."""
        if self._is_late and isinstance(error, RequestCancelled):
            return exceptions.Timeout(
                f"the reply took longer than {self._timeout_s} s; raise timeout or lower "
                "max_tokens",
                model=self.model,
                llm_provider=PROVIDER,
            )
        return translated(error, self.model)

    def _filled(self, response: ModelResponse) -> ModelResponse:
        turn = self.stream.turn
        said = self.form.message(turn)
        message = Message(
            role="assistant",
            content=said["content"] or None if "tool_calls" in said else said["content"],
            reasoning_content=said.get("reasoning_content"),
            tool_calls=[_call(call) for call in said.get("tool_calls", ())] or None,
            provider_specific_fields=self.fields(),
        )
        finish, logprobs = finish_reason_of(turn, said), self.logprobs()
        more: dict[str, Any] = {} if logprobs is None else {"logprobs": logprobs}
        response.choices = [Choices(index=0, finish_reason=finish, message=message, **more)]
        response.id = self.id
        response.model = self.model
        response.usage = Usage(**usage_of(turn.usage))  # type: ignore[attr-defined]
        return response


def _expire(running: weakref.ref[Running]) -> None:
    alive = running()
    if alive is not None:
        alive.expire()


def _call(call: Mapping[str, Any]) -> ChatCompletionMessageToolCall:
    return ChatCompletionMessageToolCall(
        id=call["id"], type="function", function=Function(**call["function"])
    )


def translated(error: AgentCacheError, model: str) -> Exception:
    """An error of this package as litellm's."""
    shape = error_of(error)
    told: dict[str, Any] = {"message": shape.message, "model": model, "llm_provider": PROVIDER}
    if shape.code == "context_length_exceeded":
        return exceptions.ContextWindowExceededError(**told)
    if shape.code == "unsupported_parameter":
        return exceptions.UnsupportedParamsError(**told)
    if shape.status == 404:
        return exceptions.NotFoundError(**told)
    if shape.status == 503:
        return exceptions.ServiceUnavailableError(**told)
    if shape.status in (400, 409):
        return exceptions.BadRequestError(**told, body=shape.body()["error"])
    if shape.status == 499:
        return exceptions.APIError(status_code=499, **told)
    return exceptions.InternalServerError(**told)
