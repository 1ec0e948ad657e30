"""Events: what enters and leaves a cache, for an index outside that wants to know what it holds."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Event", "EventName", "Events"]

EventName = Literal[
    "insert", "split", "file", "evict", "remove", "demote", "load_back", "open", "move", "close"
]


@dataclass(frozen=True, slots=True)
class Event:
    """One change. A node is one run of tokens; `key` is its number, never used again.

    insert: tokens became known: they follow node `parent` (a root where it is the first of its
        namespace) and end at `boundary`. Behind a `salt` they are known to those who carry it.
    split: the first part of node `key`, up to `boundary`, is node `parent` from now on, which takes
        its place under the node it hung from; `key` hangs from it.
    file, evict: data of layer kind `kind` is there (also anew, in place of what lay on a lower
        tier) or gone. It covers [start, boundary): a prefix
        may be resumed where every kind allows it: "full" anywhere in the run, "state" at the
        boundary, "swa" where the window of the position lies within what is covered.
    demote, load_back: the same data went to `tier`, or came back to the device.
    remove: the run is not known any more.
    open, move, close: a session began, stands at the boundary of node `key` (after a turn, a
        rewind, or where it was forked), is over.
    """

    name: EventName
    key: int = -1
    boundary: int = 0
    start: int = 0
    kind: str | None = None
    parent: int = -1
    tokens: tuple[int, ...] = ()
    namespace: str | None = None
    salt: str | None = None
    session: str | None = None
    tenant: str | None = None
    tier: int = 1

    def to_json(self) -> dict[str, Any]:
        """The fields that say something, as plain JSON values."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["tokens"] = list(self.tokens)
        values["kind"] = None if self.kind is None else str(self.kind)  # of whatever string class
        defaults = {field.name: field.default for field in fields(self)}
        return {n: v for n, v in values.items() if n == "name" or (v != defaults[n] and v != [])}


class Events:
    """Tells listeners what happens, on the thread where it happens (mostly the engine's).

    A listener has to be quick. One that raises is told nothing more, and the error is logged: the
    cache goes on.

    >>> seen = []
    >>> events = Events()
    >>> stop = events.subscribe(seen.append)
    >>> events.emit(Event("open", session="a"))
    >>> stop()
    >>> [event.to_json() for event in seen]
    [{'name': 'open', 'session': 'a'}]
    """

    def __init__(self) -> None:
        self._listeners: dict[object, Callable[[Event], None]] = {}  # never changed, only replaced
        self._lock = threading.RLock()  # a handle may be collected, and say so, while it is held

    @property
    def active(self) -> bool:
        """Whether anybody listens; if not, no event need be made."""
        return bool(self._listeners)

    def subscribe(self, listener: Callable[[Event], None]) -> Callable[[], None]:
        """Call `listener` with every event from now on; what is returned ends that."""
        subscription = object()
        with self._lock:
            self._listeners = {**self._listeners, subscription: listener}
        return lambda: self._drop(subscription)

    def _drop(self, subscription: object) -> None:
        with self._lock:
            kept = self._listeners.items()
            self._listeners = {each: told for each, told in kept if each is not subscription}

    def emit(self, event: Event) -> None:
        """Tell everybody."""
        for subscription, listener in self._listeners.items():
            try:
                listener(event)
            except Exception:  # others' code, in the middle of our work
                logging.getLogger("agentcache").exception("a listener to cache events failed")
                self._drop(subscription)
