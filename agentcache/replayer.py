"""Recorded runs through a runtime: one session handle each, turn by turn, answers absorbed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.clock import Clock, SystemClock
from agentcache.config import CacheConfig
from agentcache.engine.backends import check_backend_name, check_weight_format
from agentcache.engine.chat import ChatFormat
from agentcache.engine.describe import describe
from agentcache.engine.fingerprint import fingerprint
from agentcache.engine.loader import LoadedModel, load_model
from agentcache.engine.messages import same_message
from agentcache.engine.tokenizer import Tokenizer
from agentcache.engine.verify import LOGIT_TOLERANCE
from agentcache.errors import AgentCacheError, ConfigError, InvalidRequest
from agentcache.policy.cost import prefill_flops
from agentcache.replay.need import NeedCounter
from agentcache.replay.results import CallRecord, FileCounts, ReplayResult
from agentcache.replay.schedule import interleave, spread
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from agentcache.engine.chat import Rendered
    from agentcache.engine.segments import Encoded
    from agentcache.replay.trace import Call, ReadResult, Trajectory
    from agentcache.session.handle import Session
    from agentcache.session.turn import Turn
    from agentcache.types import BackendName, IntArray, ModelShape, WeightFormat

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


class _Answers:
    """Recorded answers in one model's tokens.

    Sampled ids are those that were sampled where the model reads the recorded answer in them, and
    where they are its own by fingerprint. Else they are of another model, and the text counts.
    """

    def __init__(self, loaded: LoadedModel, vocab_size: int) -> None:
        self._model = loaded.model
        self._tokenizer = Tokenizer(loaded.tokenizer)
        config = getattr(loaded.model, "generation_config", None)
        self._end_ids = self._tokenizer.end_ids(config)
        self._end = np.array(_closing(loaded.tokenizer, self._end_ids), dtype=np.int32)
        self._vocab_size = vocab_size
        self.chat = ChatFormat(self._tokenizer, end_ids=self._end_ids)

    def sampled(self, call: Call, rendered: Rendered | None = None) -> IntArray | None:
        """The sampled ids, or None where there are none or the text counts.

        rendered: the call's prompt. Raises InvalidRequest for a prompt that cannot be rendered, and
        for ids outside the vocabulary unless they are known to be of another model.
        """
        ids = call.answer_ids
        if ids is None:
            return None
        outside = next((at for at, i in enumerate(ids) if i >= self._vocab_size), None)
        if outside is None:
            array = np.array(ids, dtype=np.int32)
            if self._says(call, array, rendered) or self._is_own(call):
                return array
        elif call.fingerprint is None or self._is_own(call):
            raise InvalidRequest(
                f"answer_ids[{outside}] is {ids[outside]}, outside the vocabulary of "
                f"{self._vocab_size} ids; leave answer_ids out to replay the answer's text"
            )
        return None

    def ids(self, call: Call, rendered: Rendered) -> IntArray:
        """What a replay absorbs. rendered: the call's prompt. Raises InvalidRequest."""
        sampled = self.sampled(call, rendered)
        if sampled is not None:
            return sampled
        segments = self.chat.reply_segments(call.messages, call.answer, call.tools)
        return np.concatenate([self.chat.encode(segments, at_start=False).ids, self._end])

    def _says(self, call: Call, ids: IntArray, rendered: Rendered | None) -> bool:
        """Whether the ids, read as a reply to the prompt, make the recorded answer."""
        rendered = rendered or self.chat.render(call.messages, call.tools)
        header = "".join(each.text for each in rendered.segments[rendered.reply_start :])
        reader = self.chat.reply_reader(
            in_thinking=rendered.in_thinking, tools=call.tools, header=header
        )
        visible = [token for token in ids.tolist() if token not in self._end_ids]
        reader.push(self._tokenizer.decode(visible, skip_special=True))
        reader.finish()
        return same_message(reader.message, call.answer)

    def _is_own(self, call: Call) -> bool:
        return call.fingerprint is not None and call.fingerprint == self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._model, self._tokenizer)


def _closing(tokenizer: Any, end_ids: frozenset[int]) -> list[int]:
    """The id that a runtime closes a recorded text with, if the model has one."""
    own = getattr(tokenizer, "eos_token_id", None)
    return [own] if own in end_ids else sorted(end_ids)[:1]


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
        backend: BackendName = "auto",
        weight_format: WeightFormat = "unchanged",
    ) -> None:
        """adapter, unproven, backend, weight_format: as for `Runtime.load`."""
        check_backend_name(backend)
        check_weight_format(weight_format)
        self._name = model
        self._read = read
        self._options = options or ReplayOptions()
        self._clock = clock or SystemClock()
        self._unproven = unproven
        self._backend: BackendName = backend
        self._weight_format: WeightFormat = weight_format
        self._loaded: LoadedModel = load_model(
            model, adapter=adapter, unproven=unproven, backend=backend
        )
        self._shape: ModelShape = describe(self._loaded.model, unproven=unproven).shape
        self._answers = _Answers(self._loaded, self._shape.vocab_size)

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
        chat = self._answers.chat
        known: dict[int, tuple[Encoded, ...]] = {}
        counter = NeedCounter()
        for index, number, _ in self.order():
            call = self.trajectories[index].calls[number]
            try:
                rendered = chat.render(call.messages, call.tools)
                prompt = chat.encode(rendered.segments, known.get(index, ()))
                reply = self._answers.ids(call, rendered)
            except AgentCacheError:
                continue  # the replay itself reports it
            known[index] = (*prompt.parts, *chat.reply_parts(reply))
            counter.add(np.concatenate([prompt.ids, reply]), len(prompt.ids))
        return counter.need_bytes(self._shape)

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
            backend=self._backend,
            weight_format=self._weight_format,
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
        sampled = self._answers.sampled(call)
        return session.complete(
            call.messages,
            tools=call.tools,
            replay=call.answer if sampled is None else sampled,
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
