"""Claude Code's content blocks as OpenAI-form messages."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from agentcache.replay.readers._messages import tool_call

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.replay.readers.base import Message, Place

__all__ = ["merge_answer", "user_messages"]

_NO_IMAGES = "images were replaced by '[image]'"


def user_messages(content: object, place: Place) -> list[Message]:
    """A user record's content: tool results become tool messages, text a user message."""
    if isinstance(content, str):
        return [{"role": "user", "content": place.text(content)}]
    messages: list[Message] = []
    for idx, value in enumerate(place.items(content)):
        where = place.item(idx)
        block = where.mapping(value)
        if block.get("type") == "tool_result":
            messages.append(_tool_message(block, where))
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"] += _text(block, where)
        else:
            messages.append({"role": "user", "content": _text(block, where)})
    return messages


def merge_answer(parts: Sequence[tuple[object, Place]]) -> Message:
    """One assistant message from the contents of the records it was split over."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for content, place in parts:
        if isinstance(content, str):
            text.append(place.text(content))
            continue
        for idx, value in enumerate(place.items(content)):
            where = place.item(idx)
            block = where.mapping(value)
            kind = where.key("type").text(block.get("type"))
            if kind == "text":
                text.append(_text(block, where))
            elif kind == "thinking":
                thinking.append(where.key("thinking").text(block.get("thinking")))
            elif kind == "tool_use":
                calls.append(_tool_use(block, where))
            elif kind == "redacted_thinking":
                where.notes.add("redacted thinking is left out")
            else:
                raise _unknown_block(kind, where)
    answer: Message = {"role": "assistant", "content": "".join(text)}
    if any(thinking):
        answer["reasoning_content"] = "".join(thinking)
    if calls:
        answer["tool_calls"] = calls
    return answer


def _tool_message(block: dict[str, Any], place: Place) -> Message:
    content, where = block.get("content"), place.key("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = where.text(content)
    else:
        text = "".join(
            _text(where.item(idx).mapping(part), where.item(idx))
            for idx, part in enumerate(where.items(content))
        )
    call_id = place.key("tool_use_id").text(block.get("tool_use_id"))
    return {"role": "tool", "content": text, "tool_call_id": call_id}


def _text(block: dict[str, Any], place: Place) -> str:
    kind = place.key("type").text(block.get("type"))
    if kind == "image":
        place.notes.add(_NO_IMAGES)
        return "[image]"
    if kind != "text":
        raise _unknown_block(kind, place)
    return place.key("text").text(block.get("text"))


def _tool_use(block: dict[str, Any], place: Place) -> dict[str, Any]:
    arguments = json.dumps(place.mapping(block.get("input")), ensure_ascii=False)
    return tool_call(
        place.key("name").text(block.get("name")),
        place.key("input").text(arguments),
        place.key("id").text(block.get("id")),
    )


def _unknown_block(kind: str, place: Place) -> Exception:
    return place.key("type").error(
        f"is {kind[:40]!r}", "only text, thinking, tool use and tool results can be replayed"
    )
