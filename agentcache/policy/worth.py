"""What an entry is worth: where a request goes on without it, and what its leaving frees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.policy.coverage import above, is_checkpoint

if TYPE_CHECKING:
    from agentcache.policy.base import Costs
    from agentcache.tree.node import Node

__all__ = ["freed_bytes", "is_bottom", "is_entry", "saved_flops", "usable_above"]


def is_entry(node: Node) -> bool:
    """Whether there is something to take: all of what lies at the bottom of the device, or a
    checkpoint in the middle."""
    return bool(node.end) and not node.generation and (is_checkpoint(node) or is_bottom(node))


def is_bottom(node: Node) -> bool:
    """Whether nothing below the node is on the device."""
    if node.is_leaf:
        return True
    for child in node.children.values():
        for data in child.data.values():
            if data.tier <= 1:
                return False
    return True


def usable_above(node: Node) -> int:
    """Where a request would go on if the node's end were no boundary any more.

    Where there are checkpoints at all, that is the next one above; else wherever the edge begins.
    """
    if not is_checkpoint(node):
        return node.start
    before = above(node)
    return before.end if before is not None else 0


def saved_flops(node: Node, costs: Costs) -> float:
    """Work that a request saves by going on from here and not from the next usable ancestor."""
    return costs.flops.between(usable_above(node), node.end)


def freed_bytes(node: Node, costs: Costs) -> int:
    """Bytes that become free when the entry leaves.

    With a leaf go the ancestors that nothing else needs, up to the next checkpoint, branch or lock;
    a node in the middle gives its checkpoint only.
    """
    checkpoint = costs.checkpoint_bytes if is_checkpoint(node) else 0
    if not is_bottom(node):
        return checkpoint
    top = node.parent
    while top is not None and top.end:
        if top.locks or is_checkpoint(top) or top.num_children > 1:
            break
        top = top.parent
    return checkpoint + (node.end - (top.end if top is not None else 0)) * costs.token_bytes
