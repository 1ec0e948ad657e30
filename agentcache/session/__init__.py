"""The session handle that callers hold, and what its calls return."""

from agentcache.session.handle import Session
from agentcache.session.options import CallOptions
from agentcache.session.streams import Delta, TurnStream
from agentcache.session.turn import MissReport, Turn

__all__ = ["CallOptions", "Delta", "MissReport", "Session", "Turn", "TurnStream"]
