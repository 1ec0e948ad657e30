"""What a trace will ask for: its requests as paths of one tree that holds all of them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from agentcache.components.full import FullComponent
from agentcache.tree.radix_tree import RadixTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from agentcache.simulate.trace import SimRequest
    from agentcache.tree.node import Node

__all__ = ["Future"]


class Future:
    """All requests of a trace, known at once.

    Every prompt and every whole sequence ends on a segment, so that a request is a run of whole
    segments, and two requests share exactly the segments at the beginning of both.

    paths: per request its segments. ends: where each of these ends.
    """

    def __init__(self, requests: Sequence[SimRequest]) -> None:
        self.requests = requests
        self._readers: dict[Node, list[int]] = {}
        tree = RadixTree([FullComponent(1)])
        root = tree.root(b"future")
        for request in requests:
            for length in (request.prompt_len, len(request.ids)):
                tree.insert(root, request.ids, length)
        self.paths = [_path(root, request) for request in requests]
        self.ends = [[node.end for node in path] for path in self.paths]
        for index, (request, path) in enumerate(zip(requests, self.paths, strict=True)):
            for node in path:
                if node.end <= request.prompt_len:
                    self._readers.setdefault(node, []).append(index)

    def readers(self, request: int, position: int) -> Sequence[int]:
        """The requests, ascending, whose prompts hold the first `position` tokens of this one."""
        path = self.paths[request]
        return self._readers.get(path[bisect_left(self.ends[request], position)], ())

    def plan(self, request: int) -> frozenset[int]:
        """Where checkpoints of a request can be of use later: the ends of segments after which a
        later prompt leaves it, and one token earlier where a later prompt is over."""
        wanted: set[int] = set()
        below = 0
        for node in reversed(self.paths[request]):
            readers = self._readers.get(node, ())
            later = readers[bisect_right(readers, request) :]
            if len(later) > below:
                wanted.add(node.end)
            below = len(later)
            if any(self.requests[index].prompt_len == node.end for index in later):
                wanted.add(node.end - 1)
        return frozenset(wanted)


def _path(root: Node, request: SimRequest) -> list[Node]:
    node, path = root, []
    ids = request.ids.tolist()
    while node.end < len(ids):
        child = node.child(ids[node.end])
        assert child is not None
        path.append(child)
        node = child
    return path
