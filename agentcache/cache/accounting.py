"""Accounting: which pages could be had by evicting, and which are in use; counted when asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from agentcache.types import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from agentcache.cache.lease import Lease
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import RadixTree
    from agentcache.types import IntArray

__all__ = ["Account", "account"]


@dataclass(frozen=True, slots=True)
class Account:
    """Pages of one kind. protected: a running request reads or writes them. evictable: only the
    tree holds them, so evicting everything idle frees them. Together they are all that is used."""

    evictable: int
    protected: int


def account(tree: RadixTree, leases: Iterable[Lease], num_pages: int) -> dict[str, Account]:
    """Per kind of the tree's components; O(nodes + pages).

    A lock is one count on one node and costs O(1), so what it protects, the KV of the path to that
    node, is worked out here and not kept.
    """
    filed = {rule.kind: np.zeros(num_pages, dtype=bool) for rule in tree.rules}
    in_use = {rule.kind: np.zeros(num_pages, dtype=bool) for rule in tree.rules}
    locked: list[Node] = []
    for node in tree.nodes():
        for kind, data in node.data.items():
            if data.tier == 1:
                filed[kind][data.slots] = True
        if node.locks:
            locked.append(node)
    for lease in leases:
        for kind, pages in _held(lease):
            in_use[kind][pages] = True
    if Kind.FULL in filed:
        _mark_paths(locked, in_use[Kind.FULL])
    return {
        kind: Account(
            evictable=int((filed[kind] & ~in_use[kind]).sum()), protected=int(in_use[kind].sum())
        )
        for kind in filed
    }


def _held(lease: Lease) -> Iterable[tuple[str, IntArray]]:
    for pages in lease.own:
        yield Kind.FULL, pages
    for kind, table in lease.windows.items():
        yield kind, table.pages


def _mark_paths(locked: list[Node], pages: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> None:
    """Mark the KV of every node on the way to a locked one."""
    seen: set[int] = set()
    for node in locked:
        at: Node | None = node
        while at is not None and not at.is_root and at.id not in seen:
            seen.add(at.id)
            pages[at.data[Kind.FULL].slots] = True
            at = at.parent
