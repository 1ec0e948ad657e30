"""Filing: what requests have computed becomes data of the tree's nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from agentcache.cache.memory import OutOfPages

if TYPE_CHECKING:
    from agentcache.cache.forms import Forms
    from agentcache.cache.lease import Lease
    from agentcache.cache.listeners import Listeners
    from agentcache.cache.memory import Memory
    from agentcache.cache.news import News
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Inserted
    from agentcache.types import IntArray

__all__ = ["Filing"]


class Filing:
    """Inserts paths and hangs at their nodes what leases hold of them, one more holder of it."""

    def __init__(self, memory: Memory, forms: Forms, listeners: Listeners, news: News) -> None:
        self._memory = memory
        self._tree = memory.tree
        self._pools = memory.pools
        self._metrics = memory.metrics
        self._forms = forms
        self._listeners = listeners
        self._news = news

    def file(self, lease: Lease, tokens: IntArray, length: int, row: int, state_pages: int) -> bool:
        """File `tokens[:length]`, whose state lies in `row`, and move the lease's lock there.

        state_pages: of the checkpoint. False where there was no room for it.
        """
        if length <= lease.committed_len:
            node = lease.locked
            return length == node.end and self._tree.is_boundary(node)
        self._news.extends(lease, tokens[:length])
        node = self._insert(lease, tokens, length)
        self._tree.lock(node)
        left, lease.locked, lease.committed_len = lease.locked, node, length
        self._memory.unlock(left)
        if not self.file_snapshot(lease, node, row, state_pages):
            return False
        self._file_windows(lease, node)
        self._news.filed(lease, node, tokens)
        lease.filed.append(node)
        return True

    def _insert(self, lease: Lease, tokens: IntArray, length: int) -> Node:
        """The node of that length, with the KV of all edges on the way to it."""
        begun = lease.frontier
        inserted = self._tree.insert(begun, tokens, length, lease.salts)
        for split in inserted.splits:
            self._news.split(split)
            self._memory.share(split)
            self._listeners.split(split)
        self._note_known(lease, begun, inserted)
        for created in inserted.created:
            created.priority = lease.priority
            self._listeners.insert(created, lease.session)
            self._file_edge(lease, created)
        return inserted.node

    def _note_known(self, lease: Lease, begun: Node, inserted: Inserted) -> None:
        """Note from where on the tree had KV of its own for what was just filed.

        Where that lies on a lower tier, the request's own takes its place.
        """
        edge = self._forms.edge
        node: Node | None = inserted.node
        while node is not None and node is not begun:
            if node not in inserted.created:
                lease.published_len = min(lease.published_len, max(node.start, lease.boundary))
                if edge is not None and node.data[edge.kind].tier > 1:
                    pages = lease.table.slice(node.start, node.end)
                    self._memory.replace(node, edge.kind, pages)
            node = node.parent

    def _file_edge(self, lease: Lease, node: Node) -> None:
        edge = self._forms.edge
        if edge is not None:
            pages = lease.table.slice(node.start, node.end)
            self._pools.pages.incref(pages)
            self._attach(lease, node, edge.kind, pages, node.end - node.start)

    def _file_windows(self, lease: Lease, node: Node) -> None:
        for rule in self._forms.windows:
            data = node.data.get(rule.kind)
            if data is not None and data.tier == 1:
                continue
            pages = lease.windows[rule.kind].slice(rule.reach(node.end), node.end)
            if data is not None:
                self._memory.replace(node, rule.kind, pages)
            else:
                self._pools.pages.incref(pages)
                self._attach(lease, node, rule.kind, pages)

    def file_snapshot(self, lease: Lease, node: Node, row: int, state_pages: int) -> bool:
        """Copy the state in `row` to a node that has none, or one of fewer pages than these.

        False where there was no room for it.
        """
        rule = self._forms.snapshot
        if rule is None:
            return True
        data = node.data.get(rule.kind)
        if data is not None and data.tier == 1 and data.num_slots >= state_pages:
            return True
        try:
            pages = self._memory.alloc_scattered(rule.kind, state_pages)
        except OutOfPages:
            self._metrics.add("unfiled", rule.kind)
            return False
        self._memory.fill(rule.kind, pages, lambda: self._pools.save_state(row, pages))
        data = node.data.get(rule.kind)  # room may have been made of what was there
        if data is not None and data.tier == 1:
            self._memory.exchange(node, rule.kind, pages)
            return True
        if data is not None:
            self._memory.replace(node, rule.kind, pages)
            self._memory.give_back(rule.kind, pages)  # the node holds them now
            return True
        self._attach(lease, node, rule.kind, pages)
        return True

    def _attach(
        self, lease: Lease, node: Node, kind: str, pages: IntArray, amount: int = 1
    ) -> None:
        """Hang pages at a node, which holds them from now on, and say so."""
        self._memory.attach(node, kind, pages)
        self._metrics.add("filed", kind, amount)
        self._listeners.note("file", node, kind, lease.session)
