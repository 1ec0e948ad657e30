"""What sessions that share a system prompt compute, and the benchmark scripts that time them."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from testkit.models import micro_config, micro_model, micro_runtime, tokenizer

from agentcache.engine.tiny_hybrid import build

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FOLDER = Path(__file__).parents[2] / "bench" / "runtime"
AT_MOST = 1.01


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], dict[str, Any]]]:
    """The names in a script of bench/runtime."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # scripts add their support folder
    threads = torch.get_num_threads()
    yield lambda name: runpy.run_path(str(FOLDER / name))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def micro_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The micro model as a folder."""
    folder = tmp_path_factory.mktemp("micro")
    micro_model().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def computed_and_needed(
    names: dict[str, Any], scenarios: Any, steps: Iterator[Any]
) -> dict[str, tuple[int, int]]:
    """By kind of call, tokens computed by a runtime with room for everything, and tokens needed."""
    needed, sums = names["Needed"](scenarios.head), {}
    with micro_runtime(budget="64MiB", page_size=16, prefill_chunk=512) as runtime:
        ours = names["Ours"](runtime, names["TOOLS"])
        for step in steps:
            served = ours.run(step)
            computed, least = sums.get(step.tag, (0, 0))
            least += needed.state_ends(served.prompt)
            sums[step.tag] = computed + served.computed_tokens, least
            needed.add(served.prompt, step.reply)
        assert not any(runtime.stats()["evictions"].values())
    return sums


def test_sessions_in_turn_reuse_the_shared_head_and_their_own_history(script):
    names = script("sessions.py")
    made = names["make_scenarios"](tokenizer())

    sums = computed_and_needed(names, made, made.interleaved(4, 2))

    assert list(sums) == ["first", "shared-prefix", "grow"]
    assert sums["first"][1] == pytest.approx(3036, rel=0.01)
    assert sums["shared-prefix"][1] / 3 == pytest.approx(705, rel=0.02)
    assert 4 * 100 < sums["grow"][1] < 4 * 400
    for computed, needed in sums.values():
        assert computed <= AT_MOST * needed


def test_a_session_that_comes_back_after_others_reuses_its_history(script):
    names = script("sessions.py")
    made = names["make_scenarios"](tokenizer(), head_len=700)

    sums = computed_and_needed(names, made, made.returning(3))

    assert list(sums) == ["first", "grow", "other", "return"]
    assert sums["return"][1] < 400
    for computed, needed in sums.values():
        assert computed <= AT_MOST * needed


def test_needed_counts_from_ends_of_prompts_turns_and_the_head_or_from_any_token(script):
    head, reply = np.arange(4, dtype=np.int32), np.array([50, 51, 52], dtype=np.int32)
    needed = script("sessions.py")["Needed"](head)
    first = np.concatenate([head, np.array([10, 11], dtype=np.int32)])

    def least(*tail: int) -> tuple[int, int]:
        prompt = np.concatenate([head, np.array(tail, dtype=np.int32)])
        return needed.state_ends(prompt), needed.any_token(prompt)

    assert least(10, 11) == (6, 6)
    needed.add(first, reply)
    assert least(10, 20, 21) == (3, 2)
    assert least(10, 11, 20) == (1, 1)
    assert least(10, 11, 50, 20) == (2, 1)
    assert least(10, 11, 50, 51, 52, 60) == (2, 2)
    assert least(10, 11) == (2, 1)


def test_a_kept_cache_goes_on_where_the_prompt_extends_it_and_counts_whole_storages(script):
    kept, step = script("sessions.py")["Kept"](build(micro_config())), _Step("a")
    prompt = np.arange(100, 130, dtype=np.int32)
    reply = step.reply = np.array([7, 8], dtype=np.int32)

    assert kept.run(step, prompt).computed_tokens == 30
    longer = np.concatenate([prompt, reply, prompt])
    assert kept.run(step, longer).computed_tokens == len(longer) - 31
    held, one = kept.held_bytes(), kept.peak_bytes
    assert kept.run(_Step("b", reply), longer).computed_tokens == len(longer)
    assert kept.peak_bytes == kept.held_bytes() == 2 * held == 2 * one
    assert kept.run(step, prompt).computed_tokens == 30, "a shorter prompt starts over"


@dataclass
class _Step:
    session: str
    reply: Any = None
    closed: tuple[str, ...] = ()


def test_script_compares_memory_and_time_with_kept_cache_objects(script, micro_folder, capsys):
    main = script("sessions.py")["main"]
    cut = ("--head=300", "--sessions=3", "--turns=1", "--others=1")

    status = main([f"--model={micro_folder}", *cut, "--budget=64MiB", "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert result["name"] == "bench/runtime/sessions"
    columns = {row["column"] for row in result["rows"] if row["scenario"] == "interleaved"}
    assert columns == {"ours, no limit", "ours, half", "kept objects"}
    met = {goal["name"]: goal["met"] for goal in result["goals"]}
    tokens = [name for name in met if name.endswith("computed over needed")]
    assert len(tokens) == 2 + 4  # kinds of calls
    assert all(met[name] for name in tokens)
    assert met["evictions with room for everything"]
    assert met["interleaved: bytes of ours, at its peak, over kept objects"]
    assert status == int(not all(met.values()))  # the rest is a matter of time


@dataclass
class _Asked:
    """A step as the comparison of runtimes makes it."""

    session: str
    prompt: list[int]
    forced: list[int]
    fork_of: str = ""
    closed: list[str] = field(default_factory=list)

    @property
    def n_out(self) -> int:
        return len(self.forced)


@pytest.fixture
def ours(script, micro_folder) -> Iterator[Any]:
    """Our column on the micro model; its results are dicts."""
    options = argparse.Namespace(model=micro_folder, dtype="f32", threads=None, cap=16 << 20)
    made = script("column.py")["Ours"](options, dict, lambda pid: pid, 1)
    yield made
    made.stop()


def message(role: str, text: str) -> list[int]:
    return list(tokenizer().encode(f"<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>"))


HEAD = message("system", "You repair programs. " * 8)
SAID = [40, 41, 42, 43]


def test_column_computes_a_head_once_and_then_only_what_is_new(ours):
    one, two = (HEAD + message("user", text) for text in ("Fix the parser.", "Add a test now."))

    first = ours.run(_Asked("a", one, SAID), "forced")
    second = ours.run(_Asked("b", two, SAID), "forced")
    grown = one + SAID + message("user", "Go on.")
    third = ours.run(_Asked("a", grown, SAID, closed=["b", "unknown"]), "forced")

    assert first["computed"] == len(one)
    assert second["computed"] == len(two) - len(HEAD)
    assert third["computed"] == len(grown) - len(one) - 3
    assert third["cached"] == len(one) + 3
    assert first["out"] == SAID
    assert ours.cache_bytes() > 0


def test_column_forks_says_its_own_or_has_its_output_rewritten(ours):
    prompt = HEAD + message("user", "Fix the parser.")

    own = ours.run(_Asked("a", prompt, SAID), "free")
    again = ours.run(_Asked("c", prompt, SAID, fork_of="a"), "rewritten")

    assert len(own["out"]) == len(SAID)
    assert own["greedy"] == own["out"]
    assert again["greedy"] == own["out"]
    assert again["out"] == SAID
    assert again["computed"] == 1


def test_slots_counts_what_all_sessions_decode_together(
    script: Callable[[str], dict[str, Any]], micro_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = script("slots.py")
    options = ["--model", micro_folder, "--sessions", "2", "--threads", "1", "--json", "-"]
    assert names["main"](options) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["who"] == "ours"
    assert len(row["rounds"]) == names["NUM_ROUNDS"]
    assert row["tokens_per_s"] == max(row["rounds"]) > 0


def test_slots_wants_both_a_server_and_its_model(
    script: Callable[[str], dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script("slots.py")["main"](["--server", "llama-server"])
    assert "--gguf" in capsys.readouterr().err
