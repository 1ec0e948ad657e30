"""litellm in three lines: a model of litellm's with a session behind each call."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or litellm asks the network for prices

import litellm

from agentcache.integrations import litellm_provider

litellm_provider.register()
messages = [{"role": "user", "content": "The validator accepts a newline. Where do I look?"}]
reply = litellm.completion("agentcache/tiny-hybrid", messages, session_id="fix-1", max_tokens=16)

for question in ("And where are its tests?", "Which of them fails?"):
    messages += [reply.choices[0].message, {"role": "user", "content": question}]
    known = reply.usage.total_tokens
    reply = litellm.completion(
        "agentcache/tiny-hybrid", messages, session_id="fix-1", max_tokens=16
    )
    cached = reply.usage.prompt_tokens_details.cached_tokens
    print(f"{cached} of {reply.usage.prompt_tokens} prompt tokens reused")
    assert cached >= known - 1  # all but the last sampled token, which was never computed

tools = [
    {
        "type": "function",
        "function": {
            "name": "open_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"enum": ["validators.py", "tests.py"]}},
                "required": ["path"],
                "additionalProperties": False,
            },
        },
    }
]
chunks = litellm.completion(
    "agentcache/tiny-hybrid",
    messages,
    tools=tools,
    tool_choice="required",  # kept by a grammar
    max_tokens=64,
    stream=True,
)
for chunk in chunks:
    for call in chunk.choices[0].delta.tool_calls or ():
        print("calls", call.function.name, call.function.arguments)

litellm_provider.unregister()
