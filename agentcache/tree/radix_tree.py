"""The radix tree: match, insert, split, remove. It decides; what to free is returned, not done.

Who holds what, for the path root → A → B of one sequence and a third node C that leaves inside B:

    before   A [0, a)            B [a, b)
    insert   A [0, a)   B' [a, m) → B [m, b)      B keeps its identity, its end and its checkpoint
                                  → C [m, c)      B' is new and holds the upper part of B's pages
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentcache.errors import LeaseError
from agentcache.tree.key import common_prefix_len
from agentcache.tree.node import EMPTY_TOKENS, Node
from agentcache.types import IntArray, Kind, Vote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Freed", "Inserted", "Match", "RadixTree", "ReuseRule"]


class ReuseRule(Protocol):
    """What the tree asks of a component; see `components.base.Component`."""

    kind: Kind

    def vote(self, node: Node) -> Vote: ...
    def on_split(self, upper: Node, lower: Node) -> IntArray: ...
    def commit(self, node: Node, slots: IntArray) -> None: ...
    def lock(self, node: Node) -> None: ...
    def unlock(self, node: Node) -> None: ...
    def evict(self, node: Node) -> IntArray | None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a token sequence.

    node, boundary: the deepest node that every component accepts, and its end (0: nothing).
    known_node, known_len: how far the tokens themselves are known, `known_len` possibly inside the
        edge of `known_node`.
    lens: per component the deepest position it alone would accept, at most `limit`.
    """

    node: Node
    boundary: int
    known_node: Node
    known_len: int
    lens: dict[Kind, int]

    @property
    def vetoed_by(self) -> Kind | None:
        """The component that kept the boundary shortest, if any did."""
        worst = min(self.lens, key=lambda kind: self.lens[kind], default=None)
        if worst is None or self.lens[worst] >= max(self.lens.values()):
            return None
        return worst


@dataclass(frozen=True, slots=True)
class Inserted:
    """The node that ends where the insertion ended, and what changed on the way.

    created: nodes without data yet, whose slots the caller has to commit. shared: slots that one
    more node holds since a split.
    """

    node: Node
    created: tuple[Node, ...]
    shared: tuple[tuple[Kind, IntArray], ...]


@dataclass(slots=True)
class Freed:
    """Slots whose reference the tree gave up, with the nodes that left it."""

    slots: list[tuple[Kind, IntArray]] = field(default_factory=list)
    removed: list[Node] = field(default_factory=list)
    survivor: Node | None = None


class RadixTree:
    """Prefix tree over token ids, one root per namespace, with components that vote.

    Matching never changes anything. Not thread-safe: the engine thread owns it.
    """

    def __init__(self, rules: Sequence[ReuseRule]) -> None:
        assert rules, "a tree needs at least one component"
        self.rules = tuple(rules)
        self._by_kind = {rule.kind: rule for rule in rules}
        self._roots: dict[bytes, Node] = {}

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made on first use."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(EMPTY_TOKENS, None, 0)
        return root

    def match(self, start: Node, tokens: IntArray, limit: int) -> Match:
        """Walk from `start`, whose path is known to equal `tokens[:start.end]`, as deep as they
        agree.

        `limit` is the longest boundary wanted. A veto does not end the walk: deeper nodes may agree
        again. The match may end inside an edge.
        """
        lens = {rule.kind: 0 for rule in self.rules}
        boundary = self._boundary_above(start, limit, lens)
        node, depth = start, start.end
        while depth < len(tokens):
            child = node.children.get(int(tokens[depth]))
            if child is None:
                break
            same = common_prefix_len(child.tokens, tokens[depth:])
            depth += same
            node = child
            if same < len(child.tokens):
                self._partial(child, min(depth, limit), lens)
                break
            if child.end <= limit:
                if self._votes(child, lens):
                    boundary = child
            else:
                self._partial(child, limit, lens)
        return Match(boundary, boundary.end, node, depth, lens)

    def _votes(self, node: Node, lens: dict[Kind, int]) -> bool:
        agreed = True
        for rule in self.rules:
            if rule.vote(node) is Vote.RESIDENT:
                lens[rule.kind] = node.end
            else:
                agreed = False
        return agreed

    def _partial(self, node: Node, depth: int, lens: dict[Kind, int]) -> None:
        """Count what can be cut inside an edge; only KV can."""
        for rule in self.rules:
            if rule.kind is Kind.FULL and rule.vote(node) is Vote.RESIDENT:
                lens[rule.kind] = max(lens[rule.kind], depth)

    def _boundary_above(self, start: Node, limit: int, lens: dict[Kind, int]) -> Node:
        """The deepest node at or above `start` that every component accepts within `limit`."""
        node: Node = start
        while not node.is_root:
            if node.end <= limit:
                found: dict[Kind, int] = {}
                agreed = self._votes(node, found)
                for kind, end in found.items():
                    lens[kind] = max(lens[kind], end)
                if agreed:
                    return node
            else:
                self._partial(node, limit, lens)
            assert node.parent is not None
            node = node.parent
        return node

    def is_boundary(self, node: Node) -> bool:
        """Whether every component can resume at `node.end` from the device."""
        return all(rule.vote(node) is Vote.RESIDENT for rule in self.rules)

    def insert(self, start: Node, tokens: IntArray, stop: int) -> Inserted:
        """Make `tokens[:stop]` a path that ends on a node, from `start` on, which lies on it.

        Splits an edge where the tokens leave it or end inside it.
        """
        assert start.end <= stop <= len(tokens)
        node, shared, created = start, [], []
        while node.end < stop:
            child = node.children.get(int(tokens[node.end]))
            if child is None:
                child = self._attach(node, tokens[node.end : stop].copy())
                created.append(child)
                node = child
                continue
            same = common_prefix_len(child.tokens, tokens[node.end : stop])
            if same < len(child.tokens):
                child, slots = self._split(child, child.start + same)
                shared.extend(slots)
            node = child
        return Inserted(node, tuple(created), tuple(shared))

    def _attach(self, parent: Node, tokens: IntArray) -> Node:
        node = Node(tokens, parent, parent.end + len(tokens))
        node.last_access = parent.last_access
        parent.children[int(tokens[0])] = node
        return node

    def _split(self, lower: Node, at: int) -> tuple[Node, list[tuple[Kind, IntArray]]]:
        """Cut `lower` at position `at`; the new upper node takes its place under the parent."""
        assert lower.start < at < lower.end
        assert lower.parent is not None
        cut = at - lower.start
        upper = Node(lower.tokens[:cut].copy(), lower.parent, at)
        upper.last_access = lower.last_access
        lower.parent.children[int(upper.tokens[0])] = upper
        lower.tokens = lower.tokens[cut:].copy()
        lower.parent = upper
        upper.children[int(lower.tokens[0])] = lower
        shared = [(rule.kind, rule.on_split(upper, lower)) for rule in self.rules]
        return upper, [(kind, slots) for kind, slots in shared if len(slots)]

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors in the tree, and what components add to that.

        Undone by `unlock` of the very same node, whatever was split in between: only leaves leave,
        and a split leaves a node its identity and its end.
        """
        node.locks += 1
        for rule in self.rules:
            rule.lock(node)

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises LeaseError if there is none."""
        if node.locks < 1:
            raise LeaseError(f"{node} is not locked; every lock is released exactly once")
        node.locks -= 1
        for rule in self.rules:
            rule.unlock(node)

    def can_remove(self, node: Node) -> bool:
        """Whether nothing stands below the node and nobody reads through it."""
        return node.is_leaf and node.locks == 0 and not node.is_root and node.generation == 0

    def remove_leaf(self, node: Node, now: float) -> Freed:
        """Take a leaf out, and with it every ancestor that is of no use to anyone any more.

        A leaf that no component accepts as a boundary holds KV that nobody can reuse. `survivor` is
        the first ancestor that stays.
        """
        assert self.can_remove(node)
        freed = Freed()
        while True:
            parent = node.parent
            assert parent is not None
            for rule in self.rules:
                slots = rule.evict(node)
                if slots is not None:
                    freed.slots.append((rule.kind, slots))
            del parent.children[int(node.tokens[0])]
            node.tokens = EMPTY_TOKENS
            node.generation += 1
            node.evicted_at = now
            freed.removed.append(node)
            freed.survivor = node = parent
            if not self.can_remove(node) or self.is_boundary(node):
                return freed

    def has(self, kind: Kind) -> bool:
        """Whether the tree has a component of this kind."""
        return kind in self._by_kind

    def commit(self, node: Node, kind: Kind, slots: IntArray) -> None:
        """Attach one component's slots to a node."""
        self._by_kind[kind].commit(node, slots)

    def drop(self, node: Node, kind: Kind, now: float) -> IntArray | None:
        """Detach one component's data from a node that stays; the slots, or None if it had none."""
        slots = self._by_kind[kind].evict(node)
        if slots is not None:
            node.evicted_at = now
        return slots

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, parents first."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def path(self, node: Node) -> list[Node]:
        """The nodes from below the root to `node`."""
        out = []
        at: Node | None = node
        while at is not None and not at.is_root:
            out.append(at)
            at = at.parent
        out.reverse()
        return out
