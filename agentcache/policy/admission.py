"""Admission: at which positions of a prompt a checkpoint is worth taking."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.tree.radix_tree import Match

__all__ = ["plan_checkpoints"]


def plan_checkpoints(
    match: Match, structural: Iterable[int], prompt_len: int, min_gain: int = 1
) -> tuple[int, ...]:
    """Positions in (match.boundary, prompt_len) to capture while the prompt is computed, ascending.

    structural: boundaries that the caller sees in the conversation (end of system + tools, end of
    the prompt before the reply header, marks). To these comes the branch point: where the prompt
    leaves tokens that are already known, found before anything is computed (Marconi, MLSys 2025,
    section 4.1), if that saves at least `min_gain` tokens. The last decoded token is not planned:
    it is always filed at the end.
    """
    wanted = set(structural)
    if match.known_len - match.boundary >= min_gain:
        wanted.add(match.known_len)
    return tuple(sorted(at for at in wanted if match.boundary < at < prompt_len))
