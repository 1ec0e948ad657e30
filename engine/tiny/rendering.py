"""A dialogue as the text that the model reads, by the chat template it is shipped with."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from transformers.utils.chat_template_utils import render_jinja_template

from agentcache.engine.embedded import AGENT_FOLDER

if TYPE_CHECKING:
    from agentcache.engine.tiny.dialogues import Dialogue

__all__ = ["render"]


def render(dialogue: Dialogue) -> str:
    """All of a dialogue, its replies included."""
    rendered: Any = render_jinja_template(
        [list(dialogue.messages)],
        tools=list(dialogue.tools) or None,
        chat_template=_template(),
        add_generation_prompt=False,
    )
    return str(rendered[0][0])


@cache
def _template() -> str:
    return (AGENT_FOLDER / "chat_template.jinja").read_text(encoding="utf-8")
