"""A node of the radix tree: one run of tokens and what each component keeps at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray

__all__ = ["EMPTY_TOKENS", "ChildKey", "Cursor", "Node", "Residency"]

ChildKey = int | tuple[bytes, int]
"""What a child hangs under: its first token, with a salt where a salted range begins there."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Where one component's data of a node lies: its slots, from position `start` on, and the tier.

    Tier 1 is the device. Slots of KV are page numbers that cover [start, node.end); those of a
    checkpoint are the pages that hold it.
    """

    slots: IntArray
    start: int
    tier: int = 1


class Node:
    """One edge's tokens plus per-component data; positions are counted from the root.

    `end` is the position after the node's last token and never changes: a split gives the upper
    part to a new node and leaves the lower part here. Counters are owned by the tree and by the
    session references; `queue`, `stamp` and `weight` belong to the eviction order.
    """

    __slots__ = (
        "children",
        "data",
        "end",
        "evicted_at",
        "expires",
        "generation",
        "id",
        "last_access",
        "locks",
        "moved",
        "parent",
        "queue",
        "refs",
        "salt",
        "stamp",
        "structural",
        "superseded",
        "tokens",
        "weight",
    )

    def __init__(
        self, id: int, tokens: IntArray, parent: Node | None, end: int, salt: bytes | None = None
    ) -> None:
        self.id = id
        self.tokens = tokens
        self.parent = parent
        self.end = end
        self.salt = salt
        self.children: dict[ChildKey, Node] = {}
        self.data: dict[str, Residency] = {}
        self.locks = 0
        self.refs = 0
        self.last_access = 0.0
        self.expires: float | None = None
        self.superseded = False
        self.structural = False
        self.generation = 0
        self.moved = 0
        self.stamp = 0
        self.queue = -1
        self.weight = 0
        self.evicted_at: float | None = None

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return self.end - len(self.tokens)

    @property
    def key(self) -> ChildKey:
        """What the node hangs under in its parent."""
        first = int(self.tokens[0])
        return first if self.salt is None else (self.salt, first)

    @property
    def is_root(self) -> bool:
        return self.end == 0

    @property
    def is_leaf(self) -> bool:
        return not self.children

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
