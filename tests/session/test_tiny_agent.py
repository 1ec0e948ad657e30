"""`tiny-agent` in a runtime: right answers, the same warm and cold, after long talks and losses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from agentcache.config import CacheConfig
from agentcache.engine.tiny.evaluate import Tally, held_out_dialogues, judge
from agentcache.runtime import Runtime
from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.session import Session

CODE_WORD = {"role": "system", "content": "You answer with tools. The code word is Heron."}
ASK_CODE_WORD = "What is the code word?"
IS_CODE_WORD = "The code word is Heron."


def tool(name: str, *parameters: str) -> dict[str, Any]:
    properties = {parameter: {"type": "string"} for parameter in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


HEIGHT, CALC = tool("height", "name"), tool("calculator", "expression")


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime.load("tiny-agent", cache=CacheConfig(budget="128MiB")) as made:
        yield made


def say(session: Session, *new: dict[str, Any], tools: Any = None) -> Any:
    return session.chat(list(new), tools=tools, max_new_tokens=64)


def ask(session: Session, question: str, tools: Any = None) -> str:
    return str(say(session, {"role": "user", "content": question}, tools=tools).message["content"])


def call_of(turn: Any) -> tuple[str, Any]:
    (call,) = turn.message["tool_calls"]
    return call["function"]["name"], json.loads(call["function"]["arguments"])


async def test_held_out_dialogues_are_answered_rightly_and_warm_as_cold(runtime: Runtime) -> None:
    tally, cached = Tally(), []
    for index, dialogue in enumerate(held_out_dialogues(6, max_turns=6)):
        with runtime.session(f"warm-{index}") as session:

            async def asked(messages: Any, tools: Any, session: Any = session) -> Any:
                given = {"tools": list(tools) or None, "max_new_tokens": 64}
                turn = await session.acomplete(list(messages), **given)
                tenant = f"cold {session.id} {len(messages)}"
                with runtime.session(tenant, tenant=tenant) as alone:
                    cold = await alone.acomplete(list(messages), **given)
                assert cold.usage.cached_tokens == 0
                cached.append(turn.usage.cached_tokens)
                assert list(cold.ids) == list(turn.ids)
                return turn.message

            await judge(dialogue, asked, tally)
    assert sum(cached) > 500, "nothing was warm"
    calls, answers = tally.sums(range(1, 7))
    right, total = calls.right + answers.right, calls.total + answers.total
    assert right / total >= 0.95


def test_the_list_of_tools_is_read(runtime: Runtime) -> None:
    forms = (
        ("height", "name"),
        ("get_height", "place"),
        ("find_height", "q"),
        ("read_height", "item"),
        ("lookup_height", "city"),
        ("height_of", "key"),
    )
    for name, parameter in forms:
        for asked in ("Etna", "Bremkor"):
            with runtime.session() as session:
                turn = say(
                    session,
                    {"role": "user", "content": f"How high is {asked}?"},
                    tools=[CALC, tool(name, parameter), tool("get_price", "thing")],
                )
                assert call_of(turn) == (name, {parameter: asked})


def test_what_tools_there_are_is_told(runtime: Runtime) -> None:
    with runtime.session() as session:
        tools = [CALC, tool("read_speed", "q"), tool("weather_of", "city")]
        answer = ask(session, "What can you do?", tools)
        assert answer == "I have calculator, read_speed, weather_of."


def test_a_tool_that_is_not_there_is_not_called(runtime: Runtime) -> None:
    for tools in (None, [CALC], [CALC, tool("get_height", "name")]):
        for question in ("What is the price of Tea?", "How warm is it in Oslo?", "Who owns Bo?"):
            with runtime.session() as session:
                assert ask(session, question, tools) == "I have no tool for that."


def test_what_is_outside_the_protocol_is_not_known(runtime: Runtime) -> None:
    for question in ("Write a poem about the sea.", "Translate my letter into Latin."):
        with runtime.session() as session:
            assert ask(session, question, [CALC]) == "I do not know."


def test_a_follow_up_and_a_fork(runtime: Runtime) -> None:
    with runtime.session() as session:
        turn = say(session, {"role": "user", "content": "What is 12 + 30?"}, tools=[CALC])
        assert call_of(turn) == ("calculator", {"expression": "12 + 30"})
        said = say(session, {"role": "tool", "content": "42"})
        assert said.message["content"] == "12 + 30 is 42."
        with session.fork() as other:
            turn = say(session, {"role": "user", "content": "Add 8 to that."})
            assert call_of(turn) == ("calculator", {"expression": "42 + 8"})
            turn = say(other, {"role": "user", "content": "Multiply that by 2."})
            assert call_of(turn) == ("calculator", {"expression": "42 * 2"})


@pytest.fixture(scope="module")
def long_talk(runtime: Runtime) -> Iterator[Session]:
    """Forty turns after the code word was given."""
    with runtime.session("needle") as session:
        say(session, CODE_WORD, {"role": "user", "content": "Hello!"}, tools=[HEIGHT])
        for turn in range(39):
            name = f"Kel{turn}"
            asked = say(session, {"role": "user", "content": f"How high is {name}?"})
            if asked.message.get("tool_calls"):
                say(session, {"role": "tool", "content": str(100 + turn)})
        yield session


def test_code_word_is_right_after_forty_turns(long_talk: Session) -> None:
    with long_talk.fork() as fork:
        assert ask(fork, ASK_CODE_WORD) == IS_CODE_WORD


def test_code_word_is_right_after_eviction_and_in_a_fork_of_what_was_restored() -> None:
    small = Runtime.load("tiny-agent", cache=CacheConfig(budget="6MiB", policy="lru"))
    with small, small.session("needle") as session:
        say(session, CODE_WORD, {"role": "user", "content": "Hello!"}, tools=[HEIGHT])
        for turn in range(12):
            asked = say(session, {"role": "user", "content": f"How high is Kel{turn}?"})
            if asked.message.get("tool_calls"):
                say(session, {"role": "tool", "content": str(100 + turn)})
        session.idle()
        for index in range(12):
            with small.session(f"other {index}") as other:
                words = "Please read the list of the other task. " * 40
                ask(other, f"{index} {words}")
        turn = say(session, {"role": "user", "content": ASK_CODE_WORD})
        assert turn.usage.computed_tokens > 100, "nothing was evicted"
        assert turn.message["content"] == IS_CODE_WORD
        with session.fork() as fork:
            assert ask(fork, ASK_CODE_WORD) == IS_CODE_WORD


def test_a_lost_state_shows_in_the_answer() -> None:
    """With the recurrent states zeroed and keys and values kept, it answers something else."""
    questions = (
        "What is the code word?",
        "How high is Etna?",
        "And Fuji?",
        "What was the last city?",
    )
    different = 0
    for question in questions:
        with (
            Runtime.load("tiny-agent", cache=CacheConfig(budget="32MiB")) as rt,
            rt.session("one") as session,
        ):
            asked = {"role": "user", "content": "How high is Oslo?"}
            say(session, CODE_WORD, asked, tools=[HEIGHT])
            say(session, {"role": "tool", "content": "17"})
            with session.fork() as whole:
                right = say(whole, {"role": "user", "content": question}).ids
            zero_states(rt)
            wrong = say(session, {"role": "user", "content": question}).ids
            different += list(right) != list(wrong)
    assert different >= 2


def zero_states(runtime: Runtime) -> None:
    """Of every checkpoint, what the Mamba layers hold."""
    pools: Any = runtime.cache.pools
    row, *_ = pools.staging_rows
    spoiled = 0
    for node in runtime.cache.tree.nodes():
        held = node.data.get(Kind.STATE)
        if held is None:
            continue
        pools.load_state(held.slots, row)
        for state in pools.state.values():
            state[row] = 0.0
        pools.save_state(row, held.slots)
        spoiled += 1
    assert spoiled
