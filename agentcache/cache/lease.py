"""What one running request holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentcache.pools.table import PageTable
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Match, Salts
    from agentcache.types import IntArray

__all__ = ["ANY_LEN", "Lease"]

ANY_LEN = 2**62
"""Longer than any sequence."""


@dataclass(slots=True, eq=False)
class Lease:
    """What one running request holds, from acquire to its single release.

    namespace: what its tokens are kept under. match, boundary: what was known, and the tokens
    reused. plan: lengths at which a checkpoint is to be committed. row: the private state. table:
    pages of the whole sequence. windows: per windowed kind the pages from the first position still
    needed on. locked: the node whose path the
    lease keeps. committed_len: how many tokens the tree holds of this request. reserved_len: how
    many there is room for. own: pages of the table that the lease holds. filed: nodes where it
    committed a checkpoint. published_len: how far the table is the tree's; beyond, the tree had
    pages of its own for tokens computed again. prompt_len: tokens it came with. priority: of its
    session. tokens: what was filed last; kept only where the policy wants to know. passing: lengths
    that were declared for this trajectory alone. notes: the policy's own.
    """

    match: Match
    boundary: int
    plan: tuple[int, ...]
    row: int
    table: PageTable
    locked: Node
    structural: frozenset[int]
    salts: Salts
    session: str | None
    committed_len: int
    reserved_len: int
    namespace: bytes = b""
    prompt_len: int = 0
    priority: int = 0
    tokens: IntArray | None = None
    passing: frozenset[int] = frozenset()
    notes: dict[str, Any] = field(default_factory=dict)
    windows: dict[str, PageTable] = field(default_factory=dict)
    own: list[IntArray] = field(default_factory=list)
    filed: list[Node] = field(default_factory=list)
    published_len: int = ANY_LEN
    released: bool = False

    @property
    def frontier(self) -> Node:
        """The deepest node on the lease's path that holds nothing but tokens of this request."""
        node = self.locked
        while node.end > self.committed_len:  # the boundary lies inside the locked node's edge
            assert node.parent is not None
            node = node.parent
        return node
