"""What a server is started with."""

from __future__ import annotations

from dataclasses import dataclass, field

from agentcache import ConfigError
from agentcache.integrations.server.auth import ApiKeys, is_loopback

__all__ = ["ServerConfig"]

_LEAST = {
    "max_tokens": 1,
    "max_queue": 0,
    "max_body_bytes": 1,
    "max_sessions": 1,
    "max_response_bytes": 0,
}


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of a server that check themselves. Raises ConfigError.

    model: the name it is served under. host, port: where it listens; 0 takes a free port.
    keys: who may ask; needed for any host but loopback.
    max_tokens: length of a reply where the request names none.
    max_queue: requests that may wait beside those that run; more get 429.
    max_body_bytes: largest request body. request_timeout_s: longest time a request may take.
    grace_s: how long running requests may go on once the server is told to end.
    max_sessions: named sessions kept; the one unused for longest is closed for a new one.
    max_response_bytes: what `/v1/responses` may remember, of all tenants together.
    ping_s: a stream that is silent for so long gets a comment, so that nobody on the way hangs up.
    """

    model: str = "tiny-agent"
    host: str = "127.0.0.1"
    port: int = 8000
    keys: ApiKeys = field(default_factory=ApiKeys)
    max_tokens: int = 1024
    max_queue: int = 64
    max_body_bytes: int = 32 * 2**20
    request_timeout_s: float = 600.0
    grace_s: float = 30.0
    max_sessions: int = 10_000
    max_response_bytes: int = 256 * 2**20
    ping_s: float = 15.0

    def __post_init__(self) -> None:
        if not self.keys and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host!r} can be reached from elsewhere; give an API key "
                "(--api-key KEY), or listen on 127.0.0.1"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; give 0 to 65535")
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least {least}")
        for name in ("request_timeout_s", "ping_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; give more than 0 seconds")
        if not self.grace_s >= 0:
            raise ConfigError(f"grace_s is {self.grace_s}; give at least 0 seconds")

    @property
    def is_open(self) -> bool:
        """Whether everybody who reaches it may ask."""
        return not self.keys
