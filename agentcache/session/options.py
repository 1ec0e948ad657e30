"""Arguments common to all calls of a session, and what is wrong with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from agentcache.engine.sampling import SamplingParams
from agentcache.errors import InvalidRequest
from agentcache.types import IntArray

__all__ = ["CallOptions", "Replay", "check_options", "sampling_of", "seconds_of"]

Replay = str | Mapping[str, Any] | Sequence[int] | IntArray


class CallOptions(TypedDict, total=False):
    """Arguments common to `chat`, `complete` and `generate`, all optional.

    max_new_tokens: most output ids; 0 computes the prompt only (default 256).
    temperature, top_p, top_k, seed: sampling; temperature 0, the default, takes the most likely id.
    stop: a text, or several, at which the reply ends; it is in the turn's ids, not in its text.
    return_logits: keep the distribution of each output id in `turn.logits`.
    replay: a recorded answer to absorb in place of sampling: ids verbatim, or a text or message, to
        which the end of message is added. As one extension; with `stepwise=True` token by token.
    verify: True compares the call with a cold run before it returns (`turn.verify`); a number is
        the share of calls compared after they have returned, counted in `rt.stats()["verify"]`.
    exact: not available in this version; True raises UnsupportedOption.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    stop: str | Sequence[str] | None
    return_logits: bool
    replay: Replay | None
    stepwise: bool
    verify: bool | float | None
    exact: bool


def check_options(options: CallOptions) -> None:
    """Raises InvalidRequest for a name nobody knows, or a value that is no value of it."""
    unknown = sorted(set(options) - set(CallOptions.__annotations__))
    if unknown:
        known = ", ".join(sorted(CallOptions.__annotations__))
        raise InvalidRequest(f"unknown option {unknown[0]!r}; there are {known}")
    verify = options.get("verify")
    if verify is not None and not (isinstance(verify, (bool, int, float)) and 0 <= verify <= 1):
        raise InvalidRequest(f"verify is {verify!r}; give True, False or a share from 0 to 1")
    stop = options.get("stop") or ()
    if not isinstance(stop, str) and not (
        isinstance(stop, Sequence) and all(isinstance(text, str) for text in stop)
    ):
        raise InvalidRequest(f"stop is {stop!r}; give a text or a list of texts")


def sampling_of(options: CallOptions, room: int) -> SamplingParams:
    """The call's sampling; a reply ends where the model's limit leaves no more `room`."""
    stop = options.get("stop") or ()
    params = SamplingParams(
        max_new_tokens=options.get("max_new_tokens", 256),
        temperature=options.get("temperature", 0.0),
        top_p=options.get("top_p", 1.0),
        top_k=options.get("top_k", 0),
        seed=options.get("seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
    )
    return replace(params, max_new_tokens=max(0, min(params.max_new_tokens, room)))


_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(expect: float | str) -> float:
    """Seconds from a number or a text such as "30s". Raises InvalidRequest."""
    if isinstance(expect, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smh]?)\s*", expect)
        if match is None:
            raise InvalidRequest(f'{expect!r} is no duration; write it as 30, "30s", "5m" or "1h"')
        return float(match[1]) * _UNITS[match[2]]
    if expect < 0:
        raise InvalidRequest(f"a duration of {expect} s lies in the past; give at least 0")
    return float(expect)
