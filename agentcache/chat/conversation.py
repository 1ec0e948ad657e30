"""What is said in a chat: its sessions, which of them is spoken to, and how it goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.errors import InvalidRequest, SessionError
from agentcache.replay.trace import Call, Trajectory, write_calls_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from agentcache.runtime import Runtime
    from agentcache.session import CallOptions, Session, Turn, TurnStream

__all__ = ["Branch", "Conversation"]


@dataclass(slots=True)
class Branch:
    """One of a chat's sessions. last: the turn made here last, whether it was rewound or not."""

    session: Session
    system: str | None
    last: Turn | None = None

    @property
    def name(self) -> str:
        return self.session.id

    @property
    def num_turns(self) -> int:
        """How many turns lead to where it stands."""
        turns: int = self.session.stats()["turns"]
        return turns


class Conversation:
    """Sessions of one runtime by name; what is said goes to the present one."""

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        *,
        system: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: CallOptions,
    ) -> None:
        self.runtime = runtime
        self._tools = tools
        self._options = options
        self.present = Branch(runtime.session(name), system)
        self._branches = {name: self.present}

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches.values())

    def say(self, text: str) -> TurnStream:
        """Ask the present session. Raises what `Session.chat` does."""
        return self._ask([{"role": "user", "content": text}])

    def answer(self, text: str) -> TurnStream:
        """Give the result of the last reply's tool call; of several calls, a JSON list of texts.

        Raises InvalidRequest where there is no call, or another number of them.
        """
        messages = self.present.session.messages
        calls = (messages[-1].get("tool_calls") or []) if messages else []
        if not calls:
            raise InvalidRequest("the last reply calls no tool; there is nothing to give to it")
        texts = [text] if len(calls) == 1 else _texts(text, len(calls))
        return self._ask(
            [
                {"role": "tool", "tool_call_id": call.get("id"), "content": each}
                for call, each in zip(calls, texts, strict=True)
            ]
        )

    def _ask(self, new: list[dict[str, Any]]) -> TurnStream:
        branch = self.present
        tools = None
        if not branch.session.tips:  # the head is sent once, and again after a rewind to before it
            tools = self._tools
            if branch.system is not None:
                new = [{"role": "system", "content": branch.system}, *new]
        return branch.session.chat(new, tools=tools, stream=True, **self._options)

    def fork(self, name: str | None = None) -> Branch:
        """Go on in a fork of the present session. Raises SessionError for a name that is taken."""
        present = self.present
        session = present.session.fork(name or self._free_name())
        self.present = Branch(session, present.system, present.last)
        self._branches[session.id] = self.present
        return self.present

    def _free_name(self) -> str:
        first, number = next(iter(self._branches)), 2
        while f"{first}-{number}" in self._branches:
            number += 1
        return f"{first}-{number}"

    def switch(self, name: str) -> Branch:
        """Go on in another session. Raises SessionError."""
        if name not in self._branches:
            known = ", ".join(self._branches)
            raise SessionError(f"there is no session {name!r}; there are {known}")
        self.present = self._branches[name]
        return self.present

    def rewind(self, to_turn: int | None = None) -> None:
        """Stand again at the end of that turn; by default one turn back. Raises UnknownTip."""
        back = max(0, self.present.num_turns - 1)
        self.present.session.rewind(back if to_turn is None else to_turn)

    def set_system(self, text: str) -> None:
        """Another system prompt. Raises InvalidRequest once there is a turn that has one."""
        if self.present.session.tips:
            raise InvalidRequest("the first turn has been made; /rewind 0 goes back before it")
        self.present.system = text or None

    def save(self, path: Path) -> int:
        """Write the present session's calls as `agentcache replay` reads them; how many.

        Raises InvalidRequest where there are none, TraceError where it cannot be written.
        """
        session = self.present.session
        messages = tuple(session.messages)
        tools = None if self._tools is None else tuple(dict(tool) for tool in self._tools)
        calls = tuple(
            Call(messages[:index], tools, message)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        )
        if not calls:
            raise InvalidRequest("there is no reply yet, so there is nothing to save")
        trajectory = Trajectory(session.id, str(path), "calls-jsonl", calls, session.parent)
        return write_calls_jsonl([trajectory], path)


def _texts(text: str, count: int) -> list[str]:
    """Texts from a JSON list of that length."""
    try:
        texts = json.loads(text)
    except (ValueError, RecursionError):
        texts = None
    if (
        not isinstance(texts, list)
        or len(texts) != count
        or not all(isinstance(each, str) for each in texts)
    ):
        raise InvalidRequest(f"the last reply has {count} calls; give a JSON list of {count} texts")
    return texts
