"""Admission: at which positions of a sequence a checkpoint is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from agentcache.config import ADMISSIONS, split_admission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agentcache.tree.radix_tree import Match

__all__ = ["Admission", "EveryBlock", "MarconiAdmission", "Structural", "make_admission"]


class Admission(Protocol):
    """Which checkpoints of a request are filed.

    files_end: whether the last decoded token gets one. heeds_callers: whether boundaries that the
    caller sees in the conversation count.
    """

    files_end: bool
    heeds_callers: bool

    def plan(
        self, match: Match, declared: Iterable[int], prompt_len: int, min_gain: int = 1
    ) -> tuple[int, ...]:
        """Positions in (match.boundary, prompt_len) to capture while the prompt is computed,
        ascending.

        declared: boundaries that the caller sees in the conversation. min_gain: a branch point that
        saves fewer tokens is not worth a checkpoint.
        """
        ...

    def decoded(self, start: int, stop: int) -> Sequence[int]:
        """Positions in [start, stop) of the answer to capture while it is decoded, besides its
        end."""
        ...


class Structural:
    """What the caller declares, the branch point, the last decoded token.

    Declared are ends of system + tools, the end of the prompt before the reply header, marks: a
    shared part is reusable from its second occurrence on. The branch point is where the prompt
    leaves tokens that are already known, found before anything is computed (Marconi, MLSys 2025,
    section 4.1); of a prompt known whole, it is as far as reuse goes.
    """

    files_end = True
    heeds_callers = True

    def plan(
        self, match: Match, declared: Iterable[int], prompt_len: int, min_gain: int = 1
    ) -> tuple[int, ...]:
        branch = min(match.known_len, prompt_len - 1)
        wanted = {*declared, *_if_worth(branch, match, min_gain)}
        return tuple(sorted(at for at in wanted if match.boundary < at < prompt_len))

    def decoded(self, start: int, stop: int) -> Sequence[int]:
        return ()


class MarconiAdmission:
    """The branch point and the last decoded token, two per sequence at most: a shared part is
    reusable from its third occurrence on, whatever callers know."""

    files_end = True
    heeds_callers = False

    def plan(
        self, match: Match, declared: Iterable[int], prompt_len: int, min_gain: int = 1
    ) -> tuple[int, ...]:
        # of a prompt that is known whole, all can be reused but its last token
        return _if_worth(min(match.known_len, prompt_len - 1), match, min_gain)

    def decoded(self, start: int, stop: int) -> Sequence[int]:
        return ()


class EveryBlock:
    """Every full block of so many tokens, of prompt and answer alike, and nothing else: as engines
    do that cache states by blocks."""

    files_end = False
    heeds_callers = False

    def __init__(self, block_len: int = 16) -> None:
        self.block_len = block_len

    def plan(
        self, match: Match, declared: Iterable[int], prompt_len: int, min_gain: int = 1
    ) -> tuple[int, ...]:
        return tuple(self.decoded(match.boundary + 1, prompt_len))

    def decoded(self, start: int, stop: int) -> Sequence[int]:
        first = -(-start // self.block_len) * self.block_len
        return range(first, stop, self.block_len)


def _if_worth(branch: int, match: Match, min_gain: int) -> tuple[int, ...]:
    return (branch,) if branch - match.boundary >= min_gain else ()


def make_admission(name: str) -> Admission:
    """An admission policy by its name: "structural", "marconi", "every-block", and the last with
    the tokens of a block behind a colon. Raises ConfigError.

    >>> make_admission("every-block:16").decoded(10, 50)
    range(16, 50, 16)
    """
    kind, block_len = split_admission(name)
    make = _MAKERS[kind]
    return EveryBlock(block_len) if block_len else make()


_MAKERS: dict[str, Callable[[], Admission]] = {
    "structural": Structural,
    "marconi": MarconiAdmission,
    "every-block": EveryBlock,
}
assert tuple(_MAKERS) == ADMISSIONS
