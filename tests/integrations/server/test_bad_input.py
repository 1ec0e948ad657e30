"""Whatever is sent: a 4xx that names the field, and a server that goes on."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from testkit.waiting import until

MODEL = "tiny-hybrid"
USER = {"role": "user", "content": "Hello"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(autouse=True)
def goes_on(served_here):
    """After every test the server answers, and has everything back."""
    yield
    assert served_here.get("/health").json() == {"status": "ok"}
    assert until(served_here.idle)


def refused(answer: httpx.Response, param: str | None, status: int = 400) -> str:
    """The message of an error in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    return error["message"]


def numbered(cases: list[Any]) -> list[str]:
    """An id for each case, by the field it is about."""
    return [f"{number}-{case[-1]}" for number, case in enumerate(cases)]


CHAT: list[tuple[dict[str, Any], str]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [1]}, "messages[0]"),
    ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "user"}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0]"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
    (
        {"messages": [USER, {"role": "tool", "content": "x", "tool_call_id": "c1"}]},
        "messages[1].tool_call_id",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, "id": 3}]}]},
        "messages[1].tool_calls[0].id",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c1"}]}]},
        "messages[1].tool_calls[0].function",
    ),
    ({"model": None}, "model"),
    ({"model": 7}, "model"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"top_p": 2}, "top_p"),
    ({"seed": 2**70}, "seed"),
    ({"n": 2}, "n"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1001}, "stop"),
    ({"temperature": 10**400}, "temperature"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"tools": "f"}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"nothing": 1}}, "stream_options.nothing"),
    ({"session_id": ""}, "session_id"),
    ({"session_id": 5}, "session_id"),
    ({"session_id": "x" * 10_000}, "session_id"),
    ({"session_id": "../../etc/passwd"}, "session_id"),
    ({"session_id": "/root"}, "session_id"),
    ({"session_id": "a\x00b"}, "session_id"),
    ({"session_id": "\udcff"}, "session_id"),
    ({"prompt_cache_key": "..\\windows"}, "prompt_cache_key"),
]


@pytest.mark.parametrize(("fields", "param"), CHAT, ids=numbered(CHAT))
def test_chat_names_the_field(served_here, fields, param):
    body = {"model": MODEL, "messages": [USER], **fields}
    answer = served_here.post("/v1/chat/completions", body)

    assert param in refused(answer, param)


def test_an_image_is_not_passed_over(served_here):
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, part]}]
    answer = served_here.post("/v1/chat/completions", {"model": MODEL, "messages": messages})

    refused(answer, "messages[0].content[1].type")


def test_a_session_id_in_a_header_is_checked_like_one_in_the_body(served_here):
    answer = served_here.chat(headers={"x-session-id": "../up"})

    refused(answer, "x-session-id")


OTHERS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/completions", {}, "prompt"),
    ("/v1/completions", {"prompt": ""}, "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt"),
    ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, "prompt"),
    ("/v1/completions", {"prompt": "\ud800"}, "prompt"),
    ("/v1/completions", {"prompt": "x", "echo": True}, "echo"),
    ("/v1/completions", {"prompt": "x", "best_of": 3}, "best_of"),
    ("/v1/completions", {"prompt": "x", "logprobs": 99}, "logprobs"),
    ("/v1/responses", {}, "input"),
    ("/v1/responses", {"input": []}, "input"),
    ("/v1/responses", {"input": [{"role": "user"}]}, "input[0].content"),
    ("/v1/responses", {"input": [{"type": "web_search_call"}]}, "input[0].type"),
    (
        "/v1/responses",
        {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "x"}]},
        "input[1].tool_call_id",
    ),
    ("/v1/responses", {"input": "x", "max_output_tokens": -1}, "max_output_tokens"),
    ("/v1/responses", {"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
    ("/v1/responses", {"input": "x", "background": True}, "background"),
    ("/v1/responses", {"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
    ("/tokenize", {}, None),
    ("/tokenize", {"prompt": "x", "messages": [USER]}, None),
    ("/tokenize", {"prompt": "\ud800"}, None),
]


@pytest.mark.parametrize(("path", "fields", "param"), OTHERS, ids=numbered(OTHERS))
def test_other_forms_name_the_field(served_here, path, fields, param):
    refused(served_here.post(path, {"model": MODEL, **fields}), param)


ANTHROPIC: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [USER, {"role": "user", "content": [{"type": "image"}]}]},
        "messages[1].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
        "messages[0].content[0].tool_call_id",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"temperature": 3}, "temperature"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
]


@pytest.mark.parametrize(("fields", "param"), ANTHROPIC, ids=numbered(ANTHROPIC))
def test_anthropic_errors_have_its_shape_and_name_the_field(served_here, fields, param):
    body = {"model": MODEL, "max_tokens": 4, "messages": [USER], **fields}
    answer = served_here.post("/v1/messages", body)

    assert answer.status_code == 400, answer.text
    said = answer.json()
    assert said["type"] == "error"
    assert said["error"]["type"] == "invalid_request_error"
    assert said["error"]["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"model": NaN}',
        b'{"temperature": 1e999}',
        b"1" * 5000,
        b"[" * 100_000,
    ],
    ids=["empty", "cut", "list", "text", "latin", "nan", "infinite", "long number", "deep"],
)
def test_what_is_no_json_object_is_refused(served_here, raw):
    headers = {"content-type": "application/json"}
    answer = served_here.post("/v1/chat/completions", content=raw, headers=headers)

    refused(answer, None)


def test_a_body_that_is_not_compressed_as_it_says_is_refused(served_here):
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = served_here.post("/v1/chat/completions", content=b"{}" * 500, headers=headers)

    assert "content-encoding" in refused(answer, None)
    assert answer.headers["connection"] == "close"


def test_a_compressed_body_is_read(served_here):
    body = {"model": MODEL, "messages": [USER], "max_tokens": 1}
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    raw = gzip.compress(json.dumps(body).encode())
    answer = served_here.post("/v1/chat/completions", content=raw, headers=headers)

    assert answer.status_code == 200


@pytest.mark.parametrize("field", ["messages", "tools", "metadata", "response_format"])
def test_deep_nesting_names_the_field(served_here, field):
    deep = "[" * 500 + "]" * 500
    raw = f'{{"model": "{MODEL}", "messages": [], "{field}": {deep}}}'
    headers = {"content-type": "application/json"}
    answer = served_here.post("/v1/chat/completions", content=raw, headers=headers)

    refused(answer, field)


def test_a_body_of_100_mb_is_refused(served_here):
    block = b"x" * 2**20

    def pieces():
        yield b'{"model": "tiny-hybrid", "messages": [{"role": "user", "content": "'
        for _ in range(100):
            yield block

    headers = {"content-type": "application/json", "content-length": str(100 * 2**20 + 67)}
    try:
        answer = served_here.post("/v1/chat/completions", content=pieces(), headers=headers)
    except httpx.TransportError:
        return  # hung up on before it had sent everything
    refused(answer, None, 413)


def test_ten_thousand_messages_get_an_answer(served_here):
    text = "one two three four five six seven eight nine ten"
    pair = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    body = {"model": MODEL, "messages": pair * 5_000, "max_tokens": 1}
    answer = served_here.post("/v1/chat/completions", body)

    assert "maximum context length is 131072 tokens" in refused(answer, "messages")


def test_two_calls_at_once_on_one_session_are_both_answered(served_here):
    """They leave a tip each; a third goes on from the one whose conversation it continues."""
    texts = ["First question", "Second question"]
    with ThreadPoolExecutor(2) as pool:
        ask = lambda text: served_here.chat(text, session_id="both", max_tokens=8)  # noqa: E731
        answers = [answer.json() for answer in pool.map(ask, texts)]
    replies = [answer["choices"][0]["message"]["content"] for answer in answers]
    for text, reply in zip(texts, replies, strict=True):
        alone = served_here.chat(text, max_tokens=8).json()
        assert alone["choices"][0]["message"]["content"] == reply
    messages = [
        {"role": "user", "content": texts[0]},
        {"role": "assistant", "content": replies[0]},
        {"role": "user", "content": "More"},
    ]
    more = served_here.post(
        "/v1/chat/completions",
        {"model": MODEL, "messages": messages, "max_tokens": 1, "session_id": "both"},
    ).json()

    assert more["usage"]["prompt_tokens_details"]["cached_tokens"] >= (
        answers[0]["usage"]["total_tokens"] - 1
    )


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/v1/chat/completions", 405),
        ("PUT", "/health", 405),
        ("GET", "/v1/sessions/nobody", 404),
        ("GET", "/v1/sessions/..%2f..%2fetc", 400),
        ("DELETE", "/v1/sessions/nobody", 404),
        ("GET", "/v1/responses/resp_0", 404),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_wrong_paths_and_methods_are_told_in_the_same_shape(served_here, method, path, status):
    answer = httpx.request(method, f"{served_here.url}{path}", timeout=60)

    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]
    assert "passwd" not in json.dumps(answer.json()["error"].get("code"))


def test_every_answer_has_an_id(served_here):
    ids = {served_here.chat(temperature=t).headers["x-request-id"] for t in (0, 9)}

    assert len(ids) == 2
