"""Parameters of a request by OpenAI's names, read into the options of a session's call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentcache.integrations._openai.fields import InvalidField, UnsupportedField, check_value
from agentcache.integrations._openai.forms import ReplyForm, call_schema
from agentcache.integrations._openai.messages import read_messages, read_tools

__all__ = ["Call", "CallGrammar", "read_call"]


@dataclass(frozen=True, slots=True)
class Call:
    """A request as `Session.complete` takes it, and how its reply is to be read."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    options: dict[str, Any]
    form: ReplyForm


@dataclass(frozen=True, slots=True)
class _Number:
    """A number's name among the options, and its range."""

    option: str
    kind: type[int] | type[float]
    least: float
    most: float


_NUMBERS = {
    "max_completion_tokens": _Number("max_new_tokens", int, 0, 2**31),
    "max_tokens": _Number("max_new_tokens", int, 0, 2**31),
    "temperature": _Number("temperature", float, 0, 2),
    "top_p": _Number("top_p", float, 0, 1),
    "top_k": _Number("top_k", int, -1, 2**31),
    "min_p": _Number("min_p", float, 0, 1),
    "seed": _Number("seed", int, -(2**63), 2**63 - 1),
    "presence_penalty": _Number("presence_penalty", float, -2, 2),
    "frequency_penalty": _Number("frequency_penalty", float, -2, 2),
    "repetition_penalty": _Number("repetition_penalty", float, 0.001, 1000),
    "top_logprobs": _Number("top_logprobs", int, 0, 20),
}
"""Of two names for one option the first counts."""

_MAX_STOPS = 16
_MAX_STOP_LEN = 1000
"""Each token's text is held against every stop text."""

_READ = frozenset(
    {
        *_NUMBERS,
        "logit_bias",
        "logprobs",
        "messages",
        "parallel_tool_calls",
        "response_format",
        "stop",
        "tool_choice",
        "tools",
    }
)

_IGNORED = frozenset(
    {
        "metadata",
        "model",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "stream",
        "stream_options",
        "user",
    }
)
"""Known names that change nothing about the reply, or that the adapter reads itself."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "n": (1,),
}
"""Values of unsupported names that ask for nothing."""


class CallGrammar(Protocol):
    """Makes a grammar of replies that call one of some tools, in the model's own form."""

    def __call__(self, tools: Sequence[Mapping[str, Any]], /, *, parallel: bool) -> str:
        """Lark source; with `parallel` several calls may follow each other."""
        ...


def read_call(
    params: Mapping[str, Any],
    *,
    call_grammar: CallGrammar | None = None,
    defaults: Mapping[str, Any] | None = None,
    ignored: Collection[str] = (),
    drop: bool = False,
) -> Call:
    """The call that a chat request's parameters ask for, `messages` and `tools` among them.

    call_grammar: `runtime.chat_format.tool_call_grammar`; without it calls that are forced are JSON
    of a call. defaults: options of `Session.complete` where the request says nothing. ignored:
    further names to pass over. drop: pass over what cannot be honoured, instead of raising
    UnsupportedField.

    Numbers go to the option of their meaning; `top_k=-1` is all. A tool choice that demands a call
    keeps the reply to exactly one, by a grammar, and with `parallel_tool_calls=True` to one or
    more. `response_format` keeps it to JSON, beside tools either to that or to a call.
    `tool_choice="none"` leaves the tools in the prompt, so that it stays the same, and calls are
    text.

    Raises InvalidField, UnsupportedField.
    """
    given = {name: value for name, value in params.items() if value is not None}
    if not drop:
        _check_supported(given, ignored)
    messages = read_messages(params.get("messages"))
    tools = read_tools(given.get("tools"))
    options = {**(defaults or {}), **_numbers(given), **_texts(given)}
    grammar, form = _form(given, tools, messages, call_grammar, drop=drop)
    return Call(messages, tools, {**options, **grammar}, form)


def _check_supported(given: Mapping[str, Any], ignored: Collection[str]) -> None:
    for name, value in given.items():
        if name in _READ or name in _IGNORED or name in ignored:
            continue
        if value not in _NEUTRAL.get(name, ()):
            raise UnsupportedField(name, "is not supported; leave it out")


def _numbers(given: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name, number in _NUMBERS.items():
        if name not in given:
            continue
        value = given[name]
        kinds = (int,) if number.kind is int else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds):
            whole = "whole " if number.kind is int else ""
            raise InvalidField(name, f"is {value!r}; give a {whole}number")
        if not number.least <= value <= number.most:
            raise InvalidField(
                name, f"is {value}; it has to be from {number.least} to {number.most}"
            )
        options.setdefault(number.option, value)
    if options.get("top_k") == -1:
        options["top_k"] = 0
    if options.get("top_logprobs") and given.get("logprobs") is not True:
        raise InvalidField("top_logprobs", "is given without logprobs; give logprobs=true too")
    return options


def _texts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are no plain numbers."""
    readers: dict[str, Callable[[Any], Any]] = {
        "stop": _stop,
        "logit_bias": _bias,
        "logprobs": _flag,
    }
    return {name: read(given[name]) for name, read in readers.items() if name in given}


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidField("logprobs", f"is {value!r}; give true or false, and top_logprobs")
    return value


def _stop(value: Any) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(t, str) and t for t in texts):
        raise InvalidField("stop", f"is {value!r}; give a text or a list of texts")
    if len(texts) > _MAX_STOPS:
        raise InvalidField("stop", f"holds {len(texts)} texts, the limit is {_MAX_STOPS}")
    longest = max(map(len, texts), default=0)
    if longest > _MAX_STOP_LEN:
        raise InvalidField(
            "stop", f"holds a text of {longest} characters, the limit is {_MAX_STOP_LEN}"
        )
    check_value(texts, "stop")
    return list(texts)


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise InvalidField("logit_bias", f"is {value!r}; give an object of token ids and numbers")
    bias: dict[int, float] = {}
    for token, amount in value.items():
        name = str(token)
        if not (name.isascii() and name.isdigit()):
            raise InvalidField("logit_bias", f"names {token!r}, which is no token id")
        is_number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not is_number or not -100 <= amount <= 100:
            raise InvalidField(
                f"logit_bias[{token!r}]", f"is {amount!r}; give a number from -100 to 100"
            )
        bias[int(name)] = amount
    return bias


def _form(
    given: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None,
    messages: Sequence[Mapping[str, Any]],
    call_grammar: CallGrammar | None,
    *,
    drop: bool,
) -> tuple[dict[str, Any], ReplyForm]:
    """The grammar a reply is kept to, as options, and how the reply is read."""
    choice = given.get("tool_choice", "auto")
    forced = _forced(choice, tools or ())
    schema = _reply_schema(given.get("response_format", {"type": "text"}))
    parallel = _parallel(given)
    if forced and call_grammar is not None:
        return {"lark": call_grammar(forced, parallel=parallel is True)}, ReplyForm()
    may_call = bool(tools) and choice != "none"
    json_calls = forced or (tools if may_call and schema is not None else None)
    if json_calls:
        names = frozenset(str(tool["function"]["name"]) for tool in json_calls)
        first_call = sum(len(message.get("tool_calls") or ()) for message in messages)
        beside = None if forced else schema
        return {"json_schema": call_schema(json_calls, beside)}, ReplyForm(names, True, first_call)
    if parallel is False and may_call and not drop:
        raise UnsupportedField(
            "parallel_tool_calls", "can only be false where a call is forced by tool_choice"
        )
    return {} if schema is None else {"json_schema": schema}, ReplyForm(may_call=may_call)


def _parallel(given: Mapping[str, Any]) -> bool | None:
    parallel = given.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidField("parallel_tool_calls", f"is {parallel!r}; give true or false")
    return parallel


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools one of which has to be called; none where the model is free."""
    if choice in ("auto", "none"):
        return []
    if choice == "required":
        if not tools:
            raise InvalidField("tool_choice", 'is "required", but there are no tools')
        return list(tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or choice.get("type", "function") != "function":
        raise InvalidField(
            "tool_choice",
            f'is {choice!r}; give "auto", "none", "required" or a function by its name',
        )
    named = [tool for tool in tools if tool["function"]["name"] == function.get("name")]
    if not named:
        raise InvalidField("tool_choice", f"names {function.get('name')!r}, which is no tool")
    return named


def _reply_schema(form: Any) -> Mapping[str, Any] | None:
    """What a reply's JSON has to be; None for any text."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise InvalidField(
            "response_format", f"is {form!r}; its type is text, json_object or json_schema"
        )
    check_value(form, "response_format")
    inner = form.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidField("response_format.json_schema.schema", "is missing; give an object")
    return schema
