"""Messages on the way in and out, without a model."""

from __future__ import annotations

import pytest
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    RemoveMessage,
    SystemMessage,
    ToolMessage,
)

from agentcache import InvalidRequest
from agentcache.integrations._langchain.messages import digests, openai_messages, parsed_calls

CALL = {"name": "add", "args": {"a": 1, "b": 2}, "id": "c1", "type": "tool_call"}


def test_every_kind_of_message_is_read():
    read = openai_messages(
        [
            SystemMessage("rules"),
            HumanMessage("sum", name="ann"),
            AIMessage("", tool_calls=[CALL], additional_kwargs={"reasoning_content": "add them"}),
            ToolMessage("3", tool_call_id="c1", name="add"),
            ChatMessage("tail", role="user"),
        ]
    )

    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": CALL["args"]}}
    assert read == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "sum", "name": "ann"},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "add them",
            "tool_calls": [call],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        {"role": "user", "content": "tail"},
    ]


def test_blocks_of_text_are_lines_and_those_of_a_reply_are_put_together():
    reply = AIMessage(
        [
            {"type": "reasoning", "reasoning": "why"},
            {"type": "text", "text": "Beca"},
            {"type": "text", "text": "use"},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {}},
        ],
        tool_calls=[CALL],
    )
    question, answer = openai_messages([HumanMessage(["a", {"type": "text", "text": "b"}]), reply])

    assert question["content"] == "a\nb"
    assert (answer["content"], answer["reasoning_content"]) == ("Because", "why")
    assert [call["id"] for call in answer["tool_calls"]] == ["c1"]


def test_a_call_that_could_not_be_parsed_goes_back_as_it_was_written():
    broken = {"name": "add", "args": '{"a": ', "id": "c1", "error": "cut"}
    read = openai_messages(
        [
            AIMessage("", invalid_tool_calls=[{**broken, "type": "invalid_tool_call"}]),
            ToolMessage("error", tool_call_id="c1"),
        ]
    )

    assert read[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": '}


def test_the_agents_name_is_no_part_of_its_reply():
    assert openai_messages([AIMessage("yes", name="planner")]) == [
        {"role": "assistant", "content": "yes"}
    ]


@pytest.mark.parametrize(
    "message",
    [
        HumanMessage("head", additional_kwargs={"mark": True}),
        HumanMessage([{"type": "text", "text": "head", "cache_control": {"type": "ephemeral"}}]),
    ],
    ids=["mark", "cache_control"],
)
def test_marks_ask_for_a_checkpoint(message):
    assert openai_messages([message]) == [{"role": "user", "content": "head", "mark": True}]


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (
            [HumanMessage([{"type": "image_url", "image_url": {"url": "data:,"}}])],
            ["message 0", "'image_url'", "text only"],
        ),
        (
            [AIMessage("", tool_calls=[CALL]), ToolMessage([{"type": "image"}], tool_call_id="c1")],
            ["message 1 (tool)", "'image'"],
        ),
        ([ToolMessage("3", tool_call_id="c9")], ["message 0 (tool)", "'c9'", "no message before"]),
        ([HumanMessage("a"), RemoveMessage(id="x")], ["message 1", "'remove'"]),
    ],
    ids=["image", "image from a tool", "result without a call", "no message"],
)
def test_what_cannot_be_read_is_refused_by_name(messages, words):
    with pytest.raises(InvalidRequest) as caught:
        openai_messages(messages)

    assert all(word in str(caught.value) for word in words)


def test_digests_see_through_spelling():
    def asked(args: object, id: str) -> dict[str, object]:
        call = {"id": id, "function": {"name": "add", "arguments": args}}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    results = [
        {"role": "tool", "content": text, "tool_call_id": id}
        for text, id in (("3", "c1"), ("7", "c2"))
    ]
    one = digests([asked({"a": 1, "b": 2}, "c1"), *results])

    assert one == digests([asked('{"b":2,  "a":1}', "x"), *reversed(results)])
    assert one != digests([asked({"a": 1, "b": 3}, "c1"), *results])
    assert one != digests([asked({"a": 1, "b": 2}, "c1"), results[0]])


def test_calls_without_an_object_of_arguments_are_told_apart():
    calls = [
        {"id": "a", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "b", "function": {"name": "f", "arguments": "[1]"}},
        {"id": "c", "function": {"name": "f", "arguments": '{"x": '}},
    ]
    good, bad = parsed_calls(calls)

    assert [(call["id"], call["args"]) for call in good] == [("a", {"x": 1})]
    assert [(call["id"], call["args"]) for call in bad] == [("b", "[1]"), ("c", '{"x": ')]
