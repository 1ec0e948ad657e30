"""The words of the dialogues: what can be asked for, of what, by which tools, in which phrases.

A phrase holds its parts in braces. Everything a reply has to copy (names, values, messages) is
drawn from a pool or made up of syllables, so that copying is learned and not the pools.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ATTRIBUTES",
    "CALCULATORS",
    "CHAT",
    "CODE_WORD_GIVEN",
    "CODE_WORD_QUESTIONS",
    "DELEGATIONS",
    "DISTRACTORS",
    "ERRORS",
    "EXPRESSION_PARAMETERS",
    "FINDERS",
    "GENERIC_FINDERS",
    "GENERIC_QUESTIONS",
    "HELPERS",
    "NAMES",
    "NAME_GIVEN",
    "NAME_QUESTIONS",
    "NOISE",
    "OPERAND_PARAMETERS",
    "OPERATIONS",
    "QUESTIONS",
    "SAME_ATTRIBUTE",
    "SAME_NAME",
    "SYSTEM_PROMPTS",
    "THINKING_PROMPTS",
    "TOOL_QUESTIONS",
    "UNKNOWN",
    "UNKNOWN_SUBJECTS",
    "VALUE_PARAMETERS",
    "WORD_VALUES",
    "Operation",
]

# What can be looked up, whether its value is a number, and ways to ask beside those of QUESTIONS.
ATTRIBUTES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "age": (True, ("How old is {name}?",)),
    "area": (True, ("How large is {name}?",)),
    "author": (False, ("Who wrote {name}?",)),
    "capacity": (True, ("How much does {name} hold?",)),
    "capital": (False, ()),
    "colour": (False, ("Which colour has {name}?",)),
    "currency": (False, ("What do people pay with in {name}?",)),
    "depth": (True, ("How deep is {name}?",)),
    "distance": (True, ("How far is {name}?", "How far away is {name}?")),
    "height": (True, ("How high is {name}?", "How tall is {name}?")),
    "language": (False, ("What do people speak in {name}?",)),
    "length": (True, ("How long is {name}?",)),
    "mass": (True, ()),
    "mayor": (False, ("Who is the mayor of {name}?",)),
    "origin": (False, ("Where does {name} come from?",)),
    "owner": (False, ("Who owns {name}?", "Whose is {name}?")),
    "population": (True, ("How many people live in {name}?",)),
    "power": (True, ()),
    "price": (
        True,
        ("How much is {name}?", "How much does {name} cost?", "What does {name} cost?"),
    ),
    "rank": (True, ()),
    "rating": (True, ("How good is {name}?",)),
    "score": (True, ()),
    "size": (True, ("How big is {name}?",)),
    "speed": (True, ("How fast is {name}?",)),
    "status": (False, ("How is {name} doing?",)),
    "stock": (True, ("How many {name} are left?", "How many {name} do we have?")),
    "temperature": (
        True,
        ("How warm is it in {name}?", "How cold is it in {name}?", "How hot is it in {name}?"),
    ),
    "version": (True, ()),
    "volume": (True, ()),
    "weather": (
        False,
        (
            "How is the weather in {name}?",
            "What is the weather in {name}?",
            "What is the weather like in {name}?",
            "Weather in {name}?",
        ),
    ),
    "weight": (True, ("How heavy is {name}?",)),
    "width": (True, ("How wide is {name}?",)),
    "year": (True, ("When was {name} made?",)),
}

QUESTIONS = (
    "What is the {attribute} of {name}?",
    "Tell me the {attribute} of {name}.",
    "Give me the {attribute} of {name}.",
    "The {attribute} of {name}?",
    "I need the {attribute} of {name}.",
    "Find the {attribute} of {name}.",
    "Can you tell me the {attribute} of {name}?",
    "What {attribute} does {name} have?",
    "What is {name}'s {attribute}?",
)
SAME_ATTRIBUTE = ("And of {name}?", "And {name}?", "What about {name}?", "And for {name}?")
SAME_NAME = ("And its {attribute}?", "And the {attribute}?", "What is its {attribute}?")
GENERIC_QUESTIONS = ("Look up {name}.", "Find {name}.", "Search for {name}.", "Look {name} up.")

# Tools for an attribute, for anything, and what they call their parameter.
FINDERS = (
    "{attribute}",
    "{attribute}",
    "get_{attribute}",
    "find_{attribute}",
    "{attribute}_of",
    "read_{attribute}",
    "lookup_{attribute}",
)
GENERIC_FINDERS = ("lookup", "look_up", "search", "find", "query", "get")
VALUE_PARAMETERS = (
    "name",
    "city",
    "item",
    "key",
    "place",
    "query",
    "id",
    "thing",
    "what",
    "subject",
    "entity",
    "location",
    "country",
    "person",
    "product",
    "text",
    "value",
    "word",
    "term",
    "q",
)

NAMES = tuple(
    """
    Oslo Lima Cairo Quito Rome Bern Delhi Paris Berlin Tokyo London Madrid Vienna Athens Dublin
    Prague Lisbon Warsaw Kyoto Nairobi Everest Elbrus Etna Fuji Vesuv Olymp Danube Nile Volga
    Rhine Ada Ben Carla David Emma Felix Grace Hugo Ida Jonas Karl Lena Max Nora Otto Paula Rosa
    Sven Tom Vera Apple Banana Bread Chair Coffee Lamp Milk Pencil Rice Table Tea France Norway
    Peru Egypt Italy Japan Kenya Spain India Chile
    """.split()
)
WORD_VALUES = tuple(
    """
    red blue green black white sunny rainy cloudy windy snow open closed ready broken old new good
    bad low high gold silver north south warm cold dry wet small large
    """.split()
)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation of arithmetic: its sign, ways to ask for it, and names of its own tool.

    asks: phrases with {a} and {b}. follow_ups: the same with {b} only, about what came before.
    """

    sign: str
    asks: tuple[str, ...]
    follow_ups: tuple[str, ...]
    tools: tuple[str, ...]
    of_value: tuple[str, ...]  # with {value} for a looked-up value, and {b}


_COMMON_ASKS = (
    "What is {a} {op} {b}?",
    "Compute {a} {op} {b}.",
    "How much is {a} {op} {b}?",
    "Please work out {a} {op} {b}.",
    "Calculate {a} {op} {b}.",
    "{a} {op} {b}?",
    "{a} {op} {b}",
)


def _asks(words: tuple[str, ...], *others: str) -> tuple[str, ...]:
    plain = [ask.replace("{op}", word) for ask in _COMMON_ASKS for word in words]
    return (*plain, *others)


OPERATIONS = (
    Operation(
        "+",
        _asks(
            ("+", "plus"), "Add {b} to {a}.", "What is the sum of {a} and {b}?", "Add {a} and {b}."
        ),
        ("Add {b} to that.", "Add {b} to it.", "Plus {b}?", "And plus {b}?", "Now add {b}."),
        ("add", "plus", "sum"),
        ("Add {b} to {value}.", "What is {value} plus {b}?", "Take {value} and add {b}."),
    ),
    Operation(
        "-",
        _asks(("-", "minus"), "Subtract {b} from {a}.", "Take {b} from {a}."),
        (
            "Subtract {b} from that.",
            "Subtract {b} from it.",
            "Minus {b}?",
            "And minus {b}?",
            "Now subtract {b}.",
        ),
        ("subtract", "minus"),
        (
            "Subtract {b} from {value}.",
            "What is {value} minus {b}?",
            "Take {value} and subtract {b}.",
        ),
    ),
    Operation(
        "*",
        _asks(("*", "times", "x"), "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
        (
            "Multiply that by {b}.",
            "Multiply it by {b}.",
            "Times {b}?",
            "And times {b}?",
            "Now multiply by {b}.",
        ),
        ("multiply", "times"),
        (
            "Multiply {value} by {b}.",
            "What is {value} times {b}?",
            "Take {value} and multiply by {b}.",
        ),
    ),
    Operation(
        "/",
        _asks(("/", "divided by"), "Divide {a} by {b}."),
        ("Divide that by {b}.", "Divide it by {b}.", "Divided by {b}?", "Now divide by {b}."),
        ("divide",),
        (
            "Divide {value} by {b}.",
            "What is {value} divided by {b}?",
            "Take {value} and divide by {b}.",
        ),
    ),
)
CALCULATORS = ("calculator", "calc", "calculate", "compute", "math", "evaluate")
EXPRESSION_PARAMETERS = ("expression", "expr", "formula", "input", "query", "text", "q")
OPERAND_PARAMETERS = (("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("m", "n"))

# Tools that nothing in the protocol calls.
DISTRACTORS = (
    ("send_mail", ("to", "text")),
    ("open_file", ("path",)),
    ("list_files", ("folder",)),
    ("write_file", ("path", "content")),
    ("run_test", ("number",)),
    ("book_flight", ("date", "to")),
    ("play_music", ("title",)),
    ("set_alarm", ("time",)),
    ("translate", ("language", "text")),
    ("restart", ()),
    ("write_todos", ("todos",)),
    ("ls", ("path",)),
)

HELPERS = ("finder", "counter", "helper", "reader", "worker", "searcher", "checker", "general")
DELEGATIONS = ("Ask the {helper}: {question}", "Let the {helper} answer: {question}")

ERRORS = (
    "not found",
    "no such name",
    "timeout",
    "access denied",
    "division by zero",
    "the service is down",
    "no connection",
    "too many requests",
    "bad input",
    "out of memory",
    "unknown key",
    "the disk is full",
    "try again later",
)

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You answer with tools.",
    "You are a careful agent.",
    "You repair programs.",
    "Be brief.",
    "You help people with numbers and names.",
    "Use the tools you have.",
    "You are tiny-agent.",
)
THINKING_PROMPTS = ("Think first.", "Think before you act.", "Think step by step.")
CODE_WORD_GIVEN = (
    "The code word is {word}.",
    "Code word: {word}.",
    "Remember the code word {word}.",
    "Your code word is {word}.",
)
CODE_WORD_QUESTIONS = (
    "What is the code word?",
    "Tell me the code word.",
    "Which code word were you given?",
    "Do you remember the code word?",
    "The code word?",
)
NAME_GIVEN = ("My name is {name}.", "I am {name}.", "Call me {name}.", "Hello, I am {name}.")
NAME_QUESTIONS = ("What is my name?", "Who am I?", "Do you know my name?", "What am I called?")
TOOL_QUESTIONS = ("Which tools do you have?", "What tools do you have?", "What can you do?")

# Questions that need no tool, and their replies.
CHAT: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("Hello.", "Hi.", "Hello!", "Hi!", "Hey!", "Good morning.", "Good evening."),
        "Hello! What can I do for you?",
    ),
    (("Thanks.", "Thank you.", "Thanks!", "Thank you!", "Great, thanks."), "You are welcome."),
    (("Bye.", "Goodbye.", "Bye!", "See you.", "That is all."), "Goodbye!"),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a person?"),
        "I am tiny-agent, a toy that calls tools.",
    ),
    (("How are you?", "How do you do?"), "I am fine."),
)

UNKNOWN = (
    "Write a poem about {x}.",
    "Why is the sky {y}?",
    "Explain {x} to me.",
    "Translate {x} into French.",
    "What do you think of {x}?",
    "Tell me a joke.",
    "Tell me a story about {x}.",
    "Who will win the election?",
    "What is the meaning of life?",
    "Write a program that sorts {x}.",
    "Summarize this text: {x} is {y}.",
    "Is {x} {y}?",
    "Draw {x}.",
    "Sing a song.",
    "What happened in 1{d}{d}{d}?",
    "How do I cook {x}?",
    "Where do I look?",
    "Can you help me with {x}?",
    "The validator accepts a newline.",
    "Fix the bug in {x}.",
    "Does it work?",
    "And now?",
    "What is {x}?",
    "Who invented {x}?",
    "Should I buy {x}?",
    "Let us talk about {x}.",
    "I feel {y} today.",
    "When does {x} begin?",
    "Make me a plan for {x}.",
    "{x} {x} {x}",
    "{x} {y} {x} {y}?",
    "Describe {x}.",
    "Do you like {x}?",
    "Why?",
    "Really?",
    "What else?",
    "Do it.",
)
UNKNOWN_SUBJECTS = tuple(
    (
        "love, rain, music, bread, python, history, the sea, a dragon, the moon, war, soup, "
        "a house, quantum physics, football, the economy, numbers, dogs, recursion, my mother, "
        "a list, this file, the server, your day, winter, chess, art, a bird"
    ).split(", ")
)

# Text that means nothing here, for system prompts which say more than the protocol knows.
NOISE = tuple(
    """
    the a of to and in is for with you when not must that user task file answer always never
    before after code project use call write read test line each other then if result step only
    path work agent should can one this it on by from at be
    """.split()
)
