"""The page allocator: compiled where the installation built it, else its reference.

The environment variable AGENTCACHE_PURE_PYTHON, set to anything but 0, chooses the reference.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from agentcache.pools import pages_reference

__all__ = ["IS_COMPILED", "PageAllocator", "run_starts"]

IS_COMPILED = False
"""Whether the compiled allocator is in use."""

if TYPE_CHECKING or os.environ.get("AGENTCACHE_PURE_PYTHON", "0") != "0":
    PageAllocator = pages_reference.PageAllocator
    run_starts = pages_reference.run_starts
else:
    try:
        from agentcache.pools._pages import PageAllocator, run_starts

        IS_COMPILED = True
    except ImportError:  # no compiler when it was installed
        PageAllocator = pages_reference.PageAllocator
        run_starts = pages_reference.run_starts
