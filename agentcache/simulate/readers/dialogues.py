"""Chats without times: ShareGPT, LMSys and mt-bench-101. Each answer is a request.

Times are drawn: chats begin in the order of the file as a Poisson process, answers take as long as
their tokens, and the next question comes after a log-normal pause. All draws follow from the seed
and the chat's place in the file.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.errors import AgentCacheError, TraceError, TraceFormatError
from agentcache.replay.trace import Call
from agentcache.simulate.readers.base import TraceFormat, per_row, place_of, whole
from agentcache.simulate.readers.encode import RunEncoder
from agentcache.simulate.trace import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from agentcache.replay.readers.base import Place, Source
    from agentcache.simulate.readers.base import ReadOptions, Row
    from agentcache.simulate.readers.encode import ChatEncoder

__all__ = ["LMSYS", "MT_BENCH_101", "SHAREGPT"]

_MEAN_GAP_S = 4.0
"""Between the beginnings of two chats."""
_TOKENS_PER_S = 50.0
"""How fast answers are written."""
_PAUSE_MEDIAN_S, _PAUSE_SIGMA = 20.0, 1.0
"""Reading an answer and writing the next question."""

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}

_MAX_ID = 2**63 - 1

_Message = dict[str, Any]
_ReadChat = Callable[["Place", dict[str, Any]], tuple[str | None, list[_Message]]]
"""Makes id and messages of a row."""


@dataclass(frozen=True, slots=True)
class _Chat:
    """One chat; `place` is where it stands in its file."""

    name: str | None
    messages: list[_Message]
    place: Place


def _said(list_key: str, role_key: str, text_key: str, name_key: str) -> _ReadChat:
    """A reader of chats that are one list of messages with a role and a text."""

    def read(top: Place, data: dict[str, Any]) -> tuple[str | None, list[_Message]]:
        messages = []
        for idx, value in enumerate(top.key(list_key).items(data.get(list_key))):
            where = top.key(list_key).item(idx)
            said = where.mapping(value)
            role = where.key(role_key).text(said.get(role_key))
            if role not in _ROLES:
                known = ", ".join(_ROLES)
                raise where.key(role_key).error(f"is {role[:40]!r}", f"known are {known}")
            text = where.key(text_key).text(said.get(text_key))
            messages.append({"role": _ROLES[role], "content": text})
        return _name(data.get(name_key), top.key(name_key)), messages

    return read


def _exchanged(top: Place, data: dict[str, Any]) -> tuple[str | None, list[_Message]]:
    """A chat of mt-bench-101: questions with their answers."""
    messages = []
    for idx, value in enumerate(top.key("history").items(data.get("history"))):
        where = top.key("history").item(idx)
        exchange = where.mapping(value)
        for key, role in (("user", "user"), ("bot", "assistant")):
            text = where.key(key).text(exchange.get(key))
            messages.append({"role": role, "content": text})
    return _name(data.get("id"), top.key("id")), messages


def _name(value: object, place: Place) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else place.text(value)
    return str(whole(value, place, most=_MAX_ID))


def _reader(
    read_chat: _ReadChat,
) -> Callable[[Source, Iterator[Row], ReadOptions], list[SimRequest]]:
    def read(source: Source, rows: Iterator[Row], options: ReadOptions) -> list[SimRequest]:
        encoder = options.chat_encoder(source.shown)

        def read_one(row: Row) -> _Chat:
            top = place_of(source, row)
            name, messages = read_chat(top, top.mapping(row.data))
            return _Chat(name, messages, top)

        chats = per_row(source, rows, read_one)
        timed = _in_time(_turns(source, chats, encoder, options.seed))
        requests = list(islice(timed, options.limit))
        begin = requests[0].at if requests else 0.0
        return [replace(request, at=request.at - begin) for request in requests]

    return read


def _turns(
    source: Source, chats: Iterable[_Chat], encoder: ChatEncoder, seed: int
) -> Iterator[tuple[float, list[SimRequest]]]:
    """When each chat begins, and its requests."""
    begin_s = 0.0
    names: dict[str, int] = {}
    for index, chat in enumerate(chats):
        random = np.random.default_rng([seed, index])
        begin_s += random.exponential(_MEAN_GAP_S)
        name = chat.name or f"chat{index + 1}"
        count = names[name] = names.get(name, 0) + 1
        session = name if count == 1 else f"{name}#{count}"
        try:
            yield begin_s, _requests(chat, session, encoder, begin_s, random)
        except TraceError as error:
            source.reject(error)


def _requests(
    chat: _Chat, session: str, encoder: ChatEncoder, at: float, random: np.random.Generator
) -> list[SimRequest]:
    run, requests = RunEncoder(encoder), []
    for idx, message in enumerate(chat.messages):
        if message["role"] != "assistant" or idx == 0:
            continue
        try:
            encoded = run.encode(Call(tuple(chat.messages[:idx]), None, message))
        except AgentCacheError as error:
            raise _refused(chat.place, error) from error
        requests.append(
            SimRequest(
                session,
                at,
                encoded.ids,
                encoded.prompt_len,
                marks=encoded.marks,
                passing=encoded.passing,
            )
        )
        at += (len(encoded.ids) - encoded.prompt_len) / _TOKENS_PER_S
        at += random.lognormal(np.log(_PAUSE_MEDIAN_S), _PAUSE_SIGMA)
    if not requests:
        raise chat.place.error("holds no answer to a question", "only answers are requests")
    return requests


def _refused(place: Place, error: AgentCacheError) -> TraceFormatError:
    return place.error(f"cannot be encoded: {error}", "the other chats are kept")


def _in_time(chats: Iterable[tuple[float, list[SimRequest]]]) -> Iterator[SimRequest]:
    """Requests of all chats by time; holds those of the open chats only."""
    waiting: list[tuple[float, int, SimRequest]] = []
    count = 0
    for begin_s, requests in chats:
        while waiting and waiting[0][0] < begin_s:
            yield heapq.heappop(waiting)[2]
        for request in requests:
            heapq.heappush(waiting, (request.at, count, request))
            count += 1
    while waiting:
        yield heapq.heappop(waiting)[2]


def _has_list(key: str, first_keys: frozenset[str]) -> Callable[[object], bool]:
    """Whether a record is an object with a list under `key`, of objects with these keys."""

    def sniff(data: object) -> bool:
        value = data.get(key) if isinstance(data, dict) else None
        if not isinstance(value, list):
            return False
        return not value or (isinstance(value[0], dict) and first_keys <= value[0].keys())

    return sniff


SHAREGPT = TraceFormat(
    "sharegpt",
    _has_list("conversations", frozenset({"from", "value"})),
    _reader(_said("conversations", "from", "value", "id")),
)
LMSYS = TraceFormat(
    "lmsys-chat",
    _has_list("conversation", frozenset({"role", "content"})),
    _reader(_said("conversation", "role", "content", "conversation_id")),
)
MT_BENCH_101 = TraceFormat(
    "mt-bench-101",
    _has_list("history", frozenset({"user", "bot"})),
    _reader(_exchanged),
)
