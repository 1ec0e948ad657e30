"""What a store keeps of the turns it has written grows with them, not with their square."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentcache.engine.append_log import AppendLog, TokenLog
from agentcache.session.history import History
from agentcache.store.base import FinishedTurn, SessionKey
from agentcache.store.database import Database, url_of
from agentcache.store.writing import TurnWriter
from agentcache.types import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TURNS = 60
KEY = SessionKey("line", None, None, 1)
NEW = [{"role": "user", "content": f"Result {number}."} for number in range(6)]


class Line:
    """A session whose turns are written as they end, and all of which can be gone back to."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.writer = TurnWriter("tiny", "0")
        self.histories: list[History] = []

    def turn(self) -> None:
        """Ask, be answered, have it written."""
        last = self.histories[-1] if self.histories else None
        messages: AppendLog[Any] = AppendLog() if last is None else last.messages
        tokens = TokenLog(np.empty(0, np.int32)) if last is None else last.tokens
        shared = len(tokens)
        asked = messages.extend(NEW)
        answer = {"role": "assistant", "content": "yes"}
        prompt = tokens.extend(np.arange(3, dtype=np.int32))
        said = prompt.extend(np.arange(2, dtype=np.int32))
        history = History(said, len(said), messages=asked.extend([answer]), has_reply=True)
        self.histories.append(history)
        turn = FinishedTurn(
            session=KEY,
            session_closed=False,
            tip=0,
            index=len(self.histories),
            history=history,
            after=last,
            shared_len=shared,
            prompt_ids=prompt.ids,
            output_ids=np.arange(2, dtype=np.int32),
            history_ids=said.ids,
            messages=asked,
            answer=answer,
            tools=None,
            finish_reason="stop",
            usage=Usage(len(prompt), shared, 3, 2, 0.0, 0.0),
            miss=lambda: None,
        )
        self.writer.write(self.database, turn, 0.0)

    def turns(self, num: int) -> int:
        """Some turns more; the bytes that are held for them."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num):
            self.turn()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    database = Database(url_of(tmp_path / "runs.db"))
    yield Line(database)
    database.close()


def test_twice_as_many_turns_take_twice_the_memory(line: Line) -> None:
    line.turns(TURNS)  # and what is only made once
    tracemalloc.start()
    try:
        once, twice = line.turns(TURNS), line.turns(2 * TURNS)
    finally:
        tracemalloc.stop()

    # Turns 61 to 120 against 121 to 240: 2 where each costs the same, 4 where it is the square.
    assert twice / once < 2.6
