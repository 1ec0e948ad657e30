"""Templates as models have them, with their oddities, through the whole way of a chat."""

from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agentcache.engine.chat import ChatFormat
from agentcache.engine.segments import ShortTexts
from agentcache.engine.stepwise_template import StepwiseTemplate
from agentcache.engine.tokenizer import Tokenizer

ENGINE = Path(__file__).parents[2] / "engine"
FIXTURES = Path(__file__).parents[1] / "fixtures" / "templates"

OPEN, CLOSE = "<|im_start|>", "<|im_end|>"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}<tool_call>ARGS</tool_call>{% endfor %}"

USER = {"role": "user", "content": "hi there"}
NEXT = {"role": "user", "content": "and now"}
REPLY = {"role": "assistant", "content": "well yes"}


def bytes_only(template: str, *control: str | AddedToken) -> Tokenizer:
    """A tokenizer of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([OPEN, CLOSE, "</s>", *control])
    backend.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return Tokenizer(
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=CLOSE, chat_template=template)
    )


def format_of(template: str, *control: str | AddedToken, ends: tuple[str, ...] = ()) -> ChatFormat:
    tokenizer = bytes_only(template, *control)
    end_ids = frozenset(tokenizer.special_ids[end] for end in (CLOSE, *ends))
    return ChatFormat(tokenizer, end_ids=end_ids)


def text_of(segments) -> str:
    return "".join(segment.text for segment in segments)


def two_turns(
    chat_format: ChatFormat, *end: int, said: str = "well yes", reply=REPLY, tools=None
) -> tuple[str, str, str | None]:
    """(continued prompt, the same list rendered as a whole, why it was not continued)."""
    first = chat_format.render([USER], tools)
    ids = chat_format.encode_reply(said).tolist()
    parts = chat_format.encode(first.segments).parts + chat_format.reply_parts([*ids, *end])
    going_on = chat_format.continue_history(parts, [USER], reply, [NEXT], tools)
    known = chat_format.continue_history(
        *(parts, [USER], reply, [NEXT], tools), known=first.chat, reply_start=len(first.segments)
    )
    assert text_of(known.segments) == text_of(going_on.segments)
    assert known.fallback == going_on.fallback
    whole = chat_format.render([USER, reply, NEXT], tools)
    encoded = chat_format.encode(whole.segments, parts).ids.tolist()
    if text_of(going_on.segments) == text_of(whole.segments):
        assert chat_format.encode(going_on.segments, parts).ids.tolist() == encoded
    return text_of(going_on.segments), text_of(whole.segments), going_on.fallback


ENDS_ONLY_WITHOUT_HEADER = PLAIN + HEADER + "{% if not add_generation_prompt %}</s>{% endif %}"
CLOSED_BY_THE_NEXT = (
    "{% for m in messages %}{{ '<|im_end|>\n' if not loop.first }}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_end|>\n"
    "<|im_start|>assistant\n{% endif %}"
)
TEXT_ALONE = (
    "{% for m in messages %}### {{ m.role }}: {{ m.content }}"
    + CALLS.replace("ARGS", "{{ c.function.arguments }}")
    + "\n\n{% endfor %}{% if add_generation_prompt %}### assistant: {% endif %}"
)


@pytest.mark.parametrize("said", ["well yes", "well  yes"])
@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize(
    "template",
    [PLAIN + HEADER, ENDS_ONLY_WITHOUT_HEADER, CLOSED_BY_THE_NEXT, TEXT_ALONE],
    ids=["plain", "end of text", "closed by the next", "text alone"],
)
def test_a_reply_is_kept_and_closed_as_the_template_closes_it(template, ended, said):
    chat_format = format_of(template, ends=("</s>",))
    close = [bytes_only(template).special_ids[CLOSE]] if ended and template != TEXT_ALONE else []
    going_on, whole, fallback = two_turns(chat_format, *close, said=said)
    assert going_on == whole.replace("well yes", said)
    assert fallback is None
    assert chat_format.reply_text([USER], REPLY) == REPLY["content"]


@pytest.mark.parametrize("template", [PLAIN + HEADER, ENDS_ONLY_WITHOUT_HEADER])
@pytest.mark.parametrize(("said", "passes"), [("well yes", 1), ("well  yes", 2)])
def test_a_reply_that_the_template_writes_to_the_letter_takes_one_pass(
    template, said, passes, monkeypatch
):
    chat_format = format_of(template, ends=("</s>",))
    first = chat_format.render([USER])
    ids = [*chat_format.encode_reply(said).tolist(), bytes_only(template).special_ids[CLOSE]]
    parts = chat_format.encode(first.segments).parts + chat_format.reply_parts(ids)
    run, lens = StepwiseTemplate.passed, []

    def counted(self, variables, runs):
        lens.append(len(variables["messages"]))
        return run(self, variables, runs)

    monkeypatch.setattr(StepwiseTemplate, "passed", counted)
    rendered = chat_format.continue_history(
        *(parts, [USER], REPLY, [NEXT, NEXT]),
        ends=first.ends,
        known=first.chat,
        reply_start=len(first.segments),
    )
    monkeypatch.undo()
    assert len(lens) >= passes
    assert (set(lens) == {4}) == (passes == 1)
    whole = chat_format.render([USER, REPLY, NEXT, NEXT])
    ends = [text_of(rendered.segments[:end]) for end in rendered.ends]
    assert ends == [text_of(whole.segments[:end]).replace("well yes", said) for end in whole.ends]


@pytest.mark.parametrize("said", ["<think>hm", "<think>hm</think>yes, and", "yes, and"])
def test_a_reply_that_was_cut_off_is_closed_to_the_letter(embedded, said):
    chat_format = ChatFormat(embedded)
    first = chat_format.render([USER])
    parts = chat_format.encode(first.segments).parts
    parts += chat_format.reply_parts(chat_format.encode_reply(said))
    reply = chat_format.parse_reply(said)
    rendered = chat_format.continue_history(
        *(parts, [USER], reply, [NEXT]), known=first.chat, reply_start=len(first.segments)
    )
    whole = chat_format.render([USER, reply, NEXT])
    assert text_of(rendered.segments) == text_of(whole.segments)
    assert rendered.goes_on


def test_short_texts_of_a_template_are_encoded_once_and_not_kept_for_ever(embedded, monkeypatch):
    encoded: list[str] = []
    encode = Tokenizer.encode_plain

    def counted(self, text, *, at_start=True):
        encoded.append(text)
        return encode(self, text, at_start=at_start)

    monkeypatch.setattr(Tokenizer, "encode_plain", counted)
    short = ShortTexts(embedded)
    ids = [short.ids("assistant") for _ in range(3)]
    assert encoded == ["assistant"]
    assert ids[2].tolist() == list(encode(embedded, "assistant", at_start=False))
    for number in range(1000):
        short.ids(str(number))
    assert len(short._known) <= 256


def test_a_reply_is_ended_once_where_the_model_ends_otherwise_than_the_template():
    tokenizer = bytes_only(PLAIN + HEADER)
    stop = tokenizer.special_ids["</s>"]
    chat_format = ChatFormat(tokenizer, end_ids=frozenset({stop}))
    going_on, whole, _ = two_turns(chat_format, stop, said="well  yes")
    assert going_on == whole.replace("well yes<|im_end|>", "well  yes</s>")
    going_on, whole, _ = two_turns(chat_format, said="well  yes")
    assert going_on == whole.replace("well yes", "well  yes")


def test_a_list_that_asks_for_no_reply_may_end_in_an_end_of_text():
    chat_format = format_of(ENDS_ONLY_WITHOUT_HEADER)
    rendered = chat_format.render([USER])
    assert text_of(rendered.segments[rendered.reply_start :]) == "<|im_start|>assistant\n"


def test_calls_are_part_of_a_reply_that_only_text_closes():
    chat_format = format_of(TEXT_ALONE)
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    reply = {**REPLY, "tool_calls": [call]}
    said = "well yes<tool_call>{}</tool_call>"
    assert chat_format.reply_text([USER], reply) == said
    going_on, whole, _ = two_turns(chat_format, said=said.replace(" ", "  "), reply=reply)
    assert going_on == whole.replace("well yes", "well  yes")


def test_tools_may_move_to_the_newest_user_message():
    template = (
        "{% for m in messages %}{% if loop.last and tools %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
    )
    going_on, whole, fallback = two_turns(format_of(template), tools=[{"name": "f"}])
    assert going_on == whole
    assert fallback is not None


def test_a_history_that_comes_out_the_same_is_no_fallback():
    # The reply alone is written with an empty block; once something follows it is as it was.
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ '<think></think>' if loop.last "
        "and m.role == 'assistant' }}{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
    )
    chat_format = format_of(template)
    close = bytes_only(template).special_ids[CLOSE]
    going_on, whole, fallback = two_turns(chat_format, close)
    assert going_on == whole
    assert fallback is None


def test_a_list_ending_with_the_reply_may_be_refused():
    template = (
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('user last') }}{% endif %}"
        + PLAIN
        + HEADER
    )
    chat_format = format_of(template)
    close = bytes_only(template).special_ids[CLOSE]
    going_on, whole, _ = two_turns(chat_format, close)
    assert going_on == whole
    rendered = chat_format.render([USER, REPLY, {**NEXT, "mark": True}])
    assert rendered.ends is not None
    assert rendered.marks == rendered.ends[-1:] == (rendered.reply_start,)
    assert text_of(rendered.segments[: rendered.ends[1]]).endswith("well yes<|im_end|>\n")


def test_white_space_that_a_control_token_swallows_is_not_encoded():
    strips = AddedToken("<|user|>", rstrip=True, lstrip=False, normalized=False, special=True)
    left = AddedToken("<|end|>", rstrip=False, lstrip=True, normalized=False, special=True)
    template = "{% for m in messages %}<|user|>\n{{ m.content }} <|end|>\n{% endfor %}"
    chat_format = format_of(template, strips, left)
    tokenizer = bytes_only(template, strips, left)
    messages = [USER, {"role": "user", "content": " \n"}, {"role": "user", "content": "  x  "}]
    rendered = chat_format.render(messages, add_generation_prompt=False)
    got = chat_format.encode(rendered.segments).ids.tolist()
    expected = tokenizer.source.apply_chat_template(messages, return_dict=False)
    assert got == expected
    assert rendered.ends == (4, 7, 11)


def test_a_control_token_that_ends_the_history_swallows_what_follows_it():
    closing = AddedToken("<|end|>", rstrip=True, lstrip=False, normalized=False, special=True)
    template = (PLAIN + HEADER).replace("<|im_end|>", "<|end|>")
    chat_format = format_of(template, closing, ends=("<|end|>",))
    close = bytes_only(template, closing).special_ids["<|end|>"]
    going_on, whole, fallback = two_turns(chat_format, close, said="well  yes")
    assert going_on == whole.replace("well yes", "well  yes")
    assert "<|end|><|im_start|>" in going_on
    assert fallback is None


def test_only_the_first_word_of_a_prompt_gets_a_first_space():
    words = [*map(chr, range(0x20, 0x7F)), "\u2581"]
    backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Metaspace(prepend_scheme="first")])
    backend.add_special_tokens([OPEN, CLOSE])
    source = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=CLOSE,
        chat_template="{% for m in messages %}" + "{{ m.content }}<|im_end|>{% endfor %}",
    )
    tokenizer = Tokenizer(source)
    chat_format = ChatFormat(tokenizer)
    messages = [USER, REPLY]
    rendered = chat_format.render(messages)
    ids = chat_format.encode(rendered.segments).ids.tolist()
    assert ids == source.apply_chat_template(messages, return_dict=False)
    reply = chat_format.encode_reply(REPLY["content"])
    assert ids[-len(reply) - 1 : -1] == reply.tolist()
    assert chat_format.reply_parts(reply)[0].segment.text == REPLY["content"]
    spaced = chat_format.encode_reply(" so")
    assert chat_format.reply_parts(spaced)[0].segment.text == " so"
    said = chat_format.encode(chat_format.reply_segments([USER], REPLY), at_start=False)
    assert said.ids.tolist() == reply.tolist()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{{ c.function.arguments }}", '{"a":  1}'),
        ("{{ '' + c.function.arguments }}", '{"a":  1}'),
        (
            "{{ c.function.arguments if c.function.arguments is string "
            "else c.function.arguments | tojson }}",
            '{"a":  1}',
        ),
        ("{{ c.function.arguments | tojson }}", '{"a": 1}'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}", "a=1"),
    ],
)
def test_arguments_are_given_in_the_form_the_template_takes(arguments, expected):
    template = PLAIN.replace("<|im_end|>", CALLS.replace("ARGS", arguments) + "<|im_end|>")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    text = text_of(format_of(template).render([USER, reply]).segments)
    assert f"<tool_call>{expected}</tool_call>" in text


def test_arguments_that_are_no_json_object_reach_the_template_as_they_are():
    template = PLAIN.replace(
        "<|im_end|>", CALLS.replace("ARGS", "{{ c.function.arguments | tojson }}") + "<|im_end|>"
    )
    for arguments in ("[1", "[1]"):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        text = text_of(format_of(template).render([USER, reply]).segments)
        assert f'"{arguments}"' in text


def test_roles_of_the_template_are_known():
    template = PLAIN.replace("{{ m.role }}", "{{ 'a' if m.role == 'critic' else m.role }}")
    rendered = format_of(template).render([{"role": "critic", "content": "too long"}])
    assert "too long" in text_of(rendered.segments)


LAST_REPLY_THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ '<think>why</think>' if loop.last and m.role == 'assistant' }}"
    "{{ m.content }}<|im_end|>\n{% endfor %}" + HEADER
)


@pytest.mark.parametrize("turns", [1, 5])
def test_messages_are_found_where_replies_look_otherwise_once_more_follows(turns):
    chat_format = format_of(LAST_REPLY_THINKS)
    messages = [*([USER, REPLY] * turns), {**NEXT, "mark": True}]
    rendered = chat_format.render(messages)
    assert (rendered.ends is None) == (turns == 5)
    assert rendered.marks == (rendered.reply_start,)
    place = -1
    for index, segment in enumerate(rendered.segments[: rendered.reply_start]):
        place += segment.text == OPEN
        found = chat_format.message_at(rendered, messages, None, index)
        assert found == (place, messages[place]["role"])


def test_without_closing_tokens_a_message_begins_at_the_border_before_its_content():
    chat_format = format_of(LAST_REPLY_THINKS.replace(CLOSE, ""))
    rendered = chat_format.render([USER, REPLY, NEXT])
    assert rendered.ends is not None
    assert rendered.segments[rendered.ends[1]].text.startswith("user\nand now")


def test_a_recorded_reply_is_read_where_no_reply_may_follow_a_reply():
    template = (
        "{% if add_generation_prompt and messages[-1].role == 'assistant' %}"
        "{{ raise_exception('not twice') }}{% endif %}" + PLAIN + HEADER
    )
    assert format_of(template).reply_text([USER], REPLY) == REPLY["content"]


@pytest.fixture(scope="module")
def embedded() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(ENGINE / "assets"))


def session(
    chat_format: ChatFormat, tokenizer: Tokenizer
) -> tuple[list[list[int]], list[str | None]]:
    """Prompts and fallbacks of a tool loop with thinking and one more question."""
    call = '<tool_call>{"name": "ls", "arguments": {"path":  "/tmp"}}</tool_call>'
    (end,) = tokenizer.end_ids()
    steps = [
        ([{"role": "system", "content": "Be brief."}, USER], f"<think>look</think>One.{call}"),
        ([{"role": "tool", "tool_call_id": "call00000", "content": "a\nb"}], "Two files."),
        ([NEXT], "Bye."),
    ]
    tools = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
    messages, parts, prompts, fallbacks = [], (), [], []
    for new, reply in steps:
        if messages:
            *before, last = messages
            rendered = chat_format.continue_history(parts, before, last, new, tools)
        else:
            rendered = chat_format.render(new, tools)
        messages += new
        encoding = chat_format.encode(rendered.segments, parts)
        prompts.append(encoding.ids.tolist())
        fallbacks.append(rendered.fallback)
        said = chat_format.encode_reply(reply).tolist()
        parts = encoding.parts + chat_format.reply_parts([*said, end])
        messages.append(chat_format.parse_reply(reply, in_thinking=rendered.in_thinking))
    return prompts, fallbacks


def test_the_embedded_template_only_appends(embedded):
    prompts, fallbacks = session(ChatFormat(embedded), embedded)
    assert fallbacks == [None, None, None]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
    assert embedded.decode(prompts[-1]).count("<think>look</think>") == 1


def test_the_embedded_template_gives_replies_back_as_they_were_written(embedded):
    chat_format = ChatFormat(embedded)
    for text in ("\nplain\n", "<think>\na\n</think>\n\nb", "<think></think>", "a\n<tool_call>bad"):
        message = chat_format.parse_reply(text)
        if message.get("reasoning_content") != "":
            assert chat_format.reply_text([USER], message) == text


def test_a_template_that_drops_thinking_is_followed(embedded):
    source = AutoTokenizer.from_pretrained(ENGINE / "assets")
    source.chat_template = (FIXTURES / "drops_thinking.jinja").read_text(encoding="utf-8")
    tokenizer = Tokenizer(source)
    assert tokenizer.fingerprint != embedded.fingerprint
    prompts, fallbacks = session(ChatFormat(tokenizer), tokenizer)
    assert all(fallback is not None for fallback in fallbacks[1:])
    assert "look" in tokenizer.decode(prompts[1])
    assert "look" not in tokenizer.decode(prompts[2])
