"""Dialogues of the protocol that `tiny-agent` learns: seeded, each with its right replies.

A dialogue has a system prompt, a list of tools that is drawn anew each time, and turns. A turn is a
question, whatever calls it takes with what the tools give back, and the answer. `KINDS` names the
kinds of turns. All of a reply follows from what stands before it, so a reply is right or it is not.

    >>> import random
    >>> dialogue = draw_dialogue(random.Random(1), num_turns=1)
    >>> [message["role"] for message in dialogue.messages][-1]
    'assistant'
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentcache.engine.tiny import words

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    Message = dict[str, Any]

__all__ = ["KINDS", "Dialogue", "Tool", "Turn", "draw_dialogue"]

_MAX_SIZE = 999_999
_CONSONANTS = "bcdfghjklmnprstvwz"


@dataclass(frozen=True, slots=True)
class Turn:
    """A question with all that answers it: `messages[start:stop]` of its dialogue."""

    kind: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Messages and tools in OpenAI's form; every assistant message is what should be said there."""

    tools: tuple[dict[str, Any], ...]
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as it is offered. use: what it is for: a sign, an attribute, or a word of ours."""

    use: str
    name: str
    parameters: tuple[str, ...]

    def schema(self) -> dict[str, Any]:
        """OpenAI's form of a function."""
        kind = "number" if self.use in _SIGNS else "string"
        properties = {name: {"type": kind} for name in self.parameters}
        parameters = {
            "type": "object",
            "properties": properties,
            "required": list(self.parameters),
        }
        return {
            "type": "function",
            "function": {"name": self.name, "description": "", "parameters": parameters},
        }


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, what it gives back, and the sentence that reports it."""

    tool: Tool
    arguments: dict[str, Any]
    result: str
    report: str
    failed: bool = False


@dataclass(slots=True)
class _Talk:
    """A dialogue while it is written: what was offered, said, and found out."""

    random: random.Random
    tools: list[Tool]
    messages: list[Message]
    thinks: bool
    code_word: str | None
    user: str | None = None
    names: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    facts: dict[tuple[str, str], str] = field(default_factory=dict)
    number: str | None = None  # what "that" means
    asked: tuple[str, str] | None = None  # attribute and name of the turn before
    num_calls: int = 0

    def tool(self, use: str) -> Tool | None:
        """The tool for a use, of signs and attributes also the general one."""
        fallback = "expression" if use in _SIGNS else "any"
        found = {tool.use: tool for tool in self.tools}
        return found.get(use) or (found.get(fallback) if use != "task" else None)

    def say(self, role: str, content: str, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})

    def ask(self, question: str) -> None:
        """A question, written with more or less care."""
        draw = self.random.random
        if draw() < 0.15:
            question = question.rstrip("?.!") or question
        if draw() < 0.15:
            question = question[0].lower() + question[1:]
        self.say("user", question)

    def call(self, *calls: _Call) -> None:
        """One message with calls, and a result for each."""
        ids = [f"call_{self.num_calls + i}" for i in range(len(calls))]
        self.num_calls += len(calls)
        forms = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.tool.name, "arguments": call.arguments},
            }
            for call_id, call in zip(ids, calls, strict=True)
        ]
        more: dict[str, Any] = {"tool_calls": forms}
        if self.thinks:
            names = " and ".join(call.tool.name for call in calls)
            more["reasoning_content"] = f"I use {names}."
        self.say("assistant", "", **more)
        for call_id, call in zip(ids, calls, strict=True):
            self.say("tool", call.result, tool_call_id=call_id)
            if not call.failed:
                self.results.append(call.result)


_SIGNS = {operation.sign: operation for operation in words.OPERATIONS}


def draw_dialogue(
    random: random.Random, *, num_turns: int, noise: int = 60, kinds: Sequence[str] = ()
) -> Dialogue:
    """A dialogue of `num_turns` turns.

    random: all that is drawn comes from it, so equal states give equal dialogues. noise: the most
    words of a system prompt that mean nothing here. kinds: those of `KINDS` to draw from, as often
    as they are named; by default all, by their weight. Raises KeyError for a kind not in `KINDS`.
    """
    talk = _begin(random, noise)
    names = list(kinds) or list(KINDS)
    weights = [1.0 if kinds else KINDS[name][0] for name in names]
    turns: list[Turn] = []
    while len(turns) < num_turns:
        kind = random.choices(names, weights)[0]
        start, asked, num_names = len(talk.messages), talk.asked, len(talk.names)
        if KINDS[kind][1](talk):
            turns.append(Turn(kind, start, len(talk.messages)))
            talk.asked = talk.asked if talk.asked is not asked else None
        else:
            talk.asked = asked
            del talk.names[num_names:]
            if kinds and not turns:  # what these kinds need may not have been drawn
                talk = _begin(random, noise)
    schemas = tuple(tool.schema() for tool in talk.tools)
    return Dialogue(schemas, tuple(talk.messages), tuple(turns))


def _begin(random: random.Random, noise: int) -> _Talk:
    parts, thinks, word = [], random.random() < 0.2, None
    if random.random() < 0.7:
        parts.append(random.choice(words.SYSTEM_PROMPTS))
    if thinks:
        parts.append(random.choice(words.THINKING_PROMPTS))
    if random.random() < 0.5:
        word = _name(random) if random.random() < 0.7 else _name(random).lower()
        parts.append(random.choice(words.CODE_WORD_GIVEN).format(word=word))
    if noise and random.random() < 0.25:
        parts.append(_noise(random, random.randint(3, noise)))
    random.shuffle(parts)
    talk = _Talk(random, _draw_tools(random), [], thinks, word)
    if parts:
        talk.say("system", " ".join(parts))
    return talk


def _draw_tools(random: random.Random) -> list[Tool]:
    """Some tools, in any order; now and then none."""
    tools: list[Tool] = []
    kind = random.random()
    if kind < 0.45:
        parameter = random.choice(words.EXPRESSION_PARAMETERS)
        tools.append(Tool("expression", random.choice(words.CALCULATORS), (parameter,)))
    elif kind < 0.75:
        operands = random.choice(words.OPERAND_PARAMETERS)
        for operation in words.OPERATIONS:
            if random.random() < 0.7:
                tools.append(Tool(operation.sign, random.choice(operation.tools), operands))
    for attribute in random.sample(list(words.ATTRIBUTES), random.choice((0, 1, 1, 2, 2, 3, 4))):
        name = random.choice(words.FINDERS).format(attribute=attribute)
        tools.append(Tool(attribute, name, (random.choice(words.VALUE_PARAMETERS),)))
    if random.random() < 0.25:
        name = random.choice(words.GENERIC_FINDERS)
        tools.append(Tool("any", name, (random.choice(words.VALUE_PARAMETERS),)))
    for name, parameters in random.sample(words.DISTRACTORS, random.choice((0, 0, 0, 1, 2))):
        tools.append(Tool("none", name, parameters))
    if random.random() < 0.2:
        tools.append(Tool("task", "task", ("description", "subagent_type")))
    random.shuffle(tools)
    return tools if random.random() < 0.94 else []


def _noise(random: random.Random, num_words: int) -> str:
    """Sentences of words that mean nothing here."""
    text, left = [], num_words
    while left > 0:
        length = min(left, random.randint(3, 12))
        sentence = [
            random.choice(words.NOISE) if random.random() < 0.8 else _made_up(random).lower()
            for _ in range(length)
        ]
        text.append(" ".join(sentence).capitalize() + random.choice((".", ".", ".", ":", "\n")))
        left -= length
    return " ".join(text)


def _made_up(random: random.Random) -> str:
    """A word nobody knows, to be copied."""

    def syllable() -> str:
        letters = (_CONSONANTS, "aeiou", ("", "", *"nrlst"))
        return "".join(str(random.choice(pool)) for pool in letters)

    return "".join(syllable() for _ in range(random.choice((1, 2, 2, 3)))).capitalize()


def _name(random: random.Random) -> str:
    draw = random.random()
    name = random.choice(words.NAMES) if draw < 0.45 else _made_up(random)
    if draw > 0.93:
        name += " " + _made_up(random)
    elif draw > 0.88:
        name += str(random.randint(1, 99))
    return name.lower() if draw < 0.06 else name


def _some_name(talk: _Talk) -> str:
    """A name to ask for; at times one that was asked for before."""
    if talk.names and talk.random.random() < 0.2:
        return talk.random.choice(talk.names)
    return _name(talk.random)


def _operand(random: random.Random) -> str:
    return str(random.randint(0, random.choice((9, 99, 99, 999))))


# Arithmetic


def _compute(sign: str, a: str, b: str) -> str | None:
    """What a calculator answers; None where it would be long, or nothing."""
    left, right = float(a), float(b)
    if sign == "/" and right == 0:
        return None
    value = {
        "+": left + right,
        "-": left - right,
        "*": left * right,
        "/": left / (right or 1),
    }[sign]
    value = round(value, 2)
    return _text_of(value) if abs(value) <= _MAX_SIZE else None


def _text_of(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)


def _number_of(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def _arithmetic_call(talk: _Talk, sign: str, a: str, b: str) -> _Call | None:
    tool, result = talk.tool(sign), _compute(sign, a, b)
    if tool is None or result is None:
        return None
    if tool.use == "expression":
        arguments: dict[str, Any] = {tool.parameters[0]: f"{a} {sign} {b}"}
    else:
        first, second = tool.parameters
        arguments = {first: _number_of(a), second: _number_of(b)}
    return _Call(tool, arguments, result, f"{a} {sign} {b} is {result}.")


def _ask_arithmetic(talk: _Talk) -> tuple[str, _Call] | None:
    operation = talk.random.choice(words.OPERATIONS)
    a, b = _operand(talk.random), _operand(talk.random)
    call = _arithmetic_call(talk, operation.sign, a, b)
    if call is None:
        return None
    return talk.random.choice(operation.asks).format(a=a, b=b), call


# Look-ups


def _value(talk: _Talk, attribute: str, name: str) -> str:
    """What is so throughout this dialogue."""
    fact = (attribute, name)
    if fact not in talk.facts:
        random = talk.random
        if words.ATTRIBUTES.get(attribute, (random.random() < 0.5,))[0]:
            value = str(random.randint(-20, 40) if attribute == "temperature" else 0)
            if value == "0":
                value = str(random.randint(1, random.choice((9, 99, 999, 9999))))
        else:
            value = random.choice(words.WORD_VALUES) if random.random() < 0.5 else _name(random)
        talk.facts[fact] = value
    return talk.facts[fact]


def _lookup_call(talk: _Talk, attribute: str, name: str) -> _Call | None:
    tool = talk.tool(attribute)
    if tool is None:
        return None
    value = _value(talk, attribute, name)
    query = name if tool.use == attribute else f"{attribute} of {name}"
    report = f"The {attribute} of {name} is {value}."
    return _Call(tool, {tool.parameters[0]: query}, value, report)


def _some_attribute(talk: _Talk, *, numeric: bool = False) -> str:
    """One to ask for: as a rule one that a tool is there for."""
    offered = [tool.use for tool in talk.tools if tool.use in words.ATTRIBUTES]
    pool = offered if offered and talk.random.random() < 0.85 else list(words.ATTRIBUTES)
    pool = [name for name in pool if words.ATTRIBUTES[name][0]] if numeric else pool
    return talk.random.choice(pool or ["height"])


def _attribute_question(talk: _Talk, attribute: str, name: str) -> str:
    own = words.ATTRIBUTES[attribute][1]
    pool = own if own and talk.random.random() < 0.4 else words.QUESTIONS
    return talk.random.choice(pool).format(attribute=attribute, name=name)


def _ask_lookup(talk: _Talk) -> tuple[str, _Call] | None:
    name = _some_name(talk)
    general = talk.tool("any")
    if general is not None and talk.random.random() < 0.35:
        value = _value(talk, "", name)
        question = talk.random.choice(words.GENERIC_QUESTIONS).format(name=name)
        report = f"For {name} I found {value}."
        call: _Call | None = _Call(general, {general.parameters[0]: name}, value, report)
    else:
        attribute = _some_attribute(talk)
        question = _attribute_question(talk, attribute, name)
        call = _lookup_call(talk, attribute, name)
        if call is not None:
            talk.asked = (attribute, name)
    if call is None:
        return None
    talk.names.append(name)
    return question, call


# Turns: each writes one to the talk and says so, or finds that it does not fit here.


def _finish(talk: _Talk, *calls: _Call) -> bool:
    """Call at once what is independent, then report."""
    talk.call(*calls)
    return _report(talk, *calls)


def _report(talk: _Talk, *calls: _Call) -> bool:
    talk.say("assistant", " ".join(call.report for call in calls))
    last = calls[-1]
    is_number = last.result.lstrip("-").replace(".", "", 1).isdigit()
    talk.number = last.result if is_number and len(calls) == 1 and not last.failed else None
    return True


def _arithmetic(talk: _Talk) -> bool:
    drawn = _ask_arithmetic(talk)
    if drawn is None:
        return False
    talk.ask(drawn[0])
    return _finish(talk, drawn[1])


def _lookup(talk: _Talk) -> bool:
    drawn = _ask_lookup(talk)
    if drawn is None:
        return False
    talk.ask(drawn[0])
    return _finish(talk, drawn[1])


def _follow_up(talk: _Talk) -> bool:
    """A question that means the turn before by "that", "it" or "and"."""
    asked = talk.asked
    if asked is not None and talk.random.random() < 0.5:
        return _follow_up_lookup(talk, *asked)
    if talk.number is None:
        return False
    operation, b = talk.random.choice(words.OPERATIONS), _operand(talk.random)
    call = _arithmetic_call(talk, operation.sign, talk.number, b)
    if call is None:
        return False
    talk.ask(talk.random.choice(operation.follow_ups).format(b=b))
    return _finish(talk, call)


def _follow_up_lookup(talk: _Talk, attribute: str, name: str) -> bool:
    if talk.random.random() < 0.6:
        name = _some_name(talk)
        question = talk.random.choice(words.SAME_ATTRIBUTE).format(name=name)
    else:
        attribute = _some_attribute(talk)
        question = talk.random.choice(words.SAME_NAME).format(attribute=attribute)
    call = _lookup_call(talk, attribute, name)
    if call is None:
        return False
    talk.asked = (attribute, name)
    talk.names.append(name)
    talk.ask(question)
    return _finish(talk, call)


def _chain(talk: _Talk) -> bool:
    """Look something up, then compute with it: the second call needs the first one's result."""
    attribute, name = _some_attribute(talk, numeric=True), _some_name(talk)
    operation, b = talk.random.choice(words.OPERATIONS), _operand(talk.random)
    first = _lookup_call(talk, attribute, name)
    if first is None or not words.ATTRIBUTES[attribute][0]:
        return False
    second = _arithmetic_call(talk, operation.sign, first.result, b)
    if second is None:
        return False
    phrase = talk.random.choice(operation.of_value)
    talk.ask(phrase.format(value=f"the {attribute} of {name}", b=b))
    talk.names.append(name)
    if talk.random.random() < 0.1:
        return _finish(talk, _failing(talk, first))
    talk.call(first)
    return _finish(talk, second)


def _parallel(talk: _Talk) -> bool:
    """Two questions in one, answered by two calls in one message."""
    attribute, name, other = _some_attribute(talk), _some_name(talk), _some_name(talk)
    first = _lookup_call(talk, attribute, name)
    second = _lookup_call(talk, attribute, other)
    if first is not None and second is not None and name != other and talk.random.random() < 0.4:
        pair = talk.random.choice(
            ("What is the {0} of {1} and of {2}?", "Compare the {0} of {1} and {2}.")
        )
        question = pair.format(attribute, name, other)
        talk.names += [name, other]
    else:
        before = talk.random.choice((_ask_arithmetic, _ask_lookup))(talk)
        after = talk.random.choice((_ask_arithmetic, _ask_lookup))(talk)
        if before is None or after is None:
            return False
        (one, first), (two, second) = before, after
        question = f"{one} {two}" if one[-1] in "?.!" else f"{one}. {two}"
    talk.asked = None
    if talk.random.random() < 0.08:
        second = _failing(talk, second)
    talk.ask(question)
    return _finish(talk, first, second)


def _failing(talk: _Talk, call: _Call) -> _Call:
    """The same call, if the tool fails."""
    message = talk.random.choice(words.ERRORS)
    if talk.random.random() < 0.3:
        message += " " + _made_up(talk.random)
    result = talk.random.choice(("error: {}", "Error: {}")).format(message)
    return _Call(call.tool, call.arguments, result, f"The tool failed: {message}.", failed=True)


def _error(talk: _Talk) -> bool:
    drawn = talk.random.choice((_ask_arithmetic, _ask_lookup))(talk)
    if drawn is None:
        return False
    talk.asked = None
    talk.ask(drawn[0])
    return _finish(talk, _failing(talk, drawn[1]))


def _not_offered(talk: _Talk) -> bool:
    """A question for which no tool is there."""
    random = talk.random
    if random.random() < 0.4:
        operation = random.choice(words.OPERATIONS)
        if talk.tool(operation.sign) is not None:
            return False
        a, b = _operand(random), _operand(random)
        question = random.choice(operation.asks).format(a=a, b=b)
    else:
        attribute = random.choice(list(words.ATTRIBUTES))
        if talk.tool(attribute) is not None:
            return False
        question = _attribute_question(talk, attribute, _name(random))
    talk.ask(question)
    talk.number = None
    talk.say("assistant", "I have no tool for that.")
    return True


def _recall(talk: _Talk) -> bool:
    """The code word of the system prompt, however long ago."""
    talk.ask(talk.random.choice(words.CODE_WORD_QUESTIONS))
    word = talk.code_word
    talk.say(
        "assistant", "I was given no code word." if word is None else f"The code word is {word}."
    )
    return True


def _memory(talk: _Talk) -> bool:
    """What was said or found out earlier."""
    random, which = talk.random, talk.random.choice(("first", "last"))
    draw = random.random()
    if draw < 0.3 and talk.user is None:
        talk.user = _name(random)
        talk.ask(random.choice(words.NAME_GIVEN).format(name=talk.user))
        answer = f"Hello, {talk.user}."
    elif draw < 0.5:
        talk.ask(random.choice(words.NAME_QUESTIONS))
        answer = "I do not know your name." if talk.user is None else f"You are {talk.user}."
    elif draw < 0.75:
        noun = random.choice(("name", "city", "place", "thing"))
        talk.ask(f"What was the {which} {noun}?")
        found = talk.names[0 if which == "first" else -1] if talk.names else None
        answer = "You have asked for none." if found is None else f"The {which} was {found}."
    else:
        talk.ask(f"What was the {which} result?")
        found = talk.results[0 if which == "first" else -1] if talk.results else None
        answer = "There was none." if found is None else f"The {which} result was {found}."
    talk.say("assistant", answer)
    return True


def _chat(talk: _Talk) -> bool:
    if talk.random.random() < 0.4:
        talk.ask(talk.random.choice(words.TOOL_QUESTIONS))
        names = [tool.name for tool in talk.tools]
        answer = f"I have {', '.join(names)}." if names else "I have no tools."
    else:
        questions, answer = talk.random.choice(words.CHAT)
        talk.ask(talk.random.choice(questions))
    talk.say("assistant", answer)
    return True


def _delegate(talk: _Talk) -> bool:
    """Work that goes to a sub-agent, or to two at once."""
    tool = talk.tool("task")
    if tool is None:
        return False
    asked, calls = [], []
    for _ in range(talk.random.choice((1, 1, 2))):
        aside = _Talk(talk.random, _draw_tools(talk.random), [], thinks=False, code_word=None)
        drawn = talk.random.choice((_ask_arithmetic, _ask_lookup))(aside)
        if drawn is None or drawn[0][0].isdigit():
            return False
        helper = talk.random.choice(words.HELPERS)
        if talk.random.random() < 0.3:
            helper = _made_up(talk.random).lower()
        question, report = drawn[0], drawn[1].report
        asked.append(talk.random.choice(words.DELEGATIONS).format(helper=helper, question=question))
        arguments = {"description": question, "subagent_type": helper}
        calls.append(_Call(tool, arguments, report, report))
    talk.say("user", " ".join(asked))
    before = list(talk.results)
    _finish(talk, *calls)
    talk.results = before  # a helper's sentence is no result to ask for
    return True


def _unknown(talk: _Talk) -> bool:
    """Anything else: to say so is all that is right."""
    random = talk.random
    subject = random.choice(words.UNKNOWN_SUBJECTS) if random.random() < 0.7 else _made_up(random)
    question = random.choice(words.UNKNOWN).format(
        x=subject, y=random.choice(words.WORD_VALUES), d=random.randint(0, 9)
    )
    if random.random() < 0.15:
        question = _noise(random, random.randint(2, 12)).strip()
    talk.ask(question)
    talk.say("assistant", "I do not know.")
    return True


KINDS: dict[str, tuple[float, Callable[[_Talk], bool]]] = {
    "arithmetic": (1.8, _arithmetic),
    "look-up": (3.0, _lookup),
    "two calls in a row": (2.5, _chain),
    "two calls at once": (1.5, _parallel),
    "follow-up": (7.0, _follow_up),
    "recall of the code word": (0.7, _recall),
    "memory of earlier turns": (1.1, _memory),
    "tool error": (0.8, _error),
    "tool not offered": (2.4, _not_offered),
    "no tool needed": (1.0, _chat),
    "handed to a helper": (3.0, _delegate),
    "outside the protocol": (0.6, _unknown),
}
"""Kinds of turns, how often they are drawn, and what writes one."""
