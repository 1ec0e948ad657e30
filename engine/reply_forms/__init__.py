"""How models write tool calls, one form a file; `form_for` tells which one a template uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.engine.reply_forms.base import Call, CallForm, CallSpace, NotACall, parameters_of
from agentcache.engine.reply_forms.cursor import BlockScan
from agentcache.engine.reply_forms.hermes import Hermes
from agentcache.engine.reply_forms.json_list import JsonList
from agentcache.engine.reply_forms.kimi import Kimi
from agentcache.engine.reply_forms.pythonic import Pythonic
from agentcache.engine.reply_forms.qwen_xml import QwenXml
from agentcache.errors import UnsupportedOption

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "FORMS",
    "HERMES",
    "BlockScan",
    "Call",
    "CallForm",
    "CallSpace",
    "NotACall",
    "form_for",
    "form_named",
    "parameters_of",
]

HERMES = Hermes()

FORMS: dict[str, CallForm] = {
    form.name: form
    for form in (
        HERMES,
        QwenXml(),
        JsonList(
            "granite",
            {"<|tool_call|>": "<|/tool_call|>", "<tool_call>": "</tool_call>"},
            lenient=True,
        ),
        Pythonic(),
        JsonList("nemotron", {"<TOOLCALL>": "</TOOLCALL>"}),
        JsonList("jamba", {"<tool_calls>": "</tool_calls>"}),
        Kimi(),
    )
}

_TRACES = {
    "kimi": "<|tool_calls_section_begin|>",
    "lfm2": "<|tool_call_start|>",
    "nemotron": "<TOOLCALL>",
    "jamba": "<tool_calls>",
    "granite": "<|tool_call|>",
}
"""By form, a text that no other form has."""


def form_named(name: str) -> CallForm:
    """The form of a name. Raises UnsupportedOption, naming those there are."""
    if name not in FORMS:
        raise UnsupportedOption(f"tool_form is {name!r}; take one of {', '.join(sorted(FORMS))}")
    return FORMS[name]


def form_for(template: str, control: Collection[str]) -> CallForm:
    """The form a chat template writes, or else the one that the control tokens are made for."""
    for name, trace in _TRACES.items():
        if trace in template:
            return FORMS[name]
    if "<tool_call>" in template:
        return FORMS["qwen-xml"] if "<function=" in template else HERMES
    return next((FORMS[name] for name, trace in _TRACES.items() if trace in control), HERMES)
