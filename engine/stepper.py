"""What one step of the engine does: acquire, extend one prompt, decode everybody, finish."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.cache import ANY_LEN, HybridCache, OutOfPages, common_prefix_len
from agentcache.engine.backend import Batch, Capture, ModelBackend, Span
from agentcache.engine.request import EngineResult, Request
from agentcache.engine.sampling import token_logprobs
from agentcache.engine.scheduler import Chunk, Scheduler
from agentcache.engine.verify import ColdRun, VerifyResult, cold_run, compare, log_mismatch
from agentcache.errors import InvalidRequest, RequestCancelled, RequestTooLarge
from agentcache.types import FEW_TOKENS, FinishReason, IntArray, Kind, Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.clock import Clock
    from agentcache.pools.tensors import TensorPools

__all__ = ["Stepper"]


class Stepper:
    """Moves requests on, on the engine thread; knows nothing of threads itself.

    An error of the backend or the cache is raised from `step`; the caller then has `fail_all` give
    everything back.

    drop_mismatches: the path of a call that differs from a cold run leaves the cache.
    """

    def __init__(
        self,
        backend: ModelBackend,
        pools: TensorPools,
        cache: HybridCache,
        *,
        end_ids: frozenset[int],
        chunk_len: int,
        clock: Clock,
        drop_mismatches: bool = False,
    ) -> None:
        self.backend = backend
        self.pools = pools
        self.cache = cache
        self.num_passes = {"extend": 0, "decode": 0}
        self._end_ids = end_ids
        self._chunk_len = chunk_len
        self._clock = clock
        self._drop_mismatches = drop_mismatches
        rows = pools.rows.num_rows
        self._scheduler = Scheduler(chunk_len, len(pools.staging_rows), max(1, rows // 2))

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute."""
        return not (self._scheduler.waiting or self._scheduler.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._scheduler.add(request)

    def check_fits(self, length: int) -> None:
        """Raises RequestTooLarge for a sequence of that length, if it can never fit."""
        size = self.pools.sizes
        pages = 0
        for group in self.backend.kv_layout.groups:
            needed = length if group.window is None else min(length, group.window)
            pages += -(-needed // self.pools.page_lens[group.kind])
        if pages > size.num_pages:
            raise RequestTooLarge(pages * size.page_bytes, size.num_pages * size.page_bytes)

    def step(self) -> None:
        """One chunk of one prompt or of several short ones, and one token for all who decode; in
        one pass where the backend can."""
        self._drop_cancelled()
        self._acquire()
        if self.backend.max_extend_batch > 1:
            self._together()
        else:
            self._extend()
            self._decode()

    def _drop_cancelled(self) -> None:
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            if request.failure is not None:
                self._fail(request, request.failure)
            elif request.cancelled:
                self._fail(request, RequestCancelled("the call was cancelled by its caller"))

    def _acquire(self) -> None:
        """Give leases to waiting requests while rows and pages last."""
        for request in self._scheduler.next_waiting():
            if not self.pools.rows.num_free:
                return
            spec = request.spec
            known = self._known(request)
            if self._follows(request, known):
                continue
            if not self._scheduler.has_room(len(request.tokens) - known):
                continue
            limit, structural, passing = None, spec.structural, spec.passing
            if spec.exact:
                limit = known
                structural = self._pass_ends(request, structural)
                passing = self._pass_ends(request, (*passing, request.prompt_len))
            try:
                lease = self.cache.acquire(
                    spec.namespace,
                    request.tokens.array,
                    limit=limit,
                    structural=structural,
                    passing=passing,
                    salts=spec.salts,
                    after=spec.after,
                    known_len=spec.known_len,
                    session=spec.session,
                    priority=spec.priority,
                    packed_limit=self._packed_limit(request),
                )
            except OutOfPages as short:
                self._short(request, short)
                return
            if spec.exact:
                lease.plan = self._pass_ends(request, lease.plan)
            else:
                lease.plan += self._planned_beyond(request)
            request.lease = lease
            request.absorbed = lease.boundary
            if request.first_match is None:
                request.first_match = lease.match
                request.cached_len = min(lease.boundary, request.prompt_len)
            self._scheduler.start(request)

    def _planned_beyond(self, request: Request) -> tuple[int, ...]:
        """Where admission asks for checkpoints from the end of the prompt on, in what is absorbed
        in chunks: there itself, and in a recorded answer."""
        start = len(request.tokens)
        end = start + 1
        if request.spec.replay is not None and not request.is_stepwise:
            end = request.prompt_len + len(request.spec.replay)
        return tuple(self.cache.admission.decoded(start, end))

    def _known(self, request: Request) -> int:
        """How much of a request could be reused now; of an exact one, up to the end of a pass."""
        spec, tokens = request.spec, request.tokens.array

        def peek(limit: int) -> int:
            return self.cache.peek(
                spec.namespace,
                tokens,
                limit=limit,
                salts=spec.salts,
                after=spec.after,
                known_len=spec.known_len,
                packed_limit=self._packed_limit(request),
            )

        if not spec.exact:
            return peek(len(tokens) - 1)
        # A boundary may lie where another sequence left, though only ends of passes are filed.
        known = peek(self._pass_end(request, request.prompt_len))
        while known != self._pass_end(request, known):
            known = peek(self._pass_end(request, known))
        return known

    def _packed_limit(self, request: Request) -> int:
        """How far a request may go on from packed checkpoints: anew anywhere, but what it has
        computed since is its live state, which is never rounded, not by a pre-emption either."""
        is_begun = request.first_match is not None or request.restarted
        packs = self.pools.state_pages < self.pools.row_pages
        return request.cached_len if packs and is_begun else ANY_LEN

    def _pass_end(self, request: Request, length: int) -> int:
        """The last end of a full pass of an exact request's prompt that is not beyond `length`.

        What was sampled or recorded is absorbed in other passes than a prompt.
        """
        return min(length, request.prompt_len - 1) // self._chunk_len * self._chunk_len

    def _pass_ends(self, request: Request, lengths: Iterable[int]) -> tuple[int, ...]:
        """`_pass_end` of each, ascending."""
        return tuple(sorted({self._pass_end(request, at) for at in lengths}))

    def _follows(self, request: Request, known: int) -> bool:
        """Whether a prompt in progress is about to publish more of the request's tokens than are
        known; the request then waits for it."""
        tokens, spec = request.tokens.array, request.spec
        for leader in self._scheduler.extending():
            lease, other = leader.lease, leader.spec
            assert lease is not None
            if (other.namespace, other.salts) != (spec.namespace, spec.salts):
                continue
            planned = [at for at in lease.plan if at > max(lease.committed_len, known + FEW_TOKENS)]
            if not planned or planned[0] >= len(tokens):
                continue
            shared = common_prefix_len(leader.tokens.array[: planned[-1]], tokens[:-1])
            coming = [at for at in planned if at <= min(shared, self._packed_limit(request))]
            if coming:
                self._scheduler.follow(request, leader, coming[-1])
                return True
        return False

    def _short(self, request: Request, short: OutOfPages) -> None:
        """A waiting request cannot be acquired: wait for others, or fail alone."""
        if self._scheduler.running:
            self._scheduler.block()
        elif not request.restarted:
            self._restart(request)
        else:
            self._fail(request, self._too_large(short))

    def _restart(self, request: Request) -> None:
        """Start a request anew on an empty cache, once.

        What it found is held beside its own copies of the same positions; from nothing it may fit.
        """
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None
            self._scheduler.suspend(request)
        request.restarted = True
        request.first_match = None
        request.absorbed = 0
        self.cache.clear()

    def _too_large(self, short: OutOfPages) -> RequestTooLarge:
        size = self.pools.sizes
        total = size.num_pages * size.page_bytes
        return RequestTooLarge(total + short.missing * size.page_bytes, total)

    def _reserve(self, request: Request, length: int) -> bool:
        """Room for `length` tokens, others giving way from the latest on. False: it gave way."""
        while True:
            assert request.lease is not None
            try:
                self.cache.reserve(request.lease, length)
                return True
            except OutOfPages as short:
                if len(self._scheduler.running) == 1:
                    self._alone(request, short)
                    return False
                victim = self._scheduler.victim()
                self._suspend(victim)
                if victim is request:
                    return False

    def _alone(self, request: Request, short: OutOfPages) -> None:
        """Even alone the request does not fit, unless from nothing."""
        assert request.lease is not None
        if not request.restarted:
            self._restart(request)
        else:
            self._fail(request, self._too_large(short))

    def _suspend(self, request: Request) -> None:
        """Publish what the request has and take its memory; it is acquired anew later."""
        assert request.lease is not None
        if request.spec.exact:
            self.cache.release(request.lease)  # only the ends of its passes are of use again
        else:
            self.cache.suspend(request.lease, request.tokens.array, request.absorbed)
        request.lease = None
        self._scheduler.suspend(request)
        self.cache.metrics.add("preempted", "requests")

    def _extend(self) -> None:
        """One chunk of the prompt (or recorded answer) in progress."""
        chunks = [c for c in self._scheduler.next_chunks(1) if self._reserve(c.request, c.stop)]
        self._pass(chunks, [])

    def _decode(self) -> None:
        """One token for everybody who has one sampled token to absorb."""
        ready = self._reserve_decodes()
        for request in ready:
            if request.spec.exact:
                self._pass([], [request])
        self._pass([], [request for request in ready if not request.spec.exact])

    def _together(self) -> None:
        """Both in one pass, but what has to be exact."""
        chunks = self._scheduler.next_chunks(self.backend.max_extend_batch)
        chunks = [c for c in chunks if self._reserve(c.request, c.stop)]
        ready = self._reserve_decodes()
        # A later reservation may have taken an earlier request's lease.
        chunks = [chunk for chunk in chunks if chunk.request.lease is not None]
        if any(chunk.request.spec.exact for chunk in chunks):
            self._pass(chunks, [])
            chunks = []
        for request in ready:
            if request.spec.exact:
                self._pass([], [request])
        self._pass(chunks, [request for request in ready if not request.spec.exact])

    def _reserve_decodes(self) -> list[Request]:
        ready = [r for r in self._scheduler.decoding() if self._reserve_decode(r)]
        return [r for r in ready if r.lease is not None]

    def _pass(self, chunks: list[Chunk], ready: list[Request]) -> None:
        """Absorb chunks, and one token each for those who are ready."""
        if not chunks and not ready:
            return
        staging = iter(self.pools.staging_rows)
        captures = [tuple(Capture(at, next(staging)) for at in chunk.inside) for chunk in chunks]
        spans = [self._chunk_span(*pair) for pair in zip(chunks, captures, strict=True)]
        spans += [self._decode_span(request) for request in ready]
        exact = any(r.spec.exact for r in (*ready, *(chunk.request for chunk in chunks)))
        self.num_passes["extend" if chunks else "decode"] += 1
        logits = self.backend.forward(Batch(tuple(spans), self.pools, exact))
        for chunk, captured, rows in zip(chunks, captures, logits[: len(chunks)], strict=True):
            self._absorbed(chunk, captured, rows)
        for request, rows in zip(ready, logits[len(chunks) :], strict=True):
            self._decoded(request, rows[0])

    def _chunk_span(self, chunk: Chunk, captures: tuple[Capture, ...]) -> Span:
        request, lease = chunk.request, chunk.request.lease
        assert lease is not None
        return Span(
            request.tokens.array[chunk.start : chunk.stop],
            chunk.start,
            lease.table,
            lease.row,
            logits_at=self._wanted(request, chunk.start, chunk.stop),
            captures=captures,
            windows=lease.windows,
        )

    def _absorbed(self, chunk: Chunk, captures: tuple[Capture, ...], logits: torch.Tensor) -> None:
        """A chunk has been computed: its logits are taken, its checkpoints filed."""
        request, lease = chunk.request, chunk.request.lease
        assert lease is not None
        request.absorbed = chunk.stop
        self._scheduler.charge(request, chunk.stop - chunk.start)
        reason = self._after_extend(request, logits)  # the first token does not wait for filing
        for capture in captures:
            self.cache.commit(lease, request.tokens.array, capture.length, capture.row)
        if chunk.stop in chunk.captures:
            self.cache.commit(lease, request.tokens.array, chunk.stop, lease.row)
        if reason is not None:
            self._finish(request, reason)

    def _decoded(self, request: Request, logits: torch.Tensor) -> None:
        request.absorbed += 1
        self._scheduler.charge(request, 1)
        self._file_decoded(request)
        reason = self._take_logits(request, logits)
        if reason is not None:
            self._finish(request, reason)

    def _wanted(self, request: Request, start: int, stop: int) -> tuple[int, ...]:
        """Indices in [start, stop) whose logits are needed: of the last prompt token, and of every
        token after it but the last output, where they are kept."""
        first = request.prompt_len - 1 + request.num_rows  # what a pre-empted run has is kept
        last = request.prompt_len - 1
        if request.wants_rows:
            last = max(last, len(request.tokens) - 2)
        if self._resumes(request, stop):
            last = len(request.tokens) - 1
            first = max(first, last)
        return tuple(range(max(first, start) - start, min(last + 1, stop) - start))

    def _resumes(self, request: Request, stop: int) -> bool:
        """Whether this chunk ends a pre-empted request's way back to where it was sampling."""
        return request.is_stepwise and request.num_outputs > 0 and stop == len(request.tokens)

    def _after_extend(self, request: Request, logits: torch.Tensor) -> FinishReason | None:
        """Where the prompt or a way back has been absorbed, the next token is due.

        Returns why the request is over, if it is; as the following functions do.
        """
        if self._resumes(request, request.absorbed):
            return self._take_logits(request, logits[-1])
        if request.absorbed == request.prompt_len and request.num_outputs == 0:
            return self._first_token(request, logits[-1])
        if request.is_stepwise:
            return None
        if request.keeps_logits:
            request.logits.extend(logits)
        if request.spec.sampling.logprobs:
            self._note_logprobs(request, logits)
        return "replay" if request.absorbed == len(request.tokens) else None

    def _first_token(self, request: Request, logits: torch.Tensor) -> FinishReason | None:
        request.first_token_at = self._clock.now()
        replay = request.spec.replay
        if replay is not None and not request.is_stepwise and len(replay):
            if request.keeps_logits:
                request.logits.append(logits)
            self._emit_all(request, replay)
            if request.spec.sampling.logprobs:
                self._note_logprobs(request, logits[None])
            return None
        if replay is not None and not len(replay):
            return "replay"
        if replay is None and request.spec.sampling.max_new_tokens == 0:
            return "prefill"
        return self._take_logits(request, logits)

    def _emit_all(self, request: Request, replay: IntArray) -> None:
        """Take a recorded answer as a whole; it is absorbed by the next chunks."""
        request.tokens.extend(replay)
        visible = [i for i in replay.tolist() if i not in self._end_ids]
        text = "".join(request.detokenizer.push(i) for i in visible)
        self._say(request, tuple(replay.tolist()), text)

    def _file_decoded(self, request: Request) -> None:
        """File where a reply has got to, if admission asks for a checkpoint there."""
        at, lease = request.absorbed, request.lease
        assert lease is not None
        if not request.spec.exact and self.cache.admission.decoded(at, at + 1):
            self.cache.commit(lease, request.tokens.array, at, lease.row)

    def _reserve_decode(self, request: Request) -> bool:
        return request.lease is not None and self._reserve(request, request.absorbed + 1)

    def _decode_span(self, request: Request) -> Span:
        assert request.lease is not None
        ids = request.tokens.array[request.absorbed : request.absorbed + 1]
        lease = request.lease
        return Span(
            ids, request.absorbed, lease.table, lease.row, logits_at=(0,), windows=lease.windows
        )

    def _take_logits(self, request: Request, logits: torch.Tensor) -> FinishReason | None:
        """Choose the next token and say it.

        A reply whose grammar cannot go on fails alone, at the beginning of the next step.
        """
        try:
            token = self._choose(request, logits)
        except InvalidRequest as error:
            request.failure = error
            return None
        request.tokens.extend(np.array([token], dtype=np.int32))
        if request.keeps_logits:
            request.logits.append(logits.clone())  # not a view that holds the whole batch
        if request.spec.sampling.logprobs:
            self._note_logprobs(request, logits[None])
        is_end = token in self._end_ids
        stopped = self._speak(request, token, is_end)
        return self._finish_reason(request, is_end, stopped)

    def _choose(self, request: Request, logits: torch.Tensor) -> int:
        if request.spec.replay is not None:
            return int(request.spec.replay[request.num_outputs])
        return request.sampler.sample(logits)

    def _note_logprobs(self, request: Request, logits: torch.Tensor) -> None:
        """Note how likely the next output ids were that have no record yet; logits [n, vocab]."""
        done = len(request.logprobs)
        ids = request.outputs[done : done + len(logits)]
        num_top = request.spec.sampling.top_logprobs
        request.logprobs.extend(token_logprobs(logits, ids, num_top))

    def _finish_reason(self, request: Request, is_end: bool, stopped: bool) -> FinishReason | None:
        replay = request.spec.replay
        if replay is not None:
            return "replay" if request.num_outputs == len(replay) else None
        if is_end or stopped or request.sampler.is_complete:
            return "stop"
        return "length" if request.num_outputs >= request.spec.sampling.max_new_tokens else None

    def _speak(self, request: Request, token: int, is_end: bool) -> bool:
        """Text of a new token towards the caller; whether a stop string was completed."""
        piece = "" if is_end else request.detokenizer.push(token)
        safe, stopped = request.stops.push(piece)
        self._say(request, (token,), safe)
        return stopped

    def _say(self, request: Request, ids: tuple[int, ...], text: str) -> None:
        if text:
            request.text.append(text)
        if request.spec.emit is not None:
            request.spec.emit(ids, text)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        """File the last state, answer the caller, give the lease back."""
        lease = request.lease
        assert lease is not None
        if request.stops.matched is None:
            tail, stopped = request.stops.push(request.detokenizer.flush())
            self._say(request, (), tail if stopped else tail + request.stops.flush())
        # What a stop string cut off is not the history's; an exact request's passes ended before.
        files_end = self.cache.admission.files_end and not request.spec.exact
        if request.stops.matched is None and files_end:
            self.cache.commit(lease, request.tokens.array, request.absorbed, lease.row)
        checked = self._verify(request) if request.spec.verify is True else None
        result = self._result(request, reason, checked)
        if not request.verify_after:
            self._close_verified(request, checked)
        self._answer(request, result)
        if request.verify_after:
            self._close_verified(request, self._verify(request))

    def _answer(self, request: Request, result: EngineResult) -> None:
        try:
            value = request.spec.finish(result)
        except Exception as error:  # the caller's own error, delivered to that caller
            self.cache.leave(result.ref)
            request.future.set_exception(error)
            return
        request.future.set_result(value)

    def _result(
        self, request: Request, reason: FinishReason, checked: VerifyResult | None
    ) -> EngineResult:
        lease = request.lease
        assert lease is not None
        assert request.first_match is not None
        frontier = lease.frontier
        if request.stops.matched is not None:
            # The history ends where its text does, not on the ids that were sampled.
            while frontier.end > request.prompt_len:
                assert frontier.parent is not None
                frontier = frontier.parent
        filed = [node for node in lease.filed if node is not frontier]
        ref = self.cache.stand(frontier, filed, after=request.spec.after, lease=lease)
        return EngineResult(
            ids=request.outputs.copy(),
            text="".join(request.text),
            finish_reason=reason,
            stop_string=request.stops.matched,
            usage=self._usage(request),
            match=request.first_match,
            ref=ref,
            absorbed_len=request.absorbed,
            logits=_own_rows(request.logits) if request.spec.return_logits else None,
            verify=checked,
            logprobs=tuple(request.logprobs) if request.spec.sampling.logprobs else None,
        )

    def _usage(self, request: Request) -> Usage:
        now = self._clock.now()
        first = request.first_token_at or now
        self.cache.metrics.add("hits", "prompt_tokens", request.prompt_len)
        self.cache.metrics.add("hits", "cached_tokens", request.cached_len)
        return Usage(
            prompt_tokens=request.prompt_len,
            cached_tokens=request.cached_len,
            computed_tokens=request.prompt_len - request.cached_len,
            output_tokens=request.num_outputs,
            ttft_s=first - request.spec.begun_at,
            total_s=now - request.spec.begun_at,
            cached_by_tier=(("device", request.cached_len),),
        )

    def _verify(self, request: Request) -> VerifyResult:
        lease = request.lease
        assert lease is not None
        rows = request.logits
        warm = torch.stack(rows) if rows else torch.empty((0, self.backend.shape.vocab_size))
        exact = request.spec.exact
        cold = self.run_cold(
            request.tokens.array[: request.absorbed],
            request.prompt_len,
            len(request.logits),
            exact=exact,
            stepwise=exact and request.is_stepwise,
        )
        tables = {Kind.FULL.value: lease.table, **lease.windows}
        checked = compare(
            warm, self.pools, tables, lease.row, cold, request.absorbed, same_split=exact
        )
        self.cache.metrics.add("verify", "calls")
        self.cache.metrics.add("verify", "failed", int(not checked.ok))
        return checked

    def _close_verified(self, request: Request, checked: VerifyResult | None) -> None:
        """Give the lease back; a difference is logged, and its path dropped if that was asked for.

        The lease goes first: it holds the very path.
        """
        assert request.lease is not None
        path = request.lease.locked
        self._close_lease(request)
        if checked is None or checked.ok:
            return
        dropped = None
        if self._drop_mismatches:
            dropped = self.cache.condemn(path)
            self.cache.metrics.add("verify", "dropped", dropped)
        log_mismatch(
            checked,
            session=request.spec.session,
            prompt_len=request.prompt_len,
            cached_len=request.cached_len,
            dropped=dropped,
        )

    def run_cold(
        self,
        tokens: IntArray,
        prompt_len: int,
        num_logits: int,
        *,
        exact: bool = False,
        stepwise: bool = False,
    ) -> ColdRun:
        """Compute tokens without the cache, in memory of their own. On the engine thread."""
        return cold_run(
            self.backend,
            tokens,
            prompt_len=prompt_len,
            num_logits=num_logits,
            chunk=self._chunk_len,
            clock=self._clock,
            exact=exact,
            stepwise=stepwise,
        )

    def _close_lease(self, request: Request) -> None:
        if request.lease is not None:
            self.cache.release(request.lease)
            request.lease = None
        self._scheduler.remove(request)

    def _fail(self, request: Request, error: Exception) -> None:
        self._close_lease(request)
        if not request.future.done():
            request.future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Every request ends with that error and gives back what it holds."""
        for request in [*self._scheduler.running, *self._scheduler.waiting]:
            self._fail(request, error)


def _own_rows(rows: list[torch.Tensor]) -> torch.Tensor | None:
    """Rows as one ordinary tensor: one made in inference mode could not be changed by its owner."""
    with torch.inference_mode(mode=False):
        return torch.stack([row.clone() for row in rows]) if rows else None
