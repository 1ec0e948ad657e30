"""A node of the radix tree: one run of tokens and what each component keeps at it."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from agentcache.types import IntArray

__all__ = ["EMPTY_TOKENS", "NO_SLOTS", "SLOT_BYTES", "ChildKey", "Cursor", "Node", "Residency"]

SLOT_BYTES = 4

ChildKey = int | tuple[bytes, int]
"""What a child hangs under: its first token, with a salt where a salted range begins there."""


class Residency:
    """Where one component's data of a node lies: its slots, from position `start` on, and the tier.

    Tier 1 is the device. Slots of KV are page numbers that cover [start, node.end); those of a
    checkpoint are the pages that hold it. Immutable; `packed` as int32 bytes, a third of an array.
    """

    __slots__ = ("packed", "start", "tier")

    def __init__(self, slots: IntArray, start: int, tier: int = 1) -> None:
        self.packed = slots.tobytes()
        self.start = start
        self.tier = tier

    @property
    def slots(self) -> IntArray:
        """Slots [S], int32, read-only."""
        return np.frombuffer(self.packed, dtype=np.int32)

    @property
    def num_slots(self) -> int:
        return len(self.packed) // SLOT_BYTES

    def __repr__(self) -> str:
        return f"Residency({self.slots.tolist()}, start={self.start}, tier={self.tier})"


class Node:
    """One edge's tokens plus per-component data; positions are counted from the root.

    `end` is the position after the node's last token and never changes: a split gives the upper
    part to a new node and leaves the lower part here. `raw` holds the tokens as int32 bytes, which
    are compact and compared as one block. Most nodes have one child, for which a dict would take as
    much as all the rest, so only several are kept in one. Counters are owned by the tree and by the
    session references; `queue`, `stamp` and `weight` belong to the eviction order, `value` to
    the policy. `hits` counts the requests that went on from here, or through here where the policy
    asks for it; `priority` is the highest of theirs.
    """

    __slots__ = (
        "_below",
        "data",
        "due",
        "end",
        "evicted_at",
        "expires",
        "generation",
        "hits",
        "id",
        "last_access",
        "locks",
        "moved",
        "parent",
        "priority",
        "queue",
        "raw",
        "refs",
        "salt",
        "stamp",
        "structural",
        "superseded",
        "value",
        "weight",
    )

    def __init__(
        self, id: int, tokens: IntArray, parent: Node | None, end: int, salt: bytes | None = None
    ) -> None:
        self.id = id
        self.raw = tokens.tobytes()
        self.parent = parent
        self.end = end
        self.salt = salt
        self._below: Node | dict[ChildKey, Node] | None = None
        self.data: dict[str, Residency] = {}
        self.locks = 0
        self.refs = 0
        self.last_access = 0.0
        self.hits = 0
        self.priority = 0
        self.value: float | None = None
        self.expires: float | None = None
        self.due: float | None = None
        self.superseded = False
        self.structural = False
        self.generation = 0
        self.moved = 0
        self.stamp = 0
        self.queue = -1
        self.weight = 0
        self.evicted_at: float | None = None

    @property
    def tokens(self) -> IntArray:
        """The edge's tokens, [T] int32, read-only."""
        return np.frombuffer(self.raw, dtype=np.int32)

    @tokens.setter
    def tokens(self, tokens: IntArray) -> None:
        self.raw = tokens.tobytes()

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return 0 if self.parent is None else self.parent.end

    @property
    def key(self) -> ChildKey:
        """What the node hangs under in its parent."""
        first: int = _first(self.raw)[0]
        return first if self.salt is None else (self.salt, first)

    @property
    def is_root(self) -> bool:
        return self.end == 0

    @property
    def is_leaf(self) -> bool:
        return self._below is None

    @property
    def num_children(self) -> int:
        if self._below is None:
            return 0
        return len(self._below) if isinstance(self._below, dict) else 1

    @property
    def only_child(self) -> Node | None:
        """The child of a node that has just one."""
        return None if isinstance(self._below, dict) else self._below

    @property
    def children(self) -> Mapping[ChildKey, Node]:
        """The nodes below, by what they hang under."""
        if self._below is None:
            return {}
        return self._below if isinstance(self._below, dict) else {self._below.key: self._below}

    def child(self, key: ChildKey) -> Node | None:
        """The node that hangs under a key."""
        below = self._below
        if isinstance(below, dict):
            return below.get(key)
        return below if below is not None and below.key == key else None

    def attach(self, child: Node) -> None:
        """Hang a node here, in place of what hung under its key."""
        below = self._below
        if isinstance(below, dict):
            below[child.key] = child
        elif below is None or below.key == child.key:
            self._below = child
        else:
            self._below = {below.key: below, child.key: child}

    def detach(self, child: Node) -> None:
        """Take a child away."""
        if not isinstance(self._below, dict):
            assert self._below is child
            self._below = None
            return
        del self._below[child.key]
        if len(self._below) == 1:
            self._below = next(iter(self._below.values()))

    def __repr__(self) -> str:
        kinds = ",".join(self.data)
        return f"Node({self.start}..{self.end} {kinds} locks={self.locks} refs={self.refs})"


@dataclass(frozen=True, slots=True)
class Cursor:
    """A weak mark of a place in the tree: it locks nothing and may outlive what it points to.

    A node that leaves the tree raises its `generation`; `living()` then walks up to the deepest
    ancestor that is still there.
    """

    node: Node
    generation: int

    @classmethod
    def at(cls, node: Node) -> Cursor:
        """A cursor at a living node."""
        return cls(node, node.generation)

    @property
    def alive(self) -> bool:
        """Whether the very node is still in the tree."""
        return self.node.generation == self.generation

    def living(self) -> Node:
        """The node, or its deepest living ancestor."""
        if self.alive:
            return self.node
        node = self.node
        while node.generation and node.parent is not None:
            node = node.parent
        return node


EMPTY_TOKENS: IntArray = np.empty(0, dtype=np.int32)
NO_SLOTS: IntArray = np.empty(0, dtype=np.int32)

_first = struct.Struct("=i").unpack_from
