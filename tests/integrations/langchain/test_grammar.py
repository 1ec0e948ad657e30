"""Grammars of replies: read from a template, whatever form it writes calls in."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from testkit.models import micro_model, tokenizer

from agentcache import CacheConfig, InvalidRequest, Runtime, UnsupportedOption
from agentcache.integrations._langchain.grammar import ReplyForms, closed, reply_grammar
from agentcache.integrations.langchain_chat import ChatAgentCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HEAD = (
    "{%- for m in messages -%}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
)
TAIL = (
    "{%- endfor -%}<|end_of_text|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|start_of_role|>assistant<|end_of_role|>OPEN{%- endif -%}"
)
JSON = (
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
    "{{ call.function.arguments | tojson }}}\n</tool_call>"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@tool
def check(number: int) -> int:
    """Check a number."""
    return number


@pytest.fixture
def runtime_on() -> Iterator[Callable[[str], Runtime]]:
    """Runtimes of the micro model with another chat template."""
    made: list[Runtime] = []

    def make(call: str, opening: str = "") -> Runtime:
        other = copy.deepcopy(tokenizer())
        other.chat_template = HEAD + call + TAIL.replace("OPEN", opening)
        made.append(Runtime(micro_model(), other, cache=CacheConfig(budget="16MiB")))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()


@pytest.mark.parametrize("opening", ["", "<think>\n"], ids=["plain", "thinking"])
def test_a_forced_call_is_written_as_the_template_writes_it(runtime_on, closing, opening):
    runtime = runtime_on(JSON, opening)
    close_id = runtime.tokenizer.special_ids["</think>"]
    chat = ChatAgentCache(model=runtime, max_tokens=60, logit_bias=closing | {close_id: 50.0})
    reply = chat.bind_tools([check], tool_choice="any").invoke([HumanMessage("go")])

    (call,) = reply.tool_calls
    text = runtime.tokenizer.decode(
        runtime.session(reply.response_metadata["agentcache"]["session"]).ids.tolist()
    )
    number = call["args"]["number"]
    written = f'<tool_call>\n{{"name": "check", "arguments": {{"number": {number}}}}}\n</tool_call>'
    assert written in text


def test_arguments_are_spelled_as_the_template_spells_them(runtime_on):
    tight = JSON.replace("tojson", "tojson(separators=(',', ':'))")

    assert ReplyForms.of(runtime_on(tight)).guidance["item_separator"] == ","
    assert ReplyForms.of(runtime_on(JSON)).guidance["item_separator"] == ", "


def test_calls_that_begin_as_plain_text_can_be_forced_but_not_watched_for(micro):
    forms = replace(ReplyForms.of(micro), control=False)

    assert reply_grammar(forms, [TOOL], tool_choice="f")
    with pytest.raises(UnsupportedOption, match="strict"):
        reply_grammar(forms, [TOOL], strict=True)


def test_a_choice_among_no_tools_or_of_an_unknown_one_is_refused(micro):
    forms = ReplyForms.of(micro)
    with pytest.raises(InvalidRequest, match="no tools"):
        reply_grammar(forms, [], tool_choice="any")
    with pytest.raises(InvalidRequest, match=r"auto, none, any, \['f'\]"):
        reply_grammar(forms, [TOOL], tool_choice={"function": {"name": "g"}})


def test_a_reply_of_a_schema_may_be_a_call_where_there_are_tools(make_chat):
    chat = make_chat(max_tokens=60).bind_tools(
        [check],
        response_format={
            "type": "json_schema",
            "json_schema": {
                "schema": {
                    "type": "object",
                    "properties": {"n": {"const": 1}},
                    "required": ["n"],
                }
            },
        },
    )
    reply = chat.invoke([HumanMessage("go")])

    assert bool(reply.tool_calls) != (reply.content == '{"n": 1}')


def test_objects_are_closed_wherever_they_stand_in_a_schema():
    inner: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}}
    schema = {
        "properties": {"properties": inner, "list": {"items": inner}, "free": {"type": "object"}},
        "$defs": {"open": {**inner, "additionalProperties": True}},
        "default": {"properties": {}},
    }
    shut = {**inner, "additionalProperties": False}

    assert closed(schema) == {
        "properties": {"properties": shut, "list": {"items": shut}, "free": {"type": "object"}},
        "$defs": {"open": {**inner, "additionalProperties": True}},
        "default": {"properties": {}},
        "additionalProperties": False,
    }
