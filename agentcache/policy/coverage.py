"""Coverage: how much a checkpoint in the middle of a path is worth to a request that forks there.

Shallow-first eviction leaves a long tail and nothing to fork from. Here the checkpoint whose loss
leaves the smallest hole goes first, so that the gaps along a path stay balanced. A hole from
position p to q costs a fork just before q the tokens q - p; the same tokens weigh more where the
fork is shallow, since they are most of what it could have reused. Dividing by sqrt(q) balances the
two: the gaps grow with depth, and a fork anywhere keeps a good part of its depth.

Checkpoints of a path are linked, so that the hole of each is known at once. Where paths branch, the
one above knows the last one linked below it.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from agentcache.types import Kind

if TYPE_CHECKING:
    from agentcache.tree.node import Node

__all__ = ["above", "is_checkpoint", "link", "spacing", "unlink"]


def is_checkpoint(node: Node) -> bool:
    """Whether the node holds something that makes its end a boundary, besides its edge's KV."""
    data = node.data
    return len(data) > (_FULL in data)


def spacing(node: Node) -> float:
    """(q - p) / sqrt(q) for the hole [p, q) that the node's checkpoint would leave."""
    before, below = above(node), node.below
    p = before.end if before is not None else 0
    q = below.end if below is not None and below.generation == 0 else node.end
    return (q - p) / sqrt(q)


def above(node: Node) -> Node | None:
    """The next checkpoint above; None where there is none. Amortised O(1) once it is linked."""
    found = node.above
    if found is not None and found.end and is_checkpoint(found):
        return found
    found = found or node.parent
    while found is not None and found.end and not is_checkpoint(found):
        found = found.above or found.parent
    if found is None or not found.end:
        return None
    node.above = found  # the next search is shorter
    return found


def link(node: Node) -> None:
    """Note that a node has become a checkpoint."""
    before = above(node)
    if before is not None:
        below = before.below
        if below is not None and below.above is before and below.parent is node:
            node.below, below.above = below, node
        before.below = node


def unlink(node: Node) -> tuple[Node | None, Node | None]:
    """Note that a node is a checkpoint no more; its neighbours, whose gaps have grown."""
    before, below = above(node), node.below
    node.below = None
    if before is not None and before.below is node:
        before.below = below
    if below is not None and below.above is node:
        below.above = before
    return before, below


_FULL = Kind.FULL.value  # a member of an enumeration takes longer to reach than to look up
