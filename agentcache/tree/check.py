"""Integrity of tree and pages, recounted from nothing: for tests, and for those who doubt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from agentcache.types import IntArray, Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.tree.radix_tree import RadixTree

__all__ = ["check_pages", "check_tree"]


def check_tree(tree: RadixTree, page_size: int) -> None:
    """Assert what always holds between the nodes of a tree.

    Children hang under their first token; positions are seamless; KV covers each node; KV is
    unbroken from the root; a leaf that nobody holds is a boundary for every component.
    """
    for node in tree.nodes():
        parent = node.parent
        assert parent is not None
        assert node.generation == 0, f"{node} left the tree but hangs in it"
        assert len(node.tokens) > 0, f"{node} has no tokens"
        assert parent.children.get(int(node.tokens[0])) is node, f"{node} hangs under another token"
        assert node.start == parent.end, f"{node} does not go on from {parent}"
        assert node.locks >= 0
        assert node.refs >= 0
        if tree.has(Kind.FULL):
            pages = node.data[Kind.FULL].slots
            wanted = -(-node.end // page_size) - node.start // page_size
            assert len(pages) == wanted, f"{node} holds {len(pages)} pages for {wanted}"
        if tree.can_remove(node):
            assert tree.is_boundary(node), f"{node} is a leaf that nobody can reuse"


def check_pages(tree: RadixTree, refs: IntArray, held: Iterable[IntArray], num_free: int) -> None:
    """Assert that each page has exactly the holders that are found in the tree and in `held`.

    refs: the allocator's counts. held: the pages of running leases.
    """
    count = np.zeros_like(refs)
    for pages in held:
        count[pages] += 1
    for node in tree.nodes():
        for residency in node.data.values():
            count[residency.slots] += 1
    wrong = np.flatnonzero(count != refs)
    assert not len(wrong), f"pages {wrong[:8]}: counted {count[wrong[:8]]}, kept {refs[wrong[:8]]}"
    assert int((refs == 0).sum()) == num_free, "free pages and references disagree"
