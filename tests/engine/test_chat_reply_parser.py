"""Replies read back: thinking, tool calls as written, and nothing lost, in any number of pieces."""

import json

from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.reply_parser import ReplyForm, ReplyReader, parse_reply

LINES = ReplyForm("\n", "\n", "\n\n", "\n", "\n")


def calls_of(message: dict) -> list[tuple[str, str]]:
    calls = message.get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def test_a_plain_reply_is_content():
    assert parse_reply("Hello.") == {"role": "assistant", "content": "Hello."}


def test_leading_thinking_becomes_reasoning():
    message = parse_reply("<think>\nplan\n</think>\n\nDone.", form=LINES)
    assert message == {"role": "assistant", "content": "Done.", "reasoning_content": "plan"}


def test_white_space_the_template_does_not_write_is_kept():
    message = parse_reply("<think>\nplan\n</think>\n\nDone.")
    assert message["reasoning_content"] == "\nplan\n"
    assert message["content"] == "\n\nDone."


def test_thinking_opened_by_the_reply_header_needs_no_opening():
    message = parse_reply("plan\n</think>\n\nDone.", in_thinking=True, form=LINES)
    assert message["reasoning_content"] == "plan"
    assert message["content"] == "Done."


def test_thinking_that_was_cut_off_is_reasoning_to_the_end():
    message = parse_reply("<think>so far\n")
    assert message == {"role": "assistant", "content": "", "reasoning_content": "so far\n"}


def test_an_empty_block_shows_as_empty_reasoning():
    assert parse_reply("<think></think>Hi")["reasoning_content"] == ""
    assert "reasoning_content" not in parse_reply("Hi")


def test_a_think_block_inside_the_content_stays_there():
    text = "Use <think>x</think> for thinking."
    assert parse_reply(text) == {"role": "assistant", "content": text}


def test_arguments_are_kept_as_the_model_wrote_them():
    text = '<tool_call>{ "name":"ls" , "arguments" : {"path":  "/tmp", "n": 1.0} }</tool_call>'
    assert calls_of(parse_reply(text)) == [("ls", '{"path":  "/tmp", "n": 1.0}')]


def test_parallel_calls_are_numbered_and_leave_the_content():
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    message = parse_reply(f"Look:\n{call}\n{call}", form=LINES, first_call=3)
    assert message["content"] == "Look:"
    assert [c["id"] for c in message["tool_calls"]] == ["call00003", "call00004"]


def test_text_between_and_after_calls_is_kept():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert parse_reply(f"a {call} b {call} c")["content"] == "a  b  c"


def test_arguments_given_as_a_json_string_are_the_text_in_it():
    text = '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert calls_of(parse_reply(text)) == [("f", '{"a": 1}')]


def test_a_call_without_arguments_has_none():
    assert calls_of(parse_reply('<tool_call>{"name": "f"}</tool_call>')) == [("f", "{}")]


def test_a_closing_tag_inside_a_string_does_not_end_the_call():
    arguments = '{"text": "</tool_call> {\\"}"}'
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>rest'
    message = parse_reply(text)
    assert calls_of(message) == [("f", arguments)]
    assert message["content"] == "rest"


def test_malformed_calls_stay_in_the_content_untouched():
    for block in [
        "<tool_call>no json</tool_call>",
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{"}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {]}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}} trailing </tool_call>',
        '<tool_call>{"name": "f", "arguments": {}}',
        '<tool_call>{"name": "f',
        "<tool_call>" + '{"a":' * 20000 + "1" + "}" * 20000 + "</tool_call>",
        "<tool_call>",
    ]:
        text = f"before\n{block}\nafter"
        assert parse_reply(text, form=LINES) == {"role": "assistant", "content": text}


def test_a_good_call_after_a_malformed_one_is_found():
    text = '<tool_call>oops<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    message = parse_reply(text)
    assert message["content"] == "<tool_call>oops"
    assert calls_of(message) == [("f", "{}")]


def test_pieces_come_out_as_soon_as_they_are_certain():
    reader = ReplyReader(form=LINES)
    assert reader.push("<think>\nwh").reasoning == "wh"
    assert reader.push("y\n").reasoning == "y"
    assert reader.push("</think>\n").reasoning == ""
    assert reader.push("\nNow").content == "Now"
    assert reader.push("\n<tool_").content == ""
    assert reader.push('call>{"name": "f", "arguments"').content == ""
    piece = reader.push(": {}}</tool_call>")
    assert piece.content == ""
    assert len(piece.tool_calls) == 1


def test_a_block_that_can_be_no_call_any_more_is_not_held_back():
    for block in (
        "<tool_call>[",
        '<tool_call>{"name": "f"} x',
        '<tool_call>{"names": "f"}</tool_call>',
    ):
        assert ReplyReader().push(f"a {block}").content == f"a {block}"


FRAGMENTS = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "f", "arguments": {"a": [1, "}\\""]}}',
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
        "{",
        '"',
        "\\",
        "\n",
        " ",
        "<",
        "text",
    ]
)


@given(st.lists(FRAGMENTS, max_size=12), st.integers(1, 7), st.booleans(), st.booleans())
def test_a_growing_reply_comes_to_what_the_whole_one_is(fragments, size, in_thinking, lines):
    text, form = "".join(fragments), LINES if lines else ReplyForm()
    whole = parse_reply(text, in_thinking=in_thinking, form=form)
    reader = ReplyReader(in_thinking=in_thinking, form=form)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.finish())
    assert reader.message == whole
    assert "".join(piece.content for piece in pieces) == whole["content"]
    assert "".join(piece.reasoning for piece in pieces) == whole.get("reasoning_content", "")
    assert [c for piece in pieces for c in piece.tool_calls] == whole.get("tool_calls", [])


@given(st.lists(FRAGMENTS, max_size=12))
def test_a_reply_without_calls_can_be_put_together_again(fragments):
    text = "".join(fragments)
    message = parse_reply(text)
    if "tool_calls" in message:
        return
    reasoning, content = message.get("reasoning_content"), message["content"]
    if reasoning is None:
        assert text == content
    else:
        assert text.lstrip() in (f"<think>{reasoning}</think>{content}", f"<think>{reasoning}")


def test_arguments_are_valid_json_for_any_names():
    text = '<tool_call>{"name": "é", "arguments": {"\\u00e9": "\\ud83d\\ude00"}}</tool_call>'
    [(name, arguments)] = calls_of(parse_reply(text))
    assert name == "é"
    assert json.loads(arguments) == {"é": "\N{GRINNING FACE}"}
