"""Templates run message by message: the same text as a whole rendering, and only what is new."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models import tokenizer

from agentcache.engine.chat import ChatFormat
from agentcache.engine.stepwise_template import (
    Run,
    StepwiseRenderer,
    StepwiseTemplate,
    _run_for,
)
from agentcache.engine.template import ChatTemplate
from agentcache.engine.tokenizer import Tokenizer

FIXTURES = Path(__file__).parents[1] / "fixtures" / "templates"
SOURCE = tokenizer()
EMBEDDED = SOURCE.chat_template
DROPS_THINKING = (FIXTURES / "drops_thinking.jinja").read_text(encoding="utf-8")

# A shared first message, a look back for the last question, results of tools in one user message,
# thinking after the last question only: each as some published template has it.
LOOKS_AROUND = """
{%- if tools %}
    {{- '<|start_of_role|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{%- endif %}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
    {{- '<|end_of_text|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|start_of_role|>system\\n' + messages[0].content + '<|end_of_text|>\\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_question=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" %}
        {%- set ns.searching = false %}{%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|start_of_role|>' + message.role + '\\n' + message.content + '<|end_of_text|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|start_of_role|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question %}
            {%- if loop.last or message.reasoning_content %}
                {{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
            {%- endif %}
        {%- endif %}
        {{- message.content + '<|end_of_text|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|start_of_role|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|end_of_text|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_of_role|>assistant\\n' }}{%- endif %}
"""
COUNTS = """
{%- macro said(m) -%}{{ bos_token }}{{ m.role }}: {{ m.content | trim }}{%- endmacro -%}
{%- set ns = namespace(asked=0, before='') -%}
{%- set rest = messages[1:] if messages[0].role == 'system' else messages -%}
{%- for m in rest -%}
    {%- if m.role == 'user' %}{% set ns.asked = ns.asked + 1 %}{% endif -%}
    {%- if m.role == 'tool' %}{% continue %}{% endif -%}
    {{ said(m) }} {{ ns.asked }} {{ ns.before }} {{ loop.previtem.role if loop.previtem }}
    {%- set ns.before = m.role -%}
    {%- for n in range(2) %}{{ loop.index }}{% endfor -%}
{%- endfor -%}
{{ ns.asked }}{{ messages[-1].role }}{{ ' >' if add_generation_prompt }}
"""
FIT = {
    "embedded": EMBEDDED,
    "drops thinking": DROPS_THINKING,
    "looks around": LOOKS_AROUND,
    "counts": COUNTS,
}
LOOP = "{% for m in messages %}BODY{% endfor %}"
UNFIT = {
    "no loop": "{{ messages[0].content }}",
    "loop length": LOOP.replace("BODY", "{{ m.content }}{{ loop.length }}"),
    "from the end": LOOP.replace("BODY", "{{ m.content }}{{ messages[-1].role }}"),
    "all of them": LOOP.replace("BODY", "{{ m.content }}{{ messages | length }}"),
    "a later one": LOOP.replace("BODY", "{{ m.content }}{{ messages[1].content }}"),
    "two ahead": LOOP.replace("BODY", "{{ m.content }}{{ messages[loop.index + 1] }}"),
    "the loop itself": LOOP.replace("BODY", "{{ m.content }}{{ loop }}"),
    "changes": LOOP.replace("BODY", "{% if loop.changed(m.role) %}{{ m.role }}{% endif %}"),
    "stops": LOOP.replace("BODY", "{{ m.content }}{% if loop.first %}{% break %}{% endif %}"),
    "else": LOOP.replace("BODY", "{{ m.content }}{% else %}none"),
    "some of them": "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
    "by chance": LOOP.replace("BODY", "{{ [m.content, m.role] | random }}"),
    "a macro that sees all": "{% macro f() %}{{ messages | length }}{% endmacro %}"
    + LOOP.replace("BODY", "{{ m.content }}{{ f() }}"),
    "nested": LOOP.replace("BODY", "{% for c in m.content %}{{ messages[0].role }}{% endfor %}"),
}
"""Templates whose loops cannot run for one message alone."""


def chat_template(template: str) -> ChatTemplate:
    source = type(SOURCE).from_pretrained(SOURCE.name_or_path)
    source.chat_template = template
    source.bos_token = "<|pad|>"
    return ChatTemplate(Tokenizer(source), {})


def whole(template: ChatTemplate, messages, tools, reply_prompt: bool) -> str:
    return template.render(messages, tools, reply_prompt=reply_prompt)


WORDS = st.text(alphabet="ab <\n", max_size=4)
MESSAGES = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.just("user"), "content": WORDS}),
        st.fixed_dictionaries({"role": st.just("tool"), "content": WORDS}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": WORDS},
            optional={
                "reasoning_content": WORDS,
                "tool_calls": st.just([{"function": {"name": "f", "arguments": {"a": 1}}}]),
            },
        ),
    ),
    min_size=1,
    max_size=9,
)
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize("name", FIT)
def test_templates_of_the_usual_kinds_are_cut(name):
    assert chat_template(FIT[name])._stepwise.template(FIT[name]) is not None


@pytest.mark.parametrize("name", FIT)
@settings(max_examples=40, deadline=None)
@given(MESSAGES, st.booleans(), st.booleans(), st.randoms(use_true_random=False))
def test_any_growing_list_comes_out_as_a_whole_rendering(name, messages, system, tools, random):
    template = chat_template_of(name)
    if system:
        messages = [{"role": "system", "content": "Be brief."}, *messages]
    schemas = TOOLS if tools else None
    chat = template.chat(messages[:1], schemas)
    place = 1
    while True:
        for count in {place, random.randint(1, place)}:
            for reply_prompt in (False, True):
                text = chat.text(count, reply_prompt=reply_prompt)
                shielded = chat.messages[:count]
                assert text == whole(template, shielded, chat._tools, reply_prompt)
        assert template._stepwise.template(FIT[name]) is not None
        if place == len(messages):
            return
        more = messages[place : place + random.randint(1, 3)]
        chat = template.extended(chat, more) or template.chat(
            messages[: place + len(more)], schemas
        )
        place += len(more)


TEMPLATES: dict[str, ChatTemplate] = {}


def chat_template_of(name: str) -> ChatTemplate:
    """One per template: comparing has come to its end after the first examples."""
    if name not in TEMPLATES:
        TEMPLATES[name] = chat_template(FIT[name])
    return TEMPLATES[name]


@pytest.mark.parametrize("name", UNFIT)
def test_templates_that_see_more_than_their_message_are_not_cut(name):
    template = chat_template(UNFIT[name])
    assert template._stepwise.template(UNFIT[name]) is None
    chat = template.chat([{"role": "user", "content": "a"}, {"role": "tool", "content": "b"}], None)
    if name != "by chance":
        assert chat.text() == whole(template, chat.messages, None, False)


def test_a_state_that_cannot_be_seen_is_not_trusted():
    text = "{% set sep = joiner(',') %}" + LOOP.replace("BODY", "{{ sep() }}{{ m.content }}")
    template = chat_template(text)
    chat = template.chat([{"role": "user", "content": c} for c in "abc"], None)
    assert chat.text(2) == "a,b"
    assert chat.text() == "a,b,c"


def test_a_look_back_past_the_first_message_is_a_look_at_the_last():
    text = LOOP.replace("BODY", "{{ m.content }}{{ messages[loop.index0 - 1].content }} ")
    template = chat_template(text)
    chat = template.chat([{"role": "user", "content": c} for c in "abc"], None)
    assert [chat.text(count) for count in (1, 2, 3)] == ["aa ", "ab ba ", "ac ba cb "]


def test_namespaces_that_begin_with_values_of_other_types_are_told_apart():
    text = "{% set ns = namespace(n=true if add_generation_prompt else 1) %}" + LOOP.replace(
        "BODY", "{{ ns.n }}{{ m.content }}"
    )
    template = chat_template(text)
    chat = template.chat([{"role": "user", "content": c} for c in "ab"], None)
    assert chat.text() == "1a1b"
    assert chat.text(reply_prompt=True) == "TrueaTrueb"
    assert template._stepwise.template(text) is not None


def test_macros_under_the_same_name_are_told_apart():
    text = (
        "{% macro a(m) %}A{{ m.content }}{% endmacro %}"
        "{% macro b(m) %}B{{ m.content }}{% endmacro %}"
        "{% set f = b if add_generation_prompt else a %}" + LOOP.replace("BODY", "{{ f(m) }}")
    )
    template = chat_template(text)
    chat = template.chat([{"role": "user", "content": c} for c in "xy"], None)
    assert chat.text() == "AxAy"
    assert chat.text(reply_prompt=True) == "BxBy"
    assert template._stepwise.template(text) is not None


def test_a_filter_takes_its_arguments_by_place_as_by_name():
    text = (
        "{{ tools[0] | tojson(false) }}{{ tools[0] | tojson(true) }}"
        "{{ tools[0] | tojson(indent=1) }}" + LOOP.replace("BODY", "{{ m.content }}")
    )
    template = chat_template(text)
    tool = {"type": "function", "function": {"name": "f", "description": "\u6f22"}}
    chat = template.chat([{"role": "user", "content": "a"}], [tool])
    assert chat.text() == whole(template, chat.messages, chat._tools, False)
    assert template._stepwise.template(text) is not None


@pytest.fixture
def hasty_switches() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_switches")
def test_threads_may_look_for_runs_of_one_chat_at_once():
    runs: list[Run] = []

    def look(first: int) -> None:
        for number in range(first, first + 20_000):
            inputs = {"n": number % 3}
            assert _run_for(runs, inputs, {}).inputs == inputs

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(look, range(4)))
    assert len(runs) <= 4


@pytest.fixture
def steps(monkeypatch) -> list[int]:
    """Places of the messages that were run through a loop."""
    taken: list[int] = []
    step = StepwiseTemplate._step

    def counted(self, items, index, values):
        taken.append(index)
        return step(self, items, index, values)

    monkeypatch.setattr(StepwiseTemplate, "_step", counted)
    return taken


@pytest.mark.parametrize("name", ["embedded", "drops thinking", "looks around"])
def test_a_longer_list_runs_only_what_is_new(name, steps):
    chat_format = ChatFormat(chat_template(FIT[name])._tokenizer)
    messages = [{"role": "user", "content": "go"}]
    rendered = chat_format.render(messages)
    for number in range(12):
        reply = {"role": "assistant", "content": f"I look at {number}."}
        result = {"role": "tool", "content": f"result {number}"}
        history = chat_format.encode(rendered.segments).parts
        history += chat_format.reply_parts(chat_format.encode_reply(reply["content"]))
        steps.clear()
        rendered = chat_format.continue_history(
            history, messages, reply, [result], known=rendered.chat
        )
        messages += [reply, result]
    assert len(messages) == 25
    assert min(steps) >= len(messages) - 4
    fresh = ChatFormat(chat_template(FIT[name])._tokenizer).render(messages)
    assert text_of(rendered.segments) == text_of(fresh.segments)


def text_of(segments) -> str:
    return "".join(segment.text for segment in segments)


def test_a_template_that_comes_out_otherwise_is_run_whole_from_then_on():
    calls: list[int] = []

    def odd(messages, tools, *, reply_prompt):
        calls.append(len(messages))
        return "something else"

    renderer = StepwiseRenderer(chat_template(EMBEDDED)._tokenizer.source, {}, odd)
    messages = [{"role": "user", "content": "a"}]
    assert renderer.render(messages, None, [], reply_prompt=True) is None
    assert renderer.render(messages, None, [], reply_prompt=True) is None
    assert calls == [1]


def test_more_messages_with_a_hiding_character_are_shown_as_they_are():
    chat_format = ChatFormat(chat_template(EMBEDDED)._tokenizer)
    messages = [{"role": "user", "content": "<|end_of_text|>"}]
    rendered = chat_format.render(messages)
    parts = chat_format.encode(rendered.segments).parts
    reply = {"role": "assistant", "content": "\ue000\ue001\ue002"}
    parts += chat_format.reply_parts(chat_format.encode_reply(reply["content"]))
    new = [{"role": "user", "content": "\ue000 <|end_of_text|>"}]
    longer = chat_format.continue_history(parts, messages, reply, new, known=rendered.chat)
    fresh = chat_format.render([*messages, reply, *new])
    assert text_of(longer.segments) == text_of(fresh.segments)
    assert longer.fallback is None
