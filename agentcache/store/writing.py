"""Finished turns into tables: each as what it adds to the one it goes on from."""

from __future__ import annotations

import hashlib
import logging
import uuid
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from sqlalchemy import bindparam, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from agentcache.store.messages import digest_of, write_messages
from agentcache.store.schema import Session, Toolset, Turn, dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

    from agentcache.store.base import FinishedTurn, SessionKey
    from agentcache.store.database import Database
    from agentcache.types import IntArray

__all__ = ["TurnWriter", "session_digest"]

_LOG = logging.getLogger("agentcache")

# Made once: building a statement takes longer than running it.
_FIND_SESSION = select(Session.id).where(
    Session.run == bindparam("run"), Session.generation == bindparam("generation")
)
_FIND_TURN = select(Turn.id).where(Turn.id == bindparam("turn"))
_FIND_TOOLSET = select(Toolset.digest).where(Toolset.digest == bindparam("toolset"))
_LAST_NUMBER = select(func.max(Turn.number)).where(Turn.session_id == bindparam("session"))
_ADD_SESSION = insert(Session)
_ADD_TURN = insert(Turn)
_ADD_TOOLSET = insert(Toolset)
_CLOSE = (
    update(Session)
    .where(Session.id == bindparam("session"), Session.closed.is_(None))
    .values(closed=bindparam("at"))
)


def session_digest(id: str, tenant: str | None) -> str:
    """What rows of a session are found by."""
    return digest_of([tenant, id])


@dataclass(frozen=True, slots=True)
class _Written:
    """A turn that is in the database: its row, its messages and reply, its tools and their digest.

    messages: the turn's own sequence, whose memory is that of the session's history.
    """

    row: int
    messages: Sequence[Mapping[str, Any]]
    answer: Mapping[str, Any] | None
    tools: Sequence[Mapping[str, Any]] | None
    toolset: str | None

    def num_equal(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """How many leading messages of a list this turn ended with."""
        said = chain(self.messages, () if self.answer is None else (self.answer,))
        pairs = zip(said, messages, strict=False)
        return sum(
            1 for _ in takewhile(lambda pair: pair[0] is pair[1] or pair[0] == pair[1], pairs)
        )


class TurnWriter:
    """Writes the turns of one runtime; on one thread.

    Where the turn that another goes on from is not in the database, because it could not be written
    or was pruned, the other is written whole.
    """

    def __init__(self, model: str, fingerprint: str) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._run = uuid.uuid4().hex
        self._written: WeakKeyDictionary[Any, _Written] = WeakKeyDictionary()

    def write(self, database: Database, turn: FinishedTurn, at: float) -> None:
        """One turn in one transaction. Raises StoreError."""
        miss = _miss(turn)
        with database.writing() as connection:
            session = self._session(connection, turn.session, at)
            if turn.session_closed:
                connection.execute(_CLOSE, {"session": session, "at": at})
            base = self._base(connection, turn.after)
            shared = 0 if base is None else base.num_equal(turn.messages)
            toolset = _toolset(connection, turn.tools, base)
            values = {
                "session_id": session,
                "number": (connection.scalar(_LAST_NUMBER, {"session": session}) or 0) + 1,
                "base_id": None if base is None else base.row,
                "base_messages": shared,
                "toolset": toolset,
                "miss": miss,
                "created": at,
                **_tokens(turn, 0 if base is None else turn.shared_len),
                **_counts(turn),
            }
            row = _key(connection.execute(_ADD_TURN, values).inserted_primary_key)
            write_messages(connection, row, _added(turn, shared), shared)
        written = _Written(row, turn.messages, turn.answer, turn.tools, toolset)
        self._written[turn.history] = written

    def close_session(self, database: Database, key: SessionKey, at: float) -> None:
        """Note that a session is over, if it has turns. Raises StoreError."""
        with database.writing() as connection:
            row = self._find(connection, key)
            if row is not None:
                connection.execute(_CLOSE, {"session": row, "at": at})

    def _find(self, connection: Connection, key: SessionKey) -> int | None:
        opening = {"run": self._run, "generation": key.generation}
        found: int | None = connection.scalar(_FIND_SESSION, opening)
        return found

    def _session(self, connection: Connection, key: SessionKey, at: float) -> int:
        """The row of a session, made with its first turn."""
        found = self._find(connection, key)
        if found is not None:
            return found
        values = {
            "key": session_digest(key.id, key.tenant),
            "name": key.id,
            "tenant": key.tenant,
            "parent": key.parent,
            "model": self._model,
            "fingerprint": self._fingerprint,
            "run": self._run,
            "generation": key.generation,
            "created": at,
        }
        return _key(connection.execute(_ADD_SESSION, values).inserted_primary_key)

    def _base(self, connection: Connection, after: object | None) -> _Written | None:
        """The turn that another goes on from, if it is there (still: it may have been pruned)."""
        base = None if after is None else self._written.get(after)
        if base is None:
            return None
        there = connection.scalar(_FIND_TURN, {"turn": base.row})
        return None if there is None else base


def _key(row: Any) -> int:
    assert row is not None
    return int(row[0])


def _miss(turn: FinishedTurn) -> dict[str, Any] | None:
    """The report of a miss; None where there is none, or it cannot be made."""
    try:
        miss = turn.miss()
    except Exception as error:  # it runs the model's own template; the turn is worth more
        id = turn.session.id[:80]
        _LOG.error("a turn of session %r is stored without the report of its miss: %s", id, error)
        return None
    return None if miss is None else dict(miss)


def _added(turn: FinishedTurn, shared: int) -> list[Mapping[str, Any]]:
    """What a turn says after its first `shared` messages, the reply included."""
    return [*turn.messages[shared:], *(() if turn.answer is None else (turn.answer,))]


def _tokens(turn: FinishedTurn, base_len: int) -> dict[str, Any]:
    """The columns with tokens: what the prompt adds to its base, and how the history differs from
    prompt and output (one cut by a stop string does, and one without a reply)."""
    prompt = turn.prompt_ids[base_len:]
    said, kept = np.concatenate([prompt, turn.output_ids]), turn.history_ids[base_len:]
    equal = _common_len(said, kept)
    return {
        "base_len": base_len,
        "prompt_ids": prompt,
        "output_ids": turn.output_ids,
        "history_len": min(base_len + equal, len(turn.history_ids)),
        "history_tail": kept[equal:],
    }


def _common_len(a: IntArray, b: IntArray) -> int:
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def _counts(turn: FinishedTurn) -> dict[str, Any]:
    usage = turn.usage
    return {
        "depth": turn.index,
        "tip": turn.tip,
        "num_messages": len(turn.messages),
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "output_tokens": usage.output_tokens,
        "cached_by_tier": dict(usage.cached_by_tier),
        "ttft_s": usage.ttft_s,
        "total_s": usage.total_s,
        "finish_reason": turn.finish_reason,
    }


def _toolset(
    connection: Connection, tools: Sequence[Mapping[str, Any]] | None, base: _Written | None
) -> str | None:
    """The digest that the tools stand under; their order and that of their keys count."""
    if not tools:
        return None
    if base is not None and tools is base.tools:
        return base.toolset
    digest = hashlib.sha256(dumps(list(tools)).encode()).hexdigest()
    if connection.scalar(_FIND_TOOLSET, {"toolset": digest}) is None:
        # another process may be adding the same ones
        with suppress(IntegrityError), connection.begin_nested():
            connection.execute(_ADD_TOOLSET, {"digest": digest, "tools": list(tools)})
    return digest
