"""Messages checked before a template sees them, tool results in call order, messages compared."""

import pytest

from agentcache.engine.messages import (
    STANDARD_ROLES,
    call_order,
    checked_messages,
    checked_tools,
    same_message,
    same_prefix,
)
from agentcache.errors import InvalidRequest


def user(content: object = "hi", **more: object) -> dict:
    return {"role": "user", "content": content, **more}


def calls(*ids: str, arguments: object = "{}") -> dict:
    made = [{"id": i, "function": {"name": "f", "arguments": arguments}} for i in ids]
    return {"role": "assistant", "content": None, "tool_calls": made}


def result(call_id: str | None, content: str = "ok") -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def deep(levels: int) -> object:
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "empty"),
        ("hello", "str"),
        ({"role": "user"}, "dict"),
        (None, "NoneType"),
        ([user(), "hello"], "message 1 is a str"),
        ([user(), {"content": "x"}], "message 1 has the role None"),
        ([{"role": "pirate", "content": "x"}], "pirate"),
        ([{"role": ["user"], "content": "x"}], "message 0 has the role"),
        ([user(), {"role": "user"}], r"message 1 \(user\) has no content"),
        ([user(None)], "no content"),
        ([{"role": "assistant"}], "no content"),
        ([user(3)], "content of type int"),
        ([user([{"type": "image_url", "image_url": {"url": "x"}}])], "message 0 .*image_url"),
        ([user([{"type": "text", "text": 3}])], "part"),
        ([user(["text"])], "part of type 'str'"),
        ([user("a\ud800b")], r"message 0 \(user\) holds a lone surrogate"),
        ([user(extra={"k\udfff": 1})], "lone surrogate"),
        ([user(extra={1: "x"})], "key 1"),
        ([user(extra=object())], "holds a object"),
        ([user(extra=deep(100_000))], "nested"),
        ([{"role": "assistant", "tool_calls": {"name": "f"}}], "tool_calls of type dict"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "tool call 0 names no function"),
        ([calls("a", arguments=[1])], "arguments of type list"),
    ],
)
def test_malformed_messages_are_refused_with_their_place(messages, problem):
    with pytest.raises(InvalidRequest, match=problem):
        checked_messages(messages, STANDARD_ROLES)


@pytest.mark.parametrize("tools", ["f", {"name": "f"}, ["f"], [{"name": "\ud800"}], 3])
def test_malformed_tools_are_refused(tools):
    with pytest.raises(InvalidRequest, match="tool"):
        checked_tools(tools)


def test_no_tools_and_an_empty_list_are_the_same():
    assert checked_tools(None) is None
    assert checked_tools([]) is None


def test_text_parts_become_one_text_and_empty_replies_the_empty_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([user(parts)], STANDARD_ROLES)[0]["content"] == "a\nb"
    assert checked_messages([calls("a")], STANDARD_ROLES)[0]["content"] == ""


def test_the_callers_messages_are_not_changed():
    message = user(mark=True, name=None)
    checked = checked_messages([message], STANDARD_ROLES)[0]
    checked["content"] = "other"
    assert message == user(mark=True, name=None)
    assert "name" not in checked


def test_results_of_parallel_calls_are_put_in_call_order():
    messages = [user(), calls("a", "b", "c"), result("c"), result("a"), result("b"), user()]
    assert call_order(messages) == [0, 1, 3, 4, 2, 5]


def test_results_that_name_no_call_stay_where_they_are():
    for odd in (result("z"), result(None)):
        messages = [calls("a", "b"), result("b"), odd, result("a")]
        assert call_order(messages) == [0, 1, 2, 3]


def test_results_of_different_calls_are_not_mixed():
    messages = [calls("a", "b"), result("b"), result("a"), calls("a", "b"), result("b")]
    assert call_order(messages) == [0, 2, 1, 3, 4]


def test_a_message_is_recognised_whatever_the_spelling_of_its_arguments():
    known = calls("a", arguments='{"x":  1, "y": 2}') | {"reasoning_content": "why"}
    assert same_message(known, calls("other", arguments='{"y":2,"x":1}'))
    assert same_message(known, calls("a", arguments={"x": 1, "y": 2}) | {"content": ""})
    assert same_message(known, known | {"mark": True})
    assert same_message(known, known | {"cache_control": {"type": "ephemeral"}, "refusal": None})


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_is_compared_under_every_name_it_goes_by(name):
    known = calls("a") | {"reasoning_content": "why"}
    assert same_message(known, calls("a") | {name: "why"})
    assert same_message(calls("a") | {name: "why"}, known)
    assert same_message(known, calls("a") | {name: ""})
    assert not same_message(known, calls("a") | {name: "other"})
    assert not same_message(known, known | {name: "other"})
    assert not same_message(calls("a"), calls("a") | {name: "why"})


@pytest.mark.parametrize("key", ["name", "reasoning_details", "refusal", "effort"])
def test_any_other_key_with_a_value_makes_another_message(key):
    for message in (user(), calls("a"), result("a")):
        assert not same_message(message, message | {key: "high"})
        assert not same_message(message | {key: "high"}, message | {key: "low"})
        assert same_message(message | {key: "high"}, message | {key: "high", "mark": True})
        assert same_message(message | {key: None}, message | {"mark": True})


@pytest.mark.parametrize(
    "given",
    [
        calls("a", arguments='{"x": 2}'),
        calls("a", arguments="not json"),
        calls("a", "b", arguments='{"x": 1}'),
        calls("a", arguments='{"x": 1}') | {"content": "more"},
        calls("a", arguments='{"x": 1}') | {"reasoning_content": "other"},
        calls("a", arguments='{"x": 1}') | {"role": "user"},
    ],
)
def test_an_edited_message_is_not_recognised(given):
    known = calls("a", arguments='{"x": 1}') | {"reasoning_content": "why"}
    assert not same_message(known, given)


def test_a_known_list_is_recognised_with_its_tool_results_in_another_order():
    known = [user(), calls("a", "b"), result("a", "1"), result("b", "2")]
    back = [user(), calls("a", "b"), result("b", "2"), result("a", "1"), user("new")]
    assert same_prefix(known, back)
    assert not same_prefix(known, back[:3])
    assert not same_prefix(known, [user("edited"), *back[1:]])


def test_a_result_of_another_call_is_not_recognised():
    assert same_message(result("a"), result("a"))
    assert not same_message(result("a"), result("b"))


@pytest.mark.parametrize("odd", [3, "x", None, {"role": "assistant", "tool_calls": 3}])
def test_what_is_no_message_is_not_recognised(odd):
    known = calls("a")
    assert not same_message(known, odd)
    assert not same_prefix([known], [odd])
