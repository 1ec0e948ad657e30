"""One real recording of each format, read into calls; and dialects no real file here shows."""

import json
from pathlib import Path

import pytest

from agentcache.errors import TraceFormatError
from agentcache.replay.trace import read_file, read_paths

REPOSITORY = Path(__file__).parents[2]
RUNS = REPOSITORY / "tests" / "fixtures" / "trajectories"
SAMPLE = REPOSITORY / "agentcache" / "data" / "sample"


def write(path, value):
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def texts(call):
    return [row["content"] for row in call.messages]


# mini-swe-agent


def test_mini_swe_agent_call_is_each_answer_after_all_rows_before_it():
    path = SAMPLE / "django__django-16429.traj.json"
    recorded = json.loads(path.read_text(encoding="utf-8"))["messages"]
    [run] = read_file(path)

    assert (run.id, run.format, len(run.calls)) == ("django__django-16429", "mini-swe-agent", 20)
    assert recorded[-1]["role"] == "user"  # the row after the last answer is no call
    for call in run.calls:
        rows = [say(row["role"], row["content"]) for row in recorded]
        assert list(call.messages) == rows[: len(call.messages)]
        assert call.answer == rows[len(call.messages)]
        assert call.at == recorded[len(call.messages)]["extra"]["response"]["created"]
        assert call.exact
        assert call.tools is None


def test_mini_swe_agent_bare_list_has_the_files_name_and_no_times():
    [run] = read_file(RUNS / "mini-swe-agent" / "github_issue.traj.json")

    assert (run.id, len(run.calls)) == ("github_issue", 10)
    assert {call.at for call in run.calls} == {None}


def test_mini_swe_agent_exit_row_is_no_message(tmp_path):
    rows = [say("user", "u"), say("assistant", "a"), {"role": "exit", "extra": {}}]
    [run] = read_file(write(tmp_path / "r.traj.json", {"messages": rows, "info": {}}))

    assert len(run.calls) == 1


def test_answer_with_nothing_before_it_is_no_call(tmp_path):
    rows = [say("assistant", "hello"), say("user", "u"), say("assistant", "a")]
    [run] = read_file(write(tmp_path / "r.traj.json", rows))

    assert [texts(call) for call in run.calls] == [["hello", "u"]]
    assert any("nothing before it" in note for note in run.notes)


def test_condenser_log_is_refused_for_what_it_is():
    with pytest.raises(TraceFormatError, match="is a condenser log"):
        read_file(RUNS / "mini-swe-agent" / "astropy__astropy-12907_20251014_174323.jsonl")


# SWE-agent


def test_swe_agent_without_views_or_config_is_read_from_history_and_not_exact():
    path = RUNS / "swe-agent" / "networking_1.traj"
    history = json.loads(path.read_text(encoding="utf-8"))["history"]
    [run] = read_file(path)

    assert len(run.calls) == 4
    assert texts(run.calls[-1]) == [row["content"] for row in history[:-1]]
    assert not any(call.exact for call in run.calls)
    assert any("history processor unknown" in note for note in run.notes)


def test_swe_agent_names_the_history_processor_that_shortened_prompts():
    [run] = read_file(RUNS / "swe-agent" / "default_sys-env_window100.traj")

    assert len(run.calls) == 11
    assert not any(call.exact for call in run.calls)
    assert any("applied (last_n_observations)" in note for note in run.notes)


@pytest.mark.parametrize("processors", [[], [{"type": "cache_control", "last_n_messages": 2}]])
def test_swe_agent_history_is_exact_when_no_processor_shortened_it(tmp_path, processors):
    run_file = {
        "history": [say("system", "s"), say("user", "u"), say("assistant", "a")],
        "replay_config": json.dumps({"agent": {"history_processors": processors}}),
    }
    [run] = read_file(write(tmp_path / "r.traj", run_file))

    assert [call.exact for call in run.calls] == [True]


def test_swe_agent_tool_rows_become_tool_messages():
    [run] = read_file(RUNS / "swe-agent" / "function_calling_simple.traj")

    assert len(run.calls) == 5
    answer, result = run.calls[1].messages[2:4]
    assert answer == run.calls[0].answer
    [called] = answer["tool_calls"]
    assert called["function"]["name"] == "find_file"
    assert json.loads(called["function"]["arguments"]) == {"file_name": "missing_colon.py"}
    assert (result["role"], result["tool_call_id"]) == ("tool", called["id"])


def test_swe_agent_messages_of_a_step_are_the_prompt_of_the_next():
    path = RUNS / "swe-agent" / "function_calling_replace_from_source.traj"
    steps = json.loads(path.read_text(encoding="utf-8"))["trajectory"]
    [run] = read_file(path)

    assert [len(call.messages) for call in run.calls] == list(range(2, 28, 2))
    for call, step in zip(run.calls[1:], steps, strict=False):
        assert texts(call) == [row["content"] for row in step["messages"]]
    assert [call.answer["content"] for call in run.calls] == [step["response"] for step in steps]
    assert all(call.exact and call.answer["tool_calls"] for call in run.calls)


def test_swe_agent_elided_observations_break_append_only():
    [run] = read_file(RUNS / "swe-agent" / "function_calling_replace_from_source.traj")

    broken = [
        idx
        for idx in range(1, 13)
        if run.calls[idx].messages[: 2 * idx] != run.calls[idx - 1].messages
    ]
    assert broken == [6, 7, 8, 9, 10, 11, 12]
    assert "Old environment output" in run.calls[6].messages[3]["content"]


def test_swe_agent_first_prompt_keeps_demonstrations(tmp_path):
    head = [
        say("system", "s"),
        say("user", "demo task", is_demo=True),
        say("assistant", "demo answer", is_demo=True),
        say("user", "task"),
    ]
    rows = [*head, say("assistant", "one"), say("user", "seen"), say("assistant", "two")]
    steps = [
        {"response": "one", "messages": rows[:6]},
        {"response": "two", "messages": rows},
    ]
    [viewed] = read_file(write(tmp_path / "viewed.traj", {"history": rows, "trajectory": steps}))
    [plain] = read_file(write(tmp_path / "plain.traj", {"history": rows}))

    for run in (viewed, plain):
        assert [texts(call) for call in run.calls] == [
            ["s", "demo task", "demo answer", "task"],
            ["s", "demo task", "demo answer", "task", "one", "seen"],
        ]


def test_swe_agent_query_is_the_prompt_of_its_own_step(tmp_path):
    history = [
        say("user", "task"),
        say(
            "assistant",
            "one",
            tool_calls=[{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        ),
        say("tool", "seen", tool_call_ids=["c"]),
        say("assistant", "two"),
    ]
    failed = [*history[:3], say("assistant", "bad"), say("user", "try again")]
    steps = [
        {"response": "one", "query": history[:1]},
        {"response": "bad", "query": history[:3]},
        {"response": "two", "query": failed},
        {"response": "", "query": [{}]},
    ]
    [run] = read_file(write(tmp_path / "r.traj", {"history": history, "trajectory": steps}))

    assert [texts(call) for call in run.calls] == [
        ["task"],
        ["task", "one", "seen"],
        ["task", "one", "seen", "bad", "try again"],
    ]
    assert [call.answer["content"] for call in run.calls] == ["one", "bad", "two"]
    assert "tool_calls" in run.calls[0].answer
    assert all(call.exact for call in run.calls)
    assert "a step without prompt or answer is no model call" in run.notes


def test_swe_agent_prompt_after_a_failed_step_is_not_exact(tmp_path):
    rows = [say("user", "task"), say("assistant", "one"), say("user", "seen")]
    steps = [
        {"response": "bad", "messages": rows[:1]},
        {"response": "one", "messages": rows},
    ]
    [run] = read_file(write(tmp_path / "r.traj", {"history": rows, "trajectory": steps}))

    assert [texts(call) for call in run.calls] == [["task"], ["task"]]
    assert [call.answer["content"] for call in run.calls] == ["bad", "one"]
    assert [call.exact for call in run.calls] == [True, False]


def test_swe_agent_sub_agents_do_not_share_prompts(tmp_path):
    rows = [
        say("system", "main", agent="primary"),
        say("assistant", "go", agent="primary"),
        say("system", "sub", agent="helper"),
        say("assistant", "done", agent="helper"),
        say("user", "result", agent="primary"),
        say("assistant", "end", agent="primary"),
    ]
    main, helper = read_file(write(tmp_path / "r.traj", {"history": rows}))

    assert [texts(call) for call in main.calls] == [["main"], ["main", "go", "result"]]
    assert [texts(call) for call in helper.calls] == [["sub"]]
    assert (helper.id, helper.parent) == ("r/helper", "r")


def test_swe_agent_thinking_blocks_become_reasoning(tmp_path):
    blocks = [{"type": "thinking", "thinking": "hm", "signature": "x"}]
    rows = [say("user", "u"), say("assistant", "a", thinking_blocks=blocks)]
    [run] = read_file(write(tmp_path / "r.traj", {"history": rows}))

    assert run.calls[0].answer["reasoning_content"] == "hm"


# tau-bench


def test_tau_bench_has_one_trajectory_per_task_and_trial():
    runs = read_file(RUNS / "tau-bench" / "gpt-4o-airline.task18.json")

    assert [run.id for run in runs] == [
        f"gpt-4o-airline.task18/task18-trial{trial}" for trial in range(3)
    ]
    assert [len(run.calls) for run in runs] == [7, 8, 7]
    assert all("tool schemas are not recorded" in run.notes for run in runs)
    results = [row for row in runs[0].calls[-1].messages if row["role"] == "tool"]
    assert results
    assert all(row["name"] and row["tool_call_id"] for row in results)


def test_null_content_beside_tool_calls_is_empty_text():
    runs = read_file(RUNS / "tau-bench" / "gpt-4o-airline.task18.json")

    calling = [call.answer for run in runs for call in run.calls if "tool_calls" in call.answer]
    assert calling
    assert all(isinstance(answer["content"], str) for answer in calling)


def test_tau_bench_result_that_cannot_be_used_costs_only_itself(tmp_path):
    results = json.loads((RUNS / "tau-bench" / "gpt-4o-airline.task18.json").read_text("utf-8"))
    results[1]["traj"] = None
    read = read_paths(write(tmp_path / "t.json", results))

    assert [run.id for run in read.trajectories] == ["t/task18-trial0", "t/task18-trial2"]
    assert read.partial == 1
    assert "[1].traj is missing" in read.warnings[0]


# OpenHands


def test_openhands_completion_is_one_call_of_its_file():
    path = next(iter(sorted((RUNS / "openhands" / "llm-completions").iterdir())))
    recorded = json.loads(path.read_text(encoding="utf-8"))
    [run] = read_file(path)

    [call] = run.calls
    assert call.at == recorded["timestamp"]
    assert call.tools == tuple(recorded["tools"])
    assert call.answer["tool_calls"][0]["function"]["name"] == "str_replace_editor"
    assert "index" not in call.answer["tool_calls"][0]


def test_openhands_completions_of_a_folder_are_one_run_in_order_of_time(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    originals = sorted((RUNS / "openhands" / "llm-completions").iterdir())
    for name, path in zip("cab", originals, strict=True):
        (folder / f"{name}.json").write_bytes(path.read_bytes())

    result = read_paths(folder)

    [run] = result.trajectories
    assert (run.id, result.loaded, result.partial) == ("run", 3, 0)
    assert [len(call.messages) for call in run.calls] == [2, 4, 6]
    for before, call in zip(run.calls, run.calls[1:], strict=False):
        assert call.messages[: len(before.messages) + 1] == (*before.messages, before.answer)


def test_openhands_run_has_one_call_per_model_response():
    path = RUNS / "openhands" / "multi_swe_bench.output.jsonl"
    run_row = json.loads(path.read_text(encoding="utf-8"))
    responses = [
        event["tool_call_metadata"]["model_response"]["id"]
        for event in run_row["history"]
        if "tool_call_metadata" in event
    ]
    [run] = read_file(path)

    assert run.id == "ponylang__ponyc-4593"
    assert len(run.calls) == len(set(responses)) == 33
    assert len(responses) > 33  # the observation repeats the response of its action
    assert not any(call.exact for call in run.calls)


def test_openhands_run_is_put_together_from_its_events():
    [run] = read_file(RUNS / "openhands" / "multi_swe_bench.output.jsonl")

    last = run.calls[-1]
    assert [row["role"] for row in last.messages[:4]] == ["system", "user", "assistant", "tool"]
    assert last.tools is not None
    assert last.messages[3]["tool_call_id"] == last.messages[2]["tool_calls"][0]["id"]
    assert any("Parameter 'command' is expected" in row["content"] for row in last.messages)
    assert any("workspace context is left out" in note for note in run.notes)


def test_openhands_parallel_tool_calls_are_one_answer(tmp_path):
    calls = [
        {"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}}
        for name in "ab"
    ]
    response = {"id": "r", "choices": [{"message": say("assistant", None, tool_calls=calls)}]}

    def metadata(name):
        return {"function_name": "f", "tool_call_id": name, "model_response": response}

    events = [
        {"source": "user", "action": "message", "args": {"content": "go"}},
        {"source": "agent", "action": "run", "args": {}, "tool_call_metadata": metadata("a")},
        {"observation": "run", "content": "1", "tool_call_metadata": metadata("a")},
        {"source": "agent", "action": "run", "args": {}, "tool_call_metadata": metadata("b")},
        {"observation": "run", "content": "2", "tool_call_metadata": metadata("b")},
        {"source": "agent", "action": "message", "args": {"content": "done"}},
    ]
    row = {"instance_id": "i", "metadata": {}, "history": events}
    [run] = read_file(write_lines(tmp_path / "output.jsonl", [row]))

    assert [call.answer["content"] for call in run.calls] == ["", "done"]
    assert [row["role"] for row in run.calls[1].messages] == ["user", "assistant", "tool", "tool"]


def test_openhands_run_without_calls_makes_its_file_partial(tmp_path):
    good = json.loads((RUNS / "openhands" / "multi_swe_bench.output.jsonl").read_text("utf-8"))
    failed = {"instance_id": "failed", "metadata": {}, "history": None, "error": "e"}
    result = read_paths(write_lines(tmp_path / "output.jsonl", [good, failed]))

    assert (result.loaded, result.partial) == (0, 1)
    assert [run.id for run in result.trajectories] == ["ponylang__ponyc-4593"]
    assert any("failed holds no model call" in warning for warning in result.warnings)


def test_openhands_event_list_is_refused_for_what_it_is():
    with pytest.raises(TraceFormatError, match="bare OpenHands event list"):
        read_file(RUNS / "openhands" / "basic_interactions.json")


# Claude Code


def record(uuid, parent, kind, content, **more):
    message = {"role": kind, "content": content}
    if "id" in more:
        message["id"] = more.pop("id")
    return {
        "type": kind,
        "uuid": uuid,
        "parentUuid": parent,
        "sessionId": "s",
        "message": message,
        **more,
    }


def use(name, **arguments):
    return {"type": "tool_use", "id": name, "name": "f", "input": arguments}


def result_of(name, content):
    return {"type": "tool_result", "tool_use_id": name, "content": content}


def test_claude_code_session_and_sub_agent_are_two_trajectories():
    result = read_paths(RUNS / "claude-code" / "sessions")

    main, side = result.trajectories
    assert (len(main.calls), len(side.calls), result.loaded) == (2, 2, 2)
    assert (main.parent, side.parent) == (None, main.id)
    assert main.calls[1].messages[-1]["role"] == "tool"
    assert not any(call.exact for call in (*main.calls, *side.calls))


def test_claude_code_lines_of_one_answer_are_merged():
    [run] = read_file(RUNS / "claude-code" / "excerpts" / "read-tool-variants.jsonl")

    assert len(run.calls) == 5
    first = run.calls[0].answer
    assert first["content"].startswith("I'll perform each")
    [called] = first["tool_calls"]
    assert called["function"]["name"] == "Read"
    assert "file_path" in json.loads(called["function"]["arguments"])
    assert run.calls[1].messages[1] == first


def test_claude_code_record_without_its_parent_follows_the_message_before_it():
    [run] = read_file(RUNS / "claude-code" / "excerpts" / "edit-tool-variants.jsonl")

    assert len(run.calls) == 4
    assert [row["role"] for row in run.calls[0].messages] == ["user"]
    assert any("a parent is not in the file" in note for note in run.notes)


def test_claude_code_follows_parents_and_not_lines(tmp_path):
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("a1", "u1", "assistant", [{"type": "text", "text": "one"}], id="m1"),
            record("u1", None, "user", "first"),
            record("u2", "a1", "user", "dead end"),
            record("u3", "a1", "user", "second"),
            record("a2", "u3", "assistant", [{"type": "text", "text": "two"}], id="m2"),
        ],
    )
    [run] = read_file(path)

    assert [texts(call) for call in run.calls] == [["first"], ["first", "one", "second"]]


def test_claude_code_keeps_results_of_parallel_tool_calls(tmp_path):
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("u1", None, "user", "go"),
            record("a1", "u1", "assistant", [use("t1")], id="m1"),
            record("a2", "a1", "assistant", [use("t2", k="ü")], id="m1"),
            record("r1", "a1", "user", [result_of("t1", "one")]),
            record("r2", "a2", "user", [result_of("t2", [{"type": "text", "text": "two"}])]),
            record("a3", "r2", "assistant", [{"type": "text", "text": "end"}], id="m2"),
        ],
    )
    [run] = read_file(path)

    first, last = run.calls
    assert [call["id"] for call in first.answer["tool_calls"]] == ["t1", "t2"]
    assert first.answer["tool_calls"][1]["function"]["arguments"] == '{"k": "ü"}'
    assert texts(last) == ["go", "", "one", "two"]
    assert [row.get("tool_call_id") for row in last.messages] == [None, None, "t1", "t2"]


def test_claude_code_result_recorded_after_an_answer_is_not_in_its_prompt(tmp_path):
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("u1", None, "user", "go"),
            record("a1", "u1", "assistant", [use("t1")], id="m1"),
            record("a2", "a1", "assistant", [use("t2")], id="m1"),
            record("r1", "a1", "user", [result_of("t1", "one")]),
            record("a3", "r1", "assistant", "early", id="m2"),
            record("r2", "a2", "user", [result_of("t2", "late")]),
        ],
    )
    [run] = read_file(path)

    assert texts(run.calls[-1]) == ["go", "", "one"]


def test_claude_code_images_become_a_mark_with_a_note(tmp_path):
    image = {"type": "image", "source": {"type": "base64", "data": "AA=="}}
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("u1", None, "user", "look"),
            record("a1", "u1", "assistant", [use("t")], id="m1"),
            record("r1", "a1", "user", [result_of("t", [image])]),
            record("a2", "r1", "assistant", "a picture", id="m2"),
        ],
    )
    [run] = read_file(path)

    assert run.calls[1].messages[-1]["content"] == "[image]"
    assert any("images were replaced" in note for note in run.notes)


def test_claude_code_thinking_becomes_reasoning_and_error_lines_are_no_calls(tmp_path):
    thinking = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}]
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("u1", None, "user", "go"),
            record("x", "u1", "assistant", "API Error", isApiErrorMessage=True),
            record("a1", "x", "assistant", thinking, id="m1"),
        ],
    )
    [run] = read_file(path)

    [call] = run.calls
    assert call.answer == say("assistant", "a", reasoning_content="hm")
    assert texts(call) == ["go"]


def test_claude_code_side_chains_without_agent_ids_are_told_apart(tmp_path):
    path = write_lines(
        tmp_path / "s.jsonl",
        [
            record("u1", None, "user", "one", isSidechain=True),
            record("u2", None, "user", "two", isSidechain=True),
            record("a1", "u1", "assistant", "1", id="m1", isSidechain=True),
            record("a2", "u2", "assistant", "2", id="m2", isSidechain=True),
        ],
    )
    runs = read_file(path)

    assert [run.id for run in runs] == ["s/u1", "s/u2"]
    assert [texts(run.calls[0]) for run in runs] == [["one"], ["two"]]


# recordings without model calls


def test_intercode_result_is_refused_for_what_it_is(tmp_path):
    logs = write(tmp_path / "logs.json", {"meta": {"env": "sql"}, "logs": {"0": {}}})
    for path in (RUNS / "intercode" / "ic_bash_multiturn_gpt-4.first-2.json", logs):
        with pytest.raises(TraceFormatError, match="InterCode result"):
            read_file(path)
