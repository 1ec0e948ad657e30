"""One conversation, forked at its third turn into two that know nothing of each other."""

import json

from agentcache import Runtime, Session

PRICES = {"Tea": "4", "Lamp": "39"}
parameters = {"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}
TOOLS = [{"type": "function", "function": {"name": "price", "parameters": parameters}}]


def price_of(item: str) -> str:
    """What the tool gives back."""
    return PRICES.get(item, "error: not found")


def ask(session: Session, question: str) -> str:
    """The answer to a question; what each reply cost is printed."""
    new: list[dict[str, object]] = [{"role": "user", "content": question}]
    while True:
        turn = session.chat(new, tools=None if session.messages else TOOLS, max_new_tokens=64)
        said = turn.message
        calls = said.get("tool_calls") or []
        text = said["content"] or ", ".join(f"calls {c['function']['name']}" for c in calls)
        cached, computed = turn.usage.cached_tokens, turn.usage.computed_tokens
        print(f"{session.id:>6}  {cached:4} cached {computed:3} computed  {text}")
        if not calls:
            return str(said["content"])
        items = [json.loads(call["function"]["arguments"])["item"] for call in calls]
        new = [
            {"role": "tool", "tool_call_id": call["id"], "content": price_of(item)}
            for call, item in zip(calls, items, strict=True)
        ]


with Runtime.load("tiny-agent") as rt, rt.session("trunk") as trunk:
    ask(trunk, "Hello, I am Ada.")
    ask(trunk, "How much is Tea?")
    with trunk.fork("branch") as branch:  # shares all there is, copies nothing
        assert ask(trunk, "And Lamp?") == "The price of Lamp is 39."
        assert ask(branch, "And Chair?") == "The tool failed: not found."
        assert ask(trunk, "What was the last thing?") == "The last was Lamp."
        assert ask(branch, "What was the last thing?") == "The last was Chair."
        assert ask(branch, "What is my name?") == "You are Ada."
