"""Our column for a comparison of runtimes whose scripts lie in a folder of their own.

    python -P bench/runtime/column.py DIR [options of DIR/run.py] --columns ours hf-kept

DIR holds `columns.py`, with what a column returns, and `run.py`, which replays recorded
trajectories step by step over the columns named. `ours` is one more of them: one runtime, one
session handle per session of the trajectory, forked where the trajectory is.

Prompts come as ids there, without a word on where messages end. As other runtimes are told how a
message starts, this column says where the system prompt ends: the first session that brings one
computes the prompt up to there as a call of its own, which counts as part of its step.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import AutoTokenizer

from agentcache.config import CacheConfig
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from agentcache.session import Session, Turn

__all__ = ["NAME", "Ours", "main"]

NAME = "ours"
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_ROLE_STARTS, _SYSTEM = "<|start_of_role|>", "system"
_NO_LIMIT = "4GiB"


class Step(Protocol):
    """What a scenario asks for: the whole prompt in ids, and the recorded output."""

    session: str
    prompt: list[int]
    n_out: int
    forced: list[int]
    fork_of: str
    closed: list[str]


class Ours:
    """One runtime and a handle per session. make_result: the comparison's own record of a step.

    options: `model` and `dtype`, `threads`, and `cap`, the bytes of everything, or None.
    """

    name = NAME
    supports_forced = True

    def __init__(
        self,
        options: argparse.Namespace,
        make_result: Callable[..., Any],
        cpu_ns: Callable[[int], int],
        pid: int,
    ) -> None:
        self._runtime = Runtime.load(
            options.model,
            dtype=_DTYPES[options.dtype],
            threads=options.threads,
            cache=CacheConfig(budget=options.cap or _NO_LIMIT, max_running=1),
        )
        self._make_result, self._cpu_ns, self._pid = make_result, cpu_ns, pid
        tokenizer = AutoTokenizer.from_pretrained(options.model)
        self._role_starts = tuple(tokenizer.encode(_ROLE_STARTS, add_special_tokens=False))
        self._system = tuple(tokenizer.encode(_SYSTEM, add_special_tokens=False))
        self._heads: set[tuple[int, ...]] = set()
        self._sessions: dict[str, Session] = {}

    def pid(self) -> int:
        """The process whose CPU time counts."""
        return self._pid

    def cache_bytes(self) -> int:
        """What is kept of all sessions."""
        kinds = self._runtime.stats()["bytes"]
        return sum(kinds[kind]["used"] for kind in ("full", "swa", "state"))

    def stop(self) -> None:
        """End the runtime."""
        self._runtime.close()

    def run(self, step: Step, mode: str) -> Any:
        """One step. free: own output becomes history; forced: the recorded one is absorbed token by
        token; rewritten: own output is thrown away, and the recorded one follows in its place."""
        for id in step.closed:
            if id in self._sessions:
                self._sessions.pop(id).close()
        begin = self._cpu_ns(self._pid)
        session, is_new = self._session(step)
        head = self._new_head(step.prompt) if is_new else None
        calls = [] if head is None else [session.generate(head, max_new_tokens=0)]
        calls.append(self._generate(session, step, forced=mode == "forced"))
        seconds = (self._cpu_ns(self._pid) - begin) / 1e9
        return self._result(step, mode, calls, seconds)

    def _session(self, step: Step) -> tuple[Session, bool]:
        """The step's handle, and whether nothing is known of its trajectory."""
        known = self._sessions.get(step.session)
        if known is not None:
            return known, False
        source = self._sessions.get(step.fork_of)
        made = self._runtime.session(step.session) if source is None else source.fork(step.session)
        self._sessions[step.session] = made
        return made, source is None

    def _new_head(self, prompt: list[int]) -> list[int] | None:
        """The prompt up to the first message that is no system prompt; None if it was seen."""
        width, starts = len(self._role_starts), self._role_starts
        for at in range(len(prompt)):
            role = prompt[at + width : at + width + len(self._system)]
            if tuple(prompt[at : at + width]) == starts and tuple(role) != self._system:
                head = tuple(prompt[:at])
                is_new = bool(head) and head not in self._heads
                self._heads.add(head)
                return list(head) if is_new else None
        return None

    def _generate(self, session: Session, step: Step, *, forced: bool) -> Turn:
        if forced:
            return session.generate(step.prompt, replay=step.forced, stepwise=True)
        end = self._runtime.end_id
        # the other columns go on after an end id: a reply has as many tokens in each
        bias = None if end is None else {end: -100.0}
        return session.generate(step.prompt, max_new_tokens=step.n_out, logit_bias=bias)

    def _result(self, step: Step, mode: str, calls: Sequence[Turn], seconds: float) -> Any:
        last = calls[-1]
        computed = sum(call.usage.computed_tokens for call in calls)
        ttft = last.usage.ttft_s + sum(call.usage.total_s for call in calls[:-1])
        decode = last.usage.total_s - last.usage.ttft_s
        own = last.ids.tolist()
        share = ttft / (ttft + decode)
        return self._make_result(
            out=own if mode != "rewritten" else list(step.forced),
            greedy=[] if mode == "forced" else own,
            ttft=ttft,
            decode_s=decode,
            n_decoded=max(1, len(own) - 1),
            cached=len(step.prompt) - computed,
            computed=computed,
            ttft_cpu=share * seconds,
            decode_cpu=(1 - share) * seconds,
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the comparison of a folder with our column among those it knows."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or not Path(arguments[0], "columns.py").is_file():
        sys.exit(f"usage: {Path(__file__).name} DIR [options]; DIR holds columns.py and run.py")
    folder, *rest = arguments
    sys.path.insert(0, folder)
    columns: Any = importlib.import_module("columns")
    run: Any = importlib.import_module("run")

    def make_column(name: str, options: argparse.Namespace) -> Any:
        if name != NAME:
            return columns.make_column(name, options)
        return Ours(options, columns.Result, columns.cpu_ns, os.getpid())

    run.make_column = make_column
    sys.argv = [str(Path(folder, "run.py")), *rest]
    run.main()


if __name__ == "__main__":
    main()
