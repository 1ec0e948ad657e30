"""A call on its way through the engine: what was asked, what has been done, what came out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from agentcache.cache import Lease, Match, SessionRef
    from agentcache.engine.grammar import Grammar
    from agentcache.engine.sampling import Sampler, SamplingParams
    from agentcache.engine.stopping import StopStrings
    from agentcache.engine.tokenizer import Detokenizer
    from agentcache.engine.verify import VerifyResult
    from agentcache.types import FinishReason, IntArray, TokenLogprob, Usage

__all__ = ["EngineResult", "Request", "RequestSpec", "TokenBuffer"]


@dataclass(frozen=True, slots=True, eq=False)
class RequestSpec:
    """What a caller asks of the engine.

    prompt: token ids, at least one. begun_at: when the caller's call began, on the runtime's clock;
    times of the usage count from there. structural, passing: prompt lengths worth a
    checkpoint, to others or to this trajectory alone. after, known_len: the mark of a tip whose
    path equals `prompt[:known_len]`. salts: further identity, as (position, digest). tenant: on
    whose account it is computed. session: its name, for listeners to events. replay: ids to absorb
    in place of sampling; stepwise: one by one
    through decoding. verify: True compares with a cold run before the call returns, a number is
    the share of calls compared after it. grammar: what a sampled reply is kept to.
    exact: computed in the same passes whatever is found, alone, and reused where those end.
    emit: called on the engine thread with (ids, text) as they come. finish: turns the result into
    what the caller's future gets, on the engine thread.
    """

    prompt: IntArray
    namespace: bytes
    sampling: SamplingParams
    begun_at: float
    finish: Callable[[EngineResult], Any]
    structural: tuple[int, ...] = ()
    passing: tuple[int, ...] = ()
    salts: tuple[tuple[int, bytes], ...] = ()
    after: SessionRef | None = None
    known_len: int = 0
    replay: IntArray | None = None
    stepwise: bool = False
    return_logits: bool = False
    verify: bool | float = False
    grammar: Grammar | None = None
    priority: int = 0
    tenant: str | None = None
    exact: bool = False
    session: str | None = None
    emit: Callable[[tuple[int, ...], str], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class EngineResult:
    """What came of a request.

    ids: output ids. text: their text, without end id and without what a stop string cut off.
    match: what was known at the start. ref: the session's mark, held for the caller.
    absorbed_len: tokens of prompt and output in the final state. logits: [len(ids), vocab].
    logprobs: one record per output id; both where they were asked for.
    """

    ids: IntArray
    text: str
    finish_reason: FinishReason
    stop_string: str | None
    usage: Usage
    match: Match
    ref: SessionRef
    absorbed_len: int
    logits: torch.Tensor | None
    verify: VerifyResult | None
    logprobs: tuple[TokenLogprob, ...] | None = None


class TokenBuffer:
    """A growing int32 array; `array` is a view of what is there.

    It begins with an array of somebody else's, which is only read, and copied once something is to
    follow: so whoever hands in a long prompt does not wait for a copy of it.
    """

    def __init__(self, start: IntArray) -> None:
        self._data = np.asarray(start, dtype=np.int32)
        self._len = len(start)

    def __len__(self) -> int:
        return self._len

    @property
    def array(self) -> IntArray:
        return self._data[: self._len]

    def extend(self, ids: IntArray) -> None:
        """Append ids, amortised O(len(ids))."""
        need = self._len + len(ids)
        if need > len(self._data):
            grown = np.empty(max(need, 2 * len(self._data), 64), dtype=np.int32)
            grown[: self._len] = self._data[: self._len]
            self._data = grown
        self._data[self._len : need] = ids
        self._len = need


@dataclass(slots=True, eq=False)
class Request:
    """The engine's record of one call. `tokens[:absorbed]` are in the state of `lease.row`."""

    spec: RequestSpec
    arrival: int
    future: Future[Any]
    sampler: Sampler
    detokenizer: Detokenizer
    stops: StopStrings
    verify_after: bool
    tokens: TokenBuffer = field(init=False)
    lease: Lease | None = None
    absorbed: int = 0
    first_match: Match | None = None
    cached_len: int = 0
    first_token_at: float | None = None
    text: list[str] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    failure: Exception | None = None
    cancelled: bool = False
    restarted: bool = False

    def __post_init__(self) -> None:
        self.tokens = TokenBuffer(self.spec.prompt)

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def outputs(self) -> IntArray:
        return self.tokens.array[self.prompt_len :]

    @property
    def pending(self) -> int:
        """Tokens that are known but not absorbed."""
        return len(self.tokens) - self.absorbed

    @property
    def is_stepwise(self) -> bool:
        """Whether output comes token by token: sampled, or a recorded answer taken that way."""
        return self.spec.replay is None or self.spec.stepwise

    @property
    def decoding(self) -> bool:
        """Whether the next pass absorbs one sampled token."""
        return self.is_stepwise and self.num_outputs > 0 and self.pending == 1

    @property
    def keeps_logits(self) -> bool:
        return self.spec.return_logits or self.spec.verify is True or self.verify_after

    @property
    def num_rows(self) -> int:
        """Output ids whose distributions have been kept or noted."""
        return max(len(self.logits), len(self.logprobs))

    @property
    def wants_rows(self) -> bool:
        """Whether the distribution of every output id is needed, of recorded ones too."""
        return self.keeps_logits or self.spec.sampling.logprobs
