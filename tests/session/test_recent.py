"""Calls without a session's id: ids of texts that were said before, and nothing else."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from agentcache.engine.tokenizer import Tokenizer
from agentcache.errors import InvalidRequest
from agentcache.session.recent import RecentConversations

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.runtime import Runtime
    from agentcache.session import Turn
    from agentcache.session.prompts import Prompt

SYSTEM = {"role": "system", "content": "You repair programs. " * 8}
LETTERS = "spelled"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def ask(runtime: Runtime, messages: list[dict[str, Any]], **options: Any) -> Turn:
    """One call in a session that ends with it, as a server makes it for a client without one."""
    tenant = options.pop("tenant", None)
    with runtime.session(tenant=tenant) as session:
        return session.complete(messages, **{"max_new_tokens": 2, **options})


def in_letters(runtime: Runtime, text: str) -> list[int]:
    """Ids that say a text letter by letter, as the tokenizer would not."""
    ids = [id for letter in text for id in runtime.tokenizer.encode_plain(letter, at_start=False)]
    assert ids != list(runtime.tokenizer.encode_plain(text, at_start=False))
    assert runtime.tokenizer.decode_after(ids) == text
    assert runtime.end_id is not None
    return [*ids, runtime.end_id]


def cold_prompt(runtime: Runtime, messages: list[dict[str, Any]], tools: Any = None) -> Prompt:
    return runtime.prompts.from_messages(messages, tools, ())


def warm_prompt(
    runtime: Runtime, messages: list[dict[str, Any]], tools: Any = None, tenant: str | None = None
) -> Prompt:
    return runtime.recent.prompt(runtime.prompts, tenant, messages, tools)


@pytest.fixture
def num_encoded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many characters were encoded since it was last asked."""
    count = 0
    encode = Tokenizer.encode_plain

    def counted(self: Tokenizer, text: str, *, at_start: bool = True) -> tuple[int, ...]:
        nonlocal count
        count += len(text)
        return encode(self, text, at_start=at_start)

    monkeypatch.setattr(Tokenizer, "encode_plain", counted)

    def since() -> int:
        nonlocal count
        was, count = count, 0
        return was

    return since


def test_a_list_said_again_is_not_encoded_again(
    runtime: Runtime, num_encoded: Callable[[], int]
) -> None:
    messages = [SYSTEM, user("Look")]
    first = ask(runtime, messages)
    num_encoded()
    again = ask(runtime, copy.deepcopy(messages), verify=True)
    assert num_encoded() == 0
    assert again.ids.tolist() == first.ids.tolist()
    assert again.verify is not None
    assert again.verify.ok


def test_a_longer_list_is_encoded_from_where_it_is_longer(
    runtime: Runtime, num_encoded: Callable[[], int]
) -> None:
    messages = [SYSTEM, user("Look")]
    messages.append(ask(runtime, messages, replay="Well.").message)
    messages.append(user("Go on."))
    num_encoded()
    turn = ask(runtime, messages, verify=True)
    assert num_encoded() < 40 < len(SYSTEM["content"])
    assert turn.verify is not None
    assert turn.verify.ok


def test_a_reply_sent_back_keeps_the_ids_it_was_sampled_in(runtime: Runtime) -> None:
    messages = [SYSTEM, user("Look")]
    said = in_letters(runtime, LETTERS)
    first = ask(runtime, messages, replay=said)
    messages += [{"role": "assistant", "content": LETTERS}, user("Go on.")]
    second = ask(runtime, messages, verify=True)
    held = first.usage.prompt_tokens + first.usage.output_tokens
    assert second.usage.cached_tokens == held
    assert second.verify is not None
    assert second.verify.ok
    messages += [second.message, user("And on.")]
    ids = warm_prompt(runtime, messages).ids.tolist()
    at = first.usage.prompt_tokens
    assert ids[at : at + len(said)] == said
    runtime.recent.clear()
    assert ids != warm_prompt(runtime, messages).ids.tolist()


def test_a_prompt_says_what_it_would_without_memory(runtime: Runtime) -> None:
    """Whatever is known: reasoning the client left out stays out, respelled calls are respelled."""
    call = '<tool_call>{"name": "bash", "arguments": {"cmd":  "ls"}}</tool_call>'
    messages = [SYSTEM, user("Look")]
    reply = copy.deepcopy(ask(runtime, messages, replay=f"<think>Hm.</think>Now.{call}").message)
    reply.pop("reasoning_content", None)
    reply["tool_calls"][0]["function"]["arguments"] = '{"cmd": "ls"}'
    edited = [{**SYSTEM, "content": "You repair programs."}, *messages[1:]]
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "a.py"}
    for given in ([*messages, reply, result], edited, [*messages[:1], user("Look!")]):
        warm, cold = warm_prompt(runtime, given), cold_prompt(runtime, given)
        decode = runtime.tokenizer.decode
        assert decode(warm.ids.tolist()) == decode(cold.ids.tolist())
        assert (warm.passing, warm.structural, warm.head_len, warm.num_calls) == (
            *(cold.passing, cold.structural, cold.head_len, cold.num_calls),
        )


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ({"a": 1}, {"a": True}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({"a": [1]}, {"a": [1, 2]}),
    ],
)
def test_values_that_are_equal_and_written_differently_are_told_apart(
    runtime: Runtime, asked: dict[str, Any], given: dict[str, Any]
) -> None:
    def tools(parameters: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": "run", "parameters": parameters}}]

    messages = [SYSTEM, user("Look")]
    ask(runtime, messages, tools=tools(asked))
    warm = warm_prompt(runtime, messages, tools(given))
    assert warm.ids.tolist() == cold_prompt(runtime, messages, tools(given)).ids.tolist()
    assert warm.tools == tuple(tools(given))


def test_no_tenant_is_given_ids_of_another(
    runtime: Runtime, num_encoded: Callable[[], int]
) -> None:
    messages = [SYSTEM, user("Look")]
    ask(runtime, messages, tenant="a", replay=in_letters(runtime, LETTERS))
    longer = [*messages, {"role": "assistant", "content": LETTERS}, user("Go on.")]
    cold = cold_prompt(runtime, longer).ids.tolist()
    assert warm_prompt(runtime, longer, tenant="a").ids.tolist() != cold
    for tenant in (None, "b", ""):
        num_encoded()
        assert warm_prompt(runtime, longer, tenant=tenant).ids.tolist() == cold
        assert num_encoded() > len(SYSTEM["content"])


def test_only_calls_without_an_id_are_remembered(runtime: Runtime) -> None:
    messages = [SYSTEM, user("Look")]
    with runtime.session("named") as session:
        session.complete(messages, max_new_tokens=1)
    with runtime.session() as session:
        session.generate([5, 6, 7], max_new_tokens=1)
    assert len(runtime.recent) == 0
    with runtime.session() as session:
        first = session.complete(messages, max_new_tokens=1)
        assert len(runtime.recent) == 1
        session.complete([*messages, first.message, user("Go on.")], max_new_tokens=1)
    assert len(runtime.recent) == 1


def test_a_conversation_takes_the_place_of_what_it_goes_on_from(runtime: Runtime) -> None:
    messages = [SYSTEM, user("Look")]
    for turn in range(3):
        messages += [ask(runtime, messages).message, user(f"Step {turn}")]
        assert len(runtime.recent) == 1
    ask(runtime, messages[:2])  # the same reply again
    assert len(runtime.recent) == 2
    ask(runtime, messages[:2])
    assert len(runtime.recent) == 2
    ask(runtime, messages[:2], replay="Another reply.")
    assert len(runtime.recent) == 3


def test_what_is_remembered_is_bounded(runtime: Runtime) -> None:
    kept = runtime.recent = RecentConversations(per_tenant=2, in_all=3, max_tokens=400)
    for at in range(4):
        ask(runtime, [user(f"{at} is a number")], tenant="a")
    assert len(kept) == 2
    for tenant in "bcd":
        ask(runtime, [user("Hello")], tenant=tenant)
    assert len(kept) == 3
    assert kept.num_tokens < 400
    ask(runtime, [user("word " * 380)], tenant="e")
    assert len(kept) == 1
    long = kept.num_tokens
    assert 380 < long <= 400
    ask(runtime, [user("word " * 500)], tenant="e")  # too long to be remembered
    assert (len(kept), kept.num_tokens) == (1, long)
    ask(runtime, [user("word " * 300)], tenant="f")
    assert len(kept) == 1
    assert 300 < kept.num_tokens < 350


def test_the_one_used_longest_ago_is_forgotten_first(
    runtime: Runtime, num_encoded: Callable[[], int]
) -> None:
    runtime.recent = RecentConversations(per_tenant=2)
    lists = [[user(f"{at} is a number")] for at in range(3)]
    for at in (0, 1, 0, 2):
        ask(runtime, lists[at])
    num_encoded()
    ask(runtime, lists[0])
    assert num_encoded() == 0
    ask(runtime, lists[1])
    assert num_encoded() > 0


def test_what_callers_do_to_their_lists_changes_nothing(runtime: Runtime) -> None:
    tools = [{"type": "function", "function": {"name": "run", "parameters": {"a": [1]}}}]
    messages = [copy.deepcopy(SYSTEM), user("Look")]
    first = ask(runtime, messages, tools=tools, replay="Well.")
    before = copy.deepcopy((messages, tools))
    messages[1]["content"] = "Look again"
    tools[0]["function"]["parameters"]["a"].append(2)  # type: ignore[index]
    first.message["content"] = "Never said."
    warm = warm_prompt(runtime, messages, tools)
    assert warm.ids.tolist() == cold_prompt(runtime, messages, tools).ids.tolist()
    warm = warm_prompt(runtime, *before)
    assert warm.ids.tolist() == cold_prompt(runtime, *before).ids.tolist()
    assert warm.messages == tuple(before[0])


def test_nothing_is_held_in_the_cache(make_runtime: Callable[..., Runtime]) -> None:
    runtime = make_runtime()
    ask(runtime, [SYSTEM, user("Look")])
    assert len(runtime.recent) == 1
    stats = runtime.stats()
    assert stats["sessions"]["tips"] == stats["leases"] == 0
    runtime.on_engine(runtime.cache.clear)
    assert runtime.stats()["bytes"]["total"]["used"] == 0
    turn = ask(runtime, [SYSTEM, user("Look")], verify=True)
    assert turn.usage.cached_tokens == 0
    runtime.clear()
    gc.collect()
    assert len(runtime.recent) == runtime.recent.num_tokens == 0


def test_many_threads_may_say_the_same_at_once(runtime: Runtime) -> None:
    lists = [[SYSTEM, user(f"Look at {at % 3}")] for at in range(24)]
    with ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(lambda messages: ask(runtime, messages), lists))
    for at in range(24):
        assert np.array_equal(turns[at].ids, turns[at % 3].ids)
        assert turns[at].miss is None or turns[at].miss.message is not None
    assert 3 <= len(runtime.recent) <= 24


@pytest.mark.parametrize("messages", ["text", [], [{"role": "nobody", "content": ""}], [7]])
def test_malformed_lists_are_refused_as_ever(runtime: Runtime, messages: Any) -> None:
    ask(runtime, [SYSTEM, user("Look")])
    with pytest.raises(InvalidRequest):
        ask(runtime, messages)
