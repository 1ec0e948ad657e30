"""litellm: `agentcache/<model>` becomes a model of litellm's, with a session behind each call.

>>> import litellm                                                          # doctest: +SKIP
>>> from agentcache.integrations import litellm_provider                    # doctest: +SKIP
>>> litellm_provider.register()                                             # doctest: +SKIP
>>> litellm.completion(                                                     # doctest: +SKIP
...     "agentcache/tiny-agent", [{"role": "user", "content": "Hi"}], session_id="thread-1"
... )
"""

from agentcache.integrations.litellm_provider.provider import AgentCacheLLM, register, unregister

__all__ = ["AgentCacheLLM", "register", "unregister"]
