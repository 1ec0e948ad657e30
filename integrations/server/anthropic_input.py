"""The body of `/v1/messages`, read into a chat in OpenAI's form."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from agentcache.integrations._openai import Call, CallGrammar, read_call
from agentcache.integrations.server.errors import bad_field, named_by
from agentcache.integrations.server.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CountRequest", "MessagesRequest", "read_messages_call"]

CacheControl = dict[str, Any]


class Block(Wire):
    """A block of content: text, tool_use, tool_result or thinking. Others cannot be read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


class TextBlock(Wire):
    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


class InputMessage(Wire):
    role: Literal["user", "assistant"]
    content: str | list[Block]


class InputTool(Wire):
    model_config = ConfigDict(extra="ignore", strict=True)

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    cache_control: CacheControl | None = None


class ToolChoice(Wire):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Wire):
    type: Literal["disabled"]


class CountRequest(Wire):
    """A conversation whose tokens are to be counted."""

    model: str
    messages: list[InputMessage]
    system: str | list[TextBlock] | None = None
    tools: list[InputTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None


class MessagesRequest(CountRequest):
    """A chat call; `cache_control` asks for a checkpoint at the end of its message."""

    max_tokens: int
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None


@dataclass(slots=True)
class _Chat:
    """A conversation in OpenAI's form; places: where each message stands in the request."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    def add(self, place: str, **message: Any) -> None:
        self.messages.append(message)
        self.places.append(place)


def read_messages_call(body: CountRequest, call_grammar: CallGrammar) -> Call:
    """The call in the session's terms. Raises ApiError and InvalidField by Anthropic's names."""
    chat = _Chat()
    if body.system:
        chat.add("system", role="system", **_texts(body.system))
    for at, message in enumerate(body.messages):
        _add_message(chat, message, f"messages[{at}]")
    if body.cache_control is not None and chat.messages:
        chat.messages[-1]["cache_control"] = body.cache_control
    params: dict[str, Any] = {"messages": chat.messages, **_tools(body)}
    if isinstance(body, MessagesRequest):
        for name in ("max_tokens", "temperature", "top_p", "top_k"):
            params[name] = getattr(body, name)
        params["stop"] = body.stop_sequences or None
    renamed = {f"messages[{at}]": place for at, place in enumerate(chat.places)}
    with named_by({**renamed, "stop": "stop_sequences"}):
        return read_call(params, call_grammar=call_grammar)


def _texts(content: str | Sequence[TextBlock | Block]) -> dict[str, Any]:
    """Content of texts, with the mark that its blocks carry."""
    if isinstance(content, str):
        return {"content": content}
    parts = [
        {"type": "text", "text": block.text, "cache_control": block.cache_control}
        for block in content
    ]
    return {"content": parts}


def _add_message(chat: _Chat, message: InputMessage, place: str) -> None:
    if isinstance(message.content, str):
        chat.add(place, role=message.role, content=message.content)
    elif message.role == "assistant":
        _add_assistant(chat, message.content, place)
    else:
        _add_user(chat, message.content, place)


def _add_assistant(chat: _Chat, blocks: Sequence[Block], place: str) -> None:
    """Text, thinking and calls are one message."""
    texts: list[Block] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(blocks):
        where = f"{place}.content[{at}]"
        if block.type == "text":
            texts.append(_having(block, where, "text"))
        elif block.type == "thinking":
            thoughts.append(str(_having(block, where, "thinking").thinking))
        elif block.type == "tool_use":
            _having(block, where, "id", "name")
            arguments = json.dumps(block.input or {}, ensure_ascii=False)
            function = {"name": block.name, "arguments": arguments}
            calls.append({"id": block.id, "type": "function", "function": function})
        else:
            raise _unread(block, where)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(b.text or "" for b in texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    marks = [block.cache_control for block in blocks if block.cache_control is not None]
    if marks:
        message["cache_control"] = marks[-1]
    chat.add(place, **message)


def _add_user(chat: _Chat, blocks: Sequence[Block], place: str) -> None:
    """Each result of a tool is a message of its own; the texts between them are, too."""
    texts: list[Block] = []

    def flush() -> None:
        if texts:
            chat.add(place, role="user", **_texts(texts))
            texts.clear()

    for at, block in enumerate(blocks):
        where = f"{place}.content[{at}]"
        if block.type == "text":
            texts.append(_having(block, where, "text"))
        elif block.type == "tool_result":
            flush()
            _having(block, where, "tool_use_id")
            chat.add(
                where,
                role="tool",
                tool_call_id=block.tool_use_id,
                content=_result(block, where),
                cache_control=block.cache_control,
            )
        else:
            raise _unread(block, where)
    flush()


def _result(block: Block, where: str) -> str | list[dict[str, Any]]:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    for at, part in enumerate(block.content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            problem = f"is a part of type {part.get('type')!r}; only texts can be read"
            raise bad_field(f"{where}.content[{at}]", problem)
    return [{"type": "text", "text": part["text"]} for part in block.content]


def _having(block: Block, where: str, *names: str) -> Block:
    for name in names:
        if getattr(block, name) is None:
            raise bad_field(f"{where}.{name}", f"is missing in a block of type {block.type!r}")
    return block


def _unread(block: Block, where: str) -> Exception:
    return bad_field(f"{where}.type", f"is {block.type!r}; this model reads texts and tools only")


def _tools(body: CountRequest) -> dict[str, Any]:
    """Tools, and which of them may or must be called, as OpenAI has them."""
    out: dict[str, Any] = {}
    if body.tools:
        out["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in body.tools
        ]
    choice = body.tool_choice
    if choice is None:
        return out
    if choice.type == "tool":
        out["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        out["tool_choice"] = {"any": "required"}.get(choice.type, choice.type)
    if choice.disable_parallel_tool_use and choice.type in ("any", "tool"):
        out["parallel_tool_calls"] = False
    elif choice.disable_parallel_tool_use and choice.type == "auto":
        raise bad_field(
            "tool_choice.disable_parallel_tool_use", "can only be true where a call is forced"
        )
    return out
