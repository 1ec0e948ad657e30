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
from operator import eq
from typing import TYPE_CHECKING, Any

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
    from collections.abc import Sequence

    from langchain_core.messages import BaseMessage

__all__ = ["MessageReader", "ReadList", "ToolReader"]

_KINDS = frozenset({AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage})
"""Classes whose fields are known to say all; messages of others are read anew each time."""

_EXACT = 2
"""Version of marshal's format without references between objects: equal bytes are equal values of
equal types."""

_MOST_TOOLS = 1024

Fingerprint = tuple[Any, ...]


@dataclass(frozen=True, slots=True, eq=False)
class ReadList:
    """A list in OpenAI form, which is not to be changed, and the digests of its messages, the first
    `lead` of the system."""

    messages: list[dict[str, Any]]
    digests: tuple[int, ...]
    lead: int


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """A list that was read: what each message was read from, and its digest."""

    prints: list[Fingerprint | None]
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
        prints = [_fingerprint(message) for message in messages]
        with self._lock:
            known = self._known.get(name)
        same = 0 if known is None else _num_same(prints, known.prints)
        if known is None or not same:
            read = openai_messages(messages)
            values = [message_digest(message) for message in read]
            digests = digests_of_runs(read, values)
        else:
            # The last of them may be results of parallel calls, whose digests are put in order.
            kept = known.read.messages[:same]
            while kept and kept[-1]["role"] == "tool":
                kept.pop()
            read = openai_messages(messages, known.read.messages[:same])
            values = known.values[:same]
            values += [message_digest(message) for message in read[same:]]
            first = len(kept)
            digests = known.read.digests[:first] + digests_of_runs(read[first:], values[first:])
        result = ReadList(read, digests, lead_len(read))
        with self._lock:
            self._known[name] = _Known(prints, values, result)
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


def _num_same(a: list[Fingerprint | None], b: list[Fingerprint | None]) -> int:
    """How many leading messages are known to be the same."""
    if None not in b and all(map(eq, a, b)):
        return min(len(a), len(b))
    pairs = enumerate(zip(a, b, strict=False))
    differ = (i for i, (x, y) in pairs if x is None or x != y)
    return next(differ, min(len(a), len(b)))


def _fingerprint(message: BaseMessage) -> Fingerprint | None:
    """All that a message is read from, frozen; None where that cannot be told."""
    kind = type(message)
    if kind not in _KINDS:
        return None
    fields = message.__dict__
    content, extra = fields["content"], fields["additional_kwargs"]
    calls, bad = fields.get("tool_calls"), fields.get("invalid_tool_calls")
    try:
        return (
            kind,
            content if type(content) is str else _frozen(content),
            fields["name"],
            fields.get("tool_call_id"),
            _frozen((calls, bad)) if calls or bad else None,
            _frozen((extra.get("mark"), extra.get("reasoning_content"))) if extra else None,
        )
    except ValueError:  # a value that is no plain JSON
        return None


def _frozen(value: Any) -> bytes:
    return marshal.dumps(value, _EXACT)


class ToolReader:
    """Schemas of tools in OpenAI form, made once for each tool. For any thread."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Fingerprint, dict[str, Any]]] = {}

    def schema(self, tool: Any) -> dict[str, Any]:
        """A tool's schema, the caller's own. Raises what LangChain raises for what is no tool."""
        if type(tool) is not StructuredTool or not isinstance(tool.args_schema, type):
            return convert_to_openai_tool(tool)
        parts = (tool, tool.args_schema, tool.func, tool.coroutine)
        told = (tool.name, tool.description)
        known = self._known.get(id(tool))
        if known is None or known[0][:2] != told or not _are(known[0][2:], parts):
            known = ((*told, *parts), convert_to_openai_tool(tool))
            if len(self._known) >= _MOST_TOOLS:
                self._known.clear()
            self._known[id(tool)] = known
        return copy.deepcopy(known[1])


def _are(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether they hold the same objects."""
    return all(x is y for x, y in zip(a, b, strict=True))
