"""The tokenizer of `tiny-agent`: a byte-level BPE of the dialogues it learns."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentcache.engine.tiny.dialogues import draw_dialogue
from agentcache.engine.tiny.rendering import render

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["MARKUP_TOKENS", "SPECIAL_TOKENS", "train_bpe", "train_vocabulary"]

SPECIAL_TOKENS = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|pad|>")
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_SIZE = 1536
_NUM_DIALOGUES = 6000

# What a reply has to copy looks the same wherever it stands: digits and signs of arithmetic stand
# alone, and so do words that begin with a capital, while small words take along the space before
# them. The punctuation between the parts of a call is one piece.
_PATTERN = (
    r" ?\p{Ll}+"
    r"|\p{Lu}\p{Ll}*"
    r"|\p{L}"
    r"|\p{N}"
    r"|[-+*/]"
    r"|[^\s\p{L}\p{N}+*/-]+(?: [^\s\p{L}\p{N}+*/-]+)*"
    r"|\s+(?!\S)"
    r"|\s"
)


def train_bpe(
    texts: Iterator[str], *, size: int, pattern: str, max_token_chars: int | None = None
) -> Tokenizer:
    """A byte-level BPE of `size` entries over the pieces that `pattern` finds.

    Ids 0-3 are the special tokens, 4-7 the markup, then come bytes, then merges. The same texts
    give the same tokenizer, whatever the number of threads.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL_TOKENS, *MARKUP_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=max_token_chars,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Markup is matched whole like a special token, but stays visible in decoded text.
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in MARKUP_TOKENS])
    return tokenizer


def train_vocabulary(seed: int = 0) -> Tokenizer:
    """The tokenizer that follows from the dialogues of a seed."""
    draws = random.Random(f"vocabulary {seed}")
    texts = (render(draw_dialogue(draws, num_turns=4)) for _ in range(_NUM_DIALOGUES))
    return train_bpe(texts, size=_SIZE, pattern=_PATTERN)
