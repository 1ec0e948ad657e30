"""Recorded runs through a runtime: one session handle each, turn by turn, answers absorbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.clock import Clock, SystemClock
from agentcache.config import CacheConfig
from agentcache.engine.chat import ChatFormat
from agentcache.engine.loader import LoadedModel, load_model
from agentcache.engine.tokenizer import Tokenizer
from agentcache.engine.transformers_backend import shape_of
from agentcache.engine.verify import LOGIT_TOLERANCE
from agentcache.errors import AgentCacheError, ConfigError
from agentcache.policy.cost import prefill_flops
from agentcache.replay.need import NeedCounter
from agentcache.replay.results import CallRecord, FileCounts, ReplayResult
from agentcache.replay.schedule import interleave, spread
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.engine.segments import Encoded
    from agentcache.replay.trace import Call, ReadResult, Trajectory
    from agentcache.session.handle import Session
    from agentcache.session.turn import Turn
    from agentcache.types import ModelShape

__all__ = ["ReplayOptions", "Replayer", "budget_of"]

Progress = Callable[[int, int], None]
"""Told (calls done, calls in all)."""


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay. verify, cold: how many calls, evenly spread, are compared with a cold run, and
    timed without the cache. concurrency: runs open at once, interleaved. max_turns: calls per run.
    """

    concurrency: int = 1
    max_turns: int | None = None
    stepwise: bool = False
    verify: int = 0
    cold: int = 0

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("max_turns", 1), ("verify", 0), ("cold", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} is {value}; it has to be at least {least}")


def budget_of(text: str | None, need_bytes: int) -> int | str | None:
    """A budget as `CacheConfig` takes it: bytes as given, or a share ("10%") of the need.

    Raises ConfigError for a share that is no number above 0.
    """
    if text is None or not text.strip().endswith("%"):
        return text
    try:
        share = float(text.strip()[:-1])
    except ValueError:
        share = 0.0
    if not 0 < share < float("inf"):
        raise ConfigError(f'{text!r} is no share; write "10%", or bytes such as "512MiB"')
    return max(1, int(need_bytes * share / 100))


@dataclass(slots=True)
class _Tally:
    """What adds up during a run."""

    calls: list[CallRecord] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    bad_paths: set[str] = field(default_factory=set)
    flops_computed: int = 0
    flops_total: int = 0
    counter: NeedCounter = field(default_factory=NeedCounter)


class Replayer:
    """Replays what was read from files through one model.

    >>> from agentcache.replay.trace import read_paths  # doctest: +SKIP
    >>> replayer = Replayer("tiny-hybrid", read_paths("runs/"))  # doctest: +SKIP
    >>> result = replayer.run(budget="10%", policy="auto")  # doctest: +SKIP
    >>> result.tokens.hit_rate  # doctest: +SKIP
    """

    def __init__(
        self,
        model: str,
        read: ReadResult,
        options: ReplayOptions | None = None,
        clock: Clock | None = None,
        *,
        adapter: str | None = None,
        unproven: bool = False,
    ) -> None:
        """adapter, unproven: as for `Runtime.load`."""
        self._name = model
        self._read = read
        self._options = options or ReplayOptions()
        self._clock = clock or SystemClock()
        self._unproven = unproven
        self._loaded: LoadedModel = load_model(model, adapter=adapter, unproven=unproven)

    @property
    def trajectories(self) -> Sequence[Trajectory]:
        """The runs that will be replayed."""
        return self._read.trajectories

    def order(self) -> tuple[tuple[int, int, bool], ...]:
        """(trajectory, call, is last) of every call, in the order of the replay."""
        options = self._options
        return tuple(interleave(self.trajectories, options.concurrency, options.max_turns))

    def need_bytes(self) -> int:
        """The need of these runs in this order (see `NeedCounter`), found without the model."""
        tokenizer = Tokenizer(self._loaded.tokenizer)
        shape = shape_of(self._loaded.model, unproven=self._unproven)
        end_ids = tokenizer.end_ids(getattr(self._loaded.model, "generation_config", None))
        chat = ChatFormat(tokenizer, end_ids=end_ids)
        known: dict[int, tuple[Encoded, ...]] = {}
        counter = NeedCounter()
        for index, number, _ in self.order():
            call = self.trajectories[index].calls[number]
            try:
                prompt = chat.encode(
                    chat.render(call.messages, call.tools).segments, known.get(index, ())
                )
                reply = chat.encode(
                    chat.reply_segments(call.messages, call.answer, call.tools), at_start=False
                )
            except AgentCacheError:
                continue  # the replay itself reports it
            known[index] = (*prompt.parts, *reply.parts)
            end = sorted(end_ids)[:1]
            ids = np.concatenate([prompt.ids, reply.ids, np.array(end, dtype=np.int32)])
            counter.add(ids, len(prompt.ids))
        return counter.need_bytes(shape)

    def run(
        self,
        *,
        budget: int | str | None = None,
        policy: str = "auto",
        progress: Progress | None = None,
    ) -> ReplayResult:
        """Replay everything once, with a cache of its own.

        budget: bytes, a text such as "512MiB", a share such as "10%", or None for half of what the
        weights leave. A call that cannot be served is reported and the run goes on. Raises
        ConfigError and what `Runtime` raises for settings that cannot work.
        """
        is_share = isinstance(budget, str) and budget.strip().endswith("%")
        limit = (
            budget_of(budget, self.need_bytes()) if isinstance(budget, str) and is_share else budget
        )
        config = CacheConfig(budget=limit, policy=policy)
        with Runtime(
            self._loaded.model,
            self._loaded.tokenizer,
            cache=config,
            adapter=self._loaded.adapter,
            unproven=self._unproven,
            clock=self._clock,
        ) as runtime:
            return self._replay(runtime, budget is not None, progress)

    def _replay(self, runtime: Runtime, limited: bool, progress: Progress | None) -> ReplayResult:
        order, tally = self.order(), _Tally()
        verified = spread(self._options.verify, len(order))
        timed = spread(self._options.cold, len(order)) - verified
        sessions: dict[int, Session] = {}
        begin = self._clock.now()
        for position, (index, number, last) in enumerate(order):
            session = sessions.get(index) or self._open(runtime, index)
            sessions[index] = session
            call = self.trajectories[index].calls[number]
            try:
                turn = self._call(session, call, position in verified)
            except AgentCacheError as error:
                self._reject(tally, index, number, error)
            else:
                cold = self._cold_ttft(runtime, session, turn) if position in timed else None
                self._count(tally, runtime, session, index, number, turn, cold, begin)
            if last:
                session.close()
                del sessions[index]
            if progress is not None:
                progress(position + 1, len(order))
        return self._result(runtime, tally, limited)

    def _open(self, runtime: Runtime, index: int) -> Session:
        trajectory = self.trajectories[index]
        return runtime.session(trajectory.id, parent=trajectory.parent)

    def _call(self, session: Session, call: Call, verify: bool) -> Turn:
        return session.complete(
            call.messages,
            tools=call.tools,
            replay=call.answer,
            stepwise=self._options.stepwise,
            verify=verify,
        )

    def _cold_ttft(self, runtime: Runtime, session: Session, turn: Turn) -> float:
        prompt_len = turn.usage.prompt_tokens
        prompt = session.ids[:prompt_len]
        engine = runtime.engine
        return runtime.on_engine(lambda: engine.run_cold(prompt, prompt_len, 1)).ttft_s

    def _reject(self, tally: _Tally, index: int, number: int, error: AgentCacheError) -> None:
        trajectory = self.trajectories[index]
        tally.rejected.append(f"{trajectory.path}: {trajectory.id}, call {number}: {error}")
        tally.bad_paths.add(trajectory.path)

    def _count(
        self,
        tally: _Tally,
        runtime: Runtime,
        session: Session,
        index: int,
        number: int,
        turn: Turn,
        cold: float | None,
        begin: float,
    ) -> None:
        usage, shape = turn.usage, runtime.shape
        tally.counter.add(session.ids, usage.prompt_tokens)
        tally.flops_computed += prefill_flops(shape, usage.cached_tokens, usage.prompt_tokens)
        tally.flops_total += prefill_flops(shape, 0, usage.prompt_tokens)
        kinds = runtime.stats()["bytes"]
        if turn.verify is not None:
            cold = turn.verify.cold_ttft_s
        tally.calls.append(
            CallRecord(
                trajectory=self.trajectories[index].id,
                call=number,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                computed_tokens=usage.computed_tokens,
                output_tokens=usage.output_tokens,
                ttft_s=usage.ttft_s,
                total_s=usage.total_s,
                at_s=self._clock.now() - begin,
                bytes_by_kind={kind: kinds[kind]["used"] for kind in _SHOWN_KINDS},
                miss=None if turn.miss is None else turn.miss.to_json(),
                verify=None if turn.verify is None else asdict(turn.verify),
                cold_ttft_s=cold,
            )
        )

    def _result(self, runtime: Runtime, tally: _Tally, limited: bool) -> ReplayResult:
        stats: dict[str, Any] = runtime.stats()
        peaks = {
            kind: stats["bytes"][kind]["peak"] for kind in (*_SHOWN_KINDS, "running", "scratch")
        }
        shape: ModelShape = runtime.shape
        return ReplayResult(
            model=self._name,
            policy=runtime.config.policy,
            budget_bytes=stats["budget"] if limited else None,
            need_bytes=tally.counter.need_bytes(shape),
            calls=tuple(tally.calls),
            num_trajectories=len(self.trajectories),
            ideal_cached_tokens=tally.counter.ideal_cached,
            flops_computed=tally.flops_computed,
            flops_total=tally.flops_total,
            peak_bytes=stats["bytes"]["total"]["peak"],
            peak_bytes_by_kind=peaks,
            files=self._files(tally),
            rejected=(*(str(error) for _, error in self._read.rejected), *tally.rejected),
            notes=self._read.warnings,
            verify_tolerance=LOGIT_TOLERANCE,
        )

    def _files(self, tally: _Tally) -> FileCounts:
        """Files by outcome: one that was read but of which calls were refused counts as partial."""
        read = self._read
        bad = len(tally.bad_paths)
        return FileCounts(
            loaded=max(0, read.loaded - bad),
            partial=read.partial + min(bad, read.loaded),
            skipped=read.skipped,
            rejected=len(read.rejected),
        )


_SHOWN_KINDS = ("full", "state")
