"""OpenAI's client against a server in this process: a session by its id, and what it reuses."""

from openai import OpenAI

from agentcache import Runtime
from agentcache.integrations.server import ServerConfig, serving

with Runtime.load("tiny-hybrid") as rt, serving(rt, ServerConfig(port=0)) as url:
    client = OpenAI(base_url=f"{url}/v1", api_key="not needed on loopback")
    messages = [
        {"role": "system", "content": "You are a careful agent. " * 20},
        {"role": "user", "content": "Where do we begin?"},
    ]
    for question in ("And then?", "And after that?", None):
        reply = client.chat.completions.create(
            model="tiny-hybrid",
            messages=messages,
            max_tokens=16,
            extra_body={"session_id": "demo"},
        )
        usage = reply.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens
        print(cached, "of", usage.prompt_tokens, "prompt tokens reused")
        if question is not None:
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            messages.append({"role": "user", "content": question})
    assert cached > 100

    # the same model remembers a conversation itself
    first = client.responses.create(model="tiny-hybrid", input="Hello", max_output_tokens=8)
    second = client.responses.create(
        model="tiny-hybrid", input="More", previous_response_id=first.id, max_output_tokens=8
    )
    assert second.usage is not None
    print(second.usage.input_tokens_details.cached_tokens, "tokens of the first response reused")
    client.close()
