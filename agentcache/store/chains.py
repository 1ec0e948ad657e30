"""Turns put together again from what each added to the one before it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import delete, select, update
from sqlalchemy.orm import aliased

from agentcache.errors import StoreDamaged
from agentcache.store.messages import write_messages
from agentcache.store.schema import Message, Turn

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from sqlalchemy import Connection, RowMapping

    from agentcache.types import IntArray

__all__ = ["Chains", "Link", "detach"]

Messages = tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """A turn, whole: its prompt, what was said, and the trajectory that others go on from."""

    prompt: IntArray
    output: IntArray
    history: IntArray
    messages: Messages
    answer: dict[str, Any] | None

    @property
    def listed(self) -> Messages:
        """The messages with the reply."""
        return self.messages if self.answer is None else (*self.messages, self.answer)


class Chains:
    """Links of turns that are asked for once each, in order.

    bases: what they go on from, each as often as it is; a link is kept until then.
    """

    def __init__(self, connection: Connection, bases: Iterable[int | None] = ()) -> None:
        self._connection = connection
        self._links: dict[int, Link] = {}
        self._needed = Counter(base for base in bases if base is not None)

    def link(self, turn: int) -> Link:
        """Raises StoreDamaged where a turn it goes on from is missing."""
        row = self._row(turn)
        path = [row]
        while row["base_id"] is not None and row["base_id"] not in self._links:
            row = self._row(row["base_id"])
            path.append(row)
        base = None if row["base_id"] is None else self._links[row["base_id"]]
        for row in reversed(path):
            base = self._joined(row, base)
            if self._needed[row["id"]]:
                self._links[row["id"]] = base
        assert base is not None
        self._leave(path[0]["base_id"])
        return base

    def _leave(self, base: int | None) -> None:
        if base is None:
            return
        self._needed[base] -= 1
        if not self._needed[base]:
            self._links.pop(base, None)

    def _row(self, turn: int) -> RowMapping:
        query = select(Turn.__table__).where(Turn.id == turn)
        row = self._connection.execute(query).mappings().one_or_none()
        if row is None:
            raise StoreDamaged(f"turn {turn} is missing, which others go on from; prune those")
        return row

    def _joined(self, row: RowMapping, base: Link | None) -> Link:
        """A turn behind its base. Raises StoreDamaged where the lengths do not fit."""
        known = np.empty(0, np.int32) if base is None else base.history[: row["base_len"]]
        before = () if base is None else base.listed[: row["base_messages"]]
        query = (
            select(Message.message).where(Message.turn_id == row["id"]).order_by(Message.position)
        )
        listed = (*before, *self._connection.scalars(query))
        prompt = np.concatenate([known, row["prompt_ids"]])
        if len(known) != row["base_len"] or len(prompt) != row["prompt_tokens"]:
            raise StoreDamaged(
                f"turn {row['id']} has {len(prompt)} of {row['prompt_tokens']} prompt tokens; "
                "prune its session"
            )
        said = np.concatenate([prompt, row["output_ids"]])
        end = row["num_messages"]
        return Link(
            prompt=prompt,
            output=row["output_ids"],
            history=np.concatenate([said[: row["history_len"]], row["history_tail"]]),
            messages=listed[:end],
            answer=listed[end] if end < len(listed) else None,
        )


def detach(connection: Connection, gone: Collection[int]) -> None:
    """Write turns whole that go on from a turn of a session that will be deleted."""
    base = aliased(Turn)
    query = select(Turn.id, Turn.session_id, base.session_id.label("from_session")).join(
        base, Turn.base_id == base.id
    )
    staying = [
        row["id"]
        for row in connection.execute(query.where(Turn.session_id != base.session_id)).mappings()
        if row["from_session"] in gone and row["session_id"] not in gone
    ]
    for turn in staying:
        _write_whole(connection, turn, Chains(connection).link(turn))


def _write_whole(connection: Connection, turn: int, link: Link) -> None:
    first = connection.scalar(select(Turn.base_messages).where(Turn.id == turn)) or 0
    connection.execute(
        update(Turn)
        .where(Turn.id == turn)
        .values(base_id=None, base_len=0, base_messages=0, prompt_ids=link.prompt)
    )
    connection.execute(delete(Message).where(Message.turn_id == turn, Message.position < first))
    write_messages(connection, turn, link.listed[:first])
