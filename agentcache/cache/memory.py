"""The memory that tree and running requests share: room is made here, and counted.

What has to leave the device goes to a lower tier where there is one, and is forgotten where there
is none or where that is full:

    a node at the bottom      with all its data: demoted, or removed with what it alone made usable
    a node with others below  its checkpoint: demoted or dropped; KV of its edge is theirs too
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from agentcache.policy.coverage import above, below
from agentcache.tiers.demoted import Demoted
from agentcache.tree.node import Residency

if TYPE_CHECKING:
    from collections.abc import Callable

    from agentcache.cache.forms import Forms
    from agentcache.cache.listeners import Listeners
    from agentcache.clock import Clock
    from agentcache.metrics import Metrics
    from agentcache.policy.base import Policy
    from agentcache.pools.base import Pools
    from agentcache.tiers.base import LowerTier
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Freed, RadixTree, Split
    from agentcache.types import IntArray

__all__ = ["Memory", "OutOfPages"]


class OutOfPages(Exception):
    """Not enough pages even with everything idle evicted. For the scheduler, never for users."""

    def __init__(self, missing: int) -> None:
        super().__init__(f"{missing} pages short")
        self.missing = missing


class Memory:
    """Pages by kind, what may leave first, and the lower tier.

    moves: how often data of nodes that stay has changed its place so far; a node's `moved` is the
    count when its own last did. num_checkpoints: copies of the snapshot's kind, on every tier.
    """

    def __init__(
        self,
        tree: RadixTree,
        forms: Forms,
        pools: Pools,
        policy: Policy,
        clock: Clock,
        metrics: Metrics,
        listeners: Listeners,
        lower: LowerTier | None,
    ) -> None:
        self.tree = tree
        self.pools = pools
        self.metrics = metrics
        self.lower = lower
        self.moves = 0
        self.num_checkpoints = 0
        self._listeners = listeners
        self._clock = clock
        self._order = policy.order(pools.pages.num_pages)
        self._demoted = Demoted()
        self._shared: Counter[int] = Counter()  # slots of the lower tier: holders beyond the first
        self._kept: tuple[Node, ...] = ()
        self._edge = forms.edge
        self._snapshot_kind = None if forms.snapshot is None else forms.snapshot.kind
        self._used: Counter[str] = Counter()
        self._peak_pages: Counter[str] = Counter()
        self._peak_total = 0

    def push(self, node: Node) -> None:
        """Put a node at its present place in the order of eviction."""
        self._order.push(node, self._clock.now())

    def alloc(self, kind: str, count: int, after: int = -1) -> IntArray:
        """Pages in as few runs as there are, behind page `after` if possible. Raises OutOfPages."""
        self.make_room(count)
        pages = self.pools.pages.alloc(count, after)
        assert pages is not None
        self._count(kind, count)
        return pages

    def alloc_scattered(self, kind: str, count: int) -> IntArray:
        """Pages in no order, for what is copied before use. Raises OutOfPages."""
        self.make_room(count)
        pages = self.pools.pages.alloc_scattered(count)
        assert pages is not None
        self._count(kind, count)
        return pages

    def _count(self, kind: str, count: int) -> None:
        self._used[kind] += count
        if self._used[kind] > self._peak_pages[kind]:
            self._peak_pages[kind] = self._used[kind]
        self._peak_total = max(self._peak_total, self.pools.pages.num_used)

    def give_back(self, kind: str, pages: IntArray) -> None:
        """One holder fewer of each page."""
        if not len(pages):
            return
        gone = self.pools.pages.decref(pages)
        if len(gone):
            self._used[kind] -= len(gone)
            self.pools.on_free(gone)

    def fill(self, kind: str, pages: IntArray, copy: Callable[[], None]) -> None:
        """Fill fresh pages by `copy`; they are given back if that fails."""
        try:
            copy()
        except BaseException:
            self.give_back(kind, pages)
            raise

    def make_room(self, count: int) -> None:
        """Evict idle entries until `count` pages are free; none for what can never fit."""
        if count > self.pools.pages.num_pages:
            raise OutOfPages(count - self.pools.pages.num_pages)
        while self.pools.pages.num_free < count:
            if not self.evict_one():
                raise OutOfPages(count - self.pools.pages.num_free)

    def evict_one(self) -> bool:
        """Take the entry that should leave the device first; False if nothing idle is left."""
        return self._evict_one(self.lower)

    def clear(self) -> int:
        """Forget everything idle, on every tier; pages of the device that became free."""
        before = self.pools.pages.num_free
        while self._evict_one(None):
            pass
        while self._forget_demoted():
            pass
        return self.pools.pages.num_free - before

    def _evict_one(self, lower: LowerTier | None) -> bool:
        while (node := self._order.pop(self._clock.now())) is not None:
            if not any(data.tier == 1 for data in node.data.values()):
                continue
            if self._is_bottom(node):
                if not self._demote(node, list(node.data), lower):
                    self.forget(node)
                return True
            if self._take_checkpoint(node, lower):
                return True
            self._order.shelve(node, self._clock.now())
        return False

    def _is_bottom(self, node: Node) -> bool:
        """Whether neither a request nor a node below, on the device, needs the node's KV."""
        if node.locks or node.is_root:
            return False
        if self._edge is None:
            return node.is_leaf
        if node.is_leaf:
            return True
        kind = self._edge.kind
        return all(child.data[kind].tier > 1 for child in node.children.values())

    def forget(self, node: Node) -> int:
        """Forget a node and all below it, on every tier, but for what a lock keeps; how many
        entries that were."""
        num = 0
        for leaf in (node,) if node.is_leaf else reversed(self.below(node)):
            if self.tree.can_remove(leaf):  # or it was of no use any more, and left with one below
                freed = self.tree.remove_leaf(leaf, self._clock.now())
                for kind, _ in freed.data:
                    self.metrics.add("evictions", kind)
                self._apply(freed)
                num += len(freed.data)
        return num

    def below(self, node: Node) -> list[Node]:
        """A node and all below it, parents first."""
        found = [node]
        for each in found:
            found.extend(each.children.values())
        return found

    def _take_checkpoint(self, node: Node, lower: LowerTier | None) -> bool:
        """Take what makes a node that has to stay a boundary: all of it, since none is of use
        without the rest."""
        kinds = [k for k in self._checkpoint_kinds(node) if node.data[k].tier == 1]
        if not kinds or node in self._kept:
            return False
        if not self._demote(node, kinds, lower):
            self._drop_checkpoint(node)
        return True

    def _drop_checkpoint(self, node: Node) -> None:
        for kind in self._checkpoint_kinds(node):
            self._drop(node, kind)
        for neighbour in (above(node), below(node)):  # the gaps around them have grown
            if neighbour is not None:
                self.push(neighbour)

    def _checkpoint_kinds(self, node: Node) -> list[str]:
        return [kind for kind in node.data if self._edge is None or kind != self._edge.kind]

    def _drop(self, node: Node, kind: str) -> None:
        data = self.tree.drop(node, kind, self._clock.now())
        if data is not None:
            self.metrics.add("evictions", kind)
            self._listeners.note("evict", node, kind)
            self._free(kind, data)

    def unlock(self, node: Node) -> None:
        """Undo one lock of the tree; what is of no use to anyone leaves at once."""
        self.tree.unlock(node)
        if self.tree.can_remove(node) and not self.tree.is_usable(node):
            self._apply(self.tree.remove_leaf(node, self._clock.now()))
        else:
            self._push_anywhere(node)

    def _push_anywhere(self, node: Node) -> None:
        """Put a node at its present place among what may leave, on the device and below it."""
        self.push(node)
        if self.lower is not None:
            self._demoted.push(node)

    def _apply(self, freed: Freed) -> None:
        for node in freed.removed:
            self._order.remove(node)
            self._listeners.note("remove", node)
        for kind, data in freed.data:
            self._free(kind, data)
        if freed.survivor is not None and not freed.survivor.is_root:
            self._push_anywhere(freed.survivor)

    def _free(self, kind: str, data: Residency) -> None:
        if kind == self._snapshot_kind:
            self.num_checkpoints -= 1
        if data.tier == 1:
            self.give_back(kind, data.slots)
        else:
            self._give_back_below(data.slots)

    def _give_back_below(self, slots: IntArray) -> None:
        """One holder fewer of each slot of the lower tier."""
        assert self.lower is not None
        gone = []
        for slot in slots.tolist():
            if slot not in self._shared:
                gone.append(slot)
            elif self._shared[slot] == 1:
                del self._shared[slot]
            else:
                self._shared[slot] -= 1
        self.lower.free(np.array(gone, dtype=np.int32))

    def share(self, split: Split) -> None:
        """Count the new holder of what both parts of a split hold."""
        for kind, slots in split.shared:
            if split.upper.data[kind].tier == 1:
                self.pools.pages.incref(slots)
            else:
                self._shared.update(slots.tolist())
        self._demoted.push(split.upper)

    def _demote(self, node: Node, kinds: list[str], lower: LowerTier | None) -> bool:
        """Move data to the lower tier; False, and nothing done, if there is no room or no tier."""
        if lower is None:
            return False
        kinds = [kind for kind in kinds if node.data[kind].tier == 1]
        if not self._make_lower_room(lower, sum(node.data[kind].num_slots for kind in kinds)):
            return False
        for kind in kinds:
            data = node.data.get(kind)
            if data is None:  # it left to make that room, with what alone had made it useful
                continue
            slots = lower.store(data.slots)
            node.data[kind] = Residency(slots, data.start, lower.tier)
            self.give_back(kind, data.slots)
            self.metrics.add("demotions", kind)
            self._listeners.note("demote", node, kind)
        self._moved(node)
        self._demoted.push(node)
        assert node.parent is not None
        self.push(node.parent)
        return True

    def _make_lower_room(self, lower: LowerTier, count: int) -> bool:
        if count > lower.num_pages:
            return False
        while lower.num_free < count:
            if not self._forget_demoted():
                return False
        return True

    def _forget_demoted(self) -> bool:
        """Forget the least recently used of what is on the lower tier."""
        while (node := self._demoted.pop()) is not None:
            if self.tree.can_remove(node):
                self.forget(node)
                return True
            kinds = self._checkpoint_kinds(node)
            if node not in self._kept and any(node.data[kind].tier > 1 for kind in kinds):
                self._drop_checkpoint(node)
                return True
        return False

    def load_back(self, start: Node, target: Node) -> None:
        """Bring what `target` needs to be a boundary back to the device.

        start: the deepest boundary above it that is on the device, or the root; it stays one.
        Raises OutOfPages, and loads nothing, where not all of it fits.
        """
        missing: list[Node] = []
        held = target
        while held is not start and not self._has_edge(held):
            missing.append(held)
            assert held.parent is not None
            held = held.parent
        wanted = [(node, kind) for node in reversed(missing) for kind in self._edge_kinds()]
        wanted += [(target, kind) for kind in self._checkpoint_kinds(target)]
        wanted = [(node, kind) for node, kind in wanted if node.data[kind].tier > 1]
        self.tree.lock(held)
        self.tree.lock(target)  # or the lower tier might forget it to make room
        self._kept = (start, target)
        try:
            self.make_room(sum(node.data[kind].num_slots for node, kind in wanted))
            for node, kind in wanted:
                self._load(node, kind)
        finally:
            self._kept = ()
            self.unlock(held)
            self.unlock(target)
            for node in (start, *missing):
                self.push(node)

    def _has_edge(self, node: Node) -> bool:
        """Whether the KV of the node's edge is on the device."""
        return self._edge is not None and node.data[self._edge.kind].tier == 1

    def _edge_kinds(self) -> list[str]:
        return [] if self._edge is None else [self._edge.kind]

    def _load(self, node: Node, kind: str) -> None:
        data, lower = node.data[kind], self.lower
        assert lower is not None
        pages = self.alloc(kind, data.num_slots)
        self.fill(kind, pages, lambda: lower.load(data.slots, pages))
        self._give_back_below(data.slots)
        node.data[kind] = Residency(pages, data.start)
        self.metrics.add("loads", kind)
        self._moved(node)
        self._listeners.note("load_back", node, kind)

    def attach(self, node: Node, kind: str, pages: IntArray) -> None:
        """Hang pages at a node that has none of the kind; their holder is the node from now on."""
        self.tree.commit(node, kind, pages)
        if kind == self._snapshot_kind:
            self.num_checkpoints += 1

    def replace(self, node: Node, kind: str, pages: IntArray) -> None:
        """Put pages of the device, which somebody has just filled, in place of what lies below."""
        data = node.data[kind]
        self._give_back_below(data.slots)
        self.pools.pages.incref(pages)
        node.data[kind] = Residency(pages, data.start)
        self._moved(node)
        self._listeners.note("load_back", node, kind)

    def exchange(self, node: Node, kind: str, pages: IntArray) -> None:
        """Put pages that hold the same, with fewer digits lost, in place of a node's own; the
        caller has just filled them, and gives them away."""
        data = node.data[kind]
        self.give_back(kind, data.slots)
        node.data[kind] = Residency(pages, data.start)

    def _moved(self, node: Node) -> None:
        self.moves += 1
        node.moved = self.moves

    def used_pages(self) -> dict[str, int]:
        """Pages held now, by kind; KV includes what running requests hold."""
        return {rule.kind: self._used[rule.kind] for rule in self.tree.rules}

    def peak_pages(self) -> tuple[dict[str, int], int]:
        """The most pages ever held at once: of each kind, and of all together."""
        return {kind: self._peak_pages[kind] for kind in self.used_pages()}, self._peak_total
