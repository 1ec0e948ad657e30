"""One runtime per test module that only needs some runtime, and fresh ones on request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from agentcache.runtime import Runtime


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    """A fresh runtime on the micro model with room for everything a test does."""
    with micro_runtime() as made:
        yield made


@pytest.fixture
def make_runtime() -> Iterator[Callable[..., Runtime]]:
    """A factory of runtimes that are closed at the end of the test."""
    made: list[Runtime] = []

    def make(**settings: Any) -> Runtime:
        made.append(micro_runtime(**settings))
        return made[-1]

    yield make
    for runtime in made:
        runtime.close()
