"""Ending a stream, from either side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from agentcache.errors import RequestCancelled

if TYPE_CHECKING:
    from agentcache.runtime import Runtime

ASKED = [{"role": "user", "content": "Hi"}]


async def test_cancel_of_a_finished_call_leaves_its_deltas_to_be_read(runtime: Runtime) -> None:
    session = runtime.session()
    first, second = (session.chat(ASKED, max_new_tokens=9, stream=True) for _ in range(2))
    for stream in (first, second):
        assert len(stream.turn.ids) == 9
        stream.cancel()
    deltas = list(first)
    assert [i for delta in deltas for i in delta.ids] == first.turn.ids.tolist()
    assert "".join(delta.text for delta in deltas) == first.turn.message["content"]
    assert [delta async for delta in second] == deltas


async def test_a_cancelled_stream_says_so_after_what_was_said(runtime: Runtime) -> None:
    session = runtime.session()
    first, second = (session.chat(ASKED, max_new_tokens=5000, stream=True) for _ in range(2))
    ids = [*next(first).ids]
    first.cancel()
    second.cancel()
    with pytest.raises(RequestCancelled):
        ids += [i for delta in first for i in delta.ids]
    with pytest.raises(RequestCancelled):
        _ = [delta async for delta in second]
    with pytest.raises(RequestCancelled):
        _ = first.turn
    runtime.on_engine(lambda: None)
    assert session.tips == ()
    assert runtime.stats()["leases"] == 0


def test_a_closed_stream_gives_no_more_deltas(runtime: Runtime) -> None:
    stream = runtime.session().chat(ASKED, max_new_tokens=9, stream=True)
    assert stream.turn.ids.size
    stream.close()
    assert list(stream) == []


@pytest.mark.parametrize("stop", [[], ["said"], ["said more"]])
def test_raw_texts_are_the_whole_text_markup_included(runtime: Runtime, stop: list[str]) -> None:
    call = '<tool_call>{"name": "run", "arguments": {}}</tool_call>'
    said = f"<think>Hm.</think>It \u20ac said {call}"
    stream = runtime.session().chat(ASKED, replay=said, stepwise=True, stream=True)
    deltas = list(stream)
    assert "".join(delta.raw for delta in deltas) == stream.turn.text == said
    assert "".join(delta.text for delta in deltas) != said

    plain = runtime.session().chat(ASKED, max_new_tokens=24)
    held = plain.text[len(plain.text) // 2 :][:3]
    options = {"max_new_tokens": 24, "stop": [*stop, held]}
    stream = runtime.session().chat(ASKED, stream=True, **options)  # type: ignore[call-overload]
    raw = "".join(delta.raw for delta in stream)
    assert raw == stream.turn.text == plain.text[: plain.text.index(held)]
