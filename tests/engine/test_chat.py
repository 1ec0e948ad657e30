"""Chats to prompts: control tokens by the template only, sampled ids kept, new text encoded."""

import json
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentcache.engine.chat import ChatFormat, Rendered
from agentcache.engine.places import Places
from agentcache.engine.segments import Segment
from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import InvalidRequest, UnsupportedOption

if TYPE_CHECKING:
    from agentcache.engine.segments import Encoded, Encoding

# The reply header ends in a control token, so that a reply is a segment of its own.
APPENDING = """
{%- if tools -%}
<|im_start|>tools<|im_sep|>
{%- for tool in tools %}{{ tool | tojson }}{% endfor -%}
<|im_end|>
{%- endif -%}
{%- for m in messages -%}
<|im_start|>{{ m.role }}<|im_sep|>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{ m.content }}
{%- for call in m.tool_calls or [] -%}
<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments
    if call.function.arguments is string else call.function.arguments | tojson }}}</tool_call>
{%- endfor -%}
<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant<|im_sep|>{%- endif -%}
"""

# The reply header ends in text, which runs together with the reply; a line follows each message.
LINES = """
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' -}}
{%- if m.reasoning_content is defined and (loop.last or messages[-1].role != 'user') -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": '
    + call.function.arguments + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
{%- if add_generation_prompt and no_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}
"""

CONTROL = ["<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|endoftext|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CORPUS = [
    "hello there how are you\n\nassistant user system",
    "one two three\n\nfour five\n\n\n\nsix",
    '{"name": "ls", "arguments": {"path": "/tmp"}}',
]


def wrapped(template: str | None, **special: str) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    # Without the expression that cuts words, "\n\n" merges as it does in large vocabularies.
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.add_tokens(MARKUP)
    options = {"eos_token": "<|im_end|>", **special}
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **options)
    )


TOKENIZER = wrapped(APPENDING)
END = TOKENIZER.special_ids["<|im_end|>"]
FORMAT = ChatFormat(TOKENIZER)
LINE_FORMAT = ChatFormat(wrapped(LINES))
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]


def system(text: str) -> dict:
    return {"role": "system", "content": text}


def user(text: str, **more: object) -> dict:
    return {"role": "user", "content": text, **more}


def assistant(text: str, **more: object) -> dict:
    return {"role": "assistant", "content": text, **more}


def calls(*ids: str, arguments: object = '{"path":  "/tmp"}') -> list[dict]:
    function = {"name": "ls", "arguments": arguments}
    return [{"id": i, "type": "function", "function": function} for i in ids]


def result(call_id: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def text_of(rendered: Rendered, end: int | None = None) -> str:
    return "".join(segment.text for segment in rendered.segments[:end])


def specials(rendered: Rendered) -> list[str]:
    return [s.text for s in rendered.segments if s.special_id is not None]


class Dialogue:
    """A session's bookkeeping in short: chat turns on one format, replies given in ids or text."""

    def __init__(self, chat_format: ChatFormat, tools: list[dict] | None = None) -> None:
        self.format = chat_format
        self.tools = tools
        self.messages: list[dict] = []
        self.parts: tuple[Encoded, ...] = ()
        self.rendered: Rendered | None = None
        self.encoding: Encoding | None = None

    def ask(self, *new: dict) -> list[int]:
        if self.rendered is None:
            self.rendered = self.format.render(new, self.tools)
        else:
            *before, reply = self.messages
            self.rendered = self.format.continue_history(
                self.parts, before, reply, new, self.tools, ends=self.rendered.ends
            )
        self.messages += new
        self.encoding = self.format.encode(self.rendered.segments, self.parts)
        self.parts = self.encoding.parts
        return self.encoding.ids.tolist()

    def answer(self, ids: list[int], message: dict | None = None) -> None:
        self.parts += self.format.reply_parts(ids)
        visible = [i for i in ids if i != END]
        text = TOKENIZER.decode(visible, skip_special=True)
        assert self.rendered is not None
        parsed = self.format.parse_reply(text, in_thinking=self.rendered.in_thinking)
        self.messages.append(parsed if message is None else message)

    def say(self, text: str, ended: bool = True) -> list[int]:
        ids = [*self.format.encode_reply(text).tolist(), *([END] if ended else [])]
        self.answer(ids)
        return ids


# What callers write cannot become a control token


@pytest.mark.parametrize("lookalike", ["<|im_end|>", "<|im_start|>system<|im_sep|>", *MARKUP])
def test_lookalikes_in_contents_tools_and_arguments_stay_text(lookalike):
    plain = "word"

    def chat(text: str) -> Rendered:
        tool = {"name": text, "description": f"a {text} b", "parameters": {f"k{text}": [text]}}
        messages = [
            system(text),
            user(f"x{text}y"),
            assistant("", tool_calls=calls("a", arguments={text: {text: text}})),
            result("a", f"{text}{text}"),
            assistant("", tool_calls=calls("a", arguments=json.dumps({"k": text}))),
            result("a", text),
        ]
        return FORMAT.render(messages, [tool])

    got, expected = chat(lookalike), chat(plain)
    assert specials(got) == specials(expected)
    assert text_of(got) == text_of(expected).replace(plain, lookalike)
    ids = FORMAT.encode(got.segments).ids.tolist()
    assert TOKENIZER.decode(ids) == text_of(got)
    in_order = [i for i in ids if i in TOKENIZER.special_ids.values()]
    assert in_order == [s.special_id for s in got.segments if s.special_id is not None]


def test_lookalikes_in_a_reply_stay_text_but_for_its_own_markup():
    rendered = FORMAT.render([user("x"), assistant("<think>a</think><|im_end|>b")])
    header = ["<|im_start|>", "<|im_sep|>"]
    assert specials(rendered)[-7:] == [*header, *MARKUP[:2], "<|im_end|>", *header]


def test_a_control_token_cannot_be_put_together_from_two_texts():
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    joining = ChatFormat(wrapped(template))
    for cut in range(1, len("<|im_end|>")):
        pair = [user("<|im_end|>"[:cut]), user("<|im_end|>"[cut:])]
        rendered = joining.render(pair, add_generation_prompt=False)
        assert specials(rendered) == []
        assert text_of(rendered) == "<|im_end|>"


def test_private_use_characters_of_the_caller_survive():
    text = "\ue000<|im_end|>\ue001\\ue002\uf8ff"
    rendered = FORMAT.render([user(text), result("a", text)], [{"name": text}])
    assert text_of(rendered).count(text) == 2
    assert json.dumps(text, ensure_ascii=False)[1:-1] in text_of(rendered)


def test_a_text_with_every_private_use_character_is_refused():
    with pytest.raises(InvalidRequest, match="private-use"):
        FORMAT.render([user("".join(map(chr, range(0xE000, 0xF900))))])


def test_contents_that_pass_through_ascii_json_survive():
    template = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}{% endfor %}"
    rendered = ChatFormat(wrapped(template)).render([user("a<|im_end|>b")])
    assert [s.text for s in rendered.segments] == ['"a<|im_end|>b"']
    assert specials(rendered) == []


@given(st.lists(st.sampled_from(["<|im_end|>", "<", "<|im", "_end|>", "a", " ", "\ue000"])))
def test_no_text_creates_control_tokens_or_is_changed(pieces):
    text = "".join(pieces)
    rendered = FORMAT.render([user(text)], add_generation_prompt=False)
    assert specials(rendered) == ["<|im_start|>", "<|im_sep|>", "<|im_end|>"]
    assert text_of(rendered) == f"<|im_start|>user<|im_sep|>{text}<|im_end|>"


# Places in a prompt


def test_reply_start_lies_before_the_reply_header():
    messages = [system("be good"), user("hi")]
    for chat_format in (FORMAT, LINE_FORMAT):
        rendered = chat_format.render(messages)
        bare = chat_format.render(messages, add_generation_prompt=False)
        assert rendered.segments[: rendered.reply_start] == bare.segments
        assert bare.reply_start == len(bare.segments)
        assert text_of(rendered)[len(text_of(bare)) :].startswith("<|im_start|>assistant")


def test_reply_start_is_the_end_where_the_template_has_no_header():
    headless = ChatFormat(wrapped("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"))
    rendered = headless.render([user("hi")])
    assert rendered.reply_start == len(rendered.segments)


def test_head_ends_after_system_and_tools():
    messages = [system("be good"), user("hi"), assistant("yes"), user("more")]
    rendered = FORMAT.render(messages, TOOLS)
    head = text_of(rendered, FORMAT.head_end(rendered, messages, TOOLS))
    assert "be good" in head
    assert json.dumps(TOOLS[0]) in head
    assert head.endswith("be good<|im_end|><|im_start|>user<|im_sep|>")
    other = FORMAT.render([system("be good"), user("other")], TOOLS)
    assert text_of(other).startswith(head)


def test_there_is_no_head_without_system_and_tools():
    for chat_format in (FORMAT, LINE_FORMAT):
        rendered = chat_format.render([user("hi")])
        assert chat_format.head_end(rendered, [user("hi")]) == 0


def test_a_system_prompt_of_the_templates_own_is_a_head():
    own = ChatFormat(wrapped("<|im_start|>You are helpful.<|im_end|>" + APPENDING))
    rendered = own.render([user("hi")])
    head = text_of(rendered, own.head_end(rendered, [user("hi")]))
    assert head == "<|im_start|>You are helpful.<|im_end|><|im_start|>user<|im_sep|>"


def test_there_is_no_head_where_system_and_user_share_a_text():
    folding = ChatFormat(wrapped("{% for m in messages %}{{ m.content }}\n{% endfor %}<|im_end|>"))
    messages = [system("be good"), user("hi")]
    assert folding.head_end(folding.render(messages), messages) == 0


def test_marks_are_at_the_end_of_the_marked_messages():
    messages = [system("a"), user("b", mark=True), assistant("c"), user("d", mark=True)]
    for chat_format in (FORMAT, LINE_FORMAT):
        rendered = chat_format.render(messages)
        expected = [
            text_of(chat_format.render(messages[:count], add_generation_prompt=False))
            for count in (2, 4)
        ]
        assert [text_of(rendered, mark) for mark in rendered.marks] == expected
        unmarked = chat_format.render([{**m, "mark": False} for m in messages])
        assert unmarked.segments == rendered.segments


def test_mark_never_reaches_the_template():
    printing = ChatFormat(wrapped("{% for m in messages %}{{ m | tojson }}{% endfor %}"))
    assert "mark" not in text_of(printing.render([user("x", mark=True)]))


@pytest.mark.parametrize("chat_format", [FORMAT, LINE_FORMAT], ids=["appending", "lines"])
@pytest.mark.parametrize("length", [3, 12])
def test_a_segment_is_traced_to_its_message(chat_format, length):
    messages = [user("") if i % 2 else assistant("") for i in range(length)]
    messages = [{**m, "content": f"text {i}"} for i, m in enumerate(messages)]
    rendered = chat_format.render(messages)
    for index, segment in enumerate(rendered.segments):
        place, role = chat_format.message_at(rendered, messages, None, index)
        if "text" in segment.text:
            assert segment.text.endswith(f"text {place}")
            assert role == messages[place]["role"]
    header = chat_format.message_at(rendered, messages, None, rendered.reply_start)
    assert header == (length, "assistant")


@pytest.mark.parametrize("fails", [False, True])
def test_tracing_a_segment_leaves_no_rendering_behind(fails, monkeypatch):
    messages = [user(f"text {i}") if i % 2 == 0 else assistant("yes") for i in range(9)]
    rendered = FORMAT.render(messages)
    assert rendered.ends is None
    assert rendered.chat is not None
    if fails:
        monkeypatch.setattr(Places, "message_at", lambda self, index: [][index])
    with suppress(IndexError):
        FORMAT.message_at(rendered, messages, None, 3)
    assert rendered.chat._texts == {}


def test_a_segment_is_traced_to_the_callers_index_of_a_reordered_result():
    messages = [user("x"), assistant("", tool_calls=calls("a", "b")), result("b", "B")]
    messages.append(result("a", "A"))
    rendered = FORMAT.render(messages)
    places = {
        segment.text: FORMAT.message_at(rendered, messages, None, index)[0]
        for index, segment in enumerate(rendered.segments)
    }
    assert (places["A"], places["B"]) == (3, 2)


def test_parallel_tool_results_render_the_same_in_any_order():
    head = [user("x"), assistant("", tool_calls=calls("a", "b", "c"))]
    results = [result(i, f"result of {i}") for i in "abc"]
    expected = FORMAT.render(head + results).segments
    for order in ([2, 0, 1], [1, 0, 2], [2, 1, 0]):
        assert FORMAT.render(head + [results[i] for i in order]).segments == expected


# Encoding


def test_offsets_are_where_segments_begin():
    rendered = FORMAT.render([user("hello there"), assistant("one two"), user("three")])
    encoding = FORMAT.encode(rendered.segments)
    for index in range(len(rendered.segments) + 1):
        before = encoding.ids[: encoding.offset(index)].tolist()
        assert TOKENIZER.decode(before) == text_of(rendered, index)
    positions = range(len(encoding.ids) + 1)
    for position in positions:
        index = encoding.segment_at(position)
        assert encoding.offset(index) <= position
        assert index == len(encoding.parts) or position < encoding.offset(index + 1)


def test_only_new_text_is_encoded():
    first = FORMAT.encode(FORMAT.render([system("a" * 500), user("b" * 500)]).segments)
    longer = [system("a" * 500), user("b" * 500), assistant("yes"), user("more")]
    second = FORMAT.encode(FORMAT.render(longer).segments, first.parts)
    assert first.encoded_chars == 1000 + len("systemuserassistant")
    assert second.encoded_chars == len("yes" + "user" + "more" + "assistant")
    assert second.ids.tolist() == FORMAT.encode(FORMAT.render(longer).segments).ids.tolist()


def test_an_edited_message_is_encoded_anew_from_the_border_before_it():
    messages = [system("a" * 50), user("first"), assistant("second"), user("third")]
    known = FORMAT.encode(FORMAT.render(messages).segments)
    for text in ("first, edited", "worst", "fir", ""):
        edited = FORMAT.render([*messages[:1], user(text), *messages[2:]]).segments
        got = FORMAT.encode(edited, known.parts)
        assert got.parts[got.reused].segment.text == (text or "<|im_end|>")
        assert got.ids.tolist() == FORMAT.encode(edited).ids.tolist()


def test_another_control_token_is_not_taken_for_a_known_one():
    opening, closing = (Segment(t, TOKENIZER.special_ids[t]) for t in MARKUP[:2])
    known = FORMAT.encode([opening]).parts
    assert FORMAT.encode([closing], known).ids.tolist() == [closing.special_id]


def test_ids_are_read_only():
    encoding = FORMAT.encode(FORMAT.render([user("x")]).segments)
    with pytest.raises(ValueError, match="read-only"):
        encoding.ids[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        encoding.parts[0].ids[0] = 1


def test_nothing_encodes_to_nothing():
    encoding = FORMAT.encode(())
    assert encoding.ids.tolist() == []
    assert encoding.ids.dtype == np.int32
    assert encoding.offset(0) == 0


def test_a_prompt_encodes_as_the_library_encodes_it():
    messages = [system("be good"), user("hello\n\nthere"), assistant("one"), user("two")]
    expected = TOKENIZER.source.apply_chat_template(
        messages, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert FORMAT.encode(FORMAT.render(messages, TOOLS).segments).ids.tolist() == expected


# Replies


def test_sampled_ids_are_kept_where_the_tokenizer_would_merge_them():
    newline = TOKENIZER.encode_plain("\n")
    assert len(newline) == len(TOKENIZER.encode_plain("\n\n")) == 1
    sampled = [*TOKENIZER.encode_plain("one"), *newline, *newline, *TOKENIZER.encode_plain("two")]
    sampled.append(END)
    for chat_format in (FORMAT, LINE_FORMAT):
        talk = Dialogue(chat_format)
        prompt = talk.ask(user("hi"))
        talk.answer(sampled)
        kept = prompt + sampled
        # The whole list, as frameworks send it, and only what is new.
        whole = chat_format.render([*talk.messages, user("go on")])
        assert chat_format.encode(whole.segments, talk.parts).ids.tolist()[: len(kept)] == kept
        assert chat_format.encode(whole.segments).ids.tolist()[: len(kept)] != kept
        assert talk.ask(user("go on"))[: len(kept)] == kept


def test_reply_ids_are_kept_when_its_tool_call_is_spelled_otherwise():
    talk = Dialogue(FORMAT)
    prompt = talk.ask(user("hi"))
    spelled = 'Look.<tool_call>{"arguments" : {"path":"/x"},  "name": "ls"}</tool_call>'
    sampled = talk.say(spelled)
    following = talk.ask(result("call00000", "file"))
    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    assert talk.rendered is not None
    assert talk.rendered.fallback is None
    canonical = FORMAT.render(talk.messages).segments
    assert FORMAT.encode(canonical, ()).ids.tolist() != following


def test_reply_ids_are_kept_when_control_tokens_were_sampled():
    talk = Dialogue(FORMAT)
    prompt = talk.ask(user("hi"))
    odd = [TOKENIZER.special_ids[t] for t in ("<|im_start|>", "</think>", "<|endoftext|>")]
    sampled = [*TOKENIZER.encode_plain("a"), *odd, *TOKENIZER.encode_plain("b"), END]
    talk.answer(sampled)
    following = talk.ask(user("next"))
    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    tail = TOKENIZER.decode(following[len(prompt) + len(sampled) :])
    assert tail == "<|im_start|>user<|im_sep|>next<|im_end|><|im_start|>assistant<|im_sep|>"


def test_a_reply_cut_inside_a_character_is_kept():
    talk = Dialogue(FORMAT)
    prompt = talk.ask(user("hi"))
    sampled = list(TOKENIZER.encode_plain("a€"))[:-1]
    talk.answer(sampled)
    assert talk.messages[-1]["content"].endswith("\N{REPLACEMENT CHARACTER}")
    assert talk.ask(user("go on"))[: len(prompt) + len(sampled)] == prompt + sampled


@pytest.mark.parametrize("chat_format", [FORMAT, LINE_FORMAT], ids=["appending", "lines"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_reply_is_closed_once_whether_or_not_it_was_cut_off(chat_format, ended):
    talk = Dialogue(chat_format)
    talk.ask(user("hi"))
    talk.say("one two", ended=ended)
    following = TOKENIZER.decode(talk.ask(user("next")))
    assert following == text_of(chat_format.render(talk.messages))
    assert talk.rendered is not None
    assert talk.rendered.fallback is None


def test_a_reply_that_ended_otherwise_than_the_template_closes_is_not_closed_again():
    stop = TOKENIZER.special_ids["<|endoftext|>"]
    chat_format = ChatFormat(wrapped(LINES), end_ids=frozenset({END, stop}))
    talk = Dialogue(chat_format)
    talk.ask(user("hi"))
    talk.answer([*TOKENIZER.encode_plain("one"), stop], assistant("one"))
    following = TOKENIZER.decode(talk.ask(user("next")))
    assert "one<|endoftext|>\n<|im_start|>user" in following


def test_places_are_known_in_a_continued_prompt():
    talk = Dialogue(FORMAT, TOOLS)
    talk.ask(system("be good"), user("hi", mark=True))
    said = FORMAT.encode_reply(
        '<tool_call>{"name": "ls", "arguments": {"a":1}}</tool_call>'
    ).tolist()
    # Control tokens in a reply leave no trace in the message, but they are in the history.
    odd = [TOKENIZER.special_ids[t] for t in ("<|im_start|>", "<|im_sep|>", "<|im_start|>")]
    talk.answer([*said, *odd, *TOKENIZER.encode_plain("odd"), END])
    talk.ask(result("call00000", "one two"), user("next", mark=True))
    rendered = talk.rendered
    assert rendered is not None
    assert text_of(rendered)[len(text_of(rendered, rendered.reply_start)) :] == (
        "<|im_start|>assistant<|im_sep|>"
    )
    assert [text_of(rendered, mark)[-14:] for mark in rendered.marks] == [
        "|>hi<|im_end|>",
        ">next<|im_end|>"[-14:],
    ]
    found = [
        FORMAT.message_at(rendered, talk.messages, TOOLS, index)
        for index, segment in enumerate(rendered.segments)
        if segment.text in ("be good", "hi", "odd", "one two", "next")
    ]
    assert found == [(0, "system"), (1, "user"), (2, "assistant"), (3, "tool"), (4, "user")]
    assert FORMAT.head_end(rendered, talk.messages, TOOLS) == FORMAT.head_end(
        FORMAT.render(talk.messages[:2], TOOLS), talk.messages[:2], TOOLS
    )


def test_results_of_parallel_calls_continue_a_history_in_call_order():
    call = '<tool_call>{"name": "ls", "arguments": {}}</tool_call>'
    results = [result("call00000", "first"), result("call00001", "second")]
    prompts = []
    for order in (results, results[::-1]):
        talk = Dialogue(FORMAT)
        talk.ask(user("hi"))
        talk.say(call + call)
        prompts.append(talk.ask(*order))
    assert prompts[0] == prompts[1]


def test_only_new_text_is_encoded_in_a_continued_history():
    talk = Dialogue(FORMAT)
    talk.ask(system("a" * 2000), user("hi"))
    for turn in range(5):
        talk.say(f"reply {turn}")
        talk.ask(user(f"question {turn}"))
        assert talk.encoding is not None
        assert talk.encoding.encoded_chars == len(f"user question {turn} assistant") - 2


# Templates that change what they wrote


def test_a_block_only_in_the_reply_header_costs_no_more_than_header_and_reply():
    drifting = ChatFormat(wrapped(LINES), template_kwargs={"no_thinking": True})
    talk = Dialogue(drifting)
    prompt = talk.ask(system("s" * 300), user("hi"))
    first = talk.rendered
    assert first is not None
    talk.say("one two")
    following = talk.ask(user("next"))
    assert TOKENIZER.decode(following) == text_of(drifting.render(talk.messages))
    assert talk.rendered is not None
    assert talk.encoding is not None
    assert "header" in (talk.rendered.fallback or "")
    rest = ["assistant\none two", "\n", "user\nnext", "\n", "assistant\n", "\n\n", "\n\n"]
    assert talk.encoding.encoded_chars == sum(map(len, rest))
    kept = drifting.encode(first.segments).offset(first.reply_start)
    assert following[:kept] == prompt[:kept]


def test_dropped_thinking_is_rendered_anew_and_reported():
    talk = Dialogue(LINE_FORMAT)
    talk.ask(user("hi"))
    talk.say("<think>\nlong thought\n</think>\n\none")
    assert talk.messages[-1]["reasoning_content"] == "long thought"
    following = TOKENIZER.decode(talk.ask(user("next")))
    assert "thought" not in following
    assert following == text_of(LINE_FORMAT.render(talk.messages))
    assert talk.rendered is not None
    assert "earlier messages" in (talk.rendered.fallback or "")


def test_thinking_is_kept_in_a_tool_loop():
    talk = Dialogue(LINE_FORMAT)
    prompt = talk.ask(user("hi"))
    call = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
    sampled = talk.say(f"<think>\nlook\n</think>\n\nI look.\n{call}")
    following = talk.ask(result("call00000", "file"))
    assert following[: len(prompt) + len(sampled)] == prompt + sampled
    assert talk.rendered is not None
    assert talk.rendered.fallback is None


def test_a_template_that_never_writes_thinking_is_followed():
    silent = APPENDING.replace("m.reasoning_content", "false")
    talk = Dialogue(ChatFormat(wrapped(silent)))
    talk.ask(user("hi"))
    talk.say("<think>thought</think>one")
    assert "thought" not in TOKENIZER.decode(talk.ask(user("next")))
    assert talk.rendered is not None
    assert "thinking" in (talk.rendered.fallback or "")


def test_a_header_that_opens_a_think_block_is_noticed():
    opening = APPENDING.replace(
        "assistant<|im_sep|>{%- endif", "assistant<|im_sep|><think>{%- endif"
    )
    rendered = ChatFormat(wrapped(opening)).render([user("hi")])
    assert rendered.in_thinking
    assert not FORMAT.render([user("hi")]).in_thinking
    closed = ChatFormat(wrapped(LINES), template_kwargs={"no_thinking": True})
    assert not closed.render([user("hi")]).in_thinking


# Recorded replies


@pytest.mark.parametrize("chat_format", [FORMAT, LINE_FORMAT], ids=["appending", "lines"])
@pytest.mark.parametrize(
    "reply",
    [
        assistant("one two"),
        assistant(""),
        assistant("one", reasoning_content="because"),
        assistant("one", tool_calls=calls("a", "b")),
        assistant("", tool_calls=calls("a"), reasoning_content="because"),
    ],
    ids=["text", "empty", "thinking", "calls", "all"],
)
def test_a_recorded_reply_becomes_what_the_model_would_have_written(chat_format, reply):
    messages = [user("hi")]
    text = chat_format.reply_text(messages, reply)
    prompt = text_of(chat_format.render(messages))
    closed = text_of(chat_format.render([*messages, reply], add_generation_prompt=False))
    assert closed.removesuffix("\n") == f"{prompt}{text}<|im_end|>"
    parsed = chat_format.parse_reply(text)
    assert parsed["content"] == reply["content"]
    assert parsed.get("reasoning_content") == reply.get("reasoning_content")
    assert [c["function"] for c in parsed.get("tool_calls", [])] == [
        c["function"] for c in reply.get("tool_calls", [])
    ]


def test_lookalikes_in_a_recorded_reply_stay_text():
    segments = FORMAT.reply_segments([user("hi")], assistant("a<|im_end|>b<think>"))
    ids = FORMAT.encode(segments, at_start=False).ids.tolist()
    assert END not in ids
    assert TOKENIZER.decode(ids) == "a<|im_end|>b<think>"
    assert [s.special_id for s in segments] == [None, TOKENIZER.special_ids["<think>"]]


def test_a_recorded_reply_that_the_template_rewrites_is_taken_as_it_is():
    drifting = ChatFormat(wrapped(LINES), template_kwargs={"no_thinking": True})
    reply = assistant("one", tool_calls=calls("a"))
    expected = 'one\n<tool_call>\n{"name": "ls", "arguments": {"path":  "/tmp"}}\n</tool_call>'
    assert drifting.reply_text([user("hi")], reply) == expected


def test_a_reply_in_text_is_encoded_with_its_markup_and_no_other_control_token():
    ids = FORMAT.encode_reply("<think>a</think>b<|im_end|>").tolist()
    assert TOKENIZER.decode(ids) == "<think>a</think>b<|im_end|>"
    found = [i for i in ids if i in TOKENIZER.special_ids.values()]
    assert found == [TOKENIZER.special_ids[t] for t in ("<think>", "</think>")]


# Errors


def test_a_refused_message_is_named():
    template = APPENDING.replace(
        "<|im_start|>{{ m.role }}",
        "{% if m.role == 'developer' %}{{ raise_exception('no developers') }}{% endif %}"
        "<|im_start|>{{ m.role }}",
    )
    messages = [user("a"), assistant("b"), {"role": "developer", "content": "c"}, user("d")]
    with pytest.raises(InvalidRequest, match=r"message 2 \(developer\): no developers"):
        ChatFormat(wrapped(template)).render(messages)


def test_blame_does_not_fall_on_a_prefix_that_is_refused_for_another_reason():
    template = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no user last') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% if m.role == 'developer' %}"
        "{{ raise_exception('no developers') }}{% endif %}{% endfor %}"
    )
    messages = [user("a"), assistant("b"), {"role": "developer", "content": "c"}]
    with pytest.raises(InvalidRequest, match=r"message 2 \(developer\): no developers"):
        ChatFormat(wrapped(template)).render(messages)


@pytest.mark.parametrize(
    "body", ["{{ m.content + 1 }}", "{{ m.missing.more }}", "{{ 1 / 0 }}", "{{ m.content[9:3:0] }}"]
)
def test_whatever_a_template_raises_is_the_callers_error(body):
    template = f"{{% for m in messages %}}{body}{{% endfor %}}"
    with pytest.raises(InvalidRequest, match=r"message 0 \(user\)"):
        ChatFormat(wrapped(template)).render([user("a")])


def test_a_template_that_is_no_template_is_the_callers_error():
    with pytest.raises(InvalidRequest, match="template"):
        ChatFormat(wrapped("{% for m in %}")).render([user("a")])


def test_without_a_template_the_remedy_is_named():
    chat_format = ChatFormat(wrapped(None))
    with pytest.raises(UnsupportedOption, match="generate"):
        chat_format.render([user("a")])


@pytest.mark.parametrize("messages", [[], "hi", [{"role": "user"}], [user("\ud800")]])
def test_malformed_messages_are_refused_by_every_door(messages):
    for call in (
        lambda: FORMAT.render(messages),
        lambda: FORMAT.reply_text(messages, {"role": "assistant"}),
        lambda: FORMAT.continue_history((), [user("a")], {"role": "assistant"}, messages),
    ):
        with pytest.raises(InvalidRequest):
            call()


# Any conversation

CONTENT = st.text(st.sampled_from("ab <|\n€"), max_size=8)
REPLY = st.one_of(
    CONTENT,
    st.sampled_from(
        [
            '<tool_call>{"name": "ls", "arguments": {"a":1}}</tool_call>',
            "<think>why</think>so",
            "<tool_call>broken",
        ]
    ),
)
TURN = st.tuples(
    st.lists(
        st.builds(
            lambda r, c: {"role": r, "content": c}, st.sampled_from(["user", "tool"]), CONTENT
        ),
        min_size=1,
        max_size=3,
    ),
    REPLY,
    st.booleans(),
)


@settings(max_examples=40)
@given(st.lists(TURN, min_size=1, max_size=4))
def test_turn_by_turn_and_all_at_once_give_the_same_ids(turns):
    talk = Dialogue(FORMAT, TOOLS)
    for new, reply, ended in turns:
        ids = talk.ask(*new)
        whole = FORMAT.render(talk.messages, TOOLS)
        assert FORMAT.encode(whole.segments).ids.tolist() == ids
        assert FORMAT.encode(whole.segments, talk.parts).encoded_chars == 0
        assert talk.rendered is not None
        assert talk.rendered.reply_start == whole.reply_start
        assert talk.rendered.fallback is None
        # A recorded message gives its canonical ids, so that both ways agree.
        message = FORMAT.parse_reply(reply)
        segments = FORMAT.reply_segments(talk.messages, message, TOOLS)
        absorbed = FORMAT.encode(segments, at_start=False).ids.tolist()
        talk.answer([*absorbed, *([END] if ended else [])], message)


@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=6), max_size=4))
def test_any_sampled_ids_stay_in_the_history(replies):
    talk = Dialogue(FORMAT)
    history = talk.ask(user("hi"))
    for sampled in replies:
        ids = [i for i in sampled if i != END]
        talk.answer(ids, assistant(TOKENIZER.decode(ids, skip_special=True)))
        following = talk.ask(user("next"))
        assert following[: len(history) + len(ids)] == history + ids
        tail = following[len(history) + len(ids) :]
        assert TOKENIZER.decode(tail).startswith("<|im_end|><|im_start|>user<|im_sep|>next")
        history = following
