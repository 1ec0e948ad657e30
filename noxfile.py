"""The tests over the supported Pythons: `nox`."""

import nox

nox.options.default_venv_backend = "venv"


@nox.session(python=["3.11", "3.12", "3.13"])
def test(session: nox.Session) -> None:
    """Install as `make install` does, torch first and alone, and run the tests."""
    session.install("-c", "constraints.txt", "torch")
    session.install("-c", "constraints.txt", "-e", ".[dev]")
    session.run("pytest", *session.posargs)
