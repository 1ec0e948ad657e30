"""Other forms of request, which litellm turns into chat requests, keep session and counts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import litellm

if TYPE_CHECKING:
    from agentcache import Runtime

MODEL = "agentcache/tiny-agent"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


def test_responses_keep_the_session_and_count_what_was_cached(runtime: Runtime) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "input": "Hello there, who are you?",
        "instructions": "Be short.",
        "max_output_tokens": 5,
        "prompt_cache_key": "r",
    }
    cold, warm = litellm.responses(**given), litellm.responses(**given)
    assert cold.usage.input_tokens_details.cached_tokens == 0
    assert warm.usage.input_tokens_details.cached_tokens > 0
    assert warm.output[0].content[0].text == cold.output[0].content[0].text
    assert runtime.session("r").tips
    events = list(litellm.responses(**given, stream=True))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == cold.output[0].content[0].text
    told = events[-1].response.usage
    assert told.input_tokens_details.cached_tokens == warm.usage.input_tokens_details.cached_tokens


def test_responses_force_calls_and_take_their_results(runtime: Runtime) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "max_output_tokens": 200,
        "tools": [{"type": "function", "name": "add", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "add"},
        "extra_body": {"session_id": "r"},
    }
    first = litellm.responses(input="Add.", **given)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments).keys() == {"a"}
    said = {"type": "function_call", "call_id": call.call_id, "name": "add"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    items = [{"role": "user", "content": "Add."}, {**said, "arguments": call.arguments}, result]
    second = litellm.responses(input=items, **given)
    known = first.usage.input_tokens + first.usage.output_tokens
    assert second.usage.input_tokens_details.cached_tokens >= known - 1


async def test_anthropic_messages_count_what_was_cached(runtime: Runtime) -> None:
    given: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hello there, who are you?"}],
        "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
        "max_tokens": 5,
        "session_id": "m",
    }
    cold = await litellm.anthropic.messages.acreate(**given)
    warm = await litellm.anthropic.messages.acreate(**given)
    assert warm["content"] == cold["content"]
    assert warm["stop_reason"] == "max_tokens"
    cached = warm["usage"]["cache_read_input_tokens"]
    assert cached > 0
    prompt_len = cold["usage"]["cache_creation_input_tokens"]
    assert cached + warm["usage"]["cache_creation_input_tokens"] == prompt_len
    assert runtime.session("m").tips

    events = [e async for e in await litellm.anthropic.messages.acreate(**given, stream=True)]
    told = [data_of(event) for event in events]
    assert "".join(text_of(event) for event in told) == cold["content"][0]["text"]
    usage = next(event["usage"] for event in told if event["type"] == "message_delta")
    assert usage["cache_read_input_tokens"] == cached


async def test_anthropic_messages_force_calls(runtime: Runtime) -> None:
    reply = await litellm.anthropic.messages.acreate(
        model=MODEL,
        messages=[{"role": "user", "content": "Add."}],
        tools=[{"name": "add", "input_schema": SCHEMA}],
        tool_choice={"type": "any"},
        max_tokens=200,
    )
    (block,) = [block for block in reply["content"] if block["type"] == "tool_use"]
    assert block["name"] == "add"
    assert block["input"].keys() == {"a"}
    assert reply["stop_reason"] == "tool_use"


def data_of(event: bytes) -> dict[str, Any]:
    """What a server-sent event holds."""
    line = next(line for line in event.decode().splitlines() if line.startswith("data: "))
    data: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return data


def text_of(event: dict[str, Any]) -> str:
    delta = event.get("delta", {})
    return str(delta.get("text", "")) if event["type"] == "content_block_delta" else ""
