"""Decoding of several sessions at once: tokens per second, ours and llama-server's beside it.

    python -P bench/runtime/slots.py --model DIR [--gguf FILE --server LLAMA_SERVER]

All sessions have prompts of 500 tokens, which are computed first, and then decode at the same time.
What counts is the stretch in which all of them decode. llama-server gets a slot for each session,
the same number of threads, and is asked over HTTP as its clients ask it. Rounds of both count by
their best: on a shared machine it is the figure that repeats.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import numpy as np
import torch
from benchkit.results import Column, Goal, Result, add_json_option, console_for, emit
from benchkit.shown import count

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PROMPT_LEN, NUM_NEW, NUM_ROUNDS = 500, 64, 4
GOAL = 2.0
COLUMNS = (
    Column("who", "who"),
    Column("sessions", "sessions", count),
    Column("threads", "threads", count),
    Column("tokens/s", "tokens_per_s", count),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    if bool(options.server) != bool(options.gguf):
        parser.error("--server and --gguf go together")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, 200, PROMPT_LEN).tolist() for _ in range(options.sessions)]
    rows = []
    with console_for(options.json).status("ours"):
        rows.append(_row("ours", options, _ours(options, prompts)))
    goals, ratios = [], {}
    if options.server:
        with console_for(options.json).status("llama-server"):
            rows.append(_row("llama-server", options, _llama_server(options, prompts)))
        ratio = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
        ratios = {"ours over llama-server": ratio}
        goals = [Goal("ours over llama-server", ratio, GOAL, at_least=True)]
    settings = {"model": Path(options.model).name, "dtype": options.dtype}
    return emit(Result("bench/runtime/slots", rows, ratios, goals, settings), COLUMNS, options.json)


def _row(who: str, options: argparse.Namespace, rates: list[float]) -> dict[str, Any]:
    return {
        "who": who,
        "sessions": options.sessions,
        "threads": options.threads,
        "tokens_per_s": max(rates),
        "rounds": rates,
    }


def _rounds(
    prompts: list[list[int]], ask: Callable[[int, list[int], int, list[float]], None]
) -> list[float]:
    """Tokens per second of each round. ask: (session, prompt, tokens, times), which notes when each
    token came."""
    rates = []
    for number in range(NUM_ROUNDS):
        longer = [[*prompt, *[7] * number] for prompt in prompts]
        _together(longer, 2, ask)
        times = _together(longer, NUM_NEW, ask)
        begin, end = max(own[0] for own in times), min(own[-1] for own in times)
        inside = sum(begin < at <= end for own in times for at in own)
        rates.append(inside / (end - begin))
    return rates


def _together(
    prompts: list[list[int]], num: int, ask: Callable[[int, list[int], int, list[float]], None]
) -> list[list[float]]:
    times: list[list[float]] = [[] for _ in prompts]
    threads = [
        threading.Thread(target=ask, args=(i, prompt, num, times[i]))
        for i, prompt in enumerate(prompts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return times


def _ours(options: argparse.Namespace, prompts: list[list[int]]) -> list[float]:
    cache = CacheConfig(budget="2GiB", max_running=len(prompts))
    dtype = getattr(torch, options.dtype)
    with Runtime.load(options.model, dtype=dtype, threads=options.threads, cache=cache) as runtime:
        sessions = [runtime.session(str(i)) for i in range(len(prompts))]
        bias = {} if runtime.end_id is None else {runtime.end_id: -100.0}

        def ask(i: int, prompt: list[int], num: int, times: list[float]) -> None:
            call = sessions[i].generate(prompt, max_new_tokens=num, logit_bias=bias, stream=True)
            times += [time.perf_counter() for _ in call]

        return _rounds(prompts, ask)


def _llama_server(options: argparse.Namespace, prompts: list[list[int]]) -> list[float]:
    url = f"http://127.0.0.1:{options.port}"
    slots = ["-np", str(len(prompts)), "-c", str(2048 * len(prompts))]
    threads = ["-t", str(options.threads), "-tb", str(options.threads)]
    command = [options.server, "-m", options.gguf, *threads, *slots, "--port", str(options.port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(i: int, prompt: list[int], num: int, times: list[float]) -> None:
        body = {"prompt": prompt, "n_predict": num, "ignore_eos": True, "temperature": 0}
        body |= {"id_slot": i, "stream": True}
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        with urllib.request.urlopen(request) as lines:
            times += [time.perf_counter() for line in lines if line.startswith(b"data: ")]

    try:
        _wait_for(f"{url}/health", server)
        return _rounds(prompts, ask)
    finally:
        server.terminate()
        server.wait()


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    """Until it answers. Raises RuntimeError where it ends before."""
    while server.poll() is None:
        try:
            urllib.request.urlopen(url, timeout=1).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{server.args!r} ended with status {server.returncode}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="small-hybrid", help="embedded model or folder")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--sessions", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", help="the same model for llama-server")
    parser.add_argument("--server", help="path of llama-server")
    parser.add_argument("--port", type=int, default=18_998)
    add_json_option(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
