"""What a policy is: what it is told, what it ranks or scores, and what it may know of the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from agentcache.policy.cost import FlopsModel, PublishedShape

if TYPE_CHECKING:
    from agentcache.tree.node import Node
    from agentcache.tree.radix_tree import Salts
    from agentcache.types import IntArray, ModelShape

__all__ = [
    "Arrival",
    "Costs",
    "Filed",
    "Heads",
    "Key",
    "Order",
    "Origin",
    "Policy",
    "Rank",
    "Ranking",
    "Served",
]

Key = float | tuple[float, ...]

Rank = tuple[int, Key, float | None]
"""(queue, key, wakes): within a queue the smallest key leaves first, so its keys are of one form;
`wakes` is when the rank changes by itself next, if it does."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What policies need of a model: work of a prefix, bytes of a token's KV and of a checkpoint.

    By default every token is one FLOP and one byte, and a checkpoint costs nothing.
    """

    flops: FlopsModel = field(default=FlopsModel(1.0))
    token_bytes: int = 1
    checkpoint_bytes: int = 0

    @classmethod
    def of(cls, shape: ModelShape | PublishedShape) -> Costs:
        """By a model's real sizes, or as the article counts its own.

        >>> Costs.of(PublishedShape()).checkpoint_bytes
        26787840
        """
        sizes = shape.kv_bytes_per_token, shape.state_bytes
        if isinstance(shape, PublishedShape):
            return cls(shape.flops_model(), *sizes)
        return cls(FlopsModel.of(shape), *sizes)


@dataclass(frozen=True, slots=True)
class Served:
    """A request that is over.

    tokens: its prompt and as much of its answer as was filed. prompt_len, cached_len: tokens it
    came with, and of these the reused ones. declared, passing: boundaries that its caller saw, for
    others and for its own trajectory. session: whose turn it was.
    """

    namespace: bytes
    tokens: IntArray
    prompt_len: int
    cached_len: int
    declared: tuple[int, ...]
    at: float
    passing: tuple[int, ...] = ()
    salts: Salts = ()
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is about to go on from what was found of it.

    tokens: its prompt. start: the node where the search began, whose path is known to be the
    prompt's. boundary_node, boundary: where it goes on. notes: for the policy to write to; they
    come back with what the request files.
    """

    namespace: bytes
    tokens: IntArray
    salts: Salts
    start: Node
    boundary_node: Node
    boundary: int
    notes: dict[str, Any]
    at: float


@dataclass(frozen=True, slots=True)
class Filed:
    """A request has filed a boundary: the node's end, which lies after `tokens[:node.end]`."""

    node: Node
    namespace: bytes
    tokens: IntArray
    salts: Salts
    origin: Origin
    notes: dict[str, Any]
    at: float


class Origin(IntEnum):
    """Why there is a boundary: a sequence ended there, others left it there, or its caller said so:
    as the end of a part that others may share, or of what only its own trajectory can want."""

    END = 0
    BRANCH = 1
    DECLARED = 2
    PASSING = 3


class Order(Protocol):
    """Entries by when they should leave. Only `pop` and `shelve` may rank or score."""

    def push(self, node: Node, now: float) -> None:
        """Put a node at its present place, or there anew."""
        ...

    def remove(self, node: Node) -> None:
        """Take a node out, if it is in."""
        ...

    def pop(self, now: float) -> Node | None:
        """The node that should leave first, taken out; None when there is none. Whoever lets it
        live on pushes it again."""
        ...

    def shelve(self, node: Node, now: float) -> None:
        """There is nothing to take from a node until it is pushed again; what it holds counts."""
        ...


class Policy(ABC):
    """Decides which entry leaves first. One policy belongs to one cache.

    touches_path: whether a request uses all of its known path and not only the node that it goes on
        from; that costs O(nodes of the path) per request. wants_served: whether it is told of
        requests when they are over; that costs O(their tokens). wants_boundaries: whether it is
        told of requests when they arrive, and of each boundary that is filed.
    """

    touches_path = False
    wants_served = False
    wants_boundaries = False

    @abstractmethod
    def order(self, num_pages: int) -> Order:
        """The order that keeps this policy's entries, in a memory of so many pages."""

    def used(self, node: Node, now: float) -> None:  # noqa: B027 - most policies need no news
        """A request goes on from a node, or through it if the policy touches paths; its hits and
        its time of access are up to date. The node is pushed right after."""

    def arrives(self, arrival: Arrival) -> tuple[int, ...]:
        """A request was matched; further lengths of its prompt that deserve a checkpoint."""
        return ()

    def filed(self, filed: Filed) -> None:  # noqa: B027 - most policies need no news
        """A boundary was filed. Only told where the policy `wants_boundaries`."""

    def stands(self, node: Node, now: float) -> None:  # noqa: B027 - most policies need no news
        """A live session stands on a node."""

    def expects(  # noqa: B027 - as above
        self, node: Node, seconds: float, now: float, session: str | None = None
    ) -> None:
        """The session that stands on a node said that it would be back in about so many seconds."""

    def over(self, session: str) -> None:  # noqa: B027 - as above
        """A session is over."""

    def served(self, request: Served) -> None:  # noqa: B027 - most policies need no news
        """A request is over, and what it filed lies in the tree."""


class Heads(Protocol):
    """What a ranking chooses the next queue from.

    weights: pages each queue's entries hold. num_pages: pages there are.
    """

    weights: list[int]
    num_pages: int

    def first(self, queue: int) -> Node | None:
        """The entry of a queue that would leave first."""
        ...

    def move(self, node: Node, queue: int, key: Key) -> None:
        """Put an entry into another queue, until it is pushed again."""
        ...


class Ranking(Protocol):
    """Ranks entries. A rank changes only where the cache says so, by pushing the node anew, or at
    the time that it names itself."""

    num_queues: int

    def rank(self, node: Node, now: float) -> Rank:
        """The node's queue, its key there, and how long that holds."""
        ...

    def choose(self, heads: Heads) -> int:
        """The queue whose first entry leaves; any if all are empty."""
        ...

    def taken(self, key: Key) -> None:
        """The entry with that key was chosen to leave."""
        ...
