"""Options that several commands take are the same in all of them."""

from __future__ import annotations

from typing import Any

import pytest
from testkit.command import agentcache
from typer.main import get_command

from agentcache.cli import app


def option(command: str, flag: str) -> Any:
    group: Any = get_command(app)
    [found] = [each for each in group.commands[command].params if flag in each.opts]
    return found


@pytest.mark.parametrize(
    ("flag", "commands"),
    [
        ("--model", ("chat", "serve")),
        ("--adapter", ("replay", "chat", "doctor")),
        ("--unproven", ("replay", "chat", "doctor")),
        ("--budget", ("chat", "serve")),
        ("--policy", ("replay", "serve")),
        ("--threads", ("replay", "chat", "serve", "doctor")),
        ("--json", ("replay", "doctor")),
        ("--backend", ("replay", "chat", "serve")),
        ("--weight-format", ("replay", "chat", "serve")),
    ],
)
def test_an_option_has_one_form_default_and_help(flag: str, commands: tuple[str, ...]) -> None:
    first, *others = (option(command, flag) for command in commands)
    assert first.help
    for other in others:
        assert (other.opts, other.default, other.help) == (first.opts, first.default, first.help)


@pytest.mark.parametrize("command", [("replay", "--limit=1"), ("chat",), ("serve", "--port=0")])
def test_form_of_weights_and_backend_reach_the_model(command: tuple[str, ...]) -> None:
    done = agentcache(*command, "--weight-format=int8", "--backend=transformers")
    assert done.status == 2
    assert "weight_format='int8' needs the native backend" in done.stderr
