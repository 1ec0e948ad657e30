"""What a session tells a store: of a turn that ended, and of its own end."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from agentcache.session.host import Host, tell
from agentcache.store.base import FinishedTurn, SessionKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.session.history import History
    from agentcache.session.prompts import Prompt
    from agentcache.session.turn import Turn
    from agentcache.sessions.registry import SessionRecord

__all__ = ["key_of", "record_turn", "tell_closed"]


def key_of(record: SessionRecord[History]) -> SessionKey:
    """Which session of the runtime a record is of."""
    return SessionKey(record.id, record.tenant, record.parent, record.generation)


def record_turn(
    record: SessionRecord[History], prompt: Prompt, history: History, turn: Turn
) -> FinishedTurn:
    """A turn to write down; O(1) but for its reply: what is long is shared with the history."""
    return FinishedTurn(
        session=key_of(record),
        session_closed=turn.tip is None,
        tip=turn.tip,
        index=turn.index,
        history=history,
        after=None if prompt.tip is None else prompt.tip.history,
        shared_len=prompt.shared_len,
        prompt_ids=prompt.ids,
        output_ids=turn.ids.copy(),
        history_ids=history.ids,
        messages=prompt.messages,
        answer=_answer(history, turn),
        tools=prompt.tools,
        finish_reason=turn.finish_reason,
        usage=turn.usage,
        miss=lambda: _miss(turn),
    )


def tell_closed(host: Host, record: SessionRecord[History]) -> None:
    """Tell listeners, and the store if there is one, that a session is over."""
    tell(host, record, "close")
    if host.recorder is not None:
        host.recorder.close_session(key_of(record))


def _answer(history: History, turn: Turn) -> Mapping[str, Any] | None:
    """The reply, in a copy that its caller cannot change."""
    if turn.finish_reason == "prefill":
        return None
    if history.has_reply:
        return history.messages[-1]
    return copy.deepcopy(turn.message)


def _miss(turn: Turn) -> Mapping[str, Any] | None:
    return None if turn.miss is None else turn.miss.to_json()
