"""Replies of a tokenizer that brings a response template: read by it, whole or in pieces."""

import copy
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from testkit.models import tokenizer

from agentcache.engine.chat import ChatFormat
from agentcache.engine.response_template import ResponseTemplateReader
from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import UnsupportedModel

TEMPLATE = {
    "start_anchor": "<|start_of_role|>assistant<|end_of_role|>",
    "defaults": {"role": "assistant"},
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {"open": "[CALL]", "close": "[/CALL]", "content": "json", "repeats": True},
        "content": {"content": "text"},
    },
}
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


def source_with(template: object) -> object:
    source = copy.deepcopy(tokenizer())
    source.response_template = template
    return source


SOURCE = source_with(TEMPLATE)


def read(*pieces: str, header: str = "") -> ResponseTemplateReader:
    reader = ResponseTemplateReader(SOURCE, header=header, first_call=3)
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    return reader


def test_a_reply_is_read_by_the_tokenizer_s_own_template():
    said = '<think>why</think>Now.[CALL]{"name": "ls", "arguments": {"a":  1}}[/CALL]'
    message = ChatFormat(Tokenizer(SOURCE)).parse_reply(said, first_call=3, tools=TOOLS)
    assert message == read(said).message
    assert message["reasoning_content"] == "why"
    assert message["content"] == "Now."
    (call,) = message["tool_calls"]
    assert call["id"] == "call00003"
    assert call["function"] == {"name": "ls", "arguments": '{"a":  1}'}


def test_a_form_that_is_asked_for_comes_first():
    chat_format = ChatFormat(Tokenizer(SOURCE), tool_form="hermes")
    said = '[CALL]<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
    message = chat_format.parse_reply(said)
    assert message["content"] == "[CALL]"
    assert len(message["tool_calls"]) == 1


def test_what_the_header_has_opened_goes_on():
    header = "<|start_of_role|>assistant<|end_of_role|><think>"
    message = read("why</think>Because.", header=header).message
    assert message["reasoning_content"] == "why"
    assert message["content"] == "Because."


@pytest.mark.parametrize(
    "bad",
    [
        "[CALL]no json[/CALL]",
        "[CALL][1, 2][/CALL]",
        '[CALL]{"arguments": {}}[/CALL]',
        '[CALL]{"name": "ls", "arguments": 3}[/CALL]',
        '[CALL]{"name": "ls", "argum',
        "[CALL]",
    ],
)
def test_what_is_no_call_is_text_with_a_flag(bad):
    reader = read(f"Well. {bad}")
    assert reader.message == {"role": "assistant", "content": f"Well. {bad}"}
    assert reader.malformed == (bad,)


@pytest.mark.parametrize("event", ["feed", "finalize"])
@pytest.mark.parametrize(
    "fault",
    [IndexError, KeyError, AttributeError, RecursionError, TypeError, ValueError, re.error("bad")],
)
def test_whatever_the_parser_fails_with_the_reply_is_text_with_a_flag(monkeypatch, event, fault):
    def fails(*args):
        raise fault

    reader = ResponseTemplateReader(SOURCE)
    reader.push("Well. ")
    reader.push('[CALL]{"name"')
    monkeypatch.setattr(reader._parser, event, fails)
    reader.push(": 3")
    reader.finish()
    assert reader.message == {"role": "assistant", "content": 'Well. [CALL]{"name": 3'}
    assert len(reader.malformed) == 1


def test_what_follows_a_call_that_cannot_be_read_is_text():
    reader = read("[CALL]no json[/CALL] and more <think>x</think>")
    assert reader.message["content"] == "[CALL]no json[/CALL] and more <think>x</think>"


FRAGMENTS = st.sampled_from(
    [
        *("<think>", "</think>", "[CALL]", "[/CALL]", "[", "text", " ", "\n", "é", "{", '"'),
        '[CALL]{"name": "ls", "arguments": {"path": "a b"}}[/CALL]',
    ]
)


@given(st.lists(FRAGMENTS, max_size=8), st.integers(1, 9))
def test_any_cut_comes_to_what_the_whole_is(fragments, size):
    text = "".join(fragments)
    whole, reader = read(text), ResponseTemplateReader(SOURCE, first_call=3)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.finish())
    assert reader.message == whole.message
    assert reader.malformed == whole.malformed
    assert "".join(p.content for p in pieces) == whole.message["content"]
    assert "".join(p.reasoning for p in pieces) == whole.message.get("reasoning_content", "")
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert calls == whole.message.get("tool_calls", [])
    for call in calls:
        assert json.loads(call["function"]["arguments"]) == {"path": "a b"}


@given(st.lists(FRAGMENTS.filter(lambda text: "think" not in text), max_size=8))
def test_nothing_is_lost_of_a_text_without_calls(fragments):
    message = read("".join(fragments)).message
    if "tool_calls" not in message:
        assert message["content"] == "".join(fragments)


def test_a_template_that_is_none_is_refused_with_the_remedy():
    with pytest.raises(UnsupportedModel, match="give tool_form"):
        ResponseTemplateReader(source_with({"fields": {}}))
