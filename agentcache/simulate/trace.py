"""A trace: requests in the order of their arrival, as token ids and what a handle would know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.errors import TraceError
    from agentcache.types import IntArray

__all__ = ["SimRequest", "Trace"]


@dataclass(frozen=True, slots=True, eq=False)
class SimRequest:
    """One request. `ids` are prompt and answer, [T] int32; the first `prompt_len` are the prompt.

    session: whose turn it is; equal names are one trajectory, None is nobody's. at: seconds from
    the beginning of the trace, never less than the request's before. parent: the session that
    forked this one or called it as a sub-agent; it is not back before its children end. closes:
    whether the session ends with this request and says so. marks: lengths of the prompt that are
    known to be ends of shared parts, ascending. passing: the same, of what only this trajectory
    will go on from: the end of the prompt before the reply header. expect_s: in how many seconds
    the session said it would be back. priority: of the session.
    """

    session: str | None
    at: float
    ids: IntArray
    prompt_len: int
    parent: str | None = None
    closes: bool = False
    marks: tuple[int, ...] = ()
    expect_s: float | None = None
    priority: int = 0
    passing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """The requests of one file or folder, ordered by time.

    problems: rows that could not be used, each naming its line. format: what it was read as.
    """

    name: str
    format: str
    requests: tuple[SimRequest, ...]
    problems: tuple[TraceError, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(request.prompt_len for request in self.requests)
