"""The models of the provider: their runtimes, and the sessions kept between calls."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import litellm

from agentcache import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from agentcache import Session

__all__ = ["PROVIDER", "Model", "Sessions"]

PROVIDER = "agentcache"
"""What models' names begin with."""


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
        self._kept: OrderedDict[str, tuple[Session, float]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, runtime: Runtime, id: str | None) -> Session:
        """The session of an id, or one without a name; closes those that had their time."""
        if id is None:
            return runtime.session(tenant=self._tenant)
        now = self._clock()
        with self._lock:
            kept = self._kept.pop(id, None)
            session = runtime.session(id, tenant=self._tenant) if kept is None else kept[0]
            if session.closed:
                session = runtime.session(id, tenant=self._tenant)
            self._kept[id] = (session, now)
            leaving = self._take_leaving(now)
        for old in leaving:
            old.close()
        return session

    def _take_leaving(self, now: float) -> list[Session]:
        leaving = []
        while self._kept:
            session, used_at = next(iter(self._kept.values()))
            if len(self._kept) <= self._max_sessions and now - used_at <= self._idle_s:
                break
            leaving.append(session)
            self._kept.popitem(last=False)
        return leaving

    def close(self) -> None:
        """Close all of them."""
        with self._lock:
            kept = [session for session, _ in self._kept.values()]
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
