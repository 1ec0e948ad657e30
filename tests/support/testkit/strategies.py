"""Hypothesis strategies shared by the rooms: token sequences whose prefixes collide."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

ALPHABET = 3


def tokens(min_size: int = 1, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Short sequences over a tiny alphabet, so that many share a prefix and few are equal."""
    return st.lists(st.integers(0, ALPHABET - 1), min_size=min_size, max_size=max_size)


def array(ids: list[int]) -> np.ndarray:
    """Token ids as the tree takes them."""
    return np.array(ids, dtype=np.int32)
