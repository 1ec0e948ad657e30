"""An HTTP server over one runtime: OpenAI's and Anthropic's forms, and the sessions themselves.

    from agentcache import Runtime
    from agentcache.integrations.server import ServerConfig, serving

    with Runtime.load("tiny-agent") as rt, serving(rt, ServerConfig(port=0)) as url:
        ...                                                  # clients of OpenAI's API: f"{url}/v1"

Needs `pip install 'agentcache[server]'`; on the command line it is `agentcache serve`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentcache.integrations.server.auth import ApiKeys
    from agentcache.integrations.server.config import ServerConfig
    from agentcache.integrations.server.lifecycle import make_server, serve, serving

__all__ = ["ApiKeys", "ServerConfig", "make_server", "serve", "serving"]

_HOMES = {"ApiKeys": "auth", "ServerConfig": "config"}


def __getattr__(name: str) -> object:
    # the command line imports a module of this package where aiohttp may be missing
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOMES.get(name, 'lifecycle')}")
    return getattr(module, name)
