"""How a chat looks: in a terminal with colours, and plain where its output goes elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentcache.replay._format import bytes_text, noun_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from agentcache.chat.conversation import Branch
    from agentcache.engine.verify import VerifyResult
    from agentcache.session import Delta, Turn
    from agentcache.types import Usage

__all__ = ["ReplyView", "Screen", "counts_text", "visible"]

_ESCAPES = {
    code: f"\\x{code:02x}"
    for code in (*range(0x20), *range(0x7F, 0xA0))
    if chr(code) not in ("\n", "\t")
}


def visible(text: str) -> str:
    """A text in which control characters are seen and not obeyed.

    >>> print(visible(chr(27) + "[2Jclear"))
    \\x1b[2Jclear
    """
    return text.translate(_ESCAPES)


class Screen:
    """Where a chat is shown.

    is_terminal: whether a person sits there. Otherwise replies, and what commands were asked for,
    go to standard output as they are, and all else to standard error. json_on_stdout: standard
    output is for the JSON alone.
    """

    def __init__(self, *, is_terminal: bool, json_on_stdout: bool = False) -> None:
        self.is_terminal = is_terminal
        self._out = Console(stderr=json_on_stdout, force_terminal=is_terminal, highlight=False)
        self._aside = Console(stderr=True, force_terminal=is_terminal, highlight=False)

    def loading(self, name: str) -> Any:
        """A context in which it is said that a model is being loaded."""
        return self._aside.status(Text(f"loading {visible(name)}"))

    def write(self, text: str, style: str | None = None) -> None:
        """A piece of a reply, as it is where nobody sits at a terminal."""
        if self.is_terminal:
            self._out.out(visible(text), style=style, highlight=False, end="")
        else:
            self._out.file.write(text)
            self._out.file.flush()

    def think(self, text: str) -> None:
        """A piece of reasoning."""
        if self.is_terminal:
            self.write(text, style="dim")
        else:
            self._aside.file.write(text)
            self._aside.file.flush()

    def tell(self, text: str, style: str | None = None) -> None:
        """What a command was asked for."""
        self._out.print(Text(visible(text)), style=style, soft_wrap=True)

    def remark(self, text: str, style: str | None = "dim") -> None:
        """A line beside the conversation, in a terminal only dimmed."""
        console = self._out if self.is_terminal else self._aside
        console.print(Text(visible(text)), style=style, soft_wrap=True)

    def complain(self, problem: str) -> None:
        """One line about what cannot be done."""
        line = " ".join(visible(problem).split())
        self._aside.print(Text.assemble(("error:", "red"), f" {line}"), soft_wrap=True)

    def counted(self, turn: Turn, max_tokens: int) -> None:
        """The line of counts after a turn."""
        text = counts_text(turn.usage)
        if turn.finish_reason == "length":
            text += f" · cut at {max_tokens:,}"
        if turn.verify is not None and turn.verify.ok:
            text += " · verified"
        self.remark(text)
        if turn.verify is not None and not turn.verify.ok:
            self.complain(_difference_text(turn.verify))

    def branches(self, branches: Iterable[Branch], present: Branch) -> None:
        """The sessions, one a line."""
        table = _table("", "session", "forked from", "turns", "tokens")
        for branch in branches:
            stats = branch.session.stats()
            table.add_row(
                "*" if branch is present else "",
                visible(branch.name),
                visible(stats["parent"] or ""),
                f"{stats['turns']:,}",
                f"{stats['tokens']:,}",
            )
        self._out.print(table)

    def stats(self, stats: Mapping[str, Any]) -> None:
        """What the cache holds, by kind."""
        table = _table("", "used", "reserved", "peak", "entries")
        for kind, held in stats["bytes"].items():
            sizes = [held[name] for name in ("used", "reserved", "peak")]
            if any(sizes):
                entries = stats["entries"].get(kind)
                count = "" if entries is None else f"{entries:,}"
                table.add_row(kind, *map(bytes_text, sizes), count)
        self._out.print(table)
        hits = stats["hits"]
        self.tell(
            f"budget {bytes_text(stats['budget'])} · "
            f"{noun_text(stats['sessions']['open'], 'session', 'sessions')} · "
            f"{hits['cached_tokens']:,} of {hits['prompt_tokens']:,} prompt tokens cached so far"
        )

    def commands(self, rows: Sequence[tuple[str, str]]) -> None:
        """Commands with what they do."""
        table = Table.grid(padding=(0, 2))
        for usage, purpose in rows:
            table.add_row(Text(usage, no_wrap=True), Text(purpose))
        self._out.print(table)


class ReplyView:
    """One reply while it comes: reasoning, text and tool calls begin on lines of their own."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._part = ""
        self._text: list[str] = []

    def show(self, delta: Delta) -> None:
        """What came since the last one."""
        if delta.reasoning:
            self._begin("reasoning", delta.reasoning)
            self._screen.think(delta.reasoning)
        if delta.text:
            self._begin("text", delta.text)
            self._screen.write(delta.text)
            self._text.append(delta.text)
        for call in delta.tool_calls:
            self.end()
            function = call["function"]
            self._screen.tell(f"→ {function['name']}({function['arguments']})", style="cyan")

    def show_rest(self, turn: Turn) -> None:
        """What was not shown of a reply that ended while it was being cancelled."""
        content, shown = turn.message.get("content") or "", "".join(self._text)
        if content.startswith(shown) and content != shown:
            self._begin("text", content)
            self._screen.write(content[len(shown) :])

    def _begin(self, part: str, text: str) -> None:
        """Leave the line of another part."""
        if self._part not in ("", part):
            self.end()
        self._part = part
        self._ends_line = text.endswith("\n")

    def end(self) -> None:
        """Leave the line that was begun."""
        if self._part and not self._ends_line:
            (self._screen.think if self._part == "reasoning" else self._screen.write)("\n")
        self._part = ""


def counts_text(usage: Usage) -> str:
    """A call's tokens, and how long the first one took, in a line.

    >>> from agentcache.types import Usage
    >>> print(counts_text(Usage(1204, 1180, 24, 31, 0.042, 0.5)))
    prompt 1,204 = 1,180 cached + 24 computed · 31 new tokens · first after 42 ms
    """
    return (
        f"prompt {usage.prompt_tokens:,} = {usage.cached_tokens:,} cached + "
        f"{usage.computed_tokens:,} computed · {usage.output_tokens:,} new tokens · "
        f"first after {1000 * usage.ttft_s:,.0f} ms"
    )


def _difference_text(result: VerifyResult) -> str:
    return (
        f"a run without the cache differs: {result.different_ids} of {result.positions} ids, "
        f"logits by {result.max_logit_error:.1e}, states by {result.max_state_error:.1e}"
    )


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        is_number = name not in ("", "session", "forked from")
        table.add_column(name, justify="right" if is_number else "left", overflow="fold")
    return table
