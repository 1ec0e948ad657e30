"""What HTTP adds to a call that hits in full, and 64 streams at once.

A server runs in this process, on a thread of its own, over a loopback port. A call whose prompt of
some thousand tokens is cached asks for four tokens; just before it, the same forward passes run
bare, over the same pages and from the same state. What the client waits longer than those is what
rendering, matching, threads, HTTP and JSON cost. Then streams run side by side: none may fail, all
memory has to come back, and the slowest may not take much longer than the median. Exit status 1 if
a goal is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import aiohttp
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from benchkit.probes import forward, standing_at
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit, median
from benchkit.shown import count, millis

from agentcache.config import CacheConfig
from agentcache.integrations.server import ServerConfig, serving
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.types import IntArray

MODEL = "tiny-hybrid"
HIT_GOAL_S = 0.012
FAIR_GOAL = 2.0
COLUMNS = (
    Column("what", "what"),
    Column("prompt", "prompt_tokens", count),
    Column("cached", "cached_tokens", count),
    Column("calls", "calls", count),
    Column("bare passes", "bare_s", millis),
    Column("over HTTP", "measured_s", millis),
    Column("above", "above_s", millis),
)
HITS = {
    "plain": {},
    "in a session": {"session_id": "bench"},
    "streamed": {"stream": True, "stream_options": {"include_usage": True}},
}
"""Kinds of calls, by the fields they have besides the prompt."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one call, and how long its client waited."""

    usage: dict[str, Any]
    seconds: float


class Client:
    """One connection that is kept."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None
        self._connection = http.client.HTTPConnection(parts.hostname, parts.port)

    def close(self) -> None:
        """End the connection."""
        self._connection.close()

    def chat(self, body: dict[str, Any]) -> Answer:
        """Send, and read to the end."""
        text = json.dumps(body)
        headers = {"Content-Type": "application/json"}
        begin = time.perf_counter()
        self._connection.request("POST", "/v1/chat/completions", text, headers)
        answer = self._connection.getresponse()
        said = answer.read().decode()
        seconds = time.perf_counter() - begin
        if answer.status != 200:
            raise RuntimeError(said)
        if body.get("stream"):
            said = said.split("\n\n")[-3].removeprefix("data: ")
        return Answer(json.loads(said)["usage"], seconds)


def hit_row(runtime: Runtime, url: str, what: str, options: argparse.Namespace) -> dict[str, Any]:
    """Calls of one kind, each after the bare passes it is compared with."""
    messages = [{"role": "user", "content": " word" * options.prompt}]
    body = {"model": MODEL, "messages": messages, "max_tokens": options.new, **HITS[what]}
    ids = runtime.prompts.from_messages(messages, None, ()).ids
    bare, measured = [], []
    with closing(Client(url)) as client:
        for _ in range(_WARM_UP):
            answer = client.chat(body)
        start = answer.usage["prompt_tokens_details"]["cached_tokens"]
        for _ in range(options.repetitions):
            bare.append(runtime.on_engine(lambda: _bare(runtime, ids, start, options.new)))
            measured.append(client.chat(body).seconds)
    above = [took - passes for took, passes in zip(measured, bare, strict=True)]
    return {
        "what": what,
        "prompt_tokens": len(ids),
        "cached_tokens": start,
        "calls": options.repetitions,
        "bare_s": median(bare),
        "measured_s": median(measured),
        "above_s": median(above),
    }


_WARM_UP = 3


def _bare(runtime: Runtime, ids: IntArray, start: int, num_new: int) -> float:
    """Seconds of the passes alone: the end of the prompt, then a token at a time."""
    # which tokens they are makes no difference to what a pass costs
    tokens = np.concatenate([ids, ids[: num_new - 1]])
    with standing_at(runtime, tokens, start) as lease:
        begin = time.perf_counter()
        forward(runtime, lease, tokens[: len(ids)], start)
        for end in range(len(ids), len(tokens)):
            forward(runtime, lease, tokens[: end + 1], end)
        return time.perf_counter() - begin


async def _streams(url: str, number: int, num_new: int) -> list[float]:
    """Seconds that each of so many streams took, all begun at once. Raises where one fails."""

    async def one(client: aiohttp.ClientSession, at: int) -> float:
        messages = [{"role": "user", "content": f"I am number {at}. " * 8}]
        body = {"model": MODEL, "messages": messages, "max_tokens": num_new, "stream": True}
        begin = time.perf_counter()
        async with client.post(f"{url}/v1/chat/completions", json=body) as answer:
            text = await answer.text()
        if answer.status != 200 or not text.endswith("data: [DONE]\n\n") or '"error"' in text:
            raise RuntimeError(f"stream {at}: {answer.status} {text[-200:]}")
        return time.perf_counter() - begin

    connector = aiohttp.TCPConnector(limit=number)
    async with aiohttp.ClientSession(connector=connector) as client:
        return await asyncio.gather(*(one(client, at) for at in range(number)))


def stream_row(runtime: Runtime, url: str, options: argparse.Namespace) -> dict[str, Any]:
    """Streams side by side, and what they left behind."""
    before = _settled(runtime)
    seconds = asyncio.run(_streams(url, options.streams, options.stream_tokens))
    after = _settled(runtime)
    return {
        "what": f"{options.streams} streams of {options.stream_tokens} tokens",
        "prompt_tokens": 0,
        "cached_tokens": 0,
        "calls": options.streams,
        "bare_s": float("nan"),
        "measured_s": median(seconds),
        "above_s": float("nan"),
        "slowest_s": max(seconds),
        "unfair": max(seconds) / median(seconds),
        "left_behind": sum(abs(after[name] - before[name]) for name in before),
    }


def _settled(runtime: Runtime) -> dict[str, int]:
    """What is held once calls that were answered have ended: the same for a tenth of a second."""
    held, since = _held(runtime), time.monotonic()
    while time.monotonic() - since < 0.1:
        time.sleep(0.01)
        now = _held(runtime)
        if now != held:
            held, since = now, time.monotonic()
    return held


def _held(runtime: Runtime) -> dict[str, int]:
    """What must be the same after as before, once everything idle is dropped."""
    runtime.clear()
    stats = runtime.stats()
    return {
        "leases": stats["leases"],
        "sessions": stats["sessions"]["open"],
        "row_bytes": stats["bytes"]["running"]["used"],
        "used_bytes": stats["bytes"]["total"]["used"],
        "held_bytes": stats["held_bytes"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    options = _parser().parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console = console_for(options.json)
    cache = CacheConfig(budget="512MiB", max_running=16)  # as `agentcache serve` has it
    with (
        console.status("calls over HTTP"),
        Runtime.load(MODEL, cache=cache) as runtime,
        serving(runtime, ServerConfig(model=MODEL, port=0, max_queue=options.streams)) as url,
    ):
        rows = [hit_row(runtime, url, what, options) for what in HITS]
        rows.append(stream_row(runtime, url, options))
    return emit(_summary(rows, options), COLUMNS, options.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompt", type=int, default=3600, help="words of the prompt")
    parser.add_argument("--new", type=int, default=4, help="tokens of a reply")
    parser.add_argument("--repetitions", type=int, default=25, help="calls of each kind")
    parser.add_argument("--streams", type=int, default=64, help="streams side by side")
    parser.add_argument("--stream-tokens", type=int, default=32, help="tokens of a stream")
    parser.add_argument("--threads", type=int, help="torch threads; by default what torch takes")
    add_json_option(parser)
    return parser


def _summary(rows: list[dict[str, Any]], options: argparse.Namespace) -> Result:
    *hits, streams = rows
    goals = [Goal(f"{row['what']}, seconds above", row["above_s"], HIT_GOAL_S) for row in hits]
    goals.append(Goal("slowest over median stream", streams["unfair"], FAIR_GOAL))
    goals.append(Goal("leases, sessions and bytes left behind", streams["left_behind"], 0))
    over = {f"{row['what']}, over bare": row["measured_s"] / row["bare_s"] for row in hits}
    return Result(
        name="bench/agents/http",
        rows=rows,
        ratios={**over, "slowest over median stream": streams["unfair"]},
        goals=goals,
        settings={"prompt": options.prompt, "new": options.new, "streams": options.streams},
    )


if __name__ == "__main__":
    sys.exit(main())
