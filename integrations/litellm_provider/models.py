"""The models of the provider: their runtimes, and the sessions kept between calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import litellm

from agentcache import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentcache import Session

__all__ = ["PROVIDER", "Model", "Sessions", "Use"]

PROVIDER = "agentcache"
"""What models' names begin with."""


class Use:
    """A session in the hands of one call, until `end`."""

    def __init__(self, session: Session, end: Callable[[], None]) -> None:
        self.session = session
        self._end = end

    def end(self) -> None:
        """The call is over. Waits for nothing; twice is the same as once."""
        self._end()


@dataclass(slots=True, eq=False)
class _Kept:
    """A session that is kept between calls, and the calls that have it now."""

    session: Session
    used_at: float
    calls: set[object] = field(default_factory=set)


class Sessions:
    """The sessions of a model that are kept between calls, those used last at the end."""

    def __init__(
        self,
        tenant: str | None,
        max_sessions: int,
        idle_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._tenant = tenant
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._lock = threading.RLock()  # listeners hear of a close while it is held

    def open(self, runtime: Runtime, id: str | None) -> Use:
        """The session of an id, or one without a name; closes those that had their time."""
        if id is None:
            unnamed = runtime.session(tenant=self._tenant)
            return Use(unnamed, partial(unnamed.close, wait=False))
        now, call = self._clock(), object()
        with self._lock:
            kept = self._kept.get(id)
            if kept is None or kept.session.closed:
                kept = _Kept(runtime.session(id, tenant=self._tenant), now)
                self._kept[id] = kept
            self._kept.move_to_end(id)
            kept.used_at = now
            kept.calls.add(call)
            # Under the lock, so that nobody is handed a session that is about to be closed.
            for each in [self._kept.pop(name) for name in self._leaving(now)]:
                each.session.close(wait=False)
        return Use(kept.session, partial(self._end, kept, call))

    def _leaving(self, now: float) -> list[str]:
        """Ids of sessions that no call has and whose time is over, or that are too many."""
        idle = [(kept.used_at, id) for id, kept in self._kept.items() if not kept.calls]
        idle.sort(key=itemgetter(0))
        excess = len(self._kept) - self._max_sessions
        return [
            id
            for at, (used_at, id) in enumerate(idle)
            if at < excess or now - used_at > self._idle_s
        ]

    def _end(self, kept: _Kept, call: object) -> None:
        # Without the lock: calls that nobody holds any more end wherever garbage is collected.
        if call in kept.calls:
            kept.used_at = self._clock()
            kept.calls.discard(call)

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            kept = [each.session for each in self._kept.values()]
            self._kept.clear()
        for session in kept:
            session.close()


@dataclass(slots=True, eq=False)
class Model:
    """A model by its name, loaded when it is first called."""

    name: str
    source: Runtime | Callable[[], Runtime] | None
    sessions: Sessions
    defaults: Mapping[str, Any]
    _made: Runtime | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def runtime(self) -> Runtime:
        """The runtime. Raises what loading it raises."""
        if isinstance(self.source, Runtime):
            return self.source
        with self._lock:
            if self._made is None:
                made = Runtime.load(self.name) if self.source is None else self.source()
                self._made = made
                litellm.register_model({f"{PROVIDER}/{self.name}": self.describe()})
            return self._made

    def call_grammar(self, tools: Sequence[Mapping[str, Any]], /, *, parallel: bool) -> str:
        """A grammar of replies that call one of the tools."""
        return self.runtime().chat_format.tool_call_grammar(tools, parallel=parallel)

    def describe(self) -> dict[str, Any]:
        """What litellm is to know of the model."""
        runtime = self.source if isinstance(self.source, Runtime) else self._made
        told: dict[str, Any] = {
            "litellm_provider": PROVIDER,
            "mode": "chat",
            "input_cost_per_token": 0.0,
            "output_cost_per_token": 0.0,
            "cache_creation_input_token_cost": 0.0,
            "cache_read_input_token_cost": 0.0,
            "supports_function_calling": True,
            "supports_tool_choice": True,
            "supports_response_schema": True,
            "supports_prompt_caching": True,
        }
        if runtime is not None:
            told["max_tokens"] = told["max_input_tokens"] = runtime.max_len
        return told

    def close(self) -> None:
        """Close the sessions, and the runtime where it was made here."""
        self.sessions.close()
        with self._lock:
            made, self._made = self._made, None
        if made is not None:
            made.close()
