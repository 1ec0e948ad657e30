"""What a cache should know, kept by brute force, and recounts of what it does know.

The oracle has one entry per position and knows nothing of nodes, pages or matching. It is told what
was filed and what left, and nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentcache.types import IntArray, Kind
from testkit.helpers import make_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from agentcache.cache import HybridCache
    from agentcache.sessions.refs import SessionRef
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Salts

Key = tuple[Any, ...]
"""A prefix: its namespace, then one entry per token, with a digest where a salt begins."""

NAMESPACES = (b"left", b"right")
STAGING_ROWS = 2
"""Rows besides those of requests, for states at planned lengths inside a chunk."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which kinds a cache has, and its sizes. window 0, state_pages 0: not that kind."""

    kv: bool = True
    window: int = 0
    state_pages: int = 0
    page_size: int = 1
    swa_page: int = 1
    num_pages: int = 24
    policy: str = "session-lru"
    min_gain: int = 1

    def cache(self) -> HybridCache:
        """An empty cache of three rows over pools that remember what every slot holds."""
        cache = make_cache(
            num_pages=self.num_pages,
            page_size=self.page_size,
            num_rows=3,
            state_pages=self.state_pages,
            policy=self.policy,
            kv=self.kv,
            window=self.window,
            swa_page=self.swa_page,
            min_gain=self.min_gain,
            shadow=True,
        )
        cache.pools.absorbed.extend([None] * STAGING_ROWS)  # type: ignore[attr-defined]
        return cache


COMPOSITIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "full-swa": {"window": 5},
    "full-state": {"state_pages": 2},
    "full-swa-state": {"window": 5, "state_pages": 1},
    "state": {"kv": False, "state_pages": 2},
    "swa": {"kv": False, "window": 5},
}


class Oracle:
    """Prefixes that can be reused, kept position by position.

    known: tokens that were filed. ends: where a filed sequence ended or parted from another.
    states: positions with a checkpoint. windows: positions whose window is kept.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.known: set[Key] = set()
        self.ends: set[Key] = set()
        self.states: set[Key] = set()
        self.windows: set[Key] = set()

    def reach(self, at: int) -> int:
        """The first position that the token at `at` attends to."""
        return max(0, at - self.layout.window + 1)

    def kinds(self) -> dict[str, set[Key]]:
        """Per kind the prefixes it accepts."""
        out: dict[str, set[Key]] = {}
        if self.layout.kv:
            out[Kind.FULL] = self.known
        if self.layout.window:
            out[Kind.SWA] = self.windows
        if self.layout.state_pages:
            out[Kind.STATE] = self.states
        return out

    def accepts(self, key: Key) -> bool:
        """Whether a request can resume at the end of this prefix."""
        return all(key in accepted for accepted in self.kinds().values())

    def known_len(self, key: Key) -> int:
        """How many leading tokens are known."""
        return _longest(key, len(key) - 1, lambda prefix: prefix in self.known)

    def boundary(self, key: Key, limit: int) -> int:
        """The longest prefix of at most `limit` tokens that can be resumed at."""
        return _longest(key, limit, self.accepts)

    def lens(self, key: Key, limit: int) -> dict[str, int]:
        """`boundary` if there were only that one kind, for each."""
        return {
            kind: _longest(key, limit, accepted.__contains__)
            for kind, accepted in self.kinds().items()
        }

    def insert(self, key: Key) -> None:
        """The tokens of a sequence are filed."""
        parting = self.known_len(key)
        if parting:
            self.ends.add(key[: parting + 1])
        for at in range(parting + 1, len(key)):
            self.known.add(key[: at + 1])
            if isinstance(key[at], tuple) and at > 1:
                self.ends.add(key[:at])
        self.ends.add(key)

    def file(self, key: Key) -> None:
        """What makes the end of a filed sequence a boundary is kept from now on."""
        length = len(key) - 1
        if self.layout.state_pages:
            self.states.add(key)
        if self.layout.window and key not in self.windows:
            covered = (p for p in self._stretch(key) if self.reach(p) >= self.reach(length))
            self.windows.update(key[: p + 1] for p in covered)

    def drop(self, key: Key, kind: str) -> None:
        """One kind's data at an end left, and its tokens stay."""
        assert key in self.ends
        if kind == Kind.STATE:
            self.states.remove(key)
        else:
            assert kind == Kind.SWA
            self.windows.difference_update(key[: p + 1] for p in self._stretch(key))

    def remove(self, keys: Sequence[Key]) -> None:
        """An end left with what leads to it, and then those above it."""
        for number, key in enumerate(keys):
            assert number == 0 or not self.accepts(key), "something useful left with another"
            gone = {key[: p + 1] for p in self._stretch(key)}
            for kept in (self.known, self.states, self.windows):
                kept -= gone
            self.ends.remove(key)
            longer = {k for k in self.known if k[: len(key)] == key}
            assert not longer, "something left from under what goes on from it"

    def _stretch(self, key: Key) -> range:
        """The positions of the tokens that lead to an end from the one above it."""
        above = _longest(key, len(key) - 2, self.ends.__contains__)
        return range(above + 1, len(key))


def _longest(key: Key, limit: int, accepts: Callable[[Key], bool]) -> int:
    return max((p for p in range(1, limit + 1) if accepts(key[: p + 1])), default=0)


def are_on_one_path(one: Key, other: Key) -> bool:
    """Whether one is a prefix of the other."""
    common = min(len(one), len(other))
    return one[:common] == other[:common]


def key_of(namespace: bytes, tokens: IntArray, salts: Salts) -> Key:
    """The whole sequence as a key; its prefix of p tokens is `key[:p + 1]`."""
    at = dict(salts)
    ids = tokens.tolist()
    return (namespace, *((at[i], token) if i in at else token for i, token in enumerate(ids)))


def key_at(cache: HybridCache, node: Node) -> Key:
    """The prefix that ends at a node."""
    parts: list[Any] = []
    while not node.is_root:
        ids = node.tokens.tolist()
        first = ids[0] if node.salt is None else (node.salt, ids[0])
        parts[:0] = [first, *ids[1:]]
        assert node.parent is not None
        node = node.parent
    namespace = next(name for name in NAMESPACES if cache.tree.root(name) is node)
    return (namespace, *parts)


def check_tree_holds(cache: HybridCache, oracle: Oracle) -> None:
    """Assert that the tree holds what was filed and did not leave, and nothing else."""
    found = Oracle(oracle.layout)
    for node in cache.tree.nodes():
        key, inside = key_at(cache, node), range(node.start + 1, node.end + 1)
        found.ends.add(key)
        found.known.update(key[: p + 1] for p in inside)
        if Kind.STATE in node.data:
            found.states.add(key)
        if Kind.SWA in node.data:
            start = node.data[Kind.SWA].start
            found.windows.update(key[: p + 1] for p in inside if found.reach(p) >= start)
    for name in ("ends", "known", "states", "windows"):
        assert getattr(found, name) == getattr(oracle, name), name


def snapshot(cache: HybridCache) -> list[Any]:
    """The pages' counters, then every field of every node."""
    pages = cache.pools.pages
    out: list[Any] = [pages.refs.tolist(), pages.fill.tolist()]
    for node in (*map(cache.tree.root, NAMESPACES), *cache.tree.nodes()):
        fields = {name: getattr(node, name) for name in node.__slots__}
        fields["tokens"] = node.tokens.tolist()
        fields["children"] = {key: id(child) for key, child in node.children.items()}
        fields["data"] = {
            kind: (data.start, data.tier, data.slots.tolist()) for kind, data in node.data.items()
        }
        out.append(fields)
    return out


def chain_of(ref: SessionRef) -> set[Node]:
    """The shared boundaries that a mark holds."""
    out, anchor = set(), ref._anchor
    while anchor is not None:
        out.add(anchor.at.node)
        anchor = anchor.above
    return out


def check_marks(cache: HybridCache, marks: Iterable[SessionRef]) -> None:
    """References of nodes and chains, counted from nothing, are what they say."""
    refs: Counter[Node] = Counter()
    holders: Counter[Any] = Counter()
    for mark in marks:
        assert mark.held
        refs[mark.frontier.node] += mark.frontier.alive
        anchor = mark._anchor
        while anchor is not None:
            holders[anchor] += 1
            if holders[anchor] > 1:
                break  # what lies above it was counted
            anchor = anchor.above
    for anchor, count in holders.items():
        assert anchor.holders == count
        refs[anchor.at.node] += anchor.at.alive
    for node in (*map(cache.tree.root, NAMESPACES), *cache.tree.nodes()):
        assert node.refs == refs[node], f"{node}: {refs[node]} counted"
        assert not (node.refs and node.superseded), f"{node} is referenced and superseded"
