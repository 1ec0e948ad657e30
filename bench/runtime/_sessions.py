"""Sessions of coding agents over recorded runs: several in turn, and one that comes back.

A session is a system prompt with tools that all share, a task of its own, and turns of a recorded
run: a reply of a fixed number of ids, then what the tool printed, cut at a length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from agentcache.replay.trace import Trajectory
    from agentcache.types import IntArray

__all__ = ["HEAD_LEN", "NUM_OTHERS", "NUM_SESSIONS", "NUM_TURNS", "TOOLS", "Scenarios", "Step"]

NUM_SESSIONS, NUM_TURNS, NUM_OTHERS = 8, 3, 20
HEAD_LEN, TASK_LEN, OBSERVATION_LEN, REPLY_LEN = 2331, 700, 350, 24
_LEAST_OBSERVATION_LEN = 100
"""Turns of which the tool said less are left out: agents that read files see more than that."""

Message = dict[str, Any]

_TOOLS = {
    "bash": ("Runs a command in the checkout.", {"command": "what to run, as one line"}),
    "view": ("Shows part of a file.", {"path": "which file", "start": "the first line shown"}),
    "replace": ("Replaces text in a file.", {"path": "which file", "old": "what", "new": "by"}),
    "grep": ("Finds lines in files.", {"pattern": "what they match", "folder": "where to look"}),
    "submit": ("Hands the change in.", {"summary": "what was changed, in one sentence"}),
}

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": what,
            "parameters": {
                "type": "object",
                "properties": {
                    argument: {"type": "string", "description": meaning}
                    for argument, meaning in arguments.items()
                },
                "required": list(arguments),
            },
        },
    }
    for name, (what, arguments) in _TOOLS.items()
)
"""What every session may call."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call. new: the messages since the session's last reply, all of them on its first call.

    reply: recorded ids that become history. closed: sessions that end before the call.
    """

    session: str
    new: tuple[Message, ...]
    reply: IntArray
    tag: str
    closed: tuple[str, ...] = ()


class Scenarios:
    """The calls of both scenarios, as messages.

    tokenizer: of transformers, with a chat template. runs: recorded ones that begin with a system
    prompt and a task; `policy` is one whose system prompt is long. head_len: about how many tokens
    system prompt and tools have.
    """

    def __init__(
        self,
        tokenizer: Any,
        runs: Sequence[Trajectory],
        policy: Trajectory,
        head_len: int = HEAD_LEN,
    ) -> None:
        self._tokenizer = tokenizer
        self._tasks = [_content(run, 1) for run in runs]
        self._turns = [self._turns_of(run) for run in runs]
        text = "\n\n".join([_content(runs[0], 0), _content(policy, 0), self._tasks[0]])
        beside = len(self._head_of(""))
        self._system = {"role": "system", "content": self._cut(text, max(1, head_len - beside))}

    @property
    def head(self) -> IntArray:
        """The ids of system prompt and tools, as the template renders them alone."""
        return self._head_of(self._system["content"])

    def interleaved(self, sessions: int = NUM_SESSIONS, turns: int = NUM_TURNS) -> Iterator[Step]:
        """Sessions that take turns, each with a task of its own."""
        for turn in range(turns):
            for number in range(sessions):
                run = number % len(self._turns)
                place, id = turn + number % 3, f"i{number}"
                if turn == 0:
                    new = self._first(f"Task {number} of the list.", run)
                    tag = "shared-prefix" if number else "first"
                else:
                    new, tag = (self._turns[run][place - 1][1],), "grow"
                yield Step(id, new, self._turns[run][place][0], tag)

    def returning(self, others: int = NUM_OTHERS) -> Iterator[Step]:
        """A session of three turns that comes back for two more after others had one each."""
        mine, theirs = self._turns[0], self._turns[-1]
        yield Step("r0", self._first("", 0), mine[0][0], "first")
        for turn in (1, 2):
            yield Step("r0", (mine[turn - 1][1],), mine[turn][0], "grow")
        before: tuple[str, ...] = ()
        for number in range(others):
            id, reply = f"o{number}", theirs[number % len(theirs)][0]
            yield Step(id, self._first(f"Issue {number}:", -1), reply, "other", before)
            before = (id,)
        yield Step("r0", (mine[2][1],), mine[3][0], "return", before)
        yield Step("r0", (mine[3][1],), mine[4][0], "grow")

    def _first(self, title: str, run: int) -> tuple[Message, ...]:
        task = self._cut(f"{title}\n{self._tasks[run]}", TASK_LEN)
        return self._system, {"role": "user", "content": task}

    def _turns_of(self, run: Trajectory) -> list[tuple[IntArray, Message]]:
        """(reply, what the tool said to it) of the turns whose tool said enough."""
        said = [message.get("content") or "" for message in run.calls[-1].messages[2:]]
        out = []
        for reply, observation in zip(said[::2], said[1::2], strict=False):
            if reply and len(self._ids(observation)) >= _LEAST_OBSERVATION_LEN:
                cut = {"role": "user", "content": self._cut(observation, OBSERVATION_LEN)}
                out.append((self._reply(reply), cut))
        return out

    def _reply(self, text: str) -> IntArray:
        """The first ids of a recorded reply; a short one is said again and again."""
        return np.resize(np.array(self._ids(text)[:REPLY_LEN], dtype=np.int32), REPLY_LEN)

    def _cut(self, text: str, length: int) -> str:
        return str(self._tokenizer.decode(self._ids(text)[:length]))

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _head_of(self, system: str) -> IntArray:
        given = [{"role": "system", "content": system}]
        text = self._tokenizer.apply_chat_template(given, tools=list(TOOLS), tokenize=False)
        return np.array(self._ids(text), dtype=np.int32)


def _content(run: Trajectory, place: int) -> str:
    return str(run.calls[0].messages[place]["content"])
