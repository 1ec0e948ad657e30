"""The cache: doors for running requests, over the memory they share."""

from agentcache.cache.hybrid import HybridCache
from agentcache.cache.lease import ANY_LEN, Lease
from agentcache.cache.memory import OutOfPages
from agentcache.sessions.refs import SessionRef
from agentcache.tree.key import common_prefix_len
from agentcache.tree.node import Cursor
from agentcache.tree.radix_tree import Match

__all__ = [
    "ANY_LEN",
    "Cursor",
    "HybridCache",
    "Lease",
    "Match",
    "OutOfPages",
    "SessionRef",
    "common_prefix_len",
]
