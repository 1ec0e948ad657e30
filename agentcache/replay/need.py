"""What a perfect cache would reuse and an unlimited one would hold, found without a model."""

from __future__ import annotations

from agentcache.components.full import FullComponent
from agentcache.components.state import StateComponent
from agentcache.tree.radix_tree import RadixTree
from agentcache.types import IntArray, Kind, ModelShape

__all__ = ["NeedCounter"]

_NAMESPACE = b"need"


class NeedCounter:
    """Feed it the calls of a run in their order; it knows no evictions.

    ideal_cached: Σ min(len(prompt) − 1, longest common prefix with any earlier prompt + answer).
    need_bytes: KV of every distinct token, plus a checkpoint at each turn's last decoded token and
    at each branch point: the peak of a cache without limit, and the figure budget shares are of.

    >>> import numpy as np
    >>> counter = NeedCounter()
    >>> counter.add(np.array([1, 2, 3, 4], np.int32), prompt_len=3)
    >>> counter.add(np.array([1, 2, 3, 5, 6], np.int32), prompt_len=4)
    >>> counter.ideal_cached
    3
    """

    def __init__(self) -> None:
        # One-token pages: the tree is used for its tokens alone.
        self._tree = RadixTree([FullComponent(1), StateComponent()])
        self._root = self._tree.root(_NAMESPACE)
        self.prompt_tokens = 0
        self.ideal_cached = 0
        self.num_tokens = 0
        self.num_checkpoints = 0

    def add(self, ids: IntArray, prompt_len: int) -> None:
        """A call with the first `prompt_len` of `ids` as its prompt and the rest as its answer."""
        prompt = ids[:prompt_len]
        known = self._tree.match(self._root, prompt, prompt_len).known_len
        self.prompt_tokens += prompt_len
        self.ideal_cached += min(prompt_len - 1, known)
        if known == prompt_len:
            known = self._tree.match(self._root, ids, len(ids)).known_len
        branch = min(known, prompt_len - 1)
        if branch > 0 and known < len(ids):
            self._file(prompt, branch)
        self._file(ids, len(ids))

    def _file(self, ids: IntArray, length: int) -> None:
        inserted = self._tree.insert(self._root, ids, length)
        self.num_tokens += sum(len(node.tokens) for node in inserted.created)
        if Kind.STATE not in inserted.node.data:
            self._tree.commit(inserted.node, Kind.STATE, ids[:0])
            self.num_checkpoints += 1

    def need_bytes(self, shape: ModelShape) -> int:
        """Bytes of what has been fed so far, for a model."""
        tokens = self.num_tokens * shape.kv_bytes_per_token
        return tokens + self.num_checkpoints * shape.state_bytes
