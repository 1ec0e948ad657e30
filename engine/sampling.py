"""From one row of logits to a token id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from agentcache.errors import InvalidRequest

__all__ = ["Sampler", "SamplingParams"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a reply is sampled. temperature 0 takes the most likely token; top_k 0 keeps all.

    seed: None draws from the runtime's own randomness. Raises InvalidRequest for values out of
        range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        whole = ("max_new_tokens", "top_k")
        for name in (*whole, "temperature", "top_p"):
            value = getattr(self, name)
            kind = int if name in whole else (int, float)
            if isinstance(value, bool) or not isinstance(value, kind):
                raise InvalidRequest(
                    f"{name} is {value!r}; give a {'whole ' if name in whole else ''}number"
                )
        checks = (
            ("max_new_tokens", self.max_new_tokens >= 0, "at least 0"),
            ("temperature", self._is_temperature(), f"0, or from {_COLDEST} to {_HOTTEST}"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k >= 0, "at least 0"),
        )
        for name, fine, wanted in checks:
            if not fine:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it has to be {wanted}")
        if self.seed is not None and (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not -(2**63) <= self.seed < 2**63
        ):
            raise InvalidRequest(f"seed is {self.seed!r}; give a whole number of at most 63 bits")

    def _is_temperature(self) -> bool:
        return self.temperature == 0 or _COLDEST <= self.temperature <= _HOTTEST


_COLDEST, _HOTTEST = 1e-3, 1e3
"""Beyond these, float32 logits over the temperature are no numbers any more."""


class Sampler:
    """Draws the tokens of one reply; the same seed and logits give the same tokens."""

    def __init__(self, params: SamplingParams, seed: int) -> None:
        self._params = params
        self._generator = torch.Generator().manual_seed(seed)

    def sample(self, logits: torch.Tensor) -> int:
        """A token id from logits [vocab]."""
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
        return int(torch.multinomial(probs, 1, generator=self._generator))


def _nucleus(probs: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the fewest likeliest tokens that together reach `top_p` (Holtzman et al., 2020)."""
    ranked, order = probs.sort(descending=True)
    ranked[ranked.cumsum(0) - ranked >= top_p] = 0
    return torch.zeros_like(probs).scatter_(0, order, ranked)
