"""`/v1/responses`: conversations that go on from a response, and the session behind them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("openai")
import openai

from agentcache import Session, SessionError

MODEL = "tiny-hybrid"
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def client(served_here):
    with openai.OpenAI(base_url=f"{served_here.url}/v1", api_key="-", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def say(client):
    def create(text, previous=None, **fields):
        ask = {"model": MODEL, "input": text, "max_output_tokens": 4, **fields}
        return client.responses.create(**ask, previous_response_id=previous and previous.id)

    return create


def end_of(response) -> int:
    return response.usage.total_tokens


def test_going_on_hits_the_whole_response_before(say):
    first = say("A long question. " * 20)
    second = say("And then?", first)
    third = say("And then?", second)

    assert first.status == "incomplete"
    assert first.incomplete_details.reason == "max_output_tokens"
    # the last token that was sampled is not in the state until it has been run
    assert second.usage.input_tokens_details.cached_tokens == end_of(first) - 1
    assert third.usage.input_tokens_details.cached_tokens == end_of(second) - 1


def test_two_may_go_on_from_one(say):
    root = say("A long question. " * 20)
    left = say("Left?", root)
    right = say("Right?", root)
    left_again = say("On.", left)
    right_again = say("On.", right)

    for before, after in [(root, left), (root, right), (left, left_again), (right, right_again)]:
        assert after.usage.input_tokens_details.cached_tokens == end_of(before) - 1
    assert left.id != right.id


def test_two_may_go_on_from_one_at_once(say):
    root = say("Another long question. " * 20)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda text: say(text, root), ["Left?", "Right?"]))
    after = [say("On.", each) for each in both]

    for response in both:
        assert response.usage.input_tokens_details.cached_tokens >= end_of(root) - 1
    for before, response in zip(both, after, strict=True):
        assert response.usage.input_tokens_details.cached_tokens >= end_of(before) - 1


def test_what_was_cut_is_incomplete_item_by_item(client, say):
    cut = say("A long question.")
    assert cut.status == "incomplete"
    assert [item.status for item in cut.output] == ["incomplete"]

    items = [
        event.item
        for event in client.responses.create(
            model=MODEL, input="A long question.", max_output_tokens=4, stream=True
        )
        if event.type == "response.output_item.done"
    ]
    assert [item.status for item in items] == ["incomplete"]


def test_an_error_in_a_stream_is_an_event_of_this_form(start):
    with start(request_timeout_s=0.3) as server:
        body = {"model": MODEL, "input": "Go on.", "max_output_tokens": 100_000, "stream": True}
        answer = server.post("/v1/responses", body)
    *before, last = [event for event in answer.text.split("\n\n") if event.startswith("event")]
    name, data = last.split("\n")
    said = json.loads(data.removeprefix("data: "))

    assert name == "event: error"
    assert (said["type"], said["code"]) == ("error", "timeout")
    assert said["sequence_number"] == len(before)
    assert set(said) == {"type", "code", "message", "param", "sequence_number"}


def test_a_fork_that_cannot_be_taken_back_is_closed(say, served_here, monkeypatch):
    def fail(*_args, **_options):
        raise SessionError("no")

    root = say("A long question. " * 20)
    say("Left?", root)
    before = {record.id for record in served_here.runtime.registry}
    monkeypatch.setattr(Session, "rewind", fail)
    right = say("Right?", root)

    assert {record.id for record in served_here.runtime.registry} == before | {right.id}


def test_going_on_outlives_its_session(say, served_here):
    first = say("Remember this.")
    served_here.post(f"/v1/sessions/{first.id}/close")
    second = say("What?", first)

    assert second.usage.input_tokens > end_of(first)


def test_instructions_are_those_of_the_call(say):
    first = say("Hello", instructions="Be brief.")
    second = say("Again", first)
    third = say("Again", second, instructions="Be brief.")

    assert first.instructions == "Be brief."
    assert second.instructions is None
    assert third.usage.input_tokens > second.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_runs_over_responses(client, stream):
    pytest.importorskip("llguidance")
    ask = {"model": MODEL, "tools": [TOOL], "max_output_tokens": 60}
    if stream:
        with client.responses.stream(
            **ask, input="Weather?", tool_choice="required", store=True
        ) as events:
            kinds = [event.type for event in events]
            first = events.get_final_response()
        assert "response.function_call_arguments.done" in kinds
    else:
        first = client.responses.create(**ask, input="Weather?", tool_choice="required")
    (call,) = first.output
    second = client.responses.create(
        **ask,
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}],
    )

    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens - 8


def test_items_sent_back_are_the_conversation(client, say):
    first = say("One")
    items = [
        {"role": "user", "content": "One"},
        *[item.model_dump(exclude_none=True) for item in first.output],
        {"role": "user", "content": [{"type": "input_text", "text": "Two"}]},
    ]
    by_items = client.responses.create(model=MODEL, input=items, max_output_tokens=4)
    by_id = say("Two", first)

    assert by_items.output_text == by_id.output_text


def test_events_add_up_to_the_response(client):
    ask = {"model": MODEL, "input": "Count to three", "max_output_tokens": 4}
    plain = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))

    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == plain.output_text
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output_text == plain.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_a_response_can_be_read_again_and_forgotten(client, say):
    first = say("Keep this")
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = say("More", first)
    client.responses.delete(first.id)

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as raised:
        say("More", first)
    assert raised.value.param == "previous_response_id"
    assert say("More", second).usage.input_tokens > end_of(second)


def test_a_response_that_is_not_stored_leaves_nothing(client, say):
    first = say("Forget this", store=False)

    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)


def test_only_the_last_responses_are_remembered(start):
    with start(max_sessions=2) as server:
        body = {"model": MODEL, "input": "Hello", "max_output_tokens": 1}
        ids = [server.post("/v1/responses", body).json()["id"] for _ in range(3)]
        status = [server.get(f"/v1/responses/{id}").status_code for id in ids]

    assert status == [404, 200, 200]
