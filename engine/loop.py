"""The engine: one thread that owns model, pools and tree, and steps through requests.

A step is: take what callers sent, acquire, one chunk of one prompt, one token for all who decode.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import random
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from agentcache.engine.grammar import Grammars
from agentcache.engine.request import Request, RequestSpec
from agentcache.engine.sampling import Sampler
from agentcache.engine.stepper import Stepper
from agentcache.engine.stopping import StopStrings
from agentcache.engine.tokenizer import Detokenizer, Tokenizer
from agentcache.errors import RuntimeClosed

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.cache import HybridCache
    from agentcache.clock import Clock
    from agentcache.engine.backend import ModelBackend
    from agentcache.engine.verify import ColdRun
    from agentcache.pools.tensors import TensorPools
    from agentcache.types import IntArray

__all__ = ["Engine", "Submission"]

T = TypeVar("T")

_LONGEST_EXIT_S = 30.0
"""How long the end of the process waits for a step to be over."""


@dataclass(frozen=True, slots=True)
class Submission:
    """A request under way: its future, and a way to give up. Safe from any thread."""

    future: Future[Any]
    cancel: Callable[[], None]


class Engine:
    """Runs requests on a thread of its own.

    `submit` and `call` may be used from any thread; everything else happens on the engine thread.
    An error that is not one request's own fails every running request with that very error, and the
    engine goes on.
    """

    def __init__(
        self,
        backend: ModelBackend,
        pools: TensorPools,
        cache: HybridCache,
        tokenizer: Tokenizer,
        *,
        end_ids: frozenset[int],
        chunk_len: int,
        clock: Clock,
        seed: int,
        drop_mismatches: bool = False,
    ) -> None:
        self.backend = backend
        self.pools = pools
        self._stepper = Stepper(
            backend,
            pools,
            cache,
            end_ids=end_ids,
            chunk_len=chunk_len,
            clock=clock,
            drop_mismatches=drop_mismatches,
        )
        self._tokenizer = tokenizer
        self._grammars = Grammars(tokenizer, end_ids, backend.shape.vocab_size)
        self._random = random.Random(seed)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._arrivals = itertools.count()
        self._closed = threading.Event()
        # Nothing enters the inbox once it was drained. Handles that are collected while the lock is
        # held post too, hence reentrant.
        self._inbox_lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="agentcache-engine", daemon=True)
        self._thread.start()
        # A thread that still computes when the interpreter ends takes the process down with it.
        atexit.register(self._end_with_process)

    def submit(self, spec: RequestSpec) -> Submission:
        """Queue a request. Its future gets what `spec.finish` returns, or the error.

        Raises RuntimeClosed; RequestTooLarge for a prompt that can never fit; InvalidRequest and
        UnsupportedOption for what it asks of its sampler.
        """
        replay_len = 0 if spec.replay is None else len(spec.replay)
        self._stepper.check_fits(len(spec.prompt) + replay_len)
        share = spec.verify if not isinstance(spec.verify, bool) else 0.0
        request = Request(
            spec=spec,
            arrival=next(self._arrivals),
            future=Future(),
            sampler=self._sampler(spec),
            detokenizer=Detokenizer(self._tokenizer),
            stops=StopStrings(spec.sampling.stop if spec.replay is None else ()),
            verify_after=share > 0 and self._random.random() < share,
        )
        request.future.set_running_or_notify_cancel()  # only `cancel` below ends it early
        self._post(lambda: self._stepper.add(request))
        return Submission(request.future, lambda: self._cancel(request))

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the engine thread, between two steps, and wait for its result."""
        if threading.current_thread() is self._thread:
            return function()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._post(run)
        return future.result()

    def post(self, function: Callable[[], None]) -> None:
        """Run a function on the engine thread some time soon; errors fail running requests."""
        self._post(function)

    def close(self) -> None:
        """Fail what is under way with RuntimeClosed, give everything back and end the thread."""
        self._tell_end()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        atexit.unregister(self._end_with_process)

    def _tell_end(self) -> None:
        with self._inbox_lock:
            if not self._closed.is_set():
                self._closed.set()
                self._inbox.put(None)

    def _end_with_process(self) -> None:
        self._tell_end()
        self._thread.join(_LONGEST_EXIT_S)

    def run_cold(self, tokens: IntArray, prompt_len: int, num_logits: int) -> ColdRun:
        """Compute tokens without the cache, in memory of their own. On the engine thread."""
        return self._stepper.run_cold(tokens, prompt_len, num_logits)

    @property
    def num_passes(self) -> dict[str, int]:
        """Forward passes so far that extended a prompt, and that decoded."""
        return dict(self._stepper.num_passes)

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def _post(self, command: Callable[[], None]) -> None:
        with self._inbox_lock:
            if self._closed.is_set():
                raise RuntimeClosed("the runtime is closed; load a new one")
            self._inbox.put(command)

    def _sampler(self, spec: RequestSpec) -> Sampler:
        grammar = spec.grammar
        return Sampler(
            spec.sampling,
            self._seed(spec),
            prompt=spec.prompt,
            vocab_size=self.backend.shape.vocab_size,
            matcher=None if grammar is None else self._grammars.matcher(grammar),
        )

    def _seed(self, spec: RequestSpec) -> int:
        given = spec.sampling.seed
        return self._random.getrandbits(63) if given is None else given

    def _cancel(self, request: Request) -> None:
        request.cancelled = True
        with self._inbox_lock:
            if not self._closed.is_set():
                self._inbox.put(lambda: None)  # wake the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with torch.inference_mode():
                while self._take_commands():
                    try:
                        self._stepper.step()
                    except Exception as failure:  # the one place that catches everything
                        self._stepper.fail_all(failure)
        except BaseException as failure:  # what ends a thread must not leave its callers waiting
            error = failure
        finally:
            self._drain(error)

    def _drain(self, error: BaseException | None) -> None:
        """Take no more commands; fail what is under way and what was sent."""
        with self._inbox_lock:
            self._closed.set()
        while not self._inbox.empty():
            command = self._inbox.get()
            if command is not None:
                command()
        closed = RuntimeClosed("the runtime was closed while the call was under way")
        closed.__cause__ = error
        self._stepper.fail_all(closed)

    def _take_commands(self) -> bool:
        """Do what callers sent; waits while there is nothing to compute. False: close."""
        idle = self._stepper.idle
        while idle or not self._inbox.empty():
            command = self._inbox.get()
            if command is None:
                return False
            try:
                command()
            except Exception as error:
                self._stepper.fail_all(error)
            idle = self._stepper.idle
        return True
