"""One runtime behind litellm for all tests of the provider."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# litellm reads it once, and would ask the network for prices without it
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm

from agentcache import CacheConfig, Runtime
from agentcache.integrations import litellm_provider

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.integrations.litellm_provider import AgentCacheLLM

litellm.suppress_debug_info = True

LITELLMS_OWN = (
    # when it imports parts of itself late
    "ignore:Items? '.*using the `ReadOnly` qualifier:UserWarning",
    # when it logs messages in whose objects it has put dicts
    "ignore:Pydantic serializer warnings:UserWarning",
)
"""Warnings of litellm's own code."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let those pass in the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for warning in LITELLMS_OWN:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _close_what_litellm_leaves_open() -> Iterator[None]:
    """Its plain calls leave an event loop on the thread, which would be found at any later time."""
    yield
    with suppress(RuntimeError):  # there is none
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)


@pytest.fixture(scope="session")
def shared_runtime() -> Iterator[Runtime]:
    """A runtime that outlives its registrations."""
    with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="64MiB")) as runtime:
        yield runtime


@pytest.fixture
def runtime(shared_runtime: Runtime) -> Iterator[Runtime]:
    """The shared runtime with nothing in its cache, registered as `agentcache/tiny-agent`."""
    shared_runtime.clear()
    litellm_provider.register(shared_runtime)
    yield shared_runtime
    litellm_provider.unregister()
    assert shared_runtime.stats()["running"]["requests"] == 0


@pytest.fixture
def handler(runtime: Runtime) -> AgentCacheLLM:
    """litellm's handler with the shared runtime behind it."""
    return litellm_provider.register(runtime)
