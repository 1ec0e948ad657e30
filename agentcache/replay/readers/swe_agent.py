"""SWE-agent `.traj`: a history, and in newer versions the prompt of every step.

Which rows the model saw depends on the version:

| recorded                | prompt of step i                                             |
|-------------------------|--------------------------------------------------------------|
| `query` in each step    | `query` of step i                                            |
| `messages` in each step | `messages` of step i - 1: the view after that step           |
| `history` only          | all rows of the history before the i-th answer; not exact if |
|                         | a history processor shortened them, or may have              |
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from typing import TYPE_CHECKING, Any

from agentcache.replay.readers._messages import chat_calls, read_message, share
from agentcache.replay.readers.base import (
    Call,
    Format,
    Message,
    Notes,
    Place,
    Record,
    Source,
    Trajectory,
    per_record,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["SWE_AGENT"]

_HARMLESS_PROCESSORS = frozenset({"cache_control", "default", "DefaultHistoryProcessor"})


def _sniff(data: object) -> bool:
    if not isinstance(data, dict):
        return False
    history = data.get("history")
    has_rows = isinstance(history, list) and any(
        isinstance(row, dict) and "role" in row for row in history[:1]
    )
    return has_rows or ("trajectory" in data and "history" in data)


def _read_one(source: Source, record: Record) -> list[Trajectory]:
    run = source.place(record, Notes()).mapping(record.data)
    run_id = source.stem if record.line is None else f"{source.stem}/line{record.line}"
    trajectories: list[Trajectory] = []
    for agent, history in _by_agent(run, source.place(record, Notes())).items():
        notes = Notes()
        top = source.place(record, notes)
        calls = _calls(run, history, top, is_main=not trajectories)
        trajectories.append(
            Trajectory(
                run_id if not trajectories else f"{run_id}/{agent}",
                source.shown,
                SWE_AGENT.name,
                calls,
                parent=run_id if trajectories else None,
                notes=notes.texts(),
            )
        )
    return trajectories


def _by_agent(run: Mapping[str, Any], top: Place) -> dict[str, list[tuple[int, Any]]]:
    """Rows of the history with their index, by the agent that saw them (0.x had sub-agents)."""
    place = top.key("history")
    rows: dict[str, list[tuple[int, Any]]] = {}
    for idx, value in enumerate(place.items(run.get("history"))):
        agent = place.item(idx).mapping(value).get("agent") or next(iter(rows), "")
        agent = place.item(idx).key("agent").text(agent)
        rows.setdefault(agent, []).append((idx, value))
    return rows or {"": []}


def _calls(
    run: Mapping[str, Any], history: list[tuple[int, Any]], top: Place, *, is_main: bool
) -> tuple[Call, ...]:
    place = top.key("history")
    rows = [_row(value, place.item(idx)) for idx, value in history]
    demos = {pos for pos, (_, value) in enumerate(history) if value.get("is_demo")}
    steps = _steps(run, top) if is_main else []
    if "attempts" in run:
        top.notes.add("of several attempts only the chosen one is read")
    views = [name for name in ("query", "messages") if any(name in step for step in steps)]
    if views:
        answers = [row for pos, row in enumerate(rows) if _is_answer(row) and pos not in demos]
        return tuple(_step_calls(steps, views[0], answers, top.key("trajectory")))
    exact = _is_full(run, top)
    calls = chat_calls(rows, place, is_call=lambda pos: pos not in demos, exact=exact)
    if is_main and len(steps) > len(calls):
        top.notes.add(f"{len(steps) - len(calls)} of {len(steps)} steps are not in the history")
    return calls


def _steps(run: Mapping[str, Any], top: Place) -> list[dict[str, Any]]:
    place = top.key("trajectory")
    if run.get("trajectory") is None:
        return []
    return [
        place.item(idx).mapping(step) for idx, step in enumerate(place.items(run["trajectory"]))
    ]


def _step_calls(
    steps: list[dict[str, Any]], view: str, answers: list[Message], place: Place
) -> Iterator[Call]:
    """One call per step that has an answer; `view` names the field that holds prompts."""
    by_text: dict[str, deque[Message]] = defaultdict(deque)
    for row in answers:
        by_text[row["content"].strip()].append(row)
    seen: tuple[Message, ...] = ()
    exact = True
    for idx, step in enumerate(steps):
        where = place.item(idx)
        text = where.key("response").text(step.get("response", ""))
        kept = by_text[text.strip()]
        answer = kept.popleft() if kept else None
        before, seen = seen, _view(step, view, where, seen)
        prompt = _prompt(view, before, seen, answer)
        if not prompt or (answer is None and not text.strip()):
            place.notes.add("a step without prompt or answer is no model call")
            continue
        yield Call(prompt, None, answer or {"role": "assistant", "content": text}, None, exact)
        # A failed step is not in the history; the rows that ask for it again only `query` shows.
        exact = view == "query" or answer is not None
        if not exact:
            place.notes.add("the prompt after a failed step lacks the rows about the failure")


def _prompt(
    view: str, before: tuple[Message, ...], seen: tuple[Message, ...], answer: Message | None
) -> tuple[Message, ...]:
    """The prompt of a step, from the views of the step before it and of the step itself."""
    if view == "query":
        return seen
    if before:
        return before
    if answer is None:
        return seen
    # The view after the first step: its last assistant row is the answer.
    last = max((pos for pos, row in enumerate(seen) if _is_answer(row)), default=len(seen))
    return seen[:last]


def _view(
    step: Mapping[str, Any], name: str, place: Place, known: tuple[Message, ...]
) -> tuple[Message, ...]:
    where = place.key(name)
    recorded = where.items(step.get(name))
    if recorded == [{}]:
        return ()
    return share([_row(row, where.item(idx)) for idx, row in enumerate(recorded)], known)


def _is_answer(row: Message) -> bool:
    return bool(row["role"] == "assistant")


def _row(value: object, place: Place) -> Message:
    """A row of a history as the message SWE-agent made of it."""
    row = dict(place.mapping(value))
    ids = row.get("tool_call_ids")
    if row.get("role") == "tool" and ids:
        row["tool_call_id"] = place.key("tool_call_ids").items(ids)[0]
    if row.get("thinking_blocks"):
        row["reasoning_content"] = _thinking(row["thinking_blocks"], place.key("thinking_blocks"))
    return read_message(row, place)


def _thinking(value: object, place: Place) -> str:
    texts = []
    for idx, block in enumerate(place.items(value)):
        where = place.item(idx)
        texts.append(where.key("thinking").text(where.mapping(block).get("thinking", "")))
    return "".join(texts)


def _is_full(run: Mapping[str, Any], top: Place) -> bool:
    """Whether the model saw the history as it is; if not, a note says why."""
    agent = _agent_config(run.get("replay_config"), top.key("replay_config"))
    if not {"history_processor", "history_processors"} & agent.keys():
        top.notes.add("history processor unknown: prompts are the full history")
        return False
    found = agent.get("history_processors") or agent.get("history_processor") or []
    names = [
        str(entry.get("type", "unknown")) if isinstance(entry, dict) else str(entry)
        for entry in (found if isinstance(found, list) else [found])
    ]
    applied = [name for name in names if name not in _HARMLESS_PROCESSORS]
    if applied:
        top.notes.add(
            f"history processor applied ({', '.join(applied)}): prompts are the full history"
        )
    return not applied


def _agent_config(config: object, place: Place) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise place.error("is not JSON text", "it holds the agent's configuration") from error
    return place.key("agent").mapping(place.mapping(config).get("agent"))


SWE_AGENT = Format("swe-agent", _sniff, per_record(_read_one))
