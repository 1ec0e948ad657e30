"""The chat model by itself: calls, streams, tools, sessions, errors."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from langchain_core.exceptions import ContextOverflowError
from langchain_core.load import dumps, loads
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, Field, ValidationError

from agentcache import InvalidRequest, PromptTooLong, RequestCancelled
from agentcache.integrations.langchain_chat import ChatAgentCache

HELLO = [SystemMessage("You repair programs."), HumanMessage("The validator accepts a newline.")]


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def note(text: str) -> str:
    """Write something down."""
    return text


class Verdict(BaseModel):
    """What is thought of a patch."""

    good: bool
    why: str = Field(max_length=20)


def told(message: AIMessage) -> dict[str, Any]:
    place: dict[str, Any] = message.response_metadata["agentcache"]
    return place


def merged(chunks: list[Any]) -> Any:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


def cached(message: AIMessage) -> int:
    assert message.usage_metadata is not None
    return message.usage_metadata["input_token_details"]["cache_read"]


def test_a_turn_computes_only_what_is_new(chat):
    first = chat.invoke(HELLO)
    second = chat.invoke([*HELLO, first, HumanMessage("And?")])

    usage = second.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    details = usage["input_token_details"]
    assert details["cache_read"] + details["cache_creation"] == usage["input_tokens"]
    assert details["cache_read"] >= first.usage_metadata["total_tokens"] - 1
    assert told(second)["turn"] == 2


@pytest.mark.parametrize("bound", [{}, {"tool_choice": "note"}], ids=["text", "call"])
def test_a_stream_says_what_a_plain_call_says(make_chat, bound):
    def model() -> Any:
        return make_chat(max_tokens=32).bind_tools([add, note], **bound)

    plain = model().invoke(HELLO)
    chunks = list(model().stream(HELLO))
    whole = merged(chunks)

    assert (whole.content, whole.tool_calls) == (plain.content, plain.tool_calls)
    assert whole.usage_metadata["output_tokens"] == plain.usage_metadata["output_tokens"]
    reason = "finish_reason"
    assert whole.response_metadata[reason] == plain.response_metadata[reason]
    assert [chunk.chunk_position for chunk in chunks] == [None] * (len(chunks) - 1) + ["last"]
    assert plain.content or plain.tool_calls


async def test_async_calls_say_the_same(make_chat):
    plain = make_chat().invoke(HELLO)
    other = await make_chat().ainvoke(HELLO)
    chunks = [chunk async for chunk in make_chat().astream(HELLO)]

    assert other.content == plain.content == merged(chunks).content
    assert chunks[-1].chunk_position == "last"


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("note", ("note",)),
        ({"type": "function", "function": {"name": "add"}}, ("add",)),
        ("any", ("add", "note")),
        ("required", ("add", "note")),
        (True, ("add", "note")),
    ],
    ids=str,
)
def test_a_forced_call_is_one_of_a_tool_that_was_chosen(make_chat, choice, names):
    model = make_chat(max_tokens=48).bind_tools([add, note], tool_choice=choice)
    reply = model.invoke(HELLO)

    (call,) = reply.tool_calls
    assert call["name"] in names
    assert set(call["args"]) == ({"a", "b"} if call["name"] == "add" else {"text"})
    assert reply.response_metadata["finish_reason"] == "tool_calls"
    assert not reply.content


def test_a_forced_call_is_spelled_as_the_template_spells_it(make_chat, micro):
    model = make_chat(max_tokens=48).bind_tools([add], tool_choice="any")
    reply = model.invoke(HELLO)

    ids = micro.session(told(reply)["session"]).ids
    markup = micro.tokenizer.special_ids
    text = micro.tokenizer.decode(ids.tolist())
    assert {markup["<tool_call>"], markup["</tool_call>"]} <= set(ids.tolist())
    args = json.dumps(reply.tool_calls[0]["args"])
    assert f'{{"name": "add", "arguments": {args}}}</tool_call>' in text


def test_no_choice_and_none_keep_the_tools_in_the_prompt(make_chat):
    chat = make_chat()
    free = chat.bind_tools([add]).invoke(HELLO)
    none = chat.bind_tools([add], tool_choice="none").invoke(HELLO)
    strict = chat.bind_tools([add], strict=True).invoke(HELLO)

    assert not none.tool_calls
    for reply in (none, strict):
        assert reply.usage_metadata["input_tokens"] == free.usage_metadata["input_tokens"]
        assert cached(reply) > 0


@pytest.mark.parametrize(
    "arguments",
    [
        {"tool_choice": "subtract", "tools": [add]},
        {"tool_choice": "any"},
        {"response_format": {"type": "xml"}},
        {"tool_choice": "any", "tools": [add], "regex": "a+"},
        {"warmth": 1},
        {"model": "another"},
        {"session_id": "x" * 10_000},
        {"session_id": ""},
        {"session_id": "../other"},
        {"thread_id": "a\ud800"},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_arguments_that_make_no_sense_are_named(chat, arguments):
    with pytest.raises(InvalidRequest) as caught:
        chat.invoke(HELLO, **arguments)

    assert any(word in str(caught.value) for word in arguments)


def test_unknown_fields_are_refused():
    with pytest.raises(ValidationError, match="max_retries"):
        ChatAgentCache(model="tiny-hybrid", max_retries=2)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_its_class(make_chat, method):
    model = make_chat(max_tokens=64).with_structured_output(
        Verdict, method=method, include_raw=True
    )
    out = model.invoke(HELLO)

    assert out["parsing_error"] is None
    assert isinstance(out["parsed"], Verdict)


def test_structured_output_of_a_schema_is_a_dict(make_chat):
    schema = {"title": "Count", "type": "object", "properties": {"n": {"enum": [1, 2]}}}
    schema |= {"required": ["n"]}
    chat = make_chat()

    assert chat.with_structured_output(schema).invoke(HELLO)["n"] in (1, 2)
    assert isinstance(chat.with_structured_output(schema, method="json_mode").invoke(HELLO), dict)
    with pytest.raises(InvalidRequest, match="guess"):
        chat.with_structured_output(schema, method="guess")


def test_stop_seed_and_logprobs_reach_the_engine(make_chat):
    chat = make_chat(logit_bias=None, logprobs=True, top_logprobs=2, temperature=1.0, seed=7)
    one, two = chat.invoke(HELLO, session_id="a"), chat.invoke(HELLO, session_id="b")
    other = chat.invoke(HELLO, seed=8)
    stopped = chat.invoke(HELLO, stop=[one.content[3:6]])

    assert one.content == two.content != other.content
    assert stopped.content == one.content[:3]
    entries = one.response_metadata["logprobs"]["content"]
    assert len(entries) == one.usage_metadata["output_tokens"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)


def test_a_prompt_that_is_too_long_is_an_error_of_both_worlds(make_chat):
    with pytest.raises(ContextOverflowError) as caught:
        make_chat().invoke([HumanMessage("word " * 140_000)])

    assert isinstance(caught.value, PromptTooLong)
    assert caught.value.limit == 131072


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [HumanMessage([{"type": "image", "url": "x"}])],
        [ToolMessage("3", tool_call_id="c")],
        [("sage", "hm")],
    ],
    ids=["none", "image", "result without a call", "unknown role"],
)
def test_bad_lists_are_refused_and_nothing_is_left_behind(chat, micro, messages):
    before = len(list(micro.registry))
    with pytest.raises((InvalidRequest, ValueError)):
        chat.invoke(messages, session_id="bad")

    assert chat.invoke(HELLO, session_id="bad").content
    assert len(list(micro.registry)) == before + 1


def test_the_session_is_named_in_any_of_these_ways(chat, micro):
    config = {"configurable": {"session_id": "by-config"}}
    names = [
        told(chat.invoke(HELLO, session_id="by-call"))["session"],
        told(chat.bind(session_id="by-bind").invoke(HELLO))["session"],
        told(chat.invoke(HELLO, config))["session"],
        told(merged(list(chat.stream(HELLO, config))))["session"],
        told(chat.invoke(HELLO, {"configurable": {"thread_id": "t"}}))["session"],
    ]
    with chat.session("by-block"):
        names.append(told(chat.invoke(HELLO))["session"])

    assert names == ["by-call", "by-bind", "by-config", "by-config", "t:", "by-block"]
    assert "by-block" not in {record.id for record in micro.registry}


def test_without_a_name_conversations_are_told_apart_by_what_they_say(chat):
    one = chat.invoke([HumanMessage("first")])
    two = chat.invoke([HumanMessage("second")])
    more = chat.invoke([HumanMessage("first"), one, HumanMessage("go on")])

    assert told(more)["session"] == told(one)["session"] != told(two)["session"]
    assert cached(more) >= one.usage_metadata["total_tokens"] - 1


def test_an_edited_list_stays_in_its_session_and_keeps_the_part_before_the_edit(chat):
    long = HumanMessage("output: " + "line " * 60)
    first = chat.invoke([*HELLO, long], session_id="s")
    second = chat.invoke([*HELLO, long, first, HumanMessage("a")], session_id="s")
    edited = [*HELLO, HumanMessage("output: cut"), first, HumanMessage("a"), second]
    third = chat.invoke([*edited, HumanMessage("b")], session_id="s")

    assert told(third)["session"] == "s"
    assert "message 2 (user)" in told(third)["miss"]
    assert cached(third) > 10


def test_arguments_changed_in_place_after_a_call_are_in_the_next_prompt(chat):
    asked = {"name": "add", "args": {"a": 11, "b": 22}, "id": "c1", "type": "tool_call"}
    messages = [*HELLO, AIMessage("", tool_calls=[asked]), ToolMessage("33", tool_call_id="c1")]
    messages.append(chat.invoke(messages, session_id="s"))
    messages[2].tool_calls[0]["args"]["b"] = 77
    again = chat.invoke([*messages, HumanMessage("And?")], session_id="s")
    session = chat.sessions.session(told(again)["session"])
    text = chat.engine.tokenizer.decode(
        session.ids[: again.usage_metadata["input_tokens"]].tolist()
    )
    assert "77" in text
    assert "22" not in text


def test_a_clock_in_the_system_prompt_is_named(chat):
    def at(clock: str, *more: Any) -> list[Any]:
        return [SystemMessage(f"You repair programs. It is {clock}."), HELLO[1], *more]

    first = chat.invoke(at("12:01"), session_id="s")
    second = chat.invoke(at("12:02", first, HumanMessage("And?")), session_id="s")

    assert told(second)["session"] == "s"
    assert re.search(r"message 0 \(system\).*1.* was there, .*2.* is now", told(second)["miss"])


@pytest.mark.parametrize("dropped", [False, True], ids=["kept", "dropped"])
def test_reasoning_that_comes_back_or_not_costs_nothing(make_chat, micro, dropped):
    chat = make_chat()
    ids = micro.tokenizer.special_ids
    open_id, close_id = ids["<think>"], ids["</think>"]
    first = chat.invoke(
        HELLO,
        session_id="s",
        lark=f"start: <[{open_id}]> /[a-z ]{{8,}}/ <[{close_id}]> /[a-z ]{{4}}/",
        logit_bias={close_id: 20.0},
    )
    assert first.additional_kwargs["reasoning_content"]
    assert [block["type"] for block in first.content_blocks] == ["reasoning", "text"]
    if dropped:
        first = AIMessage(first.content, usage_metadata=first.usage_metadata)
    second = chat.invoke([*HELLO, first, HumanMessage("And?")], session_id="s")

    assert cached(second) >= first.usage_metadata["total_tokens"] - 1


def test_respelled_arguments_and_reordered_results_cost_nothing(make_chat):
    chat = make_chat(max_tokens=64)
    tools = chat.bind_tools([add], tool_choice="any", parallel_tool_calls=True)
    asked = tools.invoke(HELLO, session_id="s")
    (call,) = asked.tool_calls[:1]
    again = AIMessage(
        "",
        tool_calls=[{**call, "args": dict(reversed(call["args"].items()))}, *asked.tool_calls[1:]],
    )
    results = [ToolMessage("7", tool_call_id=c["id"]) for c in reversed(asked.tool_calls)]
    after = chat.bind_tools([add]).invoke([*HELLO, again, *results], session_id="s")

    assert told(after) | {"miss": ""} == {"session": "s", "turn": 2, "miss": ""}
    assert cached(after) >= asked.usage_metadata["total_tokens"] - 1


def test_parallel_calls_on_one_session_leave_a_branch_each(chat):
    first = chat.invoke(HELLO, session_id="s")
    lists = [[*HELLO, first, HumanMessage(f"option {n}")] for n in range(3)]
    replies = chat.bind(session_id="s").batch(lists)
    more = [
        chat.invoke([*asked, reply, HumanMessage("go on")], session_id="s")
        for asked, reply in zip(lists, replies, strict=True)
    ]

    assert len({told(reply)["session"] for reply in replies}) == 3
    for reply, after in zip(replies, more, strict=True):
        assert cached(reply) >= first.usage_metadata["total_tokens"] - 1
        assert told(after)["session"] == told(reply)["session"]
        assert cached(after) >= reply.usage_metadata["total_tokens"] - 1


def test_no_more_sessions_and_branches_are_kept_than_asked_for(make_chat, micro):
    chat = make_chat(max_sessions=2, max_branches=2, max_tokens=1)
    for name in ("a", "b", "c"):
        chat.invoke(HELLO, session_id=name)
    for n in range(4):
        chat.invoke([HumanMessage(f"topic {n}")], session_id="c")

    ids = {record.id for record in micro.registry}
    assert "a" not in ids
    assert "b" in ids
    assert len(ids) == 3


def test_a_stream_that_is_left_stops_and_gives_its_branch_back(chat, micro):
    stream = chat.stream(HELLO, session_id="s", max_tokens=2000)
    next(stream)
    stream.close()

    after = chat.invoke(HELLO, session_id="s")
    assert told(after)["session"] == "s"
    assert micro.stats()["leases"] == 0


async def test_a_cancelled_call_stops_and_gives_its_branch_back(chat, micro):
    task = asyncio.create_task(chat.ainvoke(HELLO, session_id="s", max_tokens=5000))
    while not micro.stats()["leases"]:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises((asyncio.CancelledError, RequestCancelled)):
        await task

    after = await chat.ainvoke(HELLO, session_id="s")
    assert told(after)["session"] == "s"


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_a_call_that_takes_too_long_is_cancelled(make_chat, micro, is_async):
    chat = make_chat(timeout=0.05, max_tokens=5000)
    with pytest.raises(TimeoutError):
        await (chat.ainvoke(HELLO) if is_async else asyncio.to_thread(chat.invoke, HELLO))

    assert micro.stats()["sessions"]["tips"] == 0


@pytest.mark.filterwarnings("ignore:The function `loads` is in beta")
def test_a_named_model_can_be_saved_and_loaded():
    chat = ChatAgentCache(model="tiny-hybrid", temperature=0.5, tenant="acme")
    again = loads(dumps(chat), valid_namespaces=["agentcache"], allowed_objects=[ChatAgentCache])

    assert isinstance(again, ChatAgentCache)
    assert (again.model_name, again.temperature, again.tenant) == ("tiny-hybrid", 0.5, "acme")


def test_tokens_are_counted_by_the_models_own_template(chat):
    reply = chat.bind_tools([add]).invoke(HELLO)

    counted = chat.get_num_tokens_from_messages(HELLO, tools=[add])
    assert reply.usage_metadata["input_tokens"] == counted
    assert chat.get_num_tokens("hello") == len(chat.get_token_ids("hello")) > 0
