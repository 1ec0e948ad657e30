"""From one row of logits to a token id, and how likely the model held it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from agentcache.errors import InvalidRequest
from agentcache.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.engine.grammar import Matcher
    from agentcache.types import IntArray

__all__ = ["Sampler", "SamplingParams", "token_logprobs"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a reply is sampled. temperature 0 takes the most likely token; top_k 0 keeps all.

    min_p: the least probability, as a share of the likeliest token's. repetition_penalty: logits of
    the tokens of prompt and output are divided by it, negative ones multiplied (Keskar et al.,
    2019). presence_penalty, frequency_penalty: taken off the logits of output tokens, once, and for
    every time they came. logit_bias: ids and what is added to their logits. Penalties and bias hold
    at temperature 0 too.
    seed: None draws from the runtime's own randomness. logprobs: note how likely the model held
    each output token, with the `top_logprobs` likeliest beside it.

    Raises InvalidRequest for values out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for name, (kind, is_fine, wanted) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value, kind):
                whole = "whole " if kind is int else ""
                raise InvalidRequest(f"{name} is {value!r}; give a {whole}number")
            if not is_fine(value):
                raise InvalidRequest(f"{name} is {value}; it has to be {wanted}")
        self._check_bias()
        self._check_logprobs()
        if self.seed is not None and not (
            _is_number(self.seed, int) and -(2**63) <= self.seed < 2**63
        ):
            raise InvalidRequest(f"seed is {self.seed!r}; give a whole number of at most 63 bits")

    def _check_bias(self) -> None:
        for token, bias in self.logit_bias:
            if not _is_number(token, int) or token < 0:
                raise InvalidRequest(f"logit_bias names {token!r}, which is no token id")
            if not _is_number(bias, float) or not -100 <= bias <= 100:
                raise InvalidRequest(
                    f"logit_bias of id {token} is {bias!r}; it has to be a number from -100 to 100"
                )

    def _check_logprobs(self) -> None:
        if not isinstance(self.logprobs, bool):
            raise InvalidRequest(
                f"logprobs is {self.logprobs!r}; give True or False, and how many others to name "
                "as top_logprobs"
            )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest(
                f"top_logprobs is {self.top_logprobs} without logprobs=True; give both"
            )


def _is_number(value: object, kind: type[int] | type[float]) -> bool:
    kinds = (int,) if kind is int else (int, float)
    return isinstance(value, kinds) and not isinstance(value, bool)


_COLDEST, _HOTTEST = 1e-3, 1e3
"""Beyond these, float32 logits over the temperature are no numbers any more."""

_NUMBERS: dict[str, tuple[type[int] | type[float], Callable[[float], bool], str]] = {
    "max_new_tokens": (int, lambda v: v >= 0, "at least 0"),
    "temperature": (
        float,
        lambda v: v == 0 or _COLDEST <= v <= _HOTTEST,
        f"0, or from {_COLDEST} to {_HOTTEST}",
    ),
    "top_p": (float, lambda v: 0 < v <= 1, "above 0 and at most 1"),
    "top_k": (int, lambda v: v >= 0, "at least 0"),
    "min_p": (float, lambda v: 0 <= v <= 1, "from 0 to 1"),
    "repetition_penalty": (
        float,
        lambda v: _COLDEST <= v <= _HOTTEST,
        f"from {_COLDEST} to {_HOTTEST}",
    ),
    "presence_penalty": (float, lambda v: -2 <= v <= 2, "from -2 to 2"),
    "frequency_penalty": (float, lambda v: -2 <= v <= 2, "from -2 to 2"),
    "top_logprobs": (int, lambda v: 0 <= v <= 20, "from 0 to 20"),
}
"""By name: kind, whether a value is in range, and the range in words."""


class Sampler:
    """Draws the tokens of one reply; the same seed and logits give the same tokens.

    matcher: keeps the reply to a grammar. Raises InvalidRequest for a bias beyond the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        *,
        prompt: IntArray,
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        self._generator = torch.Generator().manual_seed(seed)
        for token, _ in params.logit_bias:
            if token >= vocab_size:
                raise InvalidRequest(
                    f"logit_bias names id {token}, outside the vocabulary of {vocab_size} ids"
                )
        self._penalties = _Penalties(params, prompt) if _has_penalties(params) else None
        self._matcher = matcher
        self._is_free = self._penalties is None and matcher is None

    @property
    def is_complete(self) -> bool:
        """Whether the reply is whole by its grammar: nothing can follow."""
        return self._matcher is not None and self._matcher.is_complete

    def sample(self, logits: torch.Tensor) -> int:
        """A token id from logits [vocab], which stay as they are.

        Raises InvalidRequest where the grammar cannot go on.
        """
        return self._draw(logits) if self._is_free else self._steer(logits)

    def _steer(self, logits: torch.Tensor) -> int:
        """Draw under penalties and grammar, and tell them what came."""
        if self._penalties is not None:
            logits = self._penalties.apply(logits)
        if self._matcher is not None:
            forbidden = ~self._matcher.allowed(len(logits)).to(logits.device)
            logits = logits.masked_fill(forbidden, float("-inf"))
        token = self._draw(logits)
        if self._penalties is not None:
            self._penalties.note(token)
        if self._matcher is not None:
            self._matcher.advance(token)
        return token

    def _draw(self, logits: torch.Tensor) -> int:
        params = self._params
        if params.temperature == 0:
            return int(logits.argmax())
        logits = logits.float() / params.temperature
        if params.top_k and params.top_k < len(logits):
            floor = logits.topk(params.top_k).values[-1]
            logits = logits.masked_fill(logits < floor, float("-inf"))
        probs = logits.softmax(0)
        if params.top_p < 1:
            probs = _nucleus(probs, params.top_p)
        if params.min_p:
            probs = probs.masked_fill(probs < params.min_p * probs.max(), 0)
        return int(torch.multinomial(probs.cpu(), 1, generator=self._generator))


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens that together reach `top_p` (Holtzman et al., 2020)."""
    ranked, order = probs.sort(descending=True)
    ranked[ranked.cumsum(0) - ranked >= top_p] = 0
    return torch.zeros_like(probs).scatter_(0, order, ranked)


def _has_penalties(params: SamplingParams) -> bool:
    return bool(
        params.repetition_penalty != 1
        or params.presence_penalty
        or params.frequency_penalty
        or params.logit_bias
    )


class _Penalties:
    """What a reply's own tokens, its prompt and the caller's bias do to the logits.

    The repetition penalty scales the model's own logits; the others are added afterwards.
    """

    def __init__(self, params: SamplingParams, prompt: IntArray) -> None:
        self._params = params
        self._prompt = prompt
        self._counts: torch.Tensor | None = None
        self._bias_ids = torch.tensor([token for token, _ in params.logit_bias], dtype=torch.long)
        self._bias = torch.tensor([bias for _, bias in params.logit_bias], dtype=torch.float32)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """New logits [vocab], float32, in place of the model's."""
        params, logits = self._params, logits.float()
        if self._counts is None:
            self._start(logits)
        assert self._counts is not None
        if params.repetition_penalty != 1:
            scale = params.repetition_penalty
            scaled = torch.where(logits > 0, logits / scale, logits * scale)
            logits = torch.where(self._seen, scaled, logits)
        if params.presence_penalty:
            logits = logits - params.presence_penalty * (self._counts > 0)
        if params.frequency_penalty:
            logits = logits - params.frequency_penalty * self._counts
        if params.logit_bias:
            logits = logits.index_add(0, self._bias_ids, self._bias)
        return logits

    def note(self, token: int) -> None:
        """A token was drawn from what `apply` returned."""
        assert self._counts is not None
        self._counts[token] += 1
        self._seen[token] = True

    def _start(self, logits: torch.Tensor) -> None:
        """Set up what is counted, as long as a row of logits and where that is."""
        self._counts = torch.zeros_like(logits)
        self._seen = torch.zeros_like(logits, dtype=torch.bool)
        self._seen[_index(self._prompt).to(logits.device)] = True
        self._bias_ids, self._bias = self._bias_ids.to(logits.device), self._bias.to(logits.device)


def token_logprobs(logits: torch.Tensor, ids: IntArray, num_top: int) -> list[TokenLogprob]:
    """How likely each of ids [T] was under logits [T, vocab], with the likeliest `num_top` ids."""
    logprobs = logits.float().log_softmax(-1)
    chosen = _index(ids).to(logits.device)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    best = logprobs.topk(min(num_top, logprobs.shape[1]))
    rows = zip(ids.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        TokenLogprob(token, logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, top_ids, top in rows
    ]


def _index(ids: IntArray) -> torch.Tensor:
    return torch.from_numpy(ids.astype(np.int64))  # a copy: torch warns of arrays nobody may write
