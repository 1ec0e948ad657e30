"""How often `tiny-agent` says what is right: whole calls and whole answers, by kind of turn.

The model is asked through a function, as an agent's loop would ask it, and gets the scripted result
of each tool. After a wrong reply the dialogue goes on with the right one, so that one error counts
once.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from agentcache.engine.tiny.dialogues import KINDS, draw_dialogue

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from agentcache.engine.tiny.dialogues import Dialogue, Message

__all__ = ["Ask", "Score", "Tally", "held_out_dialogues", "is_right", "judge"]


class Ask(Protocol):
    """One call of the model: the message it says after `messages`."""

    async def __call__(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> Message: ...


@dataclass(slots=True)
class Score:
    """How many were right, of how many."""

    right: int = 0
    total: int = 0

    def count(self, is_right: bool) -> None:
        self.right += is_right
        self.total += 1

    @property
    def share(self) -> float:
        """Of one; one if there were none."""
        return self.right / self.total if self.total else 1.0


@dataclass(slots=True)
class Tally:
    """Scores by (length of the dialogue in turns, kind of turn), and what was wrong."""

    calls: defaultdict[tuple[int, str], Score] = field(default_factory=lambda: defaultdict(Score))
    answers: defaultdict[tuple[int, str], Score] = field(default_factory=lambda: defaultdict(Score))
    wrong: list[tuple[str, Message, Message]] = field(default_factory=list)

    def sums(self, lengths: Iterable[int], kinds: Iterable[str] = KINDS) -> tuple[Score, Score]:
        """Calls and answers over those lengths and kinds."""
        keys = [(length, kind) for length in lengths for kind in kinds]
        return _sum(self.calls, keys), _sum(self.answers, keys)


def held_out_dialogues(count: int, seed: int = 0, max_turns: int = 8) -> list[Dialogue]:
    """Dialogues of one to `max_turns` turns in turn, by a seed that no training draws from."""
    draws = random.Random(f"evaluation {seed}")
    return [draw_dialogue(draws, num_turns=1 + i % max_turns) for i in range(count)]


async def judge(dialogue: Dialogue, ask: Ask, tally: Tally) -> None:
    """Have every reply of a dialogue said, and count it in `tally`."""
    for turn in dialogue.turns:
        key = (len(dialogue.turns), turn.kind)
        for at in range(turn.start, turn.stop):
            expected = dialogue.messages[at]
            if expected["role"] != "assistant":
                continue
            said = await ask(dialogue.messages[:at], dialogue.tools)
            right = is_right(said, expected)
            (tally.calls if expected.get("tool_calls") else tally.answers)[key].count(right)
            if not right:
                tally.wrong.append((turn.kind, said, expected))


def is_right(said: Message, expected: Message) -> bool:
    """Whether a message says the same: its text, and its calls up to their ids."""
    return _text(said) == _text(expected) and _calls(said) == _calls(expected)


def _text(message: Message) -> str:
    return message.get("content") or ""


def _calls(message: Message) -> list[tuple[Any, Any]]:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    return [(function["name"], _parsed(function["arguments"])) for function in functions]


def _parsed(arguments: Any) -> Any:
    """Arguments as a mapping; those that are no JSON stay text, and so are wrong."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _sum(scores: dict[tuple[int, str], Score], keys: Iterable[tuple[int, str]]) -> Score:
    found = [scores[key] for key in keys if key in scores]
    return Score(sum(each.right for each in found), sum(each.total for each in found))
