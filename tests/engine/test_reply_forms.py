"""Every form of tool calls: read whole or in pieces, written back, and nothing lost."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentcache.engine.reply_forms import FORMS, Call, CallSpace, form_for, form_named
from agentcache.engine.reply_parser import ReplyForm, ReplyReader
from agentcache.engine.tokenizer import REPLY_MARKUP
from agentcache.errors import UnsupportedOption

PARAMETERS = {
    "ls": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "depth": {"type": "integer"},
            "all": {"type": "boolean"},
            "skip": {"type": ["array", "null"]},
        },
    }
}
ARGUMENTS = {"path": "/tmp/a b\n'c' \"d\"", "depth": 3, "all": True, "skip": ["x", {"y": None}]}

SAID = {
    "hermes": '<tool_call>\n{"name": "ls", "arguments": {"path": "/tmp"}}\n</tool_call>',
    "qwen-xml": "<tool_call>\n<function=ls>\n<parameter=path>\n/tmp\n</parameter>\n</function>\n"
    "</tool_call>",
    "granite": '<|tool_call|>[{"name": "ls", "arguments": {"path": "/tmp"}}]',
    "lfm2": '<|tool_call_start|>[ls(path="/tmp")]<|tool_call_end|>',
    "nemotron": '<TOOLCALL>[{"name": "ls", "arguments": {"path": "/tmp"}}]</TOOLCALL>',
    "jamba": '<tool_calls>[\n  {"name": "ls", "arguments": {"path": "/tmp"}}\n]</tool_calls>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0"
    '<|tool_call_argument_begin|>{"path": "/tmp"}<|tool_call_end|><|tool_calls_section_end|>',
}


def read(form: str, *pieces: str) -> ReplyReader:
    reader = ReplyReader(form=ReplyForm(calls=FORMS[form]), parameters=PARAMETERS)
    for piece in pieces:
        reader.push(piece)
    reader.finish()
    return reader


def calls_of(reader: ReplyReader) -> list[tuple[str, dict]]:
    functions = [call["function"] for call in reader.message.get("tool_calls", [])]
    return [(function["name"], json.loads(function["arguments"])) for function in functions]


def test_every_form_has_an_example():
    assert SAID.keys() == FORMS.keys()


@pytest.mark.parametrize("form", FORMS)
def test_a_call_is_read_and_leaves_the_content(form):
    reader = read(form, f"I look. {SAID[form]}")
    assert calls_of(reader) == [("ls", {"path": "/tmp"})]
    assert reader.message["content"] == "I look. "
    assert reader.malformed == ()


@pytest.mark.parametrize("form", FORMS)
def test_calls_written_in_a_form_are_read_back(form):
    calls = [Call("ls", json.dumps(ARGUMENTS)), Call("ls", "{}")]
    text = FORMS[form].write(calls, CallSpace("\n", "\n", "\n"))
    reader = ReplyReader(
        form=ReplyForm(between_calls="\n", calls=FORMS[form]), parameters=PARAMETERS
    )
    reader.push(text)
    reader.finish()
    assert calls_of(reader) == [("ls", ARGUMENTS), ("ls", {})]
    assert reader.message["content"] == ""


@pytest.mark.parametrize("form", FORMS)
def test_a_call_cut_anywhere_is_text_with_a_flag(form):
    whole = SAID[form]
    opener = next(o for o in FORMS[form].openers if whole.startswith(o))
    for end in range(len(opener), len(whole)):
        reader = read(form, f"Well. {whole[:end]}")
        if "tool_calls" in reader.message:
            # Some forms need no closing; all the arguments are there then.
            assert calls_of(reader) == [("ls", {"path": "/tmp"})]
            continue
        assert reader.message["content"] == f"Well. {whole[:end]}"
        assert reader.malformed == (whole[:end],)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("qwen-xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
        ("qwen-xml", "<tool_call>\n<function=f>\n<value=x>1</value></function>\n</tool_call>"),
        ("granite", "<|tool_call|>[]"),
        ("granite", '<|tool_call|>["ls"]'),
        ("lfm2", "<|tool_call_start|>[ls(path=open('x'))]<|tool_call_end|>"),
        ("lfm2", '<|tool_call_start|>[ls("/tmp")]<|tool_call_end|>'),
        ("lfm2", '<|tool_call_start|>[ls(path="\\ud800")]<|tool_call_end|>'),
        ("lfm2", f"<|tool_call_start|>[ls(path={'[' * 5000}{']' * 5000})]<|tool_call_end|>"),
        ("nemotron", '<TOOLCALL>{"name": "ls"}</TOOLCALL>'),
        ("jamba", '<tool_calls>[{"name": "ls", "arguments": [1]}]</tool_calls>'),
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>ls:0<|tool_call_argument_begin|>{,}"
            "<|tool_call_end|><|tool_calls_section_end|>",
        ),
    ],
)
def test_what_is_no_call_stays_text_with_a_flag(form, text):
    reader = read(form, f"a {text} b")
    assert reader.message == {"role": "assistant", "content": f"a {text} b"}
    assert reader.malformed == (f"{text} b",)


def test_a_good_call_after_a_bad_one_is_read():
    reader = read("nemotron", f"<TOOLCALL>oops {SAID['nemotron']} done")
    assert calls_of(reader) == [("ls", {"path": "/tmp"})]
    assert reader.message["content"] == "<TOOLCALL>oops  done"
    assert reader.malformed == ("<TOOLCALL>oops  done",)


def test_values_of_plain_text_follow_the_schema():
    def value(key: str, text: str) -> object:
        block = f"<tool_call><function=ls><parameter={key}>\n{text}\n</parameter></function>"
        ((_, arguments),) = calls_of(read("qwen-xml", f"{block}</tool_call>"))
        return arguments[key]

    assert value("path", "7") == "7"
    assert value("depth", "7") == 7
    assert value("depth", "seven") == "seven"
    assert value("all", "True") is True
    assert value("all", "false") is False
    assert value("skip", '["a", 1]') == ["a", 1]
    assert value("skip", "None") is None
    assert value("unknown", "7") == "7"
    assert value("path", "\nx\n") == "\nx\n"
    assert value("path", "a</tool_call>b") == "a</tool_call>b"


def test_literals_of_python_and_json_are_read():
    said = "fs.ls(a=-1.5e2, b='it\\'s', c=\"\\u00e9\\n\", d=None, e=[1, true], f={'k': (False,)})"
    ((name, arguments),) = calls_of(read("lfm2", f"<|tool_call_start|>[{said}]<|tool_call_end|>"))
    assert name == "fs.ls"
    assert arguments == {
        "a": -150.0,
        "b": "it's",
        "c": "é\n",
        "d": None,
        "e": [1, True],
        "f": {"k": [False]},
    }


def test_closing_tags_inside_a_string_do_not_end_a_call():
    inside = '{"path": "</TOOLCALL>]"}'
    text = f'<TOOLCALL>[{{"name": "ls", "arguments": {inside}}}]</TOOLCALL>'
    assert calls_of(read("nemotron", text)) == [("ls", json.loads(inside))]


def test_granite_takes_what_its_models_are_known_to_write():
    for text in (
        '<tool_call>[{"name": "ls"}]</tool_call>',
        '<|tool_call|>{"name": "ls", "arguments": {}}',
        '<|tool_call|>[{"name": "ls"}]\n<|/tool_call|>',
    ):
        reader = read("granite", text)
        assert calls_of(reader) == [("ls", {})]
        assert reader.message["content"] == ""


def test_ids_that_the_model_gives_are_kept():
    call, end = (
        SAID["kimi"].removesuffix("<|tool_calls_section_end|>"),
        "<|tool_calls_section_end|>",
    )
    again = call.removeprefix("<|tool_calls_section_begin|>").replace(":0", ":1")
    reader = read("kimi", f"{call}\n{again}{end}")
    assert [c["id"] for c in reader.message["tool_calls"]] == ["functions.ls:0", "functions.ls:1"]
    assert calls_of(reader) == [("ls", {"path": "/tmp"})] * 2


FRAGMENTS = st.sampled_from(
    [
        *SAID.values(),
        *sorted(REPLY_MARKUP),
        *("<function=ls>", "</function>", "<parameter=path>", "</parameter>", "[", "]", "(", ")"),
        *('{"name": "ls", "arguments": {"a": "}\\""}}', "ls(path='x')", ", ", "\n", " ", "<", '"'),
    ]
)


@given(st.sampled_from(sorted(FORMS)), st.lists(FRAGMENTS, max_size=8), st.integers(1, 9))
def test_any_cut_comes_to_what_the_whole_is(form, fragments, size):
    text = "".join(fragments)
    whole = read(form, text)
    reader = ReplyReader(form=ReplyForm(calls=FORMS[form]), parameters=PARAMETERS)
    pieces = [reader.push(text[at : at + size]) for at in range(0, len(text), size)]
    pieces.append(reader.finish())
    assert reader.message == whole.message
    assert reader.malformed == whole.malformed
    assert "".join(piece.content for piece in pieces) == whole.message["content"]
    assert [c for p in pieces for c in p.tool_calls] == whole.message.get("tool_calls", [])


@given(st.sampled_from(sorted(FORMS)), st.lists(FRAGMENTS, max_size=6), st.text(max_size=6))
def test_nothing_is_lost_of_a_text_without_calls(form, fragments, text):
    said = "x" + "".join(fragments) + text
    message = read(form, said).message
    if "tool_calls" not in message:
        assert message["content"] == said


@pytest.mark.parametrize(
    ("template", "control", "form"),
    [
        ("", [], "hermes"),
        ("no calls at all", ["<tool_call>"], "hermes"),
        ("…<tool_call>{{ call | tojson }}</tool_call>", ["<|tool_call|>"], "hermes"),
        ("…<tool_call>\n<function=' + name", [], "qwen-xml"),
        ("…<|tool_call|>", [], "granite"),
        ("", ["<|tool_call|>"], "granite"),
        ("<|tool_call_start|>[", [], "lfm2"),
        ("<TOOLCALL>[", ["<tool_call>"], "nemotron"),
        ("<tool_calls>[", [], "jamba"),
        ("<|tool_calls_section_begin|><|tool_call_begin|>", [], "kimi"),
    ],
)
def test_the_form_is_told_by_template_and_tokens(template, control, form):
    assert form_for(template, control).name == form


def test_an_unknown_form_is_refused_with_those_there_are():
    with pytest.raises(UnsupportedOption, match=r"tool_form is 'xml'.*hermes.*qwen-xml"):
        form_named("xml")


def test_all_tags_that_may_be_control_tokens_are_markup_of_replies():
    tags = {opener for form in FORMS.values() for opener in form.openers}
    assert tags <= REPLY_MARKUP
    assert {"<|tool_call_end|>", "</tool_calls>", "<|tool_call_argument_begin|>"} <= REPLY_MARKUP
