"""`agentcache chat`: what it says of cached tokens, its commands, Ctrl-C, and how it ends."""

from __future__ import annotations

import io
import itertools
import json
import os
import pty
import select
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_runtime
from typer.testing import CliRunner

from agentcache.chat.conversation import Conversation
from agentcache.chat.interrupts import Interrupts
from agentcache.chat.screen import ReplyView, Screen, visible
from agentcache.chat.shell import Shell
from agentcache.cli import app
from agentcache.replay.trace import read_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from agentcache.runtime import Runtime
    from agentcache.session import Delta, TurnStream

TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {"type": "object"}}}]
FEW = {"max_new_tokens": 4}


@pytest.fixture(autouse=True)
def interrupts_arrive() -> Iterator[None]:
    """Ctrl-C counts, also where whoever started the tests ignores it, as shells do for jobs in the
    background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def piped(lines: str, *arguments: str, **env: str) -> Any:
    """The command with lines on standard input; only a clean exit counts."""
    command = ["chat", "--model=tiny-hybrid", "--budget=64MiB", "--max-tokens=5", *arguments]
    result = CliRunner().invoke(app, command, input=lines, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with micro_runtime(poison=False) as runtime:
        yield runtime


class Talk:
    """A shell on the micro model, whose turns can be read from its log."""

    def __init__(
        self, runtime: Runtime, name: str, *, is_terminal: bool = False, **settings: Any
    ) -> None:
        self._log = io.StringIO()
        settings.setdefault("options", FEW)
        self.chat = Conversation(runtime, name, **settings)
        self.shell = Shell(
            self.chat,
            Screen(is_terminal=is_terminal),
            max_tokens=4,
            is_asked=True,
            log=self._log,
        )

    def take(self, *lines: str) -> list[dict[str, Any]]:
        """Take lines; the turns so far."""
        for line in lines:
            self.shell.take(line)
        return [json.loads(row) for row in self._log.getvalue().splitlines()]


NUMBERS = itertools.count()


@pytest.fixture
def talk(runtime: Runtime) -> Talk:
    return Talk(runtime, f"talk{next(NUMBERS)}")


def test_piped_conversation_reuses_all_of_the_turn_before(tmp_path: Path) -> None:
    log, saved = tmp_path / "turns.jsonl", tmp_path / "saved.jsonl"
    done = piped(
        f"Hello\n\nAnd\\\nagain\n//etc\n/save {saved}\n",
        f"--json={log}",
        "--system=Be brief.",
        "--verify",
        FORCE_COLOR="1",
    )
    assert done.exit_code == 0, done.stderr
    turns = [json.loads(line) for line in log.read_text().splitlines()]
    assert [turn["turn"] for turn in turns] == [1, 2, 3]
    assert turns[0]["cached_tokens"] == 0
    for before, turn in itertools.pairwise(turns):
        # the last token of a reply is computed with what follows it
        known = before["prompt_tokens"] + before["output_tokens"]
        assert turn["cached_tokens"] == known - 1
    for turn in turns:
        assert turn["prompt_tokens"] == turn["cached_tokens"] + turn["computed_tokens"]
        assert turn["output_tokens"] == 5
        assert turn["session"] == "chat"
        assert turn["verify"]["different_ids"] == 0
    assert turns[0]["miss"]["reason"] == "new"

    texts = "".join(turn["text"] + "\n" for turn in turns)
    assert done.stdout == texts + f"wrote 3 calls to {saved}; agentcache replay reads them\n"
    second = turns[1]
    assert (
        f"prompt {second['prompt_tokens']:,} = {second['cached_tokens']:,} cached + "
        f"{second['computed_tokens']:,} computed · 5 new tokens · first after "
    ) in done.stderr
    assert done.stderr.count(" ms · cut at 5 · verified\n") == 3
    assert "\x1b" not in done.stdout + done.stderr
    assert "> " not in done.stdout

    [run] = read_file(saved)
    asked = [call.messages[-1]["content"] for call in run.calls]
    assert asked == ["Hello", "And\nagain", "/etc"]
    assert run.calls[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert [call.answer["content"] for call in run.calls] == [turn["text"] for turn in turns]
    replayed = CliRunner().invoke(app, ["replay", str(saved), "--json=-"])
    totals = json.loads(replayed.stdout)["totals"]
    assert totals["prompt_tokens"] == sum(turn["prompt_tokens"] for turn in turns)


def test_json_on_standard_output_is_alone_there() -> None:
    done = piped("Hello\n", "--json=-", "--session=mine", "--temperature=1", "--seed=3")
    assert done.exit_code == 0, done.stderr
    turn = json.loads(done.stdout)
    assert turn["session"] == "mine"
    assert turn["text"] in done.stderr
    again = [
        json.loads(piped("Hello\n", "--json=-", "--temperature=1", f"--seed={seed}").stdout)
        for seed in (3, 4)
    ]
    assert again[0]["text"] == turn["text"] != again[1]["text"]


def test_refused_line_of_a_pipe_is_status_one_and_the_rest_is_said(tmp_path: Path) -> None:
    log = tmp_path / "turns.jsonl"
    done = piped("/fly\nHello\n/quit\nnever said\n", f"--json={log}")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: no command /fly; /help lists them")
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model=no/such-model"], "no/such-model"),
        (["--budget=lots"], "lots"),
        (["--budget=1KiB"], "smallest workable budget"),
        (["--max-tokens=0"], "--max-tokens is 0"),
        (["--temperature=-1"], "temperature is -1"),
        (["--session="], "name of the session is empty"),
        (["--tools=none.json"], "cannot read none.json"),
        (["--adapter=no/such-adapter"], "no/such-adapter"),
        (["--json=no/such/folder/turns.jsonl"], "cannot write no/such/folder/turns.jsonl"),
        (["--seed=some"], "--seed"),
        (["extra"], "extra"),
    ],
)
def test_wrong_usage_is_status_two(arguments: list[str], said: str) -> None:
    done = piped("Hello\n", *arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no JSON"),
        ("{}", "holds a dict"),
        ("[3]", "tool 0 is a int"),
        ("[" * 100_000, "is no JSON"),
        ('["\\ud800"]', "tool 0 is a str"),
    ],
)
def test_file_that_holds_no_tools_is_named(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "tools.json"
    path.write_text(content)
    done = piped("Hello\n", f"--tools={path}")
    assert done.exit_code == 2
    assert f"{path}" in done.stderr
    assert said in done.stderr


def test_fork_goes_on_by_itself_and_shares_what_was_there(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    first = talk.chat.present.name
    talk.take("Where forks begin.", "/fork", "Two.", "/fork named")
    assert talk.chat.present.name == "named"
    turns = talk.take("Three.", f"/switch {first}", "Other.", "/sessions")

    assert [turn["session"] for turn in turns] == [first, f"{first}-2", "named", first]
    assert [turn["turn"] for turn in turns] == [1, 2, 3, 2]
    shared = turns[0]["prompt_tokens"] + turns[0]["output_tokens"] - 1
    assert turns[1]["cached_tokens"] == turns[3]["cached_tokens"] == shared
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[-3:]]
    assert listed[0][:3] == ["*", first, "2"]
    assert listed[1][:3] == [f"{first}-2", first, "2"]
    assert listed[2][:3] == ["named", f"{first}-2", "3"]


def test_fork_and_switch_refuse_names_that_cannot_be(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    name = talk.chat.present.name
    talk.take("One.", "/switch nowhere", f"/fork {name}", "/switch")
    said = capsys.readouterr().err.splitlines()[-3:]
    assert said[0] == f"error: there is no session 'nowhere'; there are {name}"
    assert "already open" in said[1]
    assert said[2] == "error: /switch needs more; write /switch NAME"
    assert talk.chat.present.name == name


def test_rewind_stands_at_the_end_of_an_earlier_turn(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    before = talk.take("One.", "Two.", "Three.")
    talk.take("/rewind 1")
    assert talk.chat.present.num_turns == 1
    again = talk.take("Two.", "/rewind")[3]
    assert (again["turn"], again["prompt_tokens"]) == (2, before[1]["prompt_tokens"])
    assert again["text"] == before[1]["text"]
    assert talk.chat.present.num_turns == 1
    talk.take("/rewind 7", "/rewind back")
    assert talk.chat.present.num_turns == 1
    said = capsys.readouterr()
    assert "there is no turn 7" in said.err
    assert "'back' is no turn" in said.err
    talk.take("/rewind 0", "/rewind")
    assert capsys.readouterr().out == "now before the first turn\n" * 2


def test_system_prompt_is_set_before_the_first_turn_only(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("/system Be brief.", "One.", "/system Be long.")
    assert "the first turn has been made" in capsys.readouterr().err
    assert talk.chat.present.session.messages[0]["content"] == "Be brief."
    talk.take("/rewind 0", "One.", "Two.")
    roles = [message["role"] for message in talk.chat.present.session.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    talk.take("/rewind 0", "/system Be long.", "/fork", "One.")
    assert talk.chat.present.session.messages[0]["content"] == "Be long."
    talk.take("/rewind 0", "/system", "One.")
    assert talk.chat.present.session.messages[0]["role"] == "user"


def test_explain_gives_the_last_turns_report_in_words(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("/explain")
    assert "nothing to explain" in capsys.readouterr().err
    talk.take("A question that nobody asked before, and that is not short.", "/explain")
    miss = talk.chat.present.last.miss
    assert miss.reason == "new"
    assert capsys.readouterr().out.endswith(f"\n{miss}\n")
    talk.take("/fork", "/explain")
    assert capsys.readouterr().out.endswith(f"\n{miss}\n")
    other = Talk(runtime, "the-same-again")
    other.take("A question that nobody asked before, and that is not short.", "/explain")
    assert capsys.readouterr().out.endswith(
        "\nThe turn reused all of its prompt but the last few tokens.\n"
    )


def test_unknown_command_is_one_line_and_sends_nothing(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    before = runtime.stats()["hits"]
    for line in ("/fly away", "/", "/ help", "/\x1b[2J"):
        assert talk.take(line) == []
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("error: no command /")
        assert said.err.count("\n") == 1
        assert "\x1b" not in said.err
    talk.take("/stats now")
    assert "/stats takes nothing after it" in capsys.readouterr().err
    assert runtime.stats()["hits"] == before


def test_stats_tell_what_each_kind_holds(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("One.", "/stats")
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.strip()}
    used = runtime.stats()["bytes"]["state"]["used"]
    assert f"{used / 1024:.1f} KiB" in rows["state"] or f"{used / 2**20:.1f} MiB" in rows["state"]
    assert rows["state"].split()[-1] == str(runtime.stats()["entries"]["state"])
    assert "budget 16.0 MiB" in rows["budget"]
    assert "swa" not in rows, "kinds that the model has not are not listed"


def test_help_names_every_command(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    talk.take("/help")
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed >= {
        *("/fork", "/sessions", "/switch", "/rewind", "/explain", "/stats", "/save"),
        *("/system", "/help", "/quit"),
    }


def test_save_says_what_is_in_its_way(
    talk: Talk, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take(f"/save {tmp_path / 'none.jsonl'}")
    assert "nothing to save" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    talk.take("One.", f"/save {tmp_path / 'no' / 'such.jsonl'}", "/save")
    said = capsys.readouterr().err
    assert "cannot be written" in said
    assert "/save needs more" in said


def test_prompt_that_is_too_long_is_refused_and_the_session_goes_on(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    talk.take("One.", "word " * 200_000)
    assert capsys.readouterr().err.count("error: ") == 1
    assert [turn["turn"] for turn in talk.take("Two.")] == [1, 2]


def test_turn_that_a_cold_run_does_not_confirm_is_told_and_no_clean_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with micro_runtime(poison=False) as runtime:
        chat = Conversation(runtime, "spoilt", options={"max_new_tokens": 4, "verify": True})
        shell = Shell(chat, Screen(is_terminal=False), max_tokens=4, is_asked=False)
        shell.take("A first line that is kept in the cache.")
        assert shell.run()
        assert "differs" not in capsys.readouterr().err
        runtime.on_engine(lambda: runtime.cache.pools._arena.zero_())
        shell.take("A second one.")
        assert "error: a run without the cache differs: " in capsys.readouterr().err
        assert not shell.run()


CALL = {"type": "function", "function": {"name": "ls", "arguments": '{"path": "."}'}}


def test_tool_calls_are_shown_and_answered(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reply = {"role": "assistant", "content": "Looking.", "tool_calls": [{**CALL, "id": "a"}]}
    talk = Talk(runtime, "calls", tools=TOOLS, options={"replay": reply})
    talk.take("/result early", "List.")
    said = capsys.readouterr()
    assert said.out == 'Looking.\n→ ls({"path": "."})\n'
    assert "calls no tool" in said.err
    turns = talk.take("/result a.txt", f"/save {tmp_path / 'calls.jsonl'}")
    assert turns[1]["tool_calls"][0]["function"] == CALL["function"]
    result = talk.chat.present.session.messages[2]
    assert (result["role"], result["content"]) == ("tool", "a.txt")
    [run] = read_file(tmp_path / "calls.jsonl")
    assert run.calls[1].tools == tuple(TOOLS)
    assert run.calls[1].messages[1]["tool_calls"]


def test_several_calls_are_answered_by_a_list(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = [{**CALL, "id": name} for name in "ab"]
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    talk = Talk(runtime, "several", tools=TOOLS, options={"replay": reply})
    talk.take("List.", "/result one", '/result ["one"]', "/result [1, 2]", '/result ["x", "y"]')
    assert capsys.readouterr().err.count("give a JSON list of 2 texts") == 3
    results = talk.chat.present.session.messages[2:4]
    assert [message["content"] for message in results] == ["x", "y"]
    ids = [call["id"] for call in talk.chat.present.session.messages[1]["tool_calls"]]
    assert [message["tool_call_id"] for message in results] == ids


def test_reasoning_is_dimmed_and_stays_off_a_piped_standard_output(
    runtime: Runtime, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    reply = {"role": "assistant", "content": "So.", "reasoning_content": "Hm.\x1b[2J"}
    Talk(runtime, "thinks", options={"replay": reply}).take("Why?")
    said = capsys.readouterr()
    assert said.out == "So.\n"
    assert said.err.startswith("Hm.\x1b[2J\n")
    Talk(runtime, "thinks-aloud", is_terminal=True, options={"replay": reply}).take("Why?")
    said = capsys.readouterr().out
    assert "\x1b[2mHm." in said
    assert "\x1b[2J" not in said
    assert "\\x1b[2J" in said
    assert "\nSo.\n" in said


def test_control_characters_are_shown_and_not_obeyed() -> None:
    assert (
        visible("a\x1b]0;title\x07\r\x7f\x9b\tb\nc") == "a\\x1b]0;title\\x07\\x0d\\x7f\\x9b\tb\nc"
    )


LONG = {"max_new_tokens": 1500}


def interrupting(monkeypatch: pytest.MonkeyPatch, at: int, times: int = 1) -> None:
    """Let Ctrl-C arrive while the delta of that number is shown."""
    show, seen = ReplyView.show, []

    def show_and_interrupt(view: ReplyView, delta: Delta) -> None:
        show(view, delta)
        seen.append(delta)
        if len(seen) == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ReplyView, "show", show_and_interrupt)


def test_cancelled_reply_leaves_no_trace(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = Talk(runtime, "cancelled", options=LONG)
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupting(patch, at=3, times=2)
        assert talk.take("Tell me more.") == []
    assert "cancelled; the session stands where it stood\n" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is handler
    session = talk.chat.present.session
    assert (session.tips, session.messages, talk.chat.present.last) == ((), [], None)
    assert runtime.stats()["leases"] == 0

    talk = Talk(runtime, "cancelled")
    turns = talk.take("What is cancelled?", "Nothing.")
    talk.chat._options = LONG
    with monkeypatch.context() as patch:
        interrupting(patch, at=3)
        assert talk.take("Tell me more.") == turns
    talk.chat._options = FEW
    turn = talk.take("?")[-1]
    assert turn["turn"] == 3
    assert turn["cached_tokens"] >= turns[1]["prompt_tokens"] + turns[1]["output_tokens"] - 1


def test_reply_that_ended_before_it_was_cancelled_is_shown_whole(
    runtime: Runtime, talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    def begin() -> TurnStream:
        stream = talk.chat.say("One.")
        assert stream.turn.index == 1  # it has ended by now
        signal.raise_signal(signal.SIGINT)
        return stream

    talk.shell.reply(begin)
    [turn] = talk.take()
    assert turn["turn"] == 1
    assert capsys.readouterr().out.rstrip("\n") == turn["text"].rstrip("\n")


def test_interrupt_of_a_pipe_ends_the_program(
    runtime: Runtime, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen(is_terminal=False)
    talk.chat._options = LONG
    shell = Shell(talk.chat, screen, max_tokens=1500, is_asked=False)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tell me more.\nNever said.\n"))
    interrupting(monkeypatch, at=2)
    with pytest.raises(KeyboardInterrupt):
        shell.run()
    assert talk.chat.present.num_turns == 0


def test_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal:
    """The command under a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.seen = ""
        self._pid, self._file = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "xterm"
            command = [
                sys.executable,
                "-P",
                "-m",
                "agentcache",
                "chat",
                "--model=tiny-hybrid",
                *arguments,
            ]
            os.execv(sys.executable, command)

    def type(self, text: str, until: str) -> str:
        """Type, and wait until something is shown; what was shown since."""
        os.write(self._file, text.encode())
        return self.wait(until)

    def wait(self, until: str) -> str:
        shown, give_up = "", time.monotonic() + 60
        while until not in shown:
            ready, _, _ = select.select([self._file], [], [], max(0, give_up - time.monotonic()))
            assert ready, f"{until!r} was not shown after {self.seen!r}"
            try:
                read = os.read(self._file, 65536).decode(errors="replace")
            except OSError as error:  # the other end is closed
                raise AssertionError(f"it ended before {until!r}, after {self.seen!r}") from error
            shown += read
            self.seen += read
        return shown

    def end(self) -> int:
        """Press Ctrl-C at the prompt; its exit status."""
        with pytest.raises(AssertionError, match="it ended"):
            # readline overlooks a signal between its prompt and its wait, until the line is over
            self.type("\x03\n", "never shown")
        status = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        os.close(self._file)
        return status


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_ctrl_c_in_a_terminal_cancels_a_reply_and_at_the_prompt_quits() -> None:
    terminal = Terminal("--budget=64MiB", "--max-tokens=3000")
    greeting = terminal.wait("chat:0> ")
    assert "answers noise" in greeting
    terminal.type("Tell me more.\n", "\r\n")
    terminal.wait(" ")
    shown = terminal.type("\x03", "chat:0> ")
    assert "cancelled; the session stands where it stood" in shown, terminal.seen
    shown = terminal.type("/fork other\n", "other:0> ")
    assert "now in other" in shown
    assert "\x1b[31merror:" in terminal.type("/fly\n", "other:0> ")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.seen
