"""Several agents at once on one runtime: they stream, and their decode steps share passes."""

import asyncio

from agentcache import Runtime, TurnStream


async def agent(rt: Runtime, name: str) -> int:
    """One agent's call; the number of deltas that came."""
    async with asyncio.timeout(60):
        with rt.session(name) as session:
            messages = [{"role": "user", "content": f"I am {name}. Say something."}]
            stream = await session.achat(messages, max_new_tokens=32, stream=True)
            assert isinstance(stream, TurnStream)
            deltas = [delta async for delta in stream]
            print(name, repr(stream.turn.text[:40]))
            return len(deltas)


async def main() -> None:
    """Run four agents side by side."""
    with Runtime.load("tiny-hybrid") as rt:
        counts = await asyncio.gather(*(agent(rt, f"agent-{n}") for n in range(4)))
        passes = rt.stats()["passes"]["decode"]
        print(sum(counts), "deltas from", passes, "decode passes")
        assert passes < sum(counts)


asyncio.run(main())
