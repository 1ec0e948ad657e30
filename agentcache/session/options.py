"""Arguments common to all calls of a session, and what is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict

from agentcache.engine.grammar import Grammar
from agentcache.engine.sampling import SamplingParams
from agentcache.errors import InvalidRequest
from agentcache.types import IntArray

__all__ = ["CallOptions", "Replay", "check_options", "grammar_of", "sampling_of", "seconds_of"]

Replay = str | Mapping[str, Any] | Sequence[int] | IntArray


class CallOptions(TypedDict, total=False):
    """Arguments common to `chat`, `complete` and `generate`, all optional.

    max_new_tokens: most output ids; 0 computes the prompt only (default 256).
    temperature, top_p, top_k, seed: sampling; temperature 0, the default, takes the most likely id.
    min_p: leaves out ids less likely than this share of the likeliest one's probability.
    repetition_penalty: above 1 makes what stands in prompt or reply less likely, below 1 more; a
        factor on logits. presence_penalty, frequency_penalty, from -2 to 2: taken off the logits of
        ids of the reply, once and for each time. At temperature 0 too.
    logit_bias: by id, what to add to its logit, from -100 to 100.
    stop: a text, or several, at which the reply ends; it is in the turn's ids, not in its text.
    json_schema: a schema, as a dict or as text: the reply is JSON that it allows. regex: the whole
        reply matches it (Rust's syntax; no look-around). lark: it is what a grammar allows, in
        llguidance's form of Lark, such as `Runtime.tool_call_grammar` makes. The reply ends where
        nothing can follow; if max_new_tokens comes first, it is cut. Needs
        `pip install 'agentcache[grammar]'`.
    return_logits: keep the distribution of each output id in `turn.logits`.
    logprobs: True gives `turn.logprobs`, one `TokenLogprob` per output id, of recorded ones too;
        top_logprobs, up to 20, names the likeliest ids beside it.
    replay: a recorded answer to absorb in place of sampling: ids verbatim, or a text or message, to
        which the end of message is added. As one extension; with `stepwise=True` token by token.
    verify: True compares the call with a cold run before it returns (`turn.verify`); a number is
        the share of calls compared after they have returned, counted in `rt.stats()["verify"]`.
    exact: the same logits to the last bit, whatever the cache held. Computed alone, in passes of
        `prefill_chunk` tokens from the start of the prompt on, and reused only where those end, by
        other exact calls; so up to that many tokens of a prompt, and all of the reply before it,
        are computed again.
    """

    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int | None
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    stop: str | Sequence[str] | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    lark: str | None
    return_logits: bool
    logprobs: bool
    top_logprobs: int
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
        min_p=options.get("min_p", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias=_bias_of(options),
        logprobs=options.get("logprobs", False),
        top_logprobs=options.get("top_logprobs", 0),
    )
    if params.max_new_tokens <= room:
        return params
    return replace(params, max_new_tokens=max(0, room))


def _bias_of(options: CallOptions) -> tuple[tuple[int, float], ...]:
    """The bias as pairs; ids may come as text, as JSON has them."""
    bias = options.get("logit_bias")
    if bias is None:
        return ()
    if not isinstance(bias, Mapping):
        raise InvalidRequest(f"logit_bias is {bias!r}; give a mapping of ids to numbers")
    pairs: dict[Any, float] = {}
    for token, value in bias.items():
        is_text = isinstance(token, str) and token.isascii() and token.isdigit()
        pairs[int(token) if is_text else token] = value
    return tuple(pairs.items())


_GRAMMARS = ("json_schema", "regex", "lark")


def grammar_of(options: CallOptions) -> Grammar | None:
    """What the reply is kept to. Raises InvalidRequest for two at once, or beside a replay."""
    given = [name for name in _GRAMMARS if options.get(name) is not None]
    if not given:
        return None
    if len(given) > 1:
        raise InvalidRequest(
            f"{' and '.join(given)} are both given; a reply can follow one of them"
        )
    if options.get("replay") is not None:
        raise InvalidRequest(
            "a grammar says how to sample, and replay= is taken as it is; leave one of them out"
        )
    schema = options.get("json_schema")
    if schema is not None:
        return Grammar("json_schema", _schema_text(schema))
    text = options.get("regex") if given[0] == "regex" else options.get("lark")
    if not isinstance(text, str) or not text:
        raise InvalidRequest(f"{given[0]} is {text!r}; give a text of at least one character")
    return Grammar("regex" if given[0] == "regex" else "lark", text)


def _schema_text(schema: Mapping[str, Any] | str | None) -> str:
    """A JSON schema as text that is known to be JSON."""
    try:
        known = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(known, Mapping):
            raise InvalidRequest(f"json_schema is {schema!r}; give an object, or its text")
        return json.dumps(known, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"json_schema is no JSON: {error}") from error


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
