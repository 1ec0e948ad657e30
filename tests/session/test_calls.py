"""What a caller sees: usage, stopping, replay, streaming, errors."""

from __future__ import annotations

import gc
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from testkit.held import engine_held
from testkit.models import idle_counts, micro_config, micro_runtime, tokenizer

from agentcache.engine.tiny_hybrid import build
from agentcache.errors import (
    AmbiguousTip,
    HistoryMismatch,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    RuntimeClosed,
    SessionClosed,
    SessionError,
    UnknownTip,
)
from agentcache.runtime import Runtime

if TYPE_CHECKING:
    from collections.abc import Callable

SYSTEM = {"role": "system", "content": "You repair programs. " * 8}

HEADER_LEN = 5
"""Tokens of the embedded template's reply header."""


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_next_turn_computes_only_what_is_new(runtime: Runtime) -> None:
    with runtime.session() as session:
        first = session.chat([SYSTEM, user("Run the tests.")], max_new_tokens=12)
        second = session.chat([user("And again.")], max_new_tokens=4)
    known = first.usage.prompt_tokens + first.usage.output_tokens
    # The last sampled id was never run, so it is computed with the next prompt.
    assert second.usage.cached_tokens == known - 1
    assert second.usage.computed_tokens == second.usage.prompt_tokens - known + 1


def test_exact_repeat_computes_only_the_reply_header(runtime: Runtime) -> None:
    messages = [SYSTEM, user("Run the tests.")]
    turns = [runtime.session().complete(messages, max_new_tokens=6) for _ in range(3)]
    assert turns[0].ids.tolist() == turns[1].ids.tolist() == turns[2].ids.tolist()
    assert turns[0].usage.cached_tokens == 0
    for turn in turns[1:]:
        assert turn.usage.computed_tokens == HEADER_LEN
        assert turn.miss is None


def test_whole_list_goes_on_from_the_tip_as_chat_does(runtime: Runtime) -> None:
    whole, by_turn = runtime.session(), runtime.session(tenant="other")
    messages = [SYSTEM, user("Run the tests.")]
    a = whole.complete(messages, max_new_tokens=8, seed=1, temperature=1.0)
    b = by_turn.chat(messages, max_new_tokens=8, seed=1, temperature=1.0)
    assert a.ids.tolist() == b.ids.tolist()
    messages = [*messages, a.message, user("Go on.")]
    c = whole.complete(messages, max_new_tokens=8)
    d = by_turn.chat([user("Go on.")], max_new_tokens=8)
    assert whole.ids.tolist() == by_turn.ids.tolist()
    assert c.usage.computed_tokens == d.usage.computed_tokens


def test_sampled_ids_are_kept_where_the_tokenizer_would_merge_them(runtime: Runtime) -> None:
    newline = runtime.tokenizer.encode_plain("\n")
    assert len(newline) == 1
    assert runtime.tokenizer.encode_plain("\n\n") != newline * 2
    session = runtime.session()
    first = session.chat([user("Hi")], replay=[*newline, *newline, runtime.end_id])
    assert first.text == "\n\n"
    messages = [user("Hi"), first.message, user("Go on.")]
    second = session.complete(messages, max_new_tokens=1)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + 3
    assert session.ids[first.usage.prompt_tokens :][:2].tolist() == list(newline * 2)


def test_edit_of_a_message_in_place_reaches_the_model(runtime: Runtime) -> None:
    """Frameworks blank an old tool output in the very dict that they passed before."""
    session = runtime.session()
    messages = [dict(SYSTEM), user("alpha beta gamma delta")]
    turn = session.complete(messages, max_new_tokens=3)
    turn.message["content"] = "rewritten"
    messages[1]["content"] = "[elided]"
    messages += [turn.message, user("Go on")]
    second = session.complete(messages, max_new_tokens=1)
    text = runtime.tokenizer.decode(session.ids.tolist())
    assert "[elided]" in text
    assert "rewritten" in text
    assert "alpha" not in text
    assert second.miss is not None
    assert second.miss.reason == "diverged"


def test_tools_given_on_a_later_turn_are_in_the_prompt(runtime: Runtime) -> None:
    def tool(name: str) -> dict[str, object]:
        return {"type": "function", "function": {"name": name, "parameters": {}}}

    session = runtime.session()
    session.chat([SYSTEM, user("Hi")], tools=[tool("first_tool")], max_new_tokens=2)
    kept = session.chat([user("Go on")], max_new_tokens=2)
    assert kept.usage.computed_tokens < 30
    session.chat([user("Now this")], tools=[tool("second_tool")], max_new_tokens=2)
    text = runtime.tokenizer.decode(session.ids.tolist())
    assert "second_tool" in text
    assert "first_tool" not in text


def test_chat_after_a_prefill_has_no_empty_reply_between(runtime: Runtime) -> None:
    session = runtime.session()
    session.chat([SYSTEM, user("Read this first.")], max_new_tokens=0)
    assert [message["role"] for message in session.messages] == ["system", "user"]
    turn = session.chat([user("Then this.")], max_new_tokens=2, verify=True)
    roles = [message["role"] for message in session.messages]
    assert roles == ["system", "user", "user", "assistant"]
    assert turn.usage.cached_tokens > 40
    assert turn.verify is not None
    assert turn.verify.ok


def test_regenerated_reply_takes_the_place_of_the_first(runtime: Runtime) -> None:
    session = runtime.session()
    session.chat([user("one")], max_new_tokens=3)
    messages = [*session.messages, user("two")]
    first = session.complete(messages, max_new_tokens=3)
    again = session.complete(messages, max_new_tokens=3, temperature=1.0, seed=5)
    assert first.index == again.index == 2
    assert len(session.tips) == 1
    session.rewind(1)
    assert len(session.messages) == 2


def test_what_frameworks_do_to_a_reply_does_not_cost_its_reuse(runtime: Runtime) -> None:
    """Arguments come back respelled, reasoning is left out, results come in another order."""
    answer = (
        "<think>two at once</think>"
        '<tool_call>{"name": "bash", "arguments": {"cmd":  "ls",  "in": "src"}}</tool_call>'
        '<tool_call>{"name": "read", "arguments": {"path": "a.py"}}</tool_call>'
    )
    session = runtime.session()
    first = session.complete([SYSTEM, user("Look")], replay=answer)
    calls = first.message["tool_calls"]
    respelled = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments)}}
        for call, arguments in zip(
            calls, ({"in": "src", "cmd": "ls"}, {"path": "a.py"}), strict=True
        )
    ]
    reply = {"role": "assistant", "content": None, "tool_calls": respelled}
    results = [
        {"role": "tool", "tool_call_id": call["id"], "content": text}
        for call, text in zip(calls, ("a.py", "print(1)"), strict=True)
    ]
    second = session.complete([SYSTEM, user("Look"), reply, *reversed(results)], max_new_tokens=2)
    assert second.usage.cached_tokens == first.usage.prompt_tokens + first.usage.output_tokens
    text = runtime.tokenizer.decode(session.ids.tolist())
    assert text.index("a.py", text.rindex("</tool_call>")) < text.index("print(1)")


def test_max_tokens_then_goes_on_in_the_middle_of_a_reply(runtime: Runtime) -> None:
    session = runtime.session()
    first = session.chat([user("Hi")], max_new_tokens=3)
    assert first.finish_reason == "length"
    assert len(first.ids) == 3
    second = session.chat([user("More")], max_new_tokens=3, verify=True)
    assert second.verify is not None
    assert second.verify.ok
    # The unfinished reply is closed for it.
    position = first.usage.prompt_tokens + 3
    assert int(session.ids[position]) == runtime.end_id


def test_end_id_is_in_the_ids_and_not_in_the_text(runtime: Runtime) -> None:
    turn = runtime.session().chat([user("Hi")], replay="Done.")
    assert turn.text == "Done."
    assert int(turn.ids[-1]) == runtime.end_id
    assert turn.message == {"role": "assistant", "content": "Done."}


@pytest.mark.parametrize("stepwise", [False, True])
def test_character_split_over_the_end_of_the_reply_comes_out_whole_later(
    runtime: Runtime, stepwise: bool
) -> None:
    ids = list(runtime.tokenizer.encode_plain("a🦉b"))
    cut = next(
        k
        for k in range(1, len(ids))
        if "\N{REPLACEMENT CHARACTER}" in runtime.tokenizer.decode(ids[:k])
    )
    session = runtime.session()
    first = session.chat([user("Hi")], replay=ids[:cut], stepwise=stepwise)
    assert first.text == runtime.tokenizer.decode(ids[:cut])
    prompt = [*session.ids.tolist(), *ids[cut:]]
    second = session.generate(prompt, max_new_tokens=2, verify=True)
    assert second.verify is not None
    assert second.verify.ok
    assert "🦉" in runtime.tokenizer.decode(session.ids.tolist())


def test_stop_string_is_in_the_ids_but_not_in_text_or_history(runtime: Runtime) -> None:
    free = runtime.session().chat([user("Hi")], max_new_tokens=30)
    stop = free.text[9:12]
    session = runtime.session()
    turn = session.chat([user("Hi")], max_new_tokens=30, stop=[stop])
    assert turn.finish_reason == "stop"
    assert turn.text == free.text[: free.text.index(stop)]
    assert stop in runtime.tokenizer.decode(turn.ids.tolist())
    assert turn.usage.output_tokens < free.usage.output_tokens
    assert turn.message["content"] == turn.text
    reply = session.ids[turn.usage.prompt_tokens :].tolist()
    assert runtime.tokenizer.decode(reply) == turn.text
    after = session.chat([user("Go on")], max_new_tokens=2, verify=True)
    assert after.usage.cached_tokens >= turn.usage.prompt_tokens - HEADER_LEN
    assert after.verify is not None
    assert after.verify.ok


def test_stop_strings_do_not_apply_to_a_replay(runtime: Runtime) -> None:
    for stepwise in (False, True):
        turn = runtime.session().chat(
            [user("Hi")], replay="one two three", stepwise=stepwise, stop="two"
        )
        assert turn.finish_reason == "replay"
        assert turn.text == "one two three"


def test_replay_stepwise_and_as_one_extension_give_the_same(runtime: Runtime) -> None:
    turns = [
        runtime.session(tenant=str(stepwise)).chat(
            [SYSTEM, user("Hi")],
            replay="The tests pass now.",
            stepwise=stepwise,
            return_logits=True,
        )
        for stepwise in (False, True)
    ]
    one, steps = turns
    assert one.ids.tolist() == steps.ids.tolist()
    assert one.logits is not None
    assert steps.logits is not None
    assert one.logits.shape == (len(one.ids), runtime.shape.vocab_size)
    error = (one.logits - steps.logits).abs().amax(1) / steps.logits.std(1)
    assert float(error.max()) < 1e-4


@pytest.mark.parametrize("length", [0, 1, 2, 31, 32, 33, 34, 65])
@pytest.mark.parametrize("stepwise", [False, True])
def test_recorded_answers_of_any_length_are_absorbed(
    runtime: Runtime, length: int, stepwise: bool
) -> None:
    """Also those that leave one token, or none, for the last chunk of 32."""
    answer = list(range(200, 200 + length))
    prompt = list(range(100, 150))
    session = runtime.session()
    turn = session.generate(
        prompt, replay=answer, stepwise=stepwise, verify=True, return_logits=True
    )
    assert turn.ids.tolist() == answer
    assert turn.finish_reason == "replay"
    assert turn.verify is not None
    assert turn.verify.ok
    assert turn.verify.positions == (0 if turn.logits is None else len(turn.logits)) == length
    following = session.generate([*session.ids.tolist(), 7, 8], max_new_tokens=1)
    assert following.usage.cached_tokens == len(session.ids) - 3 - (stepwise and length > 0)


def test_logits_are_what_each_id_was_taken_from(runtime: Runtime) -> None:
    turn = runtime.session().chat([user("Hi")], max_new_tokens=5, return_logits=True)
    assert turn.logits is not None
    assert turn.logits.argmax(1).tolist() == turn.ids.tolist()


def test_same_seed_gives_the_same_sample(runtime: Runtime) -> None:
    def sample(seed: int) -> list[int]:
        turn = runtime.session().chat(
            [user("Hi")], max_new_tokens=12, temperature=1.5, top_p=0.9, top_k=50, seed=seed
        )
        return turn.ids.tolist()

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_prefill_only_leaves_a_checkpoint_to_go_on_from(runtime: Runtime) -> None:
    session = runtime.session()
    prompt = list(range(10, 90))
    first = session.generate(prompt, max_new_tokens=0)
    assert first.finish_reason == "prefill"
    assert len(first.ids) == 0
    second = session.generate([*prompt, 5, 6], max_new_tokens=1)
    assert second.usage.cached_tokens == len(prompt)


def test_stream_gives_the_turn_piece_by_piece(runtime: Runtime) -> None:
    plain = runtime.session().chat([user("Hi")], max_new_tokens=10)
    stream = runtime.session().chat([user("Hi")], max_new_tokens=10, stream=True)
    deltas = list(stream)
    assert "".join(delta.text for delta in deltas) == plain.message["content"]
    assert [i for delta in deltas for i in delta.ids] == plain.ids.tolist()
    assert stream.turn.text == plain.text


def test_stream_separates_reasoning_and_tool_calls(runtime: Runtime) -> None:
    answer = (
        "<think>look first</think>I will look."
        '<tool_call>{"name": "bash", "arguments": {"cmd":  "ls"}}</tool_call>'
    )
    stream = runtime.session().chat([user("Hi")], replay=answer, stepwise=True, stream=True)
    deltas = list(stream)
    message = stream.turn.message
    assert "".join(d.reasoning for d in deltas) == message["reasoning_content"] == "look first"
    assert "".join(d.text for d in deltas) == message["content"]
    calls = [call for delta in deltas for call in delta.tool_calls]
    assert calls == message["tool_calls"]
    assert calls[0]["function"]["arguments"] == '{"cmd":  "ls"}'


def test_closing_a_stream_gives_everything_back(runtime: Runtime) -> None:
    session = runtime.session()
    before = idle_counts(runtime)
    stream = session.chat([user("Hi")], max_new_tokens=5000, stream=True)
    next(iter(stream))
    stream.close()
    while runtime.stats()["leases"]:
        pass
    runtime.clear()
    assert idle_counts(runtime) == before
    assert session.tips == ()


def test_parallel_calls_on_one_tip_leave_one_tip_each(runtime: Runtime) -> None:
    session = runtime.session()
    session.chat([user("Hi")], max_new_tokens=3)
    with engine_held(runtime):
        streams = [session.chat([user(text)], max_new_tokens=3, stream=True) for text in ("a", "b")]
    turns = [stream.turn for stream in streams]
    assert len(session.tips) == 2
    with pytest.raises(AmbiguousTip, match="2 tips"):
        session.chat([user("c")])
    on = session.chat([user("c")], tip=turns[0].tip, max_new_tokens=2)
    assert on.index == 3
    with pytest.raises(UnknownTip):
        session.chat([user("d")], tip=turns[0].tip)


def test_fork_shares_everything_and_leaves_the_parent_alone(runtime: Runtime) -> None:
    session = runtime.session("main")
    session.chat([SYSTEM, user("Hi")], max_new_tokens=6)
    ids = session.ids.tolist()
    before = runtime.stats()["bytes"]["total"]["used"]
    forks = [session.fork() for _ in range(10)]
    assert runtime.stats()["bytes"]["total"]["used"] == before
    assert all(fork.parent == "main" and fork.ids.tolist() == ids for fork in forks)
    turns = [fork.chat([user("Try.")], max_new_tokens=1) for fork in forks]
    assert all(turn.usage.cached_tokens == len(ids) - 1 for turn in turns[:1])
    assert session.ids.tolist() == ids
    with pytest.raises(SessionError, match="already open"):
        session.fork(forks[0].id)


def test_rewind_stands_at_the_end_of_an_earlier_turn(runtime: Runtime) -> None:
    session = runtime.session()
    lengths = []
    for text in ("one", "two", "three"):
        session.chat([user(text)], max_new_tokens=4)
        lengths.append(len(session.ids))
    session.rewind(1)
    assert len(session.ids) == lengths[0]
    turn = session.chat([user("other")], max_new_tokens=4, verify=True)
    assert turn.index == 2
    assert turn.usage.cached_tokens == lengths[0] - 1
    assert turn.verify is not None
    assert turn.verify.ok
    with pytest.raises(UnknownTip, match="no turn 7"):
        session.rewind(7)
    session.rewind(0)
    assert session.tips == ()
    assert session.chat([user("one")], max_new_tokens=4).index == 1


def test_closed_session_refuses_calls_and_its_id_starts_empty(runtime: Runtime) -> None:
    session = runtime.session("job")
    session.chat([user("Hi")], max_new_tokens=2)
    session.close()
    session.close()
    with pytest.raises(SessionClosed, match="job"):
        session.chat([user("Hi")])
    again = runtime.session("job")
    assert again.tips == ()
    assert again.chat([user("Hi")], max_new_tokens=2).usage.cached_tokens > 0


def test_detached_session_is_found_again(runtime: Runtime) -> None:
    with runtime.session("job") as session:
        session.chat([user("Hi")], max_new_tokens=2)
        session.detach()
    again = runtime.session("job")
    assert again.ids.tolist() == session.ids.tolist()
    assert again.chat([user("Go on")], max_new_tokens=2).index == 2


def test_session_closed_during_a_call_gets_its_answer_and_no_reference(runtime: Runtime) -> None:
    session = runtime.session()
    stream = session.chat([user("Hi")], max_new_tokens=40, stream=True)
    next(iter(stream))
    session.close()
    assert stream.turn.tip is None
    nodes = runtime.on_engine(lambda: list(runtime.cache.tree.nodes()))
    assert sum(node.refs for node in nodes) == 0


def test_tenants_share_nothing_and_see_nothing(runtime: Runtime) -> None:
    messages = [SYSTEM, user("A secret plan.")]
    runtime.session(tenant="a").complete(messages, max_new_tokens=2)
    other = runtime.session(tenant="b").complete(messages, max_new_tokens=2)
    assert other.usage.cached_tokens == 0
    assert other.miss is not None
    assert (other.miss.reason, other.miss.kv_len, other.miss.state_len) == ("new", 0, 0)
    nobody = runtime.session().complete(messages, max_new_tokens=2)
    assert nobody.usage.cached_tokens == 0
    same = runtime.session(tenant="a").complete(messages, max_new_tokens=2)
    assert same.usage.computed_tokens == HEADER_LEN


def test_wrong_arguments_are_refused_with_the_remedy(runtime: Runtime) -> None:
    session = runtime.session()
    vocab = runtime.shape.vocab_size
    with pytest.raises(InvalidRequest, match="empty"):
        session.generate([])
    with pytest.raises(InvalidRequest, match=f"token 1 is {vocab}"):
        session.generate([1, vocab])
    with pytest.raises(InvalidRequest, match="one list of integers"):
        session.generate(np.zeros((2, 2)))
    with pytest.raises(InvalidRequest, match="top_p"):
        session.generate([1], top_p=0)
    with pytest.raises(InvalidRequest, match="max_new_tokens"):
        session.generate([1], max_new_tokens=-1)
    with pytest.raises(InvalidRequest, match="stepwise"):
        session.generate([1], stepwise=True)
    with pytest.raises(InvalidRequest, match="duration"):
        session.idle("soon")
    with pytest.raises(InvalidRequest):
        session.chat([])
    assert session.tips == ()
    session.generate([1, 2, 3], max_new_tokens=1)
    with pytest.raises(HistoryMismatch, match="generate"):
        session.chat([user("Hi")])


def test_prompts_beyond_the_model_or_the_budget_fail_alone() -> None:
    with micro_runtime(budget="200KiB") as runtime:
        before = idle_counts(runtime)
        with pytest.raises(RequestTooLarge, match="raise the budget"):
            runtime.session().generate(np.full(20_000, 7), max_new_tokens=1)
        with pytest.raises(PromptTooLong, match="131072"):
            runtime.session().generate(np.full(131_072, 7), max_new_tokens=1)
        assert idle_counts(runtime) == before
        assert runtime.session().generate([1, 2, 3], max_new_tokens=1).usage.output_tokens == 1


def test_reply_that_outgrows_the_budget_fails_alone(make_runtime) -> None:  # type: ignore[no-untyped-def]
    runtime = make_runtime(budget="200KiB")
    with pytest.raises(RequestTooLarge):
        runtime.session().generate([1, 2, 3], max_new_tokens=5000)
    assert runtime.stats()["leases"] == 0
    assert runtime.session().generate([1, 2, 3], max_new_tokens=1).usage.output_tokens == 1


def test_prompt_that_fits_from_nothing_fits_after_a_hit(
    make_runtime: Callable[..., Runtime],
) -> None:
    """What is known of it must not be in its way: it starts anew where it has to."""
    runtime = make_runtime(budget="300KiB", page_size=16, max_running=1, prefill_chunk=64)
    room = runtime.engine.pools.sizes.num_pages * 16
    cache, resumed_at = runtime.cache, []
    acquire = cache.acquire

    def recorded(*arguments: Any, **named: Any) -> Any:
        lease = acquire(*arguments, **named)
        resumed_at.append(lease.boundary)
        return lease

    cache.acquire = recorded  # type: ignore[method-assign]
    anew = 0
    for share in (70, 75, 80, 85):
        prompt = list(range(100, 100 + room * share // 100))
        runtime.clear()
        expected = runtime.session().generate(prompt, max_new_tokens=2).ids.tolist()
        for known in (20, 35, 50):
            runtime.clear()
            # Known a little further than the prompt follows it, so no state stands where they part.
            head = prompt[: room * known // 100]
            runtime.session().generate([*head, 5, 6, 7], max_new_tokens=1)
            resumed_at.clear()
            turn = runtime.session().generate(prompt, max_new_tokens=2)
            assert turn.ids.tolist() == expected
            # What was reused before a new start was not reused.
            assert turn.usage.cached_tokens == resumed_at[-1]
            anew += len(resumed_at) > 1
    assert anew, "nothing was started anew"


def test_reply_ends_where_the_model_has_no_more_positions() -> None:
    model = build(micro_config(max_position_embeddings=64))
    with Runtime(model, tokenizer()) as runtime:
        turn = runtime.session().generate(list(range(20, 80)), max_new_tokens=50)
        assert turn.finish_reason == "length"
        assert len(turn.ids) == 4


def test_closed_runtime_refuses_calls_and_ends_those_under_way() -> None:
    runtime = micro_runtime()
    session = runtime.session()
    stream = session.generate([1, 2, 3], max_new_tokens=5000, stream=True)
    next(iter(stream))
    runtime.close()
    with pytest.raises(RuntimeClosed):
        stream.turn  # noqa: B018 - the property raises
    with pytest.raises(RuntimeClosed):
        session.generate([1], max_new_tokens=1)
    runtime.close()


def test_miss_report_names_message_and_token_where_the_prompt_leaves_history(
    runtime: Runtime,
) -> None:
    session = runtime.session()
    messages = [SYSTEM, user("first question"), {"role": "assistant", "content": "first answer"}]
    session.complete([*messages, user("second question")], max_new_tokens=2)
    edited = [SYSTEM, user("first question"), {"role": "assistant", "content": "edited answer"}]
    turn = session.complete([*edited, user("second question")], max_new_tokens=2, verify=True)
    assert turn.miss is not None
    assert turn.miss.reason == "diverged"
    assert turn.miss.message == (2, "assistant")
    assert "first" in turn.miss.expected
    assert "edited" in turn.miss.got
    assert turn.verify is not None
    assert turn.verify.ok
    # Where it left the history a state is filed, so the next such prompt reuses up to there.
    third = session.complete([*edited, user("third question")], max_new_tokens=2)
    assert third.usage.cached_tokens >= turn.miss.at_token


def test_miss_report_says_when_a_state_was_evicted(runtime: Runtime) -> None:
    session = runtime.session()
    session.chat([SYSTEM, user("Hi")], max_new_tokens=3)
    assert runtime.clear() > 0
    turn = session.chat([user("Go on")], max_new_tokens=3, verify=True)
    assert turn.miss is not None
    assert turn.miss.reason == "evicted"
    assert turn.miss.evicted_at is not None
    assert turn.usage.cached_tokens == 0
    assert turn.verify is not None
    assert turn.verify.ok


def test_first_turns_share_the_system_prompt_at_first_sight(runtime: Runtime) -> None:
    turns = [
        runtime.session().chat([SYSTEM, user(f"Question number {n}?")], max_new_tokens=2)
        for n in range(3)
    ]
    head = len(runtime.tokenizer.encode_plain(str(SYSTEM["content"])))
    assert turns[0].usage.cached_tokens == 0
    assert turns[1].usage.cached_tokens >= head
    assert turns[2].usage.cached_tokens >= head


def test_marked_message_is_a_boundary_at_first_sight(runtime: Runtime) -> None:
    shared = {"role": "user", "content": "The notes of the repository. " * 6, "mark": True}
    first = runtime.session().complete([SYSTEM, shared, user("a")], max_new_tokens=2)
    second = runtime.session().complete([SYSTEM, shared, user("b")], max_new_tokens=2)
    assert second.usage.cached_tokens > first.usage.prompt_tokens - 20


def test_dropped_stream_stops_the_work(runtime: Runtime) -> None:
    session = runtime.session()
    for _ in session.chat([user("Hi")], max_new_tokens=100_000, stream=True):
        break
    while runtime.stats()["leases"]:
        pass
    assert session.tips == ()


def test_unnamed_session_ends_with_its_handle(runtime: Runtime) -> None:
    for _ in range(5):
        runtime.session().generate([5, 6, 7], max_new_tokens=1)
    kept = runtime.session()
    kept.generate([5, 6, 7], max_new_tokens=1)
    kept.detach()
    name = kept.id
    del kept
    gc.collect()
    assert runtime.stats()["sessions"]["open"] == 1
    assert runtime.session(name).tips != ()


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 5},
        {"verify": 7},
        {"max_new_tokens": 2.5},
        {"max_new_tokens": "3"},
        {"temperature": float("inf")},
        {"temperature": 1e-44},
        {"temperature": float("nan")},
        {"top_k": 1.5},
        {"seed": "x"},
        {"seed": 2**70},
        {"stop": 5},
        {"stop": [b"x"]},
    ],
    ids=str,
)
def test_option_that_makes_no_sense_is_refused(runtime: Runtime, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        runtime.session().generate([1, 2, 3], **options)
    assert runtime.stats()["leases"] == 0


def test_background_share_of_verification_is_counted(make_runtime) -> None:  # type: ignore[no-untyped-def]
    runtime = make_runtime(verify=1.0)
    turn = runtime.session().chat([user("Hi")], max_new_tokens=2)
    assert turn.verify is None
    assert runtime.stats()["verify"] == {"calls": 1, "failed": 0, "dropped": 0}
