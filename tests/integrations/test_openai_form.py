"""OpenAI's form of a call, read and written without any framework."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from agentcache import InvalidRequest, PromptTooLong, Runtime, RuntimeClosed, UnsupportedOption
from agentcache.integrations._openai import (
    MAX_DEPTH,
    MAX_ID_BYTES,
    InvalidField,
    UnsupportedField,
    check_value,
    error_of,
    read_call,
    read_messages,
    read_session_id,
    read_tools,
    usage_of,
)
from agentcache.types import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

HELLO = [{"role": "user", "content": "Hi"}]


def tool(name: str = "add", **parameters: Any) -> dict[str, Any]:
    schema = {"type": "object", **parameters}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime.load("tiny-hybrid") as made:
        yield made


def test_messages_keep_what_templates_know() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    given = [
        {"role": "developer", "content": "Be kind.", "name": None},
        {"role": "user", "content": [{"type": "text", "text": "Hi", "annotations": []}]},
        {"role": "assistant", "tool_calls": [call], "audio": None, "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "3", "extra": 1},
        {"role": "assistant", "content": None, "reasoning_content": "why", "tool_calls": []},
    ]
    assert read_messages(given) == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
        {"role": "assistant", "content": "", "reasoning_content": "why"},
    ]


@pytest.mark.parametrize("place", ["message", "part"])
def test_cache_control_marks_the_end_of_its_message(place: str) -> None:
    part: dict[str, Any] = {"type": "text", "text": "Hi"}
    message: dict[str, Any] = {"role": "user", "content": [part]}
    (message if place == "message" else part)["cache_control"] = {"type": "ephemeral"}
    assert read_messages([message, *HELLO]) == [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "mark": True},
        *HELLO,
    ]


@pytest.mark.parametrize(
    ("param", "messages"),
    [
        ("messages", "Hi"),
        ("messages", None),
        ("messages[0]", ["Hi"]),
        ("messages[0].content", [{"role": "user", "content": 3}]),
        ("messages[0].content[0]", [{"role": "user", "content": ["Hi"]}]),
        ("messages[0].name", [{"role": "user", "content": "Hi", "name": 3}]),
        ("messages[0].function_call", [{"role": "assistant", "function_call": {"name": "f"}}]),
        ("messages[0].tool_calls", [{"role": "assistant", "tool_calls": "add"}]),
        (
            "messages[0].tool_calls[0].function.name",
            [{"role": "assistant", "tool_calls": [{"id": "c"}]}],
        ),
        ("messages[0]", [{"role": "user", "content": "Hi", "seen": {1, 2}}]),
        ("messages[0]", [{"role": "user", "content": "Hi", 3: 4}]),
    ],
)
def test_a_bad_message_is_named(param: str, messages: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        read_messages(messages)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("param", "tools"),
    [
        ("tools", {"add": {}}),
        ("tools[0]", ["add"]),
        ("tools[0].type", [{"type": "web_search"}]),
        ("tools[0].function", [{"type": "function"}]),
        ("tools[0].function.name", [{"function": {"name": ""}}]),
        ("tools[0].function.parameters", [{"function": {"name": "f", "parameters": []}}]),
    ],
)
def test_a_bad_tool_is_named(param: str, tools: Any) -> None:
    with pytest.raises(InvalidField) as caught:
        read_tools(tools)
    assert caught.value.param == param


def test_the_number_of_tools_is_limited() -> None:
    tools = [tool(f"f{number}") for number in range(1025)]
    assert read_tools(tools[:-1]) == tools[:-1]
    with pytest.raises(InvalidField, match="tools holds 1025 tools, the limit is 1024"):
        read_tools(tools)


def test_a_name_that_two_tools_have_is_named() -> None:
    with pytest.raises(InvalidField) as caught:
        read_tools([tool("a"), tool("b"), tool("a")])
    assert caught.value.param == "tools[2].function.name"


@pytest.mark.parametrize("stop", [["x"] * 17, "x" * 1001, ["x", "y" * 1001]])
def test_stop_texts_are_few_and_short(stop: Any) -> None:
    with pytest.raises(InvalidField, match=r"stop holds .*, the limit is"):
        read_call({"messages": HELLO, "stop": stop})
    most = ["x" * 1000] * 16
    assert read_call({"messages": HELLO, "stop": most}).options["stop"] == most


def test_depth_is_limited_without_recursion() -> None:
    value: Any = "x"
    for _ in range(MAX_DEPTH):
        value = [value]
    check_value(value, "fine")
    for _ in range(10_000):
        value = [value]
    with pytest.raises(InvalidField, match="deep is nested deeper than"):
        check_value(value, "deep")


@pytest.mark.parametrize("id", ["a", "user/7:thread|2", "Ω" * (MAX_ID_BYTES // 2), "a..b", "x y"])
def test_an_id_is_an_opaque_name(id: str) -> None:
    assert read_session_id(id, "session_id") == id


@pytest.mark.parametrize(
    "id", ["", "Ω" * MAX_ID_BYTES, "..", "a/../b", r"..\b", "/etc", "a\nb", "\x7f", "\ud800", 7, []]
)
def test_an_id_that_is_no_name_is_refused(id: Any) -> None:
    with pytest.raises(InvalidField, match="session_id "):
        read_session_id(id, "session_id")


def test_parameters_go_to_the_options_of_their_meaning() -> None:
    given = {
        "model": "m",
        "messages": HELLO,
        "max_tokens": 5,
        "max_completion_tokens": 7,
        "temperature": 0.5,
        "top_k": -1,
        "stop": "x",
        "logit_bias": {"5": 1},
        "logprobs": True,
        "top_logprobs": 2,
        "seed": None,
        "n": 1,
        "user": "u",
    }
    call = read_call(given, defaults={"max_new_tokens": 3, "min_p": 0.1})
    assert call.options == {
        "max_new_tokens": 7,
        "min_p": 0.1,
        "temperature": 0.5,
        "top_k": 0,
        "stop": ["x"],
        "logit_bias": {5: 1},
        "logprobs": True,
        "top_logprobs": 2,
    }


@pytest.mark.parametrize("name", ["n", "audio", "reasoning_effort", "tenant"])
def test_what_is_not_supported_is_refused_dropped_or_passed_over(name: str) -> None:
    given = {"messages": HELLO, name: 2}
    with pytest.raises(UnsupportedField, match=name) as caught:
        read_call(given)
    assert caught.value.param == name
    assert read_call(given, drop=True) == read_call(given, ignored=[name])


@pytest.mark.parametrize("is_native", [True, False], ids=["as the model writes", "as JSON"])
def test_a_forced_call_keeps_the_definitions_of_its_schema(
    runtime: Runtime, is_native: bool
) -> None:
    size = {"type": "integer", "minimum": 1, "maximum": 9}
    tools = [
        tool(
            name,
            properties={"a": {"$ref": "#/$defs/Size"}},
            required=["a"],
            additionalProperties=False,
            **{"$defs": {"Size": {**size, "minimum": least}}},
        )
        for name, least in (("low", 1), ("high", 9))
    ]
    call = read_call(
        {"messages": HELLO, "tools": tools, "tool_choice": "required"},
        call_grammar=runtime.chat_format.tool_call_grammar if is_native else None,
    )
    with runtime.session() as session:
        turn = session.complete(call.messages, tools=call.tools, max_new_tokens=200, **call.options)
    assert turn.message.get("tool_calls", []) == [] or is_native
    (made,) = call.form.message(turn)["tool_calls"]
    least = {"low": 1, "high": 9}[made["function"]["name"]]
    assert least <= json.loads(made["function"]["arguments"])["a"] <= 9


def test_several_calls_are_only_forced_where_they_are_asked_for(runtime: Runtime) -> None:
    given = {"messages": HELLO, "tools": [tool()], "tool_choice": "required"}
    grammar = runtime.chat_format.tool_call_grammar
    one = read_call(given, call_grammar=grammar).options
    several = read_call({**given, "parallel_tool_calls": True}, call_grammar=grammar).options
    assert one == read_call({**given, "parallel_tool_calls": False}, call_grammar=grammar).options
    assert one != several


def test_a_schema_that_refers_elsewhere_is_refused() -> None:
    tools = [tool(properties={"a": {"$ref": "http://example.com/schema"}})]
    with pytest.raises(UnsupportedField, match=r"tools\[0\].function.parameters refers to"):
        read_call({"messages": HELLO, "tools": tools, "tool_choice": "required"})


def test_usage_counts_what_the_cache_gave_and_gained() -> None:
    told = usage_of(Usage(10, 6, 4, 3, 0.1, 0.2))
    assert told == {
        "prompt_tokens": 10,
        "completion_tokens": 3,
        "total_tokens": 13,
        "prompt_tokens_details": {"cached_tokens": 6, "cache_creation_tokens": 4},
    }


@pytest.mark.parametrize(
    ("error", "status", "code", "param"),
    [
        (InvalidField("stop", "is 3"), 400, None, "stop"),
        (InvalidRequest("no"), 400, None, None),
        (UnsupportedOption("no"), 400, "unsupported_parameter", None),
        (PromptTooLong(9, 8), 400, "context_length_exceeded", "messages"),
        (RuntimeClosed("closed"), 503, "closed", None),
        (ZeroDivisionError(), 500, None, None),
    ],
)
def test_errors_have_a_status_and_name_the_field(
    error: Exception, status: int, code: str | None, param: str | None
) -> None:
    shape = error_of(error)
    assert (shape.status, shape.code, shape.param) == (status, code, param)
    assert shape.body()["error"]["message"]
