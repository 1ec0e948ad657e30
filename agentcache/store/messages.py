"""Rows of messages, as turns are written and as they are written anew."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from sqlalchemy import insert

from agentcache.store.schema import Message, dumps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from sqlalchemy import Connection

__all__ = ["digest_of", "write_messages"]

_ADD_MESSAGES = insert(Message)


def digest_of(value: Any) -> str:
    """Hex digest of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(dumps(value, sort_keys=True).encode()).hexdigest()


def write_messages(
    connection: Connection, turn: int, messages: Sequence[Mapping[str, Any]], first: int = 0
) -> None:
    """Messages that belong to a turn; `first` is the position of the first of them."""
    rows = [
        {"turn_id": turn, "position": at, "digest": digest_of(message), "message": dict(message)}
        for at, message in enumerate(messages, first)
    ]
    if rows:
        connection.execute(_ADD_MESSAGES, rows)
