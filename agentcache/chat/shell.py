"""The loop of a chat: read a line, obey or say it, show the reply."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from agentcache.chat.commands import COMMANDS, Leave
from agentcache.chat.interrupts import Interrupts
from agentcache.chat.screen import ReplyView
from agentcache.chat.toolbox import run_tool
from agentcache.errors import AgentCacheError, InvalidRequest, RequestCancelled

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.chat.conversation import Conversation
    from agentcache.chat.screen import Screen
    from agentcache.session import Turn, TurnStream

__all__ = ["Shell", "turn_record"]

# A model that calls without end is left at the prompt.
_MOST_CALLS_IN_A_ROW = 8


class Shell:
    """One chat from its first line to its last.

    is_asked: lines are asked for with a prompt; otherwise they are read as they come. runs_tools:
    calls are answered by the chat's own tools. log: where a line of JSON is written for each turn.
    """

    def __init__(
        self,
        chat: Conversation,
        screen: Screen,
        *,
        max_tokens: int,
        is_asked: bool,
        runs_tools: bool = False,
        log: TextIO | None = None,
    ) -> None:
        self.chat = chat
        self.screen = screen
        self._max_tokens = max_tokens
        self._is_asked = is_asked
        self._runs_tools = runs_tools
        self._log = log
        self._num_refused = 0
        self._num_different = 0

    def run(self) -> bool:
        """Until there is no line any more; whether all was done and nothing found to differ.

        What a person at the prompt was refused does not count, since they have seen it. Raises
        KeyboardInterrupt where nobody was asked: then it is meant for the program.
        """
        if self._is_asked:
            with suppress(ImportError):  # there is none on some systems
                import readline  # noqa: F401 - line editing and history of `input`
        try:
            while True:
                self.take(self._read())
        except Leave:
            pass
        except (EOFError, KeyboardInterrupt) as end:
            if self._is_asked:
                self.screen.write("\n")  # the prompt's line is still open
            elif isinstance(end, KeyboardInterrupt):
                raise
        return not self._num_different and (self._is_asked or not self._num_refused)

    def take(self, line: str) -> None:
        """Obey a command, or say a text; blank lines are nothing."""
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._obey(line)
            elif line.strip():
                text = line.removeprefix("/") if line.startswith("//") else line
                self.reply(lambda: self.chat.say(text))
        except AgentCacheError as error:
            self._num_refused += 1
            self.screen.complain(str(error))

    def _obey(self, line: str) -> None:
        name, _, argument = line[1:].partition(" ")
        command = COMMANDS.get(name.strip())
        if command is None:
            raise InvalidRequest(f"no command /{name}; /help lists them, //{name} says it")
        command.check(name, argument.strip())
        command.run(self, argument.strip())

    def reply(self, begin: Callable[[], TurnStream]) -> None:
        """Show a reply, and those to the results of what it calls. Raises what a call raises."""
        turn = self._reply_once(begin)
        for _ in range(_MOST_CALLS_IN_A_ROW):
            calls = turn.message.get("tool_calls") if turn is not None else None
            if not calls or not self._runs_tools:
                return
            results = [run_tool(call["function"]) for call in calls]
            for result in results:
                self.screen.remark(f"  {result}")
            text = results[0] if len(results) == 1 else json.dumps(results)
            turn = self._reply_once(partial(self.chat.answer, text))

    def _reply_once(self, begin: Callable[[], TurnStream]) -> Turn | None:
        """One reply as it comes, and then what it cost; None if it was cancelled."""
        view = ReplyView(self.screen)
        try:
            with Interrupts() as interrupts, begin() as stream:
                turn = self._follow(stream, view, interrupts)
        finally:
            view.end()
        if turn is None:
            self.screen.remark("cancelled; the session stands where it stood")
            if not self._is_asked:
                raise KeyboardInterrupt
            return None
        self.chat.present.last = turn
        self.screen.counted(turn, self._max_tokens)
        self._num_different += turn.verify is not None and not turn.verify.ok
        if self._log is not None:
            record = turn_record(self.chat.present.name, turn)
            self._log.write(json.dumps(record) + "\n")
            self._log.flush()
        return turn

    def _follow(self, stream: TurnStream, view: ReplyView, interrupts: Interrupts) -> Turn | None:
        """The finished turn; None where it was cancelled."""
        try:
            while (delta := interrupts.next_delta(stream)) is not None:
                view.show(delta)
            return stream.turn
        except KeyboardInterrupt:
            stream.close()
            try:
                turn = stream.turn
            except RequestCancelled:
                return None
            view.show_rest(turn)  # it was complete by then, and the session has moved on
            return turn

    def _read(self) -> str:
        """A line, with those that it goes on in. Raises EOFError at the end."""
        line = self._read_line(f"{self.chat.present.name}:{self.chat.present.num_turns}> ")
        while line.endswith("\\"):
            line = line[:-1] + "\n"
            with suppress(EOFError):
                line += self._read_line("... ")
        return line

    def _read_line(self, prompt: str) -> str:
        if self._is_asked:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n").removesuffix("\r")


def turn_record(session: str, turn: Turn) -> dict[str, Any]:
    """A turn as plain JSON values."""
    usage, miss, verify = turn.usage, turn.miss, turn.verify
    record: dict[str, Any] = {
        "session": session,
        "turn": turn.index,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "computed_tokens": usage.computed_tokens,
        "output_tokens": usage.output_tokens,
        "ttft_s": usage.ttft_s,
        "total_s": usage.total_s,
        "text": turn.message.get("content") or "",
        "reasoning": turn.message.get("reasoning_content") or "",
        "tool_calls": turn.message.get("tool_calls") or [],
        "finish_reason": turn.finish_reason,
        "miss": None if miss is None else miss.to_json(),
    }
    if verify is not None:
        record["verify"] = {
            "positions": verify.positions,
            "different_ids": verify.different_ids,
            "max_logit_error": verify.max_logit_error,
            "max_state_error": verify.max_state_error,
        }
    return record
