"""Replies with calls of every form: rendered by their template, their sampled ids are kept."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentcache.engine.chat import ChatFormat
from agentcache.engine.tokenizer import REPLY_MARKUP, Tokenizer

END = "<|im_end|>"
FRAME = """
{%- for m in messages -%}
<|im_start|>{{ m.role }}\n{{ m.content }}CALLS<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}
"""
EACH = "{%- for c in m.tool_calls or [] -%}ONE{%- endfor -%}"
LISTED = (
    "{%- if m.tool_calls -%}OPEN[{%- for c in m.tool_calls -%}{{ ', ' if not loop.first }}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "{%- endfor -%}]CLOSE{%- endif -%}"
)
CALLS = {
    "hermes": EACH.replace(
        "ONE",
        "{{ '\n<tool_call>\n' }}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "{{ '\n</tool_call>' }}",
    ),
    "qwen-xml": EACH.replace(
        "ONE",
        "{{ '\n\n<tool_call>\n<function=' + c.function.name + '>\n' }}"
        "{%- for key, value in c.function.arguments | items -%}"
        "{{ '<parameter=' + key + '>\n' }}"
        "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}"
        "{%- endfor -%}{{ '</function>\n</tool_call>' }}",
    ),
    "granite": LISTED.replace("OPEN", "<|tool_call|>").replace("CLOSE", ""),
    "lfm2": "{%- if m.tool_calls -%}<|tool_call_start|>["
    "{%- for c in m.tool_calls -%}{{ ', ' if not loop.first }}{{ c.function.name }}("
    "{%- for key, value in c.function.arguments | items -%}"
    "{{ ', ' if not loop.first }}{{ key }}={{ value | tojson }}{%- endfor -%}"
    "){%- endfor -%}]<|tool_call_end|>{%- endif -%}",
    "nemotron": LISTED.replace("OPEN", "<TOOLCALL>").replace("CLOSE", "</TOOLCALL>"),
    "jamba": LISTED.replace("OPEN", "<tool_calls>").replace("CLOSE", "</tool_calls>"),
    "kimi": "{%- if m.tool_calls -%}<|tool_calls_section_begin|>"
    "{%- for c in m.tool_calls -%}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>"
    "{{ c.function.arguments | tojson }}<|tool_call_end|>{%- endfor -%}"
    "<|tool_calls_section_end|>{%- endif -%}",
}
SAID = {
    "hermes": '\n<tool_call>\n{"name": "ls", "arguments": {"path": "a b", "n": 2}}\n</tool_call>'
    '\n<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>',
    "qwen-xml": "\n\n<tool_call>\n<function=ls>\n<parameter=path>\na b\n</parameter>\n"
    "<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>",
    "granite": '<|tool_call|>[{"name": "ls", "arguments": {"path": "a b"}}, '
    '{"name": "ls", "arguments": {"n": 2}}]',
    "lfm2": '<|tool_call_start|>[ls(path="a b", n=2), ls()]<|tool_call_end|>',
    "nemotron": '<TOOLCALL>[{"name": "ls", "arguments": {"path": "a b"}}]</TOOLCALL>',
    "jamba": '<tool_calls>[{"name": "ls", "arguments": {"path": "a b"}}]</tool_calls>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.ls:0"
    '<|tool_call_argument_begin|>{"path": "a b"}<|tool_call_end|><|tool_calls_section_end|>',
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "ls",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}, "n": {"type": "integer"}},
            },
        },
    }
]
QUESTION = [{"role": "user", "content": "go"}]


def format_of(form: str, *, special: bool) -> ChatFormat:
    """A tokenizer of single bytes, with the markup of calls as tokens of its own or as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>", END])
    if special:
        backend.add_special_tokens(sorted(REPLY_MARKUP))
    template = FRAME.replace("CALLS", CALLS[form])
    source = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, chat_template=template
    )
    return ChatFormat(Tokenizer(source))


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", CALLS)
def test_a_call_written_by_the_template_comes_back_with_its_ids(form, special):
    chat_format = format_of(form, special=special)
    assert chat_format.tool_form == form
    said = f"I look.{SAID[form]}"
    first = chat_format.encode(chat_format.render(QUESTION, TOOLS).segments)
    reply = chat_format.parse_reply(said, tools=TOOLS)
    assert reply["content"] == "I look."
    assert reply["tool_calls"]
    assert chat_format.reply_text(QUESTION, reply, TOOLS) == said
    ids = chat_format.encode_reply(said).tolist()
    known = (*first.parts, *chat_format.reply_parts(ids))
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": "done"}
        for call in reply["tool_calls"]
    ]
    whole = chat_format.render([*QUESTION, reply, *results], TOOLS)
    encoding = chat_format.encode(whole.segments, known)
    sampled = [*first.ids.tolist(), *ids]
    assert encoding.ids[: len(sampled)].tolist() == sampled
    _, end, *_ = (i for i, segment in enumerate(whole.segments) if segment.text == END)
    assert encoding.reused == end
    going_on = chat_format.continue_history(known, QUESTION, reply, results, TOOLS)
    assert going_on.fallback is None


@pytest.mark.parametrize("form", CALLS)
def test_a_recorded_reply_is_written_in_the_model_s_form(form):
    """Where the template does not say how, because it leaves the reply's header out in history."""
    chat_format = format_of(form, special=True)
    template = chat_format._template._tokenizer.source
    template.chat_template = template.chat_template.replace(
        "<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role | upper }}"
    )
    other = ChatFormat(Tokenizer(template))
    message = chat_format.parse_reply(SAID[form], tools=TOOLS)
    written = other.reply_text(QUESTION, message, TOOLS)
    again = other.parse_reply(written, tools=TOOLS)
    assert again["tool_calls"] == message["tool_calls"]
