"""The body of `/v1/responses`, read into a chat in OpenAI's older form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict

from agentcache.integrations._openai import Call, CallGrammar, read_call
from agentcache.integrations.server.errors import bad_field, named_by
from agentcache.integrations.server.wire import Wire

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["ResponsesRequest", "read_input", "read_response_call"]


class ContentPart(Wire):
    """A part of a message's content; only texts can be read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


class InputItem(Wire):
    """A message, a call, its result, or reasoning."""

    model_config = ConfigDict(extra="ignore", strict=True)

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None


class ResponseTool(Wire):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Wire):
    model_config = ConfigDict(extra="ignore", strict=True)

    format: dict[str, Any] | None = None


class ResponsesRequest(Wire):
    """What is new in a conversation, and the response it goes on from."""

    model: str
    input: str | list[InputItem]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


def read_input(given: str | Sequence[InputItem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Messages, and where each of them stands in the request.

    Reasoning, text and calls that follow each other are one message of the assistant.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    if not given:
        raise bad_field("input", "is empty; give a text or at least one item")
    messages: list[dict[str, Any]] = []
    places: list[str] = []
    for at, item in enumerate(given):
        place = f"input[{at}]"
        message = _message(item, place)
        if messages and _continues(messages[-1], message):
            _join(messages[-1], message)
        else:
            messages.append(message)
            places.append(place)
    return messages, places


def _message(item: InputItem, place: str) -> dict[str, Any]:
    if item.type == "reasoning":
        parts = item.content if isinstance(item.content, list) else item.summary
        thought = "".join(part.text for part in parts or ())
        return {"role": "assistant", "content": "", "reasoning_content": thought}
    if item.type == "function_call":
        call_id, name = _needed(item, place, "call_id"), _needed(item, place, "name")
        function = {"name": name, "arguments": item.arguments or "{}"}
        call = {"id": call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}
    if item.type == "function_call_output":
        call_id = _needed(item, place, "call_id")
        return {
            "role": "tool",
            "tool_call_id": call_id,
            "content": _content(_needed(item, place, "output")),
        }
    role, content = _needed(item, place, "role"), _content(_needed(item, place, "content"))
    return {"role": role, "content": content}


def _needed(item: InputItem, place: str, name: str) -> Any:
    value = getattr(item, name)
    if value is None:
        raise bad_field(f"{place}.{name}", f"is missing in an item of type {item.type!r}")
    return value


def _content(content: str | Sequence[ContentPart]) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part.text} for part in content]


def _continues(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    """Whether a message says on what the assistant's message before it began."""
    if before["role"] != "assistant" or message["role"] != "assistant":
        return False
    if "reasoning_content" in message:
        return False
    return "tool_calls" in message or not (before["content"] or before.get("tool_calls"))


def _join(before: dict[str, Any], message: Mapping[str, Any]) -> None:
    before["content"] = before["content"] or message["content"]
    if "tool_calls" in message:
        before.setdefault("tool_calls", []).extend(message["tool_calls"])


def read_response_call(
    body: ResponsesRequest,
    earlier: Sequence[dict[str, Any]],
    new: Sequence[dict[str, Any]],
    places: Sequence[str],
    call_grammar: CallGrammar,
    defaults: Mapping[str, Any],
) -> Call:
    """The call in the session's terms. Raises ApiError and InvalidField, by this form's names."""
    if body.include:
        raise bad_field("include", f"{body.include[0]!r} is not supported; leave it out")
    if body.background:
        raise bad_field("background", "is not supported; leave it out")
    head = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = [*head, *earlier, *new]
    first_new = len(messages) - len(new)
    names = {f"messages[{first_new + at}]": place for at, place in enumerate(places)}
    names |= {
        "messages": "input",
        "messages[0]": "instructions" if head else places[0],
        "max_tokens": "max_output_tokens",
        "response_format": "text.format",
    }
    params: dict[str, Any] = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "parallel_tool_calls": body.parallel_tool_calls,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice(body.tool_choice),
        "response_format": _format(body.text),
    }
    with named_by(names):
        return read_call(params, call_grammar=call_grammar, defaults=defaults)


def _tool(tool: ResponseTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    return {"type": "function", "function": function}


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _format(text: TextOptions | None) -> dict[str, Any] | None:
    form = None if text is None else text.format
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
