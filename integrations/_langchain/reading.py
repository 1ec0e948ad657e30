"""Lists of messages and tools as frameworks send them, again and again: each part is read once.

Callers may change any message or tool in place between two calls. What was read before counts only
where everything that it was read from is still the same, by value and by type.
"""

from __future__ import annotations

import copy
import marshal
import threading
from collections import OrderedDict
from dataclasses import dataclass
from operator import eq, itemgetter
from typing import TYPE_CHECKING, Any, cast

from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import StructuredTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from agentcache.integrations._langchain.messages import (
    digests_of_runs,
    lead_len,
    message_digest,
    openai_messages,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from langchain_core.messages import BaseMessage

__all__ = ["MessageReader", "ReadList", "ToolReader"]

_KINDS = frozenset({AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage})
"""Classes whose fields are known to say all; messages of others are read anew each time."""

_EXACT = 2
"""Version of marshal's format without references between objects: equal bytes are equal values of
equal types."""

_MOST_TOOLS = 1024

_content_of, _extras_of, _name_of = map(itemgetter, ("content", "additional_kwargs", "name"))


@dataclass(frozen=True, slots=True, eq=False)
class ReadList:
    """A list in OpenAI form, which is not to be changed, and the digests of its messages, the first
    `lead` of the system."""

    messages: list[_Kept]
    digests: tuple[int, ...]
    lead: int


class _Kept(dict[str, Any]):
    """A message that was read, which nobody changes: a session that keeps a copy of it keeps this,
    and sees at once that it is the same when it comes again."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Kept:
        return self


def _kept(messages: list[dict[str, Any]]) -> list[_Kept]:
    """Messages apart from what they were read from, which may be changed in place."""
    return [*map(_Kept, copy.deepcopy(messages))]


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A list that was read: what it was read from, and the digest of each message."""

    print: _Print
    values: list[int]
    read: ReadList


class MessageReader:
    """Reads lists of messages; of one that begins as the last of its name did, only the rest.

    At most `most` names are remembered. Any number of threads may use it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[str | None, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, name: str | None, messages: Sequence[BaseMessage]) -> ReadList:
        """Read a list. Raises what `openai_messages` raises."""
        print_ = _Print.of(messages)
        with self._lock:
            known = self._known.get(name, _NOTHING)
        same = print_.num_same(known.print)
        # The last of them may be results of parallel calls, whose digests are put in order.
        first = same
        while first and known.read.messages[first - 1]["role"] == "tool":
            first -= 1
        before = known.read.messages[:same]
        new = _kept(openai_messages(messages, before)[same:])
        read = [*before, *new]
        values = [*known.values[:same], *map(message_digest, new)]
        digests = known.read.digests[:first] + digests_of_runs(read[first:], values[first:])
        result = ReadList(read, digests, lead_len(read))
        with self._lock:
            self._known[name] = _Known(print_.after(known.print, same), values, result)
            self._known.move_to_end(name)
            while len(self._known) > self._most:
                self._known.popitem(last=False)
        return result

    def forget(self, name: str) -> None:
        """Remember the lists of a session, or of all nodes of a thread, no longer."""
        with self._lock:
            own = [k for k in self._known if k is not None and k.partition(":")[0] == name]
            for key in (name, *own):
                self._known.pop(key, None)


@dataclass(frozen=True, slots=True, eq=False)
class _Print:
    """All that a list of messages is read from, frozen, in columns: so long lists are compared by a
    few steps that take no time for a single message.

    rest: what a message holds beside a text; b"" for nothing, and what is equal to nothing where
    that cannot be told.
    """

    kinds: list[type]
    contents: list[Any]
    names: list[Any]
    answered: list[Any]
    rest: list[Any]

    @classmethod
    def of(cls, messages: Sequence[BaseMessage]) -> _Print:
        kinds = [*map(type, messages)]
        fields = [*map(vars, messages)]
        contents = [*map(_content_of, fields)]
        extras = [*map(_extras_of, fields)]
        answered: list[Any] = [None] * len(kinds)
        rest: list[Any] = [b""] * len(kinds)
        all_plain = _KINDS.issuperset(kinds) and {*map(type, contents)} <= {str}
        for i, kind in enumerate(kinds):
            if kind is HumanMessage:
                pass
            elif kind is ToolMessage:
                answered[i] = fields[i]["tool_call_id"]
            elif fields[i].get("tool_calls") or fields[i].get("invalid_tool_calls"):
                rest[i] = _frozen(kind, fields[i])
            if extras[i]:
                rest[i] = _frozen(kind, fields[i])
            if all_plain:
                continue
            if kind not in _KINDS or type(contents[i]) is not str:
                rest[i], contents[i] = _frozen(kind, fields[i]), None
        return cls(kinds, contents, [*map(_name_of, fields)], answered, rest)

    def num_same(self, other: _Print) -> int:
        """How many leading messages are known to be the same."""
        return min(
            _num_equal(self.kinds, other.kinds),
            _num_equal(self.rest, other.rest),
            _num_equal(self.answered, other.answered),
            _num_equal(self.names, other.names),
            _num_equal(self.contents, other.contents),
        )

    def after(self, known: _Print, same: int) -> _Print:
        """The same, made of the values in `known` as far as they are the same: so texts that are
        made anew for each call are not kept beside those that were read."""
        return _Print(
            known.kinds[:same] + self.kinds[same:],
            known.contents[:same] + self.contents[same:],
            known.names[:same] + self.names[same:],
            known.answered[:same] + self.answered[same:],
            known.rest[:same] + self.rest[same:],
        )


def _num_equal(a: list[Any], b: list[Any]) -> int:
    """How many leading items are equal."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i, each in enumerate(map(eq, a, b)) if not each)


def _frozen(kind: type, fields: dict[str, Any]) -> object:
    """What a message says beside a plain text; equal to nothing where that cannot be told."""
    if kind not in _KINDS:
        return object()
    content, extra = fields["content"], fields["additional_kwargs"]
    said = (
        None if type(content) is str else content,
        fields.get("tool_calls"),
        fields.get("invalid_tool_calls"),
        (extra.get("mark"), extra.get("reasoning_content")) if extra else None,
    )
    try:
        return marshal.dumps(said, _EXACT)
    except ValueError:  # a value that is no plain JSON
        return object()


_NOTHING = _Known(_Print([], [], [], [], []), [], ReadList([], (), 0))


class ToolReader:
    """Schemas of tools in OpenAI form, made once for each tool. For any thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[tuple[Any, ...], Callable[[], dict[str, Any]]]] = {}

    def schema(self, tool: Any) -> dict[str, Any]:
        """A tool's schema, the caller's own. Raises what LangChain raises for what is no tool."""
        if type(tool) is not StructuredTool or not isinstance(tool.args_schema, type):
            return convert_to_openai_tool(tool)
        parts = (tool, tool.args_schema, tool.func, tool.coroutine)
        told = (tool.name, tool.description)
        known = self._known.get(id(tool))
        if known is None or known[0][:2] != told or not _are(known[0][2:], parts):
            known = ((*told, *parts), _copier(convert_to_openai_tool(tool)))
            if len(self._known) >= _MOST_TOOLS:
                self._known.clear()
            self._known[id(tool)] = known
        return known[1]()


def _copier(schema: dict[str, Any]) -> Callable[[], dict[str, Any]]:
    """What gives a copy of a schema each time."""
    try:
        written = marshal.dumps(schema)
    except ValueError:  # a value that is no plain JSON
        return lambda: copy.deepcopy(schema)
    return lambda: cast("dict[str, Any]", marshal.loads(written))


def _are(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether they hold the same objects."""
    return all(x is y for x, y in zip(a, b, strict=True))
