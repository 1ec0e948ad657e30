"""Many conversations in one session: how many of them it keeps a place for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from testkit.held import engine_held
from testkit.models import idle_counts, micro_runtime

from agentcache.sessions.registry import MAX_TIPS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.runtime import Runtime
    from agentcache.session import Session, Turn


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    with micro_runtime(budget="64MiB") as made:
        yield made


def conversation(number: int) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"{number} is the number of this conversation."}]


def begin_all(runtime: Runtime, session: Session, count: int) -> list[Turn]:
    """The first calls of conversations, at once, so that none goes on from another."""
    with engine_held(runtime):
        streams = [
            session.complete(conversation(number), max_new_tokens=1, stream=True)
            for number in range(count)
        ]
    return [stream.turn for stream in streams]


def frontier_refs(runtime: Runtime) -> int:
    """Marks where tips stand; shared boundaries above them are not counted."""

    def count() -> int:
        return sum(node.refs for node in runtime.cache.tree.nodes() if not node.structural)

    return runtime.on_engine(count)


def test_tips_of_many_conversations_are_bounded_and_their_marks_with_them(
    runtime: Runtime,
) -> None:
    session = runtime.session("all")
    begin_all(runtime, session, 100)
    assert len(session.tips) == MAX_TIPS
    assert runtime.stats()["sessions"]["tips"] == MAX_TIPS
    assert frontier_refs(runtime) == MAX_TIPS
    session.close()
    assert runtime.stats()["sessions"] == {"open": 0, "tips": 0}
    assert runtime.on_engine(lambda: sum(node.refs for node in runtime.cache.tree.nodes())) == 0
    runtime.clear()
    assert set(idle_counts(runtime).values()) == {0}


def test_a_conversation_whose_tip_was_dropped_is_found_by_content(runtime: Runtime) -> None:
    session = runtime.session("all")
    turns = begin_all(runtime, session, MAX_TIPS + 2)
    dropped = [number for number in range(len(turns)) if turns[number].tip not in session.tips]
    assert len(dropped) == 2
    first = turns[dropped[0]]
    said = [*conversation(dropped[0]), first.message, {"role": "user", "content": "And now?"}]
    again = session.complete(said, max_new_tokens=2, verify=True)
    assert again.verify is not None
    assert again.verify.ok
    assert again.usage.cached_tokens >= first.usage.prompt_tokens - 1
    assert len(session.tips) <= MAX_TIPS


def test_a_tip_with_a_call_under_way_on_it_is_not_the_one_to_leave(runtime: Runtime) -> None:
    session = runtime.session("all")
    begin_all(runtime, session, MAX_TIPS)
    oldest, second, *_, last = session.tips
    on = [{"role": "user", "content": "Go on."}]
    running = session.chat(on, tip=oldest, max_new_tokens=5000, stream=True)
    # two at once on one tip: the later one takes no tip's place
    with engine_held(runtime):
        both = [session.chat(on, tip=last, max_new_tokens=1, stream=True) for _ in range(2)]
    for stream in both:
        stream.turn  # noqa: B018 - waits
    assert len(session.tips) == MAX_TIPS
    assert oldest in session.tips
    assert second not in session.tips
    running.close()


def test_a_list_that_leaves_all_tips_is_encoded_once(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = runtime.session("all")
    begin_all(runtime, session, 7)
    chat_format = runtime.chat_format
    encoded: list[int] = []
    encode = chat_format.encode

    def counted(segments: Any, *args: Any, **options: Any) -> Any:
        encoded.append(len(segments))
        return encode(segments, *args, **options)

    monkeypatch.setattr(chat_format, "encode", counted)
    session.complete([{"role": "user", "content": "Something else."}], max_new_tokens=1)
    assert len([count for count in encoded if count > 1]) == 1
