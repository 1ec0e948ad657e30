"""Mooncake's JSONL: lengths, and hashes of blocks of 512 tokens that hold for the whole file."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from agentcache.simulate.readers.base import Timeline, TraceFormat, per_row, place_of, whole
from agentcache.simulate.readers.blocks import MAX_REQUEST_LEN, BlockRequest, block_hashes, expand
from agentcache.simulate.trace import SimRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.replay.readers.base import Source
    from agentcache.simulate.readers.base import ReadOptions, Row

__all__ = ["MOONCAKE"]

_BLOCK_LEN = 512


def _sniff(data: object) -> bool:
    return isinstance(data, dict) and {"hash_ids", "input_length", "output_length"} <= data.keys()


def _read(source: Source, rows: Iterator[Row], options: ReadOptions) -> list[SimRequest]:
    timeline = Timeline(unit_s=1e-3)

    def read_one(row: Row) -> tuple[float, BlockRequest]:
        top = place_of(source, row)
        data = top.mapping(row.data)
        prompt_len = whole(data.get("input_length"), top.key("input_length"), 1, MAX_REQUEST_LEN)
        request = BlockRequest(
            prompt_len,
            whole(data.get("output_length"), top.key("output_length"), most=MAX_REQUEST_LEN),
            block_hashes(data.get("hash_ids"), top.key("hash_ids"), _num_blocks(prompt_len)),
        )
        return timeline.at(data.get("timestamp"), top.key("timestamp")), request

    read = list(islice(per_row(source, rows, read_one), options.limit))
    tokens = expand([request for _, request in read], _BLOCK_LEN)
    return [
        SimRequest(None, at, ids, request.prompt_len)
        for (at, request), ids in zip(read, tokens, strict=True)
    ]


def _num_blocks(prompt_len: int) -> range:
    """The last block has a hash whether it is full or not."""
    count = -(-prompt_len // _BLOCK_LEN)
    return range(count, count + 1)


MOONCAKE = TraceFormat("mooncake", _sniff, _read)
