"""Integrity of tree and pages, recounted from nothing: for tests, and for those who doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import RadixTree, ReuseRule

__all__ = ["check_pages", "check_tree"]


def check_tree(tree: RadixTree) -> None:
    """Assert what always holds between the nodes of a tree.

    Children hang under their first token; positions are seamless; KV covers each node, and so is
    unbroken from the root; windows cover what they reach; a leaf that nobody holds is a boundary
    for every component.
    """
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        assert node.generation == 0, f"{node} left the tree but hangs in it"
        assert len(node.tokens) > 0, f"{node} has no tokens"
        assert parent.child(node.key) is node, f"{node} hangs under another token"
        assert node.end - parent.end == len(node.tokens), f"{node} does not go on from {parent}"
        assert node.locks >= 0
        assert node.refs >= 0
        for rule in tree.rules:
            _check_data(rule, node)
        if tree.can_remove(node):
            assert tree.is_usable(node), f"{node} is a leaf that nobody can reuse"


def _check_data(rule: ReuseRule, node: Node) -> None:
    """What a component keeps at a node covers what it says."""
    data = node.data.get(rule.kind)
    if rule.kind == Kind.FULL:
        assert data is not None, f"{node} has no KV"
        assert data.start == node.start, f"KV of {node} begins at {data.start}"
    size: int | None = getattr(rule, "page_size", None)
    if data is not None and size is not None:
        wanted = -(-node.end // size) - data.start // size
        assert len(data.slots) == wanted, f"{node} holds {len(data.slots)} pages for {wanted}"


def check_pages(tree: RadixTree, refs: IntArray, held: Iterable[IntArray], num_free: int) -> None:
    """Assert that each page has exactly the holders that are found in the tree and in `held`.

    refs: the allocator's counts. held: the pages of running leases.
    """
    count = np.zeros_like(refs)
    for pages in held:
        count[pages] += 1
    for node in tree.nodes():
        for residency in node.data.values():
            if residency.tier == 1:
                count[residency.slots] += 1
    wrong = np.flatnonzero(count != refs)
    assert not len(wrong), f"pages {wrong[:8]}: counted {count[wrong[:8]]}, kept {refs[wrong[:8]]}"
    assert int((refs == 0).sum()) == num_free, "free pages and references disagree"
