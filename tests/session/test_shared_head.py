"""Heads that tenants share on purpose: the head, nothing after it, and nobody who did not ask."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentcache.errors import SessionError
from agentcache.types import FEW_TOKENS

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.runtime import Runtime
    from agentcache.session import Session, Turn

SYSTEM = {"role": "system", "content": "You repair programs. " * 6}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "run_tests",
            "description": "Runs the tests.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]
TASK = "Fix the bug that makes the tests of the parser fail on empty input."


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def open_(runtime: Runtime, tenant: str | None, id: str | None = None, **options: Any) -> Session:
    return runtime.session(id, tenant=tenant, **{"shared_head": True, **options})


def ask(session: Session, text: str = TASK, *, system: dict[str, str] = SYSTEM) -> Turn:
    """The first call of a session."""
    return session.chat([system, user(text)], tools=TOOLS, max_new_tokens=4, verify=True)


def cached(turn: Turn) -> int:
    """The tokens a call reused, whose answer was the same without the cache."""
    assert turn.verify is not None
    assert turn.verify.ok
    return turn.usage.cached_tokens


def head_len(runtime: Runtime, system: dict[str, str] = SYSTEM) -> int:
    """Tokens of system prompt and tools."""
    return runtime.prompts.from_messages([system, user("x")], TOOLS, ()).head_len


def is_whole(turn: Turn, before: Turn) -> bool:
    """Whether a next turn reused all that was absorbed when the one before it ended."""
    known = before.usage.prompt_tokens + before.usage.output_tokens - 1
    return turn.usage.cached_tokens == known


def test_second_tenant_reuses_the_head_and_nothing_of_the_tail(runtime: Runtime) -> None:
    head = head_len(runtime)
    assert head > 40
    assert cached(ask(open_(runtime, "a"))) == 0
    assert cached(ask(open_(runtime, "b"), "Something else.")) == head
    assert cached(ask(open_(runtime, "c"))) == head, "tails of equal tokens are others' too"


def test_default_tenant_is_one_tenant_among_others(runtime: Runtime) -> None:
    head = head_len(runtime)
    ask(open_(runtime, None))
    assert cached(ask(open_(runtime, ""))) == head
    whole = ask(open_(runtime, None))
    assert whole.usage.computed_tokens <= FEW_TOKENS


def test_sessions_of_one_tenant_share_their_tails(runtime: Runtime) -> None:
    ask(open_(runtime, "b"))
    first, second = ask(open_(runtime, "a")), ask(open_(runtime, "a"))
    assert first.usage.computed_tokens > FEW_TOKENS >= second.usage.computed_tokens
    assert second.verify is not None
    assert second.verify.ok


def test_without_the_option_nothing_is_shared(runtime: Runtime) -> None:
    ask(open_(runtime, "a", shared_head=None))
    assert cached(ask(open_(runtime, "b", shared_head=None))) == 0
    assert cached(ask(open_(runtime, "c", shared_head=False))) == 0


@pytest.mark.parametrize("sharing", [True, False])
@pytest.mark.parametrize("other", ["b", "a"])
def test_nothing_is_shared_between_those_with_and_without_the_option(
    runtime: Runtime, sharing: bool, other: str
) -> None:
    ask(open_(runtime, "a", shared_head=sharing))
    assert cached(ask(open_(runtime, other, shared_head=not sharing))) == 0


def test_other_heads_share_no_more_than_they_have_in_common(runtime: Runtime) -> None:
    systems = [
        {"role": "system", "content": f"You repair programs and {what}. " + "Be brief. " * 6}
        for what in ("sing", "dance", "sleep")
    ]
    sessions = [open_(runtime, tenant) for tenant in ("a", "b", "c")]
    counts, heads = [], []
    for session, system in zip(sessions, systems, strict=True):
        counts.append(cached(ask(session, system=system)))
        heads.append(session.ids[: head_len(runtime, system)])
    length = min(map(len, heads))
    differs = np.array([h[:length] != heads[0][:length] for h in heads]).any(axis=0)
    common = int(np.argmax(differs))
    assert 0 < common < length
    assert counts[:2] == [0, 0], "no state stands where they part"
    assert counts[2] <= common


@pytest.mark.parametrize("rounds", [1, 3])
def test_next_turns_of_each_tenant_are_hit_in_full(runtime: Runtime, rounds: int) -> None:
    sessions = [open_(runtime, tenant) for tenant in ("a", "b", None)]
    turns = [ask(session) for session in sessions]
    for number in range(rounds):
        for at, session in enumerate(sessions):
            turn = session.chat([user(f"Go on, {number}.")], max_new_tokens=4, verify=True)
            assert is_whole(turn, turns[at])
            assert cached(turn) > head_len(runtime)
            turns[at] = turn


def test_whole_lists_are_hit_in_full_too(runtime: Runtime) -> None:
    ask(open_(runtime, "b"))
    session = open_(runtime, "a")
    messages: list[Any] = [SYSTEM, user(TASK)]
    before = session.complete(messages, tools=TOOLS, max_new_tokens=4)
    messages = [*messages, before.message, user("Go on.")]
    turn = session.complete(messages, tools=TOOLS, max_new_tokens=4, verify=True)
    assert is_whole(turn, before)
    assert cached(turn)


def test_edited_tail_is_hit_up_to_the_head_at_least(runtime: Runtime) -> None:
    session = open_(runtime, "a")
    ask(session)
    turn = session.complete(
        [SYSTEM, user("Never mind.")], tools=TOOLS, max_new_tokens=4, verify=True
    )
    assert cached(turn) == head_len(runtime)


def test_edited_head_begins_anew(runtime: Runtime) -> None:
    other = {"role": "system", "content": "Say nothing but yes. " * 6}
    session = open_(runtime, "a")
    ask(session)
    turn = session.complete([other, user(TASK)], tools=TOOLS, max_new_tokens=4, verify=True)
    assert cached(turn) == 0
    again = open_(runtime, "b").complete(
        [other, user(TASK)], tools=TOOLS, max_new_tokens=4, verify=True
    )
    assert cached(again) == head_len(runtime, other)
    after = session.chat([user("Go on.")], max_new_tokens=4, verify=True)
    assert is_whole(after, turn)
    assert cached(after)


def go_on(session: Session, *new: int) -> Turn:
    """A next turn in ids."""
    return session.generate([*session.ids.tolist(), *new], max_new_tokens=3, verify=True)


def test_generation_from_ids_after_a_chat_is_hit_in_full(runtime: Runtime) -> None:
    ask(open_(runtime, "b"))
    session = open_(runtime, "a")
    before = ask(session)
    for new in ((9, 10), (11, 12), (13,)):
        turn = go_on(session, *new)
        assert is_whole(turn, before)
        assert cached(turn)
        before = turn


def test_ids_that_never_were_a_chat_are_the_tenants_own(runtime: Runtime) -> None:
    prompt = list(range(5, 60))
    first = open_(runtime, "a").generate(prompt, max_new_tokens=2)
    assert first.usage.cached_tokens == 0
    other = open_(runtime, "b").generate(prompt, max_new_tokens=2, verify=True)
    assert cached(other) == 0
    again = open_(runtime, "a").generate(prompt, max_new_tokens=2, verify=True)
    assert cached(again) == len(prompt) - 1


def forget_tails(runtime: Runtime, *sessions: Session) -> None:
    """What these sessions filed leaves the cache, but for the head."""
    head = head_len(runtime)

    def forget() -> None:
        for session in sessions:
            tip = session._record.tip(None)
            assert tip is not None
            while (node := tip.ref.frontier.living()).end > head:
                runtime.cache.memory.forget(node)
            assert node.end == head

    runtime.on_engine(forget)


def test_tail_that_is_computed_again_from_ids_stays_the_tenants_own(runtime: Runtime) -> None:
    """Two tenants go the same way, and lose their places: the head is all that both find."""
    head = head_len(runtime)
    sessions = [open_(runtime, tenant) for tenant in ("a", "b")]
    for session in sessions:
        ask(session)
        go_on(session, 9, 10)
        go_on(session, 11)
    assert sessions[0].ids.tolist() == sessions[1].ids.tolist()
    forget_tails(runtime, *sessions)
    for session in sessions:
        assert cached(go_on(session, 12)) == head
    for session in sessions:
        assert cached(go_on(session, 13)) > head


def test_lost_tail_of_a_chat_is_computed_again_behind_the_head(runtime: Runtime) -> None:
    sessions = [open_(runtime, tenant) for tenant in ("a", "b")]
    for session in sessions:
        ask(session)
    forget_tails(runtime, *sessions)
    for session in sessions:
        turn = session.chat([user("Go on.")], max_new_tokens=4, verify=True)
        assert cached(turn) == head_len(runtime)
        assert turn.miss is not None
        assert turn.miss.reason == "evicted"


def test_fork_inherits_the_option_and_shares_everything(runtime: Runtime) -> None:
    session = open_(runtime, "a")
    before = ask(session)
    child = session.fork("child")
    turn = child.chat([user("Go on.")], max_new_tokens=4, verify=True)
    assert is_whole(turn, before)
    assert cached(turn)
    with pytest.raises(SessionError, match="shared_head=True"):
        runtime.session("child", tenant="a", shared_head=False)
    assert cached(ask(open_(runtime, "b"))) == head_len(runtime)


def test_fork_before_the_first_turn_inherits_it_too(runtime: Runtime) -> None:
    ask(open_(runtime, "a"))
    assert cached(ask(open_(runtime, "b").fork())) == head_len(runtime)
    assert cached(ask(open_(runtime, "c", shared_head=False).fork())) == 0


def test_rewound_session_goes_on_where_it_stands(runtime: Runtime) -> None:
    ask(open_(runtime, "b"))
    session = open_(runtime, "a")
    before = ask(session)
    session.chat([user("Go on.")], max_new_tokens=4)
    session.rewind(1)
    turn = session.chat([user("Go another way.")], max_new_tokens=4, verify=True)
    assert is_whole(turn, before)
    assert cached(turn)
    session.rewind(0)
    again = ask(session)
    assert cached(again) > head_len(runtime)
    assert again.usage.computed_tokens <= FEW_TOKENS


def test_reopening_with_another_choice_is_an_error(runtime: Runtime) -> None:
    open_(runtime, "a", "one")
    open_(runtime, "a", "two", shared_head=False)
    runtime.session("three", tenant="a")
    for id, given in (("one", False), ("two", True), ("three", True)):
        with pytest.raises(SessionError, match="close it first"):
            runtime.session(id, tenant="a", shared_head=given)
    for id, given in (("one", True), ("two", False), ("three", False), ("one", None)):
        assert runtime.session(id, tenant="a", shared_head=given).id == id
    runtime.session("one", tenant="a").close()
    assert not runtime.session("one", tenant="a", shared_head=False).closed


def test_short_memory_keeps_tenants_apart(make_runtime: Callable[..., Runtime]) -> None:
    """Evictions, forks and edits in any order: others' tails are never found."""
    runtime = make_runtime(budget="600KiB", page_size=4)
    rng = np.random.default_rng(5)
    tenants = ("a", "b", None)
    sessions: dict[Any, Session] = {tenant: open_(runtime, tenant) for tenant in tenants}
    hits = 0
    for _ in range(24):
        tenant = tenants[rng.integers(3)]
        secret = f"Word {tenant}."
        session = sessions[tenant]
        if session.stats()["turns"] >= 3:
            session.rewind(0)
        if session.stats()["turns"] == 0:
            known = cached(ask(session, secret))
        else:
            known = cached(session.chat([user(secret)], max_new_tokens=3, verify=True))
        hits += known > 0
    assert hits > 10
    stats = runtime.stats()
    assert stats["verify"]["failed"] == 0
    assert sum(stats["evictions"].values()) > 0
