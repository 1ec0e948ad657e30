"""Grammars that make a reply a tool call: whatever a model would like to say, in every form."""

import json
import random
import re

import pytest
from testkit.models import tokenizer

from agentcache.engine.chat import ChatFormat
from agentcache.engine.grammar import Grammar, Grammars
from agentcache.engine.reply_forms import FORMS
from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import InvalidRequest

END = 0
LS = {
    "type": "function",
    "function": {
        "name": "ls",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string", "maxLength": 6},
                "deep": {"type": "boolean"},
                "sort": {"enum": ["name", "size"]},
            },
            "required": ["path"],
            "additionalProperties": False,
        },
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 9},
                "b": {"$ref": "#/$defs/digit"},
            },
            "required": ["a", "b"],
            "additionalProperties": False,
            "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
        },
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "boolean"}, "y": {"type": "null"}},
            "additionalProperties": False,
        },
    },
}
TOOLS = [LS, ADD, NOTE]


@pytest.fixture(scope="module")
def text_of() -> Tokenizer:
    return Tokenizer(tokenizer())


@pytest.fixture(scope="module")
def grammars(text_of) -> Grammars:
    return Grammars(text_of, frozenset({END}), text_of.vocab_size)


def walk(grammars, text_of, lark: str, seed: int) -> list[int]:
    """A reply that takes any allowed id, however unlikely; without the end id."""
    matcher, choose = grammars.matcher(Grammar("lark", lark)), random.Random(seed)
    said: list[int] = []
    for _ in range(2000):
        token = choose.choice(matcher.allowed(text_of.vocab_size).nonzero()[:, 0].tolist())
        matcher.advance(token)
        if token == END:
            return said
        said.append(token)
        if matcher.is_complete:
            return said
    raise AssertionError("a bounded grammar did not end")


def called(chat_format, text: str, tools=TOOLS) -> list[tuple[str, dict]]:
    message = chat_format.parse_reply(text, tools=tools)
    assert message["content"] == ""
    functions = [call["function"] for call in message["tool_calls"]]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def check(name: str, arguments: dict) -> None:
    if name == "ls":
        assert {"path"} <= arguments.keys() <= {"path", "deep", "sort"}
        assert len(arguments["path"]) <= 6
        assert isinstance(arguments.get("deep", True), bool)
        assert arguments.get("sort", "name") in ("name", "size")
    elif name == "add":
        assert arguments.keys() == {"a", "b"}
        assert set(arguments.values()) <= set(range(10))
    else:
        assert name == "note"
        assert isinstance(arguments.get("x", True), bool)
        assert arguments.get("y") is None


@pytest.mark.parametrize("form", FORMS)
def test_any_way_through_is_a_call_of_a_tool(grammars, text_of, form):
    chat_format = ChatFormat(text_of, tool_form=form)
    lark = chat_format.tool_call_grammar(TOOLS)
    names = set()
    for seed in range(8):
        ((name, arguments),) = called(
            chat_format, text_of.decode(walk(grammars, text_of, lark, seed))
        )
        check(name, arguments)
        names.add(name)
    assert len(names) > 1


@pytest.mark.parametrize("form", FORMS)
def test_parallel_calls_follow_each_other(grammars, text_of, form):
    chat_format = ChatFormat(text_of, tool_form=form)
    lark = chat_format.tool_call_grammar(TOOLS, parallel=True)
    counts = set()
    for seed in range(8):
        calls = called(chat_format, text_of.decode(walk(grammars, text_of, lark, seed)))
        counts.add(len(calls))
        for call in calls:
            check(*call)
    assert max(counts) > 1


@pytest.mark.parametrize("form", FORMS)
def test_a_named_tool_is_the_one_that_is_called(grammars, text_of, form):
    chat_format = ChatFormat(text_of, tool_form=form)
    lark = chat_format.tool_call_grammar([*TOOLS, NOW], name="add")
    for seed in range(3):
        text = text_of.decode(walk(grammars, text_of, lark, seed))
        assert [name for name, _ in called(chat_format, text)] == ["add"]


def test_markup_of_a_call_is_the_model_s_own_control_tokens(grammars, text_of):
    lark = ChatFormat(text_of).tool_call_grammar(TOOLS)
    said = walk(grammars, text_of, lark, 0)
    assert said[0] == text_of.special_ids["<tool_call>"]
    assert said[-1] == text_of.special_ids["</tool_call>"]


def test_a_text_without_a_bound_may_be_anything_but_its_end(grammars, text_of):
    note = {"name": "note", "parameters": {"properties": {"text": {"type": "string"}}}}
    chat_format = ChatFormat(text_of, tool_form="qwen-xml")
    matcher = grammars.matcher(Grammar("lark", chat_format.tool_call_grammar([note])))
    said = "a <b> </b>\n\n<parameter=text>"
    # The call's markup is one token each in this vocabulary, the rest is plain text.
    tokens = [
        text_of.special_ids["<tool_call>"],
        *text_of.encode_plain(
            f"\n<function=note>\n<parameter=text>\n{said}\n</parameter>\n</function>\n",
            at_start=False,
        ),
        text_of.special_ids["</tool_call>"],
    ]
    for token in tokens:
        assert matcher.allowed(text_of.vocab_size)[token], text_of.decode([token])
        matcher.advance(token)
    assert matcher.is_complete
    assert called(chat_format, text_of.decode(tokens), [note]) == [("note", {"text": said})]


def test_thinking_that_the_reply_header_opens_comes_first(grammars, text_of):
    source = tokenizer()
    template = source.chat_template
    header = "<|start_of_role|>assistant<|end_of_role|>"
    source = type(source).from_pretrained(source.name_or_path)
    source.chat_template = template.replace(
        f"{{{{- '{header}' -}}}}", f"{{{{- '{header}<think>' -}}}}"
    )
    assert source.chat_template != template
    thinking = ChatFormat(Tokenizer(source))
    matcher = grammars.matcher(Grammar("lark", thinking.tool_call_grammar([NOW])))
    control = text_of.special_ids
    for token in (*text_of.encode_plain("Let me see."), control["</think>"]):
        assert matcher.allowed(text_of.vocab_size)[token]
        assert not matcher.allowed(text_of.vocab_size)[control["<tool_call>"]]
        matcher.advance(token)
    assert matcher.allowed(text_of.vocab_size).nonzero()[:, 0].tolist() == [control["<tool_call>"]]


@pytest.mark.parametrize(
    ("tools", "name", "problem"),
    [
        ([], None, "there are no tools"),
        ([{"type": "function"}], None, "there are no tools"),
        ([LS], "rm", "there is no tool 'rm' to call; there are ls"),
        ("ls", None, "tools is a str"),
    ],
)
def test_nothing_to_call_is_an_error(text_of, tools, name, problem):
    with pytest.raises(InvalidRequest, match=re.escape(problem)):
        ChatFormat(text_of).tool_call_grammar(tools, name=name)
