"""What is wrong with a litellm call comes back as litellm's own error, and names the field."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import litellm
import pytest
from testkit.held import engine_held

from agentcache import CacheConfig, Runtime
from agentcache.integrations import litellm_provider

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = "agentcache/tiny-agent"
HELLO = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def call(**given: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **given}}


BAD_MESSAGES: list[tuple[str, list[Any]]] = [
    ("messages", []),
    (r"messages\[0\].role", [{"role": "wizard", "content": "x"}]),
    (r"messages\[0\].content", [{"role": "user"}]),
    (r"messages\[0\]", [{"role": "user", "content": "a\ud800b"}]),
    (
        r"messages\[0\].content\[1\]",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "see"},
                    {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
                ],
            }
        ],
    ),
    (r"messages\[1\].tool_call_id", [*HELLO, {"role": "tool", "content": "3"}]),
    (
        r"messages\[1\].tool_call_id",
        [*HELLO, {"role": "tool", "tool_call_id": "nobody", "content": "3"}],
    ),
    (
        r"messages\[1\].tool_calls\[0\].id",
        [*HELLO, {"role": "assistant", "tool_calls": [{**call(), "id": ""}]}],
    ),
    (
        r"messages\[1\]",
        [*HELLO, {"role": "assistant", "tool_calls": [call(arguments=nested(100))]}],
    ),
    (r"messages\[9999\].role", [*HELLO * 9999, {"role": "wizard", "content": "x"}]),
]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize(("field", "messages"), BAD_MESSAGES)
def test_bad_messages_are_named(
    runtime: Runtime, field: str, messages: list[Any], stream: bool
) -> None:
    with pytest.raises(litellm.BadRequestError, match=f"{field} ") as caught:
        litellm.completion(MODEL, messages, stream=stream, session_id="bad")
    assert caught.value.status_code == 400
    assert litellm.completion(MODEL, HELLO, max_tokens=1, session_id="bad").choices


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("temperature", {"temperature": 9}),
        ("top_p", {"top_p": "all"}),
        ("max_tokens", {"max_tokens": -1}),
        ("max_tokens", {"max_tokens": True}),
        ("seed", {"seed": 0.5}),
        ("stop", {"stop": [3]}),
        ("logit_bias", {"logit_bias": {"x": 1}}),
        ("logit_bias", {"logit_bias": {"5": 1000}}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("response_format", {"response_format": {"type": "yaml"}}),
        ("response_format.json_schema.schema", {"response_format": {"type": "json_schema"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "maybe"}),
        (
            "tool_choice",
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "sub"}}},
        ),
        (r"tools\[1\].function.name", {"tools": TOOLS * 2}),
        (r"tools\[0\]", {"tools": [{"type": "function", "function": nested(100)}]}),
        ("session_id", {"session_id": "x" * 10_000}),
        ("session_id", {"session_id": "../../etc/passwd"}),
        ("session_id", {"session_id": "a\x00b"}),
        ("session_id", {"session_id": ""}),
        ("session_id", {"session_id": 7}),
        ("prompt_cache_key", {"prompt_cache_key": "\ud800"}),
    ],
)
def test_bad_parameters_are_named(runtime: Runtime, field: str, params: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match=field) as caught:
        litellm.completion(MODEL, HELLO, **params)
    assert caught.value.status_code == 400
    assert [record for record in runtime.registry if not record.closed] == []


@pytest.mark.parametrize(
    "params",
    [
        {"n": 2},
        {"functions": [{"name": "add"}]},
        {"web_search_options": {}},
        {"cache_salt": "mine"},
        {"parallel_tool_calls": False, "tools": TOOLS},
    ],
    ids=lambda params: next(iter(params)),
)
def test_what_cannot_be_honoured_is_refused_or_dropped(
    runtime: Runtime, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(litellm.UnsupportedParamsError, match=next(iter(params))):
        litellm.completion(MODEL, HELLO, max_tokens=1, **params)
    assert litellm.completion(MODEL, HELLO, max_tokens=1, drop_params=True, **params).choices
    monkeypatch.setattr(litellm, "drop_params", True)
    assert litellm.completion(MODEL, HELLO, max_tokens=1, **params).choices


@pytest.fixture(scope="module")
def small_runtime() -> Iterator[Runtime]:
    """Too little memory for more than a short prompt."""
    with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="4MiB", max_running=1)) as runtime:
        yield runtime


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_a_prompt_that_does_not_fit_is_over_the_context_window(
    runtime: Runtime, small_runtime: Runtime, stream: bool
) -> None:
    litellm_provider.register(small_runtime, model="small")
    messages = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion("agentcache/small", messages, max_tokens=1, stream=stream)


def test_a_prompt_beyond_the_models_limit_is_over_the_context_window(runtime: Runtime) -> None:
    messages = [{"role": "user", "content": "word " * (runtime.max_len + 1)}]
    with pytest.raises(litellm.ContextWindowExceededError, match="the model's limit is"):
        litellm.completion(MODEL, messages, max_tokens=1)


def test_an_unknown_model_is_not_found(runtime: Runtime) -> None:
    with pytest.raises(litellm.NotFoundError, match=r"\.\./secret is not registered"):
        litellm.completion("agentcache/../secret", HELLO)


def test_a_closed_runtime_is_unavailable(runtime: Runtime) -> None:
    closed = Runtime.load("tiny-hybrid", cache=CacheConfig(budget="16MiB"))
    litellm_provider.register(closed, model="closed")
    stream = litellm.completion("agentcache/closed", HELLO, max_tokens=5000, stream=True)
    next(stream)
    closed.close()
    with pytest.raises(litellm.ServiceUnavailableError):
        list(stream)
    with pytest.raises(litellm.ServiceUnavailableError):
        litellm.completion("agentcache/closed", HELLO)


def test_a_reply_that_takes_too_long_times_out(runtime: Runtime) -> None:
    with pytest.raises(litellm.Timeout, match=r"longer than 0\.05 s"):
        litellm.completion(MODEL, HELLO, max_tokens=5000, timeout=0.05)


def test_two_calls_at_once_on_one_session_are_both_answered(runtime: Runtime) -> None:
    with engine_held(runtime):
        first, second = (
            litellm.completion(MODEL, HELLO, max_tokens=8, session_id="s", stream=True)
            for _ in range(2)
        )
    said, again = (
        "".join(chunk.choices[0].delta.content or "" for chunk in each) for each in (first, second)
    )
    assert said == again != ""
    assert len(runtime.session("s").tips) == 2
