"""The radix tree: match, insert, split, remove. It decides; what to free is returned, not done.

Who holds what, for the path root → A → B of one sequence and a third node C that leaves inside B:

    before   A [0, a)            B [a, b)
    insert   A [0, a)   B' [a, m) → B [m, b)      B keeps its identity, its end and its checkpoint
                                  → C [m, c)      B' is new and holds the upper part of B's pages
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from agentcache.errors import LeaseError
from agentcache.tree.key import common_prefix_len
from agentcache.tree.node import EMPTY_TOKENS, ChildKey, Node, Residency
from agentcache.types import IntArray, Vote

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Freed", "Inserted", "Match", "RadixTree", "ReuseRule", "Salts", "Split"]

Salts = tuple[tuple[int, bytes], ...]
"""(position, digest) in ascending order: from there on a sequence is known by its digest too."""

_ITEM = 4
"""Bytes per token id."""


class ReuseRule(Protocol):
    """What the tree asks of a component; see `components.base.Component`."""

    @property
    def kind(self) -> str: ...
    def vote(self, node: Node, at: int) -> Vote: ...
    def on_split(self, upper: Node, lower: Node) -> IntArray: ...
    def commit(self, node: Node, slots: IntArray) -> None: ...
    def evict(self, node: Node) -> Residency | None: ...


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a token sequence.

    node, boundary: the deepest position that every component accepts (0: none) and the node in
        whose edge, or at whose end, it lies.
    known_node, known_len: how far the tokens themselves are known, in the same terms.
    lens: per component the deepest position it alone would accept, at most the limit asked for.
    loadable_node, loadable: like node and boundary, if what lies on lower tiers were loaded.
    """

    node: Node
    boundary: int
    known_node: Node
    known_len: int
    lens: dict[str, int]
    loadable_node: Node
    loadable: int

    @property
    def vetoed_by(self) -> str | None:
        """The component that kept the boundary shortest, if any did."""
        worst = min(self.lens, key=lambda kind: self.lens[kind], default=None)
        if worst is None or self.lens[worst] >= max(self.lens.values()):
            return None
        return worst


@dataclass(frozen=True, slots=True)
class Split:
    """An edge was cut: `upper` is new and ends where `lower`, which it was cut from, now begins.

    shared: slots that both hold from now on, each with one more reference to count.
    """

    upper: Node
    lower: Node
    shared: tuple[tuple[str, IntArray], ...]


@dataclass(frozen=True, slots=True)
class Inserted:
    """The node that ends where the insertion ended, and what changed on the way.

    created: nodes without data yet, whose slots the caller has to commit.
    """

    node: Node
    created: tuple[Node, ...]
    splits: tuple[Split, ...]


@dataclass(slots=True)
class Freed:
    """Data that the tree gave up, by kind, with the nodes that left it.

    survivor: the first ancestor that stays.
    """

    data: list[tuple[str, Residency]] = field(default_factory=list)
    removed: list[Node] = field(default_factory=list)
    survivor: Node | None = None


class RadixTree:
    """Prefix tree over token ids, one root per namespace, with components that vote.

    Matching never changes anything. Not thread-safe: the engine thread owns it.
    """

    def __init__(self, rules: Sequence[ReuseRule]) -> None:
        assert rules, "a tree needs at least one component"
        assert len({rule.kind for rule in rules}) == len(rules), "two components of one kind"
        self.rules = tuple(rules)
        self._by_kind = {rule.kind: rule for rule in rules}
        self._roots: dict[bytes, Node] = {}
        self._ids = itertools.count()

    def root(self, namespace: bytes) -> Node:
        """The root of a namespace, made on first use."""
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Node(next(self._ids), EMPTY_TOKENS, None, 0)
        return root

    def namespace(self, root: Node) -> bytes:
        """The namespace of a root."""
        return next(name for name, node in self._roots.items() if node is root)

    def match(self, start: Node, tokens: IntArray, limit: int, salts: Salts = ()) -> Match:
        """Walk from `start`, whose path is known to equal `tokens[:start.end]`, as deep as they
        agree; then up again to the deepest boundary of at most `limit` tokens.

        A veto does not end the walk: every node visited may be the boundary. The match may end
        inside an edge. Costs O(tokens after `start`), and the nodes between what is known and what
        is reusable.
        """
        node, depth = self._walk(start, tokens, salts)
        return self._settle(node, depth, limit)

    def _walk(self, start: Node, tokens: IntArray, salts: Salts) -> tuple[Node, int]:
        """The node where the tokens leave the tree, and how many of them are known."""
        node = start
        first = depth = start.end
        ahead = tokens[first:]
        raw = ahead.tobytes()
        ids = memoryview(raw).cast("i")
        stops, at_stop = _stops(salts, first, len(tokens))
        stop = next(stops)
        while depth < len(tokens):
            only = node.only_child
            if (  # the usual case, without a look at what the child hangs under
                only is not None
                and only.salt is None
                and depth < stop >= only.end
                and raw.startswith(only.raw, (depth - first) * _ITEM)
            ):
                node, depth = only, only.end
                continue
            token: int = ids[depth - first]
            key: ChildKey = token
            if depth == stop:
                key = (at_stop[stop], token)
                stop = next(stops)
            child = node.child(key)
            if child is None:
                break
            if child.end <= stop and raw.startswith(child.raw, (depth - first) * _ITEM):
                node, depth = child, child.end
                continue
            return child, depth + common_prefix_len(child.tokens, tokens[depth:stop])
        return node, depth

    def _settle(self, node: Node, depth: int, limit: int) -> Match:
        """Ask for votes from the deepest known position upwards, one position per node."""
        known, at = node, min(depth, limit)
        lens: dict[str, int] = {}
        loadable: tuple[Node, int] | None = None
        while not node.is_root:
            if node.start >= at:
                assert node.parent is not None
                node = node.parent
                at = min(node.end, at)
                continue
            resident, reachable = True, True
            for rule in self.rules:
                vote = rule.vote(node, at)
                if vote is _RESIDENT:
                    lens.setdefault(rule.kind, at)
                else:
                    resident = False
                    reachable = reachable and vote is not _ABSENT
            if reachable and loadable is None:
                loadable = node, at
            if resident:
                break
            at = node.start
        boundary = 0 if node.is_root else at
        for rule in self.rules:
            lens.setdefault(rule.kind, boundary)
        deeper = loadable or (node, boundary)
        return Match(node, boundary, known, depth, lens, *deeper)

    def is_boundary(self, node: Node) -> bool:
        """Whether every component can resume at `node.end` from the device."""
        return all(rule.vote(node, node.end) is _RESIDENT for rule in self.rules)

    def is_usable(self, node: Node) -> bool:
        """Whether every component can resume at `node.end`, from whatever tier."""
        return all(rule.vote(node, node.end) is not _ABSENT for rule in self.rules)

    def insert(self, start: Node, tokens: IntArray, stop: int, salts: Salts = ()) -> Inserted:
        """Make `tokens[:stop]` a path that ends on a node, from `start` on, which lies on it.

        Splits an edge where the tokens leave it or end inside it, and where a salt begins.
        """
        assert start.end <= stop <= len(tokens)
        node, splits, created = start, [], []
        stops, at_stop = _stops(salts, start.end, stop)
        end = next(stops)
        while node.end < stop:
            token = int(tokens[node.end])
            key: ChildKey = token
            salt = None
            if node.end == end:
                salt = at_stop[end]
                key = (salt, token)
                end = next(stops)
            child = node.child(key)
            if child is None:
                child = self._attach(node, tokens[node.end : end], salt)
                created.append(child)
                node = child
                continue
            same = common_prefix_len(child.tokens, tokens[node.end : end])
            if child.start + same < child.end:
                split = self._split(child, child.start + same)
                splits.append(split)
                child = split.upper
            node = child
        return Inserted(node, tuple(created), tuple(splits))

    def _attach(self, parent: Node, tokens: IntArray, salt: bytes | None) -> Node:
        node = Node(next(self._ids), tokens, parent, parent.end + len(tokens), salt)
        node.last_access = parent.last_access
        parent.attach(node)
        return node

    def _split(self, lower: Node, at: int) -> Split:
        """Cut `lower` at position `at`; the new upper node takes its place under the parent."""
        assert lower.start < at < lower.end
        assert lower.parent is not None
        cut = at - lower.start
        upper = Node(next(self._ids), lower.tokens[:cut], lower.parent, at, lower.salt)
        upper.last_access = lower.last_access
        upper.moved = lower.moved
        lower.parent.attach(upper)
        lower.tokens = lower.tokens[cut:]
        lower.parent, lower.salt = upper, None
        upper.attach(lower)
        shared = [(rule.kind, rule.on_split(upper, lower)) for rule in self.rules]
        return Split(upper, lower, tuple((kind, slots) for kind, slots in shared if len(slots)))

    def lock(self, node: Node) -> None:
        """Keep a node and its ancestors in the tree.

        Undone by `unlock` of the very same node, whatever was split in between: only leaves leave,
        and a split leaves a node its identity and its end.
        """
        node.locks += 1

    def unlock(self, node: Node) -> None:
        """Undo one `lock`. Raises LeaseError if there is none."""
        if node.locks < 1:
            raise LeaseError(f"{node} is not locked; every lock is released exactly once")
        node.locks -= 1

    def can_remove(self, node: Node) -> bool:
        """Whether nothing stands below the node and nobody reads through it."""
        return node.is_leaf and node.locks == 0 and not node.is_root and node.generation == 0

    def remove_leaf(self, node: Node, now: float) -> Freed:
        """Take a leaf out, and with it every ancestor that is of no use to anyone any more.

        A leaf that no component accepts as a boundary holds KV that nobody can reuse.
        """
        assert self.can_remove(node)
        freed = Freed()
        while True:
            parent = node.parent
            assert parent is not None
            for rule in self.rules:
                data = rule.evict(node)
                if data is not None:
                    freed.data.append((rule.kind, data))
            parent.detach(node)
            node.tokens = EMPTY_TOKENS
            node.generation += 1
            node.evicted_at = now
            freed.removed.append(node)
            freed.survivor = node = parent
            if not self.can_remove(node) or self.is_usable(node):
                return freed

    def has(self, kind: str) -> bool:
        """Whether the tree has a component of this kind."""
        return kind in self._by_kind

    def commit(self, node: Node, kind: str, slots: IntArray) -> None:
        """Attach one component's slots to a node."""
        self._by_kind[kind].commit(node, slots)

    def drop(self, node: Node, kind: str, now: float) -> Residency | None:
        """Detach one component's data from a node that stays; None if it had none."""
        data = self._by_kind[kind].evict(node)
        if data is not None:
            node.evicted_at = now
        return data

    def rule(self, kind: str) -> ReuseRule:
        """The component of a kind."""
        return self._by_kind[kind]

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


def _stops(salts: Salts, start: int, stop: int) -> tuple[Iterator[int], dict[int, bytes]]:
    """Where salts begin in [start, stop), in order and `stop` at last; and their digests."""
    if not salts:
        return iter((stop,)), {}
    inside = [(at, digest) for at, digest in salts if start <= at < stop]
    assert len({at for at, _ in inside}) == len(inside), "two salts at one position"
    return iter([*(at for at, _ in inside), stop]), dict(inside)


_RESIDENT, _ABSENT = Vote.RESIDENT, Vote.ABSENT  # slow to reach by name
