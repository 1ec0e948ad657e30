"""The embedded chat template: append-only for every list of messages, and nothing is trimmed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer

from agentcache.engine import tiny_hybrid

END = "<|end_of_text|>"
TOKENIZER = AutoTokenizer.from_pretrained(tiny_hybrid._ASSETS)
AWKWARD = Path(__file__).parents[1] / "fixtures" / "templates" / "drops_thinking.jinja"


def header(role: str) -> str:
    return f"<|start_of_role|>{role}<|end_of_role|>"


def render(messages: list[Any], template: str | None = None, **kwargs: Any) -> str:
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, chat_template=template, **kwargs)
    assert isinstance(text, str)
    return text


words = st.text(alphabet=" \n\tab{}<>'\"é😀", max_size=8)
parts = st.lists(
    words.map(lambda text: {"type": "text", "text": text}) | words, min_size=1, max_size=3
)
contents = st.none() | words | parts
arguments = words | st.dictionaries(words, st.integers() | words | st.none(), max_size=2)
calls = st.builds(
    lambda name, arguments, nested: (
        {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
        if nested
        else {"name": name, "arguments": arguments}
    ),
    words,
    arguments,
    st.booleans(),
)
plain = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "user", "tool"]),
    contents,
)
replies = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": contents,
        "reasoning_content": st.none() | words,
        "tool_calls": st.none() | st.lists(calls, max_size=2),
    },
)
histories = st.lists(plain | replies, min_size=1, max_size=5)
tool_lists = st.none() | st.just(
    [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
)


@given(history=histories, more=histories, tools=tool_lists)
def test_a_longer_list_only_appends(
    history: list[Any], more: list[Any], tools: list[Any] | None
) -> None:
    whole = render(history + more, tools=tools)
    assert whole.startswith(render(history, tools=tools))


@given(history=histories, reply=replies, tools=tool_lists)
def test_a_reply_stands_where_it_was_generated(
    history: list[Any], reply: dict[str, Any], tools: list[Any] | None
) -> None:
    prompt = render(history, tools=tools, add_generation_prompt=True)
    assert prompt == render(history, tools=tools) + header("assistant")
    written = render([reply]).removeprefix(header("assistant"))
    assert written.endswith(END)
    assert render([*history, reply], tools=tools) == prompt + written


def test_parts_of_a_reply_come_in_the_order_they_are_written() -> None:
    reply = {
        "role": "assistant",
        "reasoning_content": " why \n",
        "content": "\ntext ",
        "tool_calls": [
            {"type": "function", "function": {"name": "f", "arguments": '{"a":  1 }'}},
            {"type": "function", "function": {"name": "g", "arguments": {"b": "é", "a": None}}},
            {"type": "function", "function": {"name": "h"}},
        ],
    }
    assert render([reply]) == (
        header("assistant")
        + "<think> why \n</think>\ntext "
        + '<tool_call>{"name": "f", "arguments": {"a":  1 }}</tool_call>'
        + '<tool_call>{"name": "g", "arguments": {"b": "é", "a": null}}</tool_call>'
        + '<tool_call>{"name": "h", "arguments": {}}</tool_call>'
        + END
    )


@pytest.mark.parametrize("absent", ["", None])
def test_absent_thinking_leaves_no_block(absent: str | None) -> None:
    reply = {"role": "assistant", "content": "x", "reasoning_content": absent}
    assert render([reply]) == header("assistant") + "x" + END


def test_tools_are_a_system_block_of_their_own() -> None:
    tool = {"type": "function", "function": {"name": "ls", "description": "é <b>"}}
    text = render([{"role": "system", "content": "s"}], tools=[tool, tool])
    block, _, rest = text.partition(END)
    assert block.startswith(header("system"))
    assert [json.loads(line) for line in block.splitlines()[1:]] == [tool, tool]
    assert rest == header("system") + "s" + END


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "developer", "content": "x"}, "developer"),
        ({"content": "x"}, "role must be"),
        ({"role": "user", "content": 3}, "content must be"),
        ({"role": "user", "content": {"type": "text", "text": "x"}}, "content must be"),
        ({"role": "user", "content": [{"type": "image"}]}, "content parts"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "name its function"),
    ],
)
def test_what_cannot_be_rendered_is_an_error(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(TemplateError, match=problem):
        render([message])


def test_markup_is_single_tokens_and_only_control_tokens_are_special() -> None:
    ids = TOKENIZER.encode("<think>a</think><tool_call>b</tool_call>")
    assert ids[0::2][:2] == TOKENIZER.convert_tokens_to_ids(["<think>", "</think>"])
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == (
        "<think>a</think><tool_call>b</tool_call>"
    )
    text = render([{"role": "user", "content": " a"}])
    assert TOKENIZER.decode(TOKENIZER.encode(text), skip_special_tokens=True) == "user a"


def test_awkward_template_breaks_the_prefix_where_it_says() -> None:
    """The fixture that other tests lean on: it drops thinking and adds an empty block."""
    template = AWKWARD.read_text(encoding="utf-8")
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "reasoning_content": "because", "content": "a"},
    ]
    prompt = render(history[:1], template, add_generation_prompt=True)
    first = render(history, template)
    later = render([*history, {"role": "user", "content": "q2"}], template)
    assert prompt.endswith(header("assistant") + "<think>\n\n</think>\n\n")
    assert "because" in first
    assert not first.startswith(prompt)
    assert "because" not in later
    assert not later.startswith(first)
