"""LangChain's messages to the OpenAI form that sessions read, and turns back to messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import ToolCallChunk, invalid_tool_call, tool_call

from agentcache import InvalidRequest

if TYPE_CHECKING:
    from langchain_core.messages import InvalidToolCall, ToolCall

    from agentcache import Usage

__all__ = [
    "call_chunk",
    "digests",
    "digests_of_runs",
    "lead_len",
    "message_digest",
    "openai_messages",
    "parsed_calls",
    "usage_metadata",
]

_THOUGHTS = frozenset({"reasoning", "thinking", "redacted_thinking"})
_CALLS = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}
)
"""Blocks of a reply whose calls stand in `tool_calls` as well."""


def openai_messages(
    messages: Sequence[BaseMessage], known: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The list in OpenAI form. known: the first of them, which were read before.

    `additional_kwargs["mark"]`, or `cache_control` on a block, asks for a checkpoint at the end of
    the message. Raises InvalidRequest, naming the message, for images and any other block that is
    no text, for a role that cannot be read, and for a tool's result that no earlier call asked for.
    """
    out, asked = [*known], _Asked()
    for index in range(len(known), len(messages)):
        read = _read(messages[index], index)
        if read["role"] == "tool" and not asked.knows(read["tool_call_id"], out):
            raise InvalidRequest(
                f"message {index} (tool) answers the call {read['tool_call_id']!r}, which no "
                "message before it makes; keep the reply with the call in the list"
            )
        out.append(read)
    return out


class _Asked:
    """Ids of the calls in a list that grows; looks no further back than it has to."""

    def __init__(self) -> None:
        self._ids: set[Any] = set()
        self._num_read = 0

    def knows(self, id: Any, messages: Sequence[dict[str, Any]]) -> bool:
        """Whether a message makes the call."""
        last = next((m for m in reversed(messages) if m["role"] == "assistant"), None)
        if last is not None and any(call["id"] == id for call in last.get("tool_calls", ())):
            return True
        for message in messages[self._num_read :]:
            if message["role"] == "assistant":
                self._ids.update(call["id"] for call in message.get("tool_calls", ()))
        self._num_read = len(messages)
        return id in self._ids


def _read(message: BaseMessage, index: int) -> dict[str, Any]:
    role = _ROLES.get(type(message)) or _role(message, index)
    if role == "assistant":
        return _read_reply(message, index)
    content = message.content
    if not isinstance(content, str):
        content = "\n".join(_texts(content, f"message {index} ({message.type})"))
    read: dict[str, Any] = {"role": role, "content": content}
    if role == "tool":
        read["tool_call_id"] = getattr(message, "tool_call_id", None)
    if message.name:
        read["name"] = message.name
    return _marked(read, message)


_ROLES: dict[type[BaseMessage], str] = {
    AIMessage: "assistant",
    ToolMessage: "tool",
    HumanMessage: "user",
    SystemMessage: "system",
    FunctionMessage: "function",
}


def _role(message: BaseMessage, index: int) -> str:
    """Of a message whose class does not say it by itself: pieces of streams, and subclasses."""
    if isinstance(message, ChatMessage):
        return message.role
    roles = (role for kind, role in _ROLES.items() if isinstance(message, kind))
    role = next(roles, None)
    if role is None:
        kind = getattr(message, "type", type(message).__name__)
        raise InvalidRequest(
            f"message {index} is of type {kind!r}; give system, human, ai, tool or chat messages"
        )
    return role


def _read_reply(message: BaseMessage, index: int) -> dict[str, Any]:
    """A reply; its name is the agent's, which frameworks add and no model wrote. Only an AIMessage
    has calls: a ChatMessage may be a reply too."""
    content: Any = message.content
    thoughts = message.additional_kwargs.get("reasoning_content")
    if not isinstance(content, str):
        where = f"message {index} (ai)"
        blocks = [block for block in content if _kind(block) not in _CALLS]
        thoughts = thoughts or "".join(_thoughts(blocks))
        content = "".join(_texts((b for b in blocks if _kind(b) not in _THOUGHTS), where))
    read = {"role": "assistant", "content": content}
    if thoughts:
        read["reasoning_content"] = thoughts
    calls = []
    if isinstance(message, AIMessage):
        calls = [_call(call, call["args"]) for call in message.tool_calls]
        calls += [_call(call, call["args"] or "") for call in message.invalid_tool_calls]
    if calls:
        read["tool_calls"] = calls
    return _marked(read, message)


def _call(call: Mapping[str, Any], arguments: Any) -> dict[str, Any]:
    function = {"name": call["name"] or "", "arguments": arguments}
    return {"id": call["id"], "type": "function", "function": function}


def _marked(read: dict[str, Any], message: BaseMessage) -> dict[str, Any]:
    extra, content = message.additional_kwargs, message.content
    if (extra and extra.get("mark")) or (
        not isinstance(content, str)
        and any(isinstance(block, Mapping) and block.get("cache_control") for block in content)
    ):
        read["mark"] = True
    return read


def _kind(block: Any) -> Any:
    return block.get("type") if isinstance(block, Mapping) else "text"


def _texts(blocks: Iterable[Any], where: str) -> list[str]:
    texts = []
    for block in blocks:
        text = block.get("text") if isinstance(block, Mapping) else block
        if _kind(block) != "text" or not isinstance(text, str):
            raise InvalidRequest(
                f"{where} holds a block of type {_kind(block)!r}; this model reads text only"
            )
        texts.append(text)
    return texts


def _thoughts(blocks: Iterable[Any]) -> list[str]:
    found = [b for b in blocks if _kind(b) in _THOUGHTS]
    return [str(b.get("reasoning") or b.get("thinking") or "") for b in found]


def lead_len(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many system messages the list begins with."""
    others = (i for i, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def digests(messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """One number per message, equal where a framework only spelled it differently.

    Left out are ids of calls, reasoning, marks and the white space and key order of arguments;
    results of parallel calls may come in any order.
    """
    return digests_of_runs(messages, [message_digest(message) for message in messages])


def digests_of_runs(
    messages: Sequence[Mapping[str, Any]], values: Sequence[int]
) -> tuple[int, ...]:
    """The digests of single messages as those of the list: of each run of results in order."""
    out: list[int] = []
    roles = (message["role"] for message in messages)
    for role, run in groupby(zip(roles, values, strict=True), key=itemgetter(0)):
        own = [value for _, value in run]
        out += sorted(own) if role == "tool" else own
    return tuple(out)


def message_digest(message: Mapping[str, Any]) -> int:
    """The number of one message.

    It is made of texts alone: Python's hashes of other values are equal for -1 and -2, or 1 and
    True.
    """
    said: tuple[str | None, ...] = (
        message["role"],
        message["content"],
        message.get("tool_call_id"),
        message.get("name"),
    )
    for call in message.get("tool_calls") or ():
        function = call["function"]
        said += (function["name"], _spelled(function["arguments"]))
    return hash(said)


_canonical = json.JSONEncoder(sort_keys=True, default=str).encode
"""A value's JSON, whatever the order of its keys. Made once: `json.dumps` would make an encoder for
each call."""


def _spelled(arguments: Any) -> str:
    """Arguments in the one spelling of their value; a text that is no JSON is its own."""
    try:
        return _canonical(json.loads(arguments) if isinstance(arguments, str) else arguments)
    except TypeError:
        return repr(arguments)  # keys of several types, which have no order
    except (ValueError, RecursionError):
        return arguments if isinstance(arguments, str) else ""  # the call will be refused


def parsed_calls(
    calls: Iterable[Mapping[str, Any]],
) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """A reply's calls: those with an object of arguments, and those without."""
    good, bad = [], []
    for call in calls:
        name, text = call["function"]["name"], call["function"]["arguments"]
        try:
            args = json.loads(text)
        except ValueError:
            args = None
        if isinstance(args, dict):
            good.append(tool_call(name=name, args=args, id=call["id"]))
        else:
            error = "the arguments are no JSON object"
            bad.append(invalid_tool_call(name=name, args=text, id=call["id"], error=error))
    return good, bad


def call_chunk(call: Mapping[str, Any], index: int) -> ToolCallChunk:
    """A call, or what came of one, as a piece of a stream."""
    function = call.get("function") or {}
    return ToolCallChunk(
        name=function.get("name"),
        args=function.get("arguments"),
        id=call.get("id"),
        index=call.get("index", index),
        type="tool_call_chunk",
    )


def usage_metadata(usage: Usage) -> UsageMetadata:
    """Token counts where LangChain's tools look for them.

    cache_read: prompt tokens that were not computed. cache_creation: those that were, which the
    call has filed in the cache.
    """
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.output_tokens,
        total_tokens=usage.prompt_tokens + usage.output_tokens,
        input_token_details=InputTokenDetails(
            cache_read=usage.cached_tokens, cache_creation=usage.computed_tokens
        ),
    )
