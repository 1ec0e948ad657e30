"""Calls whose arguments Python holds for equal, or hashes alike, are different calls."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph

from agentcache.integrations._langchain.messages import message_digest
from agentcache.integrations.langgraph_session import recorded_calls

ALIKE = [-1, -2, 0, False, 1, True, 1.0, None, "", "1", "-1", "null", "true", [], {}, [1], [True]]
TAKE: dict[str, Any] = {
    "name": "take",
    "description": "Take some.",
    "parameters": {
        "type": "object",
        "properties": {"n": {"enum": [-1]}},
        "required": ["n"],
        "additionalProperties": False,
    },
}


def asked(arguments: Any) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "take", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def took(n: Any) -> AIMessage:
    return AIMessage("", tool_calls=[{"name": "take", "args": {"n": n}, "id": "c"}])


def test_arguments_that_hash_alike_have_digests_of_their_own():
    assert len({message_digest(asked({"n": value})) for value in ALIKE}) == len(ALIKE)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"b": [1, {"d": 2, "c": 3}], "a": "é"}', {"a": "é", "b": [1, {"c": 3, "d": 2}]}),
        ('{"a": 1e3}', {"a": 1000.0}),
        ('{"a": \n', '{"a": \n'),
        ({1: 2, "a": 3}, {1: 2, "a": 3}),
    ],
    ids=["order of keys", "numbers", "no JSON", "keys of two types"],
)
def test_the_same_arguments_have_one_digest_however_they_are_spelled(one, other):
    assert message_digest(asked(one)) == message_digest(asked(other))
    assert message_digest(asked(one)) != message_digest(asked({"a": 2}))


def test_a_call_that_was_edited_leaves_its_session(make_chat):
    chat = make_chat(max_tokens=48)
    reply = chat.bind_tools([TAKE], tool_choice="take").invoke(
        [HumanMessage("Take one away.")], session_id="s"
    )
    (call,) = reply.tool_calls
    assert call["args"] == {"n": -1}
    edited = AIMessage("", tool_calls=[{**call, "args": {"n": -2}}])
    after = chat.bind_tools([TAKE]).invoke(
        [HumanMessage("Take one away."), edited, ToolMessage("done", tool_call_id=call["id"])],
        session_id="s",
    )

    assert reply.response_metadata["agentcache"]["session"] == "s"
    assert after.response_metadata["agentcache"]["session"] != "s"


def test_recorded_calls_keep_forks_apart_whose_arguments_hash_alike():
    values = iter([-1, -2, True, 1])
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda _: {"messages": [took(next(values))]})
    graph.add_edge(START, "model")
    compiled = graph.compile(checkpointer=InMemorySaver())
    thread: Any = {"configurable": {"thread_id": "T"}}
    compiled.invoke({"messages": [HumanMessage("Take some.")]}, thread)
    begun = next(h for h in compiled.get_state_history(thread) if h.next == ("model",))
    for _ in range(3):
        compiled.invoke(None, begun.config)

    assert isinstance(compiled.checkpointer, InMemorySaver)
    calls = list(recorded_calls(compiled.checkpointer))
    arguments = [call["answer"]["tool_calls"][0]["function"]["arguments"] for call in calls]
    assert list(map(repr, arguments)) == ["{'n': -1}", "{'n': -2}", "{'n': True}", "{'n': 1}"]
