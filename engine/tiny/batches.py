"""Dialogues as packed rows of token ids, with targets on what the assistant says."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from agentcache.engine.tiny.dialogues import draw_dialogue
from agentcache.engine.tiny.packed import Places
from agentcache.engine.tiny.rendering import render

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenizers import Tokenizer
    from torch import Tensor

    from agentcache.engine.tiny.dialogues import Dialogue

__all__ = ["IGNORED", "Example", "Row", "draw_examples", "example_of", "rows_of"]

IGNORED = -100
"""Target of a token that nobody has to predict."""
_DRILLS = 0.8  # of the first examples; fewer between these parts of the training
_DRILLS_FADE = (0.12, 0.24)
_FEW_TOKENS = 264  # that drills are made of at first; between these parts they become all
_TOKENS_GROW = (0.12, 0.18)
_FIRST_TEXT_ID = 8
_ROLE_HEADER = 3  # tokens that open a message: the mark, the role, the mark


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids of a dialogue, and where its replies lie, end marks included."""

    ids: list[int]
    replies: list[slice]


@dataclass(frozen=True, slots=True)
class Row:
    """ids and targets: [tokens]; a target is the token after, or IGNORED. places: where each token
    belongs. replies: of each dialogue, where its whole replies lie in this row."""

    ids: Tensor
    targets: Tensor
    places: Places
    replies: tuple[tuple[slice, ...], ...]


def example_of(tokenizer: Tokenizer, dialogue: Dialogue) -> Example:
    """A dialogue in tokens."""
    ids = tokenizer.encode(render(dialogue)).ids
    start = tokenizer.token_to_id("<|start_of_role|>")
    end: Any = tokenizer.token_to_id("<|end_of_text|>")
    assistant = tokenizer.token_to_id("assistant")
    replies = []
    for at, token in enumerate(ids):
        if token == start and ids[at + 1] == assistant:
            first = at + _ROLE_HEADER
            replies.append(slice(first, ids.index(end, first) + 1))
    return Example(ids, replies)


def draw_examples(
    tokenizer: Tokenizer, seed: str, progress: float, num_tokens: int
) -> list[Example]:
    """Dialogues of `num_tokens` tokens together, as suits the part of the training that is over.

    Short ones at first, among drills in copying; then up to eight turns; from the middle on also
    some of up to forty, and system prompts that say much.
    """
    draws = random.Random(seed)
    examples: list[Example] = []
    while sum(len(example.ids) for example in examples) < num_tokens:
        if draws.random() < _DRILLS * (1 - _rise(progress, *_DRILLS_FADE)):
            growth = _rise(progress, *_TOKENS_GROW)
            num_known = round(_FEW_TOKENS * (tokenizer.get_vocab_size() / _FEW_TOKENS) ** growth)
            examples.append(_drill(draws, num_known))
            continue
        if progress < 0.12:
            num_turns, noise = draws.choice((1, 1, 2)), 10
        else:
            num_turns, noise = draws.choice((1, 1, 2, 2, 3, 4, 5, 6, 8)), 40
        if progress > 0.4 and draws.random() < 0.06:
            num_turns = draws.randint(9, 24 if progress < 0.7 else 40)
        if progress > 0.4 and draws.random() < 0.1:
            noise = 300
        dialogue = draw_dialogue(draws, num_turns=num_turns, noise=noise)
        examples.append(example_of(tokenizer, dialogue))
    return examples


def _rise(progress: float, first: float, last: float) -> float:
    """From 0 at `first` to 1 at `last`, and level outside."""
    return min(1.0, max(0.0, (progress - first) / (last - first)))


def _drill(draws: random.Random, num_known: int) -> Example:
    """Tokens without meaning, once and then twice again: a reply that can only be copied.

    Dialogues alone teach copying late, since a form that is right everywhere but in its names and
    numbers has a low loss already; and it is learned soonest from few different tokens.
    """
    pool = range(_FIRST_TEXT_ID, num_known)
    tokens = draws.sample(pool, draws.randint(6, 20))
    return Example(tokens * 3, [slice(len(tokens) + 1, 3 * len(tokens))])


def rows_of(examples: Sequence[Example], num_tokens: int, pad: int) -> list[Row]:
    """The examples one behind the other in rows of exactly `num_tokens` tokens.

    Each row takes the next ones until it is full, the longest of them first, so what its end cuts
    off is as a rule of a short one; replies that are cut are no targets. What is left of the last
    row is filled with `pad`.
    """
    rows: list[Row] = []
    waiting = deque(examples)
    while waiting:
        taken: list[Example] = []
        while waiting and sum(len(example.ids) for example in taken) < num_tokens:
            taken.append(waiting.popleft())
        rows.append(_row(taken, num_tokens, pad))
    return rows


def _row(examples: Sequence[Example], num_tokens: int, pad: int) -> Row:
    ids = torch.full((num_tokens,), pad)
    targets = torch.full((num_tokens,), IGNORED)
    lengths: list[int] = []
    replies: list[tuple[slice, ...]] = []
    for example in sorted(examples, key=lambda example: -len(example.ids)):
        start = sum(lengths)
        if start == num_tokens:
            break
        lengths.append(min(len(example.ids), num_tokens - start))
        tokens = torch.tensor(example.ids[: lengths[-1]])
        ids[start : start + lengths[-1]] = tokens
        whole = [reply for reply in example.replies if reply.stop <= lengths[-1]]
        for reply in whole:
            targets[start + reply.start - 1 : start + reply.stop - 1] = tokens[reply]
        replies.append(tuple(slice(start + r.start, start + r.stop) for r in whole))
    if sum(lengths) < num_tokens:
        lengths.append(num_tokens - sum(lengths))
    return Row(ids, targets, Places.of(lengths), tuple(replies))
