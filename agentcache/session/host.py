"""What a session needs of its runtime, and what it tells listeners through it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from agentcache.events import Event

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.cache import SessionRef
    from agentcache.clock import Clock
    from agentcache.engine.loop import Submission
    from agentcache.engine.request import RequestSpec
    from agentcache.engine.tokenizer import Tokenizer
    from agentcache.events import EventName, Events
    from agentcache.session.history import History
    from agentcache.session.prompts import PromptBuilder
    from agentcache.session.recent import RecentConversations
    from agentcache.sessions.registry import Registry, SessionRecord
    from agentcache.store.base import Recorder
    from agentcache.tree.key import Namespace

__all__ = ["Host", "Marks", "tell", "tell_place"]

T = TypeVar("T")


class Marks(Protocol):
    """Where the tips of sessions stand in the cache; on the engine thread only."""

    def stand_again(self, ref: SessionRef) -> SessionRef:
        """One more mark where another one is, or at what is left of its path."""
        ...

    def expect(self, seconds: float, *refs: SessionRef) -> None:
        """Their session is expected back in about that many seconds."""
        ...

    def leave(self, *refs: SessionRef) -> None:
        """Give marks up."""
        ...

    def over(self, session: str) -> None:
        """A session is over."""
        ...


class Host(Protocol):
    """What a session needs of its runtime."""

    prompts: PromptBuilder
    tokenizer: Tokenizer
    registry: Registry[History]
    recent: RecentConversations
    marks: Marks
    events: Events
    end_id: int | None
    verify: bool | float
    exact: bool
    clock: Clock
    recorder: Recorder | None

    @property
    def max_len(self) -> int:
        """Most tokens of prompt and reply together."""
        ...

    def namespace(
        self, tenant: str | None, shared_head: bool = False, exact: bool = False
    ) -> Namespace:
        """Who may share what with whom."""
        ...

    def submit(self, spec: RequestSpec) -> Submission:
        """Queue a request on the engine thread."""
        ...

    def on_engine(self, function: Callable[[], T]) -> T:
        """Run a function on the engine thread and wait for it."""
        ...

    def on_engine_later(self, function: Callable[[], None]) -> None:
        """Run a function on the engine thread some time soon."""
        ...


def tell_place(host: Host, record: SessionRecord[History], ref: SessionRef) -> None:
    """Tell listeners where a session stands now."""
    node = ref.frontier.node
    tell(host, record, "move", key=node.id, boundary=node.end)


def tell(
    host: Host, record: SessionRecord[History], name: EventName, key: int = -1, boundary: int = 0
) -> None:
    """Tell listeners what became of a session."""
    host.events.emit(
        Event(name, key=key, boundary=boundary, session=record.id, tenant=record.tenant)
    )
