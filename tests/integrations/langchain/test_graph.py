"""The chat model in graphs: threads, branches, forks, interrupts, agents and their middleware."""

from __future__ import annotations

import asyncio
import json
import operator
from itertools import pairwise
from typing import Annotated, Any, TypedDict

import pytest
from deepagents import create_deep_agent
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, wrap_model_call
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage, RemoveMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from agentcache import UnsupportedOption
from agentcache.integrations.langgraph_session import (
    AgentCacheMiddleware,
    closing_sessions,
    recorded_calls,
    session_at,
)
from agentcache.replay.trace import read_paths

THREAD = {"configurable": {"thread_id": "T"}}
LONG = "a line of what the tests printed; " * 30


@tool
def run(command: str) -> str:
    """Run a command."""
    return f"{command}: {LONG}"


@tool
def read(path: str) -> str:
    """Read a file."""
    return f"{path}: {LONG}"


def react() -> Any:
    """Random weights choose nothing: a question is answered by a call, its result by text."""

    def choose(request: Any) -> Any:
        asked = isinstance(request.messages[-1], HumanMessage)
        if asked:
            return request.override(tool_choice="any")
        return request.override(tool_choice="none", model_settings={"max_tokens": 8})

    @wrap_model_call
    def chosen(request: Any, handler: Any) -> Any:
        return handler(choose(request))

    @wrap_model_call
    async def achosen(request: Any, handler: Any) -> Any:
        return await handler(choose(request))

    type(chosen).awrap_model_call = type(achosen).awrap_model_call
    return chosen


def make_agent(chat: Any, *more: Any, **settings: Any) -> Any:
    settings.setdefault("checkpointer", InMemorySaver())
    middleware = [AgentCacheMiddleware(), react(), *more]
    return create_agent(
        chat, [run, read], system_prompt="You repair programs.", middleware=middleware, **settings
    )


def replies(state: dict[str, Any]) -> list[AIMessage]:
    return [message for message in state["messages"] if isinstance(message, AIMessage)]


def told(message: AIMessage) -> dict[str, Any]:
    return message.response_metadata["agentcache"]


def computed(message: AIMessage) -> int:
    return message.usage_metadata["input_token_details"]["cache_creation"]


def num_new(before: AIMessage, message: AIMessage) -> int:
    """Tokens of a prompt that neither the last prompt nor its reply held."""
    return message.usage_metadata["input_tokens"] - before.usage_metadata["total_tokens"]


def llm_graph(chat: Any, **settings: Any) -> Any:
    def call(state: MessagesState) -> dict[str, Any]:
        return {"messages": [chat.invoke(state["messages"])]}

    graph = StateGraph(MessagesState).add_node("llm", call).add_edge(START, "llm")
    return graph.compile(checkpointer=InMemorySaver(), **settings)


def test_ten_turns_of_an_agent_compute_what_is_new(make_chat, micro):
    agent = make_agent(make_chat(max_tokens=40))
    for n in range(10):
        state = agent.invoke({"messages": [("user", f"Task {n}: {LONG}")]}, THREAD)

    said = replies(state)
    assert len(said) == 20
    assert sum(bool(reply.tool_calls) for reply in said) == 10
    new = said[0].usage_metadata["input_tokens"]
    new += sum(num_new(*pair) for pair in pairwise(said))
    assert sum(map(computed, said)) <= 1.01 * new
    assert {told(reply)["session"] for reply in said} == {"T:model"}
    assert [told(reply)["turn"] for reply in said] == list(range(1, 21))


async def test_an_async_agent_says_and_computes_the_same(make_chat):
    def question() -> dict[str, Any]:
        return {"messages": [("user", "Task")]}

    plain = make_agent(make_chat()).invoke(question(), THREAD)
    other = await make_agent(make_chat()).ainvoke(question(), THREAD)
    agent = make_agent(make_chat())
    async for state in agent.astream(question(), THREAD, stream_mode="values"):
        streamed = state

    for state in (other, streamed):
        assert [m.content for m in state["messages"]] == [m.content for m in plain["messages"]]


def test_streamed_tokens_of_a_graph_are_those_of_its_reply(chat):
    asked = {"messages": [("user", "a")]}
    chunks = list(llm_graph(chat).stream(asked, THREAD, stream_mode="messages"))
    plain = llm_graph(chat).invoke(asked, THREAD)

    assert "".join(chunk.text for chunk, _ in chunks) == plain["messages"][-1].content
    assert chunks[-1][0].usage_metadata["output_tokens"] > 0


def test_a_thread_without_middleware_is_a_session(chat):
    graph = llm_graph(chat)
    graph.invoke({"messages": [("user", "a")]}, THREAD)
    said = replies(graph.invoke({"messages": [("user", "b")]}, THREAD))

    assert [told(reply)["session"] for reply in said] == ["T:llm", "T:llm"]
    assert computed(said[1]) <= num_new(*said) + 1


class Fan(TypedDict):
    topics: list[str]
    messages: Annotated[list[Any], operator.add]


def test_parallel_branches_share_the_head_and_keep_their_own_ends(chat):
    head = HumanMessage(LONG)

    def fan(state: Fan) -> list[Send]:
        plan = state["messages"]
        return [Send("work", {"topics": [topic], "messages": plan}) for topic in state["topics"]]

    def plan(state: Fan) -> dict[str, Any]:
        return {"messages": [chat.invoke([head])]}

    def work(state: Fan) -> dict[str, Any]:
        asked = [head, *state["messages"], HumanMessage(state["topics"][0])]
        first = chat.invoke(asked)
        second = chat.invoke([*asked, first, HumanMessage("go on")])
        return {"messages": [(first, second)]}

    graph = StateGraph(Fan).add_node("plan", plan).add_node("work", work)
    graph = graph.add_edge(START, "plan").add_conditional_edges("plan", fan, ["work"])
    state = graph.compile(checkpointer=InMemorySaver()).invoke(
        {"topics": ["x", "y", "z"], "messages": []}, THREAD
    )

    planned, *pairs = state["messages"]
    assert len({told(first)["session"] for first, _ in pairs}) == 3
    for first, second in pairs:
        assert computed(first) <= num_new(planned, first) + 1
        assert told(second)["session"] == told(first)["session"]
        assert computed(second) <= num_new(first, second) + 1


def test_time_travel_and_edits_fork_and_leave_the_thread_as_it_was(chat, micro):
    graph = llm_graph(chat)
    for text in (LONG, "b", "c"):
        state = graph.invoke({"messages": [("user", text)]}, THREAD)
    first, second, third = replies(state)
    history = list(graph.get_state_history(THREAD))
    after_first = next(h for h in history if len(h.values["messages"]) == 2 and not h.next)
    before_second = next(h for h in history if len(h.values["messages"]) == 3)

    forked = replies(graph.invoke({"messages": [("user", "B")]}, after_first.config))[-1]
    replayed = replies(graph.invoke(None, before_second.config))[-1]
    edit = HumanMessage("edited", id=before_second.values["messages"][-1].id)
    edited_at = graph.update_state(before_second.config, {"messages": [edit]})
    edited = replies(graph.invoke(None, edited_at))[-1]
    whole = [*state["messages"], HumanMessage("d")]
    on = chat.invoke(whole, thread_id="T", session_id="T:llm")

    assert len({told(reply)["session"] for reply in (third, forked, replayed, edited)}) == 4
    for reply in (forked, replayed, edited):
        assert computed(reply) < 20
    assert replayed.content == second.content
    assert told(on)["session"] == told(first)["session"] == "T:llm"
    assert computed(on) <= num_new(third, on) + 1
    session, turn = session_at(chat, edited_at)
    assert (session.id, turn) == (told(edited)["session"], 2)
    assert session.parent == "T:llm"


def test_a_step_that_runs_again_after_an_interrupt_is_hit_in_full(chat):
    said: list[AIMessage] = []

    def ask(state: MessagesState) -> dict[str, Any]:
        said.append(chat.invoke(state["messages"]))
        answer = interrupt("ok?")
        return {"messages": [said[-1], HumanMessage(str(answer))]}

    graph = StateGraph(MessagesState).add_node("ask", ask).add_edge(START, "ask")
    graph = graph.compile(checkpointer=InMemorySaver())
    graph.invoke({"messages": [("user", LONG)]}, THREAD)
    graph.invoke(Command(resume="yes"), THREAD)

    once, again = said
    assert again.content == once.content
    assert computed(again) <= 8
    assert told(again)["session"] == told(once)["session"] == "T:ask"


def test_an_approved_tool_call_goes_on_where_the_agent_stopped(make_chat):
    approval = HumanInTheLoopMiddleware(interrupt_on={"run": True, "read": True})
    agent = make_agent(make_chat(max_tokens=40), approval)
    agent.invoke({"messages": [("user", LONG)]}, THREAD)
    state = agent.invoke(Command(resume={"decisions": [{"type": "approve"}]}), THREAD)

    called, answered = replies(state)
    assert computed(answered) <= num_new(called, answered) + 1


def test_tool_results_that_come_back_in_another_order_cost_nothing(make_chat):
    chat = make_chat(max_tokens=96)
    calls = chat.bind_tools([run, read], tool_choice="any", parallel_tool_calls=True)
    asked = calls.invoke([HumanMessage("both")], session_id="s")
    results = [ToolMessage(LONG + c["id"], tool_call_id=c["id"]) for c in asked.tool_calls]
    tools = chat.bind_tools([run, read])
    answer = tools.invoke([HumanMessage("both"), asked, *results], session_id="s")
    loaded = [HumanMessage("both"), asked, *reversed(results), answer, HumanMessage("on")]
    after = tools.invoke(loaded, session_id="s")

    assert computed(after) <= num_new(answer, after) + 1


def test_deleting_a_thread_closes_its_sessions_and_no_others(make_chat, micro):
    chat = make_chat(max_tokens=4)
    saver = closing_sessions(InMemorySaver(), chat)
    agent = make_agent(make_chat(max_tokens=40), checkpointer=saver)
    graph = llm_graph(chat)
    for thread in ("one", "two"):
        graph.invoke({"messages": [("user", "a")]}, {"configurable": {"thread_id": thread}})
    assert agent.checkpointer is saver
    saver.delete_thread("one")
    assert {record.id for record in micro.registry} == {"two:llm"}

    asyncio.run(saver.adelete_thread("two"))
    assert not list(micro.registry)


def test_a_thread_deleted_during_a_call_leaves_no_session(chat, micro):
    def call(state: MessagesState) -> dict[str, Any]:
        chunks = []
        for chunk in chat.stream(state["messages"]):
            if not chunks:
                chat.forget("T")
            chunks.append(chunk)
        return {"messages": [AIMessage("".join(c.text for c in chunks))]}

    graph = StateGraph(MessagesState).add_node("llm", call).add_edge(START, "llm").compile()
    assert graph.invoke({"messages": [("user", "a")]}, THREAD)["messages"][-1].content
    assert not list(micro.registry)


def test_summarised_threads_stay_in_their_session(chat):
    graph = llm_graph(chat)
    for text in (LONG, "b", "c"):
        state = graph.invoke({"messages": [("user", text)]}, THREAD)
    first = state["messages"][:2]
    graph.update_state(THREAD, {"messages": [RemoveMessage(id=m.id) for m in first]})
    after = replies(graph.invoke({"messages": [("user", "d")]}, THREAD))[-1]

    assert told(after)["session"] == "T:llm"
    assert "is now" in told(after)["miss"]


def test_the_middleware_tells_how_long_tools_and_users_take(make_chat, micro):
    waits: list[float | None] = []

    @tool
    def slow(command: str) -> str:
        """Take long."""
        (record,) = list(micro.registry)
        waits.append(record.expect_s)
        return command

    told_times = AgentCacheMiddleware(tool_time={"slow": "5m", "": 1}, turn_gap="1h")
    agent = create_agent(
        make_chat(max_tokens=40),
        [slow],
        middleware=[told_times, react()],
        checkpointer=InMemorySaver(),
    )
    agent.invoke({"messages": [("user", "a")]}, THREAD)

    (record,) = list(micro.registry)
    assert (waits, record.expect_s) == ([300.0], 3600.0)


def hand_out(*tasks: str) -> Any:
    """Random weights name no sub-agent: the first reply is given."""

    @wrap_model_call
    def handed(request: Any, handler: Any) -> Any:
        if not isinstance(request.messages[-1], HumanMessage):
            return handler(request)
        args = [{"description": task, "subagent_type": "worker"} for task in tasks]
        calls = [{"name": "task", "args": a, "id": f"t{n}"} for n, a in enumerate(args)]
        return AIMessage("", tool_calls=calls)

    return handed


def test_sub_agents_have_sessions_that_end_with_them(make_chat, micro):
    seen: dict[str, list[AIMessage]] = {}
    running: set[str] = set()

    @wrap_model_call
    def watched(request: Any, handler: Any) -> Any:
        response = handler(request)
        (reply,) = response.result
        seen.setdefault(told(reply)["session"], []).append(reply)
        running.update(record.id for record in micro.registry)
        return response

    chat = make_chat(max_tokens=40)
    worker = {
        "name": "worker",
        "description": "Works.",
        "system_prompt": "You work.",
        "tools": [run],
        "middleware": [AgentCacheMiddleware(), watched, react()],
    }
    agent = create_deep_agent(
        chat,
        subagents=[worker],
        middleware=[AgentCacheMiddleware(), hand_out("one", "two"), watched],
        checkpointer=InMemorySaver(),
    )
    agent.invoke({"messages": [("user", "go")]}, THREAD)

    workers = {id: said for id, said in seen.items() if id.startswith("T:tools|model")}
    assert len(workers) == 2
    for called, answered in workers.values():
        assert computed(answered) <= num_new(called, answered) + 1
    assert running >= workers.keys()
    assert {record.id for record in micro.registry} == {"T:model"}


def test_a_model_of_another_kind_is_refused_or_replaced(make_chat):
    other = GenericFakeChatModel(messages=iter([]))
    agent = create_agent(other, middleware=[AgentCacheMiddleware()])
    with pytest.raises(UnsupportedOption, match="GenericFakeChatModel"):
        agent.invoke({"messages": [("user", "a")]})

    chat = make_chat()
    agent = create_agent(other, middleware=[AgentCacheMiddleware(chat)])
    (reply,) = replies(agent.invoke({"messages": [("user", "a")]}))
    assert reply.response_metadata["model_provider"] == "agentcache"


def test_calls_are_read_from_a_checkpointer_and_replay(chat, tmp_path):
    saver = InMemorySaver()
    texts = iter(AIMessage(f"answer {n}") for n in range(9))
    agent = create_agent(
        GenericFakeChatModel(messages=texts), system_prompt="sys", checkpointer=saver
    )
    for text in ("a", "b"):
        agent.invoke({"messages": [("user", text)]}, THREAD)
    earlier = next(h for h in agent.get_state_history(THREAD) if len(h.values["messages"]) == 2)
    agent.invoke({"messages": [("user", "B")]}, earlier.config)

    calls = list(recorded_calls(saver, system="sys", tools=[]))
    path = tmp_path / "threads.jsonl"
    path.write_text("".join(json.dumps(call) + "\n" for call in calls), encoding="utf-8")
    (run,) = read_paths([path]).trajectories

    said = [[m["content"] for m in call["messages"]] for call in calls]
    assert said == [["sys", "a"], ["sys", "a", "answer 0", "b"], ["sys", "a", "answer 0", "B"]]
    assert [call["answer"]["content"] for call in calls] == ["answer 0", "answer 1", "answer 2"]
    assert (run.id, len(run.calls)) == ("T", 3)
