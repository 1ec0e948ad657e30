"""Traces that name blocks of tokens by hashes: tokens that are equal where the hashes are.

Such traces say nothing of the answers, nor, some of them, of the last block of a prompt that is not
full. Where a later request holds all full blocks of an earlier one and is long enough, it is taken
to be its next turn: the earlier answer gets the tokens that stand in the later prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from agentcache.simulate.readers.base import wholes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.replay.readers.base import Place
    from agentcache.types import IntArray

__all__ = ["MAX_REQUEST_LEN", "BlockRequest", "block_hashes", "expand"]

_Hashes = npt.NDArray[np.int64]

MAX_REQUEST_LEN = 2**24
"""The longest prompt and the longest answer whose tokens are made up."""

_MAX_HASH = 2**63 - 1
_MIN_BLOCKS = 2
"""Full blocks that a next turn shares at least: a single one may be a system prompt of many."""

_OWN = 0x9E3779B97F4A7C15
"""Seed of tokens that no hash names."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockRequest:
    """A prompt of `prompt_len` tokens whose leading blocks are named by `hashes`, and its answer.

    Equal hashes are equal tokens within one `scope` only.
    """

    prompt_len: int
    answer_len: int
    hashes: _Hashes
    scope: int = 0


def block_hashes(value: object, place: Place, counts: range) -> _Hashes:
    """A list of block hashes, as many of them as `counts` admits."""
    hashes = wholes(value, place, _MAX_HASH)
    if len(hashes) not in counts:
        wanted = " or ".join(map(str, counts))
        raise place.error(f"has {len(hashes)} blocks", f"a prompt of this length has {wanted}")
    return hashes


def expand(requests: Sequence[BlockRequest], block_len: int) -> list[IntArray]:
    """The tokens of prompts and answers, [T] int32 each, for requests in the order of time."""
    following = _next_turns(requests, block_len)
    result: list[IntArray] = [np.empty(0, np.int32)] * len(requests)
    for idx in reversed(range(len(requests))):  # next turns first
        request = requests[idx]
        ids = _tokens(request, idx, block_len)
        if idx in following:
            turn, same_len = following[idx]
            begin = request.prompt_len // block_len * block_len
            ids[begin:same_len] = result[turn][begin:same_len]
        ids.flags.writeable = False
        result[idx] = ids
    return result


def _next_turns(requests: Sequence[BlockRequest], block_len: int) -> dict[int, tuple[int, int]]:
    """For requests that have a next turn: its index, and how many tokens it has in common."""
    following: dict[int, tuple[int, int]] = {}
    by_blocks: dict[int, int] = {}
    for idx, request in enumerate(requests):
        prefixes = _prefixes(request)
        longest = next((p for p in reversed(prefixes[_MIN_BLOCKS - 1 :]) if p in by_blocks), None)
        if longest is not None:
            before = by_blocks[longest]
            same_len = _same_len(requests[before], request, block_len)
            if same_len and before not in following:
                following[before] = (idx, same_len)
        num_full = request.prompt_len // block_len
        if num_full >= _MIN_BLOCKS:
            by_blocks[prefixes[num_full - 1]] = idx
    return following


def _prefixes(request: BlockRequest) -> list[int]:
    """One number for each run of leading blocks, the shortest first."""
    prefix, prefixes = request.scope, []
    for name in request.hashes.tolist():
        prefix = hash((prefix, name))
        prefixes.append(prefix)
    return prefixes


def _same_len(before: BlockRequest, after: BlockRequest, block_len: int) -> int:
    """How many tokens of a request its next turn repeats; 0 if it is none."""
    if after.prompt_len > before.prompt_len + before.answer_len:
        return before.prompt_len + before.answer_len
    has_unnamed_end = len(before.hashes) * block_len < before.prompt_len
    if has_unnamed_end and after.prompt_len >= before.prompt_len:
        return before.prompt_len  # the answer was left out or shortened: thinking, for one
    return 0


def _tokens(request: BlockRequest, idx: int, block_len: int) -> IntArray:
    """Tokens by the hashes, and by the index of the request for those that none names."""
    length = request.prompt_len + request.answer_len
    within = np.arange(block_len, dtype=np.uint64)
    names = request.hashes.astype(np.uint64)[:, None]
    named = _mix(names * np.uint64(block_len) + within, request.scope)
    named = named.reshape(-1)[: request.prompt_len]
    own = np.arange(length - len(named), dtype=np.uint64) + np.uint64(idx << 32)
    return np.concatenate([named, _mix(own, _OWN)])


def _mix(values: npt.NDArray[np.uint64], seed: int) -> IntArray:
    """Ids below 2^31, evenly spread: the finalizer of splitmix64."""
    x = values + np.uint64(seed & (2**64 - 1))
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(33)).astype(np.int32)
