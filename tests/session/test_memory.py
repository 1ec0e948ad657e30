"""What a session keeps grows with its turns, not with their square."""

from __future__ import annotations

import gc
import tracemalloc
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from transformers import AutoTokenizer

from agentcache.engine.chat import ChatFormat
from agentcache.engine.tiny_hybrid import hybrid_path
from agentcache.engine.tokenizer import Tokenizer
from agentcache.session.prompts import PromptBuilder
from agentcache.sessions.registry import SessionRecord

if TYPE_CHECKING:
    from agentcache.session.history import History, SessionTip

TURNS = 60
TOKENIZER = Tokenizer(AutoTokenizer.from_pretrained(hybrid_path("tiny-hybrid")))
(END_ID,) = TOKENIZER.end_ids()


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    return PromptBuilder(ChatFormat(TOKENIZER), TOKENIZER, TOKENIZER.vocab_size)


class Line:
    """One session without a model behind it: each question is answered with the same word."""

    def __init__(self, builder: PromptBuilder, way: str) -> None:
        self.builder = builder
        self.record: SessionRecord[History] = SessionRecord("line", None, 1)
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        self.way = way
        self.reply = builder.replay_ids("yes", cast("Any", None), END_ID)

    @property
    def tip(self) -> SessionTip | None:
        return self.record.tip(None)

    def turn(self, question: dict[str, Any]) -> None:
        """Ask, and be answered."""
        tip = self.tip
        if tip is None or self.way != "chat":
            sent = [dict(message) for message in (*self.messages, question)]
            prompt = self.builder.from_messages(sent, None, () if tip is None else (tip,))
        else:
            prompt = self.builder.from_new([question], None, tip)
        message = self.builder.read_reply(prompt, "yes").message
        end = len(prompt.ids) + len(self.reply)
        history = self.builder.extend(prompt, self.reply, end, message)
        self.record.advance(prompt.tip, prompt.shared_len, history, cast("Any", None))
        self.messages += [question, message]

    def turns(self, num: int) -> int:
        """Some turns more; the bytes that are held for them."""
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(num):
            self.turn({"role": "user", "content": "go on"})
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before


@pytest.mark.parametrize("way", ["chat", "complete"])
def test_twice_as_many_turns_take_twice_the_memory(builder: PromptBuilder, way: str) -> None:
    line = Line(builder, way)
    line.turns(TURNS)  # and what is only made once
    tracemalloc.start()
    try:
        once, twice = line.turns(TURNS), line.turns(2 * TURNS)
    finally:
        tracemalloc.stop()

    # Turns 61 to 120 against 121 to 240: 2 where each costs the same, 4 where it is the square.
    assert 1.5 < twice / once < 2.6


def test_every_turn_can_still_be_stood_at(builder: PromptBuilder) -> None:
    line = Line(builder, "complete")
    line.turns(20)
    last = line.tip
    assert last is not None

    for index in range(1, 21):
        history = last.ancestor(index).history
        assert [*history.messages] == line.messages[: 2 * index + 1]
        assert history.ids.tolist() == last.history.ids[: len(history)].tolist()
        assert [token for part in history.parts for token in part.ids] == history.ids.tolist()


def test_turns_before_an_edit_share_the_memory_of_what_follows_it(builder: PromptBuilder) -> None:
    line = Line(builder, "complete")
    for number in range(12):
        if number % 4 == 3:
            line.messages[-2] = {"role": "user", "content": f"Edited: {number}"}
        line.turn({"role": "user", "content": f"go on with {number}"})
    last = line.tip
    assert last is not None
    assert last.index == 9  # each edit took the place of a turn

    ids = last.history.ids
    for index in range(1, last.index):
        before = last.ancestor(index).history.ids
        assert before.tolist() == ids[: len(before)].tolist()
        assert np.shares_memory(before, ids)
