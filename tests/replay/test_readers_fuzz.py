"""Damaged files: whatever is cut, changed or replaced, nothing but a `TraceError` comes out."""

import contextlib
import json
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentcache.errors import TraceError
from agentcache.replay.trace import Trajectory, read_file, read_paths

REPOSITORY = Path(__file__).parents[2]
FILES = sorted(
    path
    for folder in ("tests/fixtures/odd", "tests/fixtures/trajectories", "agentcache/data/sample")
    for path in (REPOSITORY / folder).rglob("*")
    if path.suffix in (".json", ".jsonl", ".traj")
)
JUNK = [None, True, 0, -1, 1.5, "", "x", "\ud800", [], {}, [None], {"a": None}, [[]], 10**400]


def name(path):
    return path.name[-40:]


def check_reads_or_rejects(path):
    """Read both ways; anything but a `TraceError` fails the test."""
    with contextlib.suppress(TraceError):
        for run in read_file(path):
            check(run)
    result = read_paths(path)
    for where, error in result.rejected:
        assert where == str(path)
        assert str(path) in str(error)
        assert error.remedy
    assert result.loaded + result.partial + result.skipped + len(result.rejected) == 1, (
        "each file is counted once"
    )
    for run in result.trajectories:
        assert run.calls
        check(run)


def check(run: Trajectory):
    for call in run.calls:
        assert call.messages
        for row in (*call.messages, call.answer):
            assert row["role"] in ("system", "user", "assistant", "tool")
            row["content"].encode()
    json.dumps([(call.messages, call.tools, call.answer) for call in run.calls])


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_cut_anywhere_gives_at_most_a_typed_error(tmp_path, path):
    raw = path.read_bytes()
    draw = random.Random(path.name)
    cuts = {0, 1, 2, len(raw) - 1, *(draw.randrange(len(raw)) for _ in range(12))}
    target = tmp_path / path.name
    for cut in sorted(cuts):
        target.write_bytes(raw[:cut])
        check_reads_or_rejects(target)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_with_flipped_bytes_gives_at_most_a_typed_error(tmp_path, path):
    draw = random.Random(path.name)
    target = tmp_path / path.name
    for _ in range(6):
        raw = bytearray(path.read_bytes())
        for _ in range(4):
            raw[draw.randrange(len(raw))] = draw.randrange(256)
        target.write_bytes(raw)
        check_reads_or_rejects(target)


def replace_somewhere(value, draw):
    """Put junk in place of one member, found by a random walk from the top."""
    node = value
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = draw.choice(keys)
        inner = node[key]
        if not isinstance(inner, dict | list) or not inner or draw.random() < 0.2:
            if draw.random() < 0.3 and isinstance(node, dict):
                del node[key]
            else:
                node[key] = draw.choice(JUNK)
            return value
        node = inner


@pytest.mark.parametrize("path", FILES, ids=name)
def test_file_with_values_of_other_types_gives_at_most_a_typed_error(tmp_path, path):
    if path.name in ("latin1_byte.traj.json", "truncated.traj.json"):
        pytest.skip("no JSON to change")
    draw = random.Random(path.name)
    target = tmp_path / path.name
    text = path.read_text(encoding="utf-8-sig")
    is_lines = path.suffix == ".jsonl"
    records = [line for line in text.split("\n") if line] if is_lines else [text]
    for _ in range(12):
        idx = draw.randrange(len(records))
        if records[idx].startswith("//"):
            continue
        changed = list(records)
        changed[idx] = json.dumps(replace_somewhere(json.loads(records[idx]), draw))
        target.write_text("\n".join(changed), encoding="utf-8")
        check_reads_or_rejects(target)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "response",
                    "answer",
                    "history",
                    "trajectory",
                    "role",
                    "content",
                    "type",
                    "uuid",
                    "parentUuid",
                    "sessionId",
                    "message",
                    "traj",
                    "task_id",
                    "query",
                    "choices",
                    "instance_id",
                    "metadata",
                    "action",
                    "observation",
                    "args",
                    "source",
                    "tool_calls",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("drawn")


@settings(max_examples=300)
@given(value=JSON)
def test_any_json_value_gives_at_most_a_typed_error(folder, value):
    for suffix in (".json", ".jsonl"):
        path = folder / f"x{suffix}"
        path.write_text(json.dumps(value), encoding="utf-8")
        check_reads_or_rejects(path)
