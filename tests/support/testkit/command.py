"""The command line, run in this process."""

from __future__ import annotations

from typing import NamedTuple

from typer.testing import CliRunner

from agentcache.cli import app


class Done(NamedTuple):
    """What a command left."""

    status: int
    stdout: str
    stderr: str


def agentcache(*arguments: str) -> Done:
    """Run a command; only a clean exit counts."""
    result = CliRunner().invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return Done(result.exit_code, result.stdout, result.stderr)
