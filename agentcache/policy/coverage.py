"""Coverage: how much a checkpoint in the middle of a path is worth to a request that forks there.

Shallow-first eviction leaves a long tail and nothing to fork from. Here the checkpoint whose loss
leaves the smallest hole goes first, so that the gaps along a path stay balanced. A hole from
position p to q costs a fork just before q the tokens q - p; the same tokens weigh more where the
fork is shallow, since they are most of what it could have reused. Dividing by sqrt(q) balances the
two: the gaps grow with depth, and a fork anywhere keeps a good part of its depth.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agentcache.tree.node import Node

__all__ = ["is_checkpoint", "neighbours", "spacing"]

_REACH = 64
"""Most nodes looked at on either side: a search is O(1)."""


def is_checkpoint(node: Node) -> bool:
    """Whether the node holds something that makes its end a boundary, besides its edge's KV."""
    return len(node.data) > (Kind.FULL in node.data)


def spacing(node: Node) -> float:
    """(q - p) / sqrt(q) for the hole [p, q) that the node's checkpoint would leave."""
    above, below = neighbours(node)
    p = above.end if above is not None else 0
    q = below.end if below is not None else node.end
    return (q - p) / sqrt(q)


def neighbours(node: Node) -> tuple[Node | None, Node | None]:
    """The next checkpoints above and below on the node's path; below ends at a branch or leaf."""
    above = next((found for found in _up(node) if found.is_root or is_checkpoint(found)), None)
    below: Node | None = None
    for below in _down(node):
        if below.only_child is None or is_checkpoint(below):
            break
    return above, below


def _up(node: Node) -> Iterator[Node]:
    for _ in range(_REACH):
        if node.parent is None:
            return
        node = node.parent
        yield node


def _down(node: Node) -> Iterator[Node]:
    for _ in range(_REACH):
        child = node.only_child
        if child is None:
            return
        node = child
        yield node
