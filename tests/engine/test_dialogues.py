"""The dialogues that `tiny-agent` learns: seeded, whole, and right."""

from __future__ import annotations

import random
import re
from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer

from agentcache.engine.embedded import AGENT_FOLDER
from agentcache.engine.tiny import words
from agentcache.engine.tiny.batches import IGNORED, draw_examples, example_of, rows_of
from agentcache.engine.tiny.dialogues import KINDS, draw_dialogue
from agentcache.engine.tiny.evaluate import Tally, held_out_dialogues, is_right, judge
from agentcache.engine.tiny.rendering import render

if TYPE_CHECKING:
    from agentcache.engine.tiny.dialogues import Dialogue

TOKENIZER = Tokenizer.from_file(str(AGENT_FOLDER / "tokenizer.json"))
PAD = 3


def some_dialogues(count: int = 300, **options: Any) -> list[Dialogue]:
    return [draw_dialogue(random.Random(i), num_turns=1 + i % 8, **options) for i in range(count)]


def test_a_seed_gives_one_dialogue() -> None:
    first, second = (draw_dialogue(random.Random(5), num_turns=6) for _ in range(2))
    assert first == second
    assert draw_dialogue(random.Random(6), num_turns=6) != first


def test_turns_cover_all_messages_but_the_system_prompt() -> None:
    for dialogue in some_dialogues():
        at = int(dialogue.messages[0]["role"] == "system")
        for turn in dialogue.turns:
            assert turn.start == at
            assert dialogue.messages[turn.start]["role"] == "user"
            assert dialogue.messages[turn.stop - 1]["role"] == "assistant"
            at = turn.stop
        assert at == len(dialogue.messages)


def test_every_kind_is_drawn_at_every_length() -> None:
    for num_turns in (2, 8):
        drawn = {
            turn.kind
            for i in range(400)
            for turn in draw_dialogue(random.Random(i), num_turns=num_turns).turns
        }
        assert drawn == set(KINDS)


def test_only_offered_tools_are_called_with_the_parameters_they_have() -> None:
    for dialogue in some_dialogues():
        offered = {
            tool["function"]["name"]: list(tool["function"]["parameters"]["properties"])
            for tool in dialogue.tools
        }
        for message in dialogue.messages:
            for call in message.get("tool_calls", ()):
                assert list(call["function"]["arguments"]) == offered[call["function"]["name"]]


def test_each_call_has_its_result() -> None:
    for dialogue in some_dialogues():
        waiting: list[str] = []
        for message in dialogue.messages:
            if message["role"] == "tool":
                assert message["tool_call_id"] == waiting.pop(0)
            else:
                assert not waiting
                waiting = [call["id"] for call in message.get("tool_calls", ())]
        assert not waiting


def test_arithmetic_is_right() -> None:
    seen = 0
    for dialogue in some_dialogues():
        for message in dialogue.messages:
            text = message["content"] if message["role"] == "assistant" else ""
            for a, sign, b, result in re.findall(
                r"(-?[\d.]+) ([-+*/]) (-?[\d.]+) is (-?[\d.]*\d)", text
            ):
                value = {
                    "+": float(a) + float(b),
                    "-": float(a) - float(b),
                    "*": float(a) * float(b),
                    "/": float(a) / (float(b) or 1),
                }[sign]
                assert abs(value - float(result)) <= 0.0051
                seen += 1
    assert seen > 200


def test_recall_says_the_code_word_of_the_system_prompt() -> None:
    given = absent = 0
    for dialogue in some_dialogues():
        system = dialogue.messages[0]["content"] if dialogue.messages[0]["role"] == "system" else ""
        for turn in dialogue.turns:
            if turn.kind != "recall of the code word":
                continue
            answer = dialogue.messages[turn.stop - 1]["content"]
            if answer == "I was given no code word.":
                absent += 1
                assert "code word" not in system.lower()
            else:
                given += 1
                assert answer.removeprefix("The code word is ").rstrip(".") in system
    assert min(given, absent) > 10


def test_kinds_can_be_chosen() -> None:
    dialogue = draw_dialogue(random.Random(0), num_turns=5, kinds=["look-up"])
    assert {turn.kind for turn in dialogue.turns} == {"look-up"}
    with pytest.raises(KeyError):
        draw_dialogue(random.Random(0), num_turns=1, kinds=["poetry"])


def test_digits_and_signs_are_tokens_of_their_own() -> None:
    tokens = TOKENIZER.encode('{"expression": "120 + 37"}').tokens
    assert tokens[tokens.index("1") :][:8] == ["1", "2", "0", "Ġ", "+", "Ġ", "3", "7"]
    vocab = TOKENIZER.get_vocab()
    assert not [token for token in vocab if re.search(r"\d", token) and len(token) > 1]


def test_a_name_has_the_same_tokens_in_a_question_and_in_a_call() -> None:
    for name in (*words.NAMES, "Mavotrin", "Zub"):
        alone = TOKENIZER.encode(name).ids
        for text in (f"Is {name} old?", f'{{"city": "{name}"}}', f"\n{name}."):
            ids = TOKENIZER.encode(text).ids
            assert any(ids[i : i + len(alone)] == alone for i in range(len(ids))), (name, text)


def test_replies_are_what_the_assistant_says_with_its_end() -> None:
    for dialogue in some_dialogues(40):
        example = example_of(TOKENIZER, dialogue)
        said = [
            TOKENIZER.decode(example.ids[r], skip_special_tokens=False) for r in example.replies
        ]
        parts = render(dialogue).split("<|start_of_role|>assistant<|end_of_role|>")[1:]
        assert said == [part[: part.index("<|end_of_text|>")] + "<|end_of_text|>" for part in parts]


def test_rows_hold_the_dialogues_and_ask_only_for_whole_replies() -> None:
    examples = draw_examples(TOKENIZER, "some", 0.5, 4000)
    rows = rows_of(examples, 1504, PAD)
    assert {len(row.ids) for row in rows} == {1504}
    whole = {tuple(example.ids): example for example in examples}
    found = 0
    for row in rows:
        asked = (row.targets != IGNORED).nonzero().flatten().tolist()
        replies = [reply for replies in row.replies for reply in replies]
        assert asked == [at - 1 for reply in replies for at in range(reply.start, reply.stop)]
        assert row.targets[asked].tolist() == [int(row.ids[at + 1]) for at in asked]
        for (start, end), said in zip(row.places.spans, row.replies, strict=False):
            example = whole.get(tuple(row.ids[start:end].tolist()))
            if example is not None:
                found += 1
                assert [slice(r.start - start, r.stop - start) for r in said] == example.replies
    assert found >= len(examples) - 2 * len(rows)


def test_a_row_is_filled_up_and_its_filling_asks_for_nothing() -> None:
    example = draw_examples(TOKENIZER, "one", 0.5, 1)[0]
    (row,) = rows_of([example], 4096, PAD)
    length = len(example.ids)
    assert row.places.spans == ((0, length), (length, 4096))
    assert set(row.ids[length:].tolist()) == {PAD}
    assert (row.targets[length - 1 :] == IGNORED).all()


def test_training_begins_with_short_dialogues() -> None:
    early = draw_examples(TOKENIZER, "a", 0.05, 20_000)
    late = draw_examples(TOKENIZER, "a", 0.9, 20_000)
    assert max(len(e.replies) for e in early) <= 8
    assert max(len(e.replies) for e in late) > 12


async def test_judge_counts_calls_and_answers_by_kind() -> None:
    tally = Tally()
    for dialogue in held_out_dialogues(16):

        async def scripted(messages: Any, tools: Any, dialogue: Any = dialogue) -> Any:
            return dialogue.messages[len(messages)]

        await judge(dialogue, scripted, tally)
    calls, answers = tally.sums(range(1, 9))
    assert calls.share == answers.share == 1
    assert answers.total == sum(1 + i % 8 for i in range(16))


async def test_judge_notices_another_name_and_another_text() -> None:
    tally = Tally()

    async def silent(messages: Any, tools: Any) -> Any:
        return {"role": "assistant", "content": ""}

    await judge(draw_dialogue(random.Random(0), num_turns=4, kinds=["look-up"]), silent, tally)
    calls, answers = tally.sums([4])
    assert (calls.right, answers.right) == (0, 0)
    assert (calls.total, answers.total) == (4, 4)
    assert len(tally.wrong) == 8


def test_arguments_are_equal_as_values() -> None:
    def call(arguments: Any) -> Any:
        function = {"name": "calc", "arguments": arguments}
        return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}

    assert is_right(call('{"a": 1,  "b": 2}'), call({"b": 2, "a": 1}))
    assert not is_right(call('{"a": 1, "b": 3}'), call({"a": 1, "b": 2}))
    assert not is_right(call('{"a": 1'), call({"a": 1}))


def test_held_out_dialogues_are_not_those_of_training() -> None:
    held_out = {render(dialogue) for dialogue in held_out_dialogues(64)}
    trained = {
        TOKENIZER.decode(example.ids, skip_special_tokens=False)
        for step in range(20)
        for example in draw_examples(TOKENIZER, f"train 0 {step} 0", 0.2, 3000)
        if len(example.ids) > 80
    }
    assert not held_out & trained
