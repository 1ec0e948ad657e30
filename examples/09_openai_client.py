"""OpenAI's client against a server in this process: a session by its id, and what it reuses."""

from openai import OpenAI

from agentcache import Runtime
from agentcache.integrations.server import ServerConfig, serving

operands = {"a": {"type": "number"}, "b": {"type": "number"}}
parameters = {"type": "object", "properties": operands, "required": ["a", "b"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name in ("add", "multiply")
]

with Runtime.load("tiny-agent") as rt, serving(rt, ServerConfig(port=0)) as url:
    client = OpenAI(base_url=f"{url}/v1", api_key="not needed on loopback")
    messages = [
        {"role": "system", "content": "You are a careful agent. The code word is Heron."},
        {"role": "user", "content": "What is 12 times 34?"},
    ]
    reply = client.chat.completions.create(
        model="tiny-agent", messages=messages, tools=TOOLS, extra_body={"session_id": "demo"}
    )
    (call,) = reply.choices[0].message.tool_calls or ()
    print(call.function.name, call.function.arguments)
    assert call.function.arguments == '{"a": 12, "b": 34}'
    messages.append(reply.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "408"})
    for question, answer in (
        (None, "12 * 34 is 408."),
        ("What is the code word?", "The code word is Heron."),
    ):
        if question is not None:
            messages.append({"role": "user", "content": question})
        reply = client.chat.completions.create(
            model="tiny-agent",
            messages=messages,
            tools=TOOLS,
            extra_body={"session_id": "demo"},
        )
        cached = reply.usage.prompt_tokens_details.cached_tokens
        print(f"{cached} of {reply.usage.prompt_tokens} cached:", reply.choices[0].message.content)
        assert reply.choices[0].message.content == answer
        messages.append(reply.choices[0].message)

    # the same model remembers a conversation itself
    first = client.responses.create(model="tiny-agent", input="My name is Ada.")
    second = client.responses.create(
        model="tiny-agent", input="What is my name?", previous_response_id=first.id
    )
    print(second.usage.input_tokens_details.cached_tokens, "cached:", second.output_text)
    assert second.output_text == "You are Ada."
    client.close()
