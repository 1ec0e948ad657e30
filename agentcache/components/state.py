"""STATE: a recurrent state. It can be resumed at the one position where it was saved."""

from __future__ import annotations

from agentcache.components.base import SnapshotComponent
from agentcache.types import Kind

__all__ = ["StateComponent"]


class StateComponent(SnapshotComponent):
    """The recurrent and convolution states of all layers that keep one."""

    kind = Kind.STATE
