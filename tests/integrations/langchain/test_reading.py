"""Lists that come again are read once, unless anything in them was changed."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool

from agentcache import InvalidRequest
from agentcache.integrations._langchain import reading
from agentcache.integrations._langchain.messages import digests, openai_messages
from agentcache.integrations._langchain.reading import MessageReader, ToolReader

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def calls(*ids: str) -> list[Any]:
    asked = {"name": "add", "args": {"a": 1, "b": [2]}, "type": "tool_call"}
    return [{**copy.deepcopy(asked), "id": id} for id in ids]


def thread() -> list[BaseMessage]:
    return [
        SystemMessage([{"type": "text", "text": "rules"}]),
        HumanMessage("sum", name="ann"),
        AIMessage("", tool_calls=calls("c1", "c2"), additional_kwargs={"reasoning_content": "hm"}),
        ToolMessage("4", tool_call_id="c2"),
        ToolMessage("3", tool_call_id="c1"),
        AIMessage("seven"),
        HumanMessage("and now?"),
    ]


def check(reader: MessageReader, messages: Sequence[BaseMessage]) -> None:
    """Whatever was read before, it reads what is there."""
    got, whole = reader.read("a", messages), openai_messages(messages)
    assert repr(got.messages) == repr(whole)  # 1 is not True
    assert got.digests == digests(whole)
    assert got.lead == 1


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "content": lambda m: setattr(m[1], "content", "product"),
    "text to blocks": lambda m: setattr(m[1], "content", [{"type": "text", "text": "product"}]),
    "block": lambda m: m[0].content[0].update(text="no rules"),
    "cache mark": lambda m: m[0].content[0].update(cache_control={"type": "ephemeral"}),
    "argument": lambda m: m[2].tool_calls[0]["args"].update(a=7),
    "type of an argument": lambda m: m[2].tool_calls[0]["args"].update(a=True),
    "nested argument": lambda m: m[2].tool_calls[1]["args"]["b"].append(3),
    "no argument": lambda m: m[2].tool_calls[0]["args"].clear(),
    "call": lambda m: m[2].tool_calls[0].update(name="sub"),
    "thinking": lambda m: m[2].additional_kwargs.update(reasoning_content="oh"),
    "mark": lambda m: m[5].additional_kwargs.update(mark=True),
    "name": lambda m: setattr(m[1], "name", None),
    "order of results": lambda m: m.__setitem__(slice(3, 5), [m[4], m[3]]),
    "whose results": lambda m: (
        setattr(m[3], "tool_call_id", "c1"),
        setattr(m[4], "tool_call_id", "c2"),
    ),
    "more calls": lambda m: m.__setitem__(2, AIMessage("", tool_calls=calls("c1", "c2", "c3"))),
    "one less": lambda m: m.pop(),
    "replaced": lambda m: m.__setitem__(5, HumanMessage("seven")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_whatever_is_changed_in_place_is_read_anew(name: str) -> None:
    reader, messages = MessageReader(4), thread()
    check(reader, messages)
    before = repr(openai_messages(messages))
    CHANGES[name](messages)
    assert repr(openai_messages(messages)) != before
    check(reader, messages)
    CHANGES["content"](messages)
    check(reader, messages)


def test_who_says_a_plain_text_counts() -> None:
    reader = MessageReader(4)
    messages: list[BaseMessage] = [
        SystemMessage("rules"),
        HumanMessage("a"),
        AIMessage("b"),
        ChatMessage("c", role="user"),
    ]
    check(reader, messages)
    messages[2] = HumanMessage("b")
    check(reader, messages)
    messages[3].role = "assistant"  # type: ignore[attr-defined]
    check(reader, messages)


def test_blocks_in_one_message_leave_the_others_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[type] = []

    def counted(kind: type, fields: dict[str, Any]) -> object:
        frozen.append(kind)
        return freeze(kind, fields)

    freeze = reading._frozen
    monkeypatch.setattr(reading, "_frozen", counted)
    MessageReader(4).read("a", thread())
    assert frozen == [SystemMessage, AIMessage, AIMessage]  # blocks, calls, thinking


def test_what_was_read_stays_as_it_was_when_its_messages_are_changed_in_place() -> None:
    reader, messages = MessageReader(4), thread()
    read = reader.read("a", messages).messages
    before, copied = repr(read), copy.deepcopy(read)
    CHANGES["nested argument"](messages)
    assert repr(read) == before
    assert all(a is b for a, b in zip(read, copied, strict=True))  # sessions keep these
    again = reader.read("a", messages).messages
    assert [a is b for a, b in zip(read, again, strict=True)] == [True, True] + 5 * [False]


def test_texts_made_anew_for_each_call_are_not_kept() -> None:
    reader, messages = MessageReader(4), thread()
    read = reader.read("a", messages).messages
    anew = [type(m)(**{**vars(m), "content": copy.deepcopy(m.content)}) for m in messages]
    for message in anew[3:]:
        message.content = "".join(message.content)
    anew[5].content = "".join(["se", "ven"])
    reader.read("a", anew)
    kept = reader._known["a"].print.contents
    assert kept[5] is read[5]["content"]
    assert kept[5] is not anew[5].content


def test_a_list_that_grows_is_right_at_every_length() -> None:
    reader, messages = MessageReader(4), thread()
    for end in range(2, len(messages) + 1):
        check(reader, messages[:end])
        check(reader, copy.deepcopy(messages[:end]))


def test_only_what_is_new_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    def counted(messages: Sequence[BaseMessage], known: Sequence[Any] = ()) -> Any:
        counts.append(len(messages) - len(known))
        return openai_messages(messages, known)

    monkeypatch.setattr(reading, "openai_messages", counted)
    reader, messages = MessageReader(4), thread()
    reader.read("a", messages)
    reader.read("a", copy.deepcopy(messages))  # as from a checkpointer
    reader.read("a", [*messages, AIMessage("fine"), HumanMessage("go on")])
    reader.read("b", messages)
    assert counts == [7, 0, 2, 7]


def test_a_result_without_its_call_is_refused_though_the_rest_is_known() -> None:
    reader, messages = MessageReader(4), thread()
    reader.read("a", messages)
    with pytest.raises(InvalidRequest, match="message 7"):
        reader.read("a", [*messages, ToolMessage("9", tool_call_id="c9")])
    reader.read("a", [*messages, ToolMessage("9", tool_call_id="c1")])


def test_no_more_lists_are_kept_than_asked_for_and_none_that_is_over() -> None:
    reader, messages = MessageReader(2), thread()
    for name in ("a:model", "b:model", "b:other"):
        reader.read(name, messages)
    assert [*reader._known] == ["b:model", "b:other"]
    reader.forget("b")
    assert not reader._known


def test_a_tool_is_converted_again_only_if_it_was_changed() -> None:
    @tool
    def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    reader = ToolReader()
    first = reader.schema(add)
    assert first["function"]["name"] == "add"
    first["function"]["description"] = "changed by its holder"
    assert reader.schema(add)["function"]["description"] == "Add."
    add.description = "Add two."
    assert reader.schema(add)["function"]["description"] == "Add two."
