"""The session handle: what an agent framework holds across turns."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from agentcache.engine.messages import copied
from agentcache.errors import RuntimeClosed, SessionClosed, UnknownTip
from agentcache.session.calls import Calls
from agentcache.session.host import Host, tell, tell_place
from agentcache.session.options import CallOptions, seconds_of
from agentcache.session.recording import tell_closed

if TYPE_CHECKING:
    from types import TracebackType

    from agentcache.cache import SessionRef
    from agentcache.engine.chat import Message
    from agentcache.session.history import History, SessionTip
    from agentcache.session.prompts import Prompt
    from agentcache.session.streams import TurnStream
    from agentcache.session.turn import Turn
    from agentcache.sessions.registry import SessionRecord
    from agentcache.types import IntArray

__all__ = ["Session"]

Tools = Sequence[Mapping[str, Any]]


class Session:
    """One agent's trajectory: keeps its history, its tips and its place in the cache.

    Many threads and tasks may use one handle. Leaving its `with` block closes the session: its
    marks are dropped, its data stays until evicted.

    >>> with rt.session("django-11099") as s:                       # doctest: +SKIP
    ...     turn = s.chat([{"role": "user", "content": "Fix the bug."}], max_new_tokens=64)
    ...     turn = s.chat([{"role": "tool", "content": "1 failed"}])
    """

    def __init__(
        self, host: Host, record: SessionRecord[History], *, is_unnamed: bool = False
    ) -> None:
        self._host = host
        self._record = record
        self._calls = Calls(host, record, is_unnamed=is_unnamed)
        self._is_unnamed = is_unnamed
        self._detached = False
        # Nobody can ask for a session again whose id nobody was told: it ends with its handle.
        self._collect = weakref.finalize(self, _end, host, record, False) if is_unnamed else None
        if self._collect is not None:
            self._collect.atexit = False
        if not record.announced:
            record.announced = True
            tell(host, record, "open")

    @overload
    def chat(
        self,
        new: Sequence[Message],
        *,
        tools: Tools | None = ...,
        tip: int | None = ...,
        stream: Literal[False] = ...,
        **options: Unpack[CallOptions],
    ) -> Turn: ...
    @overload
    def chat(
        self,
        new: Sequence[Message],
        *,
        tools: Tools | None = ...,
        tip: int | None = ...,
        stream: Literal[True],
        **options: Unpack[CallOptions],
    ) -> TurnStream: ...
    def chat(
        self,
        new: Sequence[Message],
        *,
        tools: Tools | None = None,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Turn | TurnStream:
        """Append messages to the tip's history and reply.

        tools: given once, kept for the following calls. tip: needed where several tips stand.

        Raises SessionClosed, AmbiguousTip, UnknownTip, HistoryMismatch; InvalidRequest for messages
        the model's template refuses; PromptTooLong, RequestTooLarge.
        """
        return self._calls.run(lambda: self._chat_prompt(new, tools, tip), options, stream)

    def achat(
        self,
        new: Sequence[Message],
        *,
        tools: Tools | None = None,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Coroutine[Any, Any, Turn | TurnStream]:
        """`chat` for async callers; cancelling the task stops the work within a step.

        What the caller changes in its arguments after this returns is not seen.
        """
        new, tools, options = copied((new, tools, options))
        return self._calls.arun(lambda: self._chat_prompt(new, tools, tip), options, stream)

    @overload
    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = ...,
        tip: int | None = ...,
        stream: Literal[False] = ...,
        **options: Unpack[CallOptions],
    ) -> Turn: ...
    @overload
    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = ...,
        tip: int | None = ...,
        stream: Literal[True],
        **options: Unpack[CallOptions],
    ) -> TurnStream: ...
    def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Turn | TurnStream:
        """Reply to a whole list of messages, as frameworks send it.

        Goes on from the tip that shares the longest prefix, or from `tip`; where the list was
        edited, from the last boundary before the edit. Raises as `chat`.
        """
        return self._calls.run(lambda: self._list_prompt(messages, tools, tip), options, stream)

    def acomplete(
        self,
        messages: Sequence[Message],
        *,
        tools: Tools | None = None,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Coroutine[Any, Any, Turn | TurnStream]:
        """`complete` for async callers, as `achat` is for `chat`."""
        messages, tools, options = copied((messages, tools, options))
        return self._calls.arun(lambda: self._list_prompt(messages, tools, tip), options, stream)

    @overload
    def generate(
        self,
        ids: Sequence[int] | IntArray,
        *,
        tip: int | None = ...,
        stream: Literal[False] = ...,
        **options: Unpack[CallOptions],
    ) -> Turn: ...
    @overload
    def generate(
        self,
        ids: Sequence[int] | IntArray,
        *,
        tip: int | None = ...,
        stream: Literal[True],
        **options: Unpack[CallOptions],
    ) -> TurnStream: ...
    def generate(
        self,
        ids: Sequence[int] | IntArray,
        *,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Turn | TurnStream:
        """Go on from a whole prompt in token ids, as a server would get it.

        Raises InvalidRequest for an empty prompt or ids outside the vocabulary; else as `chat`.
        """
        return self._calls.run(lambda: self._ids_prompt(ids, tip), options, stream)

    def agenerate(
        self,
        ids: Sequence[int] | IntArray,
        *,
        tip: int | None = None,
        stream: bool = False,
        **options: Unpack[CallOptions],
    ) -> Coroutine[Any, Any, Turn | TurnStream]:
        """`generate` for async callers, as `achat` is for `chat`."""
        ids, options = copy.copy(ids), copied(options)
        return self._calls.arun(lambda: self._ids_prompt(ids, tip), options, stream)

    def fork(self, id: str | None = None, *, tip: int | None = None) -> Session:
        """A new session that stands where this one does; shares everything, copies nothing.

        Raises SessionClosed, AmbiguousTip; SessionError if `id` is already open.
        """
        record = self._record
        record.check_open()
        source = record.tip(tip)
        child = self._host.registry.fork(record, id)
        if source is not None:
            ref = self._hold(source)
            child.stand_at(None, source, ref)
            forked = Session(self._host, child)
            tell_place(self._host, child, ref)
            return forked
        return Session(self._host, child)

    def rewind(self, to_turn: int, *, tip: int | None = None) -> None:
        """Stand again at the end of turn `to_turn` of the tip's path; 0 is before the first.

        What is left behind is no tip any more, only ordinary cache. Raises UnknownTip.
        """
        record = self._record
        record.check_open()
        leaving = record.tip(tip)
        if leaving is None and to_turn != 0:
            raise UnknownTip(f"there is no turn {to_turn}: the session has no turns yet")
        target = leaving.ancestor(to_turn) if leaving is not None and to_turn != 0 else None
        ref = None if target is None else self._hold(target)
        try:
            left = record.stand_at(leaving, target, ref)
        except SessionClosed:
            self._leave([] if ref is None else [ref])
            raise
        self._leave(left)
        if ref is not None:
            tell_place(self._host, record, ref)

    def _hold(self, tip: SessionTip) -> SessionRef:
        """A mark where a tip stands, or at what is left of its path."""
        marks, ref = self._host.marks, tip.ref
        return self._host.on_engine(lambda: marks.stand_again(ref))

    def _leave(self, refs: Sequence[SessionRef]) -> None:
        if refs:
            self._host.on_engine(lambda: self._host.marks.leave(*refs))

    @property
    def id(self) -> str:
        return self._record.id

    @property
    def parent(self) -> str | None:
        """Id of the session this one was forked from, or was opened under."""
        return self._record.parent

    @property
    def closed(self) -> bool:
        return self._record.closed

    @property
    def tips(self) -> tuple[int, ...]:
        """Numbers of the standing tips, oldest first."""
        return tuple(tip.number for tip in self._record.tips())

    @property
    def ids(self) -> IntArray:
        """The only tip's whole token history, prompts and replies. Raises AmbiguousTip."""
        tip = self._record.tip(None)
        return np.empty(0, dtype=np.int32) if tip is None else tip.history.ids

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The only tip's messages, replies included. Raises AmbiguousTip."""
        tip = self._record.tip(None)
        return [] if tip is None else [dict(copied(message)) for message in tip.history.messages]

    def idle(self, expect: float | str | None = None) -> None:
        """Hint: the session waits for a tool, for about `expect` seconds (or "30s", "5m", "1h").

        Its place in the cache counts as that of a live session for twice that time, in place of ten
        minutes; then it is an ordinary entry until the next turn. Without `expect` nothing changes.
        Raises InvalidRequest for a text that is no duration.
        """
        record, host = self._record, self._host
        record.check_open()
        seconds = record.expect_s = None if expect is None else seconds_of(expect)
        if seconds is None:
            return
        refs = [tip.ref for tip in record.tips()]
        host.on_engine_later(lambda: host.marks.expect(seconds, *refs))

    def stats(self) -> dict[str, Any]:
        """What the session did and where it stands."""
        record = self._record
        tips = record.tips()
        return {
            "id": record.id,
            "parent": record.parent,
            "closed": record.closed,
            "tips": [tip.number for tip in tips],
            "turns": max((tip.index for tip in tips), default=0),
            "tokens": max((len(tip.history.ids) for tip in tips), default=0),
            "expect_s": record.expect_s,
            **record.counts(),
        }

    def close(self, *, wait: bool = True) -> None:
        """Drop the session's marks; later calls raise SessionClosed. A running call finishes.

        wait: for the marks to be gone, which takes up to one step of the engine. Without it they go
        some time soon: for event loops, and for finalizers, which run on any thread.
        """
        _end(self._host, self._record, wait)

    def detach(self) -> None:
        """Keep the session for `rt.session(id)`, also past the end of a `with` block."""
        self._detached = True
        if self._collect is not None:
            self._collect.detach()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._detached:
            self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"tips={list(self.tips)}"
        return f"Session({self.id!r}, {state})"

    def _chat_prompt(self, new: Sequence[Message], tools: Tools | None, tip: int | None) -> Prompt:
        self._record.check_open()
        return self._used(self._host.prompts.from_new(new, tools, self._record.tip(tip)))

    def _list_prompt(
        self, messages: Sequence[Message], tools: Tools | None, tip: int | None
    ) -> Prompt:
        candidates, host = self._candidates(tip), self._host
        if self._is_unnamed and not candidates:
            return host.recent.prompt(host.prompts, self._record.tenant, messages, tools)
        return self._used(host.prompts.from_messages(messages, tools, candidates))

    def _ids_prompt(self, ids: Sequence[int] | IntArray, tip: int | None) -> Prompt:
        return self._used(self._host.prompts.from_ids(ids, self._candidates(tip)))

    def _used(self, prompt: Prompt) -> Prompt:
        if prompt.tip is not None:
            self._record.use(prompt.tip)
        return prompt

    def _candidates(self, tip: int | None) -> tuple[SessionTip, ...]:
        self._record.check_open()
        if tip is None:
            return self._record.tips()
        named = self._record.tip(tip)
        return () if named is None else (named,)


def _end(host: Host, record: SessionRecord[History], wait: bool) -> None:
    """Close a session, on whatever thread its handle was closed or dropped."""
    was_open = not record.closed
    refs = record.close()
    host.registry.forget(record)
    with suppress(RuntimeClosed):  # then the marks are gone with the cache they were in
        if refs and wait:
            host.on_engine(lambda: _leave(host, record, refs))
        elif refs:
            host.on_engine_later(lambda: _leave(host, record, refs))
    if was_open:
        tell_closed(host, record)


def _leave(host: Host, record: SessionRecord[History], refs: Sequence[SessionRef]) -> None:
    """The session stands nowhere any more. On the engine thread."""
    host.marks.leave(*refs)
    host.marks.over(record.id)
