"""The commands of a chat, which begin with a slash."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentcache.errors import InvalidRequest
from agentcache.replay._format import noun_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.chat.conversation import Branch
    from agentcache.chat.shell import Shell

__all__ = ["COMMANDS", "Command", "Leave"]


class Leave(Exception):
    """The chat is over."""


@dataclass(frozen=True, slots=True)
class Command:
    """argument: how it is written, "" for none, in brackets if it may be left out."""

    argument: str
    purpose: str
    run: Callable[[Shell, str], None]

    def check(self, name: str, argument: str) -> None:
        """Raises InvalidRequest for an argument too many, or none where one is needed."""
        if argument and not self.argument:
            raise InvalidRequest(f"/{name} takes nothing after it, and there is {argument!r}")
        if self.argument and not self.argument.startswith("[") and not argument:
            raise InvalidRequest(f"/{name} needs more; write /{name} {self.argument}")


def _fork(shell: Shell, argument: str) -> None:
    before = shell.chat.present
    branch = shell.chat.fork(argument or None)
    shared = noun_text(branch.num_turns, "turn", "turns")
    shell.screen.tell(f"now in {branch.name}, which shares {shared} with {before.name}")


def _sessions(shell: Shell, argument: str) -> None:
    shell.screen.branches(shell.chat, shell.chat.present)


def _switch(shell: Shell, argument: str) -> None:
    branch = shell.chat.switch(argument)
    shell.screen.tell(f"now in {branch.name}, {_place(branch)}")


def _rewind(shell: Shell, argument: str) -> None:
    to_turn = None
    if argument:
        try:
            to_turn = int(argument)
        except ValueError as error:
            raise InvalidRequest(
                f"{argument!r} is no turn; give its number, or 0 for before the first"
            ) from error
    shell.chat.rewind(to_turn)
    shell.screen.tell(f"now {_place(shell.chat.present)}")


def _place(branch: Branch) -> str:
    turns = branch.num_turns
    return f"at the end of turn {turns}" if turns else "before the first turn"


def _explain(shell: Shell, argument: str) -> None:
    last = shell.chat.present.last
    if last is None:
        raise InvalidRequest("there is no turn yet, so there is nothing to explain")
    words = "The turn reused all of its prompt but the last few tokens."
    shell.screen.tell(words if last.miss is None else str(last.miss))


def _stats(shell: Shell, argument: str) -> None:
    shell.screen.stats(shell.chat.runtime.stats())


def _save(shell: Shell, argument: str) -> None:
    path = Path(argument).expanduser()
    count = shell.chat.save(path)
    calls = noun_text(count, "call", "calls")
    shell.screen.tell(f"wrote {calls} to {path}; agentcache replay reads them")


def _system(shell: Shell, argument: str) -> None:
    shell.chat.set_system(argument)


def _result(shell: Shell, argument: str) -> None:
    shell.reply(lambda: shell.chat.answer(argument))


def _help(shell: Shell, argument: str) -> None:
    rows = [
        (f"/{name} {command.argument}".rstrip(), command.purpose)
        for name, command in COMMANDS.items()
    ]
    rows += [
        ("//TEXT", "say a text that begins with a slash"),
        ("TEXT\\", "the next line belongs to it too"),
        ("Ctrl-C", "cancel the reply, which leaves no trace; at the prompt, quit"),
    ]
    shell.screen.commands(rows)


def _quit(shell: Shell, argument: str) -> None:
    raise Leave


COMMANDS = {
    "fork": Command("[NAME]", "go on in a fork, which shares all there is so far", _fork),
    "sessions": Command("", "list the sessions", _sessions),
    "switch": Command("NAME", "go on in another session", _switch),
    "rewind": Command("[N]", "stand at the end of turn N again, by default one back", _rewind),
    "explain": Command("", "why the last turn did not reuse more of its prompt", _explain),
    "stats": Command("", "bytes of the cache by kind", _stats),
    "save": Command("FILE", "write the session as calls for `agentcache replay`", _save),
    "system": Command("[TEXT]", "set the system prompt, before the first turn", _system),
    "result": Command("TEXT", "give the result of the tool call in the last reply", _result),
    "help": Command("", "list the commands", _help),
    "quit": Command("", "end the chat, as Ctrl-D does", _quit),
}
"""By name, in the order in which they are listed."""
