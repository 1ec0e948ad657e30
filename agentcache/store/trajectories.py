"""The store as its users hold it: recording for a runtime, reading, pruning."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select, delete, func, or_, select

from agentcache.errors import ConfigError
from agentcache.store.chains import Chains, detach
from agentcache.store.database import Database, url_of
from agentcache.store.recording import ThreadRecorder
from agentcache.store.schema import Session, Toolset, Turn
from agentcache.store.writing import TurnWriter, session_digest
from agentcache.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from types import TracebackType

    from sqlalchemy import RowMapping

    from agentcache.store.base import Recorder
    from agentcache.types import IntArray

__all__ = ["Store", "StoredCall", "StoredSession", "StoredTurn"]


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One opening of a session. number: of its row; an id opened again has several. fingerprint: of
    the model with its tokenizer. created, last, closed: unix seconds of its first and last turn and
    of its end, where it was closed."""

    number: int
    id: str
    tenant: str | None
    parent: str | None
    model: str
    fingerprint: str
    created: float
    last: float
    closed: float | None
    turns: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A finished call. number: in the order of finishing. index, tip: as in `Turn`. miss: the
    report as JSON. created: unix seconds of its end."""

    number: int
    index: int
    tip: int | None
    messages: int
    finish_reason: str
    usage: Usage
    miss: dict[str, Any] | None
    created: float


@dataclass(frozen=True, slots=True, eq=False)
class StoredCall:
    """A turn with all of its prompt and reply. reply_ids: the output as far as the answer says it;
    it differs where a stop string cut the reply. messages: none where the prompt was given in ids;
    answer: None where no reply was asked for."""

    turn: StoredTurn
    prompt_ids: IntArray
    output_ids: IntArray
    reply_ids: IntArray
    messages: tuple[dict[str, Any], ...]
    answer: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


class Store:
    """Finished turns in a database: `Store("runs.db")`, `Store("postgresql+psycopg://host/name")`.

    create: make the database or bring an older schema up to date; without it there has to be one.
    capacity: how many finished turns of a runtime may wait to be written before further calls wait
    too. now: unix seconds. Safe from any thread.

    >>> with Store("runs.db") as store:                                        # doctest: +SKIP
    ...     rt = Runtime.load("tiny-hybrid", store=store)
    ...     ...
    ...     for call in store.calls(store.sessions("task-1")[0]):
    ...         print(call.turn.usage, call.messages[-1])

    Raises ConfigError for a URL that cannot work; StoreUnavailable, StoreDamaged, StoreVersion.
    """

    def __init__(
        self,
        target: str | Path,
        *,
        create: bool = True,
        capacity: int = 256,
        now: Callable[[], float] = time.time,
    ) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity is {capacity}; at least 1 turn has to be able to wait")
        self._capacity = capacity
        self._now = now
        self._database = Database(url_of(target), create=create)

    @property
    def url(self) -> str:
        """Where it is, without a password."""
        return str(self._database)

    def record(
        self, *, model: str, fingerprint: str, end: Callable[[], None] = lambda: None
    ) -> Recorder:
        """Begin to record one runtime. end: called once its recorder is closed."""
        return ThreadRecorder(
            self._database,
            TurnWriter(model, fingerprint),
            capacity=self._capacity,
            now=self._now,
            end=end,
        )

    def sessions(
        self, id: str | None = None, *, tenants: tuple[str | None, ...] | None = None
    ) -> list[StoredSession]:
        """Sessions in the order of their first turns; those of an id, of some tenants, or all.

        Raises StoreError, as does everything that reads.
        """
        with self._database.reading() as connection:
            rows = connection.execute(_sessions(id, tenants)).mappings()
            return [StoredSession(**row) for row in rows]

    def turns(self, session: StoredSession) -> list[StoredTurn]:
        """A session's turns in the order in which they finished."""
        query = select(*_TURN).where(Turn.session_id == session.number).order_by(Turn.number)
        with self._database.reading() as connection:
            return [_turn(row) for row in connection.execute(query).mappings()]

    def calls(self, session: StoredSession) -> Iterator[StoredCall]:
        """The same with tokens, messages and tools put together again, one at a time."""
        query = (
            select(*_TURN, Turn.id, Turn.base_id, Toolset.tools)
            .outerjoin(Toolset, Toolset.digest == Turn.toolset)
            .where(Turn.session_id == session.number)
            .order_by(Turn.number)
        )
        with self._database.reading() as connection:
            rows = list(connection.execute(query).mappings())
            chains = Chains(connection, [row["base_id"] for row in rows])
            for row in rows:
                link = chains.link(row["id"])
                yield StoredCall(
                    turn=_turn(row),
                    prompt_ids=link.prompt,
                    output_ids=link.output,
                    reply_ids=link.history[len(link.prompt) :],
                    messages=link.messages,
                    answer=link.answer,
                    tools=row["tools"],
                )

    def prune(self, *, closed: bool = False, before: float | None = None) -> int:
        """Delete sessions, and return how many: those that are closed, those without a turn since
        `before` in unix seconds, or where both are given, those of which both is true.

        What sessions that stay have in common with them is copied first. Raises ConfigError where
        neither is given: that would be all of them.
        """
        if not closed and before is None:
            raise ConfigError("nothing says what to prune; give closed=True, before=, or both")
        last = func.coalesce(func.max(Turn.created), Session.created)
        query = select(Session.id).outerjoin(Turn, Turn.session_id == Session.id)
        if closed:
            query = query.where(Session.closed.is_not(None))
        query = query.group_by(Session.id)
        if before is not None:
            query = query.having(last < before)
        with self._database.writing() as connection:
            gone = list(connection.scalars(query))
            detach(connection, frozenset(gone))
            for number in gone:
                connection.execute(delete(Session).where(Session.id == number))
            used = select(Turn.toolset).where(Turn.toolset == Toolset.digest)
            connection.execute(delete(Toolset).where(~used.exists()))
        return len(gone)

    def close(self) -> None:
        """Let the database go. Runtimes that record here have to be closed before."""
        self._database.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


_TURN = (
    Turn.number,
    Turn.depth,
    Turn.tip,
    Turn.num_messages,
    Turn.finish_reason,
    Turn.prompt_tokens,
    Turn.cached_tokens,
    Turn.computed_tokens,
    Turn.output_tokens,
    Turn.cached_by_tier,
    Turn.ttft_s,
    Turn.total_s,
    Turn.miss,
    Turn.created,
)


def _turn(row: RowMapping) -> StoredTurn:
    return StoredTurn(
        number=row["number"],
        index=row["depth"],
        tip=row["tip"],
        messages=row["num_messages"],
        finish_reason=row["finish_reason"],
        usage=Usage(
            prompt_tokens=row["prompt_tokens"],
            cached_tokens=row["cached_tokens"],
            computed_tokens=row["computed_tokens"],
            output_tokens=row["output_tokens"],
            ttft_s=row["ttft_s"],
            total_s=row["total_s"],
            cached_by_tier=tuple(row["cached_by_tier"].items()),
        ),
        miss=row["miss"],
        created=row["created"],
    )


def _sessions(id: str | None, tenants: tuple[str | None, ...] | None) -> Select[*tuple[Any, ...]]:
    """Sessions with the sums over their turns."""
    query: Select[*tuple[Any, ...]] = (
        select(
            Session.id.label("number"),
            Session.name.label("id"),
            Session.tenant,
            Session.parent,
            Session.model,
            Session.fingerprint,
            Session.created,
            func.coalesce(func.max(Turn.created), Session.created).label("last"),
            Session.closed,
            func.count(Turn.id).label("turns"),
            *(
                func.coalesce(func.sum(column), 0).label(column.key)
                for column in (Turn.prompt_tokens, Turn.cached_tokens, Turn.output_tokens)
            ),
        )
        .outerjoin(Turn, Turn.session_id == Session.id)
        .group_by(Session.id)
        .order_by(Session.id)
    )
    if id is not None:
        query = query.where(Session.name == id)
    if id is not None and tenants is not None:
        query = query.where(Session.key.in_([session_digest(id, tenant) for tenant in tenants]))
    elif tenants is not None:
        named = [tenant for tenant in tenants if tenant is not None]
        nobody = Session.tenant.is_(None) if None in tenants else Session.tenant.in_([])
        query = query.where(or_(nobody, Session.tenant.in_(named)))
    return query
