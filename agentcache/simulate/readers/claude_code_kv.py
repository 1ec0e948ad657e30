"""Claude Code KV traces: a session and its sub-agents as hashes of blocks of 64 tokens."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from agentcache.errors import TraceError
from agentcache.simulate.readers.base import TraceFormat, number, per_row, place_of, whole
from agentcache.simulate.readers.blocks import MAX_REQUEST_LEN, BlockRequest, block_hashes, expand
from agentcache.simulate.trace import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.replay.readers.base import Place, Source
    from agentcache.simulate.readers.base import ReadOptions, Row

__all__ = ["CLAUDE_CODE_KV"]

_MAX_BLOCK_LEN = 2**16


def _sniff(data: object) -> bool:
    return isinstance(data, dict) and {"block_size", "requests"} <= data.keys()


def _read(source: Source, rows: Iterator[Row], options: ReadOptions) -> list[SimRequest]:
    requests: list[SimRequest] = []
    for count, own in enumerate(per_row(source, rows, lambda row: _document(source, row))):
        scope = f"#{count + 1}" if count else ""
        requests += _requests(own, scope, options.limit)
    requests.sort(key=lambda request: request.at)
    requests = requests[: options.limit]
    begin = requests[0].at if requests else 0.0
    return [replace(request, at=request.at - begin) for request in requests]


@dataclass(frozen=True, slots=True)
class _Agent:
    """The session of a file, or a sub-agent in it."""

    name: str
    parent: str | None
    begin_s: float
    head_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request of an agent with a model. block_len: of the whole file."""

    agent: _Agent
    session: str
    at: float
    request: BlockRequest
    block_len: int


class _Document:
    """Collects the turns of one file; a request that cannot be used costs no more than itself."""

    def __init__(self, source: Source, block_len: int) -> None:
        self._source = source
        self._block_len = block_len
        self.turns: list[_Turn] = []

    def read_agent(self, agent: _Agent, entries: object, place: Place) -> None:
        """The requests of an agent, and those of the sub-agents it called."""
        models: dict[str, str] = {}
        session, last_s = agent.name, 0.0
        for idx, value in enumerate(place.items(entries)):
            where = place.item(idx)
            try:
                entry = where.mapping(value)
                begin_s = number(entry.get("t"), where.key("t"))
                if begin_s < last_s:
                    raise where.key("t").error(
                        f"goes back from {last_s} to {begin_s}", "sort the requests by time"
                    )
                at = agent.begin_s + begin_s
                if entry.get("type") == "subagent":
                    self._read_subagent(agent, session, at, entry, where)
                else:
                    session = self._read_turn(agent, models, at, entry, where)
                last_s = begin_s
            except TraceError as error:
                self._source.reject(error)

    def _read_subagent(
        self, agent: _Agent, session: str, at: float, entry: dict[str, Any], place: Place
    ) -> None:
        agent_id = place.key("agent_id").text(entry.get("agent_id"))
        # Its session is what called it last; a session without any request is no parent.
        parent = session if any(turn.session == session for turn in self.turns) else None
        name = f"{agent.name}/{agent_id}"
        below = _Agent(name, parent, at, _head_lens(entry, place))
        self.read_agent(below, entry.get("requests"), place.key("requests"))

    def _read_turn(
        self,
        agent: _Agent,
        models: dict[str, str],
        at: float,
        entry: dict[str, Any],
        place: Place,
    ) -> str:
        """Take a request; its session. Another model is another session that shares nothing."""
        model = place.key("model").text(entry.get("model"))
        prompt_len = whole(entry.get("in"), place.key("in"), 1, MAX_REQUEST_LEN)
        num_full = prompt_len // self._block_len
        counts = range(num_full, -(-prompt_len // self._block_len) + 1)
        request = BlockRequest(
            prompt_len,
            whole(entry.get("out"), place.key("out"), most=MAX_REQUEST_LEN),
            block_hashes(entry.get("hash_ids"), place.key("hash_ids"), counts),
            zlib.crc32(model.encode()),
        )
        session = models.setdefault(model, f"{agent.name}+{model}" if models else agent.name)
        self.turns.append(_Turn(agent, session, at, request, self._block_len))
        return session


def _document(source: Source, row: Row) -> list[_Turn]:
    top = place_of(source, row)
    data = top.mapping(row.data)
    block_len = whole(data.get("block_size"), top.key("block_size"), 1, _MAX_BLOCK_LEN)
    document_id = data.get("id")
    name = source.stem if document_id is None else top.key("id").text(document_id)
    document = _Document(source, block_len)
    agent = _Agent(name, None, 0.0, _head_lens(data, top))
    document.read_agent(agent, data.get("requests"), top.key("requests"))
    return document.turns


def _head_lens(data: dict[str, Any], place: Place) -> tuple[int, ...]:
    """Where tools end, and the system prompt after them."""
    tools, system = (
        0 if data.get(name) is None else whole(data[name], place.key(name))
        for name in ("tool_tokens", "system_tokens")
    )
    return tuple(sorted({tools, tools + system} - {0}))


def _requests(turns: list[_Turn], scope: str, limit: int | None) -> list[SimRequest]:
    """The first requests of one document. scope: what tells its names from those of others."""
    turns = sorted(turns, key=lambda turn: turn.at)
    last = {turn.session: idx for idx, turn in enumerate(turns)}
    turns = turns[:limit]
    seed = zlib.crc32(scope.encode())
    blocks = [replace(turn.request, scope=turn.request.scope ^ seed) for turn in turns]
    tokens = expand(blocks, turns[0].block_len) if turns else []
    first: dict[str, _Turn] = {}
    for turn in turns:
        first.setdefault(turn.session, turn)
    return [
        SimRequest(
            turn.session + scope,
            turn.at,
            ids,
            turn.request.prompt_len,
            parent=None if turn.agent.parent is None else turn.agent.parent + scope,
            closes=last[turn.session] == idx,
            marks=_marks(turn, first[turn.session]),
        )
        for idx, (turn, ids) in enumerate(zip(turns, tokens, strict=True))
    ]


def _marks(turn: _Turn, first: _Turn) -> tuple[int, ...]:
    """Ends of the agent's head in a prompt that begins with it; a summary's prompt may not."""
    return tuple(
        mark
        for mark in turn.agent.head_lens
        if mark <= min(turn.request.prompt_len, first.request.prompt_len)
        and np.array_equal(
            turn.request.hashes[: mark // turn.block_len],
            first.request.hashes[: mark // turn.block_len],
        )
    )


CLAUDE_CODE_KV = TraceFormat("claude-code-kv", _sniff, _read)
