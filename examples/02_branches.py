"""Fork a session to try two ways, rewind it to take one back, and read why a call missed."""

from agentcache import Runtime


def ask(text: str) -> list[dict[str, str]]:
    """One user message."""
    return [{"role": "user", "content": text}]


with Runtime.load("tiny-hybrid") as rt:
    main = rt.session("main")
    main.chat(ask("Find the bug in parser.py. " * 10), max_new_tokens=16)
    branches = [main.fork() for _ in range(3)]
    for number, branch in enumerate(branches):
        turn = branch.chat(ask(f"Try way {number}."), max_new_tokens=8)
        print(branch.id, "computed", turn.usage.computed_tokens, "tokens")
        assert turn.usage.computed_tokens < 20

    main.chat(ask("Rewrite everything."), max_new_tokens=8)
    main.rewind(to_turn=1)
    turn = main.chat(ask("No: change one line."), max_new_tokens=8)
    assert turn.usage.computed_tokens < 30

    edited = [{**main.messages[0], "content": "Find the bug in lexer.py."}, *main.messages[1:]]
    turn = main.complete(edited, max_new_tokens=8)
    assert turn.miss is not None
    print(
        "miss:", turn.miss.reason, "at token", turn.miss.at_token, "in message", turn.miss.message
    )
    print("  expected", repr(turn.miss.expected), "got", repr(turn.miss.got))
