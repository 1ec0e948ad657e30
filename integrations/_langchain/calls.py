"""One call of the chat model: its arguments in a session's terms, and its reply in LangChain's."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.outputs import ChatGenerationChunk

from agentcache import InvalidRequest, RequestCancelled
from agentcache.integrations._langchain.grammar import reply_grammar
from agentcache.integrations._langchain.messages import (
    call_chunk,
    digests,
    parsed_calls,
    usage_metadata,
)
from agentcache.integrations._langchain.sessions import Place, place_of

if TYPE_CHECKING:
    from langchain_core.messages import BaseMessage

    from agentcache import TokenLogprob, Turn, TurnStream
    from agentcache.integrations._langchain.grammar import ReplyForms
    from agentcache.integrations._langchain.reading import MessageReader, ToolReader
    from agentcache.integrations._langchain.sessions import Visit

__all__ = [
    "OPTIONS",
    "Call",
    "Pieces",
    "Readers",
    "abegun",
    "afinish",
    "begun",
    "finish",
    "make_call",
    "reply_of",
]

OPTIONS = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logprobs", "top_logprobs", "exact", "verify"),
)
"""Fields of the model and arguments of its calls that a session's calls take under the same name.
"""

_NAMES = {
    **{name: name for name in (*OPTIONS, "stop", "json_schema", "regex", "lark")},
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_new_tokens"), "max_new_tokens"),
}
_OWN = frozenset(
    {
        *("session_id", "thread_id", "timeout", "model", "stream"),
        *("tools", "tool_choice", "strict", "parallel_tool_calls", "response_format"),
    }
)
_GRAMMARS = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class Readers:
    """What a chat model's calls are read with."""

    messages: MessageReader
    tools: ToolReader


@dataclass(frozen=True, slots=True)
class Call:
    """A call, ready to be made.

    given: digests of the messages, the first `lead` of the system. decode: ids to text.
    """

    model_name: str
    messages: Sequence[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    place: Place
    given: tuple[int, ...]
    lead: int
    timeout: float | None
    decode: Callable[[Sequence[int]], str]


def make_call(
    model_name: str,
    messages: Sequence[BaseMessage],
    arguments: Mapping[str, Any],
    readers: Readers,
    forms: Callable[[], ReplyForms],
    decode: Callable[[Sequence[int]], str],
) -> Call:
    """Read a call. Raises InvalidRequest for messages or arguments that make no sense."""
    for name in arguments:
        if name not in _OWN and name not in _NAMES:
            known = ", ".join(sorted(_OWN | _NAMES.keys()))
            raise InvalidRequest(f"unknown argument {name!r} of the chat model; there are {known}")
    if arguments.get("model", model_name) != model_name:
        raise InvalidRequest(
            f"the call asks for the model {arguments['model']!r}, this one is {model_name!r}; "
            "make a chat model for each"
        )
    place = place_of(arguments.get("session_id"), arguments.get("thread_id"))
    read = readers.messages.read(place.key, messages)
    tools = [_schema_of_tool(tool, readers) for tool in arguments.get("tools") or ()]
    return Call(
        model_name=model_name,
        messages=read.messages,
        tools=tools or None,
        options=_options(arguments, tools, forms),
        place=place,
        given=read.digests,
        lead=read.lead,
        timeout=arguments.get("timeout"),
        decode=decode,
    )


def _schema_of_tool(tool: Any, readers: Readers) -> dict[str, Any]:
    schema = readers.tools.schema(tool)
    if not isinstance(schema.get("function"), Mapping):
        raise InvalidRequest(
            f"the tool {schema!r:.80} is no function; tools of a provider cannot run here"
        )
    return schema


def _options(
    arguments: Mapping[str, Any], tools: list[dict[str, Any]], forms: Callable[[], ReplyForms]
) -> dict[str, Any]:
    out = {
        _NAMES[name]: value
        for name, value in arguments.items()
        if name in _NAMES and value is not None
    }
    choice, strict = arguments.get("tool_choice"), bool(arguments.get("strict"))
    schema = _schema_of(arguments.get("response_format"))
    if choice in (None, "auto", False) and schema is None and not (strict and tools):
        return out
    grammar = reply_grammar(
        forms(),
        tools,
        tool_choice=choice,
        schema=schema,
        strict=strict,
        parallel=bool(arguments.get("parallel_tool_calls")),
    )
    if grammar is not None:
        if any(name in out for name in _GRAMMARS):
            raise InvalidRequest(
                "a grammar of the caller's cannot stand beside tool_choice, strict or "
                "response_format; leave one of them out"
            )
        out["lark"] = grammar
    return out


def _schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """The schema of OpenAI's `response_format`."""
    if response_format is None or response_format == {"type": "text"}:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        return {"type": "object"}
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    schema = schema.get("schema") if isinstance(schema, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest(
            f"response_format is {response_format!r}; give type json_schema with a schema, "
            "json_object or text"
        )
    return schema


@contextmanager
def begun(call: Call, visit: Visit) -> Iterator[TurnStream]:
    """The call as a stream, which ends with the block or at the call's time limit.

    Raises TimeoutError.
    """
    stream: TurnStream = visit.session.complete(
        call.messages, tools=call.tools, stream=True, **call.options
    )
    with _limited(call, stream):
        yield stream


@asynccontextmanager
async def abegun(call: Call, visit: Visit) -> AsyncIterator[TurnStream]:
    """The same for async callers: the messages are rendered off the event loop."""
    async with asyncio.timeout(call.timeout):
        stream: Any = await visit.session.acomplete(
            call.messages, tools=call.tools, stream=True, **call.options
        )
    with _limited(call, stream):
        yield stream


@contextmanager
def _limited(call: Call, stream: TurnStream) -> Iterator[None]:
    late = threading.Event()

    def stop() -> None:
        late.set()
        stream.cancel()

    timer = None if call.timeout is None else threading.Timer(call.timeout, stop)
    if timer is not None:
        timer.daemon = True
        timer.start()
    try:
        with stream:
            yield
    except RequestCancelled as error:
        if late.is_set():
            raise TimeoutError(f"no whole reply within {call.timeout} s") from error
        raise
    finally:
        if timer is not None:
            timer.cancel()


def finish(call: Call, visit: Visit, turn: Turn) -> None:
    """The turn was made: its branch knows it from now on."""
    if turn.tip is not None:
        visit.finish((*call.given, *digests([turn.message])), turn.index)


async def afinish(call: Call, visit: Visit, turn: Turn) -> None:
    """The same for async callers: why not more was reused is worked out off the event loop, as that
    may take a few renderings."""
    finish(call, visit, turn)
    await asyncio.to_thread(getattr, turn, "miss")


def reply_of(call: Call, visit: Visit, turn: Turn) -> AIMessage:
    """A finished turn as a message."""
    said = turn.message
    good, bad = parsed_calls(said.get("tool_calls") or ())
    return AIMessage(
        content=said.get("content") or "",
        additional_kwargs=_reasoning(said.get("reasoning_content")),
        tool_calls=good,
        invalid_tool_calls=bad,
        usage_metadata=usage_metadata(turn.usage),
        response_metadata=_metadata(call, visit, turn),
    )


class Pieces:
    """A stream's deltas as chunks."""

    def __init__(self) -> None:
        self._num_calls = 0

    def chunks(self, delta: Any) -> Iterator[ChatGenerationChunk]:
        """What a delta says; nothing where all of it is held back."""
        calls = [call_chunk(call, self._num_calls + n) for n, call in enumerate(delta.tool_calls)]
        self._num_calls += len(calls)
        if delta.text or delta.reasoning or calls:
            message = AIMessageChunk(
                content=delta.text,
                additional_kwargs=_reasoning(delta.reasoning),
                tool_call_chunks=calls,
            )
            yield ChatGenerationChunk(message=message)

    def last(self, call: Call, visit: Visit, turn: Turn) -> ChatGenerationChunk:
        """The end: counts and what else is known of the whole turn."""
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content="",
                usage_metadata=usage_metadata(turn.usage),
                response_metadata=_metadata(call, visit, turn),
                chunk_position="last",
            )
        )


def _reasoning(text: str | None) -> dict[str, Any]:
    return {"reasoning_content": text} if text else {}


def _metadata(call: Call, visit: Visit, turn: Turn) -> dict[str, Any]:
    """What the turn was, and why it did not reuse more."""
    is_call = bool(turn.message.get("tool_calls")) and turn.finish_reason == "stop"
    miss = turn.miss
    place: dict[str, Any] = {"session": visit.session.id, "turn": turn.index}
    if call.place.checkpoint_id is not None:
        place["checkpoint_id"] = call.place.checkpoint_id
    if turn.malformed_calls:
        place["malformed_calls"] = list(turn.malformed_calls)
    if miss is not None:
        place["miss"] = miss.summary
    out = {
        "model_name": call.model_name,
        "model_provider": "agentcache",
        "finish_reason": "tool_calls" if is_call else turn.finish_reason,
        "agentcache": place,
    }
    if turn.logprobs is not None:
        out["logprobs"] = {"content": [_logprob(call, entry) for entry in turn.logprobs]}
    return out


def _logprob(call: Call, entry: TokenLogprob) -> dict[str, Any]:
    """One token in OpenAI's form."""

    def told(token: int, logprob: float) -> dict[str, Any]:
        text = call.decode([token])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    return told(entry.id, entry.logprob) | {"top_logprobs": [told(*pair) for pair in entry.top]}
