"""Damaged traces: whatever the damage, typed errors come out, and requests that are whole."""

import gzip
import json
import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from agentcache.errors import ConfigError, TraceError
from agentcache.simulate.read import read_traces

FIXTURES = Path(__file__).parents[1] / "fixtures" / "traces"
ODD_NUMBERS = [True, -1, 0, 2**31 - 1, 2**31, 10**400, 0.5, 1e308, -1e308, float("nan")]
ODD_VALUES = [None, *ODD_NUMBERS, "", "x", "\ud800", [], {}, [[]]]
SCRAPS = [b"", b"}", b'"', b"[", b"\n", b"-", b"\xff", b"9" * 20]
MARCONI = [
    {
        "session_id": n % 2,
        "turn_id": n // 2,
        "ts": float(n),
        "num_input_tokens": 2,
        "num_output_tokens": 1,
        "input_tokens": [n, n + 1],
        "output_tokens": [7],
        "parent_session": -1 if n < 2 else 1 - n % 2,
        "marks": [1],
        "expect": 1.0,
        "priority": 1,
        "closed": n > 2,
    }
    for n in range(4)
]


def sources():
    with gzip.open(FIXTURES / "claude-code-kv.models.json.gz") as file:
        claude_code = json.load(file)
    for request in claude_code["requests"]:
        request["hash_ids"] = request["hash_ids"][:6]
        request["in"] = 6 * 64 + 9
    mooncake = map(json.loads, (FIXTURES / "mooncake.jsonl").read_text().splitlines())
    return {"marconi": MARCONI, "mooncake": list(mooncake), "claude-code-kv": [claude_code]}


SOURCES = sources()


def check(path):
    """Read it; what comes out has to keep the contract of a request."""
    try:
        [trace] = read_traces(path)
    except (TraceError, ConfigError):  # text after the damage needs a tokenizer
        return
    assert trace.requests
    assert all(isinstance(error, TraceError) for error in trace.problems)
    assert trace.requests[0].at == 0.0
    assert all(a.at <= b.at for a, b in pairwise(trace.requests))
    for request in trace.requests:
        assert request.ids.dtype == np.int32
        assert request.ids.min() >= 0
        assert 0 < request.prompt_len <= len(request.ids)
        assert all(0 < mark <= request.prompt_len for mark in request.marks)
        assert list(request.marks) == sorted(set(request.marks))
        assert request.parent is None or request.parent != request.session


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("layout", ["lines", "list", "gzip"])
def test_damaged_bytes_raise_nothing_but_typed_errors(tmp_path, name, layout):
    draw = random.Random(f"{name} {layout}")
    path = tmp_path / "trace"
    values = [json.dumps(value) for value in SOURCES[name]]
    text = "[" + ",\n".join(values) + "]" if layout == "list" else "\n".join(values)
    whole = gzip.compress(text.encode(), mtime=0) if layout == "gzip" else text.encode()
    for _ in range(60):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(content))
            end = place + draw.choice([0, 1, 1, 30, len(content)])
            content[place:end] = draw.choice(SCRAPS)
        path.write_bytes(content)
        check(path)


@pytest.mark.parametrize("name", SOURCES)
def test_odd_values_raise_nothing_but_typed_errors(tmp_path, name):
    path = tmp_path / "trace"
    for odd in ODD_VALUES:
        for key in SOURCES[name][0]:
            rows = [{**row, key: odd} if n == 0 else row for n, row in enumerate(SOURCES[name])]
            path.write_text("\n".join(map(json.dumps, rows)))
            check(path)
        if name == "claude-code-kv":
            first, *rest = SOURCES[name][0]["requests"]
            for key in first:
                document = {**SOURCES[name][0], "requests": [{**first, key: odd}, *rest]}
                path.write_text(json.dumps(document))
                check(path)
