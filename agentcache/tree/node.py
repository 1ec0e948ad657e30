"""A node of the radix tree: one run of tokens and what each component keeps at it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from agentcache.types import IntArray, Kind

__all__ = ["EMPTY_TOKENS", "Cursor", "Node", "Residency"]


@dataclass(frozen=True, slots=True)
class Residency:
    """Where one component's data of a node lies: the tier (1 = device) and its slots there.

    FULL: page numbers that cover the node's positions. STATE: page numbers of its checkpoint.
    """

    slots: IntArray
    tier: int = 1


class Node:
    """One edge's tokens plus per-component data; positions are counted from the root.

    `end` is the position after the node's last token and never changes: a split gives the upper
    part to a new node and leaves the lower part here. Counters are owned by the tree.
    """

    __slots__ = (
        "children",
        "data",
        "end",
        "evicted_at",
        "generation",
        "last_access",
        "locks",
        "parent",
        "refs",
        "stamp",
        "structural",
        "superseded",
        "tokens",
    )

    def __init__(self, tokens: IntArray, parent: Node | None, end: int) -> None:
        self.tokens = tokens
        self.parent = parent
        self.end = end
        self.children: dict[int, Node] = {}
        self.data: dict[Kind, Residency] = {}
        self.locks = 0
        self.refs = 0
        self.last_access = 0.0
        self.superseded = False
        self.structural = False
        self.generation = 0
        self.stamp = 0
        self.evicted_at: float | None = None

    @property
    def start(self) -> int:
        """Position of the node's first token."""
        return self.end - len(self.tokens)

    @property
    def is_root(self) -> bool:
        return self.end == 0

    @property
    def is_leaf(self) -> bool:
        return not self.children

    def __repr__(self) -> str:
        kinds = ",".join(kind.value for kind in self.data)
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
