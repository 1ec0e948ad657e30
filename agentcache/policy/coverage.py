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
    from agentcache.tree.node import Node

__all__ = ["above", "below", "is_checkpoint", "spacing"]


def is_checkpoint(node: Node) -> bool:
    """Whether the node holds something that makes its end a boundary, besides its edge's KV."""
    data = node.data
    return len(data) > (_FULL in data)


def spacing(node: Node) -> float:
    """(q - p) / sqrt(q) for the hole [p, q) that the node's checkpoint would leave."""
    before, after = above(node), below(node)
    p = before.end if before is not None else 0
    q = after.end if after is not None else node.end
    return (q - p) / sqrt(q)


def above(node: Node) -> Node | None:
    """The next checkpoint above; None where there is none. O(nodes between them)."""
    found = node.parent
    while found is not None and not is_checkpoint(found):
        found = found.parent
    return found


def below(node: Node) -> Node | None:
    """The next checkpoint below, or where the path parts or ends before there is one; None where
    it does so at the node itself. O(nodes between them)."""
    found = node.only_child
    while found is not None and not is_checkpoint(found) and found.num_children == 1:
        found = found.only_child
    return found


_FULL = Kind.FULL.value  # a member of an enumeration takes longer to reach than to look up
