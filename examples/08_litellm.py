"""litellm in three lines: a model of litellm's with a session behind each call."""

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or litellm asks the network for prices

import litellm

from agentcache.integrations import litellm_provider

litellm_provider.register()
messages = [{"role": "user", "content": "Hello, I am Ada."}]
reply = litellm.completion("agentcache/tiny-agent", messages, session_id="ada")

parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
weather = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}


def ask(question: str) -> str:
    """The answer, after the look-ups it takes."""
    messages.append({"role": "user", "content": question})
    while True:
        reply = litellm.completion(
            "agentcache/tiny-agent", messages, session_id="ada-2", tools=[weather]
        )
        message, usage = reply.choices[0].message, reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"{cached} of {usage.prompt_tokens} prompt tokens reused")
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            result = {"Oslo": "snow", "Lima": "sunny"}.get(city, "error: not found")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


messages.append(reply.choices[0].message)
for question, answer in (
    ("What is the weather in Oslo?", "The weather of Oslo is snow."),
    ("And Lima?", "The weather of Lima is sunny."),
    ("What is my name?", "You are Ada."),
):
    said = ask(question)
    print(question, "->", said)
    assert said == answer

chunks = litellm.completion(
    "agentcache/tiny-agent",
    [{"role": "user", "content": "Weather in Quito?"}],
    tools=[weather],
    stream=True,
)
for chunk in chunks:
    for call in chunk.choices[0].delta.tool_calls or ():
        print("calls", call.function.name, call.function.arguments)

litellm_provider.unregister()
