"""Runtimes that all tests of the chat model share, and what they ask of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from testkit.models import micro_runtime

from agentcache import CacheConfig, Runtime
from agentcache.integrations.langchain_chat import ChatAgentCache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def tiny() -> Iterator[Runtime]:
    with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="256MiB")) as made:
        yield made


@pytest.fixture(scope="session")
def micro() -> Iterator[Runtime]:
    """The same tokenizer and template on fewer and smaller layers."""
    with micro_runtime(budget="64MiB", page_size=16, prefill_chunk=256) as made:
        yield made


@pytest.fixture(scope="session")
def closing(micro: Runtime) -> dict[int, float]:
    """A bias towards what ends texts and numbers in JSON, which random weights would go on with."""
    return {micro.tokenizer.encode_plain(sign)[0]: 12.0 for sign in '"},'}


@pytest.fixture
def make_chat(micro: Runtime, closing: dict[int, float]) -> Iterator[Callable[..., Any]]:
    """A factory of chat models on the shared runtime; what they hold is dropped after the test."""
    made: list[ChatAgentCache] = []

    def make(**fields: Any) -> ChatAgentCache:
        fields = {"max_tokens": 24, "logit_bias": closing} | fields
        made.append(ChatAgentCache(model=micro, **fields))
        return made[-1]

    yield make
    for chat in made:
        chat.close()
    micro.clear()


@pytest.fixture
def chat(make_chat: Callable[..., ChatAgentCache]) -> ChatAgentCache:
    return make_chat()


@pytest.fixture
def benchmark(benchmark: Any) -> Any:
    """LangChain's suite times the making of a chat model; here it is made once."""
    benchmark.disabled = True
    return benchmark
