"""The tools that `agentcache chat` runs itself, and a chat that calls them."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from agentcache.chat.screen import Screen
from agentcache.chat.shell import Shell
from agentcache.chat.toolbox import SCHEMAS, run_tool
from agentcache.cli import app
from agentcache.engine.messages import checked_tools


def calculate(expression: str) -> str:
    return run_tool({"name": "calculator", "arguments": json.dumps({"expression": expression})})


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 7", "19"),
        ("-3 * 2.5", "-7.5"),
        ("10 / 4", "2.5"),
        ("1 / 3", "0.33"),
        ("2 * (3 + 4)", "14"),
    ],
)
def test_calculator_computes(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "",
        "1 +",
        "x + 1",
        "__import__('os')",
        "2 ** 9",
        "(lambda: 1)()",
        "1" * 300,
        "True",
        "1 if 1 else 2",
        "(" * 90 + "1" + ")" * 90 + "+" * 20,
    ],
)
def test_calculator_refuses_all_else(expression: str) -> None:
    assert calculate(expression).startswith("error: ")


def test_heights_are_looked_up_in_any_case() -> None:
    assert run_tool({"name": "height", "arguments": {"name": "FUJI"}}) == "3776"
    assert run_tool({"name": "height", "arguments": {"name": "Nowhere"}}) == "error: not found"


@pytest.mark.parametrize(
    "function",
    [
        {"name": "rm", "arguments": "{}"},
        {"name": "height", "arguments": "{"},
        {"name": "height", "arguments": "[]"},
        {"name": "height", "arguments": {"place": "Fuji"}},
    ],
)
def test_calls_that_make_no_sense_are_errors_for_the_model_to_read(function: Any) -> None:
    assert run_tool(function).startswith("error: ")


def test_schemas_are_tools() -> None:
    assert len(checked_tools(SCHEMAS) or []) == 2


def chat(lines: str, *arguments: str) -> Any:
    result = CliRunner().invoke(app, ["chat", "--budget=64MiB", *arguments], input=lines)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_a_chat_runs_the_calls_of_its_tools_and_shows_their_results() -> None:
    result = chat("What is 12 + 30?\nAdd 8 to that.\n")
    assert result.exit_code == 0
    assert "12 + 30 is 42." in result.stdout
    assert "42 + 8 is 50." in result.stdout
    assert "  42\n" in result.stderr


def test_a_chat_calls_one_tool_with_the_result_of_another() -> None:
    result = chat("Add 224 to the height of Fuji.\n")
    assert "3776 + 224 is 4000." in result.stdout


def test_with_tools_of_ones_own_their_results_are_asked_for(tmp_path: Any) -> None:
    own = tmp_path / "tools.json"
    own.write_text(json.dumps(SCHEMAS))
    result = chat("What is 12 + 30?\n/result 41\n", f"--tools={own}")
    assert "12 + 30 is 41." in result.stdout


class Calling(Shell):
    """A chat whose model makes the same two calls, whatever it is told."""

    said: list[Any]

    def _reply_once(self, begin: Any) -> Any:
        self.said.append(begin)
        calls = [
            {"function": {"name": "calculator", "arguments": json.dumps({"expression": text})}}
            for text in ("1 + 2", "3 + 4")
        ]
        return SimpleNamespace(message={"tool_calls": calls})


@pytest.mark.parametrize(("runs_tools", "replies"), [(True, 9), (False, 1)])
def test_a_model_that_calls_without_end_is_stopped(runs_tools: bool, replies: int) -> None:
    answers: list[str] = []
    chat: Any = SimpleNamespace(answer=answers.append)
    shell = Calling(
        chat, Screen(is_terminal=False), max_tokens=5, is_asked=False, runs_tools=runs_tools
    )
    shell.said = []
    first: Any = object()
    shell.reply(first)
    assert len(shell.said) == replies
    for begin in shell.said[1:]:
        begin()
    assert answers == [json.dumps(["3", "7"])] * (replies - 1)
