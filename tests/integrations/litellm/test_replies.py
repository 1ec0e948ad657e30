"""Replies through litellm: text, reasoning, tool calls and usage, streamed as plain."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import litellm
import pytest

from agentcache.integrations import litellm_provider

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache import Runtime

MODEL = "agentcache/tiny-agent"
HELLO = [{"role": "user", "content": "What is 1 and 2?"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("add", "subtract")
]
SCRIPT = (
    "<think>They want a sum.</think>I add them."
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    '<tool_call>{"name": "subtract", "arguments": {"a": 2}}</tool_call>'
)
"""A reply with everything in it, absorbed in place of what the model would say."""


@pytest.fixture
def scripted(runtime: Runtime) -> str:
    """A model that always says SCRIPT."""
    litellm_provider.register(runtime, model="scripted", replay=SCRIPT)
    return "agentcache/scripted"


def folded(chunks: Iterable[Any]) -> dict[str, Any]:
    """A stream put together, by nobody's code but the test's."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "fields": {}}
    out |= {"calls": [], "finish": [], "usage": []}
    for chunk in chunks:
        if getattr(chunk, "usage", None) is not None:
            out["usage"].append(chunk.usage.prompt_tokens_details)
        for choice in chunk.choices:
            out["content"] += choice.delta.content or ""
            out["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            out["fields"] |= choice.delta.provider_specific_fields or {}
            for call in choice.delta.tool_calls or ():
                function = call.function
                out["calls"].append((call.index, call.id, function.name, function.arguments))
            if choice.finish_reason:
                out["finish"].append(choice.finish_reason)
    return out


def unfolded(reply: Any) -> dict[str, Any]:
    """A plain reply in the same form."""
    message = reply.choices[0].message
    calls = enumerate(message.tool_calls or ())
    return {
        "content": message.content or "",
        "reasoning": getattr(message, "reasoning_content", None) or "",
        "fields": message.provider_specific_fields or {},
        "calls": [(at, c.id, c.function.name, c.function.arguments) for at, c in calls],
        "finish": [reply.choices[0].finish_reason],
        "usage": [reply.usage.prompt_tokens_details],
    }


def both(runtime: Runtime, model: str, **params: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same call plain and streamed, each with what a call before it left in the cache."""
    given = {"messages": HELLO, "max_tokens": 60, **params}
    litellm.completion(model, **given)
    plain = litellm.completion(model, **given)
    chunks = litellm.completion(model, **given, stream=True, stream_options={"include_usage": True})
    return unfolded(plain), folded(chunks)


@pytest.mark.parametrize(
    "params",
    [
        {"max_tokens": 12},
        {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"stop": ["e"]},
        {"tools": TOOLS, "tool_choice": "required"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "subtract"}}},
        {"tools": TOOLS, "tool_choice": "required", "max_tokens": 6},
        {"response_format": {"type": "json_object"}, "max_tokens": 20},
    ],
    ids=["length", "sampled", "stop", "required", "named", "cut call", "json"],
)
def test_a_stream_says_what_a_plain_reply_says(runtime: Runtime, params: dict[str, Any]) -> None:
    plain, streamed = both(runtime, MODEL, **params)
    assert plain["usage"][0].cached_tokens > 0
    assert plain["usage"][0].cache_creation_tokens > 0
    assert streamed == plain


def test_reasoning_and_calls_come_streamed_as_plain(runtime: Runtime, scripted: str) -> None:
    plain, streamed = both(runtime, scripted, tools=TOOLS)
    assert streamed == plain
    assert plain["reasoning"] == "They want a sum."
    assert plain["content"] == "I add them."
    assert [name for _, _, name, _ in plain["calls"]] == ["add", "subtract"]
    assert [json.loads(arguments) for *_, arguments in plain["calls"]] == [{"a": 1}, {"a": 2}]
    assert plain["finish"] == ["tool_calls"]


def test_calls_are_text_where_the_request_forbids_them(runtime: Runtime, scripted: str) -> None:
    plain, streamed = both(runtime, scripted, tools=TOOLS, tool_choice="none")
    assert streamed == plain
    assert plain["content"].startswith('I add them.<tool_call>{"name": "add"')
    assert plain["calls"] == []
    assert plain["finish"] == ["stop"]


def test_a_malformed_call_is_text_with_a_flag(runtime: Runtime) -> None:
    said = 'Sure. <tool_call>{"name": "add", "arguments": {"a": </tool_call>'
    litellm_provider.register(runtime, model="broken", replay=said)
    plain, streamed = both(runtime, "agentcache/broken", tools=TOOLS)
    assert streamed == plain
    assert plain["content"] == said
    assert plain["finish"] == ["stop"]
    (malformed,) = plain["fields"]["malformed_calls"]
    assert malformed in said
    assert malformed.startswith("<tool_call>")


def test_a_turn_with_calls_and_their_results_hits_in_full(runtime: Runtime, scripted: str) -> None:
    first = litellm.completion(scripted, HELLO, tools=TOOLS, session_id="t")
    said = first.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": call.function.name}
        for call in reversed(said.tool_calls)
    ]
    ids = {call.id for call in said.tool_calls}
    second = litellm.completion(scripted, [*HELLO, said, *results], tools=TOOLS, session_id="t")
    known = first.usage.prompt_tokens + first.usage.completion_tokens
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 1
    assert not {call.id for call in second.choices[0].message.tool_calls} & ids


def test_a_forced_call_fits_the_schema(runtime: Runtime) -> None:
    choice = {"type": "function", "function": {"name": "subtract"}}
    reply = litellm.completion(MODEL, HELLO, tools=TOOLS, tool_choice=choice, max_tokens=200)
    (call,) = reply.choices[0].message.tool_calls
    assert call.function.name == "subtract"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"a"}
    assert 0 <= arguments["a"] <= 99
    assert reply.choices[0].finish_reason == "tool_calls"


def test_a_reply_beside_tools_is_of_the_format_or_a_call(runtime: Runtime) -> None:
    schema = {"type": "object", "properties": {"sum": {"enum": [3]}}, "required": ["sum"]}
    form = {
        "type": "json_schema",
        "json_schema": {"name": "sum", "schema": {**schema, "additionalProperties": False}},
    }
    given = {"messages": HELLO, "tools": TOOLS, "response_format": form, "max_tokens": 200}
    for seed in range(2):
        reply = litellm.completion(MODEL, **given, temperature=1, seed=seed)
        message = reply.choices[0].message
        if message.tool_calls:
            assert json.loads(message.tool_calls[0].function.arguments).keys() == {"a"}
        else:
            assert json.loads(message.content) == {"sum": 3}


def test_a_stream_brings_a_reply_piece_by_piece(runtime: Runtime) -> None:
    litellm_provider.register(runtime, model="slow", replay=SCRIPT, stepwise=True)
    chunks = list(litellm.completion("agentcache/slow", HELLO, tools=TOOLS, stream=True))
    assert sum(bool(getattr(c.choices[0].delta, "reasoning_content", None)) for c in chunks) > 2
    assert sum(bool(c.choices[0].delta.content) for c in chunks) > 2
    whole = unfolded(litellm.completion("agentcache/slow", HELLO, tools=TOOLS))
    assert folded(chunks)["calls"] == whole["calls"]
    assert folded(chunks)["content"] == whole["content"]


def test_logprobs_come_streamed_as_plain(runtime: Runtime) -> None:
    given = {"messages": HELLO, "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
    plain = litellm.completion(MODEL, **given).choices[0].logprobs.content
    chunks = list(litellm.completion(MODEL, **given, stream=True))
    told = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    streamed = [entry for logprobs in told for entry in logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in plain]
    assert len(plain) == 5
    assert all(len(entry.top_logprobs) == 2 for entry in plain)
    assert plain[0].top_logprobs[0].logprob == pytest.approx(plain[0].logprob)


def test_chunks_of_a_stream_share_an_id_and_begin_with_the_role(runtime: Runtime) -> None:
    chunks = list(litellm.completion(MODEL, HELLO, max_tokens=5, stream=True))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"


def test_litellm_puts_a_stream_together(runtime: Runtime, scripted: str) -> None:
    chunks = list(litellm.completion(scripted, HELLO, tools=TOOLS, stream=True))
    built = litellm.stream_chunk_builder(chunks, messages=HELLO)
    assert [call.function.name for call in built.choices[0].message.tool_calls] == [
        "add",
        "subtract",
    ]
    assert built.choices[0].message.content == "I add them."


def test_defaults_hold_where_the_request_says_nothing(runtime: Runtime) -> None:
    litellm_provider.register(runtime, model="short", max_new_tokens=3)
    assert litellm.completion("agentcache/short", HELLO).usage.completion_tokens == 3
    assert litellm.completion("agentcache/short", HELLO, max_tokens=5).usage.completion_tokens == 5
