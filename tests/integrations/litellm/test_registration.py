"""Which models litellm knows, when they are loaded, and when they are closed."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import litellm
import pytest
from litellm.proxy.types_utils.utils import get_instance_fn

from agentcache import CacheConfig, ConfigError, Runtime
from agentcache.integrations import litellm_provider

if TYPE_CHECKING:
    from pathlib import Path

HELLO = [{"role": "user", "content": "Hi"}]


def small_runtime(seed: int = 0) -> Runtime:
    return Runtime.load("tiny-hybrid", cache=CacheConfig(budget="16MiB"), seed=seed)


def say(model: str) -> str:
    reply = litellm.completion(f"agentcache/{model}", HELLO, max_tokens=3, session_id="s")
    return str(reply.choices[0].message.content)


def test_registering_twice_changes_nothing(runtime: Runtime) -> None:
    first = litellm_provider.register(runtime)
    assert litellm_provider.register(runtime) is first
    assert litellm_provider.register() is first
    handlers = [i for i in litellm.custom_provider_map if i["provider"] == "agentcache"]
    assert len(handlers) == 1
    assert first.models == ("tiny-agent",)
    assert say("tiny-agent")


def test_a_taken_name_takes_no_other_runtime(runtime: Runtime) -> None:
    with pytest.raises(ConfigError, match="agentcache/tiny-agent is registered"):
        litellm_provider.register(small_runtime)


def test_two_models_answer_for_themselves(runtime: Runtime) -> None:
    with small_runtime() as other:
        litellm_provider.register(other, model="other")
        assert say("tiny-agent") == say("other")
        for each in (runtime, other):
            assert [record.id for record in each.registry if not record.closed] == ["s"]
        litellm_provider.unregister("other")
        assert [record for record in other.registry if not record.closed] == []
        with pytest.raises(litellm.NotFoundError):
            say("other")
        assert say("tiny-agent")


def test_a_runtime_is_made_once_when_it_is_first_needed(runtime: Runtime) -> None:
    made: list[Runtime] = []

    def make() -> Runtime:
        made.append(small_runtime())
        return made[-1]

    litellm_provider.register(make, model="lazy")
    assert made == []
    with ThreadPoolExecutor(4) as pool:
        said = set(pool.map(say, ["lazy"] * 4))
    assert len(said) == 1
    assert len(made) == 1
    litellm_provider.unregister("lazy")
    with pytest.raises(Exception, match="closed"):
        made[0].stats()


def test_the_callers_runtime_stays_open(runtime: Runtime) -> None:
    litellm_provider.unregister()
    assert runtime.stats()["running"]["requests"] == 0
    with pytest.raises(litellm.BadRequestError):
        say("tiny-agent")


def test_other_providers_of_the_host_stay(runtime: Runtime) -> None:
    theirs = {"provider": "theirs", "custom_handler": litellm.CustomLLM()}
    litellm.custom_provider_map.append(theirs)
    try:
        litellm_provider.unregister()
        assert litellm.custom_provider_map == [theirs]
    finally:
        litellm.custom_provider_map.remove(theirs)


def test_litellm_knows_what_the_model_can_do(runtime: Runtime) -> None:
    name = "agentcache/tiny-agent"
    assert litellm.get_model_info(name)["max_input_tokens"] == runtime.max_len
    assert litellm.supports_function_calling(name)
    reply = litellm.completion(name, HELLO, max_tokens=1)
    assert litellm.completion_cost(reply, model=name) == 0
    assert "tools" in (litellm.get_supported_openai_params(name) or [])


def test_a_proxy_finds_the_handler_beside_its_configuration(
    runtime: Runtime, tmp_path: Path
) -> None:
    (tmp_path / "agentcache_models.py").write_text(
        "from agentcache.integrations.litellm_provider import register\n"
        "handler = register(model='proxied')\n"
    )
    config = str(tmp_path / "config.yaml")
    handler = get_instance_fn("agentcache_models.handler", config_file_path=config)
    assert handler is litellm_provider.register(runtime)
    assert handler.models == ("tiny-agent", "proxied")


def test_a_router_keeps_the_session(runtime: Runtime) -> None:
    params = {"model": "agentcache/tiny-agent"}
    router = litellm.Router(model_list=[{"model_name": "m", "litellm_params": params}])
    for _ in range(2):
        reply = router.completion(
            model="m", messages=HELLO, max_tokens=3, metadata={"session_id": "routed"}
        )
    assert reply.usage.prompt_tokens_details.cached_tokens > 0
    assert runtime.session("routed").tips
