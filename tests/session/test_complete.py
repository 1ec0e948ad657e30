"""Whole message lists: nothing that frameworks and templates do to them costs reuse in silence."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_model, tokenizer

from agentcache.config import CacheConfig
from agentcache.errors import InvalidRequest, UnsupportedOption
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.session import Session, Turn

TEMPLATES = Path(__file__).parents[1] / "fixtures" / "templates"
SYSTEM = {"role": "system", "content": "You repair programs. " * 8}
HEADER_LEN = 5
"""Tokens of the embedded template's reply header."""

CALL = '<tool_call>{"name": "bash", "arguments": {"cmd":  "ls",  "in": "src"}}</tool_call>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}."}}


def runtime_with(template: str | None = None, **settings: Any) -> Runtime:
    source = copy.deepcopy(tokenizer())
    if template is not None:
        source.chat_template = template
    cache = CacheConfig(budget="16MiB", page_size=4, prefill_chunk=32)
    return Runtime(micro_model(), source, cache=cache, **settings)


def head_of(runtime: Runtime, session: Session, turn: Turn) -> str:
    return runtime.tokenizer.decode(session.ids[: turn.usage.prompt_tokens].tolist())


@pytest.mark.parametrize("given", ["respelled", "mapping", "same"])
def test_arguments_in_any_spelling_are_the_ones_that_were_said(
    runtime: Runtime, given: str
) -> None:
    session = runtime.session()
    messages = [SYSTEM, user("Look")]
    first = session.complete(messages, replay=f"Now.{CALL}")
    reply = copy.deepcopy(first.message)
    function = reply["tool_calls"][0]["function"]
    said = json.loads(function["arguments"])
    if given == "respelled":
        function["arguments"] = json.dumps(dict(reversed(said.items())), indent=1)
    elif given == "mapping":
        function["arguments"] = dict(reversed(said.items()))
    messages += [reply, result("call00000", "a.py")]
    second = session.complete(messages, max_new_tokens=2, verify=True)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.output_tokens
    assert CALL in head_of(runtime, session, second)
    assert second.verify is not None
    assert second.verify.ok


def test_results_of_parallel_calls_may_come_in_any_order_at_any_time(runtime: Runtime) -> None:
    session = runtime.session()
    messages = [SYSTEM, user("Look")]
    first = session.complete(messages, replay=CALL + CALL)
    results = [result("call00000", "first"), result("call00001", "second")]
    messages += [first.message, *reversed(results)]
    second = session.complete(messages, max_new_tokens=3)
    text = head_of(runtime, session, second)
    assert text.index("first") < text.index("second")
    reloaded = [*messages[:3], *results, second.message, user("And now?")]
    third = session.complete(reloaded, max_new_tokens=2)
    known = second.usage.prompt_tokens + second.usage.output_tokens
    assert third.usage.cached_tokens >= known - 1


def test_tools_keep_the_order_a_session_first_had(runtime: Runtime) -> None:
    session = runtime.session()
    tools = [tool("read"), tool("write"), tool("bash")]
    orders = [tools, tools[::-1], [tools[1], tools[2], tools[0]]]
    messages = [SYSTEM, user("Go")]
    heads = []
    for order in orders:
        known = len(session.ids) if session.tips else 0
        turn = session.complete(messages, tools=copy.deepcopy(order), max_new_tokens=4)
        assert turn.usage.cached_tokens >= known - 1
        heads.append(head_of(runtime, session, turn).partition("Go")[0])
        messages += [turn.message, user("And on")]
    assert len(set(heads)) == 1
    # So it is after an edit, where the list is no longer what the session knows.
    messages[1] = user("Go!")
    turn = session.complete(messages, tools=tools[::-1], max_new_tokens=4)
    assert head_of(runtime, session, turn).partition("Go")[0] == heads[0]


def test_what_is_changed_in_place_after_a_call_is_in_the_next_prompt(runtime: Runtime) -> None:
    session = runtime.session()
    messages = [SYSTEM, user("Look")]
    first = session.complete(messages, replay=CALL)
    messages += [first.message, result("call00000", "one"), user("Go on")]
    second = session.complete(messages, max_new_tokens=2)
    messages += [second.message, user("And on")]
    messages[3]["content"] = "two"
    session.messages[2]["tool_calls"][0]["function"]["name"] = "not asked for"
    third = session.complete(messages, max_new_tokens=2)
    text = head_of(runtime, session, third)
    assert "two" in text
    assert "one" not in text.partition("Look")[2]
    assert CALL in text


def test_another_set_of_tools_is_in_the_prompt(runtime: Runtime) -> None:
    session = runtime.session()
    first = session.complete([user("Go")], tools=[tool("read"), tool("read")], max_new_tokens=2)
    messages = [user("Go"), first.message, user("On")]
    turn = session.complete(messages, tools=[tool("read"), tool("bash")], max_new_tokens=2)
    assert "Does bash." in head_of(runtime, session, turn)
    assert turn.miss is not None
    assert turn.miss.reason == "diverged"


def test_dropped_thinking_of_a_tool_loop_costs_no_more_than_the_loop() -> None:
    with runtime_with((TEMPLATES / "drops_thinking.jinja").read_text()) as runtime:
        session = runtime.session()
        messages: list[dict[str, Any]] = [SYSTEM, user("Which file? " * 8)]
        first = session.complete(messages, replay=f"<think>let me look</think>Now.{CALL}")
        messages += [first.message, result("call00000", "a.py b.py")]
        second = session.complete(messages, replay="<think>two files</think>It is a.py.")
        # Within the loop thinking stays, and only the reply whose header was another is computed.
        assert second.usage.cached_tokens >= first.usage.prompt_tokens - 12
        messages += [second.message, user("And which line?")]
        third = session.complete(messages, max_new_tokens=2, verify=True)
        text = head_of(runtime, session, third)
        assert "let me look" not in text
        assert "two files" not in text
        # The reply header of the loop's first reply is the last place before any thinking.
        assert third.usage.cached_tokens >= first.usage.prompt_tokens - 12
        assert third.verify is not None
        assert third.verify.ok
        assert third.miss is not None
        assert third.miss.message == (2, "assistant")
        messages += [third.message, user("And the column?")]
        fourth = session.complete(messages, max_new_tokens=2)
        assert fourth.usage.cached_tokens >= third.usage.prompt_tokens - 12


def test_thinking_that_the_caller_leaves_out_is_still_there(runtime: Runtime) -> None:
    session = runtime.session()
    first = session.complete([user("Why?")], replay="<think>because</think>So.")
    reply = {"role": "assistant", "content": "So."}
    second = session.complete([user("Why?"), reply, user("Sure?")], max_new_tokens=2)
    assert "because" in head_of(runtime, session, second)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens + first.usage.output_tokens - 1


def test_empty_blocks_added_to_history_cost_what_follows_the_first(runtime: Runtime) -> None:
    """A template that writes an empty block into every reply once a tool has answered."""
    template = tokenizer().chat_template.replace(
        "{%- if message.role == 'assistant' and message.reasoning_content -%}",
        "{%- if message.role == 'assistant' and messages | selectattr('role', 'eq', 'tool') "
        "| list and not message.reasoning_content -%}{{- '<think></think>' -}}{%- endif -%}"
        "{%- if message.role == 'assistant' and message.reasoning_content -%}",
    )
    assert template != tokenizer().chat_template
    with runtime_with(template) as runtime:
        session = runtime.session()
        messages: list[dict[str, Any]] = [SYSTEM, user("Go")]
        first = session.complete(messages, replay="Well.")
        messages += [first.message, user("Look")]
        second = session.complete(messages, replay=CALL)
        messages += [second.message, result("call00000", "a.py")]
        third = session.complete(messages, max_new_tokens=2, verify=True)
        assert head_of(runtime, session, third).count("<think></think>") == 2
        assert third.usage.cached_tokens >= first.usage.prompt_tokens - HEADER_LEN
        assert third.miss is not None
        assert third.miss.message == (2, "assistant")
        assert third.miss.fallback
        assert third.verify is not None
        assert third.verify.ok


def clocked(time: str, more: str = "") -> dict[str, Any]:
    lines = [f"You are careful.{more}", f"Time: {time}", "Use the tools.", f"id={time}-x", "Go."]
    return {"role": "system", "content": "\n".join(lines * 3)}


def two_calls(runtime: Runtime, *systems: dict[str, Any]) -> tuple[Session, Turn, Turn]:
    session = runtime.session()
    first = session.complete([systems[0], user("Hi")], max_new_tokens=3)
    messages = [systems[1], user("Hi"), first.message, user("On")]
    return session, first, session.complete(messages, max_new_tokens=2)


def test_volatile_line_of_the_system_prompt_is_named(runtime: Runtime) -> None:
    _, _, turn = two_calls(runtime, clocked("12:01"), clocked("12:02"))
    assert turn.miss is not None
    assert turn.miss.reason == "diverged"
    assert turn.miss.message == (0, "system")
    assert turn.miss.line == (2, "Time: 12:02")
    assert 'line 2: "Time: 12:02"' in str(turn.miss).replace("\n", " ")
    assert turn.usage.cached_tokens < 20


def test_volatile_lines_keep_their_first_text_where_that_is_asked_for() -> None:
    with runtime_with(volatile=[r"^Time: ", r"^id=\S+-x$"]) as runtime:
        session, first, turn = two_calls(runtime, clocked("12:01"), clocked("12:02"))
        known = first.usage.prompt_tokens + first.usage.output_tokens
        assert turn.usage.cached_tokens >= known - 1
        assert turn.miss is None or turn.miss.reason == "new"
        text = head_of(runtime, session, turn)
        assert "12:01" in text
        assert "12:02" not in text
        assert session.messages[0] == clocked("12:01")
        # After an edit further on, the head is still the one it was.
        edited = [clocked("12:03"), user("Hello"), user("On")]
        third = session.complete(edited, max_new_tokens=2)
        assert "12:01" in head_of(runtime, session, third)
        # Another session has a first text of its own.
        other = runtime.session()
        fourth = other.complete([clocked("12:04"), user("Hi")], max_new_tokens=2)
        assert "12:04" in head_of(runtime, other, fourth)


def test_an_edit_beside_volatile_lines_is_in_the_prompt_with_their_new_text() -> None:
    with runtime_with(volatile=["^Time: ", "^id="]) as runtime:
        session, _, turn = two_calls(runtime, clocked("12:01"), clocked("12:02", " And quick."))
        text = head_of(runtime, session, turn)
        assert "And quick." in text
        assert "12:02" in text
        assert "12:01" not in text


def test_volatile_patterns_do_not_touch_what_the_user_says() -> None:
    with runtime_with(volatile=["^Time: "]) as runtime:
        session = runtime.session()
        first = session.complete([SYSTEM, user("Time: 1")], max_new_tokens=2)
        messages = [SYSTEM, user("Time: 2"), first.message, user("On")]
        turn = session.complete(messages, max_new_tokens=2)
        assert "Time: 2" in head_of(runtime, session, turn)


@pytest.mark.parametrize("patterns", ["^Time", ["("], [3]])
def test_volatile_patterns_that_are_none_are_refused(patterns: Any) -> None:
    with pytest.raises(InvalidRequest, match="volatile"):
        runtime_with(volatile=patterns)


def test_shortened_observations_cost_what_follows_the_first_of_them(runtime: Runtime) -> None:
    session = runtime.session()
    messages: list[dict[str, Any]] = [SYSTEM, user("Find it.")]
    ends = []
    for number in range(6):
        turn = session.complete(messages, replay=CALL)
        ends.append(turn.usage.prompt_tokens)
        call_id = turn.message["tool_calls"][0]["id"]
        messages += [turn.message, result(call_id, f"line {number} " * 12)]
    edited = copy.deepcopy(messages)
    edited[5]["content"] = edited[7]["content"] = "(left out)"
    turn = session.complete(edited, max_new_tokens=3, verify=True)
    # Message 5 answers the second call; up to the reply header before that all stays.
    assert turn.usage.cached_tokens >= ends[1] - HEADER_LEN
    assert turn.miss is not None
    assert turn.miss.message == (5, "tool")
    assert turn.verify is not None
    assert turn.verify.ok
    # The shortened history is then as good as any other.
    again = session.complete([*edited, turn.message, user("On")], max_new_tokens=2)
    assert again.usage.cached_tokens >= turn.usage.prompt_tokens + turn.usage.output_tokens - 1


def test_switching_models_and_back_costs_what_was_said_elsewhere(
    make_runtime: Callable[..., Runtime],
) -> None:
    one, other = make_runtime(), runtime_with(adapter="another")
    with other:
        at_one, at_other = one.session("thread"), other.session("thread")
        messages: list[dict[str, Any]] = [SYSTEM, user("Hi")]
        first = at_one.complete(messages, max_new_tokens=4)
        messages += [first.message, user("More")]
        second = at_other.complete(messages, max_new_tokens=4, verify=True)
        assert second.usage.cached_tokens == 0
        assert second.verify is not None
        assert second.verify.ok
        messages += [second.message, user("Back")]
        third = at_one.complete(messages, max_new_tokens=2, verify=True)
        known = first.usage.prompt_tokens + first.usage.output_tokens
        assert third.usage.cached_tokens >= known - 1
        assert third.verify is not None
        assert third.verify.ok


@pytest.mark.parametrize("place", [1, 3])
def test_images_are_refused_wherever_they_stand(runtime: Runtime, place: int) -> None:
    session = runtime.session()
    first = session.complete([SYSTEM, user("See")], max_new_tokens=2)
    messages: list[dict[str, Any]] = [SYSTEM, user("See"), first.message, user("Again")]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    text = {"type": "text", "text": messages[place]["content"]}
    messages[place] = {"role": "user", "content": [text, image]}
    with pytest.raises(InvalidRequest, match=rf"message {place} \(user\).*image_url"):
        session.complete(messages, max_new_tokens=2)
    messages[place] = {"role": "user", "content": [text]}
    assert session.complete(messages, max_new_tokens=2).usage.cached_tokens > 0


def test_malformed_calls_are_text_and_flagged(runtime: Runtime) -> None:
    session = runtime.session()
    bad = '<tool_call>{"name": "bash", "arguments": {"cmd"}}</tool_call>'
    turn = session.complete([user("Go")], replay=f"I try.{bad}")
    assert turn.message["content"] == f"I try.{bad}"
    assert "tool_calls" not in turn.message
    assert turn.malformed_calls == (bad,)
    assert session.complete([user("Go")], replay=CALL).malformed_calls == ()


def test_calls_of_another_form_are_read_streamed_and_plain() -> None:
    said = 'On it.<|tool_call_start|>[bash(cmd="ls", n=2), now()]<|tool_call_end|>'
    with runtime_with(tool_form="lfm2") as runtime:
        plain = runtime.session().complete([user("Go")], replay=said)
        with runtime.session().complete(
            [user("Go")], replay=said, stepwise=True, stream=True
        ) as stream:
            deltas = list(stream)
        calls = [call for delta in deltas for call in delta.tool_calls]
        assert calls == plain.message["tool_calls"] == stream.turn.message["tool_calls"]
        assert [json.loads(c["function"]["arguments"]) for c in calls] == [
            {"cmd": "ls", "n": 2},
            {},
        ]
        assert "".join(delta.text for delta in deltas) == "On it."
    with pytest.raises(UnsupportedOption, match="tool_form"):
        runtime_with(tool_form="unknown")


def test_grammar_of_a_runtime_makes_a_call_and_the_session_goes_on(runtime: Runtime) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
        "required": ["n"],
        "additionalProperties": False,
    }
    tools = [
        tool("now"),
        {"type": "function", "function": {"name": "wait", "parameters": schema}},
    ]
    session = runtime.session()
    grammar = runtime.tool_call_grammar(tools, name="wait")
    first = session.complete([user("Go")], tools=tools, lark=grammar, max_new_tokens=80)
    (call,) = first.message["tool_calls"]
    assert first.message["content"] == ""
    assert call["function"]["name"] == "wait"
    assert json.loads(call["function"]["arguments"])["n"] in range(10)
    messages = [user("Go"), first.message, result(call["id"], "done")]
    second = session.complete(messages, tools=tools, max_new_tokens=2)
    known = first.usage.prompt_tokens + first.usage.output_tokens
    assert second.usage.cached_tokens >= known - 1
