"""The tables, in types that SQLite and PostgreSQL both have.

sessions   one row per opening of a session
turns      one row per finished call; its tokens and messages follow those of the turn `base_id`
messages   the messages that are new in a turn; the reply comes after the last of the prompt
toolsets   lists of tools by digest

History of a turn = (prompt + output)[:history_len] + history_tail
Prompt of a turn  = history of its base [:base_len] + prompt_ids
Messages          = those of its base, reply included, [:base_messages] + its rows
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from sqlalchemy import (
    BigInteger,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

if TYPE_CHECKING:
    from sqlalchemy import Dialect

    from agentcache.types import IntArray

__all__ = ["AnyText", "Base", "Json", "Message", "Session", "TokenIds", "Toolset", "Turn", "dumps"]

_UNSTORABLE = re.compile("[\\\\\x00\ud800-\udfff]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")

_Number = BigInteger().with_variant(Integer, "sqlite")


def _escaped(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """JSON text that every database can hold: what has no encoding stands as an escape."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, default=str)
    return _SURROGATE.sub(_escaped, text)


class AnyText(TypeDecorator[str]):
    """Any string. Backslashes, NUL and unpaired surrogates are written as escapes."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else _UNSTORABLE.sub(_escaped, value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> str | None:
        if value is None:
            return None
        return _ESCAPE.sub(lambda match: chr(int(match[1], 16)), value)


class Json(TypeDecorator[Any]):
    """A JSON value, keys in the order they had; templates may render them in it."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else dumps(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> Any:
        return None if value is None else json.loads(value)


class TokenIds(TypeDecorator["IntArray"]):
    """Token ids, four bytes each, least byte first."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: IntArray | None, dialect: Dialect) -> bytes | None:
        return None if value is None else np.asarray(value, dtype="<i4").tobytes()

    def process_result_value(self, value: bytes | None, dialect: Dialect) -> IntArray | None:
        return None if value is None else np.frombuffer(value, dtype="<i4").astype(np.int32)


class Base(DeclarativeBase):
    """Of every table."""


class Session(Base):
    """key: digest of tenant and name, which may be longer than an index can hold. run, generation:
    which opening it was. closed: None where it was never closed, or its process ended first."""

    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("run", "generation", name="sessions_opening"),
        Index("sessions_key", "key"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    key: Mapped[str] = mapped_column(String(64))
    name: Mapped[str] = mapped_column(AnyText)
    tenant: Mapped[str | None] = mapped_column(AnyText)
    parent: Mapped[str | None] = mapped_column(AnyText)
    model: Mapped[str] = mapped_column(AnyText)
    fingerprint: Mapped[str] = mapped_column(String(64))
    run: Mapped[str] = mapped_column(String(32))
    generation: Mapped[int] = mapped_column(_Number)
    created: Mapped[float] = mapped_column(Double)
    closed: Mapped[float | None] = mapped_column(Double)


class Toolset(Base):
    """A list of tools, which many turns give again."""

    __tablename__ = "toolsets"

    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    tools: Mapped[Any] = mapped_column(Json, nullable=False)


class Turn(Base):
    """number: in the order of finishing, from 1. depth: turns on the path to it. created: when it
    was finished, in unix seconds."""

    __tablename__ = "turns"
    __table_args__ = (
        UniqueConstraint("session_id", "number", name="turns_number"),
        Index("turns_base", "base_id"),
        Index("turns_toolset", "toolset"),
        {"sqlite_autoincrement": True},
    )

    id: Mapped[int] = mapped_column(_Number, primary_key=True)
    session_id: Mapped[int] = mapped_column(
        _Number, ForeignKey("sessions.id", name="turns_session", ondelete="CASCADE")
    )
    number: Mapped[int] = mapped_column(Integer)
    depth: Mapped[int] = mapped_column(Integer)
    tip: Mapped[int | None] = mapped_column(Integer)
    base_id: Mapped[int | None] = mapped_column(
        _Number, ForeignKey("turns.id", name="turns_base_turn", ondelete="SET NULL")
    )
    base_len: Mapped[int] = mapped_column(Integer)
    base_messages: Mapped[int] = mapped_column(Integer)
    num_messages: Mapped[int] = mapped_column(Integer)
    toolset: Mapped[str | None] = mapped_column(
        String(64), ForeignKey("toolsets.digest", name="turns_tools")
    )
    prompt_ids: Mapped[Any] = mapped_column(TokenIds, nullable=False)
    output_ids: Mapped[Any] = mapped_column(TokenIds, nullable=False)
    history_len: Mapped[int] = mapped_column(Integer)
    history_tail: Mapped[Any] = mapped_column(TokenIds, nullable=False)
    prompt_tokens: Mapped[int] = mapped_column(Integer)
    cached_tokens: Mapped[int] = mapped_column(Integer)
    computed_tokens: Mapped[int] = mapped_column(Integer)
    output_tokens: Mapped[int] = mapped_column(Integer)
    cached_by_tier: Mapped[Any] = mapped_column(Json, nullable=False)
    ttft_s: Mapped[float] = mapped_column(Double)
    total_s: Mapped[float] = mapped_column(Double)
    finish_reason: Mapped[str] = mapped_column(String(32))
    miss: Mapped[Any | None] = mapped_column(Json)
    created: Mapped[float] = mapped_column(Double)


class Message(Base):
    """A message of a turn's prompt, or at position `num_messages` the reply to it. digest: of its
    JSON with sorted keys."""

    __tablename__ = "messages"

    turn_id: Mapped[int] = mapped_column(
        _Number,
        ForeignKey("turns.id", name="messages_turn", ondelete="CASCADE"),
        primary_key=True,
    )
    position: Mapped[int] = mapped_column(Integer, primary_key=True)
    digest: Mapped[str] = mapped_column(String(64))
    message: Mapped[Any] = mapped_column(Json, nullable=False)
