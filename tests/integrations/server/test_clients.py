"""Clients that people have: each gets replies, streams, tool calls and cached-token counts."""

from __future__ import annotations

import asyncio
import json
import subprocess
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("openai")
import openai

MODEL = "tiny-hybrid"
LONG = [{"role": "user", "content": "Tell me of " + "rivers and hills and " * 30}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client(served_here):
    with openai.OpenAI(base_url=f"{served_here.url}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture
def litellm():
    """The module; the event loop that it leaves open on this thread is closed."""
    yield pytest.importorskip("litellm")
    with suppress(RuntimeError):  # there is none
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)


def test_openai_chat_counts_what_a_second_call_reuses(client):
    ask = {"model": MODEL, "messages": LONG, "max_tokens": 3}
    first = client.chat.completions.create(**ask)
    second = client.chat.completions.create(**ask)

    assert first.choices[0].message.content == second.choices[0].message.content
    assert first.choices[0].finish_reason == "length"
    assert first.usage.completion_tokens == 3
    assert second.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens - 8


def test_openai_stream_adds_up_to_the_plain_reply_and_ends_with_usage(client):
    ask = {"model": MODEL, "messages": LONG, "max_tokens": 5}
    plain = client.chat.completions.create(**ask)
    chunks = list(
        client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 5
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_openai_stream_without_usage_has_none(client):
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=LONG, max_tokens=1, stream=True)
    )

    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_cached_tokens_are_the_same_streamed_and_plain(client):
    messages = [{"role": "user", "content": "Count " + "one two three " * 20}]
    ask = {"model": MODEL, "messages": messages, "max_tokens": 1}
    client.chat.completions.create(**ask)
    plain = client.chat.completions.create(**ask).usage
    *_, last = client.chat.completions.create(
        **ask, stream=True, stream_options={"include_usage": True}
    )

    assert plain.prompt_tokens_details.cached_tokens > 0
    assert last.usage == plain


@pytest.mark.parametrize("stream", [False, True])
def test_openai_tools_that_have_to_be_called_are(client, stream):
    pytest.importorskip("llguidance")
    asked = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Weather?"}],
        tools=[WEATHER],
        tool_choice="required",
        max_tokens=60,
        stream=stream,
    )
    if stream:
        chunks = list(asked)
        deltas = [call for c in chunks for call in c.choices[0].delta.tool_calls or ()]
        finish = chunks[-1].choices[0].finish_reason
        name = "".join(delta.function.name or "" for delta in deltas)
        arguments = "".join(delta.function.arguments or "" for delta in deltas)
        assert {delta.index for delta in deltas} == {0}
    else:
        finish = asked.choices[0].finish_reason
        (call,) = asked.choices[0].message.tool_calls
        name, arguments = call.function.name, call.function.arguments

    assert finish == "tool_calls"
    assert name == "weather"
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_a_tool_loop_reuses_all_of_the_turn_before(client):
    messages: list[Any] = [{"role": "user", "content": "Weather?"}]
    ask = {"model": MODEL, "tools": [WEATHER], "extra_body": {"session_id": "loop"}}
    first = client.chat.completions.create(
        **ask, messages=messages, tool_choice="required", max_tokens=60
    )
    reply = first.choices[0].message
    messages += [
        reply.model_dump(),
        {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "sunny"},
    ]
    second = client.chat.completions.create(**ask, messages=messages, max_tokens=2)

    known = first.usage.total_tokens  # the call as well: it is written as the template writes it
    assert second.usage.prompt_tokens_details.cached_tokens >= known - 1


def test_openai_json_schema_is_kept_to(client):
    pytest.importorskip("llguidance")
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Which?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "answer",
                "schema": {
                    "type": "object",
                    "properties": {"ok": {"type": "boolean"}},
                    "required": ["ok"],
                    "additionalProperties": False,
                },
            },
        },
    )

    assert isinstance(json.loads(reply.choices[0].message.content)["ok"], bool)


def test_openai_logprobs_name_the_tokens_that_came(client):
    ask = {"model": MODEL, "messages": LONG, "max_tokens": 2, "logprobs": True, "top_logprobs": 2}
    plain = client.chat.completions.create(**ask).choices[0]
    *_, last = client.chat.completions.create(**ask, stream=True)

    assert "".join(item.token for item in plain.logprobs.content) == plain.message.content
    assert all(len(item.top_logprobs) == 2 for item in plain.logprobs.content)
    streamed = last.choices[0].logprobs.content
    for one, other in zip(streamed, plain.logprobs.content, strict=True):
        # the second call may find more of the prompt, so its numbers may round otherwise
        assert [each.token for each in (one, *one.top_logprobs)] == [
            each.token for each in (other, *other.top_logprobs)
        ]
        assert [each.logprob for each in one.top_logprobs] == pytest.approx(
            [each.logprob for each in other.top_logprobs], abs=1e-3
        )


def test_openai_completions_of_text_and_of_ids_agree(client, served_here):
    ids = served_here.post("/tokenize", {"prompt": "Once upon a time"}).json()["tokens"]
    ask = {"model": MODEL, "max_tokens": 6}
    text = client.completions.create(**ask, prompt="Once upon a time").choices[0].text
    from_ids = client.completions.create(**ask, prompt=ids).choices[0].text
    streamed = client.completions.create(**ask, prompt=[ids], stream=True)

    assert text == from_ids == "".join(chunk.choices[0].text for chunk in streamed)
    assert text


@pytest.mark.parametrize("stream", [False, True])
def test_completions_end_before_a_stop_string(client, stream):
    ask = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8}
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[5:9]
    assert stop.strip()
    asked = client.completions.create(**ask, stop=stop, stream=stream)
    chunks = list(asked) if stream else [asked]

    assert "".join(chunk.choices[0].text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_models_are_listed(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "agentcache"


def test_openai_errors_carry_the_field(client):
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=LONG, temperature=9)

    assert raised.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(model="gpt-0", messages=LONG)
    assert raised.value.code == "model_not_found"


def test_langchain_openai_sees_cached_tokens(served_here):
    pytest.importorskip("langchain_openai")
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{served_here.url}/v1",
        api_key="-",
        max_retries=0,
        max_tokens=2,
        stream_usage=True,
        extra_body={"session_id": "langchain"},
    )
    plain = model.invoke(LONG[0]["content"])
    whole = None
    for chunk in model.stream(LONG[0]["content"]):
        whole = chunk if whole is None else whole + chunk

    assert whole.content == plain.content
    details = whole.usage_metadata["input_token_details"]
    assert details["cache_read"] >= whole.usage_metadata["input_tokens"] - 8


@pytest.mark.filterwarnings("ignore")  # what litellm warns of is its own concern
def test_litellm_openai_sees_cached_tokens(served_here, litellm):
    ask = {
        "model": f"openai/{MODEL}",
        "api_base": f"{served_here.url}/v1",
        "api_key": "-",
        "messages": LONG,
        "max_tokens": 2,
        "prompt_cache_key": "litellm",
    }
    plain = litellm.completion(**ask)
    chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.choices[0].message.content
    usage = next(c.usage for c in reversed(chunks) if getattr(c, "usage", None))
    assert usage.prompt_tokens_details.cached_tokens >= usage.prompt_tokens - 8


@pytest.mark.filterwarnings("ignore")  # what litellm warns of is its own concern
def test_litellm_knows_a_prompt_that_is_too_long(served_here, litellm):
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{served_here.url}/v1",
            api_key="-",
            messages=[{"role": "user", "content": "word " * 140_000}],
            max_retries=0,
        )


def test_anthropic_replies_whole_and_streamed(served_here):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served_here.url, api_key="-", max_retries=0) as client:
        ask = {"model": MODEL, "messages": LONG, "max_tokens": 4}
        plain = client.messages.create(**ask)
        with client.messages.stream(**ask) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        counted = client.messages.count_tokens(model=MODEL, messages=LONG)

    assert text == plain.content[0].text == last.content[0].text
    assert plain.stop_reason == last.stop_reason == "max_tokens"
    usage = last.usage
    assert usage.cache_read_input_tokens >= counted.input_tokens - 8
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert total == counted.input_tokens


def test_anthropic_tools_that_have_to_be_called_are(served_here):
    anthropic = pytest.importorskip("anthropic")
    pytest.importorskip("llguidance")
    function = WEATHER["function"]
    tool = {"name": "weather", "input_schema": function["parameters"]}
    with anthropic.Anthropic(base_url=served_here.url, api_key="-", max_retries=0) as client:
        ask: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 60,
            "tools": [tool],
            "messages": [{"role": "user", "content": "Weather?"}],
        }
        first = client.messages.create(**ask, tool_choice={"type": "any"})
        with client.messages.stream(**ask, tool_choice={"type": "any"}) as stream:
            streamed = stream.get_final_message()
        (call,) = first.content
        ask["messages"] = [
            *ask["messages"],
            {"role": "assistant", "content": [call.model_dump()]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}],
            },
        ]
        second = client.messages.create(**ask)

    assert first.stop_reason == streamed.stop_reason == "tool_use"
    assert call.name == "weather"
    assert call.input["city"] in ("Rome", "Oslo")
    assert streamed.content[0].input == call.input
    assert second.usage.output_tokens > 0


def test_anthropic_names_the_stop_sequence(served_here):
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=served_here.url, api_key="-", max_retries=0) as client:
        ask = {"model": MODEL, "messages": LONG, "max_tokens": 6}
        said = client.messages.create(**ask).content[0].text
        stop = said[3:6]
        assert stop.strip()
        stopped = client.messages.create(**ask, stop_sequences=["never said", stop])

    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", stop)


def test_anthropic_cache_control_makes_a_boundary_for_others(served_here):
    def ask(tail: str, mark: bool) -> dict[str, Any]:
        shared: dict[str, Any] = {"type": "text", "text": "It is written: " + "so be it. " * 40}
        if mark:
            shared["cache_control"] = {"type": "ephemeral"}
        messages = [
            {"role": "user", "content": [shared]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": tail},
        ]
        body = {"model": MODEL, "max_tokens": 1, "messages": messages}
        return served_here.post("/v1/messages", body).json()["usage"]

    ask("First question?", mark=True)
    usage = ask("Another one?", mark=True)

    assert usage["cache_read_input_tokens"] >= 100


def test_langchain_anthropic_sees_cached_tokens(served_here):
    pytest.importorskip("langchain_anthropic")
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(
        model=MODEL, base_url=served_here.url, api_key="-", max_retries=0, max_tokens=2
    )
    plain = model.invoke(LONG[0]["content"])
    again = model.invoke(LONG[0]["content"])

    assert again.content == plain.content
    details = again.usage_metadata["input_token_details"]
    assert details["cache_read"] >= again.usage_metadata["input_tokens"] - 8


def test_curl_gets_a_stream(served_here):
    body = json.dumps({"model": MODEL, "messages": LONG, "max_tokens": 2, "stream": True})
    done = subprocess.run(
        [
            *("curl", "-sS", "-N", f"{served_here.url}/v1/chat/completions"),
            *("-H", "content-type: application/json", "-d", body),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    events = [line for line in done.stdout.split("\n\n") if line]
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert json.loads(events[0][6:])["choices"][0]["delta"]["role"] == "assistant"
