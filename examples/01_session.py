"""A session handle across turns: each turn computes only what is new."""

from agentcache import CacheConfig, Runtime

SYSTEM = {"role": "system", "content": "You repair programs. Answer with one shell command."}

with Runtime.load("tiny-hybrid", cache=CacheConfig(budget="128MiB")) as rt:
    with rt.session("django-11099") as session:
        messages = [SYSTEM, {"role": "user", "content": "The validator accepts a newline."}]
        turn = session.chat(messages, max_new_tokens=24)
        for output in ("validators.py:11: r'^[\\w.@+-]+$'", "1 failed, 12 passed"):
            turn = session.chat([{"role": "tool", "content": output}], max_new_tokens=24)
            usage = turn.usage
            print(f"{usage.cached_tokens} of {usage.prompt_tokens} prompt tokens reused")
            assert usage.computed_tokens < 40
    print("hits:", rt.stats()["hits"])
